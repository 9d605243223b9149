"""The models of one process: a single copy of the base, with all of its adapters."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from peft import PeftModel

from finetune.data.chat.render import Chat
from finetune.data.chat.written_calls import HERMES, CallForm, call_form
from finetune.errors import FinetuneError, reading
from finetune.inference.generate import Loaded, folder_stops, image_inputs_of, open_model
from finetune.inference.load import adapter_config, changes_base, check_adapter, load_tokenizer

BASE = "-base"
"""Suffix of the name of an adapter's base."""


@dataclasses.dataclass(frozen=True)
class Served:
    """A model with its name, chat format and adapter."""

    name: str
    loaded: Loaded
    chat: Chat
    adapter: str | None
    """PEFT's name of the active adapter; None for a full model, or for the base."""

    @functools.cached_property
    def call_form(self) -> CallForm:
        """The format of tool calls in the template, or `HERMES` if the template has none."""
        return call_form(self.chat) or HERMES

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Enable or disable the adapter within a context that has exclusive use of the model."""
        model: Any = self.loaded.model
        if not isinstance(model, PeftModel):
            yield
        elif self.adapter is None:
            with model.disable_adapter():
                yield
        else:
            model.set_adapter(self.adapter)
            yield


def open_models(
    path: str | Path, name: str | None = None, adapters: Mapping[str, Path] | None = None
) -> dict[str, Served]:
    """Load a run, a folder or a hub name, with more adapters on the same base.

    Args:
        path: Run, folder or hub name.
        name: Name of the model; by default that of its folder.
        adapters: Folders of more adapters, by name.

    Returns:
        The models by name, the model of `path` first. The base of an adapter is included as
        `NAME-base`, unless the adapter's initialization changed the base.

    Raises:
        FinetuneError: a model cannot be loaded, or an adapter has another base.
    """
    loaded = open_model(path)
    name = name or Path(path).resolve().name
    chat = loaded.chat()
    if not isinstance(loaded.model, PeftModel):
        if adapters:
            raise FinetuneError(f"--adapter: {path} is a complete model, not an adapter")
        return {name: Served(name, loaded, chat, None)}
    models = {name: Served(name, loaded, chat, "default")}
    for other, folder in (adapters or {}).items():
        if other in (*models, name + BASE):
            raise FinetuneError(f"--adapter: two models are called '{other}'")
        models[other] = _with_adapter(loaded, other, folder)
    if not changes_base(loaded.model.peft_config["default"]):
        models[name + BASE] = Served(name + BASE, loaded, chat, None)
    return models


def _with_adapter(loaded: Loaded, name: str, folder: Path) -> Served:
    model: Any = loaded.model
    config, first = adapter_config(folder), model.peft_config["default"]
    if changes_base(config) or changes_base(first):
        raise FinetuneError(
            f"{folder}: an adapter that changed its base ({config.init_lora_weights}) cannot share "
            "it; export it as 'adapter', which makes a plain LoRA of it"
        )
    if config.base_model_name_or_path != first.base_model_name_or_path:
        raise FinetuneError(
            f"{folder}: an adapter of {config.base_model_name_or_path}, not of "
            f"{first.base_model_name_or_path}"
        )
    with model.disable_adapter():
        check_adapter(folder, model.get_base_model())
    adapter = f"served{len(model.peft_config)}"  # a name of a request may be one of PEFT's
    with reading(f"{folder}: PEFT cannot load it"):
        model.load_adapter(str(folder), adapter_name=adapter)
    model.eval()
    tokenizer = load_tokenizer(folder)
    stops = folder_stops(loaded.stops, folder, tokenizer)
    images = image_inputs_of(model.get_base_model(), tokenizer, folder if loaded.reads else None)
    own = dataclasses.replace(loaded, tokenizer=tokenizer, stops=stops, images=images)
    return Served(name, own, own.chat(), adapter)
