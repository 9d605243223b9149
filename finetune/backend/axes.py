"""Axes that divide the model instead of the rows, read from a file or a launched process."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

from finetune.errors import FinetuneError, did_you_mean

Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]

SCHEDULES: tuple[Schedule, ...] = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
"""Supported schedules of `torch.distributed.pipelining`, with torch's names."""
Rotation = Literal["allgather", "alltoall"]

ROTATIONS: tuple[Rotation, ...] = ("allgather", "alltoall")
"""How context parallel processes exchange keys and values, with Accelerate's and torch's names."""

SECTION = "parallelism_config"
DATA = ("dp_replicate", "dp_shard")
DATA_KEYS = {f"{SECTION}_{key}_size" for key in DATA}
KEYS = {
    "pp": "pipeline",
    "cp": "context",
    "sp": "sequence",
    "tp": "tensor",
    "ep": "experts",
}
"""Maps the key in the section and in Accelerate's variables to the field of `Axes`."""
FLAGS = {
    "pipeline": "stages of a pipeline, each with some of the layers",
    "context": "processes that share the tokens of a row, and exchange its keys and values",
    "sequence": "processes that share the tokens of a row, and exchange them for heads",
    "tensor": "processes that share each layer",
    "experts": "processes that share the experts of a layer",
}
"""Maps the field of `Axes` to its description on the command line."""
OURS = ("pp", "ep")
"""Keys that Accelerate 1.15 reads and then drops; `finetune launch` sets their variables."""
SCHEDULE = "pp_schedule"
ROTATION = "cp_comm_strategy"
WORDS = {"schedule": "pipeline", "rotation": "context"}
"""Maps the fields of `Axes` that are not sizes to the axis that they belong to."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """Number of processes along each axis that divides the model; the rest is data parallel."""

    pipeline: int = 1
    """Pipeline stages, each with some of the layers."""
    context: int = 1
    """Processes that split the tokens of a row and exchange its keys and values."""
    sequence: int = 1
    """Processes that split the tokens of a row and exchange them for heads (Ulysses)."""
    tensor: int = 1
    """Processes that split each layer."""
    experts: int = 1
    """Processes over which the experts of a layer are divided, which may read different rows."""
    schedule: Schedule = "1F1B"
    """Order of the micro-batches in a pipeline."""
    rotation: Rotation = "allgather"
    """Keys and values of context parallel processes: each gathers all of them (`allgather`), or
    they pass from process to process (`alltoall`, ring attention)."""

    @property
    def any(self) -> bool:
        """Whether any axis divides the model."""
        return self.processes * self.experts > 1

    @property
    def processes(self) -> int:
        """Number of processes that train on the same rows."""
        return self.pipeline * self.parts * self.tensor

    @property
    def parts(self) -> int:
        """Number of processes that split the tokens of a row."""
        return self.context * self.sequence

    @property
    def ring(self) -> int:
        """Number of processes of ring attention; 1 without it."""
        return self.context if self.rotation == "alltoall" else 1

    @property
    def chunks(self) -> int:
        """Number of model parts per stage."""
        return 2 if self.schedule in ("Interleaved1F1B", "ZBVZeroBubble") else 1

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the axes larger than 1, by field."""
        found = {field: getattr(self, field) for field in KEYS.values()}
        return {field: size for field, size in found.items() if size > 1}

    def words(self) -> str:
        """The axes as text, such as `pipeline 2 x tensor 2`."""
        return " x ".join(f"{field} {size}" for field, size in self.sizes.items())

    def __str__(self) -> str:
        schedule = f" ({self.schedule})" if self.pipeline > 1 else ""
        ring = " (ring attention)" if self.ring > 1 else ""
        return f"{self.words()}{schedule}{ring}" if self.any else "undivided"

    def variables(self) -> dict[str, str]:
        """Environment variables, named as by Accelerate, for settings that it does not pass on."""
        found = {_variable(f"{key}_size"): str(getattr(self, KEYS[key])) for key in OURS}
        return {**found, _variable(SCHEDULE): self.schedule}


