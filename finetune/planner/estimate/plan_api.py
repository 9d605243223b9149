"""`ft.plan`: the plan of a recipe, and its prediction for a named machine."""

import math
from typing import Any, TypedDict, Unpack, overload

from finetune import backend as backends
from finetune.errors import refuse
from finetune.planner.estimate import hardware
from finetune.planner.estimate.predict import Prediction, predict
from finetune.planner.estimate.row_counts import local_rows
from finetune.planner.plan import Plan
from finetune.planner.plan import plan as make_plan
from finetune.recipe import Recipe


def described(
    gpu: str | None = None,
    count: int = 1,
    nodes: int = 1,
    link: str | None = None,
    network: str | None = None,
    host_ram: float | None = None,
    gpu_memory: float | None = None,
    tflops: float | None = None,
    bandwidth: float | None = None,
    price: float | None = None,
) -> hardware.Machine | None:
    """The machine that the arguments describe; None if they describe no GPU.

    Args:
        gpu: GPU name, such as H100-80; or give `gpu_memory`, `tflops` and `bandwidth` instead.
        count: number of GPUs of the complete job.
        host_ram: GB of host memory per node.
        gpu_memory: GB of GPU memory.
        tflops: dense 16-bit TFLOPS of the GPU.
        bandwidth: GB/s of the GPU's own memory.
        price: of a GPU and hour.

    Raises:
        FinetuneError: a word is not known, or a number is missing or not positive.
    """
    numbers = {"--gpu-memory": gpu_memory, "--tflops": tflops, "--bandwidth": bandwidth}
    given = [name for name, value in numbers.items() if value is not None]
    problems = [
        f"{name} {value}: expected a number above 0"
        for name, value in {**numbers, "--host-ram": host_ram, "--price": price}.items()
        if value is not None and not 0 < value < math.inf
    ]
    if given and gpu is not None:
        problems.append(f"--gpu {gpu}: has a name already; leave {', '.join(given)} away")
    if given and len(given) < len(numbers):
        missing = ", ".join(name for name in numbers if name not in given)
        problems.append(f"{', '.join(given)}: describes a GPU together with {missing}")
    refuse(problems)
    chosen: str | hardware.GPU | None = gpu
    if gpu_memory is not None and tflops is not None and bandwidth is not None:
        chosen = hardware.GPU("GPU", gpu_memory * 1e9, tflops * 1e12, bandwidth * 1e9)
    if chosen is None:
        return None
    host = None if host_ram is None else host_ram * 1e9
    return hardware.machine(chosen, count, nodes, link, network, host, price)


def without_machine(**given: Any) -> None:
    """Reject arguments that describe a machine if no GPU is named.

    Raises:
        FinetuneError: contains every argument that is given, and every unknown link or network.
    """
    idle = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in given.items()
        if value is not None and (name, value) != ("nodes", 1)
    ]
    problems = hardware.unknown(given.get("link"), given.get("network"))
    if idle:
        problems.append(
            f"{', '.join(idle)}: of a machine with GPUs, and there is none here; name one: --gpu "
            "H100-80"
        )
    refuse(problems)


def whole_numbers(**given: int | None) -> None:
    """Reject counts below 1.

    Raises:
        FinetuneError: contains every such count, with its name on the command line.
    """
    problems = [
        f"--{name.replace('_', '-')} {count}: expected a whole number of at least 1"
        for name, count in given.items()
        if count is not None and count < 1
    ]
    refuse(problems)


class MachineWords(TypedDict, total=False):
    """The arguments of `plan` that describe a machine with GPUs."""

    gpu: str | None
    gpu_memory: float | None
    tflops: float | None
    bandwidth: float | None
    nodes: int
    link: str | None
    network: str | None
    host_ram: float | None
    price: float | None


@overload
def plan(  # pyright: ignore[reportOverlappingOverload] (no machine is described)
    recipe: Recipe,
    backend: backends.Backend | str | None = None,
    processes: int | None = None,
    precision: backends.Precision | None = None,
    *,
    gpus: int | None = None,
    rows: int | None = None,
    row_tokens: int | None = None,
) -> Plan: ...


@overload
def plan(
    recipe: Recipe,
    backend: backends.Backend | str | None = None,
    processes: int | None = None,
    precision: backends.Precision | None = None,
    *,
    gpus: int | None = None,
    rows: int | None = None,
    row_tokens: int | None = None,
    **machine: Unpack[MachineWords],
) -> Prediction: ...


def plan(
    recipe: Recipe,
    backend: backends.Backend | str | None = None,
    processes: int | None = None,
    precision: backends.Precision | None = None,
    *,
    gpus: int | None = None,
    rows: int | None = None,
    row_tokens: int | None = None,
    **machine: Unpack[MachineWords],
) -> Plan | Prediction:
    """Derive the plan of a recipe on a backend, and predict memory and time if a GPU is given.

    Args:
        recipe: recipe to train.
        backend: backend or its name; by default that of the recipe.
        processes: number of processes; by default that of the backend, or `gpus`.
        precision: by default that of the backend.
        gpus: number of GPUs of the complete job, one per process.
        rows: rows of the training set, for the length of the run; by default counted if local.
        row_tokens: average number of tokens per row; by default read from local data.
        gpu: name of the GPU, such as H100-80; or give `gpu_memory`, `tflops` and `bandwidth`.
        nodes: number of nodes over which the GPUs are spread evenly.
        link: link between the GPUs of a node, such as nvlink; by default that of the GPU.
        network: network between nodes, such as ib400.
        host_ram: GB of host memory per node.
        gpu_memory: GB of GPU memory.
        tflops: dense 16-bit TFLOPS of the GPU.
        bandwidth: GB/s of the GPU's memory.
        price: price per GPU and hour, in any currency.

    Returns:
        A plan; with a GPU a prediction, whose `page()` is the output of `finetune plan`.

    Raises:
        FinetuneError: the recipe cannot run on the backend, or the machine is unknown; contains
            every reason.
    """
    whole_numbers(gpus=gpus, rows=rows, row_tokens=row_tokens)
    there = described(count=gpus or processes or 1, **machine)
    if there is None:
        without_machine(**machine)
        return make_plan(recipe, backend, processes or gpus, precision)
    planned = make_plan(recipe, backend, there.count, precision)
    return predict(planned, there, rows or local_rows(recipe), row_tokens=row_tokens)
