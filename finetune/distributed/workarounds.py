"""Corrections of how Accelerate 1.15 and torch 2.13 start a job."""

import importlib
from typing import Any

import torch


def without_deepspeed(absent: bool) -> None:
    """Let Accelerate believe that DeepSpeed is not installed, or see for itself."""
    utilities = importlib.import_module("accelerate.utils.other")
    installed = importlib.import_module("accelerate.utils.imports").is_deepspeed_available
    utilities.is_deepspeed_available = (lambda: False) if absent else installed


def meet_apart_from_earlier_attempts(attempt: int) -> None:
    """Give the processes of a restart keys of their own in the store of torch's agent.

    torch 2.13 counts on a new store for each restart, but the static rendezvous that Accelerate
    1.15 asks for keeps the first: a process may then read where one of the attempt before was
    listening, and both wait for ever.
    """
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function hides it
    create = rendezvous._create_c10d_store

    def apart(*words: Any, **named: Any) -> torch.distributed.Store:
        return torch.distributed.PrefixStore(f"attempt-{attempt}", create(*words, **named))

    rendezvous._create_c10d_store = apart
