"""Compute the loss of a causal language model for labelled tokens only, without storing all logits.

After `give_loss`, a model can be called with the positions of labelled tokens and their targets,
and returns the summed loss or each log-probability. Without them it behaves as in transformers. The
loss is computed inside the model's forward pass, and the head's weight is used inside the head's
forward pass: there, every engine has gathered it (FSDP2, ZeRO-3) and tracks its use (DDP).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from finetune.errors import FinetuneError
from finetune.kernels.balance import Balance, documents_of
from finetune.kernels.chains import chain
from finetune.kernels.precision import compute_dtype
from finetune.planner.kernels import (
    CHUNK_ENTRIES,
    GPU_CHUNK_ENTRIES,
    GPU_TILE_ENTRIES,
    LOGITS,
    TILE_ENTRIES,
)

RAISED = 1024.0
"""Scale of logit gradients for products in fp16. Gradients are at most 1, so they do not overflow,
and probabilities of 1e-10 do not underflow."""


def give_loss(
    model: PreTrainedModel,
    chunked: bool,
    balance: Balance | None = None,
    temperature: float = 1.0,
    labelled: bool = False,
) -> None:
    """Enable a model to compute its loss if its forward pass is given the labelled tokens.

    The classes of the model and its head are replaced by subclasses of the same name, as
    `torch.distributed.fsdp.fully_shard` does: parameter names and saved files do not change.

    Args:
        model: The plain model, possibly with PEFT's modules.
        chunked: Compute the loss in chunks; False computes it from all logits.
        balance: Load-balancing loss that is added in training, or None.
        temperature: Divisor of the logits in the loss, after scale and cap.
        labelled: Compute the loss from the logits of labelled tokens only.

    Raises:
        FinetuneError: `chunked`, but the head is not a plain linear layer.
    """
    if chunked:
        head = plain_head(model)
        head.__class__ = LabelledHead
        scale, cap = logit_function(model.config)
        # c tanh(s x / c) / t is the same function with c / t and s / t.
        head.scale, head.cap = scale / temperature, None if cap is None else cap / temperature
    kind = type(model)
    # Keep the module of the class: transformers looks there for the model's custom code.
    own: dict[str, Any] = {"loss_in_chunks": chunked, "balance": balance}
    own |= {"temperature": temperature, "__module__": kind.__module__}
    own["logits_of_labelled"] = logit_function(model.config) if labelled else None
    model.__class__ = type(kind.__name__, (WithLoss, kind), own)


def plain_head(model: PreTrainedModel) -> nn.Module:
    """The active output head: its trained copy (PEFT's `modules_to_save`), or the head itself.

    Raises:
        FinetuneError: the head is not a plain linear layer.
    """
    head = model.get_output_embeddings()
    if isinstance(head, ModulesToSaveWrapper):  # fully trained next to an adapter
        head = head.modules_to_save[head.active_adapters[0]]
    if type(head) not in (nn.Linear, LabelledHead):
        raise FinetuneError(
            f"kernels.head: the head is a {type(head).__name__}, expected a plain linear layer; "
            "use kernels.head=whole"
        )
    return head


def logit_function(config: PretrainedConfig) -> tuple[float, float | None]:
    """Scale and soft cap c of logits: c * tanh(scale * x / c), or scale * x if c is None."""
    match LOGITS[config.model_type]:
        case "softcapped":
            return 1.0, config.final_logit_softcapping
        case "divided":
            return 1.0 / config.logits_scaling, None
        case "multiplied":
            return config.logit_scale, None
        case "plain":
            return 1.0, None


class WithLoss:
    """Mixin for a causal language model whose forward pass can return the summed loss."""

    loss_in_chunks: bool
    logits_of_labelled: tuple[float, float | None] | None
    """Scale and soft cap, if the head computes logits for labelled tokens only; else None."""
    balance: Balance | None
    temperature: float

    def forward(
        self,
        *args: Any,
        places: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        real_tokens: int = 0,
        logps: bool = False,
        **inputs: Any,
    ) -> Any:
        """The model's own forward pass or, with `places`, the summed cross-entropy.

        The sum is a scalar in fp32. With `logps`, the result is the log-probability of each target,
        (labelled,) in fp32. In training with a balance loss, `Balance.sum` is appended: the result
        is (2,), or (labelled + 1,).

        Args:
            places: (labelled,) int64, flat indices into (rows, length) of positions to predict
                from.
            targets: (labelled,) int64, the next token of each.
            real_tokens: Number of tokens of the micro-batch that are not padding.
        """
        if places is None:
            return super().forward(*args, **inputs)
        balanced = self.balance is not None and self.training
        if balanced:
            inputs["output_router_logits"] = True
        if self.loss_in_chunks or self.logits_of_labelled:
            given = {name: value for name, value in inputs.items() if value is not None}
            output = self.base_model(*args, **given)
            hidden = output.last_hidden_state.flatten(0, 1)  # (rows * length, hidden)
            loss = self.loss_of_hidden(hidden[places], targets, logps)
        else:
            output = super().forward(*args, **inputs)
            labelled = output.logits.flatten(0, 1)[places]  # (labelled, vocabulary)
            loss = _from_logits(self._tempered(labelled.float()), targets, logps)
        if not balanced:
            return loss
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        documents = documents_of(ids, mask, inputs.get("cu_seq_lens_q"), real_tokens)
        balance = self.balance.sum(output.router_logits, *documents)
        return torch.cat([loss.view(-1), balance.view(1)])

    def loss_of_hidden(
        self,
        hidden: torch.Tensor,  # (labelled, hidden)
        targets: torch.Tensor,  # (labelled,)
        logps: bool,
    ) -> torch.Tensor:
        """The summed cross-entropy of hidden states or, with `logps`, each log-probability."""
        head = self.get_output_embeddings()
        if self.loss_in_chunks:
            return head(hidden, targets, logps)
        logits = head(hidden).float()
        scale, cap = self.logits_of_labelled or (1.0, None)
        logits = logits * scale if scale != 1.0 else logits
        logits = (logits / cap).tanh() * cap if cap is not None else logits
        return _from_logits(self._tempered(logits), targets, logps)

    def _tempered(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits divided by the temperature, without a copy if that is 1."""
        return logits if self.temperature == 1.0 else logits / self.temperature


def _from_logits(logits: torch.Tensor, targets: torch.Tensor, logps: bool) -> torch.Tensor:
    """The summed cross-entropy of (labelled, vocabulary) logits, or each log-probability."""
    loss = F.cross_entropy(logits.float(), targets, reduction="none" if logps else "sum")
    return -loss if logps else loss


class LabelledHead(nn.Linear):
    """A head that returns the summed loss, or each log-probability, if it is given targets."""

    scale: float
    cap: float | None
    entries: tuple[int, int] | None = None
    """Number of logits of a chunk and of a tile; None for the device's defaults."""

    def forward(
        self, input: torch.Tensor, targets: torch.Tensor | None = None, logps: bool = False
    ) -> torch.Tensor:
        if targets is None:
            return super().forward(input)
        of_cpu, of_gpu = (CHUNK_ENTRIES, TILE_ENTRIES), (GPU_CHUNK_ENTRIES, GPU_TILE_ENTRIES)
        entries = self.entries or (of_cpu if input.is_cpu else of_gpu)
        rows = tuple(max(1, each // len(self.weight)) for each in entries)
        given = (input, self.weight, self.bias, targets)
        kind = ChunkedLogProbs if logps else ChunkedLoss
        return kind.apply(*given, self.scale, self.cap, *rows)


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
    ) -> torch.Tensor:
        loss, dtype = torch.zeros((), device=hidden.device), compute_dtype(weight)
        with torch.autocast(weight.device.type, enabled=False):
            grads = Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], tile, dtype)
            for part, logits in grads.chunks(chunk):
                loss += grads.count(part, logits, targets[part], scale, cap)
                del logits  # or two chunks are held while the next is made
        ctx.grads = grads.of(hidden, weight, bias)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return used_up(ctx, grad)


