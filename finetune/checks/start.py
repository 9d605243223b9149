"""Checks of a started engine before its first step, reported in six lines.

Each check catches what would otherwise fail hours later: a full disk, ranks that differ, a
checkpoint that cannot be read back.
"""

import dataclasses
import functools
import hashlib
import json
import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune import backend as backends
from finetune import catalog
from finetune.checkpoints import checkpoint
from finetune.checkpoints.copies import store_of_parts
from finetune.checkpoints.staging import Staging
from finetune.checks.model import finite_weights
from finetune.data.prepare import Prepared
from finetune.distributed.base import Engine
from finetune.distributed.layers import trained_shapes
from finetune.errors import FinetuneError, TrainingFailure, refuse
from finetune.models import soundness
from finetune.models.load_checks import token_rows
from finetune.models.model import compute_dtype
from finetune.planner import Plan
from finetune.planner.engines import TRAITS
from finetune.planner.estimate.forecast import Forecast
from finetune.planner.estimate.optimizer_state import measured
from finetune.runs import limits, units
from finetune.runs.environment import TRACKERS, versions
from finetune.runs.manifest import damage
from finetune.runs.run import Run

if TYPE_CHECKING:
    from finetune.training.stages import Built, Inputs


@dataclasses.dataclass(frozen=True)
class Job:
    """A training whose engine has its model."""

    engine: Engine
    run: Run
    inputs: "Inputs"
    built: "Built"
    forecast: Forecast | None
    timeout_minutes: float
    """How long ranks wait for each other."""


def run_checks(job: Job) -> str:
    """Run every check of `START`, collectively on every rank; returns their lines.

    Raises:
        FinetuneError: a check failed.
        TrainingFailure: the rehearsal of a checkpoint failed.
    """
    return "\n".join(f"{name:<9}  {check(job)}" for name, check in START.items())


@dataclasses.dataclass(frozen=True)
class Identity:
    """Hashes and versions that must be the same on every rank."""

    recipe: str
    base: str | None
    data: str
    libraries: str
    settings: str


SHOWN_RANKS = 8
ALIKE = {
    "recipe": "start every rank with the same recipe, overrides and starting adapter",
    "base": "give every host the same files of the base model",
    "data": "give every host the same data files, or a cache that all of them share",
    "libraries": "install the same versions on every host",
    "settings": "start every rank with the same backend, precision and number of processes",
}
"""What to do where ranks differ in a field of `Identity`."""


def identity(plan: Plan, data: Prepared, base: str | None, adapter: str | None = None) -> Identity:
    """This rank's identity; data is hashed from its folder name, its counts and the rows read."""
    fields = catalog.to_fields(plan.recipe)
    if adapter is not None:
        fields["starting_adapter"] = adapter
    rows = hashlib.sha256()
    for seen in (data.train.documents.offsets, data.train.members, data.train.bounds):
        rows.update(seen.tobytes())
    return Identity(
        recipe=_short(json.dumps(fields, sort_keys=True)),
        base=base,
        data=_short(
            f"{data.folder.name} {rows.hexdigest()} {json.dumps(data.counts, sort_keys=True)}"
        ),
        libraries=libraries(plan.backend.engine),
        settings=_short(json.dumps({**plan.summary(), "notes": None}, sort_keys=True)),
    )


def libraries(engine: backends.Engine) -> str:
    """Versions of the libraries that affect an engine's results, torch first.

    The version of finetune is a hash of its source.
    """
    found = versions()
    packages = {each.package.lower(): name for name, each in TRAITS.items() if each.package}
    others = {package for package, name in packages.items() if name != engine}
    apart = {*TRACKERS, "finetune"} | others
    names = sorted(found.keys() - apart, key=lambda name: (name != "torch", name))
    named = [f"{name} {found[name]}" for name in names]
    return ", ".join([*named, f"finetune {_source()}"])


@functools.cache
def _source() -> str:
    package = Path(__file__).parents[1]
    texts = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        texts.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return texts.hexdigest()[:12]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} differs"
    shown = ", ".join(map(str, ranks[:SHOWN_RANKS]))
    more = len(ranks) - SHOWN_RANKS
    return f"ranks {shown}{f' and {more} more' if more > 0 else ''} differ"


def agree(everybody: list[Identity]) -> str:
    """Compare the identities of all ranks, rank 0 first; returns the report line.

    Raises:
        FinetuneError: with every rank and field that differ from rank 0.
    """
    first = dataclasses.asdict(everybody[0])
    apart: dict[tuple[str, str], list[int]] = {}
    for rank, other in enumerate(everybody):
        for field, theirs in dataclasses.asdict(other).items():
            if theirs != first[field]:
                apart.setdefault((field, theirs), []).append(rank)
    refuse(
        f"{_ranks(ranks)} from rank 0 in {field}: {theirs} instead of {first[field]}; "
        f"{ALIKE[field]}"
        for (field, theirs), ranks in apart.items()
    )
    alike = f"recipe {first['recipe']}, data {first['data']}, {first['libraries'].split(', ')[0]}"
    return f"{len(everybody)} agree on {alike}" if everybody[1:] else f"1: {alike}"


def checkpoint_bytes(engine: Engine, tokens: int) -> int:
    """Bytes of one checkpoint: fp32 weights, optimizer state, and the loadable model or adapter."""
    recipe = engine.plan.recipe
    trained = sum(map(math.prod, trained_shapes(engine.module).values()))
    known = {"adamw_8bit": 2.2, "adamw_4bit": 1.2, "paged_adamw_8bit": 2.2, "adafactor": 1}
    known |= {"muon": 6, "lion": 4}
    found = measured(recipe.optim)
    state = known.get(recipe.optim.name, 8) if found is None else found
    state += 0 if recipe.optim.ema_decay is None else 4
    usable = 4 if recipe.adapter is not None or engine.plan.backend.precision != "bf16" else 2
    # A tokenizer's JSON takes up to about 100 bytes per token.
    return int(trained * (4 + state + usable)) + 100 * tokens + 2**16


