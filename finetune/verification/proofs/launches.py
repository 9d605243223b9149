"""Launch the runs of a proof: one process, and each pair killed and resumed, here and elsewhere."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rich.markup import escape

from finetune import catalog
from finetune.errors import FinetuneError
from finetune.planner import Plan
from finetune.process.signals import SIGNALS
from finetune.runs.run import Run, write_json
from finetune.verification.proofs import packed_losses
from finetune.verification.proofs.matrix import Crossing, Pair, Request, divisor, single_of
from finetune.verification.proofs.runs import Launches, Trial, carry_out, copy_at_step
from finetune.verification.proofs.small_recipe import Kind, Subject, make_subject, of_kind

KILL_AFTER = 2
"""Steps after the checkpoint when a run is killed."""

Say = Callable[[str], None]


class Workshop:
    """The folders of a proof's runs, and the errors of failed runs."""

    def __init__(self, request: Request, cache: Path, say: Say) -> None:
        self.request = request
        self.say = say
        self.failed: dict[Path, str] = {}
        """Error of each run that failed."""
        self.launches = 0
        self.under_way = Launches(request.jobs)
        self.subjects: dict[Kind, Subject] = {}
        for kind in request.kinds:
            folder = request.output / "subject" / kind
            subject = make_subject(of_kind(request.recipe, kind), request.shape, folder, cache)
            self.subjects[kind] = subject
            write_json(self.recipe(kind), catalog.to_fields(subject.recipe))
            both = packed_losses.make_packable(subject, divisor(request), cache)
            write_json(self.recipe(kind, "unpacked"), catalog.to_fields(both.unpacked))
            write_json(self.recipe(kind, "packed"), catalog.to_fields(both.packed))

    def recipe(self, kind: Kind, name: str = "recipe") -> Path:
        return self.request.output / "subject" / kind / f"{name}.json"

    def reference(self, kind: Kind) -> Run:
        return Run(self.request.output / "runs" / kind / "reference")

    def run(self, pair: Pair) -> Run:
        return Run(self.request.output / "runs" / pair.kind / pair.backend)

    def unpacked(self, kind: Kind) -> Run:
        return Run(self.request.output / "runs" / kind / "unpacked")

    def packed(self, pair: Pair) -> Run:
        return Run(self.request.output / "runs" / pair.kind / f"{pair.backend}-packed")

    def crossing(self, crossing: Crossing) -> Run:
        written, continued = crossing.written, crossing.continued
        name = f"{written.backend}-to-{continued.backend}-on-{continued.plan.processes}"
        return Run(self.request.output / "runs" / written.kind / name)

    def trial(
        self, kind: Kind, where: Plan, run: Run, recipe: str = "recipe", **how: bool | int
    ) -> Trial:
        path = where.backend.path
        return Trial(
            self.recipe(kind, recipe),
            where.backend.name if path is None else str(path.resolve()),
            where.processes,
            self.request.precision,
            run,
            **how,  # type: ignore[arg-type]
        )

    def carry_out(self, what: str, trial: Trial) -> None:
        """Run a trial and report it; a failure is stored for the checks that need the run."""
        started = time.perf_counter()
        name = "-".join(trial.run.root.parts[-2:]) + ("-resume" if trial.resume else "")
        try:
            carry_out(trial, self.request.output / "logs" / f"{name}.log", self.under_way)
        except FinetuneError as error:
            if self.under_way.closed:
                return
            self.failed[trial.run.root] = str(error)
            self.say(f"[red]failed[/]  {what}: {escape(str(error))}")
        else:
            self.say(f"{what} [dim]{time.perf_counter() - started:.0f} s[/]")
        self.launches += 1

    def each(self, works: Iterable[Callable[[], None]]) -> None:
        """Run works, `jobs` at a time; on an error, end everything that was started."""
        with ThreadPoolExecutor(self.request.jobs) as pool:
            try:
                for done in [pool.submit(work) for work in works]:
                    done.result()
            except BaseException:
                with ignoring_signals():
                    pool.shutdown(wait=False, cancel_futures=True)
                    self.under_way.end_all()
                raise


