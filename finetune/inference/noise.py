"""Noise for sampling tokens, which depends only on its counters, on every device.

A token maximizes probability / exponential noise, which is equivalent to adding Gumbel noise to the
logits. The counters are a key of two words that all rows share, two words of each row, the place of
the token in its row, and the token id.
"""

from collections.abc import Sequence

import torch

from finetune.kernels import cpu

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
"""Constants of Philox4x32-10 (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3)."""


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


def philox(counters: Sequence[torch.Tensor], key: tuple[int, int]) -> list[torch.Tensor]:
    """Philox4x32-10: four 32-bit words per counter of four words, as int64 tensors.

    Args:
        counters: Four int64 tensors with values below 2**32 that broadcast to one shape.
        key: Two 32-bit words.
    """
    a, b, c, d = torch.broadcast_tensors(*counters)
    # In place, and two words at a time: on CPUs the overhead of small operations dominates.
    factors, left = torch.stack([a, c]), torch.stack([d, b])
    products = torch.empty_like(factors)
    shape = (2, *[1] * a.dim())
    usual, steps = (
        torch.tensor(pair, device=a.device).view(shape) for pair in (MULTIPLIERS, KEY_STEPS[::-1])
    )
    words = torch.tensor([key[1] & WORD, key[0] & WORD], device=a.device).view(shape)
    for number in range(ROUNDS):
        # `factors` alternates between (a, c) and (c, a), and `left` between (d, b) and (b, d).
        turned = number % 2
        torch.mul(factors, usual.flip(0) if turned else usual, out=products)  # int64 wraps
        torch.bitwise_right_shift(products, 32, out=factors).bitwise_and_(WORD)
        factors.bitwise_xor_(left).bitwise_xor_(words.flip(0) if turned else words)
        torch.bitwise_and(products[0], WORD, out=left[1])
        torch.bitwise_and(products[1], WORD, out=left[0])
        words = (words + steps).bitwise_and_(WORD)
    (a, c), (d, b) = factors, left
    return [a, b, c, d]