def ranks(job: Job) -> str:
    """recipe, data, model.name, --backend: ranks differ; give each the same, and one version."""
    engine, built = job.engine, job.built
    line = agree(engine.gather(identity(engine.plan, built.data, built.base, built.adapter)))
    if engine.world > 1:
        line += f"; each waits at most {job.timeout_minutes:g} min for the others"
    return line


def memory(job: Job) -> str:
    """The predicted peak memory, and what this machine has."""
    place, forecast = job.engine.device, job.forecast
    if place.type != "cuda":
        available = limits.memory().available
        return f"no accelerator; {units.size(available)} of host memory available"
    free, total = torch.cuda.mem_get_info(place)
    if forecast is None:
        return f"{units.size(free)} of {units.size(total)} free; no prediction for this model"
    predicted = forecast.peak_memory
    summary = f"{units.size(predicted)} predicted, {units.size(free)} of {units.size(total)} free"
    return summary if predicted <= free else f"{summary}: it may run out of memory"


def disk(job: Job) -> str:
    """output: the disk has no room for the checkpoints; free some, or lower saving.keep."""
    engine, run, every = job.engine, job.run, job.inputs.saving_every
    size = checkpoint_bytes(engine, len(job.built.tokenizer))
    left = job.inputs.steps - job.built.progress.step
    # On it at once: the newest `keep`, the best and the one being written; then the result.
    coming = 1 if every is None else max(1, left // every)
    count = min(engine.plan.recipe.saving.keep + 2, coming + 1)

    def room() -> str:
        kept = (file for file in run.checkpoints.rglob("*") if file.is_file())
        there = sum(file.stat().st_size for file in kept)  # as free: new ones replace these
        needed = max(0, size * count + size // 3 - there)
        free = shutil.disk_usage(run.root).free
        line = f"{units.size(free)} free, the coming checkpoints need up to {units.size(needed)}"
        if needed > free:
            raise FinetuneError(
                f"{run.root}: {line} ({count} of {units.size(size)} and the result); free disk "
                "space, choose another --output, or lower saving.keep"
            )
        return line

    return engine.on_rank_0(room)


def model(job: Job) -> str:
    """model: its forward pass fails, sees later tokens, or has NaN; use an intact decoder."""
    engine, plan = job.engine, job.engine.plan
    if plan.mesh.pipeline * plan.mesh.sequence > 1:
        finite_weights(engine)
        lacks = "all layers" if plan.mesh.pipeline > 1 else "all tokens of a row"
        return f"weights finite; no process has {lacks}, so causality was not checked"
    rows = token_rows(engine.module) or len(job.built.tokenizer)
    tuner = plan.recipe.adapter is not None and plan.recipe.adapter.kind != "lora"
    field, instead = ("adapter.kind", "use lora") if tuner else ("model", soundness.DECODER_ONLY)
    with soundness.explained(field, "the forward pass of a few tokens fails", instead):
        found = soundness.causality(
            engine.model, rows, engine.device, compute_dtype(plan),
            job.built.data.train.side_by_side, scores=plan.recipe.head.scored,
        )  # fmt: skip
        engine.reshard()
        engine.gather_frozen_units()
    if not found.finite:
        finite_weights(engine)
        return "logits of a few tokens are not finite, although the weights are"
    if found.leak:
        raise FinetuneError(
            f"model: '{engine.module.config.model_type}' cannot be trained here: "
            f"{soundness.described(found.leak)}; {soundness.DECODER_ONLY}"
        )
    return "causal, logits finite; gradients reach all trained parameters"


def start(job: Job) -> str:
    """Where the run begins; a damaged checkpoint was passed over when it was claimed."""
    if job.inputs.resumed is None:
        return "from the beginning"
    return f"after step {job.inputs.resumed}, whose checkpoint is intact"


def rehearsal(job: Job) -> str:
    """saving.rehearse: a checkpoint reads back with other values; check the disk of the output."""
    engine, built = job.engine, job.built
    if not engine.plan.recipe.saving.rehearse:
        return "off (saving.rehearse=true turns it on)"
    if store_of_parts(job.run) is not None:
        raise FinetuneError("saving.rehearse: needs a disk that all machines share; set it false")
    progress, place = built.progress, Run(job.run.root / ".rehearsal")
    started = time.perf_counter()
    state = checkpoint.take(engine, Staging(engine.device))
    size = checkpoint.write(engine, place, progress, built.tokenizer, state)
    written = time.perf_counter()
    folder = place.checkpoint(progress.step)

    def verify() -> None:
        refuse((f"rehearsal: {problem}" for problem in damage(folder)), TrainingFailure)

    engine.on_rank_0(verify)
    differing = checkpoint.compare(engine, folder)
    everybody = engine.gather(differing)
    engine.on_rank_0(lambda: shutil.rmtree(place.root))
    wrong = sorted({name for names in everybody for name in names})
    if wrong:
        raise TrainingFailure(
            f"rehearsal: {len(wrong)} parameters were read back from {folder} with different "
            f"values, the first is {wrong[0]}"
        )
    seconds = written - started
    return (
        f"{units.size(size)} written in {seconds:.2f} s and read back in "
        f"{time.perf_counter() - written:.2f} s, equal"
    )


START = {
    "ranks": ranks, "memory": memory, "disk": disk, "model": model, "start": start,
    "rehearsal": rehearsal,
}  # fmt: skip
"""By the name of its line, each check of a started engine: collective, with a line to report."""
