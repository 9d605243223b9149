"""Count live bytes and collectives of a step on fake tensors.

torch's own `MemTracker` (2.13) puts hooks on every parameter and fails on frozen ones; its
`FSDPMemTracker` counts the optimizer state of sharded parameters many times.
"""

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.planner.mesh import Mesh

OTHER = "activations"
"""Label of everything else: activations, logits, gradients of activations."""

WEIGHTS, ADAPTERS, OPTIMIZER, GRADIENTS = "weights", "adapters", "optimizer", "gradients"
UNITS, REDUCTION, INPUTS = "units", "reduction", "inputs"
CASTS = "casts"
"""Label of copies of parameters in the compute dtype."""

LABELLED_BY_OPERATOR = {
    "fsdp::all_gather_copy_in": UNITS,
    "fsdp::split_with_sizes_copy": UNITS,
    "fsdp::chunk_cat": REDUCTION,
    "c10d::_reduce_scatter_base_": GRADIENTS,
}
"""FSDP2's operators (torch 2.13) and the labels of the tensors that they write."""

DIVIDING = {"pipeline", "tensor", "sequence", "experts"}
"""Axes of a mesh that divide a model."""
SPACES = ("c10d::", "_c10d_functional::", "deepspeed::dim_zero_all_to_all")
KINDS = {
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_reduce": ("allreduce", "all_reduce"),
    "all_to_all": ("alltoall", "all_to_all"),
    "send": ("send",),
}
"""Collectives, and what is in the names of their operators."""


def _dequantised(weight: torch.Tensor, shape: Sequence[int], blocksize: int) -> int:
    """Bytes of a 4-bit weight expanded to 16 bits, plus its fp32 scales."""
    elements = math.prod(shape)
    return 2 * elements + 4 * elements // blocksize


