"""Gradients of adapters in C, for CPUs with tile registers (AMX).

PyTorch's products of a wide and a narrow matrix are memory-bound, and the gradients of an adapter
need two products with each wide matrix. This kernel reads it once for both. It is compiled on first
use and cached. On CPUs with AVX-512 only, the products are compute-bound and left to PyTorch.
"""

import ctypes
import functools
from pathlib import Path

import torch
import torch.nn.functional as F

from finetune.kernels.cpu.compiler import CannotCompile, compiled, has_memory

SOURCE = Path(__file__).with_name("tiled_adapters.c")
FLAGS = ("-std=gnu11", "-fopenmp")
DEEP = 32
"""Inner dimension of a tile product; the width of wide matrices must be a multiple of it."""
IN_TILES = 2
"""Value of `tiles_of_this_process` on a CPU with AMX."""
BROAD = 16
"""Row length of a tile; narrow matrices are padded to a multiple of it."""

_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def reason_against(width: int = DEEP) -> str | None:
    """Why this machine cannot compute these products for a width; None if it can."""
    found = _library()
    if isinstance(found, str):
        return found
    return f"the width {width} is not a multiple of {DEEP}" if width % DEEP else None


def serves(wide: torch.Tensor) -> bool:
    """Whether a matrix (tokens, wide) is supported."""
    fits = has_memory(wide) and wide.dtype == torch.bfloat16 and wide.numel() > 0
    return fits and reason_against(wide.shape[1]) is None


def products(
    wide: torch.Tensor, narrow: torch.Tensor, up: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """`wide @ up`, if `up` is given, and `narrow.T @ wide`, each rounded once, as in PyTorch.

    Results are in 16 bits even for adapters in fp32: FSDP computes adapters and their gradients in
    16 bits, and more precision here would make a run depend on its backend.

    Args:
        wide: # (tokens, wide) bfloat16
        narrow: # (tokens, narrow) bfloat16
        up: # (wide, narrow) bfloat16
    """
    (tokens, width), rank = wide.shape, narrow.shape[1]
    lacking = -rank % BROAD
    if lacking:
        narrow, up = F.pad(narrow, (0, lacking)), None if up is None else F.pad(up, (0, lacking))
    wide, narrow = (each if each.stride(1) == 1 else each.contiguous() for each in (wide, narrow))
    up = None if up is None else up.contiguous()
    functions, threads, filled = _functions(), torch.get_num_threads(), narrow.shape[1]
    product = None if up is None else wide.new_empty(tokens, filled)
    outer = wide.new_empty(filled, width)
    sums = wide.new_empty(threads * outer.numel(), dtype=torch.float32)
    each, shared = (
        room(width, filled) for room in (functions.room_of_thread, functions.room_of_all)
    )
    room = wide.new_empty(shared + threads * each)
    functions.adapter_gradients(
        wide.data_ptr(), wide.stride(0), narrow.data_ptr(), narrow.stride(0),
        None if up is None else up.data_ptr(), None if product is None else product.data_ptr(),
        outer.data_ptr(), tokens, width, filled, sums.data_ptr(), room.data_ptr(), threads,
    )  # fmt: skip
    return None if product is None else product[:, :rank], outer[:rank]


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The C functions, or the reason why there are none."""
    try:
        found = compiled(SOURCE, FLAGS)
    except CannotCompile as error:
        return str(error)
    if found.tiles_of_this_process() != IN_TILES:
        return "this CPU has no bfloat16 tiles (AMX)"
    found.adapter_gradients.argtypes = (_P, _N, _P, _N, _P, _P, _P, _N, _N, _N, _P, _P, _I)
    found.adapter_gradients.restype = None
    for room in (found.room_of_thread, found.room_of_all):
        room.argtypes, room.restype = (_N, _N), _N
    return found


def _functions() -> ctypes.CDLL:
    found = _library()
    assert isinstance(found, ctypes.CDLL)
    return found
