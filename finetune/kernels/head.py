"""The loss of a causal language model: on labelled rows only, in chunks, without stored logits.

A model that was given its loss is called with the places of the labelled rows and what each should
predict, and returns a sum, or the log-probability of each. Called without them it is the model that
transformers made. The loss is made inside the model's own forward pass, and its weights are used
inside the head's: there every engine has gathered them (FSDP2, ZeRO-3) and sees what takes part
(DDP).
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
"""What gradients of logits are multiplied by for a product in fp16: of at most 1, they stay below
its largest number, and shares of 1e-10 above its smallest."""


def give_loss(
    model: PreTrainedModel,
    chunked: bool,
    balance: Balance | None = None,
    temperature: float = 1.0,
    labelled: bool = False,
) -> None:
    """Let a model compute its loss where its forward pass is told the labelled rows.

    The classes of the model and of its head are replaced by subclasses of the same name, as
    `torch.distributed.fsdp.fully_shard` does: names of parameters and saved files stay.

    Args:
        model: the plain model, which may hold PEFT's modules already.
        chunked: false computes the loss from all logits.
        balance: the load-balancing loss that training adds; None for none.
        temperature: divides the logits of the loss, behind scale and cap.
        labelled: computes the loss from the logits of labelled tokens alone.

    Raises:
        FinetuneError: `chunked`, and the head is no plain linear layer.
    """
    if chunked:
        head = plain_head(model)
        head.__class__ = LabelledHead
        scale, cap = logit_function(model.config)
        # c tanh(s x / c) / t is the same function with c / t and s / t.
        head.scale, head.cap = scale / temperature, None if cap is None else cap / temperature
    kind = type(model)
    # With the module of the class too: transformers looks there for code of the model's own.
    own: dict[str, Any] = {"loss_in_chunks": chunked, "balance": balance}
    own |= {"temperature": temperature, "__module__": kind.__module__}
    own["logits_of_labelled"] = logit_function(model.config) if labelled else None
    model.__class__ = type(kind.__name__, (WithLoss, kind), own)


def plain_head(model: PreTrainedModel) -> nn.Module:
    """The head that is computed with: a copy that is trained whole beside an adapter, or itself.

    Raises:
        FinetuneError: it is no plain linear layer.
    """
    head = model.get_output_embeddings()
    if isinstance(head, ModulesToSaveWrapper):  # trained whole beside an adapter
        head = head.modules_to_save[head.active_adapters[0]]
    if type(head) not in (nn.Linear, LabelledHead):
        raise FinetuneError(
            f"kernels.head: the head is a {type(head).__name__}, expected a plain linear layer; "
            "use kernels.head=whole"
        )
    return head


def logit_function(config: PretrainedConfig) -> tuple[float, float | None]:
    """Scale and soft cap c of logits: x becomes c * tanh(scale * x / c), or scale * x."""
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
    """Mixed into a causal language model: a forward pass that ends in the sum of the loss."""

    loss_in_chunks: bool
    logits_of_labelled: tuple[float, float | None] | None
    """Scale and soft cap where the head's own call makes logits, of labelled tokens alone."""
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
        """As the model's own, or with `places` the summed cross-entropy, a scalar in fp32.

        With `logps` the log-probability of each target, (labelled,) in fp32. Where training
        balances experts `Balance.sum` follows: then it is (2,), or (labelled + 1,).

        Args:
            places: (labelled,) int64, flat indices into (rows, length) of what is predicted from.
            targets: (labelled,) int64, the token that follows each.
            real_tokens: tokens of the micro-batch that are not padding.
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
        """The summed cross-entropy of hidden states, or with `logps` that of each target."""
        head = self.get_output_embeddings()
        if self.loss_in_chunks:
            return head(hidden, targets, logps)
        logits = head(hidden).float()
        scale, cap = self.logits_of_labelled or (1.0, None)
        logits = logits * scale if scale != 1.0 else logits
        logits = (logits / cap).tanh() * cap if cap is not None else logits
        return _from_logits(self._tempered(logits), targets, logps)

    def _tempered(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the temperature, without a copy where that is 1."""
        return logits if self.temperature == 1.0 else logits / self.temperature


def _from_logits(logits: torch.Tensor, targets: torch.Tensor, logps: bool) -> torch.Tensor:
    """The summed cross-entropy of (labelled, vocabulary) logits, or each log-probability."""
    loss = F.cross_entropy(logits.float(), targets, reduction="none" if logps else "sum")
    return -loss if logps else loss


