"""Compute the loss of a causal language model for labelled tokens only, without storing all logits.

After `give_loss`, a model can be called with the positions of labelled tokens and their targets,
and returns the summed loss or each log-probability. Without them it behaves as in transformers. The
loss is computed inside the model's forward pass, and the head's weight is used inside the head's
forward pass: there, every engine has gathered it (FSDP2, ZeRO-3) and tracks its use (DDP).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from finetune.errors import FinetuneError
from finetune.kernels.balance import Balance, documents_of
from finetune.kernels.chunked_loss import ChunkedLogProbs, ChunkedLoss
from finetune.kernels.mixin import mix_in
from finetune.kernels.token_loss import TokenLoss
from finetune.planner.families import family_of
from finetune.planner.kernels import (
    CHUNK_ENTRIES,
    GPU_CHUNK_ENTRIES,
    GPU_TILE_ENTRIES,
    TILE_ENTRIES,
)

MEAN_ROWS = 2048
"""Rows of the head's weight that are summed at a time."""


def give_loss(
    model: PreTrainedModel,
    chunked: bool,
    balance: Balance | None = None,
    temperature: float = 1.0,
    labelled: bool = False,
    rule: TokenLoss | None = None,
) -> None:
    """Enable a model to compute its loss if its forward pass is given the labelled tokens.

    The classes of the model and its head are replaced by subclasses; see `mix_in`.

    Args:
        model: The plain model, possibly with PEFT's modules.
        chunked: Compute the loss in chunks; False computes it from all logits.
        balance: Load-balancing loss that is added in training, or None.
        temperature: Divisor of the logits in the loss, after scale and cap.
        labelled: Compute the loss from the logits of labelled tokens only.
        rule: The loss of a token in training; None for its cross-entropy.

    Raises:
        FinetuneError: `chunked`, but the head is not a plain linear layer.
    """
    if chunked:
        head = plain_head(model)
        head.__class__ = LabelledHead
        scale, cap = logit_function(model.config)
        # c tanh(s x / c) / t is the same function with c / t and s / t.
        head.rule = rule
        head.scale, head.cap = scale / temperature, None if cap is None else cap / temperature
    mix_in(
        model,
        WithLoss,
        loss_in_chunks=chunked,
        balance=balance,
        temperature=temperature,
        rule=rule,
        logits_of_labelled=logit_function(model.config) if labelled else None,
    )


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
    text: Any = config.get_text_config(decoder=True)
    match family_of(config.model_type).logits:
        case "softcapped":
            return 1.0, text.final_logit_softcapping
        case "divided":
            return 1.0 / text.logits_scaling, None
        case "multiplied":
            return text.logit_scale, None
        case "plain":
            return 1.0, None


class WithLoss:
    """Mixin for a causal language model whose forward pass can return the summed loss."""

    loss_in_chunks: bool
    logits_of_labelled: tuple[float, float | None] | None
    """Scale and soft cap, if the head computes logits for labelled tokens only; else None."""
    balance: Balance | None
    temperature: float
    rule: TokenLoss | None

    def forward(
        self,
        *args: Any,
        places: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        real_tokens: int = 0,
        logps: bool = False,
        statistics: bool = False,
        **inputs: Any,
    ) -> Any:
        """The model's own forward pass or, with `places`, the summed cross-entropy.

        The sum is a scalar in fp32. With `logps`, the result is the log-probability of each target,
        (labelled,) in fp32; with `statistics` too, the mean over the vocabulary of each token's
        logits (see `LabelledHead.means`) and the entropy of each distribution in nats follow,
        (3 * labelled,), without gradient. In training with a balance loss, `Balance.sum` is
        appended: the result is (2,), or longer by 1.

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
            loss = self.loss_of_hidden(hidden[places], targets, logps, statistics)
        else:
            output = super().forward(*args, **inputs)
            labelled = output.logits.flatten(0, 1)[places]  # (labelled, vocabulary)
            loss = self._of_logits(labelled.float(), targets, logps, statistics)
        if not balanced:
            return loss
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        ends, first = inputs.get("cu_seq_lens_q"), self.balance.first(ids.numel())
        documents = documents_of(ids, mask, ends, real_tokens, first)
        balance = self.balance.sum(output.router_logits, *documents)
        return torch.cat([loss.view(-1), balance.view(1)])

    def loss_of_hidden(
        self,
        hidden: torch.Tensor,  # (labelled, hidden)
        targets: torch.Tensor,  # (labelled,)
        logps: bool,
        statistics: bool = False,
    ) -> torch.Tensor:
        """The summed cross-entropy of hidden states or, with `logps`, each log-probability."""
        head = self.get_output_embeddings()
        if self.loss_in_chunks:
            return head(hidden, targets, logps, statistics)
        logits = scaled(head(hidden), None, *(self.logits_of_labelled or (1.0, None)))
        return self._of_logits(logits, targets, logps, statistics)

    def _of_logits(
        self, logits: torch.Tensor, targets: torch.Tensor, logps: bool, statistics: bool
    ) -> torch.Tensor:
        """`_from_logits` with the model's temperature and, in training, its rule."""
        logits = logits if self.temperature == 1.0 else logits / self.temperature
        if self.rule is not None and self.training and not logps:
            return self.rule.summed(logits, targets)
        return _from_logits(logits, targets, logps, statistics)


