"""Translate an axolotl configuration, with the names of axolotl's configuration reference."""

import re
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.importers import axolotl_data, backends, images, preference_methods, trainer
from finetune.importers.translation import Translation, listed, mapping, shown, text
from finetune.methods.sft import SFT
from finetune.planner.shapes.config_files import model_fields
from finetune.recipe import Model
from finetune.recipe.field_types import SPECIAL_TOKENS

ATTENTION = {
    "flash_attention": "flash_attention_2", "flex_attention": "flex_attention",
    "sdp_attention": "sdpa", "eager_attention": "eager",
}  # fmt: skip
OVERLONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}

MOVED = {
    "trust_remote_code": "model.trust_remote_code", "min_sample_len": "batch.min_length",
    "center_rewards_coefficient": "center_rewards_coefficient",
    "sample_packing": "batch.packing", "eval_batch_size": "evaluation.micro_rows",
    "loss_watchdog_threshold": "optim.max_loss", "loss_watchdog_patience": "optim.max_loss_steps",
    "noisy_embedding_alpha": "model.neftune_alpha", "neftune_noise_alpha": "model.neftune_alpha",
    "adam_eps": "optim.eps", "cosine_min_lr_ratio": "optim.min_lr",
    "early_stopping_patience": "evaluation.patience",
}  # fmt: skip
"""Fields with the same meaning."""
ADAPTER = {
    "lora_r": "adapter.r", "lora_alpha": "adapter.alpha", "lora_dropout": "adapter.dropout",
    "lora_modules_to_save": "adapter.modules_to_save", "peft_use_dora": "adapter.use_dora",
    "lora_target_parameters": "adapter.target_parameters",
    "peft_use_rslora": "adapter.use_rslora", "peft_init_lora_weights": "adapter.init_lora_weights",
}  # fmt: skip
"""Fields with the same meaning, of an adapter."""


def translate(job: Translation, folder: Path) -> None:
    """Fill the fields of a recipe; `folder` is the folder of the file, for relative paths.

    Raises:
        FinetuneError: no method here matches the kind of training.
    """
    backends.translate(job, folder)
    _method(job)
    _model(job)
    _adapter(job)
    images.axolotl(job)
    axolotl_data.sources(job)
    _template(job)
    job.set("batch.max_length", 512)
    job.move("sequence_len", "batch.max_length")
    _overlong(job)
    micro, total = job.get("micro_batch_size", 1), job.get("batch_size")
    if "gradient_accumulation_steps" not in job.source and total is not None:
        job.source["gradient_accumulation_steps"] = total // micro
    job.say("batch_size", "translated", "batch.rows, with micro_batch_size and accumulation")
    trainer.batch(job, "micro_batch_size", 1)
    trainer.length(job, "num_epochs", 1)
    trainer.token_loss(job)
    trainer.schedule(job, "lr_scheduler", "cosine", 0.03)
    job.move_all(MOVED)
    trainer.evaluation_and_saving(job)
    epochs = job.get("num_epochs", 1)
    job.per_epoch("evals_per_epoch", "evaluation.every", epochs)
    job.per_epoch("saves_per_epoch", "saving.every", epochs)
    trainer.without_evaluation(job)
    trainer.precision(job)
    trainer.checkpointing(job)
    if job.get("dataset_exact_deduplication"):
        job.put("duplicates", "drop", "dataset_exact_deduplication")
    outcome = "differs" if job.get("streaming") else "not needed"
    job.say("streaming", outcome, "rows are prepared before training; or stream=true in a source")
    _trackers(job)
    _plugins(job)
    _special_tokens(job)
    trainer.the_rest(job)


