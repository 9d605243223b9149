"""Translate ms-swift's arguments: its command line, a YAML file, or the args.json of a run."""

import math
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.importers import backends, images, online_methods, preference_methods, trainer
from finetune.importers.command_line import COMMAND, PROGRAM
from finetune.importers.translation import Translation, listed, text

METHODS: dict[str, dict[str, str]] = {
    "sft": {"method": "sft"}, "pt": {"method": "pretrain"}, "rm": {"method": "reward"},
    "cpo": {"method": "cpo"}, "grpo": {"method": "grpo"}, "gkd": {"method": "distill"},
    "seq_cls": {"method": "classifier"}, **preference_methods.AXOLOTL,
}  # fmt: skip
FORMATS = {"sft": "messages", "pretrain": "messages", "kto": "kto", "grpo": "prompts"}
FORMATS |= {"distill": "messages", "classifier": "labelled"}
GRPO = {"num_generations": 8, "max_completion_length": 512, "temperature": 1.0, "epsilon": 0.2}
GRPO |= {"beta": 0.04, "loss_type": "grpo"}
"""ms-swift's defaults."""
MOST_LABELS = 100_000
SELF_COGNITION = {"model_name": "{{NAME}}", "model_author": "{{AUTHOR}}"}
"""Keys of the texts that the rows of modelscope/self-cognition leave open."""
OVERLONG = {"delete": "drop", "left": "truncate", "right": "truncate", "raise": "error"}
TRAINED = {"default": "assistant", "last_round": "completion", "all": "all"}
MOVED = {
    "model": "model.name", "model_revision": "model.revision", "adapters": "model.adapter",
    "max_length": "batch.max_length", "packing": "batch.packing",
    "per_device_eval_batch_size": "evaluation.micro_rows",
    "early_stop_interval": "evaluation.patience",
    "router_aux_loss_coef": "model.router_aux_loss", "label_smoothing": "label_smoothing",
    "rpo_alpha": "sft_weight", "cpo_alpha": "sft_weight", "simpo_gamma": "gamma",
    "desirable_weight": "desirable_weight", "undesirable_weight": "undesirable_weight",
}  # fmt: skip
ADAPTER = {
    "lora_rank": ("r", 8), "lora_alpha": ("alpha", 32), "lora_dropout": ("dropout", 0.05),
    "target_modules": ("targets", "all-linear"), "modules_to_save": ("modules_to_save", []),
    "use_rslora": ("use_rslora", False), "use_dora": ("use_dora", False),
}  # fmt: skip


