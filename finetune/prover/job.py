"""A proof from the first process to the verdict: reference, kill, resume, elsewhere, result."""

import dataclasses
import importlib.util
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from finetune import backend as backends
from finetune import catalog
from finetune.errors import FinetuneError
from finetune.planner import Plan, plan
from finetune.prover import checks
from finetune.prover.delivery import Delivery, check_deliveries
from finetune.prover.packing import check_packing
from finetune.prover.proof import Check, Proof, Refused, Tolerance, write_proof
from finetune.prover.runs import Trial, carry_out, cut
from finetune.prover.subject import Kind, Shape, Subject, make_subject, of_kind
from finetune.recipe import Recipe
from finetune.record.environment import environment
from finetune.record.proofs import write_page
from finetune.run import Run, write_json

FP32 = Tolerance(loss=2e-5, norm=5e-4, weights=5e-3, answers=2e-5)
BF16 = Tolerance(loss=2e-2, norm=1e-1, weights=5e-1, answers=2e-2)
"""bf16 has 8 bits: each engine rounds weights, sums and gradients at other places."""
KILL_AFTER = 2
"""Steps after the checkpoint at which a run is killed."""
FEWEST_STEPS = 6

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be proved."""

    recipe: Recipe
    backends: tuple[str, ...]
    shape: Shape
    output: Path
    kinds: tuple[Kind, ...] = ("own",)
    precision: backends.Precision = "fp32"
    every_pair: bool = False
    """Continue a checkpoint between every two backends, not between each and another."""
    jobs: int = 1
    """Launches at a time."""

    @property
    def tolerance(self) -> Tolerance:
        return FP32 if self.precision == "fp32" else BF16


@dataclasses.dataclass(frozen=True)
class Pair:
    """A kind of recipe on a backend."""

    kind: Kind
    plan: Plan

    @property
    def backend(self) -> str:
        return self.plan.backend.name

    @property
    def where(self) -> str:
        return f"{self.backend} on {self.plan.processes}"


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A checkpoint that one place wrote and another continues."""

    written: Pair
    """On the reference's one process where its backend is `single`."""
    continued: Pair


class Workshop:
    """Where the runs of a proof lie, and what became of each."""

    def __init__(self, request: Request, cache: Path, say: Say) -> None:
        self.request = request
        self.say = say
        self.failed: dict[Path, str] = {}
        """Runs that could not be carried out, and why."""
        self.launches = 0
        self.subjects: dict[Kind, Subject] = {}
        for kind in request.kinds:
            folder = request.output / "subject" / kind
            subject = make_subject(of_kind(request.recipe, kind), request.shape, folder, cache)
            self.subjects[kind] = subject
            write_json(self.recipe(kind), catalog.to_fields(subject.recipe))

    def recipe(self, kind: Kind) -> Path:
        return self.request.output / "subject" / kind / "recipe.json"

    def reference(self, kind: Kind) -> Run:
        return Run(self.request.output / "runs" / kind / "reference")

    def run(self, pair: Pair) -> Run:
        return Run(self.request.output / "runs" / pair.kind / pair.backend)

    def crossing(self, crossing: Crossing) -> Run:
        written, continued = crossing.written, crossing.continued
        name = f"{written.backend}-to-{continued.backend}-on-{continued.plan.processes}"
        return Run(self.request.output / "runs" / written.kind / name)

    def trial(self, kind: Kind, where: Plan, run: Run, **how: bool | int) -> Trial:
        return Trial(
            self.recipe(kind),
            where.backend.name,
            where.processes,
            self.request.precision,
            run,
            **how,  # type: ignore[arg-type]
        )

    def carry_out(self, what: str, trial: Trial) -> None:
        """Do a trial and say so; a failure is kept for the checks that need the run."""
        begun = time.perf_counter()
        name = "-".join(trial.run.root.parts[-2:]) + ("-resume" if trial.resume else "")
        try:
            carry_out(trial, self.request.output / "logs" / f"{name}.log")
        except FinetuneError as error:
            self.failed[trial.run.root] = str(error)
            self.say(f"[red]failed[/]  {what}: {error}")
        else:
            self.say(f"{what} [dim]{time.perf_counter() - begun:.0f} s[/]")
        self.launches += 1

    def each(self, works: Iterable[Callable[[], None]]) -> None:
        """Do works, as many at a time as were asked for."""
        with ThreadPoolExecutor(self.request.jobs) as pool:
            for done in [pool.submit(work) for work in works]:
                done.result()


