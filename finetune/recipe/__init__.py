"""Recipes: frozen, validated dataclasses that define what is learned.

A recipe contains nothing about machines: the number of processes, sharding and precision come
from a backend (`accelerate_configs/*.yaml`). Gradient accumulation is derived, never stated.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from finetune.errors import Checked
from finetune.recipe.changes import Changes
from finetune.recipe.field_types import STRICT, HeldOut, Positive, Text, tracker
from finetune.recipe.heads import LANGUAGE, Head
from finetune.recipe.sections import (
    Batch,
    Completions,
    Data,
    Evaluation,
    Group,
    Kernels,
    LoRA,
    Model,
    Optim,
    Saving,
    Teacher,
)

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

    from finetune.data.chat.render import Chat
    from finetune.data.rows.collate import MicroBatch
    from finetune.data.rows.example import Example
    from finetune.data.rows.store import Rows
    from finetune.data.samples import Sample
    from finetune.methods.losses import Loss
    from finetune.training.passes import DataPasses, StepPasses

__all__ = [
    "LANGUAGE", "STRICT", "Batch", "Completions", "Data", "Evaluation", "Group", "Head", "HeldOut",
    "Kernels", "Kind", "LoRA", "Model", "Optim", "Positive", "Recipe", "Saving", "Teacher", "Text",
]  # fmt: skip

Kind = Literal["text", "pairs", "judged", "labelled", "prompts"]
"""Kind of sample: single sequences (`text`), preference pairs (`pairs`), answers marked as wanted
or unwanted (`judged`), sequences with a label (`labelled`), or prompts (`prompts`)."""


@dataclass(frozen=True, config=STRICT)
class Recipe(Changes, metaclass=Checked):
    """What is learned. Each method (`finetune.methods`) is a subclass that defines the loss."""

    method: ClassVar[str] = ""
    """The method's name in YAML and JSON."""
    takes: ClassVar[Kind] = "text"
    """Kind of sample that the method trains on."""
    document_names: ClassVar[tuple[str, ...]] = ("",)
    """Names of the sequences of an `Example`, which stay together in one row."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics that `loss` also returns; the first two are printed at each step."""
    extremes: ClassVar[tuple[str, ...]] = ()
    """Names of the maxima (`max_...`) and minima (`min_...`) that `loss` returns."""
    teaches: ClassVar[bool] = False
    """Whether `loss` compares the model with a teacher; it then reads the heads of both models."""
    unit: ClassVar[str] = "tokens"
    """Name of the terms that the loss sums over, in the plural."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Names of the per-row numbers that `encode` returns; `loss` reads them from the batch."""
    reads_reference: ClassVar[bool] = False
    """Whether `loss` reads the log-probabilities of a reference model from the batch."""
    passes_before_step: ClassVar[int] = 0
    """Forward passes over as many rows as a step has that `before_step` makes before each step."""
    encoding_fields: ClassVar[tuple[str, ...] | None] = None
    """Fields of the method that `encode` depends on; None for all of them."""

    model: Model = Field(default_factory=Model)
    data: tuple[Data, ...] = ()
    eval_data: tuple[Data, ...] = ()
    eval_rows: HeldOut | None = None
    """Rows of `data` to hold out for evaluation without `eval_data`: a number, or a fraction."""
    duplicates: Literal["keep", "drop"] = "keep"
    """Rows whose tokens equal those of an earlier one; `eval_data` comes after all of `data`."""
    data_checks: Literal["refuse", "report"] = "refuse"
    """Refuse or report data that must be a mistake: no row ends, rows exceed the context, ..."""
    adapter: LoRA | None = None
    """Low-rank adapter; null trains all weights."""
    batch: Batch = Field(default_factory=Batch)
    optim: Optim = Field(default_factory=Optim)
    kernels: Kernels = Field(default_factory=Kernels)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    saving: Saving = Field(default_factory=Saving)
    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the data; ignored when `max_steps` is given."""
    max_steps: Positive | None = None
    """Optimizer steps of the whole run."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of initial weights, data order and dropout."""
    trackers: tuple[Annotated[str, AfterValidator(tracker)], ...] = ()
    """Experiment trackers that get the metrics too: `tensorboard`, `wandb`, `mlflow`, `trackio`, or
    `module:Class` of Accelerate's `GeneralTracker`."""
    backend: str = "single"
    """Default backend of `finetune launch`."""
    stream_buffer: Positive = 10_000
    """Rows of a stream that are shuffled, and packed, together."""

    @property
    def streams(self) -> bool:
        """Whether rows to train on are prepared while steps run."""
        return any(data.stream and data.first is None for data in self.data)

    @property
    def head(self) -> Head:
        """The head of the model: that of a language model, or a new one that scores sequences."""
        return LANGUAGE

    @property
    def taught_by(self) -> Model | None:
        """The teacher model, loaded next to the student; None without a teacher."""
        return None

    def held_out(self, rows: int) -> int:
        """Rows of `data` that are held out for evaluation, of all its rows."""
        if isinstance(self.eval_rows, float):
            return max(1, round(self.eval_rows * rows))
        return self.eval_rows or 0

    def label_counts(self, rows: "Rows") -> dict[str, int]:
        """Number of rows for each label; empty for a method without labels."""
        return {}

    def label_of(self, numbers: "Mapping[str, float]") -> str:
        """The label of a document as text, from its `columns`; empty if it has none."""
        return ""

    @property
    def documents_per_row(self) -> int:
        """Sequences of an `Example`."""
        return len(self.document_names)

    @property
    def rows_are(self) -> str:
        """What rows are called in messages, in the plural."""
        return {"pairs": "pairs", "prompts": "completions"}.get(self.takes, "rows")

    @property
    def row_length(self) -> int:
        """Maximum number of tokens in a row, over all its documents; also that of a pack."""
        return self.documents_per_row * self.batch.max_length

    @property
    def encoded_length(self) -> int:
        """Maximum number of tokens in a document of the data."""
        return self.batch.max_length

    @property
    def completion_length(self) -> int:
        """Maximum number of tokens that a sampled completion adds to a document of the data."""
        return self.batch.max_length - self.encoded_length

    @property
    def fits_rows_by(self) -> tuple[str, ...]:
        """Values of `batch.overlong` that shorten or drop rows and keep their meaning."""
        if self.takes == "prompts":
            return ("drop",)
        parts = self.takes in ("pairs", "judged") or self.head.scored
        return ("drop", "truncate") if parts else ("drop", "truncate", "split")

    @property
    def loss_temperature(self) -> float:
        """Temperature that divides the logits before the loss."""
        return 1.0

    @property
    def token_loss(self) -> tuple[float, Literal["none", "dft", "eaft"], float] | None:
        """Label smoothing, weight and its exponent, if a token's loss in training is other than its
        cross-entropy."""
        return None

    @property
    def tail_weight(self) -> float:
        """Weight of the tokens of an answer beyond the length of the other answer of its pair."""
        return 1.0

    @property
    def sampled(self) -> Completions | None:
        """What the method samples; None for a method that does not sample."""
        return None

    @property
    def evaluated_rewards(self) -> tuple[str, ...]:
        """Names of the rewards of an evaluation; empty for a method without rewards."""
        return ()

    @property
    def rows_per_sample(self) -> int:
        """Training rows made from each row of the data in one epoch."""
        return 1

    @property
    def most_micro_rows(self) -> int:
        """Number of rows of maximum length in a forward pass."""
        tokens = self.batch.micro_tokens
        return self.batch.micro_rows if tokens is None else max(1, tokens // self.row_length)

    @property
    def needs_second_model(self) -> bool:
        """Whether a copy of the initial model is kept in memory during training."""
        return False

    def problems(self) -> list[str]:
        """Contradictions between the method's own fields and the recipe's sections."""
        return []

    def advice(self) -> list[str]:
        """Warnings about the method's settings that do not prevent the run."""
        return []

    def data_advice(self, counts: Mapping[str, Any]) -> list[str]:
        """Warnings about the training rows, given the counts from `audit.count_rows`."""
        return []

    def encode(self, sample: "Sample", chat: "Chat") -> "Example":
        """Tokenize the sequences of a sample and mark the tokens that are trained."""
        raise NotImplementedError

    def count(self, batch: "MicroBatch") -> int:
        """Number of loss terms in a micro-batch, known before the forward pass."""
        raise NotImplementedError

    def terms(self, rows: "Rows", chosen: "np.ndarray") -> int:
        """The sum of `count` over the chosen rows, computed on any rank without communication."""
        raise NotImplementedError

    def before_training(self, passes: "DataPasses") -> "Mapping[str, np.ndarray]":
        """Values of each document that `loss` reads from `batch.columns`, computed before step 1.

        Called on every rank with the model at the start of training; the values are kept with the
        run, and a resumed run reads them from there.

        Returns:
            (documents,) fp64 by name, from `passes.of_documents`.
        """
        return {}

    def before_step(self, passes: "StepPasses") -> Any:
        """A value of the complete step that `loss` reads as `batch.of_step`, without gradient.

        Called on every rank before the passes of each step and of each evaluation, if
        `passes_before_step` is not 0; it must be the same on every rank.
        """
        return None

    def reference_of_step(self, passes: "StepPasses") -> float:
        """A value of each step by the reference, which `before_step` reads: `passes.reference`.

        Called before the first step for a method with `reads_reference` and `passes_before_step`.
        """
        return 0.0

    def loss(self, model: "PreTrainedModel", batch: "MicroBatch") -> "Loss":
        """Sum of the loss over the terms of a micro-batch, and sums of the method's metrics.

        Each term depends only on its own row, and on what `before_step` computed of the complete
        step, so the sum over a step does not depend on how the step is split into micro-batches.
        """
        raise NotImplementedError

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a step that are computed from the means of its other metrics."""
        return {}
