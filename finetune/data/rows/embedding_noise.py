"""What the noise on the embeddings of a micro-batch depends on."""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F


@dataclasses.dataclass(frozen=True)
class Noise:
    """Noise of a micro-batch; `finetune.models.embedding_noise` computes it."""

    current: ClassVar["Noise | None"] = None
    """Noise of the micro-batch that is trained, like the seed of torch's generator."""

    alpha: float
    key: tuple[int, int]
    """Seed and step."""
    tokens: torch.Tensor  # (3, micro_rows, tokens) int64
    """Each token's document, its place there, and the document's length, which is 0 for padding."""

    def padded(self, by: tuple[int, ...]) -> "Noise":
        """With tokens of no noise, as `torch.nn.functional.pad` counts them."""
        return dataclasses.replace(self, tokens=F.pad(self.tokens, by))

    def part(self, tokens: slice) -> "Noise":
        """That of some tokens of each row."""
        return dataclasses.replace(self, tokens=self.tokens[..., tokens])
