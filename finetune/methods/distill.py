"""Distillation: a student learns the next-token distributions of a teacher."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.methods.pairs import completed_by, optim_of
from finetune.methods.sft import SFT
from finetune.recipe import STRICT, Model, Optim, Teacher

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from finetune.data.rows.collate import MicroBatch
    from finetune.methods.losses import Loss

DEFAULTS: dict[str, Any] = {"lr": 2e-5, "warmup": 0.1}
"""Defaults of `optim`; adapters need about ten times this learning rate."""


@dataclass(frozen=True, config=STRICT)
class Distill(SFT):
    """Learn from a teacher with the same vocabulary, at every trained token (arXiv:2306.13649)."""

    method: ClassVar[str] = "distill"
    metrics: ClassVar[tuple[str, ...]] = ("divergence", "nll")
    encoding_fields: ClassVar[tuple[str, ...] | None] = ("train_on",)
    teaches: ClassVar[bool] = True

    optim: Annotated[Optim, completed_by(DEFAULTS)] = optim_of(DEFAULTS)
    teacher: Teacher | None = None
    """The teacher model, which runs next to the student."""
    teacher_logps: Annotated[str, Field(min_length=1)] | None = None
    """Folder of log-probabilities written by `finetune teach`, instead of a running teacher."""
    loss_type: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """Divergence: KL(teacher, student), KL(student, teacher), or generalized Jensen-Shannon."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Weight of the teacher in the mixture distribution of `jsd`."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divisor of the logits of both models."""
    ce_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the added cross-entropy on the tokens of the data."""

    def __post_init__(self) -> None:
        if self.beta != 0.5 and self.loss_type != "jsd":
            raise ValueError(f"`beta` belongs to loss_type jsd, not to {self.loss_type}")
        if (self.teacher is None) == (self.teacher_logps is None):
            raise ValueError(
                "give `teacher`, a model that runs beside the student, or `teacher_logps`, what "
                "`finetune teach` wrote" + (", not both" if self.teacher is not None else "")
            )

    @property
    def taught_by(self) -> Model | None:
        if self.teacher is None:
            return None
        own = {"attention": self.model.attention, "reads": self.model.reads}
        return Model(**dataclasses.asdict(self.teacher), **own)

    def loss(self, model: "PreTrainedModel", batch: "MicroBatch") -> "Loss":
        """Sum over trained tokens of the divergence plus `ce_weight` x the cross-entropy."""
        from finetune.kernels.divergence import Target  # imports torch, so not at the top
        from finetune.methods.losses import Loss, taught_loss_sum

        kept = batch.token_columns
        target = Target(
            self.loss_type,
            self.beta,
            self.temperature,
            self.ce_weight,
            ids=kept.get("teacher_ids"),
            logps=kept.get("teacher_logps"),
        )
        total, nll = taught_loss_sum(model, batch, target)
        apart = total.detach() - self.ce_weight * nll.detach()
        tokens = batch.trained_tokens
        return Loss(total, {"divergence": (apart, tokens), "nll": (nll.detach(), tokens)})
