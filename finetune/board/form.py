"""A form made from the dataclasses of a recipe: every field, its documentation, default, values.

A field is an input named by its dotted path. What differs from the recipe that the form began with
becomes `key=value` words, which `finetune launch` reads; the form has no other state.
"""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic_core import to_jsonable_python

from finetune import catalog
from finetune.errors import FinetuneError
from finetune.recipe import Recipe
from finetune.recipe.meanings import meanings

TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false",
         dict: "keys and values", tuple: "list", list: "list"}  # fmt: skip
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
    hints = typing.get_type_hints(kind, include_extras=True)
    plain, sections = list[Field](), list[Group]()
    for field in dataclasses.fields(kind):
        name, hint, value = field.name, hints[field.name], values[field.name]
        section = _section_of(hint)
        if section is None:
            plain.append(_field(kind, name, name, hint, value))
        elif _is_list(hint):
            sections.append(_sources(kind, section, name, hint, value))
        else:
            fields = list(_fields(section, name, value))
            if _may_be_null(hint):
                choices = [section.__name__, OFF]
                shown = OFF if value is None else section.__name__
                about = meanings(kind).get(name, "")
                fields.insert(0, Field(name, shown, OFF, choices, "section", about))
            sections.append(Group(name, _sentence(section), fields))
    about = _sentence(kind)
    return [Group(recipe.method or kind.__name__, about, plain), *sections]


def _sources(kind: type, section: type, name: str, hint: Any, values: list[Any]) -> Group:
    """A list of sections: the fields of each, and the whole as JSON."""
    whole = _field(kind, name, name, hint, values)
    fields = [
        each
        for number, value in enumerate(values)
        for each in _fields(section, f"{name}.{number}", value)
    ]
    whole = whole._replace(kind="list of JSON objects", about=f"All of {name} at once.")
    return Group(name, _sentence(section), [*fields, whole])


def _fields(section: type, path: str, values: Mapping[str, Any] | None) -> Iterator[Field]:
    hints = typing.get_type_hints(section, include_extras=True)
    for field in dataclasses.fields(section):
        default = _default(section, field.name)
        value = default if values is None else values[field.name]
        yield _field(section, f"{path}.{field.name}", field.name, hints[field.name], value)


def _field(kind: type, path: str, name: str, hint: Any, value: Any) -> Field:
    default = _default(kind, name)
    given = None if default is ... else text_of(default)
    shown = "" if value is ... else text_of(value)
    return Field(path, shown, given, _choices(hint), _words(hint), meanings(kind).get(name, ""))


def _default(kind: type[Any], name: str) -> Any:
    """The default of a field as a plain value; `...` if it has to be given."""
    field = kind.__pydantic_fields__[name]
    if field.is_required():
        return ...
    return to_jsonable_python(field.get_default(call_default_factory=True))


def _members(hint: Any) -> list[Any]:
    """The members of a union, without annotations."""
    if typing.get_origin(hint) is Annotated:
        return _members(typing.get_args(hint)[0])
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return [kind for member in typing.get_args(hint) for kind in _members(member)]
    return [hint]


def _section_of(hint: Any) -> Any:
    """The dataclass of a section, or of the sections in a list; None for plain values."""
    for member in _members(hint):
        inner = typing.get_args(member)[0] if _is_list(member) else member
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            return inner
    return None


def _is_list(hint: Any) -> bool:
    return any(typing.get_origin(member) is tuple for member in _members(hint))


def _may_be_null(hint: Any) -> bool:
    return type(None) in _members(hint)


def _choices(hint: Any) -> list[str]:
    """The values of a field that has no others."""
    found = list[str]()
    for member in _members(hint):
        if typing.get_origin(member) is Literal:
            found += map(text_of, typing.get_args(member))
        elif member is bool:
            found += ["true", "false"]
        elif member is type(None):
            found.append(OFF)
        else:
            return []
    return found


def _words(hint: Any) -> str:
    """The type of a field in words."""
    found = list[str]()
    for member in _members(hint):
        if member is type(None):
            found.append(OFF)
        elif typing.get_origin(member) is Literal:
            found += map(text_of, typing.get_args(member))
        else:
            kind = typing.get_origin(member) or member
            found.append(TYPES.get(kind, getattr(kind, "__name__", str(kind))))
    return " or ".join(dict.fromkeys(found))


def _sentence(kind: type) -> str:
    return (kind.__doc__ or "").split("\n")[0]


def words(recipe: Recipe, given: Mapping[str, str]) -> list[str]:
    """The `key=value` words of a filled-in form: what differs from the recipe that it began with.

    A section that is switched on is begun before its fields are set; those of one that is switched
    off are left out.
    """
    found, off = list[str](), set[str]()
    for group in groups(recipe):
        ahead = list[str]()
        for field in group.fields:
            value = given.get(field.path, field.value).replace("\r\n", "\n").strip()
            if field.kind == "section":
                if value == OFF:
                    off.add(field.path)
                if value != field.value:
                    found.append(f"{field.path}={OFF if value == OFF else '{}'}")
                continue
            if field.path.partition(".")[0] in off or value == field.value.strip():
                continue
            if not value and field.value:  # emptied: as without the line
                value = field.default if field.default is not None else ""
                if value == field.value:
                    continue
            word = f"{field.path}={value}"
            (ahead if "." not in field.path else found).append(word)
        found = [*ahead, *found] if ahead else found
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
