"""Describe this machine for a bug report: versions, devices, usable and missing packages."""

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from finetune import backend
from finetune.kernels.cpu import COMPILERS, LANGUAGES
from finetune.runs import limits, units
from finetune.runs.environment import TRACKERS, commit, processor, versions

OPTIONAL = {
    "deepspeed": "zero1 to zero3_nvme",
    "bitsandbytes": "model.quantization=nf4 and int8, optim.name=adamw_8bit",
    "flash_attn": "model.attention=flash_attention_2",
    "causal_conv1d": "convolutions of hybrid models in one kernel",
    "mamba_ssm": "recurrences of Mamba models in one kernel",
    "fla": "recurrences of gated delta networks in one kernel",
}
"""Optional packages, with what each of them enables."""


def describe_system() -> str:
    """Versions, devices, usable and missing packages, as text for a bug report."""
    sections = {
        "versions": list(_versions()),
        "devices": list(_devices()),
        "works here": [f"backends: {', '.join(backend.names())}", *_usable()],
        "missing": list(_missing()),
    }
    return "\n".join(
        line for title, lines in sections.items() for line in _section(title, lines or ["nothing"])
    )


def _section(title: str, lines: list[str]) -> Iterator[str]:
    yield title
    yield from (f"  {line}" for line in lines)


def _versions() -> Iterator[str]:
    yield f"python {sys.version.split()[0]} on {sys.platform}"
    for name, version in versions().items():
        if name not in TRACKERS:
            yield f"{name} {version}"
    source = commit(Path(__file__).parent)
    if source is not None:
        yield f"source {source}"


def _devices() -> Iterator[str]:
    memory = limits.memory()
    size = f"{units.size(memory.total)} of memory, {units.size(memory.available)} available"
    yield f"{processor()}, {size}"
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        yield f"no GPU (PyTorch is built for {f'CUDA {built}' if built else 'CPUs'})"
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield (
            f"{card.name}, compute capability {card.major}.{card.minor}, "
            f"{units.size(free)} of {units.size(total)} free"
        )


def _usable() -> Iterator[str]:
    for name, brings in OPTIONAL.items():
        if importlib.util.find_spec(name) is not None:
            yield f"{name}: {brings}"
    for language, command in _compilers():
        if command is not None:
            yield f"{language} compiler {command}: kernels for this processor"


def _missing() -> Iterator[str]:
    for name, brings in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield f"{name}: {brings}"
    for language, command in _compilers():
        if command is None:
            yield f"{language} compiler: kernels for this processor"


def _compilers() -> Iterator[tuple[str, str | None]]:
    for suffix, names in COMPILERS.items():
        yield LANGUAGES[suffix], next(filter(None, map(shutil.which, names)), None)
