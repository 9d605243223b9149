"""Leave out of what is trained what no gradient reaches, and name it."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator

from peft import PeftModel
from torch import nn

from finetune.errors import FinetuneError
from finetune.models.meta import unreached
from finetune.recipe import LoRA, Recipe

MOST_NAMED = 6
"""Groups of tensors that a message names."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""A layer's number in a name."""


def without_unreached(
    model: nn.Module, recipe: Recipe, attach: Callable[[nn.Module, LoRA], nn.Module]
) -> tuple[nn.Module, str | None]:
    """A model less what would be trained in vain, and a note of what that is.

    An adapter that no gradient reaches is excluded in its configuration, a weight is frozen.

    Args:
        model: with its adapter, before an engine wraps it.
        recipe: what it is trained with.
        attach: puts an adapter on the base.

    Raises:
        FinetuneError: the recipe names what no gradient reaches, or nothing else is trained.
    """
    names = unreached(model, recipe.batch.max_length)
    if names is None:
        return model, "gradients: which parameters they reach could not be measured before training"
    if not names:
        return model, None
    problems = list(refused(names, model, recipe.adapter))
    if problems:
        raise FinetuneError(*problems)
    note = left_out(names, model)
    if recipe.adapter is not None and isinstance(model, PeftModel):
        given = excluded(names, model, recipe.adapter.exclude_modules)
        narrower = dataclasses.replace(recipe.adapter, exclude_modules=given)
        return attach(model.unload(), narrower), note
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model, note


def left_out(names: list[str], model: nn.Module) -> str:
    """The note of trained parameters that no gradient reaches: what they are, and how many."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    layers = {_layer(name) for name in names}
    found = _roots(layers, {_layer(name) for name in trained} - layers)
    adapted = any(".lora_" in name for name in names)
    what = f"{len(layers)} adapters" if adapted else f"{len(names)} tensors"
    elements = sum(_elements(model.get_parameter(name)) for name in names)
    return (
        f"left out of what is trained, because no gradient of a text reaches it: {grouped(found)}: "
        f"{what}, {elements:,} parameters"
    )


def refused(names: list[str], model: nn.Module, adapter: LoRA | None) -> Iterator[str]:
    """What is wrong where no gradient reaches something that a recipe trains by name, or anything.

    Args:
        names: what `unreached` found.
        model: with its adapter.
        adapter: the recipe's.
    """
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    if len(names) == len(trained):
        yield "model: no gradient of a text reaches anything that the recipe trains"
        return
    if adapter is None:
        return
    missed = {_layer(name) for name in names}
    for word in adapter.modules_to_save:
        copies = [n for n in names if ".modules_to_save." in n and _is_called(_module(n), word)]
        if copies:
            yield (
                f"adapter.modules_to_save: no gradient of a text reaches '{word}' "
                f"({grouped(plain_name(name) for name in copies)}); leave it out"
            )
    for word in () if isinstance(adapter.targets, str) else adapter.targets:
        layers = {_layer(name) for name in trained if _is_called(_layer(name), word)}
        if layers and layers <= missed:
            yield (
                f"adapter.targets: no gradient reaches an adapter on '{word}' ({grouped(layers)}): "
                "the model's forward pass of a text does not call it; leave it out"
            )


def excluded(names: list[str], model: nn.Module, given: str | tuple[str, ...]) -> str:
    """The regular expression of `exclude_modules` that leaves these adapters out.

    Args:
        names: what `unreached` found.
        model: with its adapter.
        given: what the recipe excludes already.
    """
    trained = {_layer(name) for name, p in model.named_parameters() if p.requires_grad}
    missed = {_layer(name) for name in names}
    kept = trained - missed
    parts: list[str] = []
    if given:
        parts.append(
            given if isinstance(given, str) else rf"(?:.*\.)?(?:{'|'.join(map(re.escape, given))})"
        )
    for root in sorted(_roots(missed, kept)):
        numbered = NUMBER.sub(r"\\d+", re.escape(root).replace(r"\.", "."))
        wide = rf"{numbered.replace('.', chr(92) + '.')}(?:\..*)?"
        if any(re.fullmatch(wide, layer) for layer in kept):
            wide = rf"{re.escape(root)}(?:\..*)?"
        if wide not in parts:
            parts.append(wide)
    return "|".join(f"(?:{part})" for part in parts)


def grouped(names: Iterable[str]) -> str:
    """Names with their layers' numbers as N, each once with its count, the most frequent first."""
    counts: dict[str, int] = {}
    for name in names:
        pattern = NUMBER.sub("N", name)
        counts[pattern] = counts.get(pattern, 0) + 1
    ordered = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    shown = [f"{name} ({count})" if count > 1 else name for name, count in ordered[:MOST_NAMED]]
    rest = sum(count for _, count in ordered[MOST_NAMED:])
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _roots(missed: set[str], kept: set[str]) -> set[str]:
    """The outermost modules that hold what is missed and nothing that is kept."""
    holding = {
        ".".join(parts[:end])
        for parts in (name.split(".") for name in kept)
        for end in range(len(parts) + 1)
    }
    roots = set[str]()
    for name in missed:
        parts = name.split(".")
        heads = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        roots.add(next((head for head in heads if head not in holding), name))
    return roots


def _layer(name: str) -> str:
    """The layer that an adapter's parameter belongs to; another parameter's plain name."""
    return re.sub(r"\.lora_.*$", "", plain_name(name))


def _module(name: str) -> str:
    """The module that a copy of `modules_to_save` stands for."""
    return plain_name(name.split(".modules_to_save.")[0] + ".weight").removesuffix(".weight")


def _is_called(layer: str, word: str) -> bool:
    """Whether PEFT takes a word for a layer."""
    return layer == word or layer.endswith(f".{word}")


def _elements(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", None) or parameter.numel()  # ds_numel: ZeRO-3 only


def plain_name(name: str) -> str:
    """A tensor's name in the base, without what adapters and engines put round it."""
    name = re.sub(r"^(module\.)?(base_model\.model\.)?", "", name)
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.\w+)(?=\.)", "", name)
