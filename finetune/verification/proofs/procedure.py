"""Run a proof from the first process to the verdict: reference, kill, resume, other backends."""

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.markup import escape
from transformers.utils import logging

from finetune import catalog
from finetune.errors import FinetuneError
from finetune.methods.online import Online
from finetune.reports.proof_page import write_page
from finetune.runs.environment import environment
from finetune.runs.run import Run
from finetune.verification.proofs import checks, online_runs, packed_losses
from finetune.verification.proofs.exports import Delivery, check_deliveries
from finetune.verification.proofs.launches import (
    Say,
    Workshop,
    continue_all,
    copy_checkpoints,
    pack_all,
    packed_pairs,
    start_all,
    writer_of,
)
from finetune.verification.proofs.matrix import (
    Crossing,
    Pair,
    Request,
    accepted_pairs,
    crossings_of,
    narrowest,
)
from finetune.verification.proofs.proof import Check, Name, Proof, write_proof

FEWEST_STEPS = 6
MARKER = ".finetune-proof"
"""Marker file in a folder that a proof wrote, so that no other folder is ever deleted."""


def carry_out(request: Request, cache: Path, say: Say) -> Proof:
    """Prove every requested pair, and write `proof.json` and `proof.html` to the output folder.

    Raises:
        FinetuneError: the request cannot be honoured; nothing was started.
    """
    started = time.perf_counter()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    _claim(request)
    shop = Workshop(request, cache, say)
    pairs, refused = accepted_pairs(request, shop.subjects)
    if not pairs:
        raise FinetuneError(*(f"{r.kind} on {r.backend}: {r.reason}" for r in refused))
    for kind, subject in shop.subjects.items():
        for note in subject.notes:
            say(f"[dim]{kind}: {escape(note)}[/]")
    crossings = crossings_of(request, pairs)
    with contextlib.closing(shop.under_way):
        start_all(shop, pairs)
        copy_checkpoints(shop, crossings)
        continue_all(shop, pairs, crossings)
        pack_all(shop, packed_pairs(pairs))
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
        tolerance=narrowest(pairs),
        checks=tuple(_check_all(shop, pairs, crossings)),
        refused=tuple(refused),
        environment=environment(),
        seconds=time.perf_counter() - started,
        launches=shop.launches,
    )
    write_proof(proof, request.output / "proof.json")
    write_page(request.output / "proof.json", request.output / "proof.html")
    return proof


def _claim(request: Request) -> None:
    """Create the output folder; replaces a folder that an earlier proof has marked."""
    output = request.output
    if request.precision == "bf16" and isinstance(request.recipe, Online):
        raise FinetuneError(
            "--bf16: logits in bf16 depend on the batch, so completions are only equal in "
            "distribution; prove an online method in fp32"
        )
    if request.shape.steps < FEWEST_STEPS:
        raise FinetuneError(f"--steps: got {request.shape.steps}, expected at least {FEWEST_STEPS}")
    there = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    if there and MARKER not in there:
        raise FinetuneError(
            f"{output}: contains {there[0]}, which no proof wrote; choose another --output"
        )
    if there:
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).touch()


# Checks ------------------------------------------------------------------------------------------


def _checked(
    shop: Workshop, pair: Pair, name: Name, runs: Sequence[Run], work: Callable[[], Check]
) -> Check:
    """The result of a check, which fails if one of its runs failed or a record cannot be read."""
    lost = [shop.failed[run.root] for run in runs if run.root in shop.failed]
    if lost:
        return Check(pair.kind, pair.backend, name, False, lost[0])
    try:
        return work()
    except FinetuneError as error:
        return Check(pair.kind, pair.backend, name, False, str(error))


def _check_all(
    shop: Workshop, pairs: Sequence[Pair], crossings: Sequence[Crossing]
) -> Iterator[Check]:
    request, shape = shop.request, shop.request.shape
    deliveries: list[Delivery] = []
    for pair in pairs:
        kind, name, run, reference = (
            pair.kind,
            pair.backend,
            shop.run(pair),
            shop.reference(pair.kind),
        )
        scale = online_runs.scale_of(pair.plan.recipe)
        steps = range(1, shape.steps + 1)
        equal = partial(
            checks.check_equal, kind, name, reference, run, pair.tolerance, steps, scale
        )
        if {run.root, reference.root} & shop.failed.keys():
            yield _checked(shop, pair, "equal", (run, reference), equal)
            continue
        yield checks.check_realised(kind, pair.plan, run)
        yield _checked(shop, pair, "equal", (run, reference), equal)
        killed = shop.trial(kind, pair.plan, run).killed_record
        yield checks.check_same_bits(kind, name, killed, run, shape.middle)
        bf16 = request.precision == "bf16"
        deliveries.append(Delivery(kind, name, shop.subjects[kind], run, bf16))
    for pair in packed_pairs(pairs):
        runs = shop.unpacked(pair.kind), shop.packed(pair)
        scale = online_runs.scale_of(pair.plan.recipe)
        work = partial(
            packed_losses.check_packing, pair.kind, pair.backend, *runs, pair.tolerance, scale
        )
        yield _checked(shop, pair, "packing", runs, work)
    for crossing in crossings:
        yield _check_crossing(shop, crossing)
    yield from check_deliveries(deliveries, narrowest(pairs))


def _check_crossing(shop: Workshop, crossing: Crossing) -> Check:
    """Check a crossing; it counts for the backend that was requested, not for `single`."""
    written, continued = crossing.written, crossing.continued
    asked = continued if written.plan.traits.alone else written
    run, shape = shop.crossing(crossing), shop.request.shape
    work = partial(
        checks.check_equal,
        asked.kind,
        asked.backend,
        shop.reference(written.kind),
        run,
        crossing.tolerance,
        range(shape.middle + 1, shape.steps + 1),
        online_runs.scale_of(written.plan.recipe),
    )
    check = _checked(shop, asked, "resume", (run, writer_of(shop, crossing)), work)
    summary = f"{written.where}, continued by {continued.where}: {check.summary}"
    return dataclasses.replace(check, name="resume", summary=summary, grid=None)
