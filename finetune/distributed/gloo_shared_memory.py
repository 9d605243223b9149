"""FSDP collectives on CPUs through memory that the processes of one host share.

Over gloo each byte passes twice through the kernel's network stack, on the cores that compute.
Here each process has a buffer that all can read: it writes its part, all ranks synchronize, and
each copies or adds what it needs from the others. Gloo is still used to synchronize, so timeouts
and lost processes are detected. The memory is anonymous and is freed with the last process.
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
"""Bytes that a process sends at a time; longer tensors are sent in pieces that fit into caches."""
SLOTS = 2
"""Slots used in turn: a rank that synchronizes for the next piece has read the previous one."""


def share_memory(model: nn.Module, group: dist.ProcessGroup | None = None) -> str | None:
    """Let FSDP2 units gather and reduce through shared memory, or reduce over gloo with few bytes.

    Every process of the group must call it, and all get the same result.

    Args:
        model: Model that FSDP2 has sharded.
        group: Processes that share a copy of the model; None for all.

    Returns:
        The reason for keeping gloo; None if memory is shared.
    """
    found = Boxes.shared(group)
    boxes, reason = (None, found) if isinstance(found, str) else (found, None)
    gather: Any = AllGather(boxes)
    scatter: Any = ReduceScatter(boxes)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if reason is None:
                module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
    return reason


class Boxes:
    """Shared buffers of all processes of a group, in the order of ranks."""

    def __init__(self, boxes: Sequence[mmap.mmap], group: dist.ProcessGroup | None = None) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.boxes = [torch.frombuffer(box, dtype=torch.uint8).view(SLOTS, SLOT) for box in boxes]
        self.presence = torch.zeros(1)
        self.turn = 0

    @classmethod
    def shared(cls, group: dist.ProcessGroup | None = None) -> "Boxes | str":
        """Create a buffer and open those of the others; or the reason for failure, on all ranks."""
        descriptor, problem = -1, None
        try:
            descriptor = _memory(SLOTS * SLOT)
        except OSError as error:
            problem = f"no memory can be shared: {error.strerror}"
        places = _all_gather_object((_machine(), os.getpid(), descriptor, problem), group)
        problems = [problem for *_, problem in places if problem]
        if len({machine for machine, *_ in places}) > 1:
            problems = ["the processes do not run on one host"]
        boxes: list[mmap.mmap] = []
        if not problems:
            try:
                boxes = [_opened(process, number) for _, process, number, _ in places]
            except OSError as error:
                problem = f"memory of another process cannot be opened: {error.strerror}"
            problems = [each for each in _all_gather_object(problem, group) if each]
        if descriptor >= 0:
            os.close(descriptor)  # by now all ranks have opened it, or none will
        return problems[0] if problems else cls(boxes, group)

    def exchange(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Exchange parts of at most `SLOT` bytes, of the same shape and type on every rank.

        Returns:
            The parts of all ranks, which must be read before the next exchange.
        """
        self.turn = (self.turn + 1) % SLOTS
        length = part.numel() * part.itemsize
        parts = [box[self.turn, :length].view(part.dtype).view(part.shape) for box in self.boxes]
        parts[self.rank].copy_(part)
        dist.all_reduce(self.presence, group=self.group)
        return parts


class Collective:
    """Common interface of custom FSDP2 collectives, through boxes if there are any."""

    def __init__(self, boxes: Boxes | None) -> None:
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
        """Gather the inputs (n,) of all ranks, in order, into the output (ranks x n,)."""
        assert self.boxes is not None
        rows = output_tensor.view(group.size(), -1)
        most = SLOT // input_tensor.itemsize
        for whole, mine in zip(rows.split(most, 1), input_tensor.split(most), strict=True):
            for place, part in zip(whole, self.boxes.exchange(mine), strict=True):
                if place.data_ptr() != mine.data_ptr():  # FSDP2's input is a view of the output
                    place.copy_(part)


class ReduceScatter(Collective):
    """`torch.distributed.fsdp`'s interface of the same name.

    Without boxes, each process sends the others their rows. Gloo's own (torch 2.13) is an
    all-reduce, which sends twice as much.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Write row `rank` of the sum or mean of all inputs (ranks x n,) into the output (n,).

        Summands are added in the order of ranks, so the result does not depend on the rank.
        """
        assert op in (ReduceOp.SUM, ReduceOp.AVG), op
        rows = input_tensor.view(group.size(), -1)
        most = SLOT // input_tensor.itemsize // group.size()
        for result, mine in zip(output_tensor.split(most), rows.split(most, 1), strict=True):
            first, *others = self._received(mine, group)
            result.copy_(first)
            for part in others:
                result.add_(part)
        if op == ReduceOp.AVG:
            output_tensor.div_(group.size())

    def _received(self, rows: torch.Tensor, group: dist.ProcessGroup) -> Sequence[torch.Tensor]:
        """Row `rank` of the rows (ranks x n,) of every rank."""
        if self.boxes is not None:
            return [part[group.rank()] for part in self.boxes.exchange(rows)]
        received = torch.empty(rows.shape, dtype=rows.dtype)
        dist.all_to_all_single(received, rows.contiguous(), group=group)
        return received.unbind()


def _memory(size: int) -> int:
    """A file descriptor of memory that is allocated, not just reserved."""
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
    """Boot id and PID namespace: processes with equal values can see each other."""
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


def _all_gather_object(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, mine, group=group)
    return answers
