"""Find the device that a process trains on, and problems with it before a model is loaded."""

import dataclasses
import os
import re
import subprocess
from collections.abc import Callable

import torch

from finetune.backend import Precision
from finetune.planner.estimate import hardware
from finetune.process import rendezvous
from finetune.runs import units

BF16_FROM = (8, 0)
"""Lowest compute capability (Ampere) with native bf16; PyTorch emulates it on older GPUs."""
USERS = (
    "nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
    "--format=csv,noheader",
)  # fmt: skip
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True)
class Found:
    """What PyTorch and the driver report about the GPUs of a machine."""

    build: str
    """PyTorch version, such as 2.14.1+cu130."""
    kind: str | None
    """`cuda` or `hip`, depending on the PyTorch build; None for a CPU build."""
    usable: int
    """Number of GPUs that PyTorch can use."""
    listed: tuple[str, ...]
    """Names of the GPUs that the driver lists, if PyTorch can use none."""
    visible: str | None
    """Value of the environment variable that selects GPUs."""
    reason: str = ""
    """PyTorch's error message if it can use none."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of this process's GPU; not set on ROCm."""
    architectures: tuple[str, ...] = ()
    """Architectures in the PyTorch build, such as `sm_90`; `compute_90` also runs on newer GPUs."""


def on_cpu() -> bool:
    """Whether processes train on the CPU, because there is no CUDA or ROCm GPU.

    Apple's and Intel's GPUs, which have no fp64 or are untested, are not used; a note says so
    (`unused_accelerator`).
    """
    return not torch.cuda.is_available()


def numbered(device: torch.device) -> torch.device:
    """The device with its number: Accelerate names the GPU of a single process `cuda`."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def inspect_gpus(local_rank: int) -> Found:
    """Inspect the GPUs that a process of this machine can use."""
    kind = "hip" if torch.version.hip is not None else "cuda" if torch.version.cuda else None
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    listed = () if usable else tuple(name for name, _ in hardware.listed())
    reason, capability, architectures = "", (0, 0), ()
    if usable and local_rank < usable and kind == "cuda":
        capability = torch.cuda.get_device_capability(local_rank)
        architectures = tuple(torch.cuda.get_arch_list())
    elif kind == "cuda" and listed:
        reason = _why_not()
    return Found(
        torch.__version__, kind, usable, listed, rendezvous.visible_gpus(), reason, capability,
        architectures,
    )  # fmt: skip


def _why_not() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "it finds no GPU"


def problems(found: Found, precision: Precision, local_rank: int, here: int) -> list[str]:
    """processes, device, precision: this machine's GPUs cannot do it; use what is named.

    Args:
        found: GPUs of the machine.
        precision: Precision of the plan.
        local_rank: Index of the process on this machine.
        here: Number of processes of the job on this machine.
    """
    if found.usable == 0:
        return _unusable(found)
    if here > found.usable:
        which = f" ({VISIBLE}={found.visible})" if found.visible is not None else ""
        return [
            f"processes: {here} on this machine, where PyTorch can use {found.usable} "
            f"GPU{'s' * (found.usable > 1)}{which}; use --processes {found.usable}, or make more "
            "of its GPUs visible"
        ]
    if found.kind != "cuda":
        return []
    major, minor = found.capability
    name = f"the GPU of rank {local_rank} here (compute capability {major}.{minor})"
    if not _has_code(found.capability, found.architectures):
        return [
            f"device: PyTorch {found.build} does not support {name}, only "
            f"{', '.join(found.architectures)}; install a build that does, such as one for CUDA "
            "12.6 (make setup TORCH=torch==...+cu126) for a V100 or older"
        ]
    if precision == "bf16" and found.capability < BF16_FROM:
        return [
            f"precision: bf16 is emulated, slowly, on {name}; use --precision fp16, or fp32, or a "
            "GPU of Ampere or newer"
        ]
    return []


def _unusable(found: Found) -> list[str]:
    hidden = found.visible is not None and found.visible.strip() in ("", "-1")
    if not found.listed or found.kind is None or hidden:
        return []  # trains on the CPU; `unused_accelerator` gives the reason
    gpus = f"{len(found.listed)} x {found.listed[0]}"
    if found.kind == "cuda" and found.visible is not None:
        last = len(found.listed) - 1
        return [
            f"{VISIBLE}={found.visible}: names no GPU of this machine, which has {gpus}: 0"
            f"{f' to {last}' if last else ''}; name some of them, or leave it empty to train on "
            "the CPU"
        ]
    return [
        f"device: PyTorch {found.build} cannot use this machine's {gpus}: {found.reason}; update "
        f"the driver, install a build of PyTorch for it, or set {VISIBLE}= to train on the CPU"
    ]


def unused_accelerator(found: Found) -> list[str]:
    """A note if a machine has an accelerator but trains on its CPU."""
    if found.usable:
        return []
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if other is not None:
        reason = f"this toolkit is untested on {other.type} devices"
    elif not found.listed:
        return []
    elif found.kind is None:
        reason = (
            f"PyTorch {found.build} is a build without CUDA, although the driver lists "
            f"{found.listed[0]}; make setup installs one with CUDA"
        )
    else:
        reason = f"{VISIBLE} is empty"
    return [f"device: trains on the CPU, because {reason}"]


def _has_code(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Whether a PyTorch build runs on a GPU, by native code or by PTX that is compiled on load."""
    for name in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name)
        if found is None:
            continue
        major, minor = int(found[2]), int(found[3])
        same = major == capability[0] and minor <= capability[1]
        if same or (found[1] == "compute" and (major, minor) <= capability):
            return True
    return not architectures


