"""Write a recipe as an editable YAML file, with the value and meaning of each field."""

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import to_jsonable_python

from finetune import catalog
from finetune.errors import FinetuneError
from finetune.recipe import Data, LoRA, Recipe
from finetune.recipe.meanings import meanings

WIDTH = 100
"""Maximum line width; a longer meaning goes on a line before its field."""
COLUMN = 34
"""Column at which the meaning of a field starts."""


def init(name: str, origin: str, overrides: Sequence[str] = ()) -> int:
    """`finetune init`: write a file with the fields of another recipe."""
    path = path_of(name)
    write(path, catalog.resolve(origin, overrides), f"{path.stem}, from {origin}.")
    print(f"wrote {path}; run `finetune plan {name}` to check it")
    return 0


def path_of(name: str) -> Path:
    """The file of a new recipe: the given path, or a name in `recipes/` of the working directory.

    Raises:
        FinetuneError: the name is invalid, or the file already exists.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
    elif re.fullmatch(r"\w[\w.-]*", name) and not name.endswith((".py", ".json")):
        path = Path("recipes") / f"{name}.yaml"
    else:
        raise FinetuneError(
            f"'{name}': expected a name of letters, digits and _, or a path that ends in .yaml"
        )
    if path.exists():
        raise FinetuneError(f"{path}: already exists; choose another name, or remove it")
    return path


def write(path: Path, recipe: Recipe, heading: str, notes: list[str] | None = None) -> None:
    """Write a new file; an existing file is never overwritten.

    Raises:
        FinetuneError: the file already exists.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(render(recipe, heading, notes or []))
    except FileExistsError:
        raise FinetuneError(f"{path}: already exists; choose another name") from None


def render(recipe: Recipe, heading: str, notes: list[str]) -> str:
    """The text of the file; fields with default values are commented out."""
    values = catalog.to_fields(recipe)
    lines = [f"# {heading}", *(f"# {' '.join(note.split())}".rstrip() for note in notes)]
    lines += ["# Commented lines are defaults; uncomment a line to change it.", ""]
    lines.append(f"method: {values['method']}")
    default = defaults(type(recipe))
    for field in dataclasses.fields(recipe):
        name, value = field.name, values[field.name]
        if name in ("data", "eval_data"):
            lines += ["", *_sources(name, value)]
        elif name == "adapter":
            lines += ["", *_adapter(value)]
        elif dataclasses.is_dataclass(kind := type(getattr(recipe, name))):
            lines += ["", *_section(name, kind, value, default[name] or defaults(kind))]
        else:
            lines += ["", *_field(type(recipe), name, values, default, "")]
    return "\n".join(lines) + "\n"


def defaults(kind: type[Any]) -> dict[str, Any]:
    """Defaults of the fields that have one; some methods have required fields."""
    fields: dict[str, Any] = kind.__pydantic_fields__
    return {
        name: to_jsonable_python(field.get_default(call_default_factory=True))
        for name, field in fields.items()
        if not field.is_required()
    }


def _sources(name: str, values: list[dict[str, Any]]) -> Iterator[str]:
    if not values:
        yield f"#{name}:"
        yield "#- {source: FILE_OR_HUB_ID, format: messages}"
        return
    default = to_jsonable_python(Data("", ""))
    yield f"{name}:"
    for value in values:
        yield f"# {meanings(Data)['source']}"
        yield f"- {_pair('source', value['source'])}"
        for field in dataclasses.fields(Data)[1:]:
            yield from _field(Data, field.name, value, default, "  ", field.name == "format")


def _adapter(value: dict[str, Any] | None) -> Iterator[str]:
    default = to_jsonable_python(LoRA())
    if value is None:
        yield f"# {sentence(LoRA)}"
        yield "#adapter:"
        yield f"#  {_pair('r', default['r'])}"
    else:
        yield from _section("adapter", LoRA, value, default)


def _section(
    name: str, kind: type[Any], values: dict[str, Any], default: dict[str, Any]
) -> Iterator[str]:
    yield f"# {sentence(kind)}"
    yield f"{name}:"
    for number, field in enumerate(dataclasses.fields(kind)):
        yield from _field(kind, field.name, values, default, "  ", number == 0)


def _field(
    kind: type[Any],
    name: str,
    values: dict[str, Any],
    default: dict[str, Any],
    indent: str,
    needed: bool = False,
) -> Iterator[str]:
    """Lines of a field with its meaning, commented out if it has its default and is not needed."""
    live = needed or name not in default or values[name] != default[name]
    line = f"{indent if live else f'#{indent}'}{_pair(name, values[name])}"
    meaning = meanings(kind).get(name, "")
    if not meaning:
        yield line
    elif max(len(line), COLUMN) + len(meaning) + 4 <= WIDTH:
        yield f"{line:<{COLUMN}}  # {meaning}"
    else:
        yield from (f"{indent}# {part}" for part in textwrap.wrap(meaning, WIDTH - len(indent) - 2))
        yield line


def _pair(name: str, value: Any) -> str:
    """`name: value` on one line."""
    listed = yaml.safe_dump([value], default_flow_style=True, width=1e9, allow_unicode=True)
    return f"{name}: {listed.strip()[1:-1]}"


def sentence(kind: type[Any]) -> str:
    return (kind.__doc__ or "").split("\n")[0]
