"""Sum values of documents over the processes that share the documents' tokens."""

from typing import Any

import torch


class SummedOnFirst(torch.autograd.Function):
    """Sum over a process group on its first process, which sends the gradient to all.

    The other processes get no rows, so a loss of the sums is computed once: its gradient reaches
    the values of every process, as that of a sum over all tokens on one process would.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        """Sum `values`, (documents, ...); (0, ...) on all processes but the first."""
        ctx.group, ctx.shape = group, values.shape
        total = values.clone(memory_format=torch.contiguous_format)
        torch.distributed.reduce(total, group=group, group_dst=0)
        return total if torch.distributed.get_rank(group) == 0 else total[:0].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        sent = grad.contiguous() if len(grad) else grad.new_empty(ctx.shape)
        torch.distributed.broadcast(sent, group=ctx.group, group_src=0)
        return sent, None
