"""Translate a LLaMA-Factory configuration, including data sets from its dataset_info.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError, did_you_mean, reading
from finetune.importers import backends, images, preference_methods, trainer
from finetune.importers.translation import Translation, mapping, shown, text
from finetune.methods.sft import SFT
from finetune.planner.shapes.config_files import fields_of
from finetune.recipe import Model

INFO = "dataset_info.json"
SOURCE = ("hf_hub_url", "file_name", "subset", "split", "num_samples", "formatting", "columns")
SOURCE += ("ranking", "tags")
ATTENTION = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager", "auto": "sdpa"}
PLAIN_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
TAGS |= {"observation_tag": "observation", "function_tag": "function_call", "system_tag": "system"}
OPENAI_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
OPENAI_TAGS |= {"assistant_tag": "assistant", "system_tag": "system", "observation_tag": "tool"}

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
NOT_NEEDED = {
    "use `finetune train`": "do_train",
    "set by eval_data or eval_rows": "do_eval",
    "see `finetune eval`": "do_predict predict_with_generate",
    "kernels of the same computation are chosen by kernels":
        "use_v1_kernels bias_activation_fusion apply_rope_fusion moe_grouped_gemm",
    "the backend divides and communicates":
        "use_distributed_optimizer overlap_param_gather overlap_grad_reduce "
        "moe_token_dispatcher_type sequence_parallel",
    "the hub of Hugging Face has the same files": "use_modelscope_hub use_openmind_hub",
    "HF_HOME sets where files of the hub are cached": "cache_dir",
    "prepared rows are cached by their content": "overwrite_cache tokenized_path",
    "rows are prepared in parallel": "preprocessing_batch_size",
    "the number of processes is chosen automatically": "preprocessing_num_workers",
    "the fast tokenizer is used": "use_fast_tokenizer",
    "the backend places the model": "low_cpu_mem_usage",
    "recomputation gives equal gradients": "use_reentrant_gc",
    "padding is never trained": "ignore_pad_token_for_loss",
    "the loss is computed over all evaluation rows": "eval_on_each_dataset",
    "fused kernels are on (kernels)": "enable_liger_kernel",
    "model.activation_checkpointing=offload keeps inputs in host memory": "use_unsloth_gc",
    "see `finetune inspect`": "print_param_status",
    "data sets never run code": "trust_remote_code_dataset",

    "training writes final/, which transformers loads": "export_hf_on_finish",
}  # fmt: skip
NOT_NEEDED_IF_OFF = {
    "models are loaded with transformers": "use_unsloth",
    "for the available optimizers, see optim.name": "use_galore use_apollo use_badam",
    "train an adapter, or all weights": "use_llama_pro",
    "the attention of the model is used": "shift_attn",
    "model.add_tokens resizes the embeddings": "resize_vocab",
    "master weights are in fp32": "upcast_layernorm",
    "the loss is computed in fp32": "upcast_lmhead_output",
    "stream=true is a field of each source, and needs `first`": "streaming",
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
    _data(job, folder)
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
    job.say_all("not needed", NOT_NEEDED)
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
        job.set("method", method)
        job.say("stage", "translated", f"method={method}")
    kind = text(job.get("finetuning_type", "lora"))
    if kind not in ("lora", "full", "freeze"):
        raise FinetuneError(f"finetuning_type: {kind}: expected lora, full or freeze")


def _model(job: Translation) -> None:
    job.move("model_name_or_path", "model.name", text)
    revision = text(job.get("model_revision", "main"))
    if revision != "main":
        job.set("model.revision", revision)
    job.say("model_revision", "translated", f"model.revision={revision}")
    job.move("add_tokens", "model.add_tokens", _names)
    job.move("add_special_tokens", "model.add_tokens", _names)
    if mapping(job.get("kt_config")).get("kt_expert_weight_format", "bf16") == "bf16":
        for key in ("use_kt", "kt_config", "kt_cpu_activation"):
            job.say(key, "differs", "the same computation: the backend says where it is done")
    if text(job.get("mixed_precision")).startswith("bf16"):
        job.say("mixed_precision", "translated", "backends train in bf16 by default")
    named = text(job.get("flash_attn", "auto"))
    if named in ATTENTION:
        job.set("model.attention", ATTENTION[named])
        job.say("flash_attn", "translated", f"model.attention={ATTENTION[named]}")
    bits = shown(job.get("quantization_bit"))
    kinds = {"null": "none", "4": "nf4", "8": "int8"}
    if bits in kinds:
        job.set("model.quantization", kinds[bits])
        job.say("quantization_bit", "translated", f"model.quantization={kinds[bits]}")
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
    modules = _names(job.get("freeze_trainable_modules", "all"))
    patterns = [rf".*\.({numbers})\.{'' if each == 'all' else each}" for each in modules]
    patterns += [f".*{each}" for each in _names(job.get("freeze_extra_modules", [])) if each]
    job.set("model.trainable", patterns)
    for key in ("trainable_layers", "trainable_modules", "extra_modules"):
        job.say(f"freeze_{key}", "translated", f"model.trainable={shown(patterns)}")


def _adapter(job: Translation) -> None:
    if job.get("finetuning_type", "lora") != "lora":
        job.set("adapter", None)
        job.say("finetuning_type", "translated", "adapter=null")
        if job.get("finetuning_type") == "freeze":
            _frozen(job)
        for key in job.source:
            if key.startswith("lora") or key in ("use_dora", "use_rslora", "additional_target"):
                job.say(key, "not needed", "no adapter: all weights are trained")
        return
    job.say("finetuning_type", "translated", "adapter")
    if "finetuning_type" not in job.source:
        job.assumed.append("adapter: LoRA, the other toolkit's default")
    job.set("adapter.r", 8)
    job.move_all(ADAPTER)
    job.move("lora_target", "adapter.targets", _targets)
    job.move("additional_target", "adapter.modules_to_save", _names)
    if job.get("pissa_init"):
        turns = job.get("pissa_iter", 16)
        init = "pissa" if turns == -1 else f"pissa_niter_{turns}"
        job.set("adapter.init_lora_weights", init)
        for key in ("pissa_init", "pissa_iter"):
            job.say(key, "translated", f"adapter.init_lora_weights={init}")
    else:
        job.say_all("not needed", {"pissa_init is off": "pissa_init pissa_iter"})
    job.say("pissa_convert", "not needed", "an export of PiSSA is a normal LoRA adapter")
    job.move("adapter_name_or_path", "model.adapter", text)
    job.refuse_flag(
        "create_new_adapter", "training continues model.adapter, without a second adapter"
    )


def _names(value: object) -> list[str]:
    if isinstance(value, list):
        return [text(each) for each in value]
    return [name.strip() for name in text(value).split(",")]


def _targets(value: object) -> str | list[str]:
    return "all-linear" if value == "all" else _names(value)


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
    for key in ("train_on_prompt", "mask_history"):
        job.say(key, "translated", f"train_on={word}")


def _packing(job: Translation) -> None:
    neat = job.get("neat_packing", False)
    plain = job.get("packing", job.get("use_packed_sequences"))
    pack = bool(neat or (job.get("stage") == "pt" if plain is None else plain))
    job.set("batch.packing", pack)
    job.say("neat_packing", "translated", f"batch.packing={shown(pack)}")
    if plain and not neat:
        reason = "batch.packing=true, where documents do not attend to each other"
        job.say("packing", "differs", reason)
    else:
        job.say("packing", "translated", f"batch.packing={shown(pack)}")
    job.say("use_packed_sequences", "translated", f"batch.packing={shown(pack)}")


def _checkpointing(job: Translation) -> None:
    if "gradient_checkpointing" in job.source:
        trainer.checkpointing(job)
    else:
        off = bool(job.get("disable_gradient_checkpointing"))
        if job.get("recompute_granularity") in ("full", "selective"):
            job.say("recompute_granularity", "translated", "model.activation_checkpointing=true")
        job.set("model.activation_checkpointing", not off)
        if not off:
            reason = "model.activation_checkpointing=true: the other toolkit's default"
            job.assumed.append(reason)
    setting = shown(job.fields["model"]["activation_checkpointing"])
    reason = f"model.activation_checkpointing={setting}"
    job.say("disable_gradient_checkpointing", "translated", reason)


# --- data --------------------------------------------------------------------------------------


def _data(job: Translation, folder: Path) -> None:
    named = {"dataset": "data", "eval_dataset": "eval_data"}
    if not named.keys() & job.source.keys():
        return
    place = text(job.get("dataset_dir", "data"))
    if place.startswith("REMOTE:"):
        reason = f"{place}: download its files, and name their folder"
        for key in ("dataset_dir", *named):
            job.say(key, "no counterpart", reason)
        return
    described, home = _described(place, folder)
    job.say("dataset_dir", "translated", f"{home / INFO} is read")
    for key, path in named.items():
        if key not in job.source:
            continue
        names = _names(job.source[key])
        job.set(path, [_source(job, key, name, described, home) for name in names])
        job.say(key, "translated", f"{path}, {len(names)} sources")
        if "default_system" in job.source:
            system = text(job.source["default_system"])
            job.set(path, [source | {"system": system} for source in job.fields[path]])
            job.say("default_system", "translated", f"system={system}")
    job.held_out("val_size")
    _mixture(job)


def _described(place: str, folder: Path) -> tuple[Mapping[str, Any], Path]:
    """The data sets of dataset_info.json, relative to the file or to the working directory."""
    homes = [folder / place, folder, Path(place)]
    home = next((home for home in homes if (home / INFO).is_file()), None)
    if home is None:
        looked = ", ".join(dict.fromkeys(str(home / INFO) for home in homes))
        raise FinetuneError(
            f"dataset_dir: {place}: no {INFO} that describes the data sets was found "
            f"(looked for {looked})"
        )
    with reading(f"{home / INFO}: cannot be read"):
        read = json.loads((home / INFO).read_text(encoding="utf-8"))
    if not isinstance(read, dict):
        raise FinetuneError(f"{home / INFO}: expected an object, got {type(read).__name__}")
    return read, home


def _source(
    job: Translation, key: str, name: str, described: Mapping[str, Any], home: Path
) -> dict[str, Any]:
    values = described.get(name)
    if not isinstance(values, dict):
        hint = did_you_mean(name, described)
        raise FinetuneError(f"{key}: {name}: not described in {home / INFO}{hint}")
    at = f"{key}.{name}"
    preference_methods.refuse_unpaired(f"{key}: {name}", values, job.fields["method"])
    data: dict[str, Any] = {}
    hub = values.get("hf_hub_url")
    data["source"] = text(hub) if hub else str(home / text(values.get("file_name", name)))
    job.say(f"{at}.{'hf_hub_url' if hub else 'file_name'}", "translated", data["source"])
    for theirs in ("subset", "split"):
        if values.get(theirs):
            data[theirs] = text(values[theirs])
            job.say(f"{at}.{theirs}", "translated", f"{theirs}={data[theirs]}")
    if rows := values.get("num_samples"):
        data["first"] = rows
        reason = f"first={rows}: the first rows, not a random choice"
        job.say(f"{at}.num_samples", "differs", reason)
    _format(job, at, values, data)
    if "max_samples" in job.source:
        limit = job.source["max_samples"]
        both = [rows for rows in (limit, data.get("first")) if isinstance(rows, int)]
        data["first"] = min(both, default=limit)
        job.say("max_samples", "differs", f"first={limit} of each source: the first rows")
    others = {k: v for k, v in values.items() if v not in (None, False)}
    if hub:
        for other in ("ms_hub_url", "om_hub_url"):
            others.pop(other, None)  # the same data set on another hub
    job.say_values(at, others, SOURCE)
    return data


def _format(job: Translation, at: str, values: dict[str, Any], data: dict[str, Any]) -> None:
    kind = text(values.get("formatting", "alpaca"))
    columns = {k: text(v) for k, v in _object(values, "columns").items() if v is not None}
    keys = dict[str, str]()
    if kind == "alpaca" and job.get("stage") == "pt":
        data["format"], names = "text", {"prompt": "text"}
    elif kind == "alpaca":
        data["format"], names = "alpaca", {**PLAIN_ALPACA, "system": "system", "history": "history"}
    elif kind in ("sharegpt", "openai"):
        tags = {**TAGS, **(OPENAI_TAGS if kind == "openai" else {})}
        tags |= {k: text(v) for k, v in _object(values, "tags").items()}
        usual = "conversations" if kind == "sharegpt" else "messages"
        columns.setdefault("messages", usual)
        keys = _dialect(job, at, tags, columns["messages"], data)
        wanted = "conversations" if data["format"] == "sharegpt" else "messages"
        names = {"messages": wanted, "system": "system", "tools": "tools"}
    else:
        data["format"], names = kind, {}
        job.say(f"{at}.formatting", "no counterpart", f"{kind}: alpaca, sharegpt or openai")
    if values.get("ranking") and data["format"] in preference_methods.RANKED:
        data["format"] = preference_methods.RANKED[data["format"]]
        names |= {"chosen": "chosen", "rejected": "rejected"}
        names |= {"messages": "prompt"} if data["format"] == "preference" else {}
        job.say(f"{at}.ranking", "translated", f"format={data['format']}")
    elif job.fields["method"] == "kto":
        data["format"], names = "kto", names | {"kto_tag": "kto_tag"}
    job.say(f"{at}.formatting", "translated", f"format={data['format']}")
    if "images" in columns:
        names |= {"images": "images"}
        job.set("model.reads", ["image"])
    moved = {column: names[name] for name, column in columns.items() if name in names}
    moved = {column: name for column, name in moved.items() if column != name} | keys
    if moved:
        data["columns"] = moved
    for name, column in columns.items():
        if name in names:
            job.say(f"{at}.columns.{name}", "translated", f"{column} is {names[name]}")
        else:
            reason = f"{column}: a column that {job.fields['method']} cannot use"
            job.say(f"{at}.columns.{name}", "no counterpart", reason)


def _dialect(
    job: Translation, at: str, tags: dict[str, str], column: str, data: dict[str, Any]
) -> dict[str, str]:
    """Set the format for these tags, and roles of the source's own; returns keys to rename."""
    pair = (tags["role_tag"], tags["content_tag"])
    sharegpt = pair == ("from", "value")
    data["format"] = "sharegpt" if sharegpt else "messages"
    roles = {"user": {"human", "user"}, "assistant": {"gpt", "assistant"}, "system": {"system"}}
    roles |= {"observation": {"observation", "tool"}, "function": {"function_call"}}
    own = {"observation": "tool", "function": "assistant"}
    for tag, value in tags.items():
        role = tag.removesuffix("_tag")
        if role in roles and value not in roles[role]:
            data.setdefault("roles", {})[value] = own.get(role, role)
        outcome = "no counterpart" if role == "function" and value in data.get("roles", {}) else ""
        job.say(f"{at}.tags.{tag}", outcome or "translated", f"{value}")
    renamed = {} if sharegpt else dict(zip(pair, ("role", "content"), strict=True))
    return {f"{column}[].{theirs}": ours for theirs, ours in renamed.items() if theirs != ours}


def _object(values: dict[str, Any], key: str) -> dict[str, Any]:
    read = values.get(key) or {}
    if not isinstance(read, dict):
        raise FinetuneError(f"{INFO}: {key}: expected an object, got {type(read).__name__}")
    return read


def _mixture(job: Translation) -> None:
    strategy = text(job.get("mix_strategy", "concat"))
    if strategy == "concat":
        job.say("mix_strategy", "translated", "every row of every source once per epoch")
        job.say("interleave_probs", "not needed", "mix_strategy is concat")
        return
    shares = _names(job.get("interleave_probs", ""))
    for source, share in zip(job.fields.get("data", []), shares, strict=False):
        source["weight"] = share  # the recipe parses the number or rejects it
    reason = "weights of the sources; an epoch ends before a row would repeat"
    job.say("mix_strategy", "differs", reason)
    job.say("interleave_probs", "translated", reason)
