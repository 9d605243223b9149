"""Compute the divergence of a model's next-token distributions from a teacher's, in chunks.

The teacher is a frozen submodule of its student, so every engine shards, gathers and moves it with
the rest. The teacher runs first and keeps the hidden states at labelled tokens; then the student
runs. The logits of both are computed for a few rows at a time, together with the gradient.
"""

import dataclasses
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from finetune.kernels.chunked_loss import Gradients, used_up
from finetune.kernels.head import LabelledHead, logit_function, plain_head, scaled
from finetune.kernels.mixin import mix_in
from finetune.kernels.precision import compute_dtype
from finetune.planner.kernels import GPU_TAUGHT_ENTRIES, TAUGHT_ENTRIES

Kind = Literal["forward_kl", "reverse_kl", "jsd"]
LEAST = -100.0
"""Lower bound of a stored teacher's log-probabilities, and of a student's compared with them."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Divergence to compute in one micro-batch, with the data of a stored teacher."""

    kind: Kind
    beta: float
    """Weight of the teacher's distribution in the mixture of `jsd`."""
    temperature: float
    ce_weight: float
    """Weight of the cross-entropy, which is added to the divergence."""
    ids: torch.Tensor | None = None  # (labelled, k) int32
    """Most likely tokens of a stored teacher; None if the teacher runs."""
    logps: torch.Tensor | None = None  # (labelled, k + 1) fp16
    """Log-probabilities of `ids` at the temperature, then that of all other tokens together."""


def give_teacher(model: PreTrainedModel, teacher: PreTrainedModel | None) -> None:
    """Enable a model to compute divergences if it is called with a `Target`.

    Args:
        model: Model whose loss is not `whole`, from `finetune.kernels.head.give_loss`.
        teacher: Model to freeze and attach; None if its log-probabilities are stored.
    """
    if model.loss_in_chunks:
        plain_head(model).__class__ = TaughtHead
    if teacher is not None:
        head = teacher.get_output_embeddings()
        if isinstance(head, nn.Linear):  # otherwise another stage of a pipeline has it
            head.__class__ = TeacherHead
            head.scale, head.cap = logit_function(teacher.config)
        mix_in(teacher, Frozen)
        teacher.requires_grad_(False).eval()
        model.teacher = teacher
    model.balance = None  # not a part of what a teacher teaches
    mix_in(model, WithTeacher)


class Frozen:
    """Mixin for a teacher, which stays in eval mode while its student trains."""

    balance = None

    def train(self, mode: bool = True) -> Any:
        return super().train(False)  # type: ignore[misc]


class TeacherHead(nn.Linear):
    """The head of a teacher; inside its forward pass, a callback can use its weight."""

    scale: float
    cap: float | None

    def forward(self, input: torch.Tensor, use: Any = None) -> Any:
        return super().forward(input) if use is None else use(_Shares(self, input))


class WithTeacher:
    """Mixin for a causal language model whose forward pass can return a sum of divergences."""

    def forward(
        self,
        *args: Any,
        places: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        taught: Target | None = None,
        **inputs: Any,
    ) -> Any:
        """The previous forward pass or, with `taught`, the summed loss and its cross-entropy.

        With `taught` the result is (2,) in fp32.

        Args:
            places: (labelled,) int64, flat indices into (rows, length) of positions to predict
                from.
            targets: (labelled,) int64, the next token of each.
        """
        if taught is None:
            return super().forward(*args, places=places, targets=targets, **inputs)
        given = {k: v for k, v in inputs.items() if v is not None and k != "real_tokens"}
        teacher = getattr(self, "teacher", None)
        seen = None
        if teacher is not None:
            with torch.no_grad():
                states = teacher.base_model(*args, **given).last_hidden_state
                seen = states.flatten(0, 1)[places]  # (labelled, hidden of the teacher)
                del states
        hidden = self.base_model(*args, **given).last_hidden_state.flatten(0, 1)[places]
        return self.taught_loss(hidden, targets, taught, seen)

    def taught_loss(
        self,
        hidden: torch.Tensor,  # (labelled, hidden)
        targets: torch.Tensor,  # (labelled,)
        taught: Target,
        seen: torch.Tensor | None = None,  # (labelled, hidden of the teacher)
    ) -> torch.Tensor:
        """The summed loss of hidden states and its cross-entropy, (2,) in fp32.

        In chunks, or if tensor parallelism divides the heads, from all labelled logits.
        """
        head, teacher = self.get_output_embeddings(), getattr(self, "teacher", None)
        if not self.loss_in_chunks:
            shares = _Stored(taught)
            if teacher is not None:
                shares = _Gathered(teacher.get_output_embeddings(), seen)
            wide = scaled(head(hidden), None, *self.logits_of_labelled)
            apart, nll = _losses(wide, targets, taught, shares, slice(None))
            return torch.stack([apart + taught.ce_weight * nll, nll])
        if teacher is None:
            return head(hidden, targets, taught=taught, shares=_Stored(taught))
        return teacher.get_output_embeddings()(
            seen, lambda shares: head(hidden, targets, taught=taught, shares=shares)
        )


