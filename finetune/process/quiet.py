"""Sets what libraries read from the environment: logs, threads of tokenizers, GPU memory."""

import logging
import os
import warnings

CPP_LEVELS = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}
"""PyTorch's own variables, read when it is loaded: what its C++ says about profilers' stages."""
OF_A_LAUNCH = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Variables by which the processes of a job find each other."""
LOUD = ("DeepSpeed", "accelerate", "bitsandbytes", "torch.distributed", "transformers")


def quiet() -> None:
    """Show only errors of the libraries above; to be called before they are imported.

    Their inner loggers inherit the level; the filter stays where a library, when it is imported,
    sets the level of its own logger anew.
    """
    for variable, level in CPP_LEVELS.items():
        os.environ.setdefault(variable, level)
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger(name).addFilter(_is_error)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|peft|deepspeed)\b")


def growing_segments() -> None:
    """Let PyTorch's allocator on GPUs grow its blocks, where the environment says nothing of it.

    Micro-batches differ in length from step to step: blocks of fixed sizes leave gaps that no later
    tensor fits into. Before PyTorch is imported.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def tokenise_on_one_core() -> None:
    """Let the tokenizers of this process start no threads: others encode beside it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def forget_launch() -> None:
    """Remove variables of a launch that this process, which trains alone, has no use for.

    Accelerate 1.15 would look for other processes, at an address that a scheduler left.
    """
    for name in OF_A_LAUNCH:
        os.environ.pop(name, None)


def keep_mesh_from_accelerate() -> None:
    """Let Accelerate 1.15 build no mesh of its own, whose axes lack a pipeline's and experts'."""
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
