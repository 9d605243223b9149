"""Recipes: what is learned, as frozen and validated values.

A recipe says nothing about machines: how many processes, which sharding and which precision come
from a backend (`accelerate_configs/*.yaml`). Gradient accumulation is derived, never stated.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.changes import Changes
from finetune.errors import Checked
from finetune.recipe.sections import (
    STRICT,
    Batch,
    Data,
    Evaluation,
    Kernels,
    LoRA,
    Model,
    Optim,
    Positive,
    Saving,
    Scores,
    Teacher,
    Text,
)

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

    from finetune.data.chat.render import Chat
    from finetune.data.collate import MicroBatch
    from finetune.data.example import Example
    from finetune.data.samples import Sample
    from finetune.data.store import Rows
    from finetune.methods.losses import Loss

__all__ = [
    "STRICT", "Batch", "Data", "Evaluation", "Kernels", "Kind", "LoRA", "Model", "Optim",
    "Positive", "Recipe", "Saving", "Scores", "Teacher", "Text",
]  # fmt: skip

Kind = Literal["text", "pairs", "judged", "labelled", "prompts"]
"""Samples: single sequences, pairs of answers, answers that are wanted or not, sequences with a
label, or prompts."""


@dataclass(frozen=True, config=STRICT)
class Recipe(Changes, metaclass=Checked):
    """What is learned. A method (`finetune.methods`) subclasses it and defines a row's loss."""

    method: ClassVar[str] = ""
    """The method's name in YAML and JSON."""
    takes: ClassVar[Kind] = "text"
    """Samples that it learns from."""
    document_names: ClassVar[tuple[str, ...]] = ("",)
    """What the sequences of an `Example` are, which stay together as one row."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of what `loss` measures besides the loss; the first two are shown at each step."""
    extremes: ClassVar[tuple[str, ...]] = ()
    """Names of the largest (`max_...`) and smallest (`min_...`) values that `loss` gives."""
    teaches: ClassVar[bool] = False
    """Whether `loss` compares the model with a teacher, which both heads are read for."""
    unit: ClassVar[str] = "tokens"
    """What the terms of the loss are."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Names of the numbers that `encode` gives each row: columns of the batch for `loss`."""
    reads_reference: ClassVar[bool] = False
    """Whether `loss` reads the log-probabilities of a reference, as a column of the batch."""
    reads_kl: ClassVar[bool] = False
    """Whether `loss` reads the KL of the whole step (`batch.kl`): a forward pass before it."""
    encoding_fields: ClassVar[tuple[str, ...] | None] = None
    """The method's own fields that `encode` depends on; None for all of them."""
    adapter_kind: ClassVar[type] = LoRA

    model: Model = Field(default_factory=Model)
    data: tuple[Data, ...] = ()
    eval_data: tuple[Data, ...] = ()
    eval_rows: Positive | None = None
    """Hold out so many rows of `data` for evaluation when there is no `eval_data`."""
    data_checks: Literal["refuse", "report"] = "refuse"
    """What happens to data that can only be a mistake: rows without end, or beyond the context."""
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
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Experiment trackers that get the metrics besides `metrics.jsonl`."""
    backend: str = "single"
    """Backend that `finetune launch` uses when none is named."""

    @property
    def scores(self) -> Scores | None:
        """The score head that the model gets; None for a language model."""
        return None

    @property
    def taught_by(self) -> Model | None:
        """The model that teaches, loaded beside the one that is trained; None for no teacher."""
        return None

    def label_counts(self, rows: "Rows") -> dict[str, int]:
        """How often each label occurs in rows; empty for a method without labels."""
        return {}

    def label_of(self, numbers: "Mapping[str, float]") -> str:
        """The label of a document in words, from its `columns`; empty where it has none."""
        return ""

    @property
    def documents_per_row(self) -> int:
        """Sequences of an `Example`."""
        return len(self.document_names)

    @property
    def rows_are(self) -> str:
        """The word for several rows."""
        return {"pairs": "pairs", "prompts": "completions"}.get(self.takes, "rows")

    @property
    def row_length(self) -> int:
        """Most tokens of a row: of all its documents together; of a pack as well."""
        return self.documents_per_row * self.batch.max_length

    @property
    def encoded_length(self) -> int:
        """Most tokens of a document of the data."""
        return self.batch.max_length

    @property
    def loss_temperature(self) -> float:
        """Divides the logits that the loss is computed from."""
        return 1.0

    @property
    def sampled(self) -> tuple[int, int, int] | None:
        """Completions of a sampling, those that a device samples at once, and tokens of each."""
        return None

    @property
    def rows_per_sample(self) -> int:
        """Rows of steps that come from one row of the data in a pass over it."""
        return 1

    @property
    def most_micro_rows(self) -> int:
        """Rows of full length in a forward pass."""
        tokens = self.batch.micro_tokens
        return self.batch.micro_rows if tokens is None else max(1, tokens // self.row_length)

    @property
    def needs_second_model(self) -> bool:
        """Whether a copy of the model as training starts is held beside the one that is trained."""
        return False

    def problems(self) -> list[str]:
        """Contradictions between the method's own fields and the recipe's sections."""
        return []

    def advice(self) -> list[str]:
        """What the user should know of the method's settings although nothing is wrong."""
        return []

    def data_advice(self, counts: Mapping[str, Any]) -> list[str]:
        """What the user should know of the training rows, by their `audit.count_rows`."""
        return []

    def encode(self, sample: "Sample", chat: "Chat") -> "Example":
        """Token ids of the sequences of a sample, and which of them are trained."""
        raise NotImplementedError

    def count(self, batch: "MicroBatch") -> int:
        """Terms of the loss in a micro-batch, known before the forward pass."""
        raise NotImplementedError

    def terms(self, rows: "Rows", chosen: "np.ndarray") -> int:
        """The sum of `count` over the chosen rows, which any rank knows without the others."""
        raise NotImplementedError

    def loss(self, model: "PreTrainedModel", batch: "MicroBatch") -> "Loss":
        """Sum of the loss over the terms of a micro-batch, and sums of what else is measured.

        Every term depends on its own row only, so that the sum over a step is the same however
        the step is cut into micro-batches.
        """
        raise NotImplementedError

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a step that follow from the means of the others."""
        return {}
