"""Predict the memory and time of sampling, for online methods.

In addition to the weights, which are gathered if the model is divided, a process holds the keys and
values of all tokens of the completions that it samples at once, and for each completion a few rows
with one entry per vocabulary item: logits, their log-probabilities, and 64-bit noise.
"""

import dataclasses
import math

from finetune.planner.estimate import stage_workload
from finetune.planner.estimate.hardware import Machine
from finetune.planner.estimate.workload import Workload
from finetune.planner.plan import Plan
from finetune.planner.shapes.architecture import Architecture

OF_LOGITS = 4 + 4
"""Bytes per vocabulary item for logits and logits divided by the temperature."""
OF_NOISE = 8 + 8
"""Bytes per vocabulary item for noise: the output of Philox, and the values made from it."""
ROOM = 12
"""Tokens by which the tensors of keys and values grow."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Memory and time that sampling adds on one process."""

    rows: int
    """Completions sampled at once."""
    tokens: int
    """Maximum number of tokens in a prompt with its completion."""
    cache: float
    """Bytes of keys and values."""
    logits: float
    """Bytes of logits and noise."""
    weights: float
    """Bytes of weights that a divided model gathers on every process; 0 if it is not divided."""
    seconds: float | None
    """Lower bound in seconds: reading the weights for each token of a batch, or multiplying."""

    @property
    def memory(self) -> float:
        """Peak bytes."""
        return self.cache + self.logits + self.weights

    def summary(self) -> dict[str, float]:
        """Plain values for `plan.json`, with the same names as the measured values."""
        found: dict[str, float] = {
            "sampling_memory": round(self.memory),
            "sampling_cache": round(self.cache),
        }
        found |= {"sampling_weights": round(self.weights)} if self.weights else {}
        return found if self.seconds is None else found | {"sampling_seconds": self.seconds}


def sampling(
    plan: Plan,
    shape: Architecture,
    machine: Machine | None = None,
    tokens: int | None = None,
    weights: float = 0.0,
) -> Sampling | None:
    """Memory and time of sampling for a plan; None if its processes do not sample.

    Args:
        plan: its recipe sets the number and length of completions, which its processes share.
        shape: shape of the model.
        machine: machine for the prediction of time; None for memory only.
        tokens: length of the longest prompt with its completion; by default the maximum.
        weights: bytes of weights that are gathered (`gathered_weights`).
    """
    recipe, width = plan.recipe, 2 if plan.backend.precision == "bf16" else 4
    sampled = recipe.sampled
    if sampled is None or sampled.elsewhere:
        return None
    mine, longest = math.ceil(sampled.count / plan.processes), sampled.longest
    rows, tokens = min(mine, sampled.at_once), tokens or recipe.encoded_length + longest
    places = tokens - longest + (longest // (ROOM + 1) + 1) * (ROOM + 1)
    of_layer = 2 * shape.key * width * rows * places
    # Keys and values of one layer are copied one after the other when they grow.
    cache = of_layer * (shape.layers + 0.5)
    logits = rows * shape.vocab * (OF_LOGITS + OF_NOISE)
    seconds = None
    if machine is not None:
        reads = math.ceil(mine / rows) * longest * shape.parameters * width / machine.gpu.bandwidth
        products = 2 * shape.active_parameters * mine * longest / machine.gpu.flops
        seconds = max(reads, products)
    return Sampling(rows, tokens, cache, logits, weights, seconds)


def gathered_weights(workload: Workload) -> float:
    """Bytes of weights that a process gathers for sampling; 0 if the model is not divided.

    Without shards and casts, a process uses its own complete tensors as they are: the layers of its
    stage, of which the smallest counts, or what tensor parallelism does not divide, such as norms.
    """
    layout, ways = workload.layout, workload.layout.axes.tensor
    if not layout.axes.any:
        return 0.0
    complete = _weights(workload)
    casts = workload.compute == 2 and workload.adapter is None
    if casts or layout.group > 1 or (ways > 1 and layout.axes.pipeline > 1):
        return complete
    if ways > 1:
        return (complete - _weights(stage_workload.here(workload))) * ways / (ways - 1)
    return complete - min(_own(workload, stage) for stage in range(layout.axes.pipeline))


def _own(workload: Workload, stage: int) -> float:
    """Bytes of the weights of a stage; a tied table is that of the first stage."""
    layout, shape = dataclasses.replace(workload.layout, stage=stage), workload.shape
    here = stage_workload.here(dataclasses.replace(workload, layout=layout))
    copied = shape.tied and stage and stage == layout.axes.pipeline - 1
    width = 4 if workload.adapter is None else workload.frozen_width
    return _weights(here) - copied * float(shape.head_weights * width)


def _weights(workload: Workload) -> float:
    """Bytes of weights: trained ones in fp32, except linear layers in 16 bits, and frozen ones."""
    found, shape, adapter = 4.0 * workload.trained, workload.shape, workload.adapter
    if workload.compute == 2:
        linear = shape.layers * shape.linear_weights + (not shape.tied) * shape.head_weights
        narrow = linear if adapter is None else adapter.parameters - adapter.whole
        found -= 2.0 * narrow
    return workload.frozen_bytes + found
