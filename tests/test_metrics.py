"""The record: what is written is what is read, whatever happened in between."""

import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetune.errors import FinetuneError, TrainingFailure
from finetune.runs import units
from finetune.runs.environment import environment, without_secrets
from finetune.runs.metrics import (
    Ended,
    Evaluated,
    Metrics,
    Record,
    Saved,
    Start,
    Trained,
    read_history,
)
from finetune.runs.run import Run
from finetune.runs.trackers import open_trackers, track

START = Start(
    step=0,
    processes=2,
    backend="ddp",
    precision="bf16",
    micro_rows=4,
    accumulation=2,
    rows_per_step=16,
    steps=10,
    trainable_parameters=1_000,
    parameters=260_032,
    train_rows=160,
    eval_rows=0,
    trained_tokens=12_345,
)


def trained(step: int, loss: float = 2.5) -> Trained:
    return Trained(
        step=step,
        loss=loss,
        grad_norm=0.75,
        lr=2e-4,
        trained_tokens=700,
        real_tokens=1_000,
        slots=1_024,
        seconds=0.5,
        tokens_per_second=2_000.0,
        memory=3 * 2**30,
        epoch=step / 10,
    )


def test_every_kind_of_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    records: list[Record] = [
        START,
        trained(1),
        Evaluated(step=1, loss=2.25, tokens=321, best=True, seconds=0.125),
        Saved(step=1, seconds=0.25, bytes=4_096),
        Ended(
            step=1, seconds=3.5, reason="early stop", peak_memory=2**31, tokens_per_second=1_999.5
        ),
    ]
    heard: list[Record] = []
    metrics = Metrics(run, is_main=True, listeners=(heard.append,))
    for record in records:
        metrics.write(record)
        assert len(run.metrics.read_text().splitlines()) == len(heard)  # on disk at once

    history = read_history(run)
    assert heard == records
    assert [
        *history.starts,
        *history.trained,
        *history.evaluated,
        *history.saved,
        *history.ends,
    ] == (records)
    assert history.end == records[-1]
    assert [json.loads(line)["kind"] for line in run.metrics.read_text().splitlines()] == [
        "start",
        "train",
        "eval",
        "save",
        "end",
    ]


def test_only_the_main_process_writes_and_notifies(tmp_path: Path) -> None:
    heard: list[Record] = []
    metrics = Metrics(Run(tmp_path / "run"), is_main=False, listeners=(heard.append,))
    metrics.resume_at(0)
    metrics.write(START)
    assert heard == []
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_not_finite_is_strict_json(tmp_path: Path) -> None:
    run = Run(tmp_path)
    Metrics(run, is_main=True).write(trained(1, loss=math.nan))
    assert json.loads(run.metrics.read_text(), parse_constant=pytest.fail)["loss"] is None
    assert math.isnan(read_history(run).trained[0].loss)


def test_resuming_leaves_exactly_the_records_up_to_the_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    metrics = Metrics(run, is_main=True)
    kept = [START, trained(1), trained(2), Saved(step=2, seconds=0.1, bytes=9)]
    for record in [*kept, trained(3), Evaluated(step=3, loss=1, tokens=1, best=True, seconds=1)]:
        metrics.write(record)
    before = run.metrics.read_bytes().splitlines(keepends=True)

    metrics.resume_at(2)
    assert run.metrics.read_bytes() == b"".join(before[: len(kept)])
    again = trained(3, loss=1.5)
    metrics.write(again)
    assert read_history(run).trained == (trained_at(kept, 1), trained_at(kept, 2), again)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def trained_at(records: list[Record], step: int) -> Record:
    return next(r for r in records if isinstance(r, Trained) and r.step == step)


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_resuming_drops_a_torn_last_line(tmp_path: Path, cut: int) -> None:
    run = Run(tmp_path)
    metrics = Metrics(run, is_main=True)
    for step in (1, 2, 3):
        metrics.write(trained(step))
    whole = run.metrics.read_bytes()
    run.metrics.write_bytes(whole[:-cut])
    assert [record.step for record in read_history(run).trained] == (
        [1, 2, 3] if cut == 1 else [1, 2]
    )

    metrics.resume_at(3)
    metrics.write(trained(4))
    assert [record.step for record in read_history(run).trained] == [1, 2, 4]


def test_a_full_disk_is_a_training_failure_that_names_the_file(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.metrics.symlink_to("/dev/full")  # every write to it fails with ENOSPC
    with pytest.raises(TrainingFailure, match=r"metrics\.jsonl: .*No space left on device"):
        Metrics(run, is_main=True).write(START)


def test_a_file_in_the_way_of_the_run_is_a_training_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingFailure, match=r"file/run/metrics\.jsonl"):
        Metrics(Run(tmp_path / "file" / "run"), is_main=True).write(START)


def test_records_survive_a_process_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from finetune.runs.run import Run\n"
        "from finetune.runs.metrics import Metrics, Saved\n"
        "metrics = Metrics(Run(Path(sys.argv[1])), is_main=True)\n"
        "for step in range(3): metrics.write(Saved(step=step, seconds=0.5, bytes=7))\n"
        "print('written', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "written\n"
    child.kill()
    child.communicate()
    assert [record.step for record in read_history(Run(tmp_path)).saved] == [0, 1, 2]


def test_an_unknown_record_is_an_error_that_names_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.metrics.write_text('{"kind": "danced", "step": 1}\n')
    with pytest.raises(FinetuneError, match=r"metrics\.jsonl: a record of kind 'danced'"):
        read_history(run)
    run.metrics.write_text('{"kind": "save", "step": 1, "time": 0, "seconds": 1, "size": 1}\n')
    with pytest.raises(FinetuneError, match=r"'save' record of step 1 .*: bytes, size"):
        read_history(run)


