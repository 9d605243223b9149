"""Translate a LLaMA-Factory configuration, including data sets from its dataset_info.json."""

from pathlib import Path

from finetune.errors import FinetuneError
from finetune.importers import backends, images, llamafactory_data, preference_methods, trainer
from finetune.importers.translation import Translation, mapping, names_in, shown, text
from finetune.methods.sft import SFT
from finetune.planner.shapes.config_files import fields_of
from finetune.recipe import Model

ATTENTION = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager", "auto": "sdpa"}
MOVED = {
    "neftune_noise_alpha": "model.neftune_alpha",
    "trust_remote_code": "model.trust_remote_code", "moe_aux_loss_coef": "model.router_aux_loss",
    "per_device_eval_batch_size": "evaluation.micro_rows",
}  # fmt: skip
"""Fields with the same meaning."""
ADAPTER = {
    "lora_rank": "adapter.r", "lora_alpha": "adapter.alpha", "lora_dropout": "adapter.dropout",
    "use_dora": "adapter.use_dora", "use_rslora": "adapter.use_rslora",
}  # fmt: skip
"""Fields with the same meaning, of an adapter."""
NOT_NEEDED_IF_OFF = {
    "models are loaded with transformers": "use_unsloth",
    "for the available optimizers, see optim.name": "use_galore use_apollo use_badam",
    "train an adapter, or all weights": "use_llama_pro",
    "the attention of the model is used": "shift_attn",
    "model.add_tokens resizes the embeddings": "resize_vocab",
    "master weights are in fp32": "upcast_layernorm",
    "the loss is computed in fp32": "upcast_lmhead_output",
    "stream=true is a field of each source": "streaming",
    "see `finetune inspect`": "split_special_tokens",
}


def translate(job: Translation, folder: Path) -> None:
    """Fill the fields of a recipe; `folder` is the folder of the file, for relative paths.

    Raises:
        FinetuneError: no method here matches the kind of training, or a data set is not
            described.
    """
    backends.translate(job, folder)
    _method(job)
    _model(job)
    _adapter(job)
    llamafactory_data.sources(job, folder)
    images.llamafactory(job)
    _template(job)
    job.set("batch.max_length", 2048)
    job.set("batch.overlong", "truncate")
    job.move("cutoff_len", "batch.max_length")
    job.assumed.append("batch.overlong=truncate: the other toolkit's behavior")
    _packing(job)
    trainer.batch(job, "per_device_train_batch_size", 8)
    trainer.length(job, "num_train_epochs", 3)
    job.move_or_assume("learning_rate", "optim.lr", 5e-5)
    job.move_all(MOVED)
    trainer.token_loss(job)
    trainer.schedule(job, "lr_scheduler_type", "linear", 0.0)
    trainer.evaluation_and_saving(job)
    trainer.without_evaluation(job)
    trainer.precision(job)
    _checkpointing(job)
    trainer.trackers(job)
    job.refuse_flags(NOT_NEEDED_IF_OFF)
    trainer.the_rest(job)


def _method(job: Translation) -> None:
    stage = text(job.get("stage", "sft"))
    loss = text(job.get("pref_loss", "sigmoid"))
    if stage not in ("sft", "pt", "rm", "dpo", "kto"):
        raise FinetuneError(
            f"stage: {stage}: sft, pt, rm, dpo and kto are imported; write the recipe with "
            "`finetune init`"
        )
    if stage == "rm":
        job.set("method", "reward")
        job.say("stage", "differs", "method=reward, whose head has no bias and no dropout")
    elif stage == "kto":
        preference_methods.method(job, "stage", stage, {"method": "kto"})
    elif stage == "dpo" and loss in preference_methods.LLAMA_FACTORY:
        preference_methods.method(job, "stage", loss, preference_methods.LLAMA_FACTORY[loss])
        job.say("pref_loss", "translated", job.outcomes.get("stage", ("", "method=dpo"))[1])
    elif stage == "dpo":
        known = ", ".join(preference_methods.LLAMA_FACTORY)
        raise FinetuneError(f"pref_loss: {loss}: expected one of {known}")
    else:
        method = "pretrain" if stage == "pt" else "sft"
        job.put("method", method, "stage")
    kind = text(job.get("finetuning_type", "lora"))
    if kind not in ("lora", "oft", "full", "freeze"):
        raise FinetuneError(f"finetuning_type: {kind}: expected lora, oft, full or freeze")


def _model(job: Translation) -> None:
    job.move("model_name_or_path", "model.name", text)
    job.move(
        "model_revision", "model.revision", lambda name: None if name == "main" else text(name)
    )
    job.move("add_tokens", "model.add_tokens", names_in)
    job.move("add_special_tokens", "model.add_tokens", names_in)
    if mapping(job.get("kt_config")).get("kt_expert_weight_format", "bf16") == "bf16":
        keys = "use_kt kt_config kt_cpu_activation"
        job.say(keys, "differs", "the same computation: the backend says where it is done")
    if text(job.get("mixed_precision")).startswith("bf16"):
        job.say("mixed_precision", "translated", trainer.IN_BF16)
    named = text(job.get("flash_attn", "auto"))
    if named in ATTENTION:
        job.put("model.attention", ATTENTION[named], "flash_attn")
    bits = shown(job.get("quantization_bit"))
    kinds = {"null": "none", "4": "nf4", "8": "int8"}
    if bits in kinds:
        job.put("model.quantization", kinds[bits], "quantization_bit")
    else:
        job.say("quantization_bit", "no counterpart", f"{bits}: expected 4 (nf4) or 8 (int8)")
    same = {
        "quantization_method": ("bnb", "bitsandbytes"),
        "quantization_type": ("nf4",),
        "double_quantization": (True,),
    }
    for key, known in same.items():
        given = job.get(key)
        reason = f"{shown(given)}: bitsandbytes NF4 with double quantization"
        job.say(key, "translated" if given in known else "differs", reason)


