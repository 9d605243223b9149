"""Checks of this machine, before anything is allocated on it."""

from collections.abc import Iterator

import torch

from finetune.distributed import device
from finetune.distributed.base import Engine
from finetune.errors import problems_of, refuse
from finetune.planner.estimate.forecast import Forecast


def check_machine(engine: Engine, forecast: Forecast | None) -> None:
    """Refuse a machine that cannot run what is forecast, on every rank.

    Args:
        forecast: Prediction for a GPU; None on a CPU, or for a model without formulas.

    Raises:
        FinetuneError: with the problems of every rank.
    """
    everywhere = engine.gather(problems_of(MACHINE, engine, forecast))
    refuse(dict.fromkeys(problem for problems in everywhere for problem in problems))


def full_gpu(engine: Engine, forecast: Forecast | None) -> Iterator[str]:
    """device: other processes fill the GPU; stop them, choose another, or lower micro_rows."""
    if forecast is not None:
        free, total = torch.cuda.mem_get_info(engine.device)
        problem = device.too_full(forecast.peak_memory, free, total, device.gpu_processes)
        yield from [] if problem is None else [problem]


def attention(engine: Engine, _: Forecast | None) -> Iterator[str]:
    """model.attention: PyTorch's flex_attention cannot train on a CPU; use sdpa."""
    if engine.plan.recipe.model.attention == "flex_attention" and engine.device.type == "cpu":
        yield "model.attention: flex_attention of PyTorch cannot train on a CPU; use sdpa"


MACHINE = (full_gpu, attention)
