"""The form of a recipe has every field, and what is typed is what the command line reads."""

import dataclasses
from typing import Any

import pytest

from finetune import LoRA, catalog
from finetune.board import form
from finetune.errors import FinetuneError
from finetune.methods import METHODS
from finetune.recipe import Recipe

SHIPPED = sorted(name for name in catalog.names() if not name.startswith("test"))


def paths(values: Any, path: str = "") -> set[str]:
    """Dotted paths of all values of a recipe; lists and dictionaries are one value."""
    found = set[str]()
    for name, value in values.items():
        here = f"{path}.{name}" if path else name
        if isinstance(value, dict) and here in SECTIONS:
            found |= paths(value, here)
        else:
            found.add(here)
    return found


SECTIONS = {"model", "adapter", "batch", "optim", "kernels", "evaluation", "saving", "teacher"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_form_that_is_sent_back_unchanged_is_the_recipe(name: str):
    recipe = catalog.resolve(name)
    given = {field.path: field.value for group in form.groups(recipe) for field in group.fields}
    assert form.words(recipe, given) == []
    assert paths(catalog.to_fields(recipe)) - {"method"} <= given.keys()


def all_fields(recipe: Recipe) -> list[form.Field]:
    return [field for group in form.groups(recipe) for field in group.fields]


@pytest.mark.parametrize("name", ["quickstart", "qwen3_0_6b_grpo", "qwen3_0_6b_distill"])
def test_every_value_that_a_field_shows_is_read_back_as_it_is(name: str):
    recipe = catalog.resolve(name)
    for field in all_fields(recipe):
        if field.path.startswith("adapter.") and recipe.adapter is None:
            continue  # giving one switches the section on
        if field.kind != "section" and (field.default is None or field.value):
            assert catalog.override(recipe, [f"{field.path}={field.value}"]) == recipe, field
        for choice in field.choices if field.kind != "section" else ():
            changed = catalog.to_fields(recipe)
            place = changed
            *sections, last = field.path.split(".")
            for part in sections:
                place = place[int(part)] if isinstance(place, list) else place[part]
            try:
                read = catalog.to_fields(catalog.override(recipe, [f"{field.path}={choice}"]))
            except FinetuneError:  # of a rule between fields, not of this one
                continue
            for part in sections:
                read = read[int(part)] if isinstance(read, list) else read[part]
            assert form.text_of(read[last]) == choice, field


def test_each_method_has_a_form_with_the_documentation_of_its_own_fields():
    needed = {"classifier": {"labels": ["a", "b"]}, "distill": {"teacher": {"name": "large"}}}
    for method in METHODS:
        recipe = catalog.from_fields({"method": method, **needed.get(method, {})})
        shown = {field.path: field.about for field in all_fields(recipe)}
        own = {field.name for field in dataclasses.fields(recipe)} - SECTIONS
        assert own <= shown.keys()
        assert [name for name in own - {"data", "eval_data"} if not shown[name]] == [], method


def test_a_section_is_switched_on_and_off():
    recipe = catalog.resolve("quickstart")
    assert form.words(recipe, {"adapter": "null", "adapter.r": "4"}) == ["adapter=null"]
    whole = catalog.override(recipe, ["adapter=null", "model.quantization=none"])
    words = form.words(whole, {"adapter": "LoRA", "adapter.r": "4", "optim.lr": "1e-4"})
    assert words == ["adapter={}", "adapter.r=4", "optim.lr=1e-4"]
    assert catalog.override(whole, words).adapter == LoRA(r=4)
    data = '[{"source": "x.jsonl", "format": "text"}]'
    changed = form.words(recipe, {"data": data, "data.0.first": "5"})
    assert catalog.override(recipe, changed).data[0].first == 5


def test_an_error_stands_at_the_field_that_it_is_about():
    recipe = catalog.resolve("quickstart")
    with pytest.raises(FinetuneError) as raised:
        catalog.override(recipe, ["optim.lr=fast", "batch.rows=0", "adapter.rank=3"])
    by_path, others = form.misplaced(raised.value, recipe)
    assert by_path.keys() == {"optim.lr", "batch.rows", "adapter"}
    assert others == []