def different(names: list[str]) -> str | None:
    """A note if the GPUs of a job differ; `names` are indexed by rank."""
    others = sorted(set(names) - {names[0]})
    if not others:
        return None
    ranks = ", ".join(f"rank {names.index(each)} has {each}" for each in others)
    return (
        f"device: the GPUs of this job differ: rank 0 has {names[0]}, {ranks}; every step waits "
        f"for the slowest, and the smallest memory is the limit; choose equal GPUs with {VISIBLE}"
    )


def described(device: torch.device) -> str:
    """The name and memory of a GPU."""
    card = torch.cuda.get_device_properties(device)
    return f"{card.name} with {units.size(card.total_memory)}"


def too_full(predicted: float, free: int, total: int, users: Callable[[], list[str]]) -> str | None:
    """Reason why a run does not fit next to other processes on its GPU; None if it fits.

    Args:
        predicted: Bytes that the plan predicts. None is also returned if they exceed `total`.
        free: Free bytes.
        total: Bytes of the GPU.
        users: Function that returns the other processes on the GPU.
    """
    if predicted <= free or predicted > total:
        return None
    others = users()
    who = f", by {'; '.join(others)}" if others else ""
    return (
        f"device: the plan predicts {units.size(predicted)}, but only {units.size(free)} of "
        f"{units.size(total)} are free on this GPU: the rest is in use{who}; stop that process, "
        f"choose another GPU with {VISIBLE}, or lower batch.micro_rows"
    )


def gpu_processes() -> list[str]:
    """Processes with memory on a GPU of this machine, from NVIDIA's driver."""
    try:
        answer = subprocess.run(
            USERS, capture_output=True, text=True, timeout=hardware.SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return processes_of(answer.stdout, os.getpid())


def processes_of(answer: str, own: int) -> list[str]:
    """Readable descriptions of the processes that `nvidia-smi` lists, without process `own`."""
    found: list[str] = []
    for line in answer.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 4 and words[1].isdigit() and int(words[1]) != own:
            found.append(f"{words[2]} (process {words[1]}) with {words[3]}")
    return found
