"""Supervised fine-tuning (SFT): next-token cross-entropy on the tokens that the recipe selects."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from finetune.recipe import STRICT, Recipe
from finetune.recipe.field_types import Share

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

    from finetune.data.chat.render import Chat
    from finetune.data.rows.collate import MicroBatch
    from finetune.data.rows.example import Example
    from finetune.data.rows.store import Rows
    from finetune.data.samples import Sample
    from finetune.methods.losses import Loss


@dataclass(frozen=True, config=STRICT)
class SFT(Recipe):
    """Fine-tune on conversations, prompts with completions, or text."""

    method: ClassVar[str] = "sft"

    train_on: Literal["assistant", "completion", "all"] = "assistant"
    """Tokens with a loss: all assistant turns, only the last assistant turn, or all tokens."""

    token_weight: Literal["none", "dft", "eaft"] = "none"
    """In training, a token's cross-entropy is multiplied by 1 (`none`), its probability (`dft`,
    arXiv:2508.05629) or the entropy of the 20 likeliest tokens over ln 20 (`eaft`,
    arXiv:2601.02151), without gradient."""
    eaft_alpha: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of the entropy of `eaft`."""
    label_smoothing: Share = 0.0
    """Share of a target's probability that is spread evenly over the vocabulary in training."""

    @property
    def token_loss(self) -> tuple[float, Literal["none", "dft", "eaft"], float] | None:
        given = (self.label_smoothing, self.token_weight, self.eaft_alpha)
        return None if given[:2] == (0.0, "none") else given

    def encode(self, sample: "Sample", chat: "Chat") -> "Example":
        from finetune.data.rows.example import Example

        return Example((chat.render(sample, self.train_on),))

    def count(self, batch: "MicroBatch") -> int:
        return batch.trained_tokens

    def terms(self, rows: "Rows", chosen: "np.ndarray") -> int:
        return int(rows.labelled[chosen].sum())

    def loss(self, model: "PreTrainedModel", batch: "MicroBatch") -> "Loss":
        from finetune.methods.losses import token_loss  # imports torch, so not at the top

        return token_loss(model, batch)
