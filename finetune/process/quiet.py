"""Set environment variables and log levels for libraries before they are imported."""

import contextlib
import logging
import os
import warnings
from collections.abc import Generator

from finetune.runs.limits import limits_threads, usable_cores

CPP_LEVELS = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}
"""Variables that PyTorch reads on import; they silence its C++ logs and the profiler's stages."""
OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables of mpirun and srun from which Accelerate reads a number of processes."""
OF_A_LAUNCH = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *OF_MPI,
)  # fmt: skip
"""Variables with which the processes of a job find each other."""
LOUD = ("DeepSpeed", "accelerate", "bitsandbytes", "torch.distributed", "transformers")
REPEATED = "torch.distributed.pipelining.schedules"
"""Prints a complete schedule if a pass raises an error, which is reported anyway (torch 2.13)."""


def quiet() -> None:
    """Show only errors of the libraries in `LOUD`; call this before they are imported.

    Child loggers inherit the level; the filter remains when a library resets the level of its own
    logger on import.
    """
    for variable, level in CPP_LEVELS.items():
        os.environ.setdefault(variable, level)
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger(name).addFilter(_is_error)
    logging.getLogger(REPEATED).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|peft|deepspeed)\b")


def growing_segments() -> None:
    """Enable expandable segments in PyTorch's GPU allocator, unless the environment configures it.

    Micro-batches differ in length from step to step, and fixed segments would leave gaps that no
    later tensor fits into. Call this before PyTorch is imported.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def threads_within_quota() -> None:
    """Set OpenMP's threads to the cores of a container's quota, unless the environment sets them.

    OpenMP would start one for each core of the machine, and each would be stopped in turn.
    """
    if limits_threads():
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))


def tokenise_on_one_core() -> None:
    """Disable the threads of tokenizers in this process, because other processes encode as well."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def forget_launch() -> None:
    """Remove the variables of a launch in a process that trains alone.

    Otherwise Accelerate 1.15 would wait for other processes at an address left by a scheduler.
    """
    for name in OF_A_LAUNCH:
        os.environ.pop(name, None)


@contextlib.contextmanager
def mesh_kept_from_accelerate() -> Generator[None]:
    """Keep Accelerate 1.15 from building its own mesh, which has no pipeline or expert axis."""
    name = "ACCELERATE_USE_PARALLELISM_CONFIG"
    given = {name: os.environ.pop(name)} if name in os.environ else {}
    try:
        yield
    finally:
        os.environ.update(given)
