"""Open a checkpoint for export, with the settings of the export."""

import contextlib
import dataclasses
import functools
from pathlib import Path

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from finetune import catalog
from finetune.checkpoints.base_weights import refuse_other_base
from finetune.checkpoints.stop_tokens import base_reference, generation_config
from finetune.errors import FinetuneError
from finetune.exporters.base_tensors import as_trained, open_base
from finetune.exporters.merge import Merge
from finetune.inference.generate import stop_ids
from finetune.inference.load import (
    Step,
    base_config,
    initial_adapter,
    load_tokenizer,
    open_checkpoint,
    trained_dtype,
)
from finetune.recipe import Recipe
from finetune.runs.run import Run


@dataclasses.dataclass(frozen=True)
class Source:
    """A verified checkpoint and the settings of its export."""

    run: Run
    recipe: Recipe
    checkpoint: Path
    step: int
    adapter: Path | None
    """Folder of the adapter in PEFT's format; None if all weights were trained."""
    initial: Path | None
    """Folder of the adapter before its first step, if its initialization changed the base."""
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig | None
    """Generation settings with the stop tokens of training; None for a score head."""
    dtype: torch.dtype | None
    """Data type of full weights; by default that of the base model's files."""
    shard_size: str
    """Maximum size of a weight file, such as 5GB."""
    llama_cpp: Path | None = None
    """Checkout of llama.cpp, for GGUF."""
    gguf_type: str = "q8_0"
    """Data type of a GGUF file."""
    merge_into: str | None = None
    """`nf4`: merge an adapter into the base as it was quantized for training."""

    base: str | None = None
    """Name of the adapter's base in the exported files; None for the name in the run."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """Data type of the base's files; fp32 for a new model without one."""
        dtype = base_config(self.recipe).dtype
        return getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32

    @property
    def base_name(self) -> tuple[str, str | None]:
        """Name and revision of the base in an adapter's files."""
        return base_reference(self.recipe.model) if self.base is None else (self.base, None)

    @functools.cached_property
    def merge(self) -> Merge:
        """The adapter with its base, before the weights of the base are read.

        Raises:
            FinetuneError: the run has no adapter, the base is not the one of the training, or the
                adapter does not fit it.
        """
        recipe = self.recipe
        if self.adapter is None:
            raise FinetuneError(
                "--format merged: the run trained all weights; export it as 'model'"
            )
        refuse_other_base(self.checkpoint, recipe.model)
        base = open_base(recipe)
        if self.merge_into == "nf4":
            base = as_trained(base, trained_dtype(self.run) or torch.bfloat16)
        if self.generation is None:
            base.network.config.pad_token_id = AutoConfig.from_pretrained(self.adapter).pad_token_id
        return Merge(base, self.adapter, self.initial, self.result_dtype)

    @property
    def result_dtype(self) -> torch.dtype:
        """Data type of full weights: the requested one, else that of the base's files."""
        return self.dtype or self.stored_dtype


def open_source(run: Run, step: Step | None, dtype: torch.dtype | None, shard_size: str) -> Source:
    """Open a checkpoint of a run; by default the best one, else the last.

    Raises:
        FinetuneError: there is no checkpoint, or it is damaged.
    """
    recipe = catalog.load(run.recipe)
    checkpoint = open_checkpoint(run, step)
    adapter = checkpoint / "adapter"
    found = adapter if adapter.is_dir() else None
    tokenizer = load_tokenizer(checkpoint / "tokenizer")
    return Source(
        run=run,
        recipe=recipe,
        checkpoint=checkpoint,
        step=int(checkpoint.name.removeprefix("step-")),
        adapter=found,
        initial=None if found is None else initial_adapter(run),
        tokenizer=tokenizer,
        generation=_generation(recipe, tokenizer, found or checkpoint / "model"),
        dtype=dtype,
        shard_size=shard_size,
    )


def _generation(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, saved: Path
) -> GenerationConfig | None:
    """Generation settings of the checkpoint, else of the base, with the stop tokens of training."""
    if recipe.head.scored:
        return None
    own = GenerationConfig.from_model_config(base_config(recipe))
    if (saved / "generation_config.json").is_file():
        own = GenerationConfig.from_pretrained(saved)
    elif recipe.model.name is not None:
        with contextlib.suppress(OSError):  # the base has no such file
            own = GenerationConfig.from_pretrained(
                recipe.model.name, revision=recipe.model.revision or "main"
            )
    return generation_config(own, stop_ids(own, tokenizer), tokenizer.pad_token_id)


def is_loadable(folder: Path) -> bool:
    """Whether transformers or PEFT loads a folder; a user's own exporter may write other files."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