def prove(request: Request, cache: Path, say: Say) -> Proof:
    """Show every asked pair, and write `proof.json` and `proof.html` into the output.

    Raises:
        FinetuneError: the request cannot be honoured; nothing was started.
    """
    begun = time.perf_counter()
    _claim(request)
    shop = Workshop(request, cache, say)
    pairs, refused = settle(request, shop.subjects)
    if not pairs:
        raise FinetuneError(*(f"{r.kind} on {r.backend}: {r.reason}" for r in refused))
    for kind, subject in shop.subjects.items():
        for note in subject.notes:
            say(f"[dim]{kind}: {note}[/]")
    crossings = _crossings(request, pairs)
    _start_all(shop, pairs)
    _cut_all(shop, crossings)
    _continue_all(shop, pairs, crossings)
    proof = Proof(
        recipe=catalog.to_fields(request.recipe),
        notes={kind: subject.notes for kind, subject in shop.subjects.items()},
        settings={
            "processes": request.shape.processes,
            "steps": request.shape.steps,
            "precision": request.precision,
            "own batch": request.shape.own_batch,
            "real model": request.shape.whole,
        },
        tolerance=request.tolerance,
        checks=tuple(_check_all(shop, pairs, crossings)),
        refused=tuple(refused),
        environment=environment(),
        seconds=time.perf_counter() - begun,
        launches=shop.launches,
    )
    write_proof(proof, request.output / "proof.json")
    write_page(request.output / "proof.json", request.output / "proof.html")
    return proof


def _claim(request: Request) -> None:
    """An empty folder, or one that holds an earlier proof, which is replaced."""
    output, ours = request.output, {"subject", "runs", "logs", "proof.json", "proof.html"}
    if request.shape.steps < FEWEST_STEPS:
        raise FinetuneError(f"--steps: got {request.shape.steps}, expected at least {FEWEST_STEPS}")
    foreign = (
        sorted(p.name for p in output.iterdir() if p.name not in ours) if output.exists() else []
    )
    if foreign:
        raise FinetuneError(
            f"{output}: holds {foreign[0]}, which no proof wrote; choose another --output"
        )
    for name in ours:
        path = output / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True) if not path.is_dir() else None
    output.mkdir(parents=True, exist_ok=True)


def settle(request: Request, subjects: dict[Kind, Subject]) -> tuple[list[Pair], list[Refused]]:
    """Pairs that the planner lets run, and the others with its reasons."""
    pairs: list[Pair] = []
    refused: list[Refused] = []
    for kind, subject in subjects.items():
        for name in request.backends:
            machine = backends.load(name)
            processes = 1 if machine.engine == "single" else request.shape.processes
            try:
                _require(machine)
                settled = plan(subject.recipe, machine, processes, request.precision)
                pairs.append(Pair(kind, settled))
            except FinetuneError as error:
                refused.append(Refused(kind, name, "; ".join(error.problems)))
    return pairs, refused


def _require(machine: backends.Backend) -> None:
    """What a backend needs of this machine besides Python packages that are always there."""
    if machine.engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise FinetuneError(f"{machine.name} needs DeepSpeed: pip install deepspeed")
    if machine.device == "nvme" and not Path("/usr/include/libaio.h").is_file():
        raise FinetuneError(f"{machine.name} needs libaio with its headers: apt install libaio-dev")


# Who continues whom -------------------------------------------------------------------------------


def _crossings(request: Request, pairs: Sequence[Pair]) -> list[Crossing]:
    found = _every_pair(pairs) if request.every_pair else _each_with_another(request, pairs)
    return list(found)


def _each_with_another(request: Request, pairs: Sequence[Pair]) -> Iterator[Crossing]:
    """Each backend's checkpoint under another backend and number of processes, and one of
    `single` under each backend."""
    for pair in pairs:
        alike = [other for other in pairs if other.kind == pair.kind and other != pair]
        alike = alike[pairs.index(pair) % len(alike) :] + alike if alike else []
        others = [narrow for other in alike if (narrow := _on(other, 1)) is not None]
        single = _single(pair)
        if pair.plan.backend.engine == "single":
            wide = [other for other in alike if other.plan.processes > 1]
            yield from (Crossing(pair, other) for other in wide[:1])
            continue
        yield Crossing(pair, (others or [single])[0])
        yield Crossing(single, pair)


def _single(pair: Pair) -> Pair:
    """The same recipe on one process of `single`."""
    precision = pair.plan.backend.precision
    return Pair(pair.kind, plan(pair.plan.recipe, backends.load("single"), 1, precision))


def _on(pair: Pair, processes: int) -> Pair | None:
    """The same backend with another number of processes, where it can."""
    try:
        return Pair(pair.kind, plan(pair.plan.recipe, pair.plan.backend, processes))
    except FinetuneError:
        return None


def _every_pair(pairs: Sequence[Pair]) -> Iterator[Crossing]:
    """Every two backends once, over the kinds in turn, every other time on one process."""
    kinds = list(dict.fromkeys(pair.kind for pair in pairs))
    names = list(dict.fromkeys(pair.backend for pair in pairs))
    by = {(pair.kind, pair.backend): pair for pair in pairs}
    number = 0
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            both = [k for k in kinds if (k, first) in by and (k, second) in by]
            if not both:
                continue
            kind = both[number % len(both)]
            written, continued = by[kind, first], by[kind, second]
            if number % 3 == 1:
                written, continued = continued, written
            narrow = _on(continued, 1) if number % 2 else None
            yield Crossing(written, narrow or continued)
            number += 1