class TaughtHead(LabelledHead):
    """A head that returns the summed divergence from a teacher if it is given one."""

    def forward(
        self,
        input: torch.Tensor,
        targets: torch.Tensor | None = None,
        logps: bool = False,
        statistics: bool = False,
        taught: Target | None = None,
        shares: Any = None,
    ) -> torch.Tensor:
        if taught is None or targets is None:
            return super().forward(input, targets, logps, statistics)
        given = (input, self.weight, self.bias, targets)
        return ChunkedDivergence.apply(*given, self.scale, self.cap, taught, shares)


class ChunkedDivergence(torch.autograd.Function):
    """Summed divergence of a head's distributions from a teacher's, and the cross-entropy.

    The gradient is computed in the forward pass, chunk by chunk, as in `ChunkedLoss`.
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
        taught: Target,
        shares: "_Shares | _Stored",
    ) -> torch.Tensor:
        sums = torch.zeros(2, dtype=torch.float32, device=hidden.device)
        entries = TAUGHT_ENTRIES if hidden.is_cpu else GPU_TAUGHT_ENTRIES
        rows, dtype = max(1, entries // weight.shape[0]), compute_dtype(weight)
        with torch.autocast(weight.device.type, enabled=False):
            grads = Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], rows, dtype)
            for part, logits in grads.chunks(rows):
                with torch.set_grad_enabled(grads.any):
                    logits.requires_grad_(grads.any)
                    wide = scaled(logits, bias, scale, cap)
                    apart, nll = _losses(wide, targets[part], taught, shares, part)
                    total = apart + taught.ce_weight * nll
                sums += torch.stack([total.detach(), nll.detach()])
                if grads.any:
                    (by_logits,) = torch.autograd.grad(total, logits)
                    grads.add(part, by_logits)
        ctx.grads = grads.of(hidden, weight, bias)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of the first sum."""
        return used_up(ctx, grad[0])


def _losses(
    wide: torch.Tensor,  # (chunk, vocabulary) fp32
    targets: torch.Tensor,  # (chunk,)
    taught: Target,
    shares: "_Shares | _Stored",
    part: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed divergence and cross-entropy of a chunk."""
    nll = F.cross_entropy(wide, targets, reduction="sum")
    teacher, student = shares.both(wide / taught.temperature, part, taught.temperature)
    return divergence(teacher, student, taught.kind, taught.beta).sum(), nll


def divergence(
    teacher: torch.Tensor,  # (rows, classes): log-probabilities
    student: torch.Tensor,  # (rows, classes): log-probabilities
    kind: Kind,
    beta: float = 0.5,
) -> torch.Tensor:
    """Divergence of the distributions of each row, (rows,).

    With teacher p, student q, m = beta p + (1 - beta) q (arXiv:2306.13649, eq. 1):

        forward_kl   KL(p, q)
        reverse_kl   KL(q, p)
        jsd          beta KL(p, m) + (1 - beta) KL(q, m)
    """
    match kind:
        case "forward_kl":
            return (teacher.exp() * (teacher - student)).sum(-1)
        case "reverse_kl":
            return (student.exp() * (student - teacher)).sum(-1)
        case "jsd":
            mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
            of_teacher = (teacher.exp() * (teacher - mixed)).sum(-1)
            return beta * of_teacher + (1 - beta) * (student.exp() * (student - mixed)).sum(-1)


class _Shares:
    """Distributions of a running teacher, computed for one chunk at a time."""

    def __init__(self, head: TeacherHead, hidden: torch.Tensor) -> None:
        self.head, self.hidden = head, hidden

    @torch.no_grad()
    def logps(self, part: slice, vocabulary: int, temperature: float) -> torch.Tensor:
        """Log-probabilities over the first `vocabulary` tokens, (chunk, vocabulary) fp32."""
        head = self.head
        matrix = head.weight[:vocabulary]
        bias = None if head.bias is None else head.bias[:vocabulary]
        logits = F.linear(self.hidden[part].to(matrix.dtype), matrix)
        return F.log_softmax(scaled(logits, bias, head.scale, head.cap) / temperature, -1)

    def both(
        self, student: torch.Tensor, part: slice, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of teacher and student over the tokens that both vocabularies have."""
        vocabulary = min(student.shape[1], self.head.weight.shape[0])
        teacher = self.logps(part, vocabulary, temperature)
        return teacher, F.log_softmax(student[:, :vocabulary], -1)


class _Gathered(_Shares):
    """Distributions of a running teacher whose head gathers logits from several processes."""

    @torch.no_grad()
    def logps(self, part: slice, vocabulary: int, temperature: float) -> torch.Tensor:
        logits = self.head(self.hidden[part])[:, :vocabulary]
        wide = scaled(logits, None, self.head.scale, self.head.cap)
        return F.log_softmax(wide / temperature, -1)


class _Stored:
    """Distributions of a stored teacher: its most likely tokens, and all others as one class."""

    def __init__(self, taught: Target) -> None:
        self.taught = taught

    def both(
        self, student: torch.Tensor, part: slice, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the stored tokens and of the rest, (chunk, k + 1) each."""
        ids, logps = self.taught.ids, self.taught.logps
        assert ids is not None
        assert logps is not None
        known = ids[part].long()
        whole = student.logsumexp(-1, keepdim=True)
        others = student.scatter(1, known, -math.inf).logsumexp(-1, keepdim=True)
        mine = torch.cat([student.gather(1, known), others], 1) - whole
        return logps[part].float(), mine.clamp(min=LEAST)
