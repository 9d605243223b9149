"""Time of saving, resuming, the save rehearsal and verification, relative to training."""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import finetune
from benchmarks.job import LARGE, SMALL, write_job
from benchmarks.record import Result
from finetune import catalog
from finetune.runs import units
from finetune.runs.manifest import damage
from finetune.runs.run import Run, write_json

EVERY = 5
"""Steps between checkpoints."""
MODES = {"waiting": {"background": False}, "in the background": {"background": True}}


def measure(folder: Path, backends: Sequence[str], steps: int, gpu: bool) -> Result:
    """Train with and without background saving, then resume, on each backend."""
    shape = LARGE if gpu else SMALL
    path = write_job(folder / "job", shape, steps)
    fields = catalog.to_fields(catalog.load(path))
    measured: dict[str, dict[str, Any]] = {}
    for backend in backends:
        for mode, saving in MODES.items():
            fields["saving"] |= {"every": EVERY, "rehearse": True} | saving
            write_json(path, fields)
            run = Run(folder / f"{backend}-{mode}".replace(" ", "-"))
            begun = time.time()
            told = launch(path, backend, run, gpu, folder / "cache")
            found = read(run, told) | {"start_seconds": first_step(run, 0) - begun}
            write_json(path, fields | {"max_steps": steps + EVERY})
            begun = time.time()
            launch(path, backend, run, gpu, folder / "cache", "--resume")
            found["resume_seconds"] = first_step(run, steps) - begun
            measured[f"{backend}, {mode}"] = found
            print(f"{backend}, {mode}: {measured[f'{backend}, {mode}']}", flush=True)
    head = ["backend and mode", "checkpoint", "share of training", "training stood still"]
    head += ["rehearsal: write", "read back", "verify all hashes", "start", "resume"]
    rows = [
        [
            name,
            units.size(values["checkpoint_bytes"]),
            f"{values['share_of_training']:.1%}",
            f"{values['stood_still_seconds']:.2f} s",
            f"{values['rehearsal_write_seconds']:.2f} s",
            f"{values['read_back_seconds']:.2f} s",
            f"{values['verify_seconds']:.2f} s",
            f"{values['start_seconds']:.1f} s",
            f"{values['resume_seconds']:.1f} s",
        ]
        for name, values in measured.items()
    ]
    how = (
        f"The job of the training benchmark, {steps} steps with a checkpoint after each {EVERY}th. "
        "The share is the time that training stood still for checkpoints, of that and the steps; "
        "the time of one checkpoint is the mean. Verifying is what a resume does before it loads. "
        "Start and resume are timed from typing `finetune launch` to the end of the first step "
        "that follows."
    )
    remarks = [
        f"{name}, seconds of each copy to host memory: {copies(values)} (page-locked from the "
        "third on, by the second)"
        for name, values in measured.items()
        if gpu and "background" in name
    ]
    return Result("Saving and resuming", how, {"runs": measured}, [head, *rows], remarks)


def copies(values: dict[str, Any]) -> str:
    return ", ".join(f"{seconds:.2f}" for seconds in values["each_stood_still_seconds"])


def first_step(run: Run, after: int) -> float:
    """Time at which the first step after step `after` was recorded, in seconds since the epoch."""
    return next(r["time"] for r in run.read_metrics("train") if r["step"] > after)


def launch(recipe: Path, backend: str, run: Run, gpu: bool, cache: Path, *words: str) -> str:
    processes = "1" if backend == "single" else "2"
    return finetune(
        "launch", recipe, "--backend", backend, "--processes", processes,
        "--precision", "bf16" if gpu else "fp32", "--output", run.root, *words, cache=cache,
    )  # fmt: skip


def read(run: Run, told: str) -> dict[str, Any]:
    """Times and sizes from the metrics and the output of a finished run."""
    saves, steps = list(run.read_metrics("save")), list(run.read_metrics("train"))
    still = sum(record["seconds"] for record in saves)
    trained = sum(record["seconds"] for record in steps)
    found = re.search(r"written in ([\d.]+) s and read back in ([\d.]+) s", told)
    newest = run.newest()
    if found is None or newest is None:
        raise RuntimeError(f"{run.root}: no rehearsal in what it printed:\n{told}")
    begun = time.perf_counter()
    problems = damage(run.checkpoint(newest))
    verified = time.perf_counter() - begun
    assert not problems
    manifest = json.loads((run.checkpoint(newest) / "manifest.json").read_text())
    return {
        "checkpoint_bytes": sum(entry["bytes"] for entry in manifest["files"].values()),
        "share_of_training": still / (still + trained),
        "stood_still_seconds": still / len(saves),
        "each_stood_still_seconds": [record["seconds"] for record in saves],
        "rehearsal_write_seconds": float(found[1]),
        "read_back_seconds": float(found[2]),
        "verify_seconds": verified,
    }