# The launches ------------------------------------------------------------------------------------


def _start_all(shop: Workshop, pairs: Sequence[Pair]) -> None:
    """One process that never stops for each kind, and every pair until it is killed."""
    kill = shop.request.shape.middle + KILL_AFTER

    def reference(kind: Kind) -> None:
        single = _single(next(pair for pair in pairs if pair.kind == kind)).plan
        shop.carry_out(f"{kind}: one process", shop.trial(kind, single, shop.reference(kind)))

    def killed(pair: Pair) -> None:
        trial = shop.trial(pair.kind, pair.plan, shop.run(pair), kill_after=kill)
        shop.carry_out(f"{pair.kind}: {pair.where}, killed -9 after step {kill}", trial)

    kinds = dict.fromkeys(pair.kind for pair in pairs)
    works = [lambda kind=kind: reference(kind) for kind in kinds]
    shop.each([*works, *(lambda pair=pair: killed(pair) for pair in pairs)])


def _writer(shop: Workshop, crossing: Crossing) -> Run:
    """The run whose checkpoint is continued: the reference stands for `single`."""
    written = crossing.written
    single = written.plan.backend.engine == "single"
    return shop.reference(written.kind) if single else shop.run(written)


def _cut_all(shop: Workshop, crossings: Sequence[Crossing]) -> None:
    """Take the copies before the killed runs go on and prune what they do not need."""
    for crossing in crossings:
        source = _writer(shop, crossing)
        if source.root not in shop.failed:
            cut(source, shop.crossing(crossing), shop.request.shape.middle)


def _continue_all(shop: Workshop, pairs: Sequence[Pair], crossings: Sequence[Crossing]) -> None:
    def resume(pair: Pair) -> None:
        trial = shop.trial(pair.kind, pair.plan, shop.run(pair), resume=True)
        shop.carry_out(f"{pair.kind}: {pair.where}, continued", trial)

    def cross(crossing: Crossing) -> None:
        written, continued = crossing.written, crossing.continued
        trial = shop.trial(written.kind, continued.plan, shop.crossing(crossing), resume=True)
        shop.carry_out(f"{written.kind}: {written.where}, continued by {continued.where}", trial)

    alive = [pair for pair in pairs if shop.run(pair).root not in shop.failed]
    able = [each for each in crossings if _writer(shop, each).root not in shop.failed]
    works = [lambda pair=pair: resume(pair) for pair in alive]
    shop.each([*works, *(lambda each=each: cross(each) for each in able)])


# The answers -------------------------------------------------------------------------------------


def _check_all(
    shop: Workshop, pairs: Sequence[Pair], crossings: Sequence[Crossing]
) -> Iterator[Check]:
    request = shop.request
    steps, middle = request.shape.steps, request.shape.middle
    deliveries: list[Delivery] = []
    for pair in pairs:
        kind, name, run = pair.kind, pair.backend, shop.run(pair)
        reference = shop.reference(kind)
        lost = shop.failed.get(run.root) or shop.failed.get(reference.root)
        if lost:
            yield Check(kind, name, "equal", False, lost)
            continue
        yield checks.check_realised(kind, pair.plan, run)
        yield checks.check_equal(kind, name, reference, run, request.tolerance, steps)
        yield check_packing(kind, name)
        killed = shop.trial(kind, pair.plan, run).killed_record
        yield checks.check_same_bits(kind, name, killed, run, middle)
        bf16 = request.precision == "bf16"
        deliveries.append(Delivery(kind, name, shop.subjects[kind], run, bf16))
    for crossing in crossings:
        yield _check_crossing(shop, crossing)
    yield from check_deliveries(deliveries, request.tolerance)


def _check_crossing(shop: Workshop, crossing: Crossing) -> Check:
    """Counts for the backend that was asked for, where the other only helps."""
    written, continued = crossing.written, crossing.continued
    run, reference = shop.crossing(crossing), shop.reference(written.kind)
    lost = shop.failed.get(run.root) or shop.failed.get(_writer(shop, crossing).root)
    asked = continued if written.plan.backend.engine == "single" else written
    if lost:
        summary = f"{written.where}, continued by {continued.where}: {lost}"
        return Check(asked.kind, asked.backend, "resume", False, summary)
    shape = shop.request.shape
    steps = range(shape.middle + 1, shape.steps + 1)
    tolerance = shop.request.tolerance
    places = (written.where, continued.where)
    check = checks.check_elsewhere(written.kind, places, reference, run, tolerance, steps)
    return dataclasses.replace(check, backend=asked.backend)
