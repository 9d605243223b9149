"""Rank backends for a workload by predicted memory and time.

The rules, in order: backends that cannot run are dropped; among those that fit, the fastest is
best; within 5 %, the simpler one wins. Sharding is a cost paid for memory, not a goal.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Literal

from finetune.planner import schedules
from finetune.planner.estimate import communication, memory, stage_workload, timing, totals, traffic
from finetune.planner.estimate.hardware import Machine
from finetune.planner.estimate.layout import Layout
from finetune.planner.estimate.memory import Moment
from finetune.planner.estimate.mesh_sizes import WAITS
from finetune.planner.estimate.sharding import resident
from finetune.planner.estimate.timing import Times
from finetune.planner.estimate.workload import Checkpointing, Scheme, Workload
from finetune.planner.plan import Plan

Status = Literal["safe", "tight", "no"]

# A plan within 8 % of the limit may fail on a longer row or with more fragmentation.
HEADROOM = 0.08
# Smaller differences of time are treated as equal: the time model is not more accurate.
SAME_TIME = 0.05
# Predicted times of layouts that divide the model were not verified on GPUs, and these layouts
# involve more libraries. Such a layout is proposed only if it is this many times as fast as one
# that does not divide the model, and of two such layouts the simpler one is chosen if their times
# differ by less than a quarter.
DIVIDED_GAIN, SAME_TIME_DIVIDED = 2.0, 0.25

ENOUGH_TOKENS = 16_384
"""Maximum tokens per forward pass of a proposal: an estimate of where larger matrix products are
not faster."""

SIMPLICITY = (
    "single", "ddp", "fsdp_shard_grad_op", "zero2", "zero1", "hsdp_shard_grad_op", "hsdp",
    "fsdp_full_shard", "zero3", "zero2_offload", "fsdp_full_shard_offload", "zero3_offload",
    "zero3_nvme", "tp", "tp_fsdp", "sp", "sp_fsdp", "cp", "pp", "pp_fsdp", "sp_tp", "pp_tp",
    "pp_tp_fsdp", "ep_fsdp", "ep_tp",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to run a workload on a machine."""

    workload: Workload
    peak: Moment
    machine: Machine
    host: float
    host_fits: bool
    moved: communication.Volume
    times: Times
    comparable: float
    """Seconds per token without the optimizer, if all engines reduced in the compute data type.

    DeepSpeed 0.19 does this, and the others reduce in fp32. This is not an advantage of a sharding
    strategy; `faster` mentions it if it would change the choice.
    """

    @property
    def name(self) -> str:
        return self.workload.layout.name

    @property
    def divides(self) -> bool:
        """Whether the model is divided, in addition to the rows."""
        return self.workload.layout.axes.any

    @property
    def words(self) -> str:
        """The name, with the sizes of the axes that divide the model."""
        axes = self.workload.layout.axes
        return f"{self.name} ({axes.words()})" if axes.any else self.name

    @property
    def recompute(self) -> str:
        """What is recomputed; `offload` if the kept activations are on the host."""
        kept = self.workload.activations_on_host and self.workload.recomputes
        return "offload" if kept else self.workload.checkpointing

    @property
    def usable(self) -> float:
        """Bytes available to tensors."""
        return self.machine.usable

    @property
    def speed(self) -> str:
        return f"{self.times.tokens_per_second:,.0f} tokens/s"

    @property
    def status(self) -> Status:
        if self.peak.total > self.usable or not self.host_fits:
            return "no"
        crowded = self.peak.total > self.usable * (1 - HEADROOM)
        expected = totals.expected(self.peak, self.workload, self.machine)
        return "tight" if crowded or expected > self.machine.gpu.memory else "safe"


def scheme_of(layout: Layout, precision: str) -> Scheme:
    """How an engine stores weights for a precision."""
    if precision == "fp32":
        return "fp32"
    return layout.traits.scheme


