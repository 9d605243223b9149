"""Choose the pairs of kind and backend that a proof runs, and the checkpoints that each resumes."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from finetune import backend as backends
from finetune.checks.files import lacking_package
from finetune.errors import FinetuneError
from finetune.planner import Plan, plan
from finetune.planner.engines import TRAITS
from finetune.recipe import Recipe
from finetune.verification.proofs.proof import Refused, Tolerance
from finetune.verification.proofs.small_recipe import Kind, Shape, Subject

Crossings = Literal["each", "ring", "all"]
"""Which checkpoints are resumed elsewhere. `each`: each pair's by another backend, and `single`'s
by each pair; `ring`: every backend's by two others, cycling over kinds; `all`: between every two
backends."""

FP32 = Tolerance(loss=5e-6, norm=1e-4, weights=2e-3, answers=5e-6)
"""About ten times the differences observed in ten steps of small models."""
DISK = Tolerance(loss=1e-4, norm=1e-3, weights=5e-2, answers=5e-6)
"""fp32 offloaded to a disk: DeepSpeed 0.19 updates each piece there with a different kernel."""
BF16 = Tolerance(loss=5e-3, norm=1e-2, weights=2e-1, answers=5e-4, strays=1e-2)
"""bf16 has 8 bits, and each engine rounds weights, sums and gradients in different places.

About three times the largest differences of six and ten steps of small models (sft with an adapter
and with all weights, DPO; ddp, FSDP, ZeRO-1 to -3, tp, pp; on CPUs): loss 1.3e-3, norm 3.3e-3,
weights 7.5e-2, and ten times that of the answers, 3.3e-5. The sign of the first gradient is
rounding noise for about a hundredth of the elements, which Adam moves by a full learning rate.
"""


def tolerance_of(backend: backends.Backend) -> Tolerance:
    """Tolerance for a backend in its precision, compared with one process."""
    if backend.precision == "bf16":
        return BF16
    return DISK if backend.device == "nvme" else FP32


@dataclasses.dataclass(frozen=True)
class Request:
    """The request of a proof."""

    recipe: Recipe
    backends: tuple[str, ...]
    shape: Shape
    output: Path
    kinds: tuple[Kind, ...] = ("own",)
    precision: backends.Precision = "fp32"
    crossings: Crossings = "each"
    jobs: int = 1
    """Concurrent launches."""
    named: bool = True
    """Whether the backends were requested by name, not as `all`."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A kind of recipe on a backend."""

    kind: Kind
    plan: Plan

    @property
    def backend(self) -> str:
        return self.plan.backend.name

    @property
    def tolerance(self) -> Tolerance:
        return tolerance_of(self.plan.backend)

    @property
    def where(self) -> str:
        return f"{self.backend} on {self.plan.processes}"


def narrowest(pairs: Sequence[Pair]) -> Tolerance:
    """The smallest tolerance of the pairs."""
    return min((pair.tolerance for pair in pairs), key=lambda tolerance: tolerance.loss)


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A checkpoint that one pair writes and another resumes."""

    written: Pair
    """The writer; the reference run if its backend is `single`."""
    continued: Pair

    @property
    def tolerance(self) -> Tolerance:
        """The larger tolerance of the two pairs."""
        return max(self.written.tolerance, self.continued.tolerance, key=lambda t: t.loss)


def accepted_pairs(
    request: Request, subjects: dict[Kind, Subject]
) -> tuple[list[Pair], list[Refused]]:
    """Pairs that the planner accepts, and refused pairs with reasons."""
    pairs: list[Pair] = []
    refused: list[Refused] = []
    for kind, subject in subjects.items():
        for name in request.backends:
            machine = backends.load(name)
            processes = processes_of(machine, request.shape.processes)
            missing = _missing(machine)
            if missing is not None:
                refused.append(Refused(kind, name, missing, missing=True, named=request.named))
                continue
            try:
                planned = plan(subject.recipe, machine, processes, request.precision)
                pairs.append(Pair(kind, planned))
            except FinetuneError as error:
                refused.append(Refused(kind, name, "; ".join(error.problems)))
    return pairs, refused


def processes_of(machine: backends.Backend, asked: int) -> int:
    """Processes of a backend's runs: one, `asked`, or at least as many as its mesh needs."""
    if TRAITS[machine.engine].alone:
        return 1
    if machine.axes.any:
        return machine.processes if machine.shard == "none" else max(asked, machine.processes)
    return asked if machine.shard_size is None else max(asked, machine.processes)


