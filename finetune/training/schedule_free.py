"""Schedule-free AdamW (arXiv:2405.15682), element by element, so the same on every backend.

Three points belong to a weight: z takes the steps, x is the mean of all z so far, and the gradient
is computed at y, between them, which is what the model holds while it trains:

    y = (1 - b1) z + b1 x

x is not stored; it follows from y and z (`finetune.distributed.averages`).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune.distributed.parameters import local, local_gradient

CHUNK = 2**24
"""Elements updated at once, so that the copy of a chunk is small next to a model."""


class AdamW(torch.optim.Optimizer):
    """The arguments of our variants of AdamW."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, given)


class ScheduleFreeAdamW(AdamW):
    """AdamW without a schedule; the operations are those of schedulefree 1.4, in their order.

    The mean weighs a step by the square of its learning rate, so that warmup counts less.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            if not trained:
                continue
            states = [self.state[each] for each in trained]
            for parameter, state in zip(trained, states, strict=True):
                if not state:
                    state.update(step=0, weight_sum=0.0, z=parameter.data.clone())
                    state["exp_avg_sq"] = torch.zeros_like(parameter.data)
            known = max(states, key=lambda state: int(state["step"]))
            step, weight = int(known["step"]) + 1, group["lr"] ** 2
            # In fp32, as a checkpoint has it.
            total = float(np.float32(float(known["weight_sum"]) + weight))
            for state in states:
                state.update(step=step, weight_sum=total)
            for some in self._chunks(trained):
                _update(*some, step, weight / total if total else 0.0, group)

    def _chunks(self, parameters: list[nn.Parameter]) -> Iterator[list[list[torch.Tensor]]]:
        """Weights, gradients, second moments and z of some elements, as lists of flat tensors."""
        found, size = [list[torch.Tensor]() for _ in range(4)], 0
        for each in parameters:
            weight, state = each.data, self.state[each]
            held = [local(one).view(-1) for one in (weight, state["exp_avg_sq"], state["z"])]
            held.insert(1, local_gradient(each).reshape(-1))
            for part in zip(*(one.split(CHUNK) for one in held), strict=True):
                if size + part[0].numel() > CHUNK:
                    yield found
                    found, size = [list[torch.Tensor]() for _ in range(4)], 0
                size += part[0].numel()
                for values, value in zip(found, part, strict=True):
                    values.append(value)
        yield found


def _update(
    y: list[torch.Tensor],
    gradients: list[torch.Tensor],
    moments: list[torch.Tensor],
    z: list[torch.Tensor],
    step: int,
    share: float,
    group: dict[str, Any],
) -> None:
    """A step; `share` is the part of the new z in the mean x. The gradients are overwritten."""
    lr, (b1, b2), decay = group["lr"], group["betas"], group["weight_decay"]
    torch._foreach_mul_(moments, b2)
    torch._foreach_addcmul_(moments, gradients, gradients, value=1 - b2)
    roots = torch._foreach_div(moments, 1 - b2**step)
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_div_(gradients, roots)
    if decay:
        torch._foreach_add_(gradients, y, alpha=decay)
    torch._foreach_lerp_(y, z, weight=share)
    torch._foreach_add_(y, gradients, alpha=lr * (b1 * (1 - share) - 1))
    torch._foreach_sub_(z, gradients, alpha=lr)
