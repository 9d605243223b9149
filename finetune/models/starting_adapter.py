"""Find the adapter that training starts from, and take its configuration into the recipe.

This module does not import torch, so a recipe that contradicts its adapter is refused quickly.
"""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune.checkpoints.base_weights import codes_in
from finetune.errors import FinetuneError, reading, refuse
from finetune.models import starting_run
from finetune.planner.shapes.config_files import refuse_other_labels
from finetune.recipe import LoRA, Recipe
from finetune.runs.manifest import sha256
from finetune.runs.run import Run, read_object, write_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TASKS = ("CAUSAL_LM", "SEQ_CLS")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")

TAKEN = {
    "r": "r", "lora_alpha": "alpha", "target_modules": "targets", "use_dora": "use_dora",
    "target_parameters": "target_parameters", "modules_to_save": "modules_to_save",
    "trainable_token_indices": "trainable_token_indices", "use_rslora": "use_rslora",
    "exclude_modules": "exclude_modules", "layers_to_transform": "layers_to_transform",
    "rank_pattern": "rank_pattern", "alpha_pattern": "alpha_pattern",
}  # fmt: skip
"""Fields of PEFT's file that a recipe takes, with their names in the recipe."""

WITHOUT_EFFECT = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "lora_dropout", "fan_in_fan_out", "init_lora_weights", "layers_pattern",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "runtime_config", "ensure_weight_tying",
}  # fmt: skip
"""Fields of PEFT's file that do not affect the output of an adapter with given weights."""

SCORE_HEADS = ("classifier", "score")
"""Names that PEFT 0.21 adds to `modules_to_save` of every adapter for sequence classification."""

CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that change the base weights."""

MERGE = "merge it into its base and train on the result: finetune export RUN --merge --to FOLDER"


def find(name: str) -> Path:
    """Find the folder of an adapter in PEFT's format, from a folder, a run or a hub id.

    Raises:
        FinetuneError: no adapter is found.
    """
    folder = Path(name)
    if not os.path.isdir(folder):
        if HUB_NAME.fullmatch(name) is None:
            raise FinetuneError(
                f"model.adapter: no such folder: {name}; give a run, a folder with {CONFIG}, or a "
                "hub id"
            )
        return _download(name)
    run = Run(folder)
    newest = run.newest() if run.recipe.is_file() else None
    places = [folder, run.final, folder / "adapter"]
    if newest is not None:
        places.append(run.checkpoint(run.best_step() or newest) / "adapter")
    for place in places:
        if (place / CONFIG).is_file():
            return place
    whole = next((place for place in places if (place / "config.json").is_file()), None)
    if whole is not None:
        raise FinetuneError(
            f"model.adapter: {name} has a complete model, not an adapter; train it further with "
            f"model.name={whole}"
        )
    missing = "its run has no checkpoint yet" if run.recipe.is_file() else f"it has no {CONFIG}"
    raise FinetuneError(f"model.adapter: {name} has no adapter: {missing}")


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    wanted = ["adapter_*", "tokenizer*", "*.json", "*.jinja", "*.model", "vocab*", "merges*"]
    with reading(f"model.adapter: '{name}' is not a folder here and cannot be downloaded"):
        found = snapshot_download(repository, revision=revision or None, allow_patterns=wanted)
    if not (Path(found) / CONFIG).is_file():
        raise FinetuneError(f"model.adapter: the repository '{name}' has no {CONFIG}")
    return Path(found)


def tokenizer_of(name: str) -> Path | None:
    """The folder of the tokenizer that an adapter was trained with; None if it has none."""
    folder = find(name)
    for place in (folder, folder.parent / "tokenizer"):
        if (place / "tokenizer_config.json").is_file():
            return place
    return None


def read_config(folder: Path, tasks: tuple[str, ...] = TASKS) -> dict[str, Any]:
    """Read the fields of an adapter's configuration file.

    Args:
        folder: Folder of the adapter.
        tasks: Accepted task types, as PEFT names them; a file without a task type is accepted.

    Raises:
        FinetuneError: the file cannot be read, or the adapter cannot be trained here.
    """
    path = folder / CONFIG
    with reading(f"{path}: cannot be read"):
        fields = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise FinetuneError(f"{path}: expected keys and values, got {type(fields).__name__}")
    problems = unfit(fields, tasks)
    if not (folder / WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        instead = "; adapter_model.bin is a pickle, which is not read: save it as safetensors"
        problems.append(f"it has no {WEIGHTS}{instead if pickled else ''}")
    codes = codes_in([folder / WEIGHTS])
    if codes is not None:
        problems.append(f"{codes}, whose scales PEFT does not read; save it in floating point")
    refuse(f"model.adapter: {folder}: {problem}" for problem in problems)
    return fields


def unfit(fields: dict[str, Any], tasks: tuple[str, ...]) -> list[str]:
    """model.adapter: not a LoRA for this task, or one that changed its base; merge it into it."""
    if fields.get("peft_type") != "LORA":
        return [f"peft_type is {fields.get('peft_type')!r}, expected 'LORA'; {MERGE}"]
    problems: list[str] = []
    if fields.get("task_type") not in (None, *tasks):
        expected = " or ".join(map(repr, tasks))
        problems.append(f"task_type is {fields['task_type']!r}, expected {expected}")
    init = str(fields.get("init_lora_weights", True)).lower()
    if init.startswith(CHANGES_BASE):
        problems.append(
            f"its initialisation '{init}' changed the base weights, which a new start would not "
            "have; name the run's final/ or an export of it (finetune export RUN --to FOLDER), "
            "where it is a plain LoRA, convert another toolkit's with PEFT's "
            "path_initial_model_for_weight_conversion, or merge it"
        )
    known = {field.name for field in dataclasses.fields(LoRA)}
    for key, value in fields.items():
        is_known = key in WITHOUT_EFFECT or TAKEN.get(key) in known
        if not is_known and value not in (None, False, 0, "", "none", [], {}):
            problems.append(f"{key} is {value!r}, which no recipe can train; {MERGE}")
    if fields.get("layers_pattern") and fields.get("layers_to_transform") is not None:
        problems.append(f"layers_pattern is {fields['layers_pattern']!r}; {MERGE}")
    return problems


def section_of(fields: dict[str, Any]) -> LoRA:
    """Convert the fields of an adapter's file to the recipe's section `adapter`.

    Raises:
        FinetuneError: with every field whose value has a wrong type.
    """
    known = {field.name for field in dataclasses.fields(LoRA)}
    taken = {
        ours: _plain(fields[theirs])
        for theirs, ours in TAKEN.items()
        if ours in known and fields.get(theirs) not in (None, [], {})
    }
    if fields.get("task_type") == "SEQ_CLS":  # PEFT adds the names of score heads to each
        others = (n for n in taken.pop("modules_to_save", ()) if n not in SCORE_HEADS)
        taken["modules_to_save"] = tuple(dict.fromkeys(others))
    layers = taken.get("layers_to_transform")
    if isinstance(layers, int):
        taken["layers_to_transform"] = (layers,)
    try:
        return LoRA(**taken)
    except ValidationError as error:
        wrong = [f"{each['loc'][0]}: {each['msg']}" for each in error.errors(include_url=False)]
        problems = [f"model.adapter: {CONFIG}: adapter.{each}" for each in dict.fromkeys(wrong)]
        raise FinetuneError(*problems) from None


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(sorted(value, key=str))
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def complete_adapter(recipe: Recipe) -> Recipe:
    """Complete the section `adapter` of a recipe from the adapter that training starts from.

    Fields that the recipe leaves at their defaults are taken from the adapter, except dropout. If
    `model.name` is a finished run, its result is the model.

    Raises:
        FinetuneError: no adapter is found, or a field of the recipe contradicts it.
    """
    recipe = starting_run.resolved(recipe)
    name = recipe.model.adapter
    if name is None:
        return recipe
    folder = find(name)
    fields = read_config(folder, (recipe.head.task_type,))
    if recipe.head.scored:
        config = read_object(folder / "config.json")
        refuse_other_labels(config, recipe.head, f"model.adapter: '{name}'")
    if recipe.model.name is None:
        raise FinetuneError(
            f"model.name: none, and model.adapter={name} was trained on "
            f"{fields.get('base_model_name_or_path')}; name its base"
        )
    taken, given = section_of(fields), recipe.adapter or LoRA()
    refuse(contradictions(given, taken, folder))
    return dataclasses.replace(recipe, adapter=dataclasses.replace(taken, dropout=given.dropout))


def contradictions(given: LoRA, taken: LoRA, folder: Path) -> Iterator[str]:
    """adapter: another value than that of model.adapter; leave the field out, or adapter=null."""
    default = LoRA()
    for field in dataclasses.fields(LoRA):
        mine, theirs = getattr(given, field.name), getattr(taken, field.name)
        if field.name == "dropout" or mine in (getattr(default, field.name), theirs):
            continue
        if field.name == "alpha" and mine == taken.scale_alpha:
            continue
        if isinstance(mine, tuple) and sorted(map(str, mine)) == sorted(map(str, _items(theirs))):
            continue
        if field.name == "targets" and _same_modules(mine, theirs):
            continue
        if field.name == "trainable_token_indices" and _ids(mine, folder) <= _ids(theirs, folder):
            continue
        yield (
            f"adapter.{field.name}: {_shown(mine)}, but the adapter of model.adapter has "
            f"{_shown(theirs)}; leave the field out, or set adapter=null to take all of them from "
            f"{folder}"
        )


def _items(value: Any) -> Any:
    return value if isinstance(value, tuple) else ()


def _same_modules(short: Any, full: Any) -> bool:
    """Whether short names select exactly the modules that PEFT lists in full."""
    if not isinstance(short, tuple) or not isinstance(full, tuple):
        return False
    pairs = [(a, b) for a in short for b in full if a == b or b.endswith(f".{a}")]
    return {a for a, _ in pairs} == set(short) and {b for _, b in pairs} == set(full)


def _ids(tokens: Any, folder: Path) -> set[Any]:
    """Convert tokens to ids if the tokenizer next to an adapter added them; keep other tokens."""
    groups = tokens.values() if isinstance(tokens, dict) else (tokens,)
    added: dict[str, int] = {}
    for place in (folder, folder.parent / "tokenizer"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            read = json.loads((place / "tokenizer.json").read_text(encoding="utf-8"))
            added |= {each["content"]: each["id"] for each in read["added_tokens"]}
    return {added.get(each, each) for group in groups for each in group}


def _shown(value: Any) -> str:
    return json.dumps(value) if value not in ((), None) else "none"


def identity(name: str) -> dict[str, Any]:
    """Folder, hash and base model of an adapter, for the record of a run."""
    folder = find(name)
    fields = read_config(folder)
    return {
        "folder": str(folder),
        "sha256": sha256(folder / WEIGHTS),
        "base_model": fields.get("base_model_name_or_path"),
    }


def record(now: dict[str, Any], recipe: Recipe, run: Run, is_new: bool) -> str:
    """Record the `identity` of the adapter that a run starts from; returns a note about it.

    Raises:
        FinetuneError: a run that is resumed started from another adapter.
    """
    path = run.starting_adapter
    if is_new or not path.is_file():
        write_json(path, now)
    elif json.loads(path.read_text(encoding="utf-8"))["sha256"] != now["sha256"]:
        raise FinetuneError(
            f"model.adapter: {now['folder']} is not the adapter that {run.root} started from; put "
            "it back, or choose another --output"
        )
    base, name = str(now["base_model"]), str(recipe.model.name)
    message = f"model.adapter: training starts from the adapter in {now['folder']}"
    if base == name or Path(base).resolve() == Path(name).resolve():
        return message
    return f"{message}, which was trained on {base}, not on {name}"
