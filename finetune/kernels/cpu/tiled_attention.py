"""Attention of documents in one pass over tiles, in C, for CPUs with AMX or AVX-512 for bfloat16.

Scores stay in the caches, whereas those of `finetune.kernels.cpu.attention` go through memory, and
nothing is computed above the diagonal. The code is compiled on first use and cached.
"""

import ctypes
import functools
import itertools
from pathlib import Path
from typing import Any

import torch

from finetune.kernels.cpu.compiler import CannotCompile, compiled, has_memory

SOURCE = Path(__file__).with_name("tiled_attention.c")
FLAGS = ("-std=gnu11", "-fopenmp")

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_LAID = (_P, _N)
"""A tensor's address, and its stride from token to token in elements."""
_BOTH = (_P, _N, _N, _N, _N, _N, _F, _F, _P, _N, _I)
"""Arguments of both functions: ends, documents, key heads, heads per key head, head size; window,
scale and cap of scores; scratch memory, its size per thread, threads."""
SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "tiles_of_this_process": ((), _I),
    "room_of_forward": ((_N, _N), _N),
    "room_of_backward": ((_N, _N), _N),
    "attention": (_LAID * 4 + (_P,) + _BOTH, None),
    "attention_gradients": (_LAID * 5 + (_P,) * 4 + _BOTH, None),
}


def reason_against() -> str | None:
    """Why this machine cannot compute attention in tiles; None if it can."""
    found = _library()
    return found if isinstance(found, str) else None


def serves(query: torch.Tensor) -> bool:
    """Whether attention of queries (1, heads, tokens, head size) is supported."""
    fits = has_memory(query) and query.dtype == torch.bfloat16 and query.numel() > 0
    return fits and reason_against() is None


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The C functions, or the reason why there are none."""
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
    """Causal attention of concatenated documents; each key head is shared by a group of heads.

    With a `window`, a token sees that many tokens of its document, including itself. With a `cap`,
    scores s become cap * tanh(s / cap). The result is saved for the backward pass, which takes no
    extra memory because the next layer saves it too.
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
        """`query` (1, heads, tokens, head size), `ends` like `cu_seq_lens`; result like `query`."""
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
    """The result, like `query`, and the logarithm of each row's sum of e^S, (heads, tokens)."""
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
"""Registers the forward pass as an operator, so that activation checkpointing can save its output
and profiles show its name."""
OPERATIONS.define(
    "document_attention(Tensor query, Tensor key, Tensor value, int[] ends, float scale,"
    " int? window, float? cap) -> (Tensor, Tensor)"
)
OPERATIONS.impl("document_attention", _attention, "CPU")


def like(heads: torch.Tensor) -> torch.Tensor:
    """An empty tensor (1, heads, tokens, head size), laid out token by token like projections."""
    rows = heads.transpose(1, 2)
    return torch.empty_like(rows, memory_format=torch.contiguous_format).transpose(1, 2)


def laid(heads: torch.Tensor) -> torch.Tensor:
    """(1, heads, tokens, head size) with the heads of a token contiguous; copied if needed."""
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
    """Call a C function with the addresses of its tensors and the arguments `_BOTH`."""
    (_, heads, _, size), key_heads = query.shape, key.shape[1]
    threads, documents = torch.get_num_threads(), len(ends) - 1
    each = room_of(max(end - start for start, end in itertools.pairwise(ends)), size)
    room = query.new_empty(threads * each)
    function(
        *places, (ctypes.c_int64 * len(ends))(*ends), documents, key_heads, heads // key_heads,
        size, window or 0, scale, cap or 0.0, room.data_ptr(), each, threads,
    )  # fmt: skip
