"""FSDP on CPUs: shards and gradients go through memory that the processes of one host share.

Over gloo each byte goes twice through the kernel's network, on the cores that compute. Here each
process has a box that all of them read: it writes its part, all meet, and each copies or adds what
it needs of the others. Gloo still carries the meetings, and so the time limit and a lost process.
The memory has no name in any file system and goes with the last process that holds it.
"""

import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FSDPModule

SLOT = 8 * 2**20
"""Bytes that a process hands on at once: what is longer goes in pieces, which fit into caches."""
SLOTS = 2
"""In turns: whoever meets for the next piece has read the one before."""


def share_memory(model: nn.Module, group: dist.ProcessGroup | None = None) -> str | None:
    """Let the units of FSDP2 gather and reduce through shared memory.

    Every process of the group calls it, and all of them get the same answer.

    Args:
        group: the processes that share a copy of the model; None for all.

    Returns:
        Why they keep to gloo; None where they share memory.
    """
    boxes = Boxes.shared(group)
    if isinstance(boxes, str):
        return boxes
    gather: Any = AllGather(boxes)
    scatter: Any = ReduceScatter(boxes)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
    return None


class Boxes:
    """The boxes of all processes of a group, in the order of their ranks."""

    def __init__(self, boxes: Sequence[mmap.mmap], group: dist.ProcessGroup | None = None) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.boxes = [torch.frombuffer(box, dtype=torch.uint8).view(SLOTS, SLOT) for box in boxes]
        self.presence = torch.zeros(1)
        self.turn = 0

    @classmethod
    def shared(cls, group: dist.ProcessGroup | None = None) -> "Boxes | str":
        """Make a box and open those of the others; or why that cannot be, alike on every rank."""
        descriptor, problem = -1, None
        try:
            descriptor = _memory(SLOTS * SLOT)
        except OSError as error:
            problem = f"no memory can be shared: {error.strerror}"
        places = _of_all((_machine(), os.getpid(), descriptor, problem), group)
        problems = [problem for *_, problem in places if problem]
        if len({machine for machine, *_ in places}) > 1:
            problems = ["the processes do not run on one host"]
        boxes: list[mmap.mmap] = []
        if not problems:
            try:
                boxes = [_opened(process, number) for _, process, number, _ in places]
            except OSError as error:
                problem = f"memory of another process cannot be opened: {error.strerror}"
            problems = [each for each in _of_all(problem, group) if each]
        if descriptor >= 0:
            os.close(descriptor)  # by now everybody has opened it, or nobody will
        return problems[0] if problems else cls(boxes, group)

    def exchange(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Hand on a part of at most `SLOT` bytes, of the same shape and type on every rank.

        Returns:
            The parts of all ranks, to be read before the next exchange.
        """
        self.turn = (self.turn + 1) % SLOTS
        length = part.numel() * part.itemsize
        parts = [box[self.turn, :length].view(part.dtype).view(part.shape) for box in self.boxes]
        parts[self.rank].copy_(part)
        dist.all_reduce(self.presence, group=self.group)
        return parts


class Collective:
    """What FSDP2 asks of each collective that it is given."""

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(Collective):
    """`torch.distributed.fsdp`'s interface of the same name."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Put the inputs (n,) of all ranks, in their order, into the output (ranks x n,)."""
        rows = output_tensor.view(group.size(), -1)
        most = SLOT // input_tensor.itemsize
        for whole, mine in zip(rows.split(most, 1), input_tensor.split(most), strict=True):
            for place, part in zip(whole, self.boxes.exchange(mine), strict=True):
                if place.data_ptr() != mine.data_ptr():  # FSDP2's input lies in the output
                    place.copy_(part)


class ReduceScatter(Collective):
    """`torch.distributed.fsdp`'s interface of the same name."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Put row `rank` of the sum of all inputs (ranks x n,), or of their mean, into (n,).

        It is added in the order of ranks: each element alike on whichever rank it belongs to.
        """
        assert op in (ReduceOp.SUM, ReduceOp.AVG), op
        rows = input_tensor.view(group.size(), -1)
        most = SLOT // input_tensor.itemsize // group.size()
        for result, mine in zip(output_tensor.split(most), rows.split(most, 1), strict=True):
            first, *others = (part[group.rank()] for part in self.boxes.exchange(mine))
            result.copy_(first)
            for part in others:
                result.add_(part)
        if op == ReduceOp.AVG:
            output_tensor.div_(group.size())


def _memory(size: int) -> int:
    """A descriptor of memory that is there, not promised."""
    if not hasattr(os, "memfd_create"):
        raise OSError(0, "this is not Linux")
    descriptor = os.memfd_create("finetune")
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _machine() -> tuple[str, str]:
    """The running system and the space of process numbers: who has the same sees the others."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return boot.read(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", f"unknown to {os.getpid()}"


def _opened(process: int, descriptor: int) -> mmap.mmap:
    own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    try:
        return mmap.mmap(own, SLOTS * SLOT)
    finally:
        os.close(own)


def _of_all(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, mine, group=group)
    return answers
