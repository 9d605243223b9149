"""The scores of a sequence classification model: read at given places only, in fp32.

As `finetune.kernels.head` does, the classes of the model and of its head are replaced by subclasses
of the same name: the head's weight is used inside the head's own forward pass, where every engine
has gathered it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel


def give_scores(model: PreTrainedModel) -> None:
    """Let a model give its scores where its forward pass is told the places.

    Args:
        model: the plain model, which may hold PEFT's modules already.
    """
    score = model.score
    heads = [*score.modules_to_save.values()] if isinstance(score, ModulesToSaveWrapper) else []
    for head in heads or [score]:
        head.__class__ = ScoreHead
    kind = type(model)
    own = {"__module__": kind.__module__}
    model.__class__ = type(kind.__name__, (WithScores, kind), own)


class WithScores:
    """Mixed into a sequence classification model: a forward pass that ends in scores of places."""

    balance = None
    """No load-balancing loss of experts: transformers adds none to scores."""

    def forward(self, *args: Any, places: torch.Tensor | None = None, **inputs: Any) -> Any:
        """As the model's own, or with `places` the scores, (places, labels) in fp32.

        Args:
            places: flat indices into (rows, length), (places,) int64.
        """
        if places is None:
            return super().forward(*args, **inputs)
        given = {name: value for name, value in inputs.items() if value is not None}
        output = self.base_model(*args, **given)
        return self.score(output.last_hidden_state.flatten(0, 1)[places])


class ScoreHead(nn.Linear):
    """A score head that computes in fp32: a score is one number, and not one of a distribution."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), bias)