def translate(job: Translation, folder: Path) -> None:
    """Fill the fields of a recipe from ms-swift's arguments.

    Raises:
        FinetuneError: no method here matches the kind of training.
    """
    command = text(job.get(COMMAND, "rlhf" if job.get("rlhf_type") else "sft"))
    kind = text(job.get("rlhf_type", "dpo")) if command == "rlhf" else command
    task = text(job.get("task_type", "causal_lm"))
    kind = "seq_cls" if (kind, task) == ("sft", "seq_cls") else kind
    if kind not in METHODS or task not in ("causal_lm", "seq_cls"):
        given = kind if kind not in METHODS else f"task_type: {task}"
        raise FinetuneError(
            f"{given}: sft (also of seq_cls), pt and rlhf_type of dpo, orpo, simpo, kto, cpo, rm, "
            "grpo and gkd are imported; write the recipe with `finetune init`"
        )
    for field, value in METHODS[kind].items():
        job.set(field, value)
    if kind == "simpo":
        for field, value in (("beta", 2.0), ("gamma", 1.0), ("sft_weight", 1.0)):
            job.assume(field, value)
    keys = f"{PROGRAM} {COMMAND} rlhf_type task_type"
    job.say(keys, "translated", f"method={job.fields['method']}")
    backends.translate(job, folder)
    tuned = text(job.get("tuner_type", job.get("train_type", "lora")))
    if tuned not in ("lora", "full"):
        raise FinetuneError(f"tuner_type: {tuned}: expected lora or full")
    trainer.attention(job, "attn_impl")
    trainer.dtype(job)
    images.swift(job)
    _adapter(job, tuned == "full")
    _data(job)
    job.set("optim.lr", 1e-5 if tuned == "full" else 1e-4)
    job.set("batch.max_length", 4096)
    if "max_length" not in job.source:
        job.assumed.append("batch.max_length=4096: the other toolkit has no limit")
    micro = job.get("per_device_train_batch_size", 1)
    if "gradient_accumulation_steps" not in job.source:
        steps = math.ceil(16 / micro / job.processes)
        job.source["gradient_accumulation_steps"] = steps
        job.assumed.append("batch.rows=16: the other toolkit's default")
    cut = text(job.get("truncation_strategy", "delete"))
    job.set("batch.overlong", OVERLONG.get(cut, "drop"))
    if cut in OVERLONG:
        outcome = "differs" if cut == "left" else "translated"
        job.say("truncation_strategy", outcome, f"batch.overlong={OVERLONG[cut]}")
    job.move_or_assume("weight_decay", "optim.weight_decay", 0.1)
    job.move_or_assume("max_grad_norm", "optim.max_grad_norm", 1.0)
    job.assume("optim.betas", [0.9, 0.95])
    job.held_out("split_dataset_ratio")
    job.set("model.activation_checkpointing", True)
    trainer.arguments(job, 1, "cosine")
    job.move_all(MOVED)
    tokens = [text(each) for each in listed(job.get("new_special_tokens", []))]
    if not any(each.endswith(".txt") for each in tokens):
        job.move("new_special_tokens", "model.add_tokens", listed)
    _method(job, kind)
    job.say("rpo_alpha cpo_alpha", "differs", preference_methods.BY_PAIR)
    loss = text(job.get("loss_scale", "default")).removesuffix("ignore_empty_think").rstrip("+")
    loss = loss or "default"
    if loss == "default" and kind == "grpo":
        job.say("loss_scale", "not needed", "the loss is that of the method")
    elif loss in TRAINED and job.fields["method"] == "sft":
        job.set("train_on", TRAINED[loss])
        told = f"train_on={TRAINED[loss]}"
        job.say("loss_scale", "translated", told)
        if loss != job.get("loss_scale"):
            job.say("loss_scale", "differs", f"{told}; empty thoughts are trained")
    job.say("streaming", "differs", "rows are prepared before training; or stream=true in a source")
    for key in ("template", "agent_template"):
        own = f"{text(job.get(key))}: the tokenizer's own template, or model.chat_template"
        job.say(key, "differs", own)
    job.move("enable_thinking", "model.chat_template_kwargs.enable_thinking")
    trainer.the_rest(job)
    unused = {
        "its names are those of swift/self-cognition, which is not among the data":
            "model_author model_name",
        "answers are sampled by `finetune eval`": "max_new_tokens temperature top_p top_k",
    }  # fmt: skip
    for reason, keys in unused.items():
        job.say([key for key in keys.split() if key not in job.outcomes], "not needed", reason)


def _method(job: Translation, kind: str) -> None:
    """Translate what only some methods have."""
    if kind == "grpo":
        online_methods.translate(job, kind, GRPO)
        return
    if kind == "dpo":
        preference_methods.losses_of_dpo(job)
    if kind in ("sft", "pt"):
        job.move("label_smoothing", "label_smoothing")
        if job.get("enable_dft_loss"):
            job.set("token_weight", "dft")
        job.say("enable_dft_loss", "translated", "token_weight")
    elif kind == "seq_cls":
        count = job.get("num_labels", 1)
        problem = "regression" if count == 1 else "single_label_classification"
        job.set("problem_type", job.get("problem_type", problem))
        if job.fields["problem_type"] != "regression":
            job.set("labels", [str(number) for number in range(min(int(count), MOST_LABELS))])
        told = f"problem_type={job.fields['problem_type']}, labels"
        job.say("num_labels problem_type", "translated", told)
        templated = job.get("use_chat_template", True)
        reason = "texts are classified as they are, conversations as the template renders them"
        job.say("use_chat_template", "differs" if templated else "translated", reason)
    elif kind == "gkd":
        _distillation(job)
    else:
        job.move("beta", "beta")


