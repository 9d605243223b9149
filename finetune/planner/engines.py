"""What a plan asks of each engine: one row per engine answers every question.

The engines themselves are in `finetune/distributed`; nothing here starts one.
"""

import dataclasses
from typing import Literal

from finetune.backend import Engine

Scheme = Literal["fp32", "bf16", "autocast", "fsdp", "deepspeed"]


@dataclasses.dataclass(frozen=True)
class Traits:
    """How an engine lays training out, as facts."""

    alone: bool = False
    """Runs one process, and only one."""
    least: int = 1
    """Fewest processes."""
    package: str | None = None
    """What is installed for it alone; in small letters, what is imported."""
    several_machines: tuple[str, ...] = ()
    """Flags of `accelerate launch` that it needs there."""
    scheme: Scheme = "autocast"
    """How it holds weights in bf16."""
    copies_gradients: bool = False
    """Every gradient is copied into a bucket, in its own type."""
    shards: bool = False
    """Cuts what it holds over processes."""
    shards_all: bool = False
    """Whatever the backend's shard says, parameters, gradients and moments are all cut between
    passes, by the first dimension, padded (FSDP2); units of modules are gathered."""
    floats_only: bool = False
    """Shards floating point tensors only."""
    chooses_reduction: bool = False
    """Can reduce once a step or after every micro-batch."""
    masters: bool = False
    """Holds trained weights as it computes with them, and fp32 masters of its own."""
    reduces_as_computed: bool = False
    """Reduces gradients in the type that it computes in."""
    for_own_module: bool = False
    """With sharded parameters, a weight is whole while its own module runs, and only then."""
    keeps_reused: bool = False
    """Keeps gathered what is used again soon."""
    host_elements: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Bytes of host memory per trained parameter, by what is offloaded."""
    host_buffers: float = 1.0
    """Factor on all of that for buffers."""
    traced: bool = False
    """A step of one of its ranks can be traced without the others."""
    untraced: str = ""
    """Why it cannot."""
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
        # Each machine starts its own processes, as under every other backend; DeepSpeed's own way
        # starts them all from the first machine, by pdsh.
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
        untraced="a process of a divided model cannot be traced without the others",
    ),
}
