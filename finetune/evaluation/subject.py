"""What is evaluated: a run, an exported adapter, a folder, a hub name or a server."""

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import PeftModel

from finetune import catalog
from finetune.data.sources import HUB_NAME
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
    """A model by name, which is not loaded yet."""

    name: str
    """As the user wrote it."""
    run: Run | None = None
    """The run that it is."""
    words: Run | None = None
    """The run whose tokenizer and template ask it: of a base, the run that was trained from it."""
    adapter: Path | None = None
    """The folder of an exported adapter."""
    step: Step | None = None
    served: str | None = None
    """Of a URL: the name of the model there."""
    key: str | None = None
    is_base: bool = False
    """Whether it is what the run, or the adapter, was trained from."""

    @property
    def kind(self) -> str:
        """One word for the record."""
        if is_url(self.name):
            return "url"
        if self.is_base:
            return "base"
        return "run" if self.run else "adapter" if self.adapter else "model"

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the run that it is, or whose words it is asked in."""
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
        FinetuneError: it is neither a run, nor a folder with a model, nor a name or URL.
    """
    if is_url(name):
        return Subject(name, served=served, key=key)
    path = Path(name)
    if (path / "recipe.json").is_file():
        return Subject(name, run=open_run(path), step=step)
    if step is not None:
        raise FinetuneError(f"--step: {name} is not a run; a folder holds one model")
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
    """What a run or an adapter was trained from.

    Raises:
        FinetuneError: a folder or URL does not tell.
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
    """Load it, or ask its server for its models.

    Raises:
        FinetuneError: it cannot be loaded, or does not answer.
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
    return dataclasses.replace(loaded, model=load_weights(subject.name, revision=revision))


def can_switch_off(loaded: Loaded | Endpoint) -> bool:
    """Whether the model without its adapter is the base: some initialisations change the base."""
    if isinstance(loaded, Endpoint) or not isinstance(loaded.model, PeftModel):
        return False
    return not changes_base(loaded.model.peft_config["default"])  # type: ignore[arg-type]


@contextlib.contextmanager
def switched_off(loaded: Loaded) -> Iterator[Loaded]:
    """Inside, the loaded model answers without its adapter: the base, in the same load."""
    assert isinstance(loaded.model, PeftModel)
    with loaded.model.disable_adapter():
        yield loaded


def release() -> None:
    """Give back the memory of a model that is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_base_of(run: Run, name: str) -> bool:
    """Whether a folder or name is what a run was trained from."""
    base = catalog.load(run.recipe).model.name
    if base is None:
        return False
    if Path(base).is_dir() and Path(name).is_dir():
        return Path(base).samefile(name)
    return base == name