def _distillation(job: Translation) -> None:
    if "teacher_model" not in job.source:
        raise FinetuneError("teacher_model: none; a teacher runs here, not on a server: name it")
    job.move("teacher_model", "teacher.name", text)
    beta = job.get("beta", 0.5)
    loss = {0: "forward_kl", 1: "reverse_kl"}.get(beta, "jsd")
    job.put("loss_type", loss, "beta")
    if loss == "jsd":
        job.set("beta", beta)
    job.move_or_assume("temperature", "temperature", 0.9)
    job.move("sft_alpha", "ce_weight")
    if job.get("lmbda", 0.5) == 0 and not job.get("seq_kd"):
        job.say("lmbda", "translated", "the answers of the data are trained")
    else:
        job.source.setdefault("lmbda", 0.5)
        job.say("lmbda", "no counterpart", "answers of the data are trained, none of the student")


def _adapter(job: Translation, full: bool) -> None:
    job.say("tuner_type train_type", "translated", "adapter=null" if full else "adapter")
    bits = {4: "nf4", 8: "int8"}.get(job.get("quant_bits"), "none")
    job.set("model.quantization", bits)
    usual = text(job.get("quant_method", "bnb")) == "bnb"
    if usual:
        kinds = "quant_bits quant_method bnb_4bit_quant_type bnb_4bit_use_double_quant"
        job.say_all("translated", {f"model.quantization={bits}": kinds})
        job.say("bnb_4bit_compute_dtype", "not needed", "backends compute in bf16 by default")
    if full:
        job.no_adapter(*ADAPTER)
        return
    for key, (field, value) in ADAPTER.items():
        job.move_or_assume(key, f"adapter.{field}", value)
    if text(job.get("init_weights")).split("_")[0] in ("true", "gaussian", "pissa", "olora"):
        job.move("init_weights", "adapter.init_lora_weights")


def _data(job: Translation) -> None:
    name = FORMATS.get(job.fields["method"], "preference")
    for key, path in (("dataset", "data"), ("val_dataset", "eval_data")):
        sources, some = list[dict[str, Any]](), False
        for given in listed(job.get(key, [])):
            source, _, first = text(given).partition("#")
            source, _, subset = source.removeprefix("HF::").partition(":")
            sources.append({"source": source, "format": name})
            sources[-1] |= {"subset": subset} if subset else {}
            sources[-1] |= {"first": int(first)} if first.isdecimal() else {}
            some = some or first.isdecimal()
        for source in sources:
            if "system" in job.source:
                source["system"] = _system(job)
            if source["source"].endswith("/self-cognition"):
                _fill(job, source)
        job.set(path, sources)
        hub = not job.get("use_hf") and any(not Path(s["source"]).suffix for s in sources)
        told = "; ids are of ModelScope: name the data set on the hub of Hugging Face, or its files"
        chosen = "; the first rows are read, not a random choice" if some else ""
        told = f"{told if hub else ''}{chosen}"
        job.say(key, "differs" if told else "translated", f"{path}{told}")
    trainer.formats(job)


def _system(job: Translation) -> str:
    """The system prompt of rows without one: a text, or a file with it."""
    given = text(job.source["system"])
    named = given.endswith(".txt")
    if "$" in given or (named and not Path(given).is_file()):
        reason = f"{given}: not known here; set `system` of data"
        job.say("system", "no counterpart", reason)
        return given
    job.say("system", "translated", "system of each source")
    return Path(given).read_text(encoding="utf-8").strip() if named else given


def _fill(job: Translation, source: dict[str, Any]) -> None:
    """Read ms-swift's own data set as it does: texts and names that its rows leave open."""
    source |= {"source": "modelscope/self-cognition", "format": "question_answer"}
    source["columns"] = {"query": "question", "response": "answer", "tag": None}
    for key, place in SELF_COGNITION.items():
        names = [text(name) for name in listed(job.get(key, []))]
        if len(set(names)) == 1:
            source.setdefault("replace", {})[place] = names[0]
            job.say(key, "translated", f"replace={place}")
        elif names:
            job.say(key, "no counterpart", "one name for rows of each language: name one")