def _method(job: Translation) -> None:
    known = ", ".join(preference_methods.AXOLOTL)
    if job.get("reward_model"):
        job.put("method", "reward", "reward_model")
        job.say("num_labels", "not needed", "a reward is one number")
    for key in ("rl", "process_reward_model"):
        name = text(job.get(key)).lower()
        if key == "rl" and name in preference_methods.AXOLOTL:
            preference_methods.method(job, key, name, preference_methods.AXOLOTL[name])
        elif job.get(key):
            raise FinetuneError(
                f"{key}: {shown(job.source[key])}: supervised fine-tuning, pretraining and rl of "
                f"{known} are imported; write the recipe with `finetune init`"
            )
        else:
            job.say(key, "not needed", "supervised fine-tuning")
    if str(job.get("adapter") or "lora") not in ("lora", "qlora"):
        raise FinetuneError(
            f"adapter: {shown(job.source['adapter'])}: expected lora or qlora; leave it "
            "out to train all weights"
        )


def _model(job: Translation) -> None:
    job.move("base_model", "model.name", text)
    names = listed(job.get("unfrozen_parameters"))
    if any(re.search(r"\[\d*:\d*\]$", text(name)) for name in names):
        reason = "rows of a table: name it without [a:b], or see adapter.trainable_token_indices"
        job.say("unfrozen_parameters", "no counterpart", reason)
    elif not job.get("adapter"):
        job.move("unfrozen_parameters", "model.trainable", listed)
    else:
        job.say("unfrozen_parameters", "differs", "the adapter alone is trained")
    job.move("revision_of_model", "model.revision", text)
    job.move("tokenizer_config", "model.tokenizer", text)
    reason = "the tokenizer of transformers, with its chat template"
    job.say("tokenizer_use_mistral_common", "differs", reason)
    _config(job)
    if job.get("base_model_config", job.get("base_model")) == job.get("base_model"):
        job.say("base_model_config", "not needed", "config.json is in the folder of the weights")
    kind = text(job.get("model_type"))
    causal = kind.endswith("ForCausalLM")
    read = "read from config.json"
    used = f"{kind}: the architecture in config.json is used"
    job.say("model_type", *(("not needed", read) if causal else ("differs", used)))
    for key, attention in ATTENTION.items():
        if job.get(key):
            job.put("model.attention", attention, key)
    job.say_off(" ".join(ATTENTION))
    for key in ("attn_implementation", "attn_impl"):
        if key in job.source:
            trainer.attention(job, key)
    if job.get("xformers_attention"):
        job.say("xformers_attention", "differs", "model.attention=sdpa computes the same")


def _config(job: Translation) -> None:
    """Translate fields of config.json that a configuration replaces."""
    key = "overrides_of_model_config" if "model_config" not in job.source else "model_config"
    given = mapping(job.get(key))
    factor = given.get("router_aux_loss_coef")
    if given.keys() <= {"output_router_logits", "router_aux_loss_coef"}:
        if given.get("output_router_logits") is False:
            job.put("model.router_aux_loss", "none", key)
        elif given.get("output_router_logits"):
            job.put("model.router_aux_loss", "on" if factor is None else factor, key)
    if job.get("reinit_weights"):
        named = SFT(Model(text(job.get("base_model"))))
        if config := model_fields(named):
            job.fields["model"] |= {"config": config, "tokenizer": job.fields["model"].pop("name")}
            job.say("reinit_weights", "translated", "model.config")
        else:
            reason = "set model.config to config.json of the model, which is not on this machine"
            job.say("reinit_weights", "no counterpart", reason)
    dequantised = mapping(job.get("model_quantization_config_kwargs")).get("dequantize")
    if job.get("model_quantization_config") in DEQUANTISED and dequantised:
        keys = "model_quantization_config model_quantization_config_kwargs"
        job.say(keys, "translated", "such weights are read as bf16")
    quantised = mapping(job.get("bnb_config_kwargs"))
    if quantised and all(SAME_NF4.get(name) == value for name, value in quantised.items()):
        job.say("bnb_config_kwargs", "translated", "NF4 with double quantization")


DEQUANTISED = ("Mxfp4Config", "FineGrainedFP8Config")
SAME_NF4 = {"bnb_4bit_use_double_quant": True, "bnb_4bit_quant_type": "nf4"}


