"""Weights of evaluations and results, where they are averages of those that take the steps."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from finetune.distributed.base import Engine
from finetune.distributed.parameters import local
from finetune.recipe import Optim

EMA = "average"
"""Name of the moving average in the state of an optimizer."""


def result(
    weight: torch.Tensor, state: Mapping[str, Any], optim: Optim, read: Callable[[str], Any] = local
) -> torch.Tensor:
    """The values of a result, from a weight and the state of its optimizer, in equal shapes.

    Before its first step, a weight is its own average.
    """
    if EMA in state and optim.ema_decay is not None:
        return read(state[EMA])
    if "z" in state and optim.schedule_free:
        # y = (1 - b1) z + b1 x, solved for x.
        return weight.lerp(read(state["z"]), 1 - 1 / optim.betas[0])
    return weight


@contextlib.contextmanager
def in_place(engine: Engine) -> Iterator[None]:
    """Context in which the trained weights are those of a result.

    The weights of the training are kept meanwhile, in place of gradients, and come back bit for
    bit.
    """
    optim, kept = engine.plan.recipe.optim, list[tuple[torch.Tensor, torch.Tensor]]()
    if optim.ema_decay is None and not optim.schedule_free:
        yield
        return
    for weight, state in engine.stepped():
        kept.append((weight, weight.clone()))
        weight.copy_(result(weight, state, optim))
    engine.follow_masters()
    try:
        yield
    finally:
        for weight, values in kept:
            weight.copy_(values)
        engine.follow_masters()


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Let an optimizer update the moving average of its weights after each of its steps.

    The average begins with the weights after the first step, as `torch.optim.swa_utils` does.
    """

    @torch.no_grad()
    def after_step(stepped: torch.optim.Optimizer, *_: Any) -> None:
        averages, weights = list[torch.Tensor](), list[torch.Tensor]()
        for group in stepped.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:  # its weights are as they were
                    continue
                state = stepped.state[parameter]
                if EMA not in state:
                    state[EMA] = parameter.data.clone()
                averages.append(local(state[EMA]))
                weights.append(local(parameter.data))
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - decay)

    optimizer.register_step_post_hook(after_step)
