"""Select the matrices that get an adapter and count the adapter's parameters."""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from finetune.errors import FinetuneError
from finetune.planner.shapes.architecture import Architecture, Matrix


@dataclasses.dataclass(frozen=True)
class Adapter:
    """LoRA on selected matrices."""

    ranks: Mapping[str, int]
    """Rank by the last part of the matrix's name, for the tape of one layer."""
    parameters: int
    width: int = 2
    """Bytes per adapter weight."""
    dropout: bool = False
    """Whether the adapter has dropout on its input."""
    dora: bool = False
    """Whether weights are decomposed: a norm of each complete matrix, and an additional product."""
    saved: frozenset[str] = frozenset()
    """Which of `embedding` and `head` are trained in full (`modules_to_save`): an fp32 copy next to
    the frozen original, which stays in memory."""
    whole: int = 0
    """Parameters of the modules in `saved`, which are included in `parameters`."""
    experts: int = 0
    """Rank on experts; 0 if they have no adapter."""
    rows: Mapping[int, int] = dataclasses.field(default_factory=dict[int, int])
    """Parameters by the first dimension of their tensor, along which FSDP2 shards it."""

    def padded(self, group: int) -> int:
        """Parameters in `group` shards, each padded to as many rows as the largest shard."""
        return self.parameters + sum(n // rows * (-rows % group) for rows, n in self.rows.items())


NO_ADAPTER = Adapter({}, 0)
"""Adapts nothing: the workload of a frozen model has it."""


def lora(
    shape: Architecture,
    rank: int,
    targets: str | tuple[str, ...] = "all-linear",
    width: int = 4,
    dropout: bool = False,
    dora: bool = False,
    excluded: str | tuple[str, ...] = (),
    only_layers: tuple[int, ...] = (),
    rank_pattern: Mapping[str, int] | None = None,
    saved: Iterable[str] = (),
) -> Adapter:
    """The adapter with these settings; `saved` are the names of `modules_to_save`."""
    chosen = adapted(shape, targets, excluded, only_layers)
    patterns = rank_pattern or {}

    def rank_of(matrix: Matrix) -> int:
        return next((r for name, r in patterns.items() if matrix.name.endswith(name)), rank)

    outside = [] if only_layers else outer(shape, targets, excluded)
    wrapped = [*(matrix for _, matrix in chosen), *outside]
    parameters = sum(adapter_size(matrix, rank_of(matrix), dora) for matrix in wrapped)
    rows = by_rows((matrix, rank_of(matrix)) for matrix in wrapped)
    ranks = {matrix.leaf: rank_of(matrix) for _, matrix in chosen}
    experts = rank if targets == "all-linear" and shape.experts is not None else 0
    layers = len({layer for layer, _ in chosen})
    # One pair per expert, with twice the rank for the fused gate and up matrix; routers have none.
    parameters += layers * named_expert_size(shape, 2 * experts, experts, TENSORS)
    names = frozenset(name.rsplit(".", 1)[-1] for name in saved)
    tables = {shape.table: "embedding", shape.head: "head"}
    parts = frozenset(part for name, part in tables.items() if name in names)
    fully_trained = shape.embedding * len(parts)
    return Adapter(
        ranks, parameters + fully_trained, width, dropout, dora, parts, fully_trained, experts, rows
    )


def by_rows(adapted: Iterable[tuple[Matrix, int]]) -> dict[int, int]:
    """Parameters by the first dimension of their tensor, of adapters on matrices with ranks."""
    found: dict[int, int] = {}
    for matrix, r in adapted:
        for rows, count in ((r, r * matrix.inputs), (matrix.outputs, r * matrix.outputs)):
            found[rows] = found.get(rows, 0) + count
    return found


def adapted(
    shape: Architecture,
    targets: str | Iterable[str],
    excluded: str | Iterable[str] = (),
    only_layers: Iterable[int] = (),
) -> list[tuple[int, Matrix]]:
    """Layer and matrix of every adapter, selected in the same way as in PEFT 0.21.

    A string is `all-linear` or a regular expression for the complete path; names match the end of
    a path.

    Raises:
        FinetuneError: no matrix is selected.
    """
    targets = targets if isinstance(targets, str) else tuple(targets)
    excluded = excluded if isinstance(excluded, str) else tuple(excluded)
    wanted = set(only_layers)
    chosen = [
        (layer, matrix)
        for layer in range(shape.layers)
        if not wanted or layer in wanted
        for matrix in shape.matrices
        for path in (f"{shape.prefix}.{layer}.{matrix.name}",)
        if targets == "all-linear" or _named(path, targets)
        if not (excluded and _named(path, excluded))
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
    """Embedding and head if targets name them; as in PEFT, `all-linear` excludes both."""
    targets = targets if isinstance(targets, str) else tuple(targets)
    excluded = excluded if isinstance(excluded, str) else tuple(excluded)
    table = shape.prefix.rsplit(".", 1)[0] + "." + shape.table
    maps = Matrix(table, shape.vocab, shape.hidden), Matrix(shape.head, shape.hidden, shape.vocab)
    return [
        each for each in maps
        if targets != "all-linear" and _named(each.name, targets)
        if not (excluded and _named(each.name, excluded))
    ]  # fmt: skip


def _named(path: str, wanted: str | tuple[str, ...]) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in wanted)


def named_expert_size(
    shape: Architecture, gate_rank: int, down_rank: int, names: Iterable[str]
) -> int:
    """Parameters of the adapters on the named expert tensors of one layer.

    Only the last part of a dotted name is compared.
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
"""Names of the expert tensors of a layer."""


def adapter_size(matrix: Matrix, rank: int, dora: bool = False) -> int:
    """Parameters of one adapter: r x (in + out) (arXiv:2106.09685), plus DoRA magnitudes."""
    return rank * (matrix.inputs + matrix.outputs) + (matrix.outputs if dora else 0)
