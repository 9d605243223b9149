"""`ft.plan`: the plan of a recipe, and its prediction for a machine given by name."""

import math
from typing import Any, overload

from finetune import backend as backends
from finetune.errors import FinetuneError
from finetune.planner.estimate import hardware
from finetune.planner.estimate.predict import Prediction, predict
from finetune.planner.estimate.row_counts import local_rows
from finetune.planner.plan import Plan
from finetune.planner.plan import plan as settle
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
    """The machine that the words describe, or None when they name no GPU.

    Args:
        gpu: such as H100-80; or three numbers in its place.
        count: GPUs of the whole job.
        host_ram: GB of a node.
        gpu_memory: GB.
        tflops: of the GPU, dense, in 16 bits.
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
    if problems:
        raise FinetuneError(*problems)
    chosen: str | hardware.GPU | None = gpu
    if gpu_memory is not None and tflops is not None and bandwidth is not None:
        chosen = hardware.GPU("GPU", gpu_memory * 1e9, tflops * 1e12, bandwidth * 1e9)
    if chosen is None:
        return None
    host = None if host_ram is None else host_ram * 1e9
    return hardware.machine(chosen, count, nodes, link, network, host, price)


def without_machine(**given: Any) -> None:
    """Refuse words about a machine where no GPU is named and none is here.

    Raises:
        FinetuneError: with each of them that is given, and with those that are not known.
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
    if problems:
        raise FinetuneError(*problems)


def whole_numbers(**given: int | None) -> None:
    """Refuse counts below 1.

    Raises:
        FinetuneError: with each of them, under the name that it has on the command line.
    """
    problems = [
        f"--{name.replace('_', '-')} {count}: expected a whole number of at least 1"
        for name, count in given.items()
        if count is not None and count < 1
    ]
    if problems:
        raise FinetuneError(*problems)


@overload
def plan(
    recipe: Recipe,
    backend: backends.Backend | str | None = None,
    processes: int | None = None,
    precision: backends.Precision | None = None,
    *,
    gpu: None = None,
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
    gpu: str,
    gpus: int | None = None,
    rows: int | None = None,
    row_tokens: int | None = None,
    nodes: int = 1,
    link: str | None = None,
    network: str | None = None,
    host_ram: float | None = None,
    price: float | None = None,
) -> Prediction: ...


@overload
def plan(
    recipe: Recipe,
    backend: backends.Backend | str | None = None,
    processes: int | None = None,
    precision: backends.Precision | None = None,
    *,
    gpu: None = None,
    gpus: int | None = None,
    rows: int | None = None,
    row_tokens: int | None = None,
    nodes: int = 1,
    link: str | None = None,
    network: str | None = None,
    host_ram: float | None = None,
    gpu_memory: float,
    tflops: float,
    bandwidth: float,
    price: float | None = None,
) -> Prediction: ...


def plan(
    recipe: Recipe,
    backend: backends.Backend | str | None = None,
    processes: int | None = None,
    precision: backends.Precision | None = None,
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    rows: int | None = None,
    row_tokens: int | None = None,
    nodes: int = 1,
    link: str | None = None,
    network: str | None = None,
    host_ram: float | None = None,
    gpu_memory: float | None = None,
    tflops: float | None = None,
    bandwidth: float | None = None,
    price: float | None = None,
) -> Plan | Prediction:
    """Everything that follows from a recipe on a backend; with a GPU, what it takes there.

    Args:
        recipe: what is trained.
        backend: by default the recipe's.
        processes: by default the backend's, or `gpus`.
        precision: by default the backend's.
        gpu: name of the GPU, such as H100-80; or `gpu_memory`, `tflops` and `bandwidth`.
        gpus: of the whole job, one for each process.
        rows: of the training set, for the length of the run; by default counted, where local.
        row_tokens: of a row on average, which packs are counted by.
        nodes: that the GPUs are spread over evenly.
        link: between the GPUs of a node, such as nvlink; by default that of the GPU.
        network: between nodes, such as ib400.
        host_ram: GB of a node.
        gpu_memory: GB.
        tflops: of the GPU, dense, in 16 bits.
        bandwidth: GB/s of the GPU's own memory.
        price: of a GPU and hour.

    Returns:
        The plan; with a GPU a prediction, whose `page()` is what `finetune plan` prints.

    Raises:
        FinetuneError: the pair cannot work, or the machine is not known; with every reason.
    """
    whole_numbers(gpus=gpus, rows=rows, row_tokens=row_tokens)
    machine = described(
        gpu,
        gpus or processes or 1,
        nodes,
        link,
        network,
        host_ram,
        gpu_memory,
        tflops,
        bandwidth,
        price,
    )
    if machine is None:
        without_machine(nodes=nodes, link=link, network=network, host_ram=host_ram, price=price)
        return settle(recipe, backend, processes or gpus, precision)
    settled = settle(recipe, backend, machine.count, precision)
    return predict(settled, machine, rows or local_rows(recipe), row_tokens=row_tokens)