class LabelledHead(nn.Linear):
    """A head that gives the summed loss of hidden states where it is told their targets.

    Or the log-probability of each target.
    """

    scale: float
    cap: float | None
    entries: tuple[int, int] | None = None
    """Logits that are there at once, and that become a gradient at once; None for those of the
    device."""

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
    """Summed cross-entropy of a head, with its gradient made in the forward pass.

    The gradient of the logits is softmax(logits) - onehot(target) (times what scaling and capping
    add): each chunk of logits becomes gradients of hidden states and head, and is forgotten.
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
        chunk: int,  # rows of logits that are there at once
        tile: int,  # rows of them that become a gradient at once
    ) -> torch.Tensor:
        loss, dtype = torch.zeros((), device=hidden.device), compute_dtype(weight)
        with torch.autocast(weight.device.type, enabled=False):
            grads = Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], tile, dtype)
            for part, logits in grads.chunks(chunk):
                loss += grads.count(part, logits, targets[part], scale, cap)
        ctx.grads = grads.of(hidden, weight, bias)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return used_up(ctx, grad)


def used_up(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Gradients that a forward pass made times a factor, in place: they are used once.

    Those of hidden states, weight and bias; five arguments behind them have none.
    """
    grads, ctx.grads = ctx.grads, None
    # Autograd casts them.
    return (*(each if each is None else each.mul_(factor) for each in grads), *(None,) * 5)


class ChunkedLogProbs(torch.autograd.Function):
    """Log-probability of each target, (labelled,) in fp32, whose gradient is made on the way back.

    The forward pass keeps hidden states and the head's own weight, as a linear layer does: where an
    engine shards the weight, it gathers it for the backward pass too. There each chunk of logits is
    computed again and becomes gradients, times the gradient of its log-probabilities.
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
        chunk: int,  # rows of logits that are there at once
        tile: int,  # rows of them that become a gradient at once
    ) -> torch.Tensor:
        ctx.dtype = compute_dtype(weight)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.settings = scale, cap, chunk, tile
        found = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        with torch.autocast(weight.device.type, enabled=False):
            grads = Gradients(hidden, weight, bias, (False,) * 3, tile, ctx.dtype)
            # The sums take copies, on a CPU of an eighth of a tile only.
            few = max(1, tile // 8) if hidden.is_cpu else tile
            for part, logits in grads.chunks(chunk):
                for first in range(0, len(logits), few):
                    here = slice(part.start + first, part.start + min(first + few, len(logits)))
                    wide = logits[first : first + few]
                    found[here] = tile_logps(wide, targets[here], bias, scale, cap)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        scale, cap, chunk, tile = ctx.settings
        with torch.autocast(weight.device.type, enabled=False):
            grads = Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], tile, ctx.dtype)
            for part, logits in grads.chunks(chunk):
                grads.count(part, logits, targets[part], scale, cap, -grad[part])
        return (*grads.of(hidden, weight, bias), *(None,) * 5)


class Gradients:
    """Gradients of the summed loss with respect to hidden states, matrix and bias, so far."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: tuple[bool, ...],
        rows: int,
        dtype: torch.dtype,
    ) -> None:
        """`rows` of logits become gradients at once, in `dtype`; `wanted`: which of them are."""
        given, matrix = hidden.to(dtype), weight.to(dtype)
        self.given, self.matrix, self.added, self.rows = given, matrix, bias, rows
        self.any = any(wanted)
        self.narrow = given.dtype == torch.float16
        wide = torch.float32 if self.narrow else given.dtype
        self.hidden = torch.empty_like(given, dtype=wide) if wanted[0] else None
        self.weight = torch.zeros_like(matrix, dtype=torch.float32) if wanted[1] else None
        self.bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] else None

    def chunks(self, rows: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Places of some rows, and their logits (rows, vocabulary), one after the other."""
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
        """Summed loss of a chunk, counted in; `logits` (chunk, vocabulary) are overwritten.

        `weights` multiply the gradient of each row.
        """
        loss = torch.zeros((), dtype=torch.float32, device=logits.device)
        if self.narrow:  # shares of a large vocabulary are below fp16's smallest number
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
        """Count in what the gradient of a chunk's logits, (chunk, vocabulary), brings."""
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
        """The same with rows times `weights`, which multiply what is narrower than the logits."""
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
        """Each in the type of what it is the gradient of; in fp16 that of the hidden states waits
        in fp32 for the factor of the loss."""
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

    Where it is `wanted`, the gradient of the loss is written into `logits`: at the target by
    `expm1`, which stays exact where the target's share is near 1.
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
