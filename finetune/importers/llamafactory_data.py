"""Data sets of LLaMA-Factory's `dataset_info.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError, did_you_mean, reading
from finetune.importers import preference_methods
from finetune.importers.translation import Translation, names_in, text

INFO = "dataset_info.json"
SOURCE = ("hf_hub_url", "file_name", "subset", "split", "num_samples", "formatting", "columns")
SOURCE += ("ranking", "tags")
PLAIN_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
TAGS |= {"observation_tag": "observation", "function_tag": "function_call", "system_tag": "system"}
OPENAI_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
OPENAI_TAGS |= {"assistant_tag": "assistant", "system_tag": "system", "observation_tag": "tool"}


def sources(job: Translation, folder: Path) -> None:
    """Translate the data sets that `dataset_info.json` describes to sources."""
    named = {"dataset": "data", "eval_dataset": "eval_data"}
    if not named.keys() & job.source.keys():
        return
    place = text(job.get("dataset_dir", "data"))
    if place.startswith("REMOTE:"):
        reason = f"{place}: download its files, and name their folder"
        job.say(["dataset_dir", *named], "no counterpart", reason)
        return
    described, home = _described(place, folder)
    job.say("dataset_dir", "translated", f"{home / INFO} is read")
    for key, path in named.items():
        if key not in job.source:
            continue
        names = names_in(job.source[key])
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
        return json.loads((home / INFO).read_text(encoding="utf-8")), home


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
    columns = {k: text(v) for k, v in values.get("columns", {}).items() if v is not None}
    keys = dict[str, str]()
    if kind == "alpaca" and job.get("stage") == "pt":
        data["format"], names = "text", {"prompt": "text"}
    elif kind == "alpaca":
        data["format"], names = "alpaca", {**PLAIN_ALPACA, "system": "system", "history": "history"}
    elif kind in ("sharegpt", "openai"):
        tags = {**TAGS, **(OPENAI_TAGS if kind == "openai" else {})}
        tags |= {k: text(v) for k, v in values.get("tags", {}).items()}
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


def _mixture(job: Translation) -> None:
    strategy = text(job.get("mix_strategy", "concat"))
    if strategy == "concat":
        job.say("mix_strategy", "translated", "every row of every source once per epoch")
        job.say("interleave_probs", "not needed", "mix_strategy is concat")
        return
    shares = names_in(job.get("interleave_probs", ""))
    for source, share in zip(job.fields.get("data", []), shares, strict=False):
        source["weight"] = share  # the recipe parses the number or rejects it
    reason = "weights of the sources; an epoch ends before a row would repeat"
    job.say("mix_strategy", "differs", reason)
    job.say("interleave_probs", "translated", reason)
