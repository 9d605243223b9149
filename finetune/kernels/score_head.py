"""Compute the scores of a sequence classification model at given positions only, in fp32.

As in `finetune.kernels.head`, the classes of the model and its head are replaced by subclasses of
the same name, and the head's weight is used inside the head's forward pass, where every engine has
gathered it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from finetune.kernels.mixin import mix_in


def give_scores(model: PreTrainedModel) -> None:
    """Enable a model to return its scores if its forward pass is given positions.

    Args:
        model: The plain model, possibly with PEFT's modules.
    """
    score = model.score
    heads = [*score.modules_to_save.values()] if isinstance(score, ModulesToSaveWrapper) else []
    for head in heads or [score]:
        head.__class__ = ScoreHead
    mix_in(model, WithScores)


class WithScores:
    """Mixin for a sequence classification model whose forward pass can score given positions."""

    balance = None
    """No load-balancing loss of experts, as transformers adds none to scores."""

    def forward(self, *args: Any, places: torch.Tensor | None = None, **inputs: Any) -> Any:
        """The model's own forward pass or, with `places`, the scores, (places, labels) in fp32.

        Args:
            places: (places,) int64, flat indices into (rows, length).
        """
        if places is None:
            return super().forward(*args, **inputs)
        given = {name: value for name, value in inputs.items() if value is not None}
        output = self.base_model(*args, **given)
        return self.score(output.last_hidden_state.flatten(0, 1)[places])


class ScoreHead(nn.Linear):
    """A score head that computes in fp32, since the value of a single score matters."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), bias)
