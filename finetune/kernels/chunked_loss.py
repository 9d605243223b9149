"""Compute the cross-entropy of a head and its gradients for one chunk of logits at a time."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from finetune.kernels.pointwise import chain
from finetune.kernels.precision import compute_dtype
from finetune.kernels.token_loss import TokenLoss

RAISED = 1024.0
"""Scale of logit gradients for products in fp16. Gradients are at most 1, so they do not overflow,
and probabilities of 1e-10 do not underflow."""
FURTHER = 6
"""Arguments of the functions after hidden states, weight and bias; autograd drops surplus ones."""


class ChunkedLoss(torch.autograd.Function):
    """Summed cross-entropy of a head, with the gradient computed in the forward pass.

    The gradient of the logits is softmax(logits) - onehot(target), times the derivatives of scale
    and cap. Each chunk of logits is converted to gradients of hidden states and head, and freed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # (labelled, hidden)
        weight: torch.Tensor,  # (vocabulary, hidden)
        bias: torch.Tensor | None,  # (vocabulary,)
        targets: torch.Tensor,  # (labelled,)
        scale: float,
        cap: float | None,
        chunk: int,  # rows of logits that are in memory
        tile: int,  # rows of logits that are converted to gradients at a time
        rule: TokenLoss | None = None,
    ) -> torch.Tensor:
        loss, dtype = torch.zeros((), device=hidden.device), compute_dtype(weight)
        with torch.autocast(weight.device.type, enabled=False):
            grads = Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], tile, dtype)
            for part, logits in grads.chunks(chunk):
                losses = grads.count(part, logits, targets[part], scale, cap, rule=rule)
                loss += sum(each.sum() for each in losses.split(tile))
                del logits  # or two chunks are held while the next is made
        ctx.grads = grads.of(hidden, weight, bias)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return used_up(ctx, grad)


def used_up(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Multiply the gradients from the forward pass by a factor, in place; they are used once.

    Returns the gradients of hidden states, weight and bias, and None for further arguments.
    """
    grads, ctx.grads = ctx.grads, None
    # Autograd casts them to the types of the inputs.
    return (*(each if each is None else each.mul_(factor) for each in grads), *(None,) * FURTHER)


class ChunkedLogProbs(torch.autograd.Function):
    """Log-probability of each target, (labelled,) in fp32; with `entropy`, two such tensors.

    The second is the entropy of each distribution in nats, without gradient.

    The gradient of a hidden state is that of its own log-probability, (onehot(target) - softmax) W,
    times a factor that is known in the backward pass. If the head is frozen, the forward pass
    computes all but the factor, while it has the logits. Otherwise it saves the hidden states and
    the head's weight, as a linear layer does, so that an engine that shards the weight gathers it
    again: the backward pass recomputes each chunk of logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # (labelled, hidden)
        weight: torch.Tensor,  # (vocabulary, hidden)
        bias: torch.Tensor | None,  # (vocabulary,)
        targets: torch.Tensor,  # (labelled,)
        scale: float,
        cap: float | None,
        chunk: int,  # rows of logits that are in memory
        tile: int,  # rows of logits that are converted to gradients at a time
        entropy: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ctx.dtype, ctx.settings = compute_dtype(weight), (scale, cap, chunk, tile)
        ctx.frozen = not any(ctx.needs_input_grad[1:3])
        wanted = ctx.needs_input_grad[0] and ctx.frozen, False, False
        found = hidden.new_empty((1 + entropy, len(hidden)), dtype=torch.float32)
        with torch.autocast(weight.device.type, enabled=False):
            grads = Gradients(hidden, weight, bias, wanted, tile, ctx.dtype)
            for part, logits in grads.chunks(chunk):
                found[:, part] = grads.count(
                    part, logits, targets[part], scale, cap, entropy=entropy
                )
                del logits
        if ctx.frozen:
            ctx.grads = grads.of(hidden, weight, bias)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets)
        logps = -found[0]
        if not entropy:
            return logps
        entropies = found[1].clone()
        ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor, *_: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if ctx.frozen:
            return used_up(ctx, -grad[:, None])
        hidden, weight, bias, targets = ctx.saved_tensors
        scale, cap, chunk, tile = ctx.settings
        with torch.autocast(weight.device.type, enabled=False):
            grads = Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], tile, ctx.dtype)
            for part, logits in grads.chunks(chunk):
                grads.count(part, logits, targets[part], scale, cap, -grad[part])
                del logits
        return (*grads.of(hidden, weight, bias), *(None,) * FURTHER)


