"""Choose the number of threads that compute a model on a CPU."""

import functools

import torch
from torch import nn

from finetune.distributed.parameters import unsharded_numel

SMALL = 4_000_000
"""Parameters below which one thread is used.

Threads of OpenMP wait for each other at every operation by spinning. Beside other work this takes
more time than the operations of a small model: `finetune eval` of the quickstart's run (525,000
parameters) on two busy cores took 123 s with two threads, and 8.5 s with one.
"""


def settle_threads(model: nn.Module) -> None:
    """Compute a small model with one thread, and any other with those of this process."""
    most = _of_process()
    small = sum(map(unsharded_numel, model.parameters())) < SMALL
    wanted = 1 if small else most
    if torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


@functools.cache
def _of_process() -> int:
    """Threads before the first model."""
    return torch.get_num_threads()
