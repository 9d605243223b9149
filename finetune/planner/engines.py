"""Properties of each engine that the planner needs, as one table.

The engines themselves are in `finetune/distributed`; nothing here starts one.
"""

import dataclasses
from typing import Literal

from finetune.backend import Engine

Scheme = Literal["fp32", "bf16", "autocast", "fsdp", "deepspeed"]
"""Data types of weights and compute: all fp32; all bf16; fp32 weights under autocast; fp32 shards
gathered in bf16; bf16 weights with fp32 master weights in the optimizer."""


@dataclasses.dataclass(frozen=True)
class Traits:
    """Properties of an engine."""

    alone: bool = False
    """Runs exactly one process."""
    least: int = 1
    """Minimum number of processes."""
    package: str | None = None
    """Package that only this engine needs; in lower case, the name of its module."""
    several_machines: tuple[str, ...] = ()
    """Flags that `accelerate launch` needs on several machines."""
    scheme: Scheme = "autocast"
    """How it handles weights under bf16."""
    copies_gradients: bool = False
    """Copies every gradient into a bucket of the same data type."""
    shards: bool = False
    """Can shard over processes."""
    shards_all: bool = False
    """Shards parameters, gradients and moments between passes for every setting of the backend's
    `shard`: along the first dimension, padded (FSDP2), and gathered in units of modules."""
    floats_only: bool = False
    """Shards only floating point tensors."""
    chooses_reduction: bool = False
    """Can reduce gradients once per step or after every micro-batch."""
    masters: bool = False
    """Keeps trained weights in the compute data type, and its own fp32 master weights."""
    reduces_as_computed: bool = False
    """Reduces gradients in the compute data type."""
    for_own_module: bool = False
    """With sharded parameters, a weight is gathered only while its own module runs."""
    keeps_reused: bool = False
    """Keeps parameters gathered that are used again soon."""
    host_elements: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Bytes of host memory per trained parameter, by the backend's `offload`."""
    host_buffers: float = 1.0
    """Factor on `host_elements` for buffers."""
    traced: bool = False
    """A step of one rank can be traced without the other ranks."""
    untraced: str = ""
    """Why a step cannot be traced."""
    divides: bool = False
    """Divides the model over processes that train on the same rows."""


TRAITS: dict[Engine, Traits] = {
    "single": Traits(alone=True),
    "ddp": Traits(
        least=2,
        copies_gradients=True,
        untraced="DDP's reducer reads real memory and cannot be traced",
    ),
    "fsdp": Traits(
        scheme="fsdp",
        shards=True,
        shards_all=True,
        floats_only=True,
        chooses_reduction=True,
        host_elements={"optimizer": 16.0, "all": 16.0},  # fp32 weights, gradients and moments
        traced=True,
    ),
    "deepspeed": Traits(
        package="DeepSpeed",
        # Each machine starts its own processes, as under every other backend. DeepSpeed's default
        # launcher starts all of them from the first machine with pdsh.
        several_machines=("--deepspeed_multinode_launcher", "standard"),
        scheme="deepspeed",
        shards=True,
        masters=True,
        reduces_as_computed=True,
        for_own_module=True,
        keeps_reused=True,
        host_elements={"optimizer": 16.0, "all": 18.0},
        host_buffers=1.5,  # its own estimator's factor
        untraced="DeepSpeed's engine cannot be traced without its processes",
    ),
    "mesh": Traits(
        least=2,
        floats_only=True,
        chooses_reduction=True,
        divides=True,
        traced=True,
    ),
}
