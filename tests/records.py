"""Run directories with a real record, written by `Metrics`, for the tests of what reads them."""

import math
from pathlib import Path
from typing import Any

from finetune import Run
from finetune.runs.metrics import Ended, Evaluated, Listener, Metrics, Record, Saved, Start, Trained
from finetune.runs.run import write_json

BEGUN = 1_760_000_000.0
"""Unix time of the first record."""

RECIPE: dict[str, Any] = {
    "method": "sft",
    "model": {"name": "acme/tiny-llama", "config": None, "quantization": "nf4"},
    "data": [{"source": "acme/questions", "format": "messages", "split": "train"}],
    "adapter": {"r": 16, "alpha": None, "targets": "all-linear", "use_dora": False},
    "batch": {"rows": 16, "micro_rows": 4, "max_length": 512},
    "optim": {"name": "adamw", "lr": 2e-4, "schedule": "linear"},
    "seed": 3,
    "trackers": [],
}

START = Start(
    step=0, time=BEGUN, processes=2, backend="ddp", precision="bf16", micro_rows=4, accumulation=2,
    rows_per_step=16, steps=10, trainable_parameters=12_345, parameters=260_032, train_rows=80,
    eval_rows=8, trained_tokens=5_432,
)  # fmt: skip


def trained(step: int, **changes: Any) -> Trained:
    """Step k: loss 4 / k, 1,000 real tokens of 1,250 slots in 2 s, made 2k s after the start."""
    values: dict[str, Any] = {
        "time": BEGUN + 2 * step, "loss": 4 / step, "grad_norm": 1 / step,
        "lr": 2e-4 * (1 - step / 10), "trained_tokens": 700, "real_tokens": 1_000, "slots": 1_250,
        "seconds": 2.0, "tokens_per_second": 500.0, "memory": 3 * 2**30, "epoch": step / 5,
    }  # fmt: skip
    return Trained(step=step, **(values | changes))


def evaluated(step: int, loss: float, *, best: bool) -> Evaluated:
    when = BEGUN + 2 * step
    return Evaluated(step=step, time=when, loss=loss, tokens=321, best=best, seconds=0.5)


def ended(step: int = 10, **changes: Any) -> Ended:
    values: dict[str, Any] = {
        "time": BEGUN + 2 * step, "seconds": 20.0, "reason": "finished",
        "peak_memory": 3 * 2**30, "tokens_per_second": 500.0,
    }  # fmt: skip
    return Ended(step=step, **(values | changes))


def whole_run() -> list[Record]:
    """Ten steps, evaluated at 5 (1.25) and 10 (1.5), saved at both."""
    records: list[Record] = [START]
    for step in range(1, 11):
        records.append(trained(step))
        if step % 5 == 0:
            loss = 1.25 if step == 5 else 1.5
            records.append(evaluated(step, loss, best=step == 5))
            records.append(Saved(step=step, time=BEGUN + 2 * step, seconds=0.25, bytes=4_096))
    return [*records, ended()]


def unmeasured_run() -> list[Record]:
    """Ten steps of a run that holds no rows out and saves nothing."""
    return [START, *(trained(step) for step in range(1, 11)), ended()]


def write_run(
    root: Path,
    records: list[Record],
    recipe: dict[str, Any] = RECIPE,
    listeners: tuple[Listener, ...] = (),
) -> Run:
    """A run directory with a recipe, these records, and the checkpoints that they tell of."""
    run = Run(root)
    write_json(run.recipe, recipe)
    metrics = Metrics(run, is_main=True, listeners=listeners)
    for record in records:
        if isinstance(record, Saved):
            write_json(run.checkpoint(record.step) / "manifest.json", {"step": record.step})
        if isinstance(record, Evaluated) and record.best:
            write_json(run.best, {"step": record.step, "loss": record.loss})
        metrics.write(record)
    metrics.close()
    return run


def many_steps(steps: int) -> list[Record]:
    """A long run with a falling, noisy loss."""
    records: list[Record] = []
    for step in range(1, steps + 1):
        loss = 1 + 3 * math.exp(-5 * step / steps) + 0.1 * math.sin(step)
        records.append(trained(step, loss=loss, lr=2e-4 * step / steps))
    return records
