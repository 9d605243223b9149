"""Translate an axolotl configuration, with the names of axolotl's configuration reference."""

import re
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.importers import preferences, trainer
from finetune.importers.translation import Translation, listed, mapping, shown, text

ATTENTION = {
    "flash_attention": "flash_attention_2", "flex_attention": "flex_attention",
    "sdp_attention": "sdpa", "eager_attention": "eager",
}  # fmt: skip
OVERLONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}

MOVED = {
    "trust_remote_code": "model.trust_remote_code", "tokens": "model.add_tokens",
    "sample_packing": "batch.packing", "eval_batch_size": "evaluation.micro_rows",
    "cosine_min_lr_ratio": "optim.min_lr", "early_stopping_patience": "evaluation.patience",
}  # fmt: skip
"""Fields with the same meaning."""
ADAPTER = {
    "lora_r": "adapter.r", "lora_alpha": "adapter.alpha", "lora_dropout": "adapter.dropout",
    "lora_modules_to_save": "adapter.modules_to_save", "peft_use_dora": "adapter.use_dora",
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
    "all rows are packed together": "sample_packing_group_size",
    "a pack has no limit of documents": "sample_packing_bin_size",
    "tokens are counted": "total_num_tokens",
    "batch.padding_free=auto concatenates rows": "batch_flattening",
    "PEFT sets it for each layer": "lora_fan_in_fan_out",
    "fused kernels are on (kernels)": "lora_mlp_kernel lora_qkv_kernel lora_o_kernel",
    "`finetune export --merge` merges on the CPU": "lora_on_cpu",
    "kernels.head=chunked never materializes all logits": "flash_attn_cross_entropy",
    "kernels.norm=fused": "flash_attn_rms_norm",
    "kernels.activation=fused": "flash_attn_fuse_mlp",
    "the backend places the model": "device_map max_memory",
    "kernels.pointwise=auto compiles where it is faster; kernels.blocks=compiled compiles complete "
    "blocks": "torch_compile",
    "kernels.pointwise=auto compiles where it is faster": "torch_compile_backend",
    "see `finetune inspect`": "debug",
    "every key is always checked": "strict",
}  # fmt: skip
NO_COUNTERPART = {
    "the tokenizer's special tokens are used; model.add_tokens adds others": "special_tokens",
    "on_nonfinite handles NaN; a high loss does not stop a run":
        "loss_watchdog_threshold loss_watchdog_patience",
}  # fmt: skip


def translate(job: Translation, folder: Path) -> None:
    """Fill the fields of a recipe; `folder` is the folder of the file, for relative paths.

    Raises:
        FinetuneError: no method here matches the kind of training.
    """
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
    trainer.schedule(job, "lr_scheduler", "cosine", 0.03)
    job.move_all(MOVED)
    trainer.evaluation_and_saving(job)
    for key, path in (("evals_per_epoch", "evaluation.every"), ("saves_per_epoch", "saving.every")):
        reason = f"per epoch: set {path} to a number of steps, see `finetune plan`"
        outcome = "not needed" if job.get(key) == 0 else "no counterpart"
        job.say(key, outcome, f"{shown(job.get(key))} {reason}")
    trainer.precision(job)
    trainer.checkpointing(job)
    _trackers(job)
    trainer.backend(job, folder)
    job.say_all("not needed", NOT_NEEDED)
    job.say_all("no counterpart", NO_COUNTERPART)
    trainer.the_rest(job)


def _method(job: Translation) -> None:
    known = ", ".join(preferences.AXOLOTL)
    for key in ("rl", "reward_model", "process_reward_model"):
        name = text(job.get(key)).lower()
        if key == "rl" and name in preferences.AXOLOTL:
            preferences.method(job, key, name, preferences.AXOLOTL[name])
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
    match = re.fullmatch(r"(\w+)(?:\[:(\d+)\])?", split)
    if match is None:
        job.say(at, "no counterpart", f"{split}: a split's name, or [:ROWS] of it; set first=ROWS")
        data["split"] = re.split(r"\W", split)[0] or "train"
        return
    data["split"] = match[1]
    if match[2]:
        data["first"] = int(match[2])
    job.say(at, "translated", f"split={match[1]}" + (f", first={match[2]}" if match[2] else ""))


def _format(job: Translation, at: str, values: dict[str, Any], data: dict[str, Any]) -> None:
    if job.fields.get("method") in preferences.AXOLOTL:
        preferences.axolotl_format(job, at, values, data)
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
    elif word == "sharegpt":
        data["format"] = "sharegpt"
        job.say(key, "translated", "format=sharegpt")
        if "conversation" in values:
            reason = "the tokenizer's own template; or name one in model.chat_template"
            job.say(f"{at}.conversation", "differs", reason)
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
    elif word == "alpaca":
        data["format"] = "alpaca"
        reason = "format=alpaca: the chat template renders the prompt, not '### Instruction:'"
        job.say(key, "differs", reason)
    elif word == "oasst":
        data["format"] = "oasst"
        job.say(key, "differs", "format=oasst: the best-ranked path down each tree")
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