def divisor(request: Request) -> int:
    """The smallest number of rows that is divisible by every backend's number of processes."""
    asked = request.shape.processes
    machines = [backends.load(name) for name in request.backends]
    return math.lcm(asked, *(processes_of(machine, asked) for machine in machines))


def _missing(machine: backends.Backend) -> str | None:
    """What this machine lacks for a backend, as text; None if nothing."""
    lacking = lacking_package(machine)
    if lacking is None and machine.device == "nvme" and not Path("/usr/include/libaio.h").is_file():
        return f"{machine.name} needs libaio with its headers: apt install libaio-dev"
    return lacking


# Crossings ----------------------------------------------------------------------------------------


def crossings_of(request: Request, pairs: Sequence[Pair]) -> list[Crossing]:
    if request.crossings == "each":
        return list(_each_with_another(request, pairs))
    count = len({pair.backend for pair in pairs})
    every = itertools.combinations(range(count), 2)
    return list(_between(pairs, every if request.crossings == "all" else _ring(count)))


def _each_with_another(request: Request, pairs: Sequence[Pair]) -> Iterator[Crossing]:
    """Resume each backend's checkpoint on another backend and number of processes, and one of
    `single` on each backend."""
    for pair in pairs:
        alike = [other for other in pairs if other.kind == pair.kind and other != pair]
        alike = alike[pairs.index(pair) % len(alike) :] + alike if alike else []
        others = [narrow for other in alike if (narrow := _alone(other)) is not None]
        single = single_of(pair)
        if pair.plan.traits.alone:
            wide = [other for other in alike if other.plan.processes > 1]
            yield from (Crossing(pair, other) for other in wide[:1])
            continue
        yield Crossing(pair, (others or [single])[0])
        yield Crossing(single, pair)


def single_of(pair: Pair) -> Pair:
    """The same recipe on `single`, with one process."""
    precision = pair.plan.backend.precision
    return Pair(pair.kind, plan(pair.plan.recipe, backends.load("single"), 1, precision))


def _alone(pair: Pair) -> Pair | None:
    """The same backend on one process; None if it is refused."""
    try:
        return Pair(pair.kind, plan(pair.plan.recipe, pair.plan.backend, 1))
    except FinetuneError:
        return None


def _ring(count: int) -> Iterator[tuple[int, int]]:
    """Edges from each of `count` to two others, not to neighbors, which often share an engine."""
    strides = [stride for stride in range(1, count) if math.gcd(stride, count) == 1]
    far = [stride for stride in strides if 2 < stride < count / 2]
    for stride in (far or strides)[:2]:
        yield from ((first, (first + stride) % count) for first in range(count))


def _between(pairs: Sequence[Pair], edges: Iterable[tuple[int, int]]) -> Iterator[Crossing]:
    """A crossing for each edge, cycling over kinds, every other one resumed on one process."""
    kinds = list(dict.fromkeys(pair.kind for pair in pairs))
    names = list(dict.fromkeys(pair.backend for pair in pairs))
    by = {(pair.kind, pair.backend): pair for pair in pairs}
    number = 0
    for first, second in edges:
        written, continued = names[first], names[second]
        both = [k for k in kinds if (k, written) in by and (k, continued) in by]
        if not both:
            continue
        kind = both[number % len(both)]
        reader = by[kind, continued]
        narrow = _alone(reader) if number % 2 else None
        yield Crossing(by[kind, written], narrow or reader)
        number += 1