def _frozen(job: Translation) -> None:
    """Translate the number of trained layers, the last or the first, to `model.trainable`."""
    count = job.get("freeze_trainable_layers", 2)
    named = SFT(Model(text(job.get("model_name_or_path"))))
    layers = fields_of(named).get("num_hidden_layers")
    if not isinstance(count, int) or not isinstance(layers, int):
        reason = "the model's number of layers is not known here: set model.trainable"
        job.say("finetuning_type", "no counterpart", reason)
        return
    chosen = range(layers)[-count:] if count > 0 else range(layers)[:-count]
    numbers = "|".join(map(str, chosen))
    modules = names_in(job.get("freeze_trainable_modules", "all"))
    patterns = [rf".*\.({numbers})\.{'' if each == 'all' else each}" for each in modules]
    patterns += [f".*{each}" for each in names_in(job.get("freeze_extra_modules", [])) if each]
    keys = "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules"
    job.put("model.trainable", patterns, keys)


def _oft(job: Translation) -> None:
    """Translate orthogonal fine-tuning; `oft_rank` 0 leaves the size of a block."""
    rank = job.get("oft_rank", 0)
    size = {"r": rank, "oft_block_size": 0} if rank else {"oft_block_size": 32}
    job.set("adapter", {"kind": "oft", "arguments": size})
    job.say("finetuning_type", "translated", "adapter.kind=oft")
    job.say("oft_rank", "translated", "adapter.arguments.r")
    if not rank:
        job.move("oft_block_size", "adapter.arguments.oft_block_size")
    job.move("oft_target", "adapter.targets", _targets)
    job.move("additional_target", "adapter.modules_to_save", names_in)


def _adapter(job: Translation) -> None:
    if job.get("finetuning_type") == "oft":
        _oft(job)
        return
    if job.get("finetuning_type", "lora") != "lora":
        job.set("adapter", None)
        job.say("finetuning_type", "translated", "adapter=null")
        if job.get("finetuning_type") == "freeze":
            _frozen(job)
        job.no_adapter("lora")
        return
    job.say("finetuning_type", "translated", "adapter")
    if "finetuning_type" not in job.source:
        job.assumed.append("adapter: LoRA, the other toolkit's default")
    job.set("adapter.r", 8)
    job.move_all(ADAPTER)
    job.move("lora_target", "adapter.targets", _targets)
    job.move("additional_target", "adapter.modules_to_save", names_in)
    if job.get("pissa_init"):
        turns = job.get("pissa_iter", 16)
        init = "pissa" if turns == -1 else f"pissa_niter_{turns}"
        job.put("adapter.init_lora_weights", init, "pissa_init pissa_iter")
    job.say_off("pissa_init pissa_iter")
    job.say("pissa_convert", "not needed", "an export of PiSSA is a normal LoRA adapter")
    job.move("adapter_name_or_path", "model.adapter", text)
    reason = "training continues model.adapter, without a second adapter"
    job.refuse_flags({reason: "create_new_adapter"})


def _targets(value: object) -> str | list[str]:
    return "all-linear" if value == "all" else names_in(value)


def _template(job: Translation) -> None:
    name = text(job.get("template"))
    if name == "chatml":
        job.move("template", "model.chat_template")
    else:
        reason = f"{name}: the tokenizer's own template; or name one in model.chat_template"
        job.say("template", "differs", reason)
    if job.get("train_on_prompt"):
        job.set("train_on", "all")
    elif job.get("mask_history"):
        job.set("train_on", "completion")
    word = job.fields.get("train_on", "assistant")
    job.say("train_on_prompt mask_history", "translated", f"train_on={word}")


def _packing(job: Translation) -> None:
    neat = job.get("neat_packing", False)
    plain = job.get("packing", job.get("use_packed_sequences"))
    pack = bool(neat or (job.get("stage") == "pt" if plain is None else plain))
    job.put("batch.packing", pack, "neat_packing packing use_packed_sequences")
    if plain and not neat:
        reason = "batch.packing=true, where documents do not attend to each other"
        job.say("packing", "differs", reason)


def _checkpointing(job: Translation) -> None:
    if "gradient_checkpointing" in job.source:
        trainer.checkpointing(job)
    else:
        off = bool(job.get("disable_gradient_checkpointing"))
        ours = "model.activation_checkpointing"
        if job.get("recompute_granularity") in ("full", "selective"):
            job.say("recompute_granularity", "translated", f"{ours}=true")
        if not off:
            job.assume(ours, True)
        job.put(ours, not off, "disable_gradient_checkpointing")
