"""Translate TRL's configurations, and transformers' TrainingArguments, by TRL's own names."""

from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.importers import backends, images, online_methods, preference_methods, trainer
from finetune.importers.command_line import COMMAND, PROGRAM
from finetune.importers.translation import Translation, listed, mapping, text

LRS = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "orpo": 1e-6, "cpo": 1e-6, "reward": 1e-4}
LRS |= {"grpo": 1e-6, "rloo": 1e-6}
"""TRL's default learning rates, by the methods that are imported."""
SCRIPTS = {"gspo": "grpo", "mpo": "dpo", "reward_modeling": "reward"}
"""Methods of TRL's scripts that are not named after it; `_vlm` at the end is for images."""
FORMATS = {"sft": "messages", "kto": "kto", "grpo": "prompts", "rloo": "prompts"}
"""Formats by method; those of others are pairs."""
MOVED = {
    "model_name_or_path": "model.name", "model_revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code", "max_length": "batch.max_length",
    "max_seq_length": "batch.max_length", "learning_rate": "optim.lr",
    "router_aux_loss_coef": "model.router_aux_loss",
    "per_device_eval_batch_size": "evaluation.micro_rows",
    "center_rewards_coefficient": "center_rewards_coefficient",
}  # fmt: skip
ADAPTER = {
    "lora_r": "adapter.r", "lora_alpha": "adapter.alpha", "lora_dropout": "adapter.dropout",
    "lora_modules_to_save": "adapter.modules_to_save", "use_rslora": "adapter.use_rslora",
    "use_dora": "adapter.use_dora", "lora_target_parameters": "adapter.target_parameters",
}  # fmt: skip
USUAL_ADAPTER = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
METHOD = {
    "beta": "beta", "label_smoothing": "label_smoothing", "rpo_alpha": "sft_weight",
    "ld_alpha": "ld_alpha",
    "desirable_weight": "desirable_weight", "undesirable_weight": "undesirable_weight",
    "simpo_gamma": "gamma", "cpo_alpha": "sft_weight",
}  # fmt: skip
"""Fields of a method, by their names in TRL."""
ONLINE: dict[str, dict[str, Any]] = {
    "grpo": {
        "num_generations": 8, "max_completion_length": 256, "epsilon": 0.2, "beta": 0.0,
        "loss_type": "dapo",
    },
    "rloo": {"num_generations": 2, "max_completion_length": 512, "epsilon": 0.2, "beta": 0.05},
}  # fmt: skip
"""TRL's defaults of online methods."""
OWN_LOSSES = {"cpo": "sigmoid", "kto": "kto", "orpo": "sigmoid"}


def translate(job: Translation, folder: Path) -> None:
    """Fill the fields of a recipe from TRL's options.

    Raises:
        FinetuneError: no method here matches the command.
    """
    script = text(job.get(COMMAND, "sft"))
    method = SCRIPTS.get(script.removesuffix("_vlm"), script.removesuffix("_vlm"))
    if method not in LRS:
        raise FinetuneError(
            f"{script}: {', '.join(LRS)} are imported; write the recipe with `finetune init`"
        )
    if COMMAND not in job.source:
        job.assumed.append("method=sft: for another, finetune import -- trl dpo --config FILE")
    job.put("method", method, f"{PROGRAM} {COMMAND}")
    backends.translate(job, folder)
    _model(job)
    if script.endswith("_vlm"):
        images.trl(job)
    _data(job, method)
    if method not in ONLINE:
        _loss(job, method)
    _adapter(job)
    job.set("batch.max_length", 1024)
    job.set("batch.overlong", "truncate")
    job.assumed.append("batch.overlong=truncate: the other toolkit's behavior")
    job.set("optim.lr", LRS[method])
    job.set("model.activation_checkpointing", True)
    trainer.arguments(job)
    job.move_all(MOVED)
    if method in ONLINE:
        online_methods.translate(job, method, ONLINE[method])
    job.say("dataset_streaming", "differs", "all rows are prepared before the first step")
    job.say("config", "not needed", "it names the file that is read")
    trainer.the_rest(job)


def translate_arguments(job: Translation, folder: Path) -> None:
    """Fill the fields of a recipe from a TrainingArguments JSON, which has no model and no data."""
    backends.translate(job, folder)
    job.set("optim.lr", 5e-5)
    job.assumed.append("model, data: the file has neither; set model.name and data")
    trainer.arguments(job)
    job.move_all(MOVED)
    trainer.the_rest(job)


