"""Supervised fine-tuning: next-token cross-entropy on the tokens that the person wants learned."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic.dataclasses import dataclass

from finetune.recipe import STRICT, Recipe

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

    from finetune.data.chat.render import Chat, Row
    from finetune.data.collate import MicroBatch
    from finetune.data.formats import Sample
    from finetune.data.store import Rows


@dataclass(frozen=True, config=STRICT)
class SFT(Recipe):
    """Fine-tune on conversations, prompts with completions, or text."""

    method: ClassVar[str] = "sft"

    train_on: Literal["assistant", "completion", "all"] = "assistant"
    """Tokens with a loss: every assistant turn, the last assistant turn only, or all."""

    def encode(self, sample: "Sample", chat: "Chat") -> "Row":
        return chat.render(sample, self.train_on)

    def count(self, batch: "MicroBatch") -> int:
        return batch.trained_tokens

    def terms(self, rows: "Rows", chosen: "np.ndarray") -> int:
        return int(rows.labelled[chosen].sum())

    def loss(self, model: "PreTrainedModel", batch: "MicroBatch") -> "torch.Tensor":
        from finetune.methods.losses import (
            token_loss_sum,  # torch, which a recipe must load without
        )

        return token_loss_sum(model, batch)
