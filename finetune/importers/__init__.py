"""Convert the configuration of another toolkit to a recipe, and report what differs."""

import sys
from pathlib import Path
from typing import Any, cast

from finetune import catalog
from finetune.errors import FinetuneError
from finetune.importers import axolotl, llamafactory, recipe_file
from finetune.importers.translation import Outcome, Translation
from finetune.process.yaml_text import read_yaml
from finetune.recipe import Recipe

KINDS = {
    "base_model": ("axolotl", axolotl.translate),
    "model_name_or_path": ("LLaMA-Factory", llamafactory.translate),
}
"""The key that identifies a file, with its toolkit and translator."""

ORDER: tuple[Outcome, ...] = ("no counterpart", "differs", "translated", "not needed")


def import_recipe(path: Path, processes: int = 1) -> tuple[Recipe, Translation, str]:
    """The recipe of a file, the outcome of each of its keys, and the name of the toolkit.

    Args:
        path: YAML file of axolotl or LLaMA-Factory.
        processes: number of processes that the file is meant for, which it does not contain.

    Raises:
        FinetuneError: the file is of neither kind, or no recipe can express it.
    """
    try:
        read = read_yaml(path.read_text(encoding="utf-8"), catalog.ExactNumbers)
    except OSError as error:
        raise FinetuneError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise FinetuneError(f"{path}: cannot be read as YAML: {error}") from None
    if not isinstance(read, dict):
        raise FinetuneError(f"{path}: expected keys and values, got {type(read).__name__}")
    source = {str(key): value for key, value in cast(dict[Any, Any], read).items()}
    found = [key for key in KINDS if key in source]
    if len(found) != 1:
        names = " nor ".join(f"{key} (of {kind})" for key, (kind, _) in KINDS.items())
        raise FinetuneError(
            f"{path}: not a configuration that can be imported: it has neither {names}"
        )
    kind, translate = KINDS[found[0]]
    job = Translation({k: v for k, v in source.items() if v is not None}, processes)
    try:
        translate(job, path.parent)
    except FinetuneError as error:
        raise FinetuneError(*(f"{path}: {problem}" for problem in error.problems)) from None
    job.finish()
    fields = {"method": "sft", **job.fields}
    return catalog.from_fields(fields, str(path)), job, kind


def explain(job: Translation) -> list[str]:
    """Lines with the outcome of each key, the most important first."""
    lines = list[str]()
    for outcome in ORDER:
        found = {key: reason for key, (kind, reason) in job.outcomes.items() if kind == outcome}
        width = max((len(key) for key in found), default=0)
        lines += [f"{outcome:<14}  {key:<{width}}  {reason}" for key, reason in found.items()]
    return lines + [f"{'assumed':<14}  {reason}" for reason in job.assumed]


def run(file: Path, output: str | None, processes: int, allow_lost: bool = False) -> int:
    """`finetune import`: write the recipe of a file, and print the outcome of each of its keys.

    Returns 1, without a file, if a key has no counterpart and this is not allowed.
    """
    name = output or file.stem
    path = recipe_file.path_of(name)
    recipe, job, toolkit = import_recipe(file, processes)
    lines = explain(job)
    if job.lost and not allow_lost:
        print("\n".join(lines))
        print(
            f"not written: no counterpart for {', '.join(job.lost)}, which may change what is "
            "learned; --allow-lost writes the recipe without them",
            file=sys.stderr,
        )
        return 1
    recipe_file.write(path, recipe, f"{path.stem}, from {file.name} of {toolkit}.", lines)
    print("\n".join(lines))
    print(f"wrote {path}; run `finetune plan {name}` to check it")
    return 0
