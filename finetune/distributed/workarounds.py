"""Workarounds for how Accelerate 1.15 and torch 2.13 start a job."""

import importlib
from typing import Any

import torch


def without_deepspeed(absent: bool) -> None:
    """Make Accelerate treat DeepSpeed as not installed, or restore its own check."""
    utilities = importlib.import_module("accelerate.utils.other")
    installed = importlib.import_module("accelerate.utils.imports").is_deepspeed_available
    utilities.is_deepspeed_available = (lambda: False) if absent else installed


def meet_apart_from_earlier_groups(attempt: int) -> None:
    """Use separate keys in the store of torch's agent for each restart, and each call in a process.

    torch 2.13 expects a new store for each group, but Accelerate 1.15's static rendezvous keeps
    the first one: a process could then read an address of an earlier group, and wait forever.
    """
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # not the function
    create = rendezvous._create_c10d_store

    def apart(*words: Any, **named: Any) -> torch.distributed.Store:
        return torch.distributed.PrefixStore(f"attempt-{attempt}", create(*words, **named))

    rendezvous._create_c10d_store = apart
