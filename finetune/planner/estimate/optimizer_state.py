"""Bytes of state of an optimizer outside the table of the planner, from a step of a small one."""

import functools
import importlib
import json
from typing import Any

from finetune import extensions
from finetune.errors import FinetuneError
from finetune.recipe import Optim

SIDE = 64
"""Rows and columns of the matrix that is stepped."""


def measured(optim: Optim) -> float | None:
    """Bytes of state per weight in fp32; None for an optimizer that the planner knows.

    One that cannot take the step has the two moments of AdamW; a run refuses it with the reason.
    """
    path = {"sgd": "torch.optim:SGD"}.get(optim.name, optim.name)
    return _step(path, json.dumps(optim.arguments)) if ":" in path else None


@functools.cache
def _step(path: str, arguments: str) -> float:
    torch: Any = importlib.import_module("torch")  # other plans need none
    try:
        kind: Any = extensions.find("optim.name", path, {})
        weight = torch.nn.Parameter(torch.ones(SIDE, SIDE))
        made: Any = kind([weight], lr=1e-3, **json.loads(arguments))
        weight.grad = torch.ones(SIDE, SIDE)
        made.step()
    except (FinetuneError, TypeError, ValueError, RuntimeError):
        return 8.0
    state: list[Any] = [value for values in made.state.values() for value in values.values()]
    tensors = [each for each in state if isinstance(each, torch.Tensor) and each.dim()]
    return sum(each.nbytes for each in tensors) / SIDE**2
