"""How far a run is, read from its files while it writes them."""

import fcntl
import json
import math
from pathlib import Path
from typing import Any

from finetune.runs.progress import Watch, find_runs
from finetune.runs.run import Run, write_json

START = {"kind": "start", "step": 0, "time": 100.0, "steps": 10}


def run_in(folder: Path) -> Run:
    write_json((run := Run(folder)).recipe, {"method": "sft"})
    return run


def append(run: Run, *records: dict[str, Any], end: str = "\n") -> None:
    with run.metrics.open("a") as file:
        file.write("".join(json.dumps(record) + end for record in records))


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": number,
        "time": 100.0 + 2 * number,
        "loss": 1 / number,
    } | fields


def test_a_run_is_read_by_offset_and_a_line_only_when_it_is_complete(tmp_path: Path):
    run = run_in(tmp_path)
    watch = Watch(run)
    assert (watch.read().state, watch.steps) == ("not started", 0)
    append(run, START, step(1), step(2))
    append(run, step(3), end="")
    assert (watch.read().step, watch.loss) == (2, 0.5)
    with run.metrics.open("a") as file:
        file.write("\n")
    assert watch.read().step == 3
    run.metrics.write_bytes(b"")  # nothing is read twice: only the records that follow are known
    append(run, START)
    assert (watch.read().step, math.isnan(watch.loss)) == (0, True)


def test_the_state_is_that_of_the_lock_and_of_the_last_record(tmp_path: Path):
    run = run_in(tmp_path)
    append(run, START, step(1), step(2), step(3))
    watch = Watch(run)
    with run.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert (watch.read().state, watch.seconds_left) == ("running", 14.0)
    assert (watch.read().state, math.isnan(watch.seconds_left)) == ("killed", True)
    for reason in ("interrupted", "finished"):
        append(run, {"kind": "end", "step": 3, "time": 107.0, "reason": reason, "peak_memory": 5})
        assert (watch.read().state, watch.peak_memory) == (reason, 5)


def test_a_resumed_run_begins_again_with_its_new_file(tmp_path: Path):
    run = run_in(tmp_path)
    evaluated = {"kind": "eval", "step": 3, "loss": 0.25, "best": True}
    append(run, START, step(3), evaluated)
    watch = Watch(run).read()
    assert watch.best == evaluated
    run.metrics.rename(tmp_path / "before")
    saved = {"kind": "save", "step": 2}
    append(run, START, step(1), step(2), saved)
    assert (watch.read().step, watch.best, watch.saved) == (2, None, [saved])


def test_damage_is_passed_over(tmp_path: Path):
    run = run_in(tmp_path)
    run.metrics.write_bytes(b'\x00\xff{"kind": "start"}\n{"kind": "eval", "loss": []}\n[]\n')
    append(run, {"kind": "start", "steps": "many"}, {"kind": "train", "step": None, "loss": True})
    watch = Watch(run).read()
    assert (watch.state, watch.step, watch.steps, watch.best) == ("killed", 0, 0, None)
    assert (math.isnan(watch.loss), watch.peak_memory, watch.updated) == (True, 0, 0.0)


def test_runs_are_found_without_links_hidden_folders_and_folders_of_others(tmp_path: Path):
    for name in ("b", "a/inner", "a/.hidden", "a/x/y/too_deep"):
        run_in(tmp_path / name)
    (tmp_path / "other" / "stuff").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "b")
    assert [run.root for run in find_runs(tmp_path)] == [tmp_path / "a" / "inner", tmp_path / "b"]