def scaled(
    logits: torch.Tensor, bias: torch.Tensor | None, scale: float, cap: float | None
) -> torch.Tensor:
    """Logits in fp32, with the model's bias, scale and soft cap."""
    wide = logits.float()
    if bias is not None:
        wide = wide + bias.float()
    if scale != 1.0:
        wide = wide * scale
    return wide if cap is None else (wide / cap).tanh() * cap


def _from_logits(
    logits: torch.Tensor, targets: torch.Tensor, logps: bool, statistics: bool
) -> torch.Tensor:
    """The summed cross-entropy of (labelled, vocabulary) logits, or each log-probability."""
    loss = F.cross_entropy(logits.float(), targets, reduction="none" if logps else "sum")
    if not statistics:
        return -loss if logps else loss
    given = logits.detach()
    tiles = given.split(max(1, TILE_ENTRIES // given.shape[1]))
    entropies = [-(log := each.float().log_softmax(-1)).exp().mul_(log).sum(-1) for each in tiles]
    return torch.cat([-loss, given.float().mean(-1), *entropies])


class LabelledHead(nn.Linear):
    """A head that returns the summed loss, or each log-probability, if it is given targets."""

    scale: float
    cap: float | None
    rule: TokenLoss | None = None
    entries: tuple[int, int] | None = None
    """Number of logits of a chunk and of a tile; None for the device's defaults."""

    def forward(
        self,
        input: torch.Tensor,
        targets: torch.Tensor | None = None,
        logps: bool = False,
        statistics: bool = False,
    ) -> torch.Tensor:
        if targets is None:
            return super().forward(input)
        of_cpu, of_gpu = (CHUNK_ENTRIES, TILE_ENTRIES), (GPU_CHUNK_ENTRIES, GPU_TILE_ENTRIES)
        entries = self.entries or (of_cpu if input.is_cpu else of_gpu)
        rows = tuple(max(1, each // len(self.weight)) for each in entries)
        given = (input, self.weight, self.bias, targets)
        settings = self.scale, self.cap, *rows
        if statistics:
            found, entropies = ChunkedLogProbs.apply(*given, *settings, True)
            return torch.cat([found, self.means(input), entropies])
        if logps:
            return ChunkedLogProbs.apply(*given, *settings)  # type: ignore[no-any-return]
        return ChunkedLoss.apply(*given, *settings, self.rule if self.training else None)  # type: ignore[no-any-return]

    @torch.no_grad()
    def means(self, hidden: torch.Tensor) -> torch.Tensor:
        """Mean of the logits of each hidden state, (labelled,) in fp32; NaN with a soft cap.

        Without a cap, logits are linear: their mean is the product with the mean row of the head.
        """
        if self.cap is not None:
            return hidden.new_full((len(hidden),), math.nan, dtype=torch.float32)
        parts = self.weight.split(MEAN_ROWS)  # a sum of 16 bits in fp32 copies its part on a CPU
        row = sum(part.sum(0, dtype=torch.float32) for part in parts) / len(self.weight)
        bias = 0.0 if self.bias is None else self.bias.float().mean()
        return ((hidden.float() * row).sum(-1) + bias) * self.scale