UNDIVIDED = Axes()


def keys() -> set[str]:
    """Keys that are read from the section."""
    sizes = {f"{SECTION}_{key}_size" for key in KEYS}
    return DATA_KEYS | sizes | {f"{SECTION}_{SCHEDULE}", f"{SECTION}_{ROTATION}"}


def problems_of_sizes(section: Mapping[str, Any]) -> Iterator[str]:
    """Problems with the sizes, the schedule and the rotation in a file's section."""
    for key in KEYS:
        name = f"{SECTION}_{key}_size"
        size = section.get(name, 1)
        if type(size) is not int or size < 1:
            yield f"{SECTION}.{name}: got {size!r}, expected a whole number of at least 1"
    schedule = section.get(f"{SECTION}_{SCHEDULE}", "1F1B")
    if schedule not in SCHEDULES:
        yield f"{SECTION}.{SECTION}_{SCHEDULE}: {_not_a_schedule(schedule)}"
    rotation = section.get(f"{SECTION}_{ROTATION}", "allgather")
    if rotation not in ROTATIONS:
        yield f"{SECTION}.{SECTION}_{ROTATION}: {_not_a_rotation(rotation)}"
    elif rotation != "allgather" and section.get(f"{SECTION}_cp_size", 1) == 1:
        yield (
            f"{SECTION}.{SECTION}_{ROTATION}: got {rotation!r} without context parallelism; remove "
            f"it, or set {SECTION}_cp_size"
        )


def _not_a_rotation(got: object) -> str:
    return f"got {got!r}, expected one of {', '.join(ROTATIONS)}{did_you_mean(str(got), ROTATIONS)}"


def _not_a_schedule(got: object) -> str:
    known = {each.lower(): each for each in SCHEDULES}
    meant = known.get(str(got).lower())
    hint = f"; did you mean '{meant}'?" if meant else did_you_mean(str(got), SCHEDULES)
    return f"got {got!r}, expected one of {', '.join(SCHEDULES)}{hint}"


def mesh_problems(config: dict[str, Any]) -> list[str]:
    """Problems of a file's section: sizes must be integers with the product `num_processes`."""
    sizes = cast(dict[str, Any], config[SECTION])
    problems = list(problems_of_sizes(sizes))
    if problems:
        return problems
    divided = _divides(sizes)
    if config.get("distributed_type") != "FSDP" and not divided:
        return [
            "parallelism_config: valid only with distributed_type: FSDP or axes that divide the "
            "model (tp, pp, sp, cp, ep)"
        ]
    if divided and config.get("distributed_type") != "MULTI_GPU":
        problems.append(
            f"distributed_type: got {config.get('distributed_type')!r}, expected MULTI_GPU (also "
            "on CPUs) with axes that divide the model; parallelism_config_dp_shard_size shards "
            "it with FSDP2"
        )
    for key in sorted(DATA_KEYS):
        size = sizes.get(key, 1 if divided else None)
        if type(size) is not int or size < 1:
            problems.append(
                f"parallelism_config.{key}: got {size!r}, expected a whole number of at least 1"
            )
    if not problems and not divided and sizes["parallelism_config_dp_shard_size"] < 2:
        problems.append(
            "parallelism_config.parallelism_config_dp_shard_size: got 1, expected at least 2; "
            "for one process per copy, use ddp"
        )
    if not problems:
        problems += [*_expert_problems(sizes), *_product_problems(sizes, config)]
    return problems