def used_up(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Multiply the gradients from the forward pass by a factor, in place; they are used once.

    Returns the gradients of hidden states, weight and bias, and None for five more arguments.
    """
    grads, ctx.grads = ctx.grads, None
    # Autograd casts them to the types of the inputs.
    return (*(each if each is None else each.mul_(factor) for each in grads), *(None,) * 5)


class ChunkedLogProbs(torch.autograd.Function):
    """Log-probability of each target, (labelled,) in fp32; gradients are computed in `backward`.

    The forward pass saves the hidden states and the head's weight, as a linear layer does: an
    engine that shards the weight gathers it again for the backward pass. There, each chunk of
    logits is recomputed and converted to gradients, weighted by those of its log-probabilities.
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
    ) -> torch.Tensor:
        ctx.dtype = compute_dtype(weight)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.settings = scale, cap, chunk, tile
        found = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        with torch.autocast(weight.device.type, enabled=False):
            grads = Gradients(hidden, weight, bias, (False,) * 3, tile, ctx.dtype)
            # `tile_logps` copies its logits; on CPUs, only an eighth of a tile at a time.
            few = max(1, tile // 8) if hidden.is_cpu else tile
            for part, logits in grads.chunks(chunk):
                for first in range(0, len(logits), few):
                    here = slice(part.start + first, part.start + min(first + few, len(logits)))
                    wide = logits[first : first + few]
                    found[here] = tile_logps(wide, targets[here], bias, scale, cap)
                    del wide
                del logits
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        scale, cap, chunk, tile = ctx.settings
        with torch.autocast(weight.device.type, enabled=False):
            grads = Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], tile, ctx.dtype)
            for part, logits in grads.chunks(chunk):
                grads.count(part, logits, targets[part], scale, cap, -grad[part])
                del logits
        return (*grads.of(hidden, weight, bias), *(None,) * 5)


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
    ) -> torch.Tensor:
        """Add the gradients of a chunk, and return its summed loss.

        Overwrites `logits`, (chunk, vocabulary). `weights` multiply the gradient of each row.
        """
        loss = torch.zeros((), dtype=torch.float32, device=logits.device)
        if self.narrow:  # probabilities of a large vocabulary underflow in fp16
            logits = logits.float()
        for start in range(0, len(logits), self.rows):
            tile = slice(start, start + self.rows)
            given = logits[tile], targets[tile], self.added
            loss += tile_loss(*given, scale, cap, self.any)
        if weights is not None:
            self._count_weighted(part, logits, weights)
            return loss
        self.add(part, logits)
        return loss

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


def tile_logps(
    logits: torch.Tensor,  # (rows, vocabulary)
    targets: torch.Tensor,  # (rows,)
    bias: torch.Tensor | None,
    scale: float,
    cap: float | None,
) -> torch.Tensor:
    """Log-probability of the target of each row, (rows,) in fp32."""
    wide = logits.float()
    if bias is not None:
        wide = wide + bias
    if scale != 1.0:
        wide = wide * scale
    if cap is not None:
        wide = (wide / cap).tanh_() * cap
    return wide.gather(1, targets[:, None])[:, 0] - wide.logsumexp(1)


@chain
def tile_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    cap: float | None,
    wanted: bool,
) -> torch.Tensor:
    """Summed loss of some rows of logits (tile, vocabulary), a scalar in fp32.

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
    loss = -of_target.sum()
    if not wanted:
        return loss
    by_logits, at_target = shares.exp_(), of_target.expm1()
    if slope is not None:
        by_logits *= slope
        at_target *= slope.gather(1, rows)
    if scale != 1.0:
        by_logits *= scale
        at_target *= scale
    by_logits[torch.arange(len(logits), device=logits.device), targets] = at_target[:, 0]
    logits.copy_(by_logits)
    return loss