@pytest.mark.parametrize("name", ["step", "memory"])
def test_a_count_below_zero_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path)
    record = {"kind": "train"} | dataclasses.asdict(trained(1)) | {name: -1}
    run.metrics.write_text(json.dumps(record) + "\n")
    with pytest.raises(FinetuneError, match=rf"a count below 0 in {name}$"):
        read_history(run)


def test_the_best_evaluation_is_the_first_lowest_finite_one(tmp_path: Path) -> None:
    metrics = Metrics(Run(tmp_path), is_main=True)
    for step, loss in ((1, 3.0), (2, math.nan), (3, 1.5), (4, 1.5), (5, 2.0)):
        metrics.write(Evaluated(step=step, loss=loss, tokens=1, best=False, seconds=0.1))
    best = read_history(Run(tmp_path)).best
    assert best is not None
    assert best.step == 3


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    accelerator = Accelerator(cpu=True)
    recipe = {"optim": {"lr": 2e-4, "betas": [0.9, 0.999]}, "adapter": None, "data": [{"a": 1}]}
    open_trackers(accelerator, run, recipe | {"trackers": ["tensorboard"]})
    metrics = Metrics(run, is_main=True, listeners=(track(accelerator),))
    metrics.write(START)
    for step in (1, 2, 3):
        metrics.write(trained(step, loss=4.0 / step))
    metrics.write(Evaluated(step=3, loss=1.25, tokens=321, best=True, seconds=0.125))
    for tracker in accelerator.trackers:
        tracker.finish()

    events = EventAccumulator(str(run.root / "finetune")).Reload()
    assert set(events.Tags()["scalars"]) == {
        *(f"train/{name}" for name in ("loss", "grad_norm", "lr", "trained_tokens", "real_tokens")),
        *(f"train/{name}" for name in ("slots", "seconds", "tokens_per_second", "memory", "epoch")),
        "train/data_seconds",
        "train/mfu",
        *(f"eval/{name}" for name in ("loss", "tokens", "seconds")),
    }
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 4.0), (2, 2.0), (3, pytest.approx(4 / 3, rel=1e-7))]  # fp32 in the file
    assert [(e.step, e.value) for e in events.Scalars("eval/loss")] == [(3, 1.25)]


def test_a_tracker_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(FinetuneError, match="trackers: 'trackio' is not installed") as caught:
        open_trackers(accelerator, Run(tmp_path), {"trackers": ["tensorboard", "trackio"]})
    assert len(caught.value.problems) == 1


def test_the_environment_holds_versions_and_command_but_no_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_fromTheEnvironment123")
    monkeypatch.setattr(sys, "argv", ["finetune", "train", "--hf-token", "hf_onTheCommandLine123"])
    found = environment(devices=["NVIDIA H100"])
    assert found["versions"]["accelerate"] == __import__("accelerate").__version__
    assert found["python"] == sys.version.split()[0]
    assert found["devices"] == ["NVIDIA H100"]
    assert found["command"] == ["finetune", "train", "--hf-token", "***"]
    assert "hf_" not in json.dumps(found)
    assert environment()["devices"][0].endswith("cores)")


@pytest.mark.parametrize(
    ("typed", "recorded"),
    [
        (["train", "x", "optim.lr=1e-4"], ["train", "x", "optim.lr=1e-4"]),
        (["--max_tokens", "5", "next"], ["--max_tokens", "5", "next"]),
        (["model.tokenizer=gpt2"], ["model.tokenizer=gpt2"]),
        (["--token=abc", "x"], ["--token=***", "x"]),
        (["--api-key", "abc", "x"], ["--api-key", "***", "x"]),
        (["https://u:hf_abcdefghijklmnopqrst@h"], ["https://u:***@h"]),
        (["tracker.password=abc"], ["tracker.password=***"]),
    ],
)
def test_secrets_on_the_command_line_are_hidden(typed: list[str], recorded: list[str]) -> None:
    assert without_secrets(typed) == recorded


def test_gathering_the_environment_imports_nothing_heavy() -> None:
    program = (
        "import sys; from finetune.runs.environment import environment; environment()\n"
        "import finetune.runs.metrics, finetune.runs.units\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'matplotlib', 'numpy', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    begun = time.monotonic()
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "[]\n"
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.count(0), "0"),
        (units.count(9_999), "9,999"),
        (units.count(12_345), "12.3K"),
        (units.count(999_949), "1.00M"),
        (units.count(999_499), "999K"),
        (units.count(134_515_008), "135M"),
        (units.count(8_030_261_248), "8.03B"),
        (units.size(0), "0 B"),
        (units.size(1023), "1.00 KiB"),
        (units.size(3 * 2**30), "3.00 GiB"),
        (units.size(71.5 * 2**30), "71.5 GiB"),
        (units.size(2**50), "1024 TiB"),
        (units.duration(0.42), "0.42 s"),
        (units.duration(4.24), "4.2 s"),
        (units.duration(59.6), "1 min 00 s"),
        (units.duration(151), "2 min 31 s"),
        (units.duration(3_900), "1 h 05 min"),
        (units.duration(90_000 + 86_400), "2 d 1 h"),
        (units.duration(math.inf), "-"),
        (units.share(1_210_000, 134_515_008), "0.9 %"),
        (units.share(5, 5), "100 %"),
        (units.share(0, 5), "0 %"),
        (units.share(0, 0), "-"),
        (units.learning_rate(2e-4), "2e-4"),
        (units.learning_rate(1.534e-05), "1.53e-5"),
        (units.learning_rate(0), "0"),
        (units.loss(1.23456), "1.2346"),
    ],
)
def test_numbers_are_shown_as_people_read_them(shown: str, expected: str) -> None:
    assert shown == expected
