"""Prepare DeepSpeed's offload to NVMe: build its operator once, and size its buffers."""

import contextlib
import fcntl
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from finetune.errors import FinetuneError, reading
from finetune.planner import Plan
from finetune.planner.estimate.predict import model_source, workload_of
from finetune.planner.estimate.sharding.nvme import (
    HELD,
    STATE_BUFFERS,
    SUB_GROUP,
    SWAPPABLE,
    WEIGHT_BUFFERS,
    Swapped,
)
from finetune.planner.estimate.wording import size

EXTENSION = """#pragma once
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/utils/pybind.h>
namespace torch {
using namespace at;
}
"""
"""The part of `torch/extension.h` that DeepSpeed's operators use, without all other operators."""
REPEATED = ("c_library_name", "c_block_size", "c_io_queue_depth")
"""Constants that several files of an operator define (DeepSpeed 0.19)."""


def require_room(plan: Plan, folder: Path, processes: int) -> None:
    """Check that the offload folder is writable and has enough free space for the plan.

    Args:
        plan: Plan of the run.
        folder: Folder for offloading.
        processes: Number of processes on this machine, which share the disk.

    Raises:
        FinetuneError: it is not writable, or has too little free space.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        left = sum(file.stat().st_size for file in folder.rglob("*.swp"))  # will be overwritten
        free = shutil.disk_usage(folder).free + left
    except OSError as error:
        raise FinetuneError(f"--nvme-path {folder}: {error.strerror}") from None
    try:
        workload = workload_of(plan, model_source(plan.recipe).shape)
        needed = processes * Swapped(workload).disk
    except FinetuneError:
        return  # the formulas do not know the model
    if needed > free:
        raise FinetuneError(
            f"--nvme-path {folder}: {size(free)} free, but {processes} processes offload "
            f"{size(needed)}; name a folder on a larger disk"
        )


def configure(config: dict[str, Any], plan: Plan) -> None:
    """Complete a DeepSpeed configuration that offloads to NVMe.

    Raises:
        FinetuneError: the model's configuration cannot be read.
    """
    zero = config["zero_optimization"]
    zero["sub_group_size"] = SUB_GROUP
    zero["offload_optimizer"]["buffer_count"] = STATE_BUFFERS
    zero["offload_param"] |= {
        "buffer_count": WEIGHT_BUFFERS,
        "buffer_size": _largest_share(plan),
        "max_in_cpu": HELD,
    }
    config["aio"] = {"block_size": SWAPPABLE, "queue_depth": 8, "overlap_events": True}


def _largest_share(plan: Plan) -> int:
    """Elements of one process's share of the model's largest tensor.

    DeepSpeed 0.19 lets a share that is larger than a buffer overwrite the next buffer.
    """
    model = plan.recipe.model
    with reading(f"model.name: '{model.name}' cannot be loaded"):
        config = AutoConfig.from_pretrained(
            model.name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        with torch.device("meta"):
            skeleton = (AutoModel if plan.recipe.head.scored else AutoModelForCausalLM).from_config(
                config, trust_remote_code=model.trust_remote_code
            )
    largest = max(parameter.numel() for parameter in skeleton.parameters())
    return -(-largest // plan.processes)


BUILT = ("async_io", "pin_memory")
"""Operators that DeepSpeed (0.19) builds for offload to NVMe."""


def require_async_io(say: Callable[[str], None]) -> None:
    """Make sure that DeepSpeed's asynchronous I/O operator for NVMe offload is built.

    A killed build leaves torch's lock file behind, and the next build waits for it forever. All of
    our processes build under a lock that is released on exit, so a lock file found then is stale.

    Raises:
        FinetuneError: libaio is missing, or the operator cannot be built.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import _get_build_directory

    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise FinetuneError(
            "offload to NVMe needs libaio with its headers: apt-get install libaio-dev "
            "(Red Hat: dnf install libaio-devel)"
        )
    folder = Path(_get_build_directory(builder.name, verbose=False))
    with (folder.parent / "finetune.lock").open("w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        for name in BUILT:  # also an operator that exists, because changed flags build it again
            (folder.parent / name / "lock").unlink(missing_ok=True)
        if not (folder / f"{builder.name}.so").exists():
            say("building DeepSpeed's async_io, which takes a few minutes the first time")
        whole = folder.parent / "finetune-whole-headers"
        with reading("DeepSpeed's async_io could not be built"):
            if not whole.exists():
                with contextlib.suppress(RuntimeError), _lean(folder.parent / "finetune-headers"):
                    builder.load(verbose=False)
                    return
                whole.touch()
            builder.load(verbose=False)


@contextlib.contextmanager
def _lean(folder: Path) -> Iterator[None]:
    """Context in which each of DeepSpeed's operators is one file with fewer headers.

    async_io takes 12 seconds of CPU time then, both 104 with each of their 15 files by itself (gcc
    12 on an AMD EPYC).
    """
    from torch.utils import cpp_extension

    _write(folder / "torch" / "extension.h", EXTENSION)
    load = cpp_extension.load

    def load_lean(
        *, name: str, sources: list[str], extra_cflags: list[str], extra_include_paths: list[str],
        **options: Any,
    ) -> Any:  # fmt: skip
        """Headers without guards are imported, which includes them once.

        `-I` folders are searched before torch's, which are passed as system folders.
        """
        headers = (each for place in extra_include_paths for each in Path(place).glob("*.h"))
        lines = [f'#import "{each}"\n' for each in sorted(headers)]
        for number, source in enumerate(sources):
            lines += [f"#undef {each}\n#define {each} {each}_{number}\n" for each in REPEATED]
            lines += [f'#include "{source}"\n']
        _write(whole := folder / f"{name}.cpp", "".join(lines))
        return load(
            name=name,
            sources=[str(whole)],
            extra_cflags=[*extra_cflags, "-g0"],
            extra_include_paths=[str(folder), *extra_include_paths],
            **options,
        )

    cpp_extension.load = load_lean
    try:
        yield
    finally:
        cpp_extension.load = load


def _write(file: Path, text: str) -> None:
    """Write a file that has not this text; one that has would be compiled again."""
    if not file.is_file() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
