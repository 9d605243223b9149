"""Convert the configuration of another toolkit to a recipe, and report what differs."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from finetune import catalog
from finetune.errors import FinetuneError, reading
from finetune.importers import (
    axolotl,
    command_line,
    llamafactory,
    recipe_file,
    swift,
    torchtune,
    trl,
)
from finetune.importers.translation import Outcome, Translation
from finetune.process.yaml_text import read_yaml
from finetune.recipe import Recipe

LLAMA_FACTORY = {"stage", "finetuning_type", "template", "dataset", "cutoff_len"}
"""Keys of LLaMA-Factory, beside `model_name_or_path`, that TRL does not have."""
Translator = Callable[[Translation, Path], None]
ORDER: tuple[Outcome, ...] = ("no counterpart", "differs", "translated", "not needed")


def import_recipe(
    path: Path | str, processes: int | None = None
) -> tuple[Recipe, Translation, str]:
    """The recipe of a file, the outcome of each of its keys, and the name of the toolkit.

    Args:
        path: YAML or JSON of axolotl, LLaMA-Factory, TRL, ms-swift, torchtune or Trainer; a
            script with a command of TRL or ms-swift, or the text of the command.
        processes: number of processes it is meant for; by default that of the command, or 1.

    Raises:
        FinetuneError: the file is of none of them, or no recipe can express it.
    """
    where, folder = (path, Path()) if isinstance(path, str) else (str(path), path.parent)
    source = _read(path)
    toolkit, translate = _translator(source, where)
    started = source.get("num_processes")
    count = processes or (started if isinstance(started, int) else 1)
    job = Translation({k: v for k, v in source.items() if v is not None}, count)
    try:
        with reading(f"a value is not what {toolkit} takes"):
            translate(job, folder)
            job.finish()
    except FinetuneError as error:
        raise FinetuneError(*(f"{where}: {problem}" for problem in error.problems)) from None
    fields = {"method": "sft", **job.fields}
    return catalog.from_fields(fields, where), job, toolkit


def _read(path: Path | str) -> dict[str, Any]:
    """The keys and values of a file or a command; those of its `--config` come first."""
    written = path if isinstance(path, str) else path.read_text(encoding="utf-8")
    if isinstance(path, str) or path.suffix in (".sh", ".txt", ".bash"):
        found = command_line.options_of(written, str(path))
        config = found.get("config")
        return (_read(Path(str(config))) if config else {}) | found
    with reading(f"{path}: cannot be read as YAML"):
        read = read_yaml(written, catalog.ExactNumbers)
    if not isinstance(read, dict):
        raise FinetuneError(f"{path}: expected keys and values, got {type(read).__name__}")
    return {str(key): value for key, value in cast(dict[Any, Any], read).items()}


def _translator(source: dict[str, Any], where: str) -> tuple[str, Translator]:
    """The toolkit of a configuration, by the keys that only it has."""
    program = source.get(command_line.PROGRAM)
    if "base_model" in source and "model_name_or_path" not in source:
        return "axolotl", axolotl.translate
    if isinstance(source.get("model"), dict) and "tokenizer" in source:
        return "torchtune", torchtune.translate
    if program == "swift" or (program is None and isinstance(source.get("model"), str)):
        return "ms-swift", swift.translate
    if "model_name_or_path" in source and "base_model" not in source:
        is_trl = program == "trl" or not LLAMA_FACTORY & source.keys()
        return ("TRL", trl.translate) if is_trl else ("LLaMA-Factory", llamafactory.translate)
    if "per_device_train_batch_size" in source and program is None:
        return "TrainingArguments", trl.translate_arguments
    raise FinetuneError(
        f"{where}: not a configuration that can be imported: it has neither base_model (of axolotl)"
        " nor model_name_or_path (of LLaMA-Factory and TRL), model (of ms-swift and torchtune), or "
        "per_device_train_batch_size (of TrainingArguments)"
    )


def explain(job: Translation) -> list[str]:
    """Lines with the outcome of each key, the most important first."""
    lines = list[str]()
    for outcome in ORDER:
        found = {key: reason for key, (kind, reason) in job.outcomes.items() if kind == outcome}
        width = max((len(key) for key in found), default=0)
        lines += [f"{outcome:<14}  {key:<{width}}  {reason}" for key, reason in found.items()]
    return lines + [f"{'assumed':<14}  {reason}" for reason in job.assumed]


def run(
    words: Sequence[str], output: str | None, processes: int | None, allow_lost: bool = False
) -> int:
    """`finetune import`: write the recipe of a file, and print the outcome of each of its keys.

    Returns 1, without a file, if a key has no counterpart and this is not allowed.
    """
    file = Path(words[0]) if len(words) == 1 else None
    name = output or ("imported" if file is None else file.stem)
    path = recipe_file.path_of(name)
    recipe, job, toolkit = import_recipe(file or shlex.join(words), processes)
    lines = explain(job)
    if job.lost and not allow_lost:
        print("\n".join(lines))
        print(
            f"not written: no counterpart for {', '.join(job.lost)}, which may change what is "
            "learned; --allow-lost writes the recipe without them",
            file=sys.stderr,
        )
        return 1
    recipe_file.write(
        path, recipe, f"{path.stem}, from {file.name if file else 'a command'} of {toolkit}.", lines
    )
    print("\n".join(lines))
    print(f"wrote {path}; run `finetune plan {name}` to check it")
    return 0
