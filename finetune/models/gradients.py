"""Exclude parameters that get no gradient from training, and report them."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator

import torch
from peft import PeftModel
from torch import nn

from finetune.distributed.parameters import unsharded_numel
from finetune.errors import refuse
from finetune.models import image_parts
from finetune.models.load_checks import plain_name
from finetune.models.reachable import unreached
from finetune.recipe import LoRA, Recipe

MOST_NAMED = 6
"""Maximum number of groups of tensors that a message names."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""A layer's number in a name."""


def without_unreached(
    model: nn.Module,
    recipe: Recipe,
    attach: Callable[[nn.Module, LoRA], nn.Module],
    image: dict[str, torch.Tensor] | None = None,
) -> tuple[nn.Module, str | None]:
    """Exclude trained parameters that get no gradient; returns the model and a note.

    An adapter without a gradient is excluded in its configuration, a weight is frozen.

    Args:
        model: Model with its adapter, before an engine wraps it.
        recipe: Recipe of the run.
        attach: Function that attaches an adapter to the base.
        image: Tensors of an image, for a model that reads images.

    Raises:
        FinetuneError: the recipe names modules without a gradient, or nothing else is trained.
    """
    names = unreached(model, recipe.batch.max_length)
    if names is not None and image is not None:
        names = image_parts.unreached(model, names, image)
    if names is None:
        return model, "gradients: could not measure before training which parameters they reach"
    if not names:
        return model, None
    problems = list(refused(names, model, recipe.adapter))
    refuse(problems)
    note = left_out(names, model)
    if recipe.adapter is not None and isinstance(model, PeftModel):
        given = excluded(names, model, recipe.adapter.exclude_modules)
        narrower = dataclasses.replace(recipe.adapter, exclude_modules=given)
        return attach(model.unload(), narrower), note
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model, note


def left_out(names: list[str], model: nn.Module) -> str:
    """A note on trained parameters that get no gradient: their names and their number."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    layers = {_layer(name) for name in names}
    found = _roots(layers, {_layer(name) for name in trained} - layers)
    adapted = any(".lora_" in name for name in names)
    what = f"{len(layers)} adapters" if adapted else f"{len(names)} tensors"
    elements = sum(unsharded_numel(model.get_parameter(name)) for name in names)
    return (
        f"not trained, because no gradient of a text reaches it: {grouped(found)}: "
        f"{what}, {elements:,} parameters"
    )


def refused(names: list[str], model: nn.Module, adapter: LoRA | None) -> Iterator[str]:
    """Problems if modules that the recipe names, or all trained parameters, get no gradient.

    Args:
        names: Parameters without a gradient, from `unreached`.
        model: Model with its adapter.
        adapter: The recipe's adapter.
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
    """A regular expression for `exclude_modules` that also excludes adapters without a gradient.

    Args:
        names: Parameters without a gradient, from `unreached`.
        model: Model with its adapter.
        given: Modules that the recipe already excludes.
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
    """Names with layer numbers replaced by N, each once with its count, most frequent first."""
    counts: dict[str, int] = {}
    for name in names:
        pattern = NUMBER.sub("N", name)
        counts[pattern] = counts.get(pattern, 0) + 1
    ordered = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    shown = [f"{name} ({count})" if count > 1 else name for name, count in ordered[:MOST_NAMED]]
    rest = sum(count for _, count in ordered[MOST_NAMED:])
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _roots(missed: set[str], kept: set[str]) -> set[str]:
    """The outermost modules that contain missed layers and no kept ones."""
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
    """The layer of an adapter's parameter; for another parameter, its plain name."""
    return re.sub(r"\.lora_.*$", "", plain_name(name))


def _module(name: str) -> str:
    """The module that a copy in `modules_to_save` replaces."""
    return plain_name(name.split(".modules_to_save.")[0] + ".weight").removesuffix(".weight")


def _is_called(layer: str, word: str) -> bool:
    """Whether a name in PEFT's configuration selects a layer."""
    return layer == word or layer.endswith(f".{word}")
