"""A form made from the dataclasses of a recipe: every field, its documentation, default, values.

A field is an input named by its dotted path. What differs from the recipe that the form began with
becomes `key=value` words, which `finetune launch` reads; the form has no other state.
"""

import dataclasses
import json
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from finetune import catalog
from finetune.errors import FinetuneError
from finetune.importers.recipe_file import defaults, sentence
from finetune.recipe import Recipe
from finetune.recipe.meanings import meanings

TYPES: Mapping[Any, str] = {
    int: "whole number", float: "number", str: "text", dict: "keys and values", tuple: "list",
    list: "list",
}  # fmt: skip
JSON = "list of JSON objects"
OFF = "null"
"""The value of a section that is left out."""
FIRST = (
    "model.name", "model.quantization", "data.0.source", "data.0.format", "adapter", "adapter.r",
    "batch.rows", "batch.micro_rows", "batch.max_length", "optim.lr", "epochs", "max_steps",
    "eval_rows", "evaluation.every", "saving.every",
)  # fmt: skip
"""Fields that are shown open; the others are below the name of their section."""


class Field(NamedTuple):
    """One input."""

    path: str
    value: str
    default: str | None
    """None if the field has to be given."""
    choices: Sequence[str]
    """Allowed values; empty if there are others."""
    kind: str
    """Its type in words."""
    about: str

    @property
    def id(self) -> str:
        """Its id in a page."""
        return f"field-{re.sub(r'[^A-Za-z0-9]', '-', self.path)}"


class Group(NamedTuple):
    """The fields of a section."""

    name: str
    about: str
    fields: Sequence[Field]


def text_of(value: Any) -> str:
    """A value as it is written after `key=`."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def groups(recipe: Recipe) -> list[Group]:
    """The fields of a recipe: those of its method first, then by section."""
    kind, values = type(recipe), catalog.to_fields(recipe)
    hints, about = typing.get_type_hints(kind, include_extras=True), meanings(kind)
    plain, sections = list[Field](), list[Group]()
    for field in dataclasses.fields(kind):
        name, hint, value = field.name, hints[field.name], values[field.name]
        members = catalog.alternatives(hint)
        listed = [typing.get_args(each)[0] for each in members if typing.get_origin(each) is tuple]
        section = next(filter(dataclasses.is_dataclass, [*listed, *members]), None)
        if not isinstance(section, type):
            plain.append(_field(name, hint, value, defaults(kind), about))
        elif section in listed:
            whole = _field(name, hint, value, defaults(kind), {name: f"All of {name} at once."})
            every = [
                each
                for at, one in enumerate(value)
                for each in _fields(section, f"{name}.{at}", one)
            ]
            sections.append(Group(name, sentence(section), [whole._replace(kind=JSON), *every]))
        else:
            fields = _fields(section, name, value)
            if type(None) in members:
                choices = [section.__name__, OFF]
                shown = OFF if value is None else section.__name__
                switch = Field(name, shown, OFF, choices, "section", about.get(name, ""))
                fields = [switch, *fields]
            sections.append(Group(name, sentence(section), fields))
    return [Group(recipe.method or kind.__name__, sentence(kind), plain), *sections]


def _fields(section: type, path: str, values: Mapping[str, Any] | None) -> list[Field]:
    hints, usual = typing.get_type_hints(section, include_extras=True), defaults(section)
    return [
        _field(f"{path}.{name}", hints[name], (values or usual).get(name), usual, meanings(section))
        for name in (field.name for field in dataclasses.fields(section))
    ]


def _field(
    path: str, hint: Any, value: Any, usual: Mapping[str, Any], about: Mapping[str, str]
) -> Field:
    name = path.rpartition(".")[2]
    default = text_of(usual[name]) if name in usual else None
    found, closed = list[str](), True
    for member in catalog.alternatives(hint):
        kind = typing.get_origin(member) or member
        literal = typing.get_args(member) if kind is Literal else ()
        known = {bool: (True, False), type(None): (None,), Literal: literal}.get(kind, ())
        closed = closed and bool(known)
        found += map(text_of, known) if known else [TYPES.get(kind, getattr(kind, "__name__", ""))]
    choices = list(dict.fromkeys(found))
    shown = "" if value is None and default is None else text_of(value)
    return Field(
        path, shown, default, choices if closed else [], " or ".join(choices), about.get(name, "")
    )


def words(recipe: Recipe, given: Mapping[str, str]) -> list[str]:
    """The `key=value` words of a filled-in form: what differs from the recipe that it began with.

    A section that is switched on is begun before its fields are set; those of one that is switched
    off are left out.
    """
    found, off = list[str](), set[str]()
    for field in (each for group in groups(recipe) for each in group.fields):
        value = given.get(field.path, field.value).replace("\r\n", "\n").strip()
        if not value and field.value:  # emptied: as without the line
            value = field.default or ""
        is_section = field.kind == "section"
        if is_section and value == OFF:
            off.add(field.path)
        elif field.path.partition(".")[0] in off:
            continue
        if value != field.value.strip():
            found.append(f"{field.path}={'{}' if is_section and value != OFF else value}")
    return found


def misplaced(error: FinetuneError, recipe: Recipe) -> tuple[dict[str, str], list[str]]:
    """The problems of an error by the path of the field that each begins with, and the others."""
    paths = {field.path for group in groups(recipe) for field in group.fields}
    by_path, others = dict[str, str](), list[str]()
    for problem in error.problems:
        text = problem.removeprefix("override: ")
        named = re.split(r"[:,= ]", text, maxsplit=1)[0]
        while named and named not in paths:
            named = named.rpartition(".")[0]
        if named:
            by_path[named] = "\n".join(filter(None, [by_path.get(named, ""), text]))
        else:
            others.append(text)
    return by_path, others
