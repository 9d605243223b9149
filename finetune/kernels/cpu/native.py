"""C implementations of chains for CPUs, compiled on first use and cached.

A C compiler takes one or two seconds for `chains.c`, TorchInductor takes twenty. Each function is
the counterpart of the eager chain of the same name, and returns None for unsupported tensors.
"""

import ctypes
import functools
from pathlib import Path

import torch

from finetune.kernels.cpu.compiler import CannotCompile, compiled, has_memory

SOURCE = Path(__file__).with_name("chains.c")
FLAGS = ("-std=c11", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
DEFINED = {torch.float32: (), torch.bfloat16: ("-DBF16",)}

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
SIGNATURES = {
    "normed": (_P, _N, _P, _P, _P, _N, _N, _F, _I, _I),
    "norm_gradients": (_P, _N, _P, _N, _P, _P, _P, _N, _N, _I, _I),
    "rotated": (_P, _N, _P, _P, _P, _N, _N, _N, _I),
    "gated": (_P, _N, _P, _N, _P, _N, _N, _I, _I),
    "gated_gradients": (_P, _N, _P, _N, _P, _N, _P, _P, _N, _N, _I, _I),
    "tile_loss": (_P, _N, _P, _P, _P, _P, _P, _N, _N, _F, _F, _I, _I),
    "share_gradients": (_P, _P, _P, _P, _N, _N, _N, _N, _F, _I),
}
LANES = 16
"""`VECTOR` of the C."""


def reason_against(dtype: torch.dtype) -> str | None:
    """Why there are no C functions for a data type on this machine; None if there are."""
    found = _library(dtype)
    return found if isinstance(found, str) else None


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | str:
    """The C functions for a data type, or the reason why there are none."""
    if dtype not in DEFINED:
        return f"there is no C code for {dtype}"
    try:
        return _loaded(DEFINED[dtype])
    except CannotCompile as error:
        return str(error)


def _loaded(defined: tuple[str, ...]) -> ctypes.CDLL:
    found = compiled(SOURCE, [*FLAGS, *defined])
    for name, types in SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = types, None
    return found


# Counterparts of the eager chains ----------------------------------------------------------------


def _served(*tensors: torch.Tensor) -> bool:
    """Whether tensors are on a CPU, not empty, and of the same, supported data type."""
    dtype = tensors[0].dtype
    alike = all(each.dtype == dtype and has_memory(each) and each.numel() for each in tensors)
    return alike and reason_against(dtype) is None


def _functions(x: torch.Tensor) -> ctypes.CDLL:
    found = _library(x.dtype)
    assert isinstance(found, ctypes.CDLL)
    return found


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Rows (n, ...), each contiguous in memory."""
    return x if x[0].is_contiguous() else x.contiguous()


def normed(
    x: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    wider = not gemma and weight.dtype != x.dtype  # the result would have the wider type
    if wider or not _served(x):
        return None
    x, (rows, width) = _rows(x), x.shape
    factors = weight.float().contiguous()
    result, inverse = x.new_empty(rows, width), x.new_empty(rows, 1, dtype=torch.float32)
    _functions(x).normed(
        x.data_ptr(), x.stride(0), factors.data_ptr(), result.data_ptr(), inverse.data_ptr(),
        rows, width, eps, gemma, torch.get_num_threads(),
    )  # fmt: skip
    return result, inverse


def norm_gradients(
    x: torch.Tensor,
    grad: torch.Tensor,
    inverse: torch.Tensor,
    weight: torch.Tensor,
    gemma: bool,
    of_x: bool,
    of_weight: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
    if of_weight or not of_x or not _served(x, grad):
        return None
    x, grad, (rows, width) = _rows(x), _rows(grad), x.shape
    factors, inverse = weight.float().contiguous(), inverse.float().contiguous()
    by_x = x.new_empty(rows, width)
    _functions(x).norm_gradients(
        x.data_ptr(), x.stride(0), grad.data_ptr(), grad.stride(0), inverse.data_ptr(),
        factors.data_ptr(), by_x.data_ptr(), rows, width, gemma, torch.get_num_threads(),
    )  # fmt: skip
    return by_x, None


def rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, signed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not _served(query, key):
        return None
    tables = tuple(each.float().contiguous() for each in (cos, signed))

    def turned(x: torch.Tensor) -> torch.Tensor:
        x, (places, heads, size) = _rows(x), x.shape
        result = x.new_empty(places, heads, size)
        _functions(x).rotated(
            x.data_ptr(), x.stride(0), *(each.data_ptr() for each in tables), result.data_ptr(),
            places, heads, size, torch.get_num_threads(),
        )  # fmt: skip
        return result

    return turned(query), turned(key)


def gated(gate: torch.Tensor, up: torch.Tensor, tanh: bool) -> torch.Tensor | None:
    if not _served(gate, up):
        return None
    gate, up, (rows, width) = _rows(gate), _rows(up), gate.shape
    result = gate.new_empty(rows, width)
    _functions(gate).gated(
        gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), result.data_ptr(),
        rows, width, tanh, torch.get_num_threads(),
    )  # fmt: skip
    return result


def gated_gradients(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, tanh: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not _served(gate, up, grad):
        return None
    gate, up, grad, (rows, width) = _rows(gate), _rows(up), _rows(grad), gate.shape
    by_gate, by_up = gate.new_empty(rows, width), gate.new_empty(rows, width)
    _functions(gate).gated_gradients(
        gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), grad.data_ptr(),
        grad.stride(0), by_gate.data_ptr(), by_up.data_ptr(), rows, width, tanh,
        torch.get_num_threads(),
    )  # fmt: skip
    return by_gate, by_up


def tile_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    cap: float | None,
    wanted: bool,
    entropy: bool = False,
) -> torch.Tensor | None:
    if not _served(logits) or not logits.is_contiguous():
        return None
    rows, width = logits.shape
    targets, added = targets.contiguous(), None if bias is None else bias.float().contiguous()
    found, room = logits.new_empty((1 + entropy, rows), dtype=torch.float32), _room(logits)
    _functions(logits).tile_loss(
        logits.data_ptr(), logits.stride(0), targets.data_ptr(),
        None if added is None else added.data_ptr(), found[0].data_ptr(),
        found[1].data_ptr() if entropy else None, room.data_ptr(), rows, width, scale, cap or 0.0,
        wanted, torch.get_num_threads(),
    )  # fmt: skip
    return found if entropy else found[0]


def share_gradients(
    scores: torch.Tensor, grads: torch.Tensor, logs: torch.Tensor, groups: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    given = (scores, grads, logs)
    if not _served(scores, grads) or not all(each.is_contiguous() for each in given):
        return None
    room = _room(scores)
    _functions(scores).share_gradients(
        *(each.data_ptr() for each in given), room.data_ptr(), *scores.shape, groups, scale,
        torch.get_num_threads(),
    )  # fmt: skip
    return scores, grads


def _room(rows: torch.Tensor) -> torch.Tensor:
    """Scratch memory: one fp32 row per thread."""
    whole = -(-rows.shape[-1] // LANES) * LANES
    return rows.new_empty(torch.get_num_threads() * whole, dtype=torch.float32)
