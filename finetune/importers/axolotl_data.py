"""Translate the data sources of an axolotl configuration."""

import re
from typing import Any

from finetune.data.chat.messages import REASONING
from finetune.errors import FinetuneError
from finetune.importers import preference_methods
from finetune.importers.translation import Outcome, Translation, listed, mapping, shown, text
from finetune.recipe.field_types import PART

TYPES: dict[str, tuple[Outcome, str]] = {
    "sharegpt": ("translated", "format=sharegpt"),
    "alpaca": ("differs",
        "format=alpaca: the chat template renders the prompt, not '### Instruction:'"),
    "oasst": ("differs", "format=oasst: the best-ranked path down each tree"),
}  # fmt: skip
"""Types of a source whose format has the same name, with their outcome."""


def sources(job: Translation) -> None:
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
        if not (isinstance(entries, list) and all(isinstance(each, dict) for each in entries)):
            raise FinetuneError(f"{key}: expected a list of sources, got {shown(entries)}")
        job.set(path, [_source(job, key, number, each) for number, each in enumerate(entries)])
        job.say(key, "translated", f"{path}, {len(entries)} sources")
    job.held_out("val_set_size")


def _source(job: Translation, key: str, number: int, entry: Any) -> dict[str, Any]:
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
    if job.fields.get("method") in (*preference_methods.AXOLOTL, "reward"):
        preference_methods.axolotl_format(job, at, values, data)
        if values.get("message_property_mappings") == {"role": "role", "content": "content"}:
            job.say(f"{at}.message_property_mappings", "translated", "same names")
        _roles(job, at, values.get("roles"), data)
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
        read = [f"{at}.{inner}" for inner in ("field", "text_column") if inner in values]
        job.say(read, "translated", f"columns={data.get('columns', {})}")
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
    names = {f"field_{name}": name for name in ("instruction", "input", "output", "system")}
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
    names = {"role": "role", "content": "content"}
    names |= {k: text(v) for k, v in mapping(values.get("message_property_mappings")).items()}
    for name in [*names, "training"]:
        key = f"message_field_{name}"
        if key in values and name != "training":
            names[name] = text(values[key])
            job.say(f"{at}.{key}", "translated", names[name])
    thinking = text(values.get("field_thinking", "thinking"))
    names |= {} if thinking in REASONING else {"reasoning_content": thinking}
    read = f"{at}.field_thinking {at}.template_thinking_key"
    job.say(read, "translated", "a message's reasoning, which the template writes")
    data["format"] = "messages"
    wanted = "messages"
    if (names["role"], names["content"]) == ("from", "value"):
        data["format"], wanted = "sharegpt", "conversations"
        names |= {"role": "role", "content": "content"}
    column = text(values.get("field_messages", "messages"))
    keys = {f"{column}[].{theirs}": ours for ours, theirs in names.items() if theirs != ours}
    columns = ({column: wanted} if column != wanted else {}) | keys
    if columns:
        data["columns"] = columns
    told = f"format={data['format']}" + (f", columns={shown(keys)}" if keys else "")
    job.say(f"{at}.message_property_mappings", "translated", told)
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
    _roles(job, at, values.get("roles"), data)


def _roles(job: Translation, at: str, roles: Any, data: dict[str, Any]) -> None:
    if isinstance(roles, dict):
        usual = {"user": {"human", "user"}, "assistant": {"gpt", "assistant"}}
        usual |= {"system": {"system"}, "tool": {"tool"}}
        own = {text(word): role for role, words in roles.items() for word in listed(words)
            if word not in usual.get(role, ())}  # fmt: skip
        if unknown := set(own.values()) - usual.keys():
            reason = f"{', '.join(sorted(unknown))}: expected {', '.join(usual)}"
            job.say(f"{at}.roles", "no counterpart", reason)
            return
        if own:
            data["roles"] = own
        job.say(f"{at}.roles", "translated", f"roles={shown(own)}" if own else "same names")
