"""Predict the memory of reward models, which score completions in a process next to rank 0.

A run with separate rewards for evaluation has two such processes, each with its own models.
"""

import dataclasses
import os
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.planner.estimate.adapter_sizes import NO_ADAPTER, lora
from finetune.planner.estimate.hardware import Machine
from finetune.planner.estimate.memory import inference
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes.config_files import model_source
from finetune.recipe import LoRA, Model, Recipe
from finetune.runs.run import Run, read_object

AT_ONCE = 16
"""Sequences per forward pass of a reward model."""


@dataclasses.dataclass(frozen=True)
class Judge:
    """Memory of one reward model in its process, in bytes."""

    name: str
    weights: float
    activations: float
    """Peak of a forward pass."""

    @property
    def memory(self) -> float:
        return self.weights + self.activations


def judges(recipe: Recipe, cpu: bool, tokens: int | None = None) -> list[Judge]:
    """The reward models of a recipe, once for each process that loads them.

    Args:
        recipe: recipe of an online method.
        cpu: whether they run on the CPU, in fp32, or on a GPU, in bf16.
        tokens: length of the longest prompt with its completion; by default the maximum.

    Raises:
        FinetuneError: a reward model does not exist, or its shape is unknown.
    """
    return [
        _judge(recipe, name, cpu, tokens or recipe.batch.max_length)
        for names in _folders(recipe)
        for name in names
    ]


def _folders(recipe: Recipe) -> tuple[tuple[str, ...], ...]:
    """Folders of reward models, by process; empty for a method without rewards."""
    return getattr(recipe, "reward_models", ())


def leaving_room(machine: Machine, recipe: Recipe) -> Machine:
    """The machine with GPU memory reduced by the reward models next to rank 0."""
    contexts = sum(map(bool, _folders(recipe))) * machine.gpu.context
    taken = contexts + sum(each.memory for each in judges(recipe, cpu=False))
    return dataclasses.replace(machine, taken=taken)


def _judge(recipe: Recipe, name: str, cpu: bool, tokens: int) -> Judge:
    if not os.path.isdir(name):
        raise FinetuneError(
            f"reward_funcs: '{name}': the folder does not exist; name the run of a reward model"
        )
    run, adapter, model = Run(Path(name)), None, Model(name=name)
    if run.recipe.is_file():
        fields = read_object(run.recipe)
        model = Model(**fields["model"])
        adapter = None if fields.get("adapter") is None else LoRA(**fields["adapter"])
    try:
        shape = model_source(dataclasses.replace(recipe, model=model, adapter=None)).shape
    except FinetuneError as error:
        problems = (each.replace("model.name", "its model.name") for each in error.problems)
        raise FinetuneError(*(f"reward_funcs: '{name}': {each}" for each in problems)) from None
    shape = dataclasses.replace(shape, tied=False, scores=1)
    workload = Workload(
        shape, AT_ONCE, tokens, "fp32" if cpu else "bf16",
        adapter=NO_ADAPTER, quantization=model.quantization, attention="masked",
    )  # fmt: skip
    weights = workload.frozen_bytes
    if adapter is not None:
        weights += 4.0 * lora(shape, adapter.r, adapter.targets).parameters
    mask = workload.tokens * tokens
    return Judge(name, weights, inference(workload, shape) + mask)
