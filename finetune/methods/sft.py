"""Supervised fine-tuning (SFT): next-token cross-entropy on the tokens that the recipe selects."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic.dataclasses import dataclass

from finetune.recipe import STRICT, Recipe

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
