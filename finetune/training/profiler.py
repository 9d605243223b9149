"""Profile one optimizer step: PyTorch's trace, and a table of time by kind of work."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from finetune.distributed.base import Engine
from finetune.planner.estimate.forecast import Forecast
from finetune.training import rank_profiles

STEP = 2
"""Warm-up steps before the traced one, in which memory is allocated and kernels are chosen."""

COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
HEAD = "lm-head matmul"
LOSS = "loss elementwise"
ATTENTION = "attention"
ADAPTERS = "LoRA small matmul"
MATMUL = "layer matmul"
QUANTISED = "dequantisation"
COPIES = "copies and casts"
ELEMENTWISE = "norm, rope, activation, residual"
REST = "python and waiting"
ROWS = (
    ELEMENTWISE, ATTENTION, MATMUL, COPIES, LOSS, ADAPTERS, HEAD, QUANTISED, OPTIMIZER, REST,
    COMMUNICATION,
)  # fmt: skip

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::linear", "aten::matmul")
COPYING = (
    "aten::copy_", "aten::_to_copy", "aten::to", "aten::clone", "aten::contiguous", "aten::cat",
    "aten::fill_", "aten::zero_", "aten::index", "aten::index_select", "aten::_index_put_impl_",
    "Memcpy", "Memset",
)  # fmt: skip
LOSSES = ("log_softmax", "nll_loss", "ChunkedLoss")
COMPILED = ("## Call CompiledFxGraph", "chain::")
"""Name prefixes of compiled operations, TorchInductor's and ours; their self time counts."""
EXCHANGES = (
    "c10d", "gloo", "nccl", "record_param_comms", "all_gather", "all_reduce", "reduce_scatter",
    "allreduce", "allgather",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Profile:
    """Traces one step of a run if a folder is given."""

    folder: Path | None
    rank: int
    say: Callable[[str], object] | None
    """Prints a line; None except on rank 0."""
    vocabulary: int
    ranks: frozenset[int]
    """LoRA ranks of the adapter's matrices."""
    engine: Engine | None = None
    """Gathers the profiles of all processes to compare them; None with one process."""

    @contextlib.contextmanager
    def of_step(self, number: int) -> Iterator[None]:
        """Wrap step `number` (from 0) of this process; step `STEP` is traced."""
        if self.folder is None or number != STEP:
            yield
            return
        cuda = torch.cuda.is_available()
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
        with profile(activities=kinds, record_shapes=True) as traced:
            yield
        self.folder.mkdir(parents=True, exist_ok=True)
        traced.export_chrome_trace(str(self.folder / f"trace-rank-{self.rank:05d}.json"))
        events = traced.events()
        found = spent(events, self.vocabulary, self.ranks, cuda)
        path = self.folder / f"where-rank-{self.rank:05d}.json"
        path.write_text(json.dumps(found, indent=2) + "\n")
        if self.say is not None:
            for line in table(found):
                self.say(line)
        compared = self._compared(found, events, cuda)
        if self.say is not None:
            for line in compared:
                self.say(line)
            self.say(f"trace: {self.folder}")

    def _compared(
        self, found: dict[str, float], events: list[FunctionEvent], cuda: bool
    ) -> list[str]:
        """Table of the step on every rank; collective. Empty with one rank."""
        if self.engine is None:
            return []
        whole = sum(seconds for kind, seconds in found.items() if kind != COMMUNICATION)
        exchanged = [(e.time_range.start, e.time_range.end) for e in events if _exchanges(e.name)]
        mine = rank_profiles.shares(events, whole, whole - found[REST], exchanged, cuda)
        ranks = self.engine.gather(mine)
        plan = self.engine.plan
        if self.folder is not None and self.rank == 0:
            written = [dataclasses.asdict(each) | {"waits": each.waits} for each in ranks]
            (self.folder / "ranks.json").write_text(json.dumps(written, indent=2) + "\n")
        return rank_profiles.table(ranks, plan.mesh, plan.bubble)


def profile_of(engine: Engine, folder: Path | None, forecast: Forecast | None) -> Profile:
    """The profile that traces a step of a run into `folder`; None traces nothing."""
    adapter = engine.plan.recipe.adapter
    ranks = (adapter.r, *adapter.rank_pattern.values()) if adapter is not None else ()
    return Profile(
        folder,
        engine.rank,
        print if engine.is_main else None,
        vocabulary=forecast.workload.shape.vocab if forecast is not None else 0,
        ranks=frozenset(ranks),
        engine=engine if engine.world > 1 else None,
    )


def spent(
    events: list[FunctionEvent], vocabulary: int, ranks: frozenset[int], cuda: bool
) -> dict[str, float]:
    """Seconds of a step by kind of work; the remainder is waiting.

    On a GPU these are kernel times, each counted once, for the operation that launched the kernel:
    kernels and annotations are events of the device too, and their time is already in the
    operation's own device time. Waiting is the time in which no compute kernel of this rank runs.
    """
    found = dict.fromkeys(ROWS, 0.0)
    first = min(event.time_range.start for event in events)
    last = max(event.time_range.end for event in events)
    kernels: list[tuple[float, float]] = []
    for event in events:
        if event.device_type != DeviceType.CPU:
            if not event.is_user_annotation and not _exchanges(event.name):
                kernels.append((event.time_range.start, event.time_range.end))
            continue
        seconds = (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6
        kind = kind_of(event, vocabulary, ranks)
        if kind is not None and (kind == COMMUNICATION or not event.is_async):
            found[kind] += seconds
    counted = sum(seconds for kind, seconds in found.items() if kind != COMMUNICATION)
    busy = rank_profiles.union(kernels) / 1e6 if cuda else counted
    found[REST] = max(0.0, (last - first) / 1e6 - busy)
    return found


def _exchanges(name: str) -> bool:
    return any(word in name for word in EXCHANGES)


def kind_of(event: FunctionEvent, vocabulary: int, ranks: frozenset[int]) -> str | None:
    """Table row of an event; None for a wrapper of other events, whose self time is Python's."""
    name = event.name
    if _exchanges(name):
        return COMMUNICATION
    above = list(_above(event))
    if any(word.startswith(("Optimizer.step", "clip_grad")) for word in (name, *above)):
        return OPTIMIZER
    works = name.startswith(("aten::", "void ", *COMPILED))
    if works and any("ttention" in each for each in above):  # matmuls inside our attention too
        return ATTENTION
    if name.startswith(PRODUCTS):
        sizes = {size for shape in event.input_shapes or () for size in shape if shape}
        if any(size == vocabulary for size in sizes):
            return HEAD
        # The narrow side of an adapter is its rank, or several times it in a fused group.
        narrow = {rank * joined for rank in ranks for joined in (1, 2, 3)}
        return ADAPTERS if sizes & narrow else MATMUL
    if "adapter" in name:
        return ADAPTERS
    if "attention" in name or "flash" in name:
        return ATTENTION
    if "dequantize" in name or "gemm_4bit" in name:
        return QUANTISED
    if any(word in each for word in LOSSES for each in (name, *above)):
        return LOSS
    if name in COPYING or name.startswith(("Memcpy", "Memset")):
        return COPIES
    return ELEMENTWISE if works else None


def _above(event: FunctionEvent) -> Iterator[str]:
    parent: Any = event.cpu_parent
    while parent is not None:
        yield parent.name
        parent = parent.cpu_parent


def table(found: dict[str, float]) -> list[str]:
    """One line per kind, largest first; communication overlaps the rest and is listed last."""
    inside = {kind: seconds for kind, seconds in found.items() if kind != COMMUNICATION}
    total = sum(inside.values()) or 1.0
    lines = [f"time of a step of {total:.3g} s"]
    for kind, seconds in sorted(inside.items(), key=lambda pair: -pair[1]):
        if seconds:
            lines.append(f"  {kind:34} {seconds / total:6.1%}  {seconds:.4f} s")
    if found[COMMUNICATION]:
        share = found[COMMUNICATION] / total
        lines.append(
            f"  {COMMUNICATION + ' (overlapping)':34} {share:6.1%}  {found[COMMUNICATION]:.4f} s"
        )
    return lines
