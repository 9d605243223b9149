"""Which matrices get an adapter, and how many parameters that makes."""

import re
from collections.abc import Iterable

from finetune.errors import FinetuneError
from finetune.planner.shapes.architecture import Architecture, Matrix


def adapted(
    shape: Architecture,
    targets: str | Iterable[str],
    excluded: str | Iterable[str] = (),
    only_layers: Iterable[int] = (),
) -> list[tuple[int, Matrix]]:
    """Layer and matrix of every adapter, chosen as PEFT 0.21 chooses modules.

    A text is `all-linear` or a regular expression over whole paths; names match the end of a path.

    Raises:
        FinetuneError: no matrix is chosen.
    """
    targets = targets if isinstance(targets, str) else tuple(targets)
    excluded = excluded if isinstance(excluded, str) else tuple(excluded)
    wanted = set(only_layers)
    chosen = [
        (layer, matrix)
        for layer in range(shape.layers)
        if not wanted or layer in wanted
        for matrix in shape.matrices
        if targets == "all-linear" or _matches(shape, layer, matrix, targets)
        if not (excluded and _matches(shape, layer, matrix, excluded))
    ]
    if not chosen and (wanted or not outer(shape, targets, excluded)):
        names = ", ".join(sorted({matrix.leaf for matrix in shape.matrices}))
        raise FinetuneError(
            f"adapter.targets: {targets!r} names no linear module; linear modules here: {names}"
        )
    return chosen


def outer(
    shape: Architecture, targets: str | Iterable[str], excluded: str | Iterable[str] = ()
) -> list[Matrix]:
    """Embedding and head where they are named: `all-linear` leaves both, as PEFT does."""
    targets = targets if isinstance(targets, str) else tuple(targets)
    excluded = excluded if isinstance(excluded, str) else tuple(excluded)
    table = shape.prefix.rsplit(".", 1)[0] + "." + TABLES.get(shape.kind, "embed_tokens")
    maps = Matrix(table, shape.vocab, shape.hidden), Matrix(shape.head, shape.hidden, shape.vocab)
    return [
        each for each in maps
        if targets != "all-linear" and _named(each.name, targets)
        if not (excluded and _named(each.name, excluded))
    ]  # fmt: skip


TABLES = {"gpt2": "wte", "gpt_neox": "embed_in"}
"""Names of the embedding, where it has another."""
HEADS = {"gpt_neox": "embed_out"}
"""The same of the head."""


def _matches(
    shape: Architecture, layer: int, matrix: Matrix, wanted: str | tuple[str, ...]
) -> bool:
    return _named(f"{shape.prefix}.{layer}.{matrix.name}", wanted)


def _named(path: str, wanted: str | tuple[str, ...]) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in wanted)


def expert_adapter_size(shape: Architecture, rank: int) -> int:
    """Parameters of the adapters on one layer's experts under `all-linear`.

    One pair per expert, with twice the rank where gate and up are one matrix. Routers have none.
    """
    return named_expert_size(shape, 2 * rank, rank, TENSORS)


def named_expert_size(
    shape: Architecture, gate_rank: int, down_rank: int, names: Iterable[str]
) -> int:
    """Parameters of the adapters on those of one layer's expert tensors that are named.

    Only the last part of a dotted name is looked at.
    """
    if shape.experts is None:
        return 0
    count, width, h = shape.experts.count, shape.experts.width, shape.hidden
    sizes = {
        TENSORS[0]: count * gate_rank * (h + 2 * width),
        TENSORS[1]: count * down_rank * (width + h),
    }
    named = {name.rsplit(".", 1)[-1] for name in names}
    return sum(size for tensor, size in sizes.items() if tensor in named)


TENSORS = ("gate_up_proj", "down_proj")
"""Names of the tensors of all experts of a layer."""


def adapter_size(matrix: Matrix, rank: int, dora: bool = False) -> int:
    """Parameters of one adapter: r x (in + out) (arXiv:2106.09685), and DoRA's magnitudes."""
    return rank * (matrix.inputs + matrix.outputs) + (matrix.outputs if dora else 0)