def _model(job: Translation) -> None:
    job.move("eos_token", "model.special_tokens.eos_token", text)
    trainer.dtype(job)
    trainer.attention(job, "attn_implementation")
    four, eight = job.get("load_in_4bit"), job.get("load_in_8bit")
    kind = "nf4" if four else "int8" if eight else "none"
    job.put("model.quantization", kind, "load_in_4bit load_in_8bit")
    for key, same in (("bnb_4bit_quant_type", "nf4"), ("use_bnb_nested_quant", True)):
        is_same = not four or job.get(key) == same
        job.say(key, "translated" if is_same else "differs", "NF4 with double quantization")


def _data(job: Translation, method: str) -> None:
    name = FORMATS.get(method, "preference")
    column = job.get("dataset_text_field")
    if column is not None and method == "sft":
        name = "text"
    first = {"path": job.get("dataset_name"), "name": job.get("dataset_config")}
    first["split"] = job.get("dataset_train_split", "train")
    places = listed(job.get("datasets") or (first if first["path"] else []))
    sources = list[dict[str, Any]]()
    for place in places:
        values = {"source": place, "split": None} if isinstance(place, str) else mapping(place)
        found = {"source": text(values.get("path", values.get("id", ""))), "format": name}
        found |= {"subset": text(values["name"])} if values.get("name") else {}
        found |= {"split": text(values["split"])} if values.get("split") else {}
        if name == "text" and column != "text":
            found["columns"] = {text(column): "text"}
        sources.append(found)
    job.set("data", sources)
    held = job.get("dataset_test_split", "test")
    if job.get("eval_strategy", "no") not in ("no", False) and len(sources) == 1:
        job.set("eval_data", [sources[0] | {"split": text(held)}])
    keys = "dataset_name dataset_config dataset_train_split datasets"
    job.say(keys, "translated", f"data, with format={name}")
    job.say("dataset_text_field", "translated", f"format={name}")
    evaluated = "eval_data" if "eval_data" in job.fields else "nothing is evaluated"
    job.say("dataset_test_split", "translated", evaluated)
    trainer.formats(job)


def _loss(job: Translation, method: str) -> None:
    if method == "sft":
        completed = {each["format"] for each in job.fields["data"]} == {"prompt_completion"}
        only = job.get("assistant_only_loss") or job.get("completion_only_loss", completed)
        keys = "assistant_only_loss completion_only_loss"
        job.put("train_on", "assistant" if only else "all", keys)
        if not only:
            reason = "of a conversation or text; for prompt and completion set train_on=assistant"
            job.assumed.append(f"train_on=all: the other toolkit trains all tokens {reason}")
        if text(job.get("loss_type")) in ("nll", "chunked_nll", "dft"):
            weight = "dft" if job.get("loss_type") == "dft" else "none"
            job.put("token_weight", weight, "loss_type")
        job.move("packing", "batch.packing")
        kind = text(job.get("packing_strategy", "bfd"))
        outcome = "translated" if kind == "bfd" else "differs"
        job.say("packing_strategy", outcome, "documents are packed whole, best fit first")
        return
    if method == "dpo":
        preference_methods.losses_of_dpo(job)
    if job.get("loss_type") == OWN_LOSSES.get(method):
        job.say("loss_type", "translated", f"method={method}")
    fields = {"dpo": "beta label_smoothing rpo_alpha ld_alpha", "orpo": "beta", "reward": ""}
    fields |= {"kto": "beta desirable_weight undesirable_weight", "cpo": "beta cpo_alpha"}
    for key in fields[method].split():
        job.move(key, METHOD[key])
    reason = "batch.max_length bounds prompt and answer together"
    job.say("max_prompt_length max_completion_length", "differs", reason)


def _adapter(job: Translation) -> None:
    if not job.get("use_peft"):
        job.no_adapter("lora_")
        return
    job.say("use_peft", "translated", "adapter")
    for key, usual in USUAL_ADAPTER.items():
        job.move_or_assume(key, ADAPTER[key], usual)
    job.move_all(ADAPTER)
    if "lora_target_modules" in job.source:
        job.move("lora_target_modules", "adapter.targets")
    else:
        job.assume("adapter.targets", ["q_proj", "v_proj"])  # PEFT's for most architectures
