"""Classification and regression of texts, from a score head at the last token."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.methods.pairs import DocumentMethod, completed_by, optim_of
from finetune.recipe import STRICT, Head, Kind, Optim

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from finetune.data.chat.render import Chat
    from finetune.data.rows.collate import MicroBatch
    from finetune.data.rows.example import Example
    from finetune.data.rows.store import Rows
    from finetune.data.samples import Sample
    from finetune.methods.losses import Loss, Sum

DEFAULTS: dict[str, Any] = {"lr": 2e-5, "warmup": 0.1}
"""Defaults of `optim`; adapters need about ten times this learning rate."""
REGRESSION = "regression"
MULTI = "multi_label_classification"


@dataclass(frozen=True, config=STRICT)
class Classifier(DocumentMethod):
    """Learn to predict the class of a text or conversation, several classes, or a number."""

    method: ClassVar[str] = "classifier"
    takes: ClassVar[Kind] = "labelled"
    unit: ClassVar[str] = "rows"
    encoding_fields: ClassVar[tuple[str, ...] | None] = ("labels", "problem_type")

    optim: Annotated[Optim, completed_by(DEFAULTS)] = optim_of(DEFAULTS)
    labels: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the classes, in the order of their indices; empty for regression."""
    problem_type: Literal[
        "single_label_classification", "multi_label_classification", "regression"
    ] = "single_label_classification"
    """One class per row, any number of classes per row, or a number; named as in transformers."""
    class_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Factor of the loss of a class, by its name; 1 for classes that are not listed."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.problem_type == REGRESSION and (self.labels or self.class_weights):
            problems.append("`labels` and `class_weights` belong to classes, not to a regression")
        least = 0 if self.problem_type == REGRESSION else 1 if self.problem_type == MULTI else 2
        if len(self.labels) < least:
            problems.append(
                f"`labels` has {len(self.labels)} names, expected {least} or more: name the "
                "classes, such as labels: [negative, positive]"
            )
        if len(set(self.labels)) < len(self.labels):
            problems.append("`labels` has a name twice")
        unknown = [name for name in self.class_weights if name not in self.labels]
        if unknown and self.problem_type != REGRESSION:
            problems.append(f"`class_weights` names {', '.join(unknown)}, which `labels` lacks")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def head(self) -> Head:
        return Head(self.labels or ("value",), self.problem_type)

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override] - the labels' own
        if self.problem_type == MULTI:
            return tuple(f"label{number}" for number in range(len(self.labels)))
        return ("label",)

    @property
    def metrics(self) -> tuple[str, ...]:  # type: ignore[override] - the classes' own
        if self.problem_type == REGRESSION:
            return ("mae", "mean_score")
        return ("accuracy", "mean_score", *(f"f1/{name}" for name in self.labels))

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Macro F1: the mean over classes that occur or are predicted."""
        found = [value for name, value in means.items() if name.startswith("f1/")]
        return {"f1": sum(found) / len(found)} if found else {}

    def encode(self, sample: "Sample", chat: "Chat") -> "Example":
        from finetune.data.rows.example import Example
        from finetune.data.samples import Labelled

        assert isinstance(sample, Labelled)
        numbers = dict(zip(self.columns, self._label(sample.label), strict=True))
        return Example((chat.scored(sample.sequence),), numbers, scored=True)

    def _label(self, value: Any) -> tuple[float, ...]:
        """A label as numbers: the index of its class, 0 or 1 for each class, or the value."""
        from finetune.data.read.labels import class_of, classes_of, number_of

        if self.problem_type == REGRESSION:
            return (number_of(value),)
        if self.problem_type == MULTI:
            chosen = classes_of(value, self.labels)
            return tuple(float(number in chosen) for number in range(len(self.labels)))
        return (float(class_of(value, self.labels)),)

    def label_counts(self, rows: "Rows") -> dict[str, int]:
        if self.problem_type == REGRESSION or not len(rows):
            return {}
        known = [rows.documents.columns[name][rows.members] for name in self.columns]
        if self.problem_type == MULTI:
            return {name: int(n.sum()) for name, n in zip(self.labels, known, strict=True)}
        return {name: int((known[0] == number).sum()) for number, name in enumerate(self.labels)}

    def label_of(self, numbers: Mapping[str, float]) -> str:
        if self.problem_type == REGRESSION:
            return f"{numbers['label']:g}"
        if self.problem_type == MULTI:
            holds = zip(self.labels, (numbers[name] for name in self.columns), strict=True)
            return ", ".join(name for name, is_it in holds if is_it) or "none of the labels"
        return self.labels[int(numbers["label"])]

    def loss(self, model: "PreTrainedModel", batch: "MicroBatch") -> "Loss":
        """Sum over rows of the cross-entropy, the mean binary cross-entropy of all labels, or the
        squared error."""
        import torch  # imported here: recipes must load without torch

        from finetune.methods.losses import Loss, sequence_scores

        scores = sequence_scores(model, batch)  # (rows, labels)
        known = [batch.columns[name] for name in self.columns]
        labels = torch.stack(known, 1).float()  # (rows, 1) or (rows, labels)
        terms = self.row_losses(scores, labels)
        return Loss(terms.sum(), self._counts(scores.detach(), labels))

    def row_losses(self, scores: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        """The loss of each row, (rows,).

        Args:
            scores: (rows, labels) fp32.
            labels: (rows, 1), the index of a class or a value; (rows, labels) for multi-label.
        """
        import torch.nn.functional as F

        if self.problem_type == REGRESSION:
            return ((scores - labels) ** 2)[:, 0]
        weights = scores.new_tensor([self.class_weights.get(name, 1.0) for name in self.labels])
        if self.problem_type == MULTI:
            each = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
            return (each * weights).mean(1)
        classes = labels[:, 0].long()
        return F.cross_entropy(scores, classes, reduction="none") * weights[classes]

    def _counts(self, scores: "torch.Tensor", labels: "torch.Tensor") -> "dict[str, Sum]":
        import torch.nn.functional as F

        rows, mean = len(scores), scores.mean(1).sum()
        if self.problem_type == REGRESSION:
            return {"mae": ((scores - labels).abs().sum(), rows), "mean_score": (mean, rows)}
        if self.problem_type == MULTI:
            true, predicted = labels, (scores > 0).float()
        else:
            numbers = labels[:, 0].long(), scores.argmax(1)
            true, predicted = (F.one_hot(each, len(self.labels)).float() for each in numbers)
        right = (true == predicted).all(1).sum(), rows
        both, either = (true * predicted).sum(0), (true + predicted).sum(0)  # (labels,)
        shares = zip(self.metrics[2:], 2 * both, either, strict=True)
        of_classes = {name: (twice, seen) for name, twice, seen in shares}
        return {"accuracy": right, "mean_score": (mean, rows), **of_classes}