def option(workload: Workload, machine: Machine) -> Option:
    """Memory, communication and time of a workload on a machine."""
    stages = memory.by_stage(workload)
    peak = max((stage.peak for stage in stages), key=lambda moment: moment.total)
    moved = volume(workload)
    mine = stage_workload.here(workload) if workload.layout.axes.any else workload
    host = max(resident.host(mine)) * machine.per_node
    fits = machine.host_memory is None or host <= machine.host_memory * 0.9
    times = timing.times(workload, machine, moved)
    equal = volume(workload, gradient_width=workload.compute)
    alike = times if equal == moved else timing.times(workload, machine, equal)
    per_token = (alike.step - alike.updates) / alike.tokens
    return Option(workload, peak, machine, host, fits, moved, times, per_token)


def volume(workload: Workload, gradient_width: int | None = None) -> communication.Volume:
    """Bytes that each process sends per step.

    Args:
        gradient_width: bytes per reduced gradient element; by default that of the engine.
    """
    if workload.layout.axes.any:
        return traffic.volume(workload)
    shape, tower, compute = workload.shape, workload.shape.tower, float(workload.compute)
    gathered = shape.layers * workload.unit_bytes + workload.outer_bytes
    # In Accelerate 1.15, the final norm and the head are one unit, which stays gathered.
    head = float(shape.head_weights * workload.outer_width)
    kept = workload.outer_bytes if workload.root_unit else head
    trained, sharded = workload.trained, workload.sharded
    if tower is not None:
        root = tower.embedding + tower.connector  # in the root unit; a frozen one has one pass
        gathered += (tower.inside + root) * compute
        kept += (root + tower.inside * (not tower.opened)) * compute
        if workload.adapter is None:
            trained, sharded = trained + tower.trained, sharded + tower.trained
    own = compute if workload.layout.traits.reduces_as_computed else workload.gradient_width
    return communication.volume(
        workload.layout, gathered, trained * compute, sharded * float(gradient_width or own),
        workload.accumulation, workload.synchronise_each, kept,
    )  # fmt: skip


def layouts(machine: Machine) -> Iterator[Layout]:
    """Every layout without offload."""
    count = machine.count
    if count == 1:
        yield Layout()
        return
    yield Layout("ddp", "none", count)
    yield Layout("deepspeed", "optimizer", count)
    yield Layout("fsdp", "grads", count)
    yield Layout("deepspeed", "grads", count)
    if machine.nodes > 1 and machine.network < machine.link / 4:
        yield Layout("fsdp", "params", count, machine.nodes)
    yield Layout("fsdp", "params", count)
    yield Layout("deepspeed", "params", count)


def offloads(machine: Machine) -> Iterator[Layout]:
    """Layouts with state in host memory, in order of increasing offload."""
    count = machine.count
    yield Layout("deepspeed", "grads", count, 1, "optimizer", "cpu")
    if count > 1:
        yield Layout("fsdp", "params", count, 1, "all", "cpu")
    yield Layout("deepspeed", "params", count, 1, "all", "cpu")


def on(
    workload: Workload, layout: Layout, precision: str, checkpointing: Checkpointing | None = None
) -> Workload:
    """The workload with another layout."""
    kept = checkpointing or workload.checkpointing
    return dataclasses.replace(
        workload,
        layout=layout,
        scheme=scheme_of(layout, precision),
        root_unit=layout.axes.any or workload.root_unit,
        checkpointing=kept,
        # What is not recomputed is not offloaded either: they are values of one option.
        activations_on_host=workload.activations_on_host and kept == workload.checkpointing,
    )


