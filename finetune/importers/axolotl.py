"""Translate an axolotl configuration, with the names of axolotl's configuration reference."""

import re
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.importers import preference_methods, trainer
from finetune.importers.translation import Outcome, Translation, listed, mapping, shown, text
from finetune.recipe.sections import PART, SPECIAL_TOKENS

ATTENTION = {
    "flash_attention": "flash_attention_2", "flex_attention": "flex_attention",
    "sdp_attention": "sdpa", "eager_attention": "eager",
}  # fmt: skip
HUB_KERNELS = ("kernels-community/vllm-flash-attn3", "kernels-community/flash-attn2")
OVERLONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}

MOVED = {
    "trust_remote_code": "model.trust_remote_code", 
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
NOT_NEEDED = {
    "read from the tokenizer's files": "tokenizer_type",
    "the fast tokenizer is used": "tokenizer_use_fast",
    "read from config.json":
        "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model "
        "is_falcon_derived_model",
    "prepared rows are cached by their content": "dataset_prepared_path",
    "the number of processes is chosen automatically": "dataset_processes dataset_num_proc",
    "rows are memory-mapped": "dataset_keep_in_memory",
    "padding does not affect training": "pad_to_sequence_len",
    "evaluation uses the same batch layout as training": "eval_sample_packing",
    "packs are counted, not estimated": "sample_packing_eff_est",
    "rows are always shuffled": "shuffle_merged_datasets",
    "all rows are packed together": "sample_packing_group_size",
    "a pack has no limit of documents": "sample_packing_bin_size",
    "tokens are counted": "total_num_tokens",
    "batch.padding_free=auto concatenates rows": "batch_flattening",
    "PEFT sets it for each layer": "lora_fan_in_fan_out",
    "`finetune export --merge` merges on the CPU": "lora_on_cpu",
    "kernels.norm=fused": "flash_attn_rms_norm",
    "kernels.activation=fused": "flash_attn_fuse_mlp",
    "the backend places the model": "device_map max_memory",
    "kernels.pointwise=auto compiles where it is faster; kernels.blocks=compiled compiles complete "
    "blocks": "torch_compile",
    "kernels.pointwise=auto compiles where it is faster": "torch_compile_backend",
    "see `finetune inspect`": "debug",
    "the end of a turn is that of the chat template, and is trained": "eot_tokens",
    "fused kernels are on (kernels)":
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel use_kernels liger_rope liger_rms_norm "
        "liger_layer_norm liger_glu_activation liger_rms_norm_gated",
    "kernels.head=chunked never materializes all logits":
        "flash_attn_cross_entropy cut_cross_entropy liger_fused_linear_cross_entropy "
        "liger_cross_entropy",
    "rows of the embedding are added for added tokens only": "resize_token_embeddings_to_32x",
    "weights are read from mapped files": "low_cpu_mem_usage",
    "the hub's own login is used": "hf_use_auth_token",
    "blocks of attention are compiled by PyTorch's own setting": "flex_attn_compile_kwargs",
    "weights are loaded to where the backend needs them": "experimental_skip_move_to_device",
    "experts run as grouped products": "experts_implementation use_scattermoe use_sonicmoe",
    "every key is always checked": "strict",
}  # fmt: skip


TYPES: dict[str, tuple[Outcome, str]] = {
    "sharegpt": ("translated", "format=sharegpt"),
    "alpaca": ("differs",
        "format=alpaca: the chat template renders the prompt, not '### Instruction:'"),
    "oasst": ("differs", "format=oasst: the best-ranked path down each tree"),
}  # fmt: skip
"""Types of a source whose format has the same name, with their outcome."""


def translate(job: Translation, folder: Path) -> None:
    """Fill the fields of a recipe; `folder` is the folder of the file, for relative paths.

    Raises:
        FinetuneError: no method here matches the kind of training.
    """
    trainer.backend(job, folder)
    _method(job)
    _model(job)
    _adapter(job)
    _data(job)
    _template(job)
    job.set("batch.max_length", 512)
    job.move("sequence_len", "batch.max_length")
    _overlong(job)
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
    _trackers(job)
    _plugins(job)
    _special_tokens(job)
    job.say_all("not needed", NOT_NEEDED)
    trainer.the_rest(job)


def _method(job: Translation) -> None:
    known = ", ".join(preference_methods.AXOLOTL)
    for key in ("rl", "reward_model", "process_reward_model"):
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
    job.move("revision_of_model", "model.revision", text)
    job.move("tokenizer_config", "model.tokenizer", text)
    if job.get("base_model_config", job.get("base_model")) == job.get("base_model"):
        job.say("base_model_config", "not needed", "config.json is in the folder of the weights")
    kind = text(job.get("model_type"))
    causal = kind.endswith("ForCausalLM")
    read = "read from config.json"
    used = f"{kind}: the architecture in config.json is used"
    job.say("model_type", *(("not needed", read) if causal else ("differs", used)))
    for key, attention in ATTENTION.items():
        if job.get(key):
            job.set("model.attention", attention)
            job.say(key, "translated", f"model.attention={attention}")
        else:
            job.say(key, "not needed", "it is off")
    named = text(job.get("attn_implementation", job.get("attn_impl")))
    for key in ("attn_implementation", "attn_impl"):
        if named in ATTENTION.values():
            job.move(key, "model.attention")
        elif named in ("xformers", *HUB_KERNELS):
            ours = "sdpa" if named == "xformers" else "flash_attention_2"
            job.set("model.attention", ours)
            job.say(key, "differs", f"model.attention={ours} computes the same")
    if job.get("xformers_attention"):
        job.say("xformers_attention", "differs", "model.attention=sdpa computes the same")


def _adapter(job: Translation) -> None:
    adapter = job.get("adapter")
    in_4bit = job.get("load_in_4bit") or adapter == "qlora"
    quantization = "nf4" if in_4bit else "int8" if job.get("load_in_8bit") else "none"
    job.set("model.quantization", quantization)
    for key in ("load_in_4bit", "load_in_8bit"):
        job.say(key, "translated", f"model.quantization={quantization}")
    if adapter is None:
        for key in job.source:
            if key.startswith(("lora_", "peft_")):
                job.say(key, "not needed", "no adapter: all weights are trained")
        job.set("adapter", None)
        return
    job.say("adapter", "translated", f"adapter, model.quantization={quantization}")
    job.set("adapter.r", 8)
    job.move_all(ADAPTER)
    if job.get("lora_target_linear"):
        job.set("adapter.targets", "all-linear")
        job.say("lora_target_linear", "translated", "adapter.targets=all-linear")
        reason = "adapter.targets=all-linear includes these names if they are linear layers"
        job.say("lora_target_modules", "differs", reason)
    else:
        job.say("lora_target_linear", "not needed", "it is off")
        job.move("lora_target_modules", "adapter.targets")
    job.move("lora_model_dir", "model.adapter", text)
    job.move("peft_layers_to_transform", "adapter.layers_to_transform", listed)


def _overlong(job: Translation) -> None:
    word = text(job.get("excess_length_strategy", "drop"))
    job.set("batch.overlong", OVERLONG.get(word, "drop"))
    if word in OVERLONG:
        job.say("excess_length_strategy", "translated", f"batch.overlong={OVERLONG[word]}")
    if "excess_length_strategy" not in job.source:
        job.assumed.append("batch.overlong=drop: the other toolkit's default")


def _template(job: Translation) -> None:
    key = "chat_template"
    name = text(job.get(key, "tokenizer_default"))
    if name in ("chatml", "tokenizer_default"):
        job.set("model.chat_template", None if name == "tokenizer_default" else name)
        job.say(key, "translated", f"model.chat_template={'null' if name != 'chatml' else name}")
    else:
        reason = f"{name}: the tokenizer's own template; or name a file in model.chat_template"
        job.say(key, "differs", reason)
    if job.get("train_on_inputs"):
        job.set("train_on", "all")
    word = job.fields.get("train_on", "assistant")
    job.say("train_on_inputs", "translated", f"train_on={word}")


KERNELS = ("cut_cross_entropy.CutCrossEntropyPlugin", "liger.LigerPlugin", "kernels.KernelsPlugin")


def _plugins(job: Translation) -> None:
    """Plugins that replace kernels are not needed; the others change more."""
    names = [
        text(name).removeprefix("axolotl.integrations.") for name in listed(job.get("plugins"))
    ]
    others = [name for name in names if name not in KERNELS and name != "None"]
    if others:
        job.say("plugins", "no counterpart", f"{', '.join(others)}: nothing corresponds to it")
    else:
        job.say("plugins", "not needed", "fused kernels and a chunked loss are on (kernels)")


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
    job.set("trackers", found)
    for key in ("use_tensorboard", "wandb_project"):
        job.say(key, "translated", f"trackers={found}")
    job.refuse_flag("gptq", "weights in GPTQ are frozen: name a model that is not quantized")
    job.refuse_flag("use_comet", "trackers are tensorboard, wandb, mlflow and trackio")


# --- data --------------------------------------------------------------------------------------


def _data(job: Translation) -> None:
    pretraining = job.get("pretraining_dataset")
    if pretraining is not None:
        job.set("method", "pretrain")
        job.say("pretraining_dataset", "translated", "method=pretrain, data")
        places = [e if isinstance(e, dict) else {"path": e} for e in listed(pretraining)]
        job.set("data", [_source(job, "pretraining_dataset", i, p) for i, p in enumerate(places)])
    for key, path in (("datasets", "data"), ("test_datasets", "eval_data")):
        entries = job.get(key)
        if entries is None:
            continue
        if not isinstance(entries, list):
            raise FinetuneError(f"{key}: expected a list, got {shown(entries)}")
        job.set(path, [_source(job, key, number, each) for number, each in enumerate(entries)])
        job.say(key, "translated", f"{path}, {len(entries)} sources")
    job.held_out("val_set_size")


def _source(job: Translation, key: str, number: int, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise FinetuneError(f"{key}.{number}: expected keys and values, got {shown(entry)}")
    values: dict[str, Any] = {k: v for k, v in entry.items() if v is not None}
    at = f"{key}.{number}"
    data: dict[str, Any] = {"source": text(values.get("path", ""))}
    job.say(f"{at}.path", "translated", "source")
    if "data_files" in values:
        first, *others = listed(values["data_files"]) or [""]
        data["source"] = text(first)
        if not others:
            job.say(f"{at}.data_files", "translated", f"source={shown(first)}")
        else:
            reason = f"only {shown(first)}: name each file as a source, or their folder"
            job.say(f"{at}.data_files", "no counterpart", reason)
    for theirs, ours in (("name", "subset"), ("revision", "revision")):
        if theirs in values:
            data[ours] = text(values[theirs])
            job.say(f"{at}.{theirs}", "translated", f"{ours}={shown(values[theirs])}")
    if "split" in values:
        _split(job, f"{at}.split", text(values["split"]), data)
    if "ds_type" in values:
        job.say(f"{at}.ds_type", "not needed", "derived from the file extension")
    _format(job, at, values, data)
    job.say_values(at, values, ("path", "data_files", "name", "revision", "split", "ds_type"))
    return data


def _split(job: Translation, at: str, split: str, data: dict[str, Any]) -> None:
    data["split"] = split
    if PART.fullmatch(split) is None:
        data["split"] = re.split(r"\W", split)[0] or "train"
        reason = f"{split}: a split, or a part such as train[:20%]; name each split as a source"
        job.say(at, "no counterpart", reason)
        return
    job.say(at, "translated", f"split={split}")


def _format(job: Translation, at: str, values: dict[str, Any], data: dict[str, Any]) -> None:
    if job.fields.get("method") in preference_methods.AXOLOTL:
        preference_methods.axolotl_format(job, at, values, data)
        return
    kind = values.get("type", "completion" if at.startswith("pretraining") else None)
    if isinstance(kind, dict):
        _own_prompt(job, at, kind, data)
        return
    word = text(kind).split(".")[0].split(":")[0]
    key = f"{at}.type"
    if word == "chat_template":
        _conversation(job, at, values, data)
        job.say(key, "translated", f"format={data['format']}")
    elif word in ("completion", "pretrain"):
        data["format"] = "text"
        job.set("train_on", "all")
        column = values.get("field", values.get("text_column", "text"))
        if column != "text":
            data["columns"] = {text(column): "text"}
        job.say(key, "translated", "format=text, train_on=all")
        for inner in ("field", "text_column"):
            if inner in values:
                job.say(f"{at}.{inner}", "translated", f"columns={data.get('columns', {})}")
    elif word in TYPES:
        data["format"] = word
        job.say(key, *TYPES[word])
        if word == "sharegpt" and "conversation" in values:
            reason = "the tokenizer's own template; or name one in model.chat_template"
            job.say(f"{at}.conversation", "differs", reason)
    else:
        data["format"] = text(kind)
        reason = f"{shown(kind)}: unknown format; `finetune plan` lists the formats"
        job.say(key, "no counterpart", reason)


def _own_prompt(job: Translation, at: str, kind: dict[str, Any], data: dict[str, Any]) -> None:
    """Translate a custom prompt: its columns have a counterpart, its text does not."""
    data["format"] = "alpaca"
    names = {"field_instruction": "instruction", "field_input": "input", "field_output": "output"}
    names["field_system"] = "system"
    columns = {text(kind[key]): name for key, name in names.items() if kind.get(key)}
    columns = {column: name for column, name in columns.items() if column != name}
    if columns:
        data["columns"] = columns
    reason = "format=alpaca with its columns: the chat template renders the prompt"
    job.say(f"{at}.type", "differs", reason)
    for key in kind:
        if key not in names and kind[key] is not None:
            job.say(f"{at}.type.{key}", "no counterpart", "the chat template renders the prompt")


def _conversation(job: Translation, at: str, values: dict[str, Any], data: dict[str, Any]) -> None:
    renamed = values.get("message_property_mappings")
    names = {"role": "role", "content": "content"}
    names |= {k: text(v) for k, v in mapping(renamed).items()}
    for name in names:
        key = f"message_field_{name}"
        if key in values:
            names[name] = text(values[key])
            job.say(f"{at}.{key}", "translated", names[name])
    pair = (names["role"], names["content"])
    data["format"] = "sharegpt" if pair == ("from", "value") else "messages"
    if pair not in (("from", "value"), ("role", "content")) or len(names) > 2:
        reason = f"{shown(names)}: keys are role and content, or from and value: rename them"
        job.say(f"{at}.message_property_mappings", "no counterpart", reason)
    elif renamed is not None:
        job.say(f"{at}.message_property_mappings", "translated", f"format={data['format']}")
    column = text(values.get("field_messages", "messages"))
    wanted = "conversations" if data["format"] == "sharegpt" else "messages"
    if column != wanted:
        data["columns"] = {column: wanted}
    if "field_messages" in values:
        job.say(f"{at}.field_messages", "translated", f"column {wanted}")
    if values.get("field_system", "system") != "system":
        data.setdefault("columns", {})[text(values["field_system"])] = "system"
    if "field_system" in values:
        job.say(f"{at}.field_system", "translated", "column system")
    same: dict[str, tuple[Any, ...]] = {
        "roles_to_train": (["assistant"], ["gpt", "assistant"], ["gpt"], ["assistant", "gpt"]),
        "train_on_eos": ("turn",),
        "train_on_eot": ("turn",),
        "chat_template": ("tokenizer_default", job.get("chat_template", "tokenizer_default")),
        "message_field_training": ("train", "training", "train_turn", "trainable", "weight"),
        "drop_system_message": (False,),
    }
    for key, known in same.items():
        if key in values:
            replaced = f"{shown(values[key])}: replaced by {known[0]}"
            is_same = values[key] in known
            told = ("translated", "same behavior") if is_same else ("differs", replaced)
            job.say(f"{at}.{key}", *told)
    roles = values.get("roles")
    if isinstance(roles, dict):
        usual = {"user": {"human", "user"}, "assistant": {"gpt", "assistant"}}
        usual |= {"system": {"system"}, "tool": {"tool"}}
        others = [r for role, words in roles.items() for r in words if r not in usual.get(role, ())]
        reason = f"{', '.join(others)}: rename these roles in the data" if others else "same names"
        job.say(f"{at}.roles", "no counterpart" if others else "translated", reason)