def _product_problems(sizes: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Problem of sizes whose product is not the number of processes of the file."""
    processes = config.get("num_processes", 2)
    if type(processes) is not int or processes < 1:
        return  # a problem of its own
    axes = ("dp_replicate", "dp_shard", "pp", "cp", "sp", "tp")
    factors = {axis: sizes.get(f"{SECTION}_{axis}_size", 1) for axis in axes}
    product = math.prod(factors.values())
    if product != processes:
        named = [f"{axis} {size}" for axis, size in factors.items() if size > 1]
        yield (
            f"parallelism_config: {' x '.join(named)} = {product} processes, but num_processes is "
            f"{processes}; use num_processes: {product}, or sizes whose product is {processes}"
        )


def _expert_problems(sizes: Mapping[str, Any]) -> list[str]:
    """Problems with the number of processes over which experts are divided."""
    key = f"{SECTION}_ep_size"
    tensor, shard = (sizes.get(f"{SECTION}_{axis}_size", 1) for axis in ("tp", "dp_shard"))
    problem = experts_problem(sizes.get(key, 1), tensor, shard)
    return [] if problem is None else [f"{SECTION}.{key}: {problem}"]


def experts_problem(experts: int, tensor: int, shard: int) -> str | None:
    """Why the experts of a layer cannot be divided over `experts` processes; None if they can.

    Experts are divided over the processes of the tensor axis, and then over shards.
    """
    if experts == 1 or not (experts % tensor or tensor * shard % experts):
        return None
    whole = tensor * shard
    fitting = [n for n in range(max(tensor, 2), whole + 1) if n % tensor == whole % n == 0]
    instead = f"use {' or '.join(map(str, fitting))}" if fitting else "use more processes"
    return (
        f"expected a multiple of the {tensor} tensor parallel processes that divides the {whole} "
        f"processes of one copy of the model, got {experts}; {instead}"
    )


def product_problem(axes: Axes, copies: int, shard: int, started: int) -> str | None:
    """Why the sizes that reached a process do not fit the number of processes; None if they do."""
    each = axes.processes
    if copies * shard * each == started:
        return None
    if axes.any and started % each:
        instead = f"start {' or '.join(map(str, multiples(each, started)))}"
    elif copies * shard * each == 1:
        instead = (
            "Accelerate drops the sizes of pp and ep, which are read from the file if the launcher "
            "is known: start with accelerate launch --config_file FILE, or finetune launch"
        )
    else:
        instead = (
            "give --parallelism_config_dp_replicate_size and --parallelism_config_dp_shard_size "
            f"whose product is {started // each}, or use finetune launch"
        )
    divided = f" x {axes.words()}" if axes.any else ""
    return (
        f"parallelism_config: {copies} copies x {shard} processes{divided}, but {started} were "
        f"started; {instead}"
    )


def multiples(unit: int, near: int) -> list[int]:
    """The multiples of `unit`, of at least one unit, on both sides of `near`."""
    below = near - near % unit
    return [each for each in (below, below + unit) if each]


def _divides(sizes: Mapping[str, Any]) -> bool:
    return any(sizes.get(f"{SECTION}_{key}_size", 1) > 1 for key in KEYS)


def from_variables(environment: Mapping[str, str]) -> Axes:
    """The axes of a process, from the environment variables set by its launcher.

    Raises:
        FinetuneError: a size is not a whole number of at least 1, or the schedule or the rotation
            is unknown.
    """
    sizes = {field: size_of(environment, key) for key, field in KEYS.items()}
    schedule = environment.get(_variable(SCHEDULE), "1F1B")
    if schedule not in SCHEDULES:
        raise FinetuneError(f"{_variable(SCHEDULE)}: {_not_a_schedule(schedule)}")
    rotation = environment.get(_variable(ROTATION), "allgather")
    if sizes["context"] == 1:  # left by another launch: Accelerate sets it only with this axis
        rotation = "allgather"
    if rotation not in ROTATIONS:
        raise FinetuneError(f"{_variable(ROTATION)}: {_not_a_rotation(rotation)}")
    return Axes(**sizes, schedule=schedule, rotation=rotation)


def size_of(environment: Mapping[str, str], key: str) -> int:
    """The size of an axis in the environment of a process, by its key; 1 if it is not set.

    Raises:
        FinetuneError: it is not a whole number of at least 1.
    """
    name = _variable(f"{key}_size")
    size = environment.get(name, "1")
    if not size.isdecimal() or int(size) < 1:
        raise FinetuneError(f"{name}: got {size!r}, expected a whole number of at least 1")
    return int(size)


def _variable(key: str) -> str:
    return f"{SECTION}_{key}".upper()
