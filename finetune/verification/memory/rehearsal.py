"""Rehearse a step of a plan as one rank of its job, with each of a few numbers of layers."""

import datetime
import os
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.distributed.build import build as build_engine
from finetune.errors import FinetuneError
from finetune.planner import Plan
from finetune.verification.memory.fake_model import build, register
from finetune.verification.memory.pipeline_trace import PipelineStep
from finetune.verification.memory.trace import Rehearsed, Step


def join(rank: int, processes: int) -> None:
    """Become a rank of a fake process group, whose collectives complete without other ranks."""
    if processes > 1:
        os.environ["RANK"] = str(rank)
        dist.init_process_group("fake", rank=rank, world_size=processes, store=FakeStore())


def rehearse(
    plan: Plan, config: dict[str, Any], sizes: list[int], forward: bool = False
) -> list[Rehearsed]:
    """Take two steps with each number of layers and measure the second.

    Args:
        plan: what this process is a rank of.
        config: of the model.
        sizes: numbers of layers; of a pipeline, of each part of a stage.
        forward: take only the first forward pass, for what layers save.

    Raises:
        FinetuneError: transformers does not know the model, or it cannot be traced.
    """
    register()
    parts = plan.mesh.pipeline * plan.backend.axes.chunks
    kind = PipelineStep if plan.mesh.pipeline > 1 else Step
    with tempfile.TemporaryDirectory(prefix="finetune-") as scratch:
        engine = build_engine(plan, Path(scratch), datetime.timedelta(minutes=5))
        steps: list[Rehearsed] = []
        for layers in sizes:
            # A tensor of another mode would be copied, and its bytes counted twice.
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            network = build(engine, config, layers * parts, fake)
            try:
                step = kind(engine, network, layers * parts, fake)
                steps.append(step.forward() if forward else step.run())
            except DataDependentOutputException as error:
                raise FinetuneError(
                    f"--verify: the step reads a value of a tensor ({error.func}), and fake "
                    f"tensors have none: {_reader(plan)} cannot be traced"
                ) from None
        return steps


def _reader(plan: Plan) -> str:
    """What reads values of tensors: torch 2.13's Adafactor, or a model that routes by value."""
    return "optim.name=adafactor" if plan.recipe.optim.name == "adafactor" else "the model"
