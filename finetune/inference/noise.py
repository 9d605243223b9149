"""Noise for sampling tokens, which depends only on its counters, on every device.

A token maximizes probability / exponential noise, which is equivalent to adding Gumbel noise to the
logits. The counters are a key of two words that all rows share, two words of each row, the place of
the token in its row, and the token id.
"""

from collections.abc import Sequence

import torch

from finetune.kernels import cpu
from finetune.kernels.philox import WORD, philox


def words_of(seed: int) -> tuple[int, int]:
    """A seed below 2**64 as two words."""
    return seed >> 32, seed & WORD


def draw(
    shares: torch.Tensor, key: tuple[int, int], names: torch.Tensor, places: Sequence[int]
) -> torch.Tensor:
    """The token of each row with the largest probability / noise, (rows,) int64.

    Args:
        shares: Probabilities, (rows, vocabulary) fp32.
        key: Two words that all rows share.
        names: (rows, 2) int64, two words of each row.
        places: Position of the token in each row.
    """
    distinct = set(places)  # one, if the rows began together
    if len(distinct) > 1 and shares.device.type == "cpu":
        tokens = torch.empty(len(shares), dtype=torch.int64)
        for place in distinct:
            rows = [row for row, other in enumerate(places) if other == place]
            tokens[rows] = draw(shares[rows], key, names[rows], [place] * len(rows))
        return tokens
    compiled = cpu.draw(shares, key, names, places[0])
    if compiled is not None:
        return compiled
    at = torch.tensor(places, device=shares.device)
    return exponential(key, names, at, shares.shape[1]).reciprocal_().mul_(shares).argmax(-1)


def exponential(
    key: tuple[int, int], names: torch.Tensor, places: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """Exponential noise of every token of the vocabulary, (rows, vocabulary) fp64.

    Args:
        key: Two words that all rows share.
        names: (rows, 2) int64, two words of each row.
        places: (rows,) int64, the position of the token in each row.
        vocabulary: Number of tokens in the vocabulary.
    """
    blocks = torch.arange(-(-vocabulary // 4), device=names.device)
    words = philox((blocks[None], places[:, None], names[:, 1:], names[:, :1]), key)
    uniform = torch.cat(words, dim=1)[:, :vocabulary].double()
    return uniform.add_(0.5).mul_(2.0**-32).log_().neg_()