class Gradients:
    """Accumulates gradients of the summed loss for hidden states, weight and bias."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: tuple[bool, ...],
        rows: int,
        dtype: torch.dtype,
    ) -> None:
        """Convert `rows` rows of logits at a time, in `dtype`; `wanted` selects the gradients."""
        given, matrix = hidden.to(dtype), weight.to(dtype)
        self.given, self.matrix, self.added, self.rows = given, matrix, bias, rows
        self.any = any(wanted)
        self.narrow = given.dtype == torch.float16
        wide = torch.float32 if self.narrow else given.dtype
        # A hidden state is in one chunk, so its gradient is written once; those of the head are
        # sums over chunks, in which 16 bits would lose the later ones.
        self.hidden = torch.empty_like(given, dtype=wide) if wanted[0] else None
        self.weight = torch.zeros_like(matrix, dtype=torch.float32) if wanted[1] else None
        self.bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] else None

    def chunks(self, rows: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of `rows` rows with their logits, (rows, vocabulary)."""
        for start in range(0, len(self.given), rows):
            part = slice(start, start + rows)
            yield part, F.linear(self.given[part], self.matrix)

    def count(
        self,
        part: slice,
        logits: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        cap: float | None,
        weights: torch.Tensor | None = None,  # (chunk,)
        entropy: bool = False,
        rule: TokenLoss | None = None,
    ) -> torch.Tensor:
        """Add the gradients of a chunk, and return its losses, (chunk,) in fp32.

        With `entropy`, the entropies follow: (2, chunk). Overwrites `logits`, (chunk, vocabulary).
        `weights` multiply the gradient of each row; those of `rule` its loss, too.
        """
        smoothing = 0.0 if rule is None else rule.smoothing
        of_rule = None if rule is None else rule.by_entropy(logits, self.added, scale, cap)
        tiled = tile_loss if smoothing == 0 else tile_loss.eager
        more = (smoothing,) if smoothing else ()
        shape = (2, len(logits)) if entropy else (len(logits),)
        losses = torch.empty(shape, dtype=torch.float32, device=logits.device)
        if self.narrow:  # probabilities of a large vocabulary underflow in fp16
            logits = logits.float()
        for start in range(0, len(logits), self.rows):
            tile = slice(start, start + self.rows)
            given = logits[tile], targets[tile], self.added
            losses[..., tile] = tiled(*given, scale, cap, self.any, entropy, *more)
        if rule is not None:
            weights = rule.by_loss(losses) if of_rule is None else of_rule
        if weights is None:
            self.add(part, logits)
        else:
            self._count_weighted(part, logits, weights)
        return losses * weights if rule is not None and weights is not None else losses

    def add(self, part: slice, by_logits: torch.Tensor) -> None:
        """Add the gradients that follow from those of a chunk's logits, (chunk, vocabulary)."""
        if self.bias is not None:
            self.bias += by_logits.sum(0, dtype=torch.float32)
        self._count_hidden(part, by_logits)
        if self.weight is not None:
            self.weight += by_logits.T @ self.given[part].to(by_logits.dtype)

    def _count_hidden(self, part: slice, by_logits: torch.Tensor) -> None:
        if self.hidden is None:
            return
        if self.narrow:
            raised = (by_logits * RAISED).half() @ self.matrix
            self.hidden[part] = raised.float().div_(RAISED)
        else:
            torch.mm(by_logits, self.matrix, out=self.hidden[part])

    def _count_weighted(self, part: slice, by_logits: torch.Tensor, weights: torch.Tensor) -> None:
        """`add` with weighted rows; applies `weights` to tensors narrower than the logits."""
        rows = weights[:, None]
        if self.bias is not None:
            self.bias += by_logits.T @ weights.to(by_logits.dtype)
        self._count_hidden(part, by_logits)
        if self.hidden is not None:
            self.hidden[part] *= rows
        if self.weight is not None:
            self.weight += by_logits.T @ (self.given[part] * rows).to(by_logits.dtype)

    def of(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients in the types of their tensors; with fp16, that of the hidden states stays
        in fp32 until it is multiplied by the gradient of the loss."""
        kept = torch.float32 if self.narrow else hidden.dtype
        return (
            None if self.hidden is None else self.hidden.to(kept),
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


@chain
def tile_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    cap: float | None,
    wanted: bool,
    entropy: bool = False,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """Loss of each of some rows of logits (tile, vocabulary), (tile,) in fp32.

    With `entropy`, the entropies in nats follow, (2, tile), and `logits` are used up.

    If `wanted`, the gradient of the loss is written into `logits`. At the target it is computed by
    `expm1`, which is accurate for probabilities near 1.
    """
    wide = logits.float()
    if bias is not None:
        wide = wide + bias
    if scale != 1.0:
        wide = wide * scale
    slope = None
    if cap is not None:
        wide = (wide / cap).tanh_()
        slope = 1 - wide.square() if wanted else None
        wide *= cap
    rows = targets[:, None]
    shares = F.log_softmax(wide, -1)
    of_target = shares.gather(1, rows)
    losses = -of_target[:, 0]
    if smoothing:  # the mean of -log p over the vocabulary, for that share
        even = losses + wide.gather(1, rows)[:, 0] - wide.mean(-1)
        losses = losses.lerp(even, smoothing)
    if not (wanted or entropy):
        return losses
    # In place: the losses are copies already, and a second table would double the memory of a tile.
    by_logits, at_target = shares.exp_(), of_target.expm1()
    if entropy:  # the logarithm of the sum of powers, minus the mean logit
        of_sum = wide.gather(1, rows)[:, 0] + losses
        losses = torch.stack([losses, of_sum - wide.mul_(by_logits).sum(-1)])
    if not wanted:
        return losses
    if smoothing:
        by_logits -= smoothing / logits.shape[1]
        at_target += smoothing - smoothing / logits.shape[1]
    if slope is not None:
        by_logits *= slope
        at_target *= slope.gather(1, rows)
    if scale != 1.0:
        by_logits *= scale
        at_target *= scale
    if is_traced():
        # One pass with the rest; an indexed write would first need all of `by_logits` in memory.
        columns = torch.arange(logits.shape[1], device=logits.device)
        by_logits = torch.where(columns == rows, at_target, by_logits)
    else:
        by_logits[torch.arange(len(logits), device=logits.device), targets] = at_target[:, 0]
    # The caller's logits become their gradients, in their own type.
    logits.copy_(by_logits)
    return losses


def is_traced() -> bool:
    """Whether `tile_loss` is being compiled by TorchInductor, not run."""
    return torch.compiler.is_compiling()