@contextlib.contextmanager
def ignoring_signals() -> Iterator[None]:
    """Ignore further signals inside this context."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# The launches ------------------------------------------------------------------------------------


def start_all(shop: Workshop, pairs: Sequence[Pair]) -> None:
    """Run one uninterrupted process for each kind, and every pair until it is killed."""
    kill = shop.request.shape.middle + KILL_AFTER

    def reference(kind: Kind, single: Plan) -> None:
        shop.carry_out(f"{kind}: one process", shop.trial(kind, single, shop.reference(kind)))

    def killed(pair: Pair) -> None:
        trial = shop.trial(pair.kind, pair.plan, shop.run(pair), kill_after=kill)
        shop.carry_out(f"{pair.kind}: {pair.where}, killed -9 after step {kill}", trial)

    shop.each([*_alone(pairs, reference), *(partial(killed, pair) for pair in pairs)])


def _alone(
    pairs: Sequence[Pair], work: Callable[[Kind, Plan], None]
) -> Iterator[Callable[[], None]]:
    """Work to do once for each kind, with its plan on one process."""
    for kind, pair in {pair.kind: pair for pair in reversed(pairs)}.items():
        yield partial(work, kind, single_of(pair).plan)


def writer_of(shop: Workshop, crossing: Crossing) -> Run:
    """The run whose checkpoint is resumed; for `single`, the reference."""
    written = crossing.written
    alone = written.plan.traits.alone
    return shop.reference(written.kind) if alone else shop.run(written)


def copy_checkpoints(shop: Workshop, crossings: Sequence[Crossing]) -> None:
    """Copy the checkpoints before the killed runs are resumed and prune them."""
    for crossing in crossings:
        source = writer_of(shop, crossing)
        if source.root not in shop.failed:
            copy_at_step(source, shop.crossing(crossing), shop.request.shape.middle)


def continue_all(shop: Workshop, pairs: Sequence[Pair], crossings: Sequence[Crossing]) -> None:
    def resume(pair: Pair) -> None:
        trial = shop.trial(pair.kind, pair.plan, shop.run(pair), resume=True)
        shop.carry_out(f"{pair.kind}: {pair.where}, continued", trial)

    def cross(crossing: Crossing) -> None:
        written, continued = crossing.written, crossing.continued
        trial = shop.trial(written.kind, continued.plan, shop.crossing(crossing), resume=True)
        shop.carry_out(f"{written.kind}: {written.where}, continued by {continued.where}", trial)

    alive = [pair for pair in pairs if shop.run(pair).root not in shop.failed]
    able = [each for each in crossings if writer_of(shop, each).root not in shop.failed]
    shop.each([*(partial(resume, pair) for pair in alive), *(partial(cross, c) for c in able)])


def packed_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """One pair for each backend, cycling over kinds: packing depends on data and attention only."""
    names = list(dict.fromkeys(pair.backend for pair in pairs))
    found: list[Pair] = []
    for number, name in enumerate(names):
        alike = [pair for pair in pairs if pair.backend == name]
        found.append(alike[number % len(alike)])
    return found


def pack_all(shop: Workshop, pairs: Sequence[Pair]) -> None:
    """Train packed rows on each backend, and the same rows unpacked on one process."""

    def unpacked(kind: Kind, single: Plan) -> None:
        trial = shop.trial(kind, single, shop.unpacked(kind), "unpacked")
        shop.carry_out(f"{kind}: rows by themselves on one process", trial)

    def packed(pair: Pair) -> None:
        trial = shop.trial(pair.kind, pair.plan, shop.packed(pair), "packed")
        shop.carry_out(f"{pair.kind}: {pair.where}, packed", trial)

    shop.each([*_alone(pairs, unpacked), *(partial(packed, pair) for pair in pairs)])
