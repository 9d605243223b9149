"""Sample tokens on CPUs in one pass over their probabilities, in C compiled on first use."""

import ctypes
import functools
from pathlib import Path

import torch

from finetune.kernels.cpu.compiler import CannotCompile, compiled, has_memory

WORD = 0xFFFFFFFF


def draw(
    shares: torch.Tensor, key: tuple[int, int], names: torch.Tensor, place: int
) -> torch.Tensor | None:
    """The token of each row with the largest probability / noise, (rows,) int64.

    The noise is that of `finetune.inference.noise.exponential`; its logarithm is computed only
    for tokens that can win. None without a compiler, or if `shares` is on another device.

    Args:
        shares: Probabilities, (rows, vocabulary) fp32.
        key: Seed and step.
        names: (rows, 2) int64, the numbers of each row's prompt and completion.
        place: Position of the token in its completion.
    """
    library = _library() if has_memory(shares) else None
    if library is None:
        return None
    shares, names = shares.contiguous(), names.contiguous()
    tokens = torch.empty(len(shares), dtype=torch.int64)
    library.draw(
        *(ctypes.c_void_p(each.data_ptr()) for each in (shares, names)),
        *map(ctypes.c_int64, shares.shape),
        *(ctypes.c_uint32(number & WORD) for number in (*key, place)),
        ctypes.c_void_p(tokens.data_ptr()),
    )
    return tokens


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return compiled(Path(__file__).with_name("noise.c"), ())
    except CannotCompile:
        return None