def options(
    workload: Workload,
    machine: Machine,
    precision: str = "bf16",
    recompute: Iterable[Checkpointing] = ("none", "full"),
    rows_per_step: int | None = None,
    micro_rows: Iterable[int] | None = None,
    divided: Iterable[Workload] = (),
) -> list[Option]:
    """Every layout x checkpointing x micro-batch; offload only if nothing else fits.

    Args:
        rows_per_step: rows per step over all processes, from which accumulation is derived.
        divided: the workload under layouts that divide the model; pipelines with a large bubble
            are left out.
    """
    sizes = [workload.micro_rows] if micro_rows is None else list(micro_rows)
    choices = list(recompute)

    def tried(candidates: Iterable[Layout], base: Workload = workload) -> list[Option]:
        found: list[Option] = []
        for layout in candidates:
            for checkpointing in choices:
                for rows in sizes:
                    steps = base.accumulation
                    if rows_per_step is not None:
                        if rows_per_step % (rows * layout.data):
                            continue
                        steps = rows_per_step // (rows * layout.data)
                    if schedules.bubble(layout.axes, steps) >= WAITS:
                        continue
                    changed = base.with_micro_rows(rows, steps)
                    found.append(option(on(changed, layout, precision, checkpointing), machine))
        return found

    whole = tried(layouts(machine))
    whole += [each for base in divided for each in tried([base.layout], base)]
    if any(each.status != "no" for each in whole):
        return whole
    from_host = tried(offloads(machine))
    if any(each.status != "no" for each in from_host):
        return whole + from_host
    nvme = Layout("deepspeed", "params", machine.count, 1, "all", "nvme")
    return whole + from_host + tried([nvme])


def rank(found: Iterable[Option]) -> list[Option]:
    """Options that fit, best first: safe before tight, then by time, then the simplest."""

    def order(options: list[Option]) -> list[Option]:
        left = sorted(options, key=lambda each: each.comparable)
        ranked: list[Option] = []
        while left:
            near = _nearly_fastest(left)
            best = min(near, key=lambda each: (_simplicity(each), each.comparable))
            ranked.append(best)
            left.remove(best)
        return ranked

    fitting = [each for each in found if each.status != "no"]
    safe = [each for each in fitting if each.status == "safe"]
    # HSDP doubles the memory of a process and is only worthwhile if it fits safely.
    tight = [each for each in fitting if each.status == "tight" and "hsdp" not in each.name]
    return order(safe) + order(tight)


def _nearly_fastest(left: list[Option]) -> list[Option]:
    """Options about as fast as the fastest; `left` is sorted by time.

    An option that divides the model is preferred only if it is twice as fast as those that do not.
    """
    least = left[0].comparable
    near = [each for each in left if each.comparable <= least * (1 + SAME_TIME)]
    undivided = [each for each in left if not each.divides]
    if any(not each.divides for each in near):
        return near
    if undivided and undivided[0].comparable <= least * DIVIDED_GAIN:
        return undivided[:1]
    return [each for each in left if each.comparable <= least * (1 + SAME_TIME_DIVIDED)]


def _simplicity(each: Option) -> tuple[int, int]:
    return SIMPLICITY.index(each.name), int(each.workload.checkpointing != "none")


def reason(best: Option, found: Iterable[Option]) -> str:
    """Why the best option was chosen, in one sentence."""
    layout, steps = best.workload.layout, best.workload.accumulation
    waits = schedules.bubble(layout.axes, steps)
    stages = f", and a stage waits {waits:.1%} of a step" if layout.axes.pipeline > 1 else ""
    prefix = (
        f"{best.words} fits ({best.peak.total / 1e9:.1f} of {best.usable / 1e9:.1f} GB{stages})"
    )
    if best.name in ("single", "ddp"):
        return f"{prefix} and sends least: nothing needs to be sharded"
    # A division of the model is compared with everything else, other options with simpler ones
    # that do not fit.
    others = [each for each in found if not each.divides]
    if not best.divides:
        rank = _simplicity(best)[0]
        others = [each for each in others if each.status == "no" and _simplicity(each)[0] < rank]
    fitting = [each for each in others if each.status != "no"]
    if fitting:
        other = min(fitting, key=lambda each: each.comparable)
        crowded = "only tightly" if other.status == "tight" else "too"
        share = best.times.tokens_per_second / other.times.tokens_per_second
        word = "is faster" if share > 1 + SAME_TIME else "is about as fast"
        if share < 1 / (1 + SAME_TIME):
            word = "fits safely, which counts more than speed"
        return (
            f"{prefix} and {word}: {best.speed}, {other.times.tokens_per_second:,.0f} with "
            f"{other.name}, which fits {crowded}"
        )
    crowded = [each for each in others if each.peak.total > each.usable]
    if crowded:
        least = min(crowded, key=lambda each: each.peak.total)
        return (
            f"{prefix}; {least.name}, which is simpler, would need {least.peak.total / 1e9:.1f} GB"
        )
    if others:
        least = min(others, key=lambda each: each.host)
        return (
            f"{prefix}; {least.name}, which is simpler, would need {least.host / 1e9:.0f} GB of "
            "host memory in a node"
        )
    if best.divides:
        rows = best.workload.micro_rows * steps * layout.data
        return f"{prefix}; {rows} rows a step are too few for {layout.processes} parallel groups"
    return f"{prefix} and is fastest: {best.times.step:.2f} s a step"


