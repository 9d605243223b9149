"""Predict the memory and time of sampling, for online methods.

In addition to its state and to the weights that it gathers, a process holds the keys and values of
all tokens of the completions that it samples at once, and for each completion a few rows with one
entry per vocabulary item: logits, their log-probabilities, and 64-bit noise.
"""

import dataclasses
import math

from finetune.planner.estimate import stage_workload
from finetune.planner.estimate.autograd.operations import forward_operations
from finetune.planner.estimate.hardware import Machine
from finetune.planner.estimate.sharding.resident import cast_weights
from finetune.planner.estimate.workload import Workload

OF_LOGITS = 4 + 4
"""Bytes per vocabulary item for logits and logits divided by the temperature."""
OF_NOISE = 8 + 8
"""Bytes per vocabulary item for noise: the output of Philox, and the values made from it."""
ROOM = 12
"""Tokens by which the tensors of keys and values grow."""
DRAWN = 4.5
"""How often logits and noise pass through memory: 13.5 ns per entry on one thread of a CPU."""
CACHE_COPIES = 3
"""How often keys and values pass through memory for a token: read by attention, and read and
written where their heads are repeated for the groups of queries."""


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
    """Bytes of weights that are made for sampling: gathered from the parts of a divided model, or
    cast by autocast."""
    units: float
    """Bytes of gathered shards."""
    seconds: float | None
    """Seconds of a sampling phase in which every completion has the maximum length."""

    @property
    def memory(self) -> float:
        """Peak bytes, without gathered shards, as a run measures them."""
        return self.cache + self.logits + self.weights

    def summary(self) -> dict[str, float]:
        """Plain values for `plan.json`, with the same names as the measured values."""
        found: dict[str, float] = {
            "sampling_memory": round(self.memory),
            "sampling_cache": round(self.cache),
        }
        found |= {"sampling_weights": round(self.weights)} if self.weights else {}
        return found if self.seconds is None else found | {"sampling_seconds": self.seconds}


def sampling(workload: Workload, machine: Machine | None = None) -> Sampling | None:
    """Memory and time of sampling; None if the processes of the workload do not sample.

    Args:
        machine: machine for the prediction of time; None for memory only.
    """
    asked, shape, width = workload.sampled, workload.shape, workload.compute
    if asked is None:
        return None
    mine, tokens = math.ceil(asked.count / workload.layout.processes), workload.length
    rows, prompt = min(mine, asked.at_once), max(1, tokens - asked.longest)
    places = prompt + (asked.longest // (ROOM + 1) + 1) * (ROOM + 1)
    of_token = 2.0 * shape.key * width
    # Keys and values of one layer are copied one after the other when they grow.
    cache = of_token * rows * places * (shape.layers + 0.5)
    logits = float(rows * shape.vocab * (OF_LOGITS + OF_NOISE))
    units = gathered_units(workload)
    weights = gathered_weights(workload)
    if workload.autocast and workload.adapter is None and not workload.layout.axes.any:
        weights = 2.0 * (cast_weights(workload) + shape.head_weights)
    found = Sampling(rows, tokens, cache, logits, weights, units, None)
    if machine is None:
        return found
    gpu, reached = machine.gpu, machine.gpu.attained(width, workload.fp16)
    stored = workload.frozen_bytes + workload.trained * workload.trained_width
    read = (units or stored) + 2 * weights
    # Completions of a batch, on average half as long as the longest.
    read += CACHE_COPIES * of_token * shape.layers * rows * (prompt + asked.longest / 2)
    moving = read / (gpu.streams or gpu.bandwidth) + DRAWN * logits / gpu.bandwidth
    launching = forward_operations(workload) * gpu.launch
    each = 2.0 * shape.active_parameters * rows / reached
    token = launching + moving + each if workload.cpu else max(launching, moving, each)
    prompts = 2.0 * shape.active_parameters * math.ceil(mine / asked.of_prompt) * prompt / reached
    seconds = prompts + math.ceil(mine / rows) * asked.longest * token
    return dataclasses.replace(found, seconds=seconds)


def gathered_units(workload: Workload) -> float:
    """Bytes of shards that a process gathers for the time of sampling (FSDP and ZeRO-3)."""
    layout = workload.layout
    sharded = layout.traits.shards_all or layout.shard == "params"
    if layout.axes.any or layout.group == 1 or not sharded:
        return 0.0
    return workload.shape.layers * workload.unit_bytes + workload.outer_bytes


def most_rows(workload: Workload, state: float, usable: float) -> int:
    """The most completions that fit at once; 0 if not a single one does.

    Args:
        state: bytes that stay on a process between steps.
    """
    found = sampling(workload)
    assert found is not None
    return max(0, int((usable - state - found.units - found.weights) * found.rows
                      / (found.cache + found.logits)))  # fmt: skip


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
    width = 4 if workload.adapter is None else workload.compute
    return _weights(here) - copied * float(shape.head_weights * width)


def _weights(workload: Workload) -> float:
    """Bytes of weights: trained ones in fp32, except linear layers in 16 bits, and frozen ones."""
    found, shape, adapter = 4.0 * workload.trained, workload.shape, workload.adapter
    if workload.compute == 2:
        linear = shape.layers * shape.linear_weights + (not shape.tied) * shape.head_weights
        narrow = linear if adapter is None else adapter.parameters - adapter.whole
        found -= 2.0 * narrow
    return workload.frozen_bytes + found
