"""Keeps the libraries' routine warnings from between a person and what we have to say."""

import logging
import warnings

LOUD = ("DeepSpeed", "accelerate", "bitsandbytes", "torch.distributed", "transformers")


def quiet() -> None:
    """Show only errors of the libraries below; to be called before they are imported."""
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|peft|deepspeed)\b")
