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
    known = list(_optional())
    sections = {
        "versions": list(_versions()),
        "devices": list(_devices()),
        "works here": [f"backends: {', '.join(backend.names())}", *(w for w, has in known if has)],
        "missing": [words for words, has in known if not has] or ["nothing"],
    }
    lines = [(title, *(f"  {line}" for line in lines)) for title, lines in sections.items()]
    return "\n".join(line for section in lines for line in section)


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


def _optional() -> Iterator[tuple[str, bool]]:
    """Optional packages and compilers with what they bring, and whether they are there."""
    for name, brings in OPTIONAL.items():
        yield f"{name}: {brings}", importlib.util.find_spec(name) is not None
    for suffix, names in COMPILERS.items():
        command = next(filter(None, map(shutil.which, names)), None)
        named = f" {command}" if command else ""
        what = f"{LANGUAGES[suffix]} compiler{named}: kernels for this processor"
        yield what, command is not None
