"""Attention of documents in one pass over tiles, in C, for CPUs with AMX or AVX-512 for bfloat16.

What `finetune.kernels.cpu.attention` computes by PyTorch's kernel and by products whose scores go
through memory, here stays within the caches, and above the diagonal nothing is computed. It is
compiled when first used, and kept.
"""

import ctypes
import functools
import itertools
from pathlib import Path
from typing import Any

import torch

from finetune.kernels.cpu.compiler import CannotCompile, compiled

SOURCE = Path(__file__).with_name("tiled_attention.c")
FLAGS = ("-std=gnu11", "-fopenmp")

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_LAID = (_P, _N)
"""A tensor and the numbers from token to token."""
_BOTH = (_P, _N, _N, _N, _N, _N, _F, _F, _P, _N, _I)
"""Ends, documents, key heads, groups, head size; window, scale and cap of scores; room, that of a
thread, threads."""
SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "tiles_of_this_process": ((), _I),
    "room_of_forward": ((_N, _N), _N),
    "room_of_backward": ((_N, _N), _N),
    "attention": (_LAID * 4 + (_P,) + _BOTH, None),
    "attention_gradients": (_LAID * 5 + (_P,) * 4 + _BOTH, None),
}


def reason_against() -> str | None:
    """Why there is no such attention on this machine; None where there is."""
    found = _library()
    return found if isinstance(found, str) else None


def serves(query: torch.Tensor) -> bool:
    """Whether it computes attention of such queries, (1, heads, tokens, head size)."""
    fits = query.is_cpu and query.dtype == torch.bfloat16 and query.numel() > 0
    return fits and reason_against() is None


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The functions, or why there are none."""
    try:
        found = compiled(SOURCE, FLAGS)
    except CannotCompile as error:
        return str(error)
    if not found.tiles_of_this_process():
        return "this CPU has neither AMX nor AVX-512 for bfloat16"
    for name, (types, result) in SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = types, result
    return found


def _functions() -> ctypes.CDLL:
    found = _library()
    assert isinstance(found, ctypes.CDLL)
    return found


class TiledAttention(torch.autograd.Function):
    """Causal attention of documents side by side; each key head is shared by a group of heads.

    A token sees a window of so many tokens of its document, itself the last; None for all. Where
    there is a cap, scores s become cap * tanh(s / cap). The result is kept for the backward pass,
    as the layer that reads it keeps it too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends: list[int],
        scale: float,
        window: int | None = None,
        cap: float | None = None,
    ) -> torch.Tensor:
        """`query` (1, heads, tokens, head size), `ends` as `cu_seq_lens`; returns as `query`."""
        how = ends, scale, window, cap
        result, logs = torch.ops.finetune.document_attention(query, key, value, *how)
        ctx.save_for_backward(query, key, value, result, logs)
        ctx.how = how
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, result, logs = ctx.saved_tensors
        given = [laid(each) for each in (query, key, value, result, grad)]
        made = [like(each) for each in (query, key, value)]
        functions = _functions()
        with torch.profiler.record_function("chain::attention_gradients"):
            _run(
                functions.attention_gradients, functions.room_of_backward,
                [*_places(given), *(each.data_ptr() for each in (logs, *made))],
                query, key, *ctx.how,
            )  # fmt: skip
        return *made, None, None, None, None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: list[int],
    scale: float,
    window: int | None,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result as `query`, and the logarithm of each row's sum of e^S.  # (heads, tokens)"""
    given = [laid(each) for each in (query, key, value)]
    result, logs = like(query), query.new_empty(query.shape[1:3], dtype=torch.float32)
    functions = _functions()
    _run(
        functions.attention, functions.room_of_forward,
        [*_places([*given, result]), logs.data_ptr()],
        query, key, ends, scale, window, cap,
    )  # fmt: skip
    return result, logs


OPERATIONS = torch.library.Library("finetune", "DEF")
"""An operation of its own, which checkpointing may keep and a profile names."""
OPERATIONS.define(
    "document_attention(Tensor query, Tensor key, Tensor value, int[] ends, float scale,"
    " int? window, float? cap) -> (Tensor, Tensor)"
)
OPERATIONS.impl("document_attention", _attention, "CPU")


def like(heads: torch.Tensor) -> torch.Tensor:
    """Room for (1, heads, tokens, head size), token by token as projections are."""
    rows = heads.transpose(1, 2)
    return torch.empty_like(rows, memory_format=torch.contiguous_format).transpose(1, 2)


def laid(heads: torch.Tensor) -> torch.Tensor:
    """(1, heads, tokens, head size) of which the heads of a token lie one after another."""
    dense = heads.stride(3) == 1 and heads.stride(1) == heads.shape[3]
    return heads if dense else like(heads).copy_(heads)


def _places(tensors: list[torch.Tensor]) -> list[int]:
    return [number for each in tensors for number in (each.data_ptr(), each.stride(2))]


def _run(
    function: Any,
    room_of: Any,
    places: list[int],
    query: torch.Tensor,
    key: torch.Tensor,
    ends: list[int],
    scale: float,
    window: int | None,
    cap: float | None,
) -> None:
    """Call a function with the places of its tensors, and what both functions have besides."""
    (_, heads, _, size), key_heads = query.shape, key.shape[1]
    threads, documents = torch.get_num_threads(), len(ends) - 1
    each = room_of(max(end - start for start, end in itertools.pairwise(ends)), size)
    room = query.new_empty(threads * each)
    function(
        *places, (ctypes.c_int64 * len(ends))(*ends), documents, key_heads, heads // key_heads,
        size, window or 0, scale, cap or 0.0, room.data_ptr(), each, threads,
    )  # fmt: skip
