"""Computes the load-balancing loss of a mixture of experts for each document by itself.

transformers computes it over all tokens of a forward pass, so that it depends on how rows are cut
into micro-batches. Here each document has a loss of its own, and a step the mean over its tokens:
the same for any accumulation, any number of processes, padded or packed. For one row without
padding it is that of transformers.
"""

import dataclasses

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.errors import FinetuneError
from finetune.planner.experts import coefficient
from finetune.recipe import Model


@dataclasses.dataclass(frozen=True)
class Balance:
    """The load-balancing loss of a model."""

    experts: int
    chosen: int
    """Experts that each token visits."""
    coefficient: float

    def sum(
        self,
        router_logits: tuple[torch.Tensor, ...],
        documents: torch.Tensor,
        number: int,
    ) -> torch.Tensor:
        """Sum over documents of tokens x loss x coefficient, a scalar in fp32.

        With T tokens in a document, L layers, N experts, the probabilities p of a router and the
        experts that a token visits, the loss of the document is

            N * sum_i f_i * P_i,  f_i = (tokens that visit i) / (L T),  P_i = (sum of p_i) / (L T)

        with both sums over its tokens and the L layers: Switch Transformer (arXiv:2101.03961),
        equations 4 to 6, as `load_balancing_loss_func` of transformers 5.23 counts top-k routing;
        by document as the sequence-wise loss of DeepSeek-V3 (arXiv:2412.19437), equations 17 to 20.

        Args:
            router_logits: of each layer (tokens, experts).
            documents: (tokens,) int64, the document of each token; `number` for padding.
            number: of documents.
        """
        device = router_logits[0].device
        shape = (number + 1, self.experts)  # the last row gathers what is padding
        visits = torch.zeros(shape, dtype=torch.float32, device=device)
        shares = torch.zeros(shape, dtype=torch.float32, device=device)
        for logits in router_logits:
            weights = torch.softmax(logits, dim=-1)  # (tokens, experts), as transformers has it
            chosen = torch.topk(weights.detach(), self.chosen, dim=-1).indices
            hit = torch.zeros_like(weights, dtype=torch.float32).scatter_(1, chosen, 1.0)
            visits = visits.index_add(0, documents, hit)
            shares = shares.index_add(0, documents, weights.float())
        ones = torch.ones_like(documents, dtype=torch.float32)
        tokens = torch.zeros(number + 1, device=device).index_add_(0, documents, ones)
        each = (visits * shares).sum(1)[:number] / tokens[:number].clamp(min=1)
        return each.sum() * (self.coefficient * self.experts / len(router_logits) ** 2)


def balance_of(model: PreTrainedModel, asked: Model) -> Balance | None:
    """The load-balancing loss that a recipe asks for; None where it asks for none.

    Raises:
        FinetuneError: it is asked for, and this type of model has none that is known here.
    """
    config: PreTrainedConfig = model.config
    factor, problem = coefficient(asked, config.to_dict())
    if problem:
        raise FinetuneError(problem)
    if factor is None:
        return None
    # The names under which every class of these types keeps the arguments of transformers' loss.
    return Balance(model.num_experts, model.num_experts_per_tok, factor)


def documents_of(
    ids: torch.Tensor, mask: torch.Tensor | None, ends: torch.Tensor | None, real_tokens: int
) -> tuple[torch.Tensor, int]:
    """The document of each token (tokens,), and the number of documents; padding has that number.

    Args:
        ids: (rows, length).
        mask: (rows, length), 0 where rows are padded; None where they are not.
        ends: (documents + 1,) of documents side by side; None where each row is one.
        real_tokens: tokens that are not padding.
    """
    rows, length = ids.shape
    places = torch.arange(rows * length, device=ids.device)
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
    """The sum to descend, and the share of the balance in it.

    Both are divided by the terms of the step later. The balance is a mean over tokens, so its sum
    is multiplied by terms per token first.

    Args:
        loss: a scalar, the sum over terms.
        balance: a scalar, the sum of `Balance.sum`; None where there is none.
        tokens_per_term: real tokens of the step over its terms.
    """
    if balance is None:
        return loss, torch.zeros_like(loss)
    share = balance / tokens_per_term
    return loss + share, share