def _adapter(job: Translation) -> None:
    adapter = job.get("adapter")
    in_4bit = job.get("load_in_4bit") or adapter == "qlora"
    quantization = "nf4" if in_4bit else "int8" if job.get("load_in_8bit") else "none"
    job.put("model.quantization", quantization, "load_in_4bit load_in_8bit")
    if adapter is None:
        job.no_adapter("lora_", "peft_")
        return
    job.say("adapter", "translated", f"adapter, model.quantization={quantization}")
    job.set("adapter.r", 8)
    job.move_all(ADAPTER)
    if job.get("lora_target_linear"):
        job.put("adapter.targets", "all-linear", "lora_target_linear")
        reason = "adapter.targets=all-linear includes these names if they are linear layers"
        job.say("lora_target_modules", "differs", reason)
    else:
        job.say_off("lora_target_linear")
        job.move("lora_target_modules", "adapter.targets")
    job.move("lora_model_dir", "model.adapter", text)
    job.move("peft_layers_to_transform", "adapter.layers_to_transform", listed)


def _overlong(job: Translation) -> None:
    key = "excess_length_strategy"
    if key not in job.source:
        job.assume("batch.overlong", "drop")
    elif (word := text(job.source[key])) in OVERLONG:
        job.put("batch.overlong", OVERLONG[word], key)


def _template(job: Translation) -> None:
    key = "chat_template"
    name = text(job.get(key, "tokenizer_default"))
    if name in ("chatml", "tokenizer_default"):
        job.put("model.chat_template", None if name == "tokenizer_default" else name, key)
    else:
        reason = f"{name}: the tokenizer's own template; or name a file in model.chat_template"
        job.say(key, "differs", reason)
    if job.get("train_on_inputs"):
        job.set("train_on", "all")
    word = job.fields.get("train_on", "assistant")
    job.say("train_on_inputs", "translated", f"train_on={word}")


KERNELS = (
    "cut_cross_entropy.CutCrossEntropyPlugin", "liger.LigerPlugin", "kernels.KernelsPlugin",
    "expert_parallel.ExpertParallelPlugin", "swanlab.SwanLabPlugin",
)  # fmt: skip
"""Plugins that compute the same faster, divide it, or record it."""


def _plugins(job: Translation) -> None:
    """Plugins that replace kernels are not needed; the others change more."""
    names = [
        text(name).removeprefix("axolotl.integrations.") for name in listed(job.get("plugins"))
    ]
    others = [name for name in names if name not in KERNELS and name != "None"]
    if others:
        job.say("plugins", "no counterpart", f"{', '.join(others)}: nothing corresponds to it")
    else:
        reason = "fused kernels and a chunked loss are on (kernels), the backend divides the model"
        job.say("plugins", "not needed", reason)


def _special_tokens(job: Translation) -> None:
    given = mapping(job.get("special_tokens")) | mapping(job.get("tokens"))
    if given and "tokens" in job.source:
        job.say("tokens", "translated", "model.special_tokens")
    else:
        job.move("tokens", "model.add_tokens", lambda tokens: tokens or [])
    others = {name: token for name, token in given.items() if name not in SPECIAL_TOKENS and token}
    tokens = {
        name: text(token) for name, token in given.items() if name in SPECIAL_TOKENS and token
    }
    if tokens:
        job.set("model.special_tokens", tokens)
    job.say("special_tokens", "translated", f"model.special_tokens={shown(tokens)}")
    if others:
        job.say("special_tokens", "no counterpart", f"{', '.join(others)}: see model.add_tokens")


def _trackers(job: Translation) -> None:
    keys = {"tensorboard": "use_tensorboard", "wandb": "wandb_project", "mlflow": "mlflow_"}
    found = [
        name
        for name, start in keys.items()
        if any(key.startswith(start) and value for key, value in job.source.items())
    ]
    job.put("trackers", found, "use_tensorboard wandb_project")
    reason = "weights in GPTQ are frozen: name a model that is not quantized"
    job.refuse_flags({reason: "gptq"})
    job.say("use_comet", "not needed", "trackers are tensorboard, wandb, mlflow and trackio")
