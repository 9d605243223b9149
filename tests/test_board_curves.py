"""The curves of a run on a screen keep every minimum and maximum, however long the run is."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from finetune.board import curves
from finetune.board.curves import MOST, Curves
from finetune.runs.progress import BLOCK
from finetune.runs.run import Run


def steps(count: int, first: int = 1) -> list[dict[str, Any]]:
    rng = random.Random(first)
    return [
        {
            "kind": "train", "step": step, "loss": rng.choice([None, rng.gauss(0, 1), 3]),
            "seconds": 0.5, "real_tokens": 7, "memory": step, "metrics": {"reward": rng.random()},
        }
        for step in range(first, first + count)
    ]  # fmt: skip


def append(path: Path, records: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def expected(records: list[dict[str, Any]], width: int) -> list[tuple[float, float, float]]:
    """Minimum, mean and maximum of the losses of each bucket; NaN without one."""
    found = list[tuple[float, float, float]]()
    for start in range(0, len(records), width):
        known = [r["loss"] for r in records[start : start + width] if r["loss"] is not None]
        mean = sum(known) / len(known) if known else math.nan
        found.append((min(known, default=math.nan), mean, max(known, default=math.nan)))
    return found


@pytest.mark.parametrize(("slices", "at_once"), [(math.inf, 3000), (0.0, MOST * 5)])
def test_buckets_hold_the_extremes_of_a_file_that_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slices: float, at_once: int
):
    monkeypatch.setattr(curves, "SECONDS", slices)  # without time, a call reads one block
    run = Run(tmp_path)
    records = steps(MOST * 5)
    found = Curves(run)
    for at in range(0, len(records), at_once):
        append(run.metrics, records[at : at + at_once])
        while not found.read():
            pass
    read = found.values()
    assert run.metrics.stat().st_size > BLOCK
    assert (read["width"], read["rows"]) == (8, len(records))
    loss = read["curves"]["loss"]
    rows = zip(loss["low"], loss["mean"], loss["high"], strict=True)
    values = [tuple(math.nan if n is None else n for n in row) for row in rows]
    for got, wanted in zip(values, expected(records, 8), strict=True):
        assert got == pytest.approx(wanted, rel=1e-5, nan_ok=True)
    assert read["step"] == [*range(8, len(records) + 1, 8)]
    assert read["tokens"] == [7 * step for step in read["step"]]
    assert read["curves"]["memory"]["high"] == pytest.approx(read["step"], rel=1e-5)
    assert set(read["curves"]) == {"loss", "memory", "reward"}


def test_what_follows_a_bucket_is_sent_alone_and_damage_is_passed_over(tmp_path: Path):
    run = Run(tmp_path)
    append(run.metrics, steps(10))
    found = Curves(run)
    assert found.read()
    with run.metrics.open("a") as file:
        file.write('{"kind": "train", "step": \n{"kind": "train", "step": "x", "loss": [1]}\n')
    append(run.metrics, steps(3, first=12))
    assert found.read()
    later = found.values(since=9)
    assert later["step"] == [10, 11, 12, 13, 14]
    assert later["curves"]["loss"]["mean"][1] is None
