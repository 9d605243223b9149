"""Reward model: learn to score answers from preference pairs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.methods.pairs import DocumentMethod, completed_by, optim_of
from finetune.recipe import STRICT, Head, Kind, Optim

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from finetune.data.chat.render import Chat
    from finetune.data.rows.collate import MicroBatch
    from finetune.data.rows.example import Example
    from finetune.data.samples import Sample
    from finetune.methods.losses import Loss

DEFAULTS: dict[str, Any] = {"lr": 1e-5, "warmup": 0.1}
"""Defaults of `optim`; adapters need about ten times this learning rate."""


@dataclass(frozen=True, config=STRICT)
class RewardModel(DocumentMethod):
    """Learn to score answers from pairs (Bradley-Terry; arXiv:2305.18290, eq. 2)."""

    method: ClassVar[str] = "reward"
    takes: ClassVar[Kind] = "pairs"
    document_names: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    columns: ClassVar[tuple[str, ...]] = ("margin",)
    unit: ClassVar[str] = "pairs"
    encoding_fields: ClassVar[tuple[str, ...] | None] = ()
    metrics: ClassVar[tuple[str, ...]] = (
        "margin", "accuracy", "mean_reward", "rewards/chosen", "rewards/rejected",
    )  # fmt: skip

    extremes: ClassVar[tuple[str, ...]] = ("min_reward", "max_reward")

    optim: Annotated[Optim, completed_by(DEFAULTS)] = optim_of(DEFAULTS)
    center_rewards_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Factor c of c (chosen + rejected)^2, which centers scores around zero (0.01 is common)."""

    @property
    def head(self) -> Head:
        return Head(("reward",))

    def encode(self, sample: "Sample", chat: "Chat") -> "Example":
        from finetune.data.rows.example import Example
        from finetune.data.samples import Preference, sequences_of

        assert isinstance(sample, Preference)
        rows = tuple(chat.scored(each) for each in sequences_of(sample))
        return Example(rows, {"margin": sample.margin}, scored=True)

    def label_of(self, numbers: Mapping[str, float]) -> str:
        return f"margin {numbers['margin']:g}" if numbers["margin"] else ""

    def loss(self, model: "PreTrainedModel", batch: "MicroBatch") -> "Loss":
        """Sum over pairs, with s the log-sigmoid:

        -s(chosen - rejected - margin) + c (chosen + rejected)^2        arXiv:2312.09244, eq. 2
        """
        from torch.nn.functional import logsigmoid  # imported here: recipes must load without torch

        from finetune.methods.losses import Loss, sequence_scores

        scores = sequence_scores(model, batch).view(-1, 2)  # (pairs, 2)
        chosen, rejected = scores.unbind(1)
        apart, margin = chosen - rejected, batch.columns["margin"][::2].float()
        terms = -logsigmoid(apart - margin)
        if self.center_rewards_coefficient:
            terms = terms + self.center_rewards_coefficient * (chosen + rejected) ** 2
        pairs, fixed = len(terms), scores.detach()
        sums = (apart.detach().sum(), (apart > 0).sum(), fixed.sum() / 2, *fixed.sum(0))
        metrics = {name: (each, pairs) for name, each in zip(self.metrics, sums, strict=True)}
        least = {"min_reward": fixed.min(), "max_reward": fixed.max()} if pairs else {}
        return Loss(terms.sum(), metrics, extremes=least)