SCRATCH: dict[str, Callable[[Sequence[Any]], int]] = {
    # bitsandbytes 0.50 on CUDA expands the complete weight except for the smallest products.
    "bitsandbytes::gemm_4bit": lambda given: _dequantised(given[1], given[2], given[4])
}
"""Temporary bytes of an operator's kernel, computed from its positional arguments."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of this rank."""

    kind: str
    """`all_gather`, `reduce_scatter` or `all_reduce`."""
    payload: int
    """Bytes of the unsharded tensor that is gathered or reduced."""
    phase: str
    """The micro-batch or update in which it happens."""
    axis: str = ""
    """Axis of the mesh along which its ranks differ; empty if the model is not divided."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """Peak of live bytes during a moment of the step."""

    total: int
    parts: dict[str, int]
    """Bytes by label."""


@dataclasses.dataclass
class _Storage:
    """A live storage and its label."""

    reference: weakref.ref[torch.UntypedStorage]
    bytes: int
    label: str


class Tracker(TorchDispatchMode):
    """Tracks every storage that an operation creates until it is freed."""

    def __init__(self, mesh: Mesh | None = None) -> None:
        """`mesh`: of the job; where it divides a model, collectives are told apart by axis."""
        super().__init__()
        self.mesh = mesh
        self.marks: list[str] = []
        """Names of the parts of a step that are under way, as they are marked for a profile."""
        self.entered: Callable[[str], None] = lambda _: None
        """Called with the name of each part of a step that is marked for a profile."""
        self.storages: dict[int, _Storage] = {}
        self.totals: dict[str, int] = {}
        self.collectives: list[Collective] = []
        self.peaks: dict[str, Peak] = {}
        self.moment = ""
        self.phase = ""

    def hold(self, tensors: Iterable[torch.Tensor], label: str) -> None:
        """Track existing tensors under a label."""
        for tensor in tensors:
            self._follow(tensor, label)

    def begin(self, moment: str) -> None:
        """Start a moment, which may have occurred before."""
        self.moment = moment
        self._note(0)

    def relabel(self, old: str, new: str) -> None:
        """Move live storages from one label to another."""
        for storage in self.storages.values():
            if storage.label == old:
                self._count_under(storage, new)

    def parts(self) -> dict[str, int]:
        """Live bytes by label."""
        for storage in self.storages.values():
            if storage.label == UNITS:  # FSDP2 frees gathered weights by resizing them
                self._resize(storage)
        return {label: count for label, count in self.totals.items() if count}

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches to local operations, which are tracked
        given = kwargs or {}
        result = func(*args, **given)
        name = func._schema.name
        if name == "prim::device":
            return result
        if name == "profiler::_record_function_enter_new":
            self.marks.append(args[0])
            self.entered(args[0])
            return result
        if name.startswith("profiler::_record_function_exit"):
            self.marks.pop()
            return result
        label = (
            LABELLED_BY_OPERATOR.get(name) or self._cast(name, args) or self._refilled(name, args)
        )
        for tensor in tree_leaves(result):
            # transformers 5.23 makes meta tensors for their strides; they take no memory.
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._follow(tensor, label)
        if label is not None:
            self._label_written(func, args, given, label)
        if name.startswith(SPACES):
            self._count(name, args, result)
        scratch = SCRATCH.get(name)
        self._note(scratch(args) if scratch else 0)
        return result

    def _refilled(self, name: str, args: Sequence[Any]) -> str | None:
        """The label of gathered weights before they are written: storage not yet tracked.

        FSDP2 copies the weights of a group of one process into that storage.
        """
        refills = name in ("aten::view", "aten::copy_")
        if not refills or args[0].untyped_storage()._cdata in self.storages:
            return None
        return UNITS

    def _cast(self, name: str, args: Sequence[Any]) -> str | None:
        """The label of a copy of a parameter in another dtype."""
        if name != "aten::_to_copy":
            return None
        source = self.storages.get(args[0].untyped_storage()._cdata)
        is_weight = source is not None and source.label in (WEIGHTS, ADAPTERS)
        return CASTS if is_weight else None

    def _follow(self, tensor: torch.Tensor, label: str | None) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            forget = functools.partial(self._forget, key)
            self.storages[key] = _Storage(weakref.ref(storage, forget), 0, label or OTHER)
        followed = self.storages[key]
        self._resize(followed)
        if label is not None:
            self._count_under(followed, label)

    def _resize(self, followed: _Storage) -> None:
        storage = followed.reference()
        size = 0 if storage is None else storage.nbytes()
        if size != followed.bytes:
            total = self.totals.get(followed.label, 0)
            self.totals[followed.label] = total + size - followed.bytes
            followed.bytes = size

    def _count_under(self, followed: _Storage, label: str) -> None:
        if followed.label != label:
            self.totals[followed.label] -= followed.bytes
            self.totals[label] = self.totals.get(label, 0) + followed.bytes
            followed.label = label

    def _forget(self, key: int, _: object) -> None:
        followed = self.storages.pop(key)
        self.totals[followed.label] = self.totals.get(followed.label, 0) - followed.bytes

    def _label_written(self, func: Any, args: Any, kwargs: Any, label: str) -> None:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    self._follow(tensor, label)

    def _count(self, name: str, args: Sequence[Any], result: Any) -> None:
        operator = name.split("::")[1]
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        payload = max((tensor.numel() * tensor.itemsize for tensor in tensors + made), default=0)
        for kind, spellings in KINDS.items():
            if any(spelling in operator for spelling in spellings):
                axis = self._axis(kind, args)
                self.collectives.append(Collective(kind, payload, self.phase, axis))
                return

    def _axis(self, kind: str, given: Sequence[Any]) -> str:
        """The axis along which the ranks of a collective lie, by its operator's arguments.

        Empty where the mesh divides no model. FSDP2 shards over processes that share rows too.
        Tokens are exchanged for experts along the axes of shards and of tensor parallelism.
        """
        mesh = self.mesh
        if mesh is None or not DIVIDING & mesh.summary().keys():
            return ""
        places = [mesh.place(rank) for rank in _ranks(given)]
        along = {axis for axis in places[0] if len({place[axis] for place in places}) > 1}
        if mesh.experts > 1 and (kind == "all_to_all" or along == {"shard", "tensor"}):
            return "experts"
        if along and along <= {"shard", "sequence"}:
            sharding = any(mark.startswith("FSDP::") for mark in self.marks)
            return "sequence" if along == {"sequence"} and not sharding else "shard"
        return " and ".join(sorted(along))

    def _note(self, scratch: int) -> None:
        parts = self.parts()
        total = sum(parts.values()) + scratch
        # On ties take the last, when the operator that fills a buffer has labelled it.
        if self.moment and total >= self.peaks.get(self.moment, Peak(-1, {})).total:
            self.peaks[self.moment] = Peak(total, parts | {OTHER: parts.get(OTHER, 0) + scratch})


def _ranks(given: Sequence[Any]) -> list[int]:
    """Ranks of the group that is among the arguments of a collective's operator."""
    groups: Any = dist.distributed_c10d
    for each in given:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(each))
        if isinstance(each, str) and each not in ("sum", "avg", "max"):
            return dist.get_process_group_ranks(groups._resolve_process_group(each))
    raise AssertionError(f"a collective without a group: {given}")
