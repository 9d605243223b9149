"""Compute the load-balancing loss of a mixture of experts for each document separately.

transformers computes it over all tokens of a forward pass, so it depends on how rows are divided
into micro-batches. Here each document has its own loss, and the loss of a step is the mean over its
tokens: the same for any accumulation and number of processes, padded or packed. For one row without
padding it equals that of transformers.
"""

import dataclasses
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.errors import FinetuneError
from finetune.planner.balance_loss import coefficient
from finetune.recipe import Model


@dataclasses.dataclass(frozen=True)
class Balance:
    """The load-balancing loss of a model."""

    experts: int
    chosen: int
    """Number of experts per token."""
    coefficient: float
    group: Any = None
    """Process group that shares the tokens of a row, in their order; None for complete rows."""

    def sum(
        self, router_logits: tuple[torch.Tensor, ...], documents: torch.Tensor, number: int
    ) -> torch.Tensor:
        """Sum over documents of tokens x loss x coefficient, a scalar in fp32.

        If processes share a row, each has the part of its own tokens, and the parts add up.

        With T tokens in a document, L layers, N experts, the probabilities p of a router and the
        experts that a token visits, the loss of the document is

            N * sum_i f_i * P_i,  f_i = (tokens that visit i) / (L T),  P_i = (sum of p_i) / (L T)

        with both sums over its tokens and the L layers: Switch Transformer (arXiv:2101.03961),
        equations 4 to 6, as `load_balancing_loss_func` of transformers 5.23 counts top-k routing;
        by document as the sequence-wise loss of DeepSeek-V3 (arXiv:2412.19437), equations 17 to 20.

        Args:
            router_logits: (tokens, experts) for each layer.
            documents: (tokens,) int64, the document of each token; `number` for padding.
            number: Number of documents.
        """
        return self.of_tally(self.tally(router_logits, documents, number), documents, number)

    def tally(
        self, router_logits: tuple[torch.Tensor, ...], documents: torch.Tensor, rows: int
    ) -> torch.Tensor:
        """Sums over tokens and layers, which add up over the stages of a pipeline.

        Args:
            router_logits: as for `sum`, of some of the layers.
            documents: as for `sum`.
            rows: At least the number of documents.

        Returns:
            (rows + 1, 2 x experts + 1) in fp32; in each row the visits of each expert, the summed
            probabilities, which alone have a gradient, and the number of layers.
        """
        shape, device = (rows + 1, self.experts), documents.device
        visits = torch.zeros(shape, dtype=torch.float32, device=device)
        shares = torch.zeros(shape, dtype=torch.float32, device=device)
        for logits in router_logits:
            weights = torch.softmax(logits, dim=-1)  # (tokens, experts), as in transformers
            chosen = torch.topk(weights.detach(), self.chosen, dim=-1).indices
            hit = torch.zeros_like(weights, dtype=torch.float32).scatter_(1, chosen, 1.0)
            visits = visits.index_add(0, documents, hit)
            shares = shares.index_add(0, documents, weights.float())
        layers = visits.new_full((rows + 1, 1), len(router_logits))
        return torch.cat([visits, shares, layers], dim=1)

    def of_tally(self, tally: torch.Tensor, documents: torch.Tensor, number: int) -> torch.Tensor:
        """`sum` from the tally of all layers; for `documents` and `number` see there."""
        visits, shares, layers = tally[:number].split([self.experts, self.experts, 1], dim=1)
        ones = torch.ones_like(documents, dtype=torch.float32)
        tokens = ones.new_zeros(number + 1).index_add_(0, documents, ones)[:number]
        if self.group is not None:
            counted = torch.cat([visits.detach(), tokens[:, None]], dim=1)
            torch.distributed.all_reduce(counted, group=self.group)
            visits, tokens = counted[:, :-1], counted[:, -1]
        each = (visits.detach() * shares).sum(1) / (tokens * layers.detach()[:, 0] ** 2).clamp(
            min=1
        )
        return each.sum() * (self.coefficient * self.experts)

    def first(self, tokens: int) -> int:
        """Position in its row of the first of this process's `tokens` tokens."""
        return 0 if self.group is None else torch.distributed.get_rank(self.group) * tokens


def balance_of(model: PreTrainedModel, asked: Model) -> Balance | None:
    """The load-balancing loss that a recipe requests; None if it requests none.

    Raises:
        FinetuneError: it is requested, but not supported for this type of model.
    """
    config: PreTrainedConfig = model.config
    factor, problem = coefficient(asked, config.to_dict())
    if problem:
        raise FinetuneError(problem)
    if factor is None:
        return None
    # All classes of these types store the arguments of transformers' loss under these names.
    return Balance(model.num_experts, model.num_experts_per_tok, factor)


def documents_of(
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    ends: torch.Tensor | None,
    real_tokens: int,
    first: int = 0,
) -> tuple[torch.Tensor, int]:
    """Document of each token, (tokens,), and the number of documents, which stands for padding.

    Args:
        ids: (rows, length).
        mask: (rows, length), 0 at padding; None without padding.
        ends: (documents + 1,) ends of concatenated documents; None if each row is a document.
        real_tokens: Number of tokens that are not padding.
        first: Position of the first id in its row, of which other processes have other parts.
    """
    rows, length = ids.shape
    places = torch.arange(first, first + rows * length, device=ids.device)
    if ends is not None:
        number = len(ends) - 1
        found = torch.searchsorted(ends[1:].long(), places, right=True)
    else:
        number = rows
        found = places // length
    if mask is not None:
        return torch.where(mask.flatten() != 0, found, number), number
    return torch.where(places < real_tokens, found, number), number


def parts(
    loss: torch.Tensor, balance: torch.Tensor | None, tokens_per_term: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss with the balance loss added, and the balance loss in it.

    Both are later divided by the number of terms of the step. The balance loss is a mean over
    tokens, so its sum is first multiplied by terms per token.

    Args:
        loss: Scalar, the sum over terms.
        balance: Scalar, from `Balance.sum`; None without a balance loss.
        tokens_per_term: Real tokens of the step divided by its terms.
    """
    if balance is None:
        return loss, torch.zeros_like(loss)
    share = balance / tokens_per_term
    return loss + share, share
