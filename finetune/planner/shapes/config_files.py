"""A model's `config.json`: where it is, its shape, and what it says of the head."""

import contextlib
import dataclasses
import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from finetune.cache import hub_cache
from finetune.errors import FinetuneError, reading
from finetune.planner.families import family_of
from finetune.planner.shapes import published
from finetune.planner.shapes.approximate import approximate
from finetune.planner.shapes.architecture import Architecture
from finetune.planner.shapes.read_config import read
from finetune.planner.shapes.tower import read_with_tower
from finetune.recipe import Head, Model, Recipe

HUB_SECONDS = 5
"""Timeout of a request to the hub, in seconds."""


def config_paths(name: str, revision: str | None) -> list[Path]:
    """Possible paths: in a local folder, and in the hub cache."""
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    reference = folder / "refs" / wanted
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else wanted
    return [Path(name) / "config.json", folder / "snapshots" / commit / "config.json"]


def _path_of(model: Model) -> Path | None:
    """The config.json of a named model, if it is on this machine."""
    paths = config_paths(model.name, model.revision) if model.name else []
    return next((path for path in paths if path.is_file()), None)


def model_fields(recipe: Recipe) -> dict[str, Any]:
    """The config of a recipe's model; empty if it is not on this machine."""
    model = recipe.model
    if model.config is not None:
        return dict(model.config)
    path = _path_of(model)
    try:
        return {} if path is None else _config(path)
    except FinetuneError:
        return {}  # loading the model reports the error


def fields_of(recipe: Recipe) -> Mapping[str, Any]:
    """`model_fields`, or the fields in the table of published shapes; empty if not known."""
    found = model_fields(recipe)
    return found or (published.find(recipe.model.name) if recipe.model.name else None) or {}


def decoder_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the model that is loaded: of some multimodal types, the language model."""
    alone = family_of(fields).text_only and "text_config" in fields
    return fields["text_config"] if alone else fields


@dataclasses.dataclass(frozen=True)
class Source:
    """The shape of a recipe's model, and where it was read from."""

    shape: Architecture
    where: str
    exact: bool = True
    """Whether its operations are known; else its activations are approximate."""


def model_source(recipe: Recipe) -> Source:
    """The shape of a recipe's model.

    It is read from the recipe's config, a folder, the hub cache, `shapes.published`, or the hub.

    Raises:
        FinetuneError: none of them has it, or the architecture is unknown.
    """
    config, where = config_of(recipe)
    kind, family = config.get("model_type"), family_of(config)
    exact = family.shape is not None or bool(family.unfit) or not isinstance(kind, str)
    if recipe.model.reads:
        shape, exact = read_with_tower(config, where, recipe.model.trains), True
    else:
        shape = read(config, where) if exact else approximate(decoder_fields(config))
    if not exact:
        where += (
            f"; {kind} has no formulas: its weights are counted, and activations are those of a "
            "Llama with as many; --verify traces them"
        )
    if recipe.model.add_tokens:
        shape = dataclasses.replace(shape, vocab=max(shape.vocab, _rows_with_added(recipe, shape)))
    if recipe.head.scored:  # without the head that predicts tokens
        shape = dataclasses.replace(shape, tied=False, scores=len(recipe.head.names))
    return Source(shape, where, exact)


def _rows_with_added(recipe: Recipe, shape: Architecture) -> int:
    """Embedding rows with `model.add_tokens`, as in `finetune.models.vocabulary`.

    A model often has more rows than its tokenizer has tokens, so that no rows are added. If the
    tokenizer is not on this machine, each token is counted as an additional row, an upper bound.
    """
    model = recipe.model
    name = model.tokenizer or model.name
    for config in config_paths(name, model.revision) if name else ():
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            file = config.with_name("tokenizer.json")
            stored = json.loads(file.read_text(encoding="utf-8"))
            known = {**stored["model"]["vocab"]}
            known |= {each["content"]: each["id"] for each in stored["added_tokens"]}
            return max(known.values()) + 1 + len(set(model.add_tokens) - known.keys())
    return shape.vocab + len(model.add_tokens)


def config_of(recipe: Recipe) -> tuple[Mapping[str, Any], str]:
    """The fields of a recipe's `config.json`, and where they were read from.

    Raises:
        FinetuneError: it is not on this machine, and the hub does not provide it.
    """
    model = recipe.model
    if model.config is not None:
        return model.config, "model.config"
    if model.name is None:
        raise FinetuneError("model: give model.name or model.config: its shape is not known")
    path = _path_of(model)
    if path is not None:
        return _config(path), str(path)
    known = published.find(model.name)
    if known is not None:
        return known, published.source(model.name)
    return _download(model.name, model.revision), "the hub"


def _download(name: str, revision: str | None) -> Any:
    """Download only the config.json of a model from the hub, in a single request.

    `hf_hub_download` (huggingface_hub 1.x) retries six times, which takes 24 s without a network.

    Raises:
        FinetuneError: there is no such file, or no network.
    """
    # The import takes a third of a second and is only needed for names not found elsewhere.
    from huggingface_hub import constants, get_token, hf_hub_url
    from huggingface_hub.utils import validate_repo_id

    given = "give a folder with config.json, or a hub id"
    with reading(f"model.name: no such folder: {name}; {given}"):
        validate_repo_id(name)
    with reading(
        f"model.name: no config.json of '{name}' in a folder of that name or in the hub cache, it "
        "is not in the built-in table, and the hub did not provide it",
        "name a local folder that has one, or give model.config",
    ):
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        url = hf_hub_url(name, "config.json", revision=revision)
        request = urllib.request.Request(url)
        if token := get_token():  # not sent to a redirect target
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=HUB_SECONDS) as answer:
            return json.loads(answer.read())


def _config(path: Path) -> Any:
    with reading(f"{path}: cannot be read"):
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise FinetuneError(f"{path}: got a {type(found).__name__}, expected an object with fields")
    return cast("dict[str, Any]", found)


def has_score_head(fields: Mapping[str, Any]) -> bool:
    """Whether a `config.json` belongs to a sequence classification model."""
    names = fields.get("architectures")
    named = cast(list[Any], names) if isinstance(names, list) else []
    return any(str(name).endswith("ForSequenceClassification") for name in named)


def refuse_other_labels(fields: Mapping[str, Any], head: Head, what: str) -> None:
    """Refuse a score head for another number of labels, or for the same ones in another order.

    Args:
        fields: A `config.json`; one without a score head or labels is accepted.
        head: Head of the recipe; that of a language model accepts all.
        what: Field and name of the model or adapter, for messages.

    Raises:
        FinetuneError: with the labels of the model and of the recipe.
    """
    named = fields.get("id2label")
    if not (head.scored and has_score_head(fields)) or not isinstance(named, Mapping):
        return
    labels = cast(Mapping[Any, Any], named)
    if not all(str(number).isdecimal() for number in labels):
        return  # transformers reports it
    found, wanted = [str(labels[n]) for n in sorted(labels, key=int)], list(head.names)
    if len(found) != len(wanted):
        raise FinetuneError(
            f"{what} has a score head for {len(found)} labels ({_listed(found)}), and the recipe "
            f"has {len(wanted)} ({_listed(wanted)}); name the model that it was trained from, "
            "which gets a new head"
        )
    if sorted(found) == sorted(wanted) and found != wanted:
        raise FinetuneError(
            f"{what} has a score head for the labels in the order {_listed(found)}, and the recipe "
            f"has {_listed(wanted)}; set labels to that order"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
