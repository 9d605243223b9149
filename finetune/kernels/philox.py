"""Random words that are a function of their counters, the same on every device."""

from collections.abc import Sequence

import torch

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
"""Constants of Philox4x32-10 (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3)."""


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
