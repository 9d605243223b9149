"""Axes that divide the model instead of the rows, read from a file or a launched process."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

from finetune.errors import did_you_mean

Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]

SCHEDULES: tuple[Schedule, ...] = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
"""Supported schedules of `torch.distributed.pipelining`, with torch's names."""

SECTION = "parallelism_config"
DATA_KEYS = {"parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"}
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
    "context": "processes that share the tokens of a row, and gather its keys and values",
    "sequence": "processes that share the tokens of a row, and exchange them for heads",
    "tensor": "processes that share each layer",
    "experts": "processes that share the experts of a layer",
}
"""Maps the field of `Axes` to its description on the command line."""
OURS = ("pp", "ep")
"""Keys that Accelerate 1.15 reads and then drops; `finetune launch` sets their variables."""
SCHEDULE = "pp_schedule"


@dataclasses.dataclass(frozen=True)
class Axes:
    """Number of processes along each axis that divides the model; the rest is data parallel."""

    pipeline: int = 1
    """Pipeline stages, each with some of the layers."""
    context: int = 1
    """Processes that split the tokens of a row and gather its keys and values."""
    sequence: int = 1
    """Processes that split the tokens of a row and exchange them for heads (Ulysses)."""
    tensor: int = 1
    """Processes that split each layer."""
    experts: int = 1
    """Processes over which the experts of a layer are divided, which may read different rows."""
    schedule: Schedule = "1F1B"
    """Order of the micro-batches in a pipeline."""

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

    def variables(self) -> dict[str, str]:
        """Environment variables, named as by Accelerate, for settings that it does not pass on."""
        found = {_variable(f"{key}_size"): str(getattr(self, KEYS[key])) for key in OURS}
        return {**found, _variable(SCHEDULE): self.schedule}


UNDIVIDED = Axes()


def keys() -> set[str]:
    """Keys that are read from the section."""
    return DATA_KEYS | {f"{SECTION}_{key}_size" for key in KEYS} | {f"{SECTION}_{SCHEDULE}"}


def problems_of_sizes(section: Mapping[str, Any]) -> Iterator[str]:
    """Problems with the sizes and the schedule in a file's section."""
    for key in KEYS:
        name = f"{SECTION}_{key}_size"
        size = section.get(name, 1)
        if type(size) is not int or size < 1:
            yield f"{SECTION}.{name}: got {size!r}, expected a whole number of at least 1"
    schedule = section.get(f"{SECTION}_{SCHEDULE}", "1F1B")
    if schedule not in SCHEDULES:
        yield (
            f"{SECTION}.{SECTION}_{SCHEDULE}: got {schedule!r}"
            f"{did_you_mean(str(schedule), SCHEDULES)}, expected one of {', '.join(SCHEDULES)}"
        )


def mesh_problems(config: dict[str, Any]) -> list[str]:
    """Problems of a file's section: sizes must be integers with the product `num_processes`."""
    sizes = cast(dict[str, Any], config[SECTION])
    problems = list(problems_of_sizes(sizes))
    divided = not problems and _divides(sizes)
    if config.get("distributed_type") != "FSDP" and not (problems or divided):
        return [
            "parallelism_config: valid only with distributed_type: FSDP or axes that divide the "
            "model (tp, pp, sp, cp, ep)"
        ]
    if divided and config.get("distributed_type") not in ("MULTI_GPU", "MULTI_CPU"):
        problems.append(
            f"distributed_type: got {config.get('distributed_type')}, expected MULTI_GPU with "
            "axes that divide the model; parallelism_config_dp_shard_size shards it with FSDP2"
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
        problems += _expert_problems(sizes)
        counted = [
            *sorted(DATA_KEYS),
            *(f"parallelism_config_{a}_size" for a in ("pp", "cp", "sp", "tp")),
        ]
        factors = [sizes[key] for key in counted if key in sizes]
        processes = config.get("num_processes", 2)
        if math.prod(factors) != processes:
            problems.append(
                f"parallelism_config: {' x '.join(map(str, factors))} processes, but num_processes "
                f"is {processes}; the product must be equal to it"
            )
    return problems


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


def _divides(sizes: Mapping[str, Any]) -> bool:
    return any(sizes.get(f"{SECTION}_{key}_size", 1) > 1 for key in KEYS)


def from_variables(environment: Mapping[str, str]) -> Axes:
    """The axes of a process, from the environment variables set by its launcher."""
    sizes = {
        field: int(environment.get(_variable(f"{key}_size"), "1")) for key, field in KEYS.items()
    }
    schedule = environment.get(_variable(SCHEDULE), "1F1B")
    return Axes(**sizes, schedule=schedule)  # type: ignore[arg-type]


def _variable(key: str) -> str:
    return f"{SECTION}_{key}".upper()
