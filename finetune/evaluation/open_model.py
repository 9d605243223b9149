"""Find and load the model to evaluate: a run, an adapter, a model folder, a hub name or a URL."""

import dataclasses
import gc
import os
from pathlib import Path

import torch
from peft import PeftModel

from finetune import catalog
from finetune.data.read.sources import HUB_NAME
from finetune.errors import FinetuneError
from finetune.inference.endpoint import Endpoint, is_url, open_endpoint
from finetune.inference.generate import Loaded, load, load_base, load_folder, open_model
from finetune.inference.load import (
    Step,
    adapter_config,
    changes_base,
    load_tokenizer,
    load_weights,
    open_checkpoint,
    trained_dtype,
)
from finetune.recipe import Recipe
from finetune.runs.run import Run, open_run

BASE = "base"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model by name that is not loaded yet."""

    name: str
    """Name as given by the user."""
    run: Run | None = None
    """The run, if the model is a run."""
    words: Run | None = None
    """For a base model, the run trained from it, whose tokenizer and template are used."""
    adapter: Path | None = None
    """Folder of an exported adapter."""
    step: Step | None = None
    served: str | None = None
    """Name of the model on a server."""
    key: str | None = None
    is_base: bool = False
    """Whether it is the base model of the run or of the adapter."""

    @property
    def kind(self) -> str:
        """Kind of the model in `results.json`."""
        if is_url(self.name):
            return "url"
        if self.is_base:
            return "base"
        return "run" if self.run else "adapter" if self.adapter else "model"

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of `run`, or of `words`."""
        run = self.run or self.words
        return None if run is None else catalog.load(run.recipe)


def find_subject(
    name: str,
    rows_of: Run | None = None,
    step: Step | None = None,
    served: str | None = None,
    key: str | None = None,
) -> Subject:
    """A subject by name; nothing is loaded.

    Raises:
        FinetuneError: the name is not a run, a folder with a model, a hub name or a URL.
    """
    path = Path(name)
    is_run = not is_url(name) and (path / "recipe.json").is_file()
    if step is not None and not is_run:
        raise FinetuneError(f"--step: {name} is not a run; only a run has checkpoints")
    if is_url(name):
        return Subject(name, served=served, key=key)
    if is_run:
        return Subject(name, run=open_run(path), step=step)
    if (path / "adapter_config.json").is_file():
        return Subject(name, adapter=path)
    if path.exists() and not (path / "config.json").is_file():
        raise FinetuneError(
            f"{name}: neither a run (recipe.json), nor a model (config.json), nor an adapter "
            "(adapter_config.json) is there"
        )
    if not path.exists() and not HUB_NAME.fullmatch(name):
        raise FinetuneError(f"{name}: no such run or folder, and not a name of a model on the hub")
    words = rows_of if rows_of is not None and is_base_of(rows_of, name) else None
    return Subject(name, words=words)


def base_of(subject: Subject) -> Subject:
    """The base model of a run or an adapter.

    Raises:
        FinetuneError: the subject is a model or a URL, whose base is unknown.
    """
    if subject.run is not None:
        name = subject.recipe.model.name if subject.recipe is not None else None
        return Subject(name or "its weights before training", words=subject.run, is_base=True)
    if subject.adapter is not None:
        config = adapter_config(subject.adapter)
        name = str(config.base_model_name_or_path)
        return Subject(name, adapter=subject.adapter, is_base=True)
    raise FinetuneError(
        f"--against base: {subject.name} does not say what it was trained from; name a run, a "
        "folder or a URL"
    )


def open_subject(subject: Subject) -> Loaded | Endpoint:
    """Load the model, or connect to its server.

    Raises:
        FinetuneError: the model cannot be loaded, or the server does not answer.
    """
    if is_url(subject.name):
        return open_endpoint(subject.name, subject.served, subject.key)
    if subject.run is not None:
        return load(subject.run, subject.step)
    if subject.words is not None:
        tokenizer = load_tokenizer(open_checkpoint(subject.words) / "tokenizer")
        recipe = catalog.load(subject.words.recipe)
        quantized = recipe.model.quantization != "none"
        dtype = trained_dtype(subject.words) if quantized else None
        return load_base(recipe, tokenizer, dtype)
    if subject.adapter is None:
        return open_model(subject.name)
    if not subject.is_base:
        return load_folder(subject.adapter)
    loaded = load_folder(subject.adapter)  # for its tokenizer and stop tokens
    revision = adapter_config(subject.adapter).revision
    base = load_weights(subject.name, revision=revision, reads=loaded.reads)
    return dataclasses.replace(loaded, model=base)


def can_switch_off(loaded: Loaded | Endpoint) -> bool:
    """Whether disabling the adapter gives the base model; some initializations change the base."""
    if isinstance(loaded, Endpoint) or not isinstance(loaded.model, PeftModel):
        return False
    return not changes_base(loaded.model.peft_config["default"])  # type: ignore[arg-type]


def release() -> None:
    """Free the memory of a model that is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_base_of(run: Run, name: str) -> bool:
    """Whether a folder or name is the base model of a run."""
    base = catalog.load(run.recipe).model.name
    if base is None:
        return False
    if os.path.isdir(base) and os.path.isdir(name):
        return Path(base).samefile(name)
    return base == name