def faster(best: Option, ranked: Iterable[Option]) -> str:
    """A faster option than the best one, and why it was not chosen; empty if there is none.

    Only options that divide the model, or only those that do not, are compared with each other.
    """
    alike = [each for each in ranked if each.divides == best.divides]
    quickest = max(alike, key=lambda each: each.times.tokens_per_second)
    if quickest.times.tokens_per_second <= best.times.tokens_per_second * (1 + SAME_TIME):
        return ""
    rows = quickest.workload.micro_rows
    prefix = f"{quickest.words} with {rows} rows would be faster, {quickest.speed}"
    if quickest.status == "tight" and best.status == "safe":
        return f"{prefix}, but fits tightly: a longer row may not"
    if best.divides:
        return f"{prefix}; {best.name} is simpler, and nearly as fast"
    return (
        f"{prefix}, because DeepSpeed reduces gradients in 16 bits, half the bytes, and rounds "
        f"their sum; {best.name} reduces them in fp32. Where the network matters more: --backend "
        f"{quickest.name} batch.micro_rows={rows}"
    )


def division(best: Option, ranked: Iterable[Option]) -> str:
    """The fastest option that divides the model, if at least as fast as the best that does not."""
    divided = [each for each in ranked if each.divides and each.status == "safe"]
    if best.divides or not divided:
        return ""
    quickest = max(divided, key=lambda each: each.times.tokens_per_second)
    times = quickest.times.tokens_per_second / best.times.tokens_per_second
    if times < 1:
        return ""
    words = " ".join(f"--{axis} {n}" for axis, n in quickest.workload.layout.axes.sizes.items())
    rows = quickest.workload.micro_rows
    return (
        f"{quickest.words}, which divides the model, would reach {quickest.speed} with {rows} "
        f"rows, {times:.2f} times as many; it would come first from {DIVIDED_GAIN:.0f} times on, "
        f"because more libraries take part. To have it: --backend {quickest.name} {words} "
        f"batch.micro_rows={rows}"
    )


def largest_rows(workload: Workload, machine: Machine, limit: int = 4096) -> int:
    """The largest micro-batch that fits; 0 if a single row does not fit."""

    def fits(rows: int) -> bool:
        return option(workload.with_micro_rows(rows), machine).status != "no"

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def micro_tokens(plan: Plan, workload: Workload, machine: Machine) -> int | None:
    """A `batch.micro_tokens` that safely fits and saves forward passes; None if there is none."""
    batch, length = plan.recipe.batch, plan.recipe.row_length
    if batch.micro_tokens is not None or plan.accumulation == 1:
        return None
    rows = math.ceil(batch.rows / plan.processes)
    for count in range(min(rows, ENOUGH_TOKENS // length), batch.micro_rows, -1):
        wider = workload.with_micro_rows(count, math.ceil(rows / count))
        if option(wider, machine).status == "safe":
            return count * length
    return None
