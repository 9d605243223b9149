"""Summarize a run's record for the terminal, the report and the model card."""

import dataclasses
import json
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.runs import units
from finetune.runs.metrics import History, Trained
from finetune.runs.run import Run, of_record

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = {".json", ".jsonl", ".parquet", ".csv", ".tsv", ".txt", ".gz", ".zst"}


def read_samples(run: Run) -> list[dict[str, Any]]:
    """Generations before and after training; empty if they were not requested.

    Raises FinetuneError if the file contains something else.
    """
    if not run.samples.is_file():
        return []
    with of_record(run.samples):
        read = json.loads(run.samples.read_text(encoding="utf-8"))
        if not isinstance(read, list):
            raise TypeError("expected a list of samples")
        if not all(isinstance(each, dict) and "prompt" in each for each in read):
            raise TypeError("expected samples, each with its prompt")
    return read


def read_completions(run: Run) -> list[dict[str, Any]]:
    """Sampled completions logged for the report, in their order.

    Raises FinetuneError if the file contains something else.
    """
    if not run.completions.is_file():
        return []
    with of_record(run.completions):
        lines = run.completions.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


def hub_name(name: str | None) -> str | None:
    """The name if it can be a hub id and is not a local file or folder, otherwise None."""
    known = name is not None and _HUB_ID.fullmatch(name) and Path(name).suffix not in _FILES
    if name is None or not known or os.path.exists(name):
        return None
    return name


def base_model(recipe: Mapping[str, Any]) -> str:
    """The model that training started from: a hub id, a folder's name, or an architecture."""
    model = recipe.get("model") or {}
    name = model.get("name")
    if name:
        return hub_name(name) or _folder_name(Path(name).resolve())
    architecture = (model.get("config") or {}).get("model_type")
    return f"{architecture} from scratch" if architecture else "a model"


def _folder_name(folder: Path) -> str:
    """A folder's name; that of the run for its `final/`."""
    return folder.parent.name if folder.name == "final" else folder.name


def technique(recipe: Mapping[str, Any]) -> str:
    """Training technique, such as `LoRA, r=16`, `QLoRA (NF4), r=8`, `DoRA, r=4`, `full weights`."""
    adapter = recipe.get("adapter")
    if not adapter:
        return "full weights"
    name = "DoRA" if adapter.get("use_dora") else "LoRA"
    quantization = (recipe.get("model") or {}).get("quantization", "none")
    if quantization != "none":
        name = f"Q{name} ({'NF4' if quantization == 'nf4' else quantization})"
    return f"{name}, r={adapter.get('r')}"


def title(recipe: Mapping[str, Any]) -> str:
    """Title of a run, such as `SFT of SmolLM2-135M: LoRA, r=16`."""
    method = str(recipe.get("method", "training")).rpartition(":")[2]
    verbs = {"simpo": "SimPO"} | {
        each: each.upper() for each in ("sft", "dpo", "kto", "orpo", "cpo", "grpo", "rloo")
    }
    verb = verbs.get(method, method.capitalize())
    return f"{verb} of {base_model(recipe)}: {technique(recipe)}"


def verdict(history: History, now: float) -> str:
    """One or two sentences on a run: its progress, and its losses or rewards.

    `now` is Unix time in seconds, for the age of the last record if no end is recorded.
    """
    progress = _progress(history, now)
    return f"{progress} {_outcome(history)}" if history.trained else progress


def _progress(history: History, now: float) -> str:
    if not history.starts:
        return "Training has not started."
    planned, step = history.starts[-1].steps, history.step
    took = units.duration(history.seconds)
    if history.end is None:
        age = units.duration(max(0.0, now - history.records[-1].time))
        return (
            f"Step {step:,} of {planned:,} after {took}; no end is recorded: it is running or was "
            f"killed (last record {age} old)."
        )
    if history.end.reason == "interrupted":
        return f"Interrupted at step {step:,} of {planned:,} after {took}; it can be resumed."
    if history.end.reason == "early stop":
        return f"Stopped early at step {step:,} of {planned:,} after {took}."
    return f"Finished {step:,} steps in {took}."


def _rewards(history: History) -> str:
    """Rewards of an online method: first and last step, and the last evaluation."""
    first, last = (record.metrics.get("reward", math.nan) for record in (
        history.trained[0], history.trained[-1],
    ))  # fmt: skip
    text = f"Reward of samples {first:.3g} at first, {last:.3g} at the end."
    if not history.evaluated:
        return text
    measured = [
        f"{name.split('/')[1]} {value:.3g}"
        for name, value in history.evaluated[-1].metrics.items()
        if name.startswith("rewards/")
    ]
    return f"{text} Held-out prompts: {', '.join(measured)}."


def _outcome(history: History) -> str:
    trained = history.trained
    if not math.isfinite(trained[-1].loss):
        broken = next(record for record in trained if not math.isfinite(record.loss))
        return f"The training loss has not been finite since step {broken.step:,}."
    if history.starts[-1].unit == "completions":
        return _rewards(history)
    if history.best is not None:
        first, best = history.evaluated[0], history.best
        if first is best:
            return f"Evaluation loss {units.loss(best.loss)} at step {best.step:,}."
        return (
            f"Evaluation loss {units.loss(first.loss)} at step {first.step:,}, best "
            f"{units.loss(best.loss)} at step {best.step:,}."
        )
    first, last = trained[0], trained[-1]
    prefix = f"{units.loss(first.loss)} at step {first.step:,}, " if first is not last else ""
    return (
        f"Training loss {prefix}{units.loss(last.loss)} at step {last.step:,}; nothing was "
        "evaluated on held-out rows."
    )


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Totals and rates over the recorded steps of a run."""

    real_tokens: int
    trained_tokens: int
    slots: int
    step_seconds: float
    """Total wall time of all steps."""
    median_seconds: float
    slowest_seconds: float
    slowest_step: int

    @property
    def tokens_per_second(self) -> float:
        return self.real_tokens / self.step_seconds if self.step_seconds else math.nan


def throughput(trained: Sequence[Trained]) -> Throughput | None:
    """Totals and rates of the steps; None if no step is recorded."""
    if not trained:
        return None
    slowest = max(trained, key=lambda record: record.seconds)
    return Throughput(
        real_tokens=sum(record.real_tokens for record in trained),
        trained_tokens=sum(record.trained_tokens for record in trained),
        slots=sum(record.slots for record in trained),
        step_seconds=sum(record.seconds for record in trained),
        median_seconds=statistics.median(record.seconds for record in trained),
        slowest_seconds=slowest.seconds,
        slowest_step=slowest.step,
    )


def is_exact(sample: Mapping[str, Any], side: str) -> bool:
    """Whether the answer `before` or `after` training equals the expected one, after stripping."""
    expected, answer = sample.get("expected"), sample.get(side)
    return None not in (expected, answer) and str(answer).strip() == str(expected).strip()


def exact_answers(samples: Sequence[Mapping[str, Any]]) -> str:
    """Counts of answers that are exactly as expected, as text; empty without expected answers."""
    asked = [sample for sample in samples if sample.get("expected") is not None]
    if not asked:
        return ""
    before, after = (sum(is_exact(s, side) for s in asked) for side in ("before", "after"))
    return f"Answers exactly as expected: {before:,} of {len(asked):,} before, {after:,} after."
