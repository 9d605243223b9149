"""The record: what is written is what is read, whatever happened in between."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from records import START, ended, evaluated, trained
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetune import SFT, FinetuneError, Run, TrainingFailure
from finetune.runs import units
from finetune.runs.environment import environment, without_secrets
from finetune.runs.metrics import Metrics, Record, Saved, Trained, read_history
from finetune.runs.trackers import open_trackers, track


def test_every_kind_of_record_is_read_back_as_it_was_written(tmp_path):
    run = Run(tmp_path / "run")
    records: list[Record] = [
        START,
        trained(1),
        evaluated(1, 2.25, best=True),
        Saved(step=1, seconds=0.25, bytes=4_096),
        ended(1, reason="early stop"),
    ]
    heard: list[Record] = []
    metrics = Metrics(run, is_main=True, listeners=(heard.append,))
    for record in records:
        metrics.write(record)
        assert len(run.metrics.read_text().splitlines()) == len(heard)  # on disk at once
    history = read_history(run)
    assert heard == records
    found = (history.starts, history.trained, history.evaluated, history.saved, history.ends)
    assert [each for kind in found for each in kind] == records
    assert history.end == records[-1]
    kinds = [json.loads(line)["kind"] for line in run.metrics.read_text().splitlines()]
    assert kinds == ["start", "train", "eval", "save", "end"]


def test_only_the_main_process_writes_and_notifies(tmp_path):
    heard: list[Record] = []
    metrics = Metrics(Run(tmp_path / "run"), is_main=False, listeners=(heard.append,))
    metrics.resume_at(0)
    metrics.write(START)
    assert (heard, list(tmp_path.iterdir())) == ([], [])


def test_a_loss_that_is_not_finite_is_strict_json(tmp_path):
    run = Run(tmp_path)
    Metrics(run, is_main=True).write(trained(1, loss=math.nan))
    assert json.loads(run.metrics.read_text(), parse_constant=pytest.fail)["loss"] is None
    assert math.isnan(read_history(run).trained[0].loss)


def test_resuming_leaves_exactly_the_records_up_to_the_step(tmp_path):
    run = Run(tmp_path)
    metrics = Metrics(run, is_main=True)
    kept = [START, trained(1), trained(2), Saved(step=2, seconds=0.1, bytes=9)]
    for record in [*kept, trained(3), evaluated(3, 1, best=True)]:
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


@pytest.mark.parametrize(("cut", "left"), [(1, [1, 2, 3]), (20, [1, 2]), (200, [1, 2])])
def test_resuming_drops_a_torn_last_line(tmp_path, cut, left):
    run = Run(tmp_path)
    metrics = Metrics(run, is_main=True)
    for step in (1, 2, 3):
        metrics.write(trained(step))
    run.metrics.write_bytes(run.metrics.read_bytes()[:-cut])
    assert [record.step for record in read_history(run).trained] == left
    metrics.resume_at(3)
    metrics.write(trained(4))
    assert [record.step for record in read_history(run).trained] == [1, 2, 4]


def test_a_full_disk_and_a_file_in_the_way_are_training_failures_that_name_the_file(tmp_path):
    run = Run(tmp_path)
    run.metrics.symlink_to("/dev/full")  # every write to it fails with ENOSPC
    with pytest.raises(TrainingFailure, match=r"metrics\.jsonl: .*No space left on device"):
        Metrics(run, is_main=True).write(START)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingFailure, match=r"file/run/metrics\.jsonl"):
        Metrics(Run(tmp_path / "file" / "run"), is_main=True).write(START)


def test_a_record_that_cannot_be_read_is_an_error_that_names_it(tmp_path):
    run = Run(tmp_path)
    records = [
        ({"kind": "danced", "step": 1}, r"metrics\.jsonl: a record of kind 'danced'"),
        (
            {"kind": "save", "step": 1, "time": 0, "seconds": 1, "size": 1},
            r"'save' record of step 1 .*: bytes \(.*, size \(",
        ),
    ]
    whole = {"kind": "train"} | dataclasses.asdict(trained(1))
    counts = [(whole | {name: -1}, rf": {name} \(.*greater") for name in ("step", "memory")]
    for record, told in records + counts:
        run.metrics.write_text(json.dumps(record) + "\n")
        with pytest.raises(FinetuneError, match=told):
            read_history(run)


def test_the_best_evaluation_is_the_first_lowest_finite_one(tmp_path):
    metrics = Metrics(Run(tmp_path), is_main=True)
    for step, loss in ((1, 3.0), (2, math.nan), (3, 1.5), (4, 1.5), (5, 2.0)):
        metrics.write(evaluated(step, loss, best=False))
    best = read_history(Run(tmp_path)).best
    assert best.step == 3


def test_tensorboard_gets_the_same_numbers(tmp_path):
    run = Run(tmp_path / "run")
    accelerator = Accelerator(cpu=True)
    recipe = {"optim": {"lr": 2e-4, "betas": [0.9, 0.999]}, "adapter": None, "data": [{"a": 1}]}
    open_trackers(accelerator, run, recipe | {"trackers": ["tensorboard"]})
    metrics = Metrics(run, is_main=True, listeners=(track(accelerator),))
    metrics.write(START)
    for step in (1, 2, 3):
        metrics.write(trained(step, loss=4.0 / step))
    metrics.write(evaluated(3, 1.25, best=True))
    for tracker in accelerator.trackers:
        tracker.finish()
    events = EventAccumulator(str(run.root / "finetune")).Reload()
    numbers = "loss grad_norm lr trained_tokens real_tokens slots seconds tokens_per_second memory"
    assert set(events.Tags()["scalars"]) == {
        *(f"train/{name}" for name in (*numbers.split(), "epoch", "data_seconds", "mfu")),
        *(f"eval/{name}" for name in ("loss", "tokens", "seconds")),
    }
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 4.0), (2, 2.0), (3, pytest.approx(4 / 3, rel=1e-7))]  # fp32 in the file
    assert [(e.step, e.value) for e in events.Scalars("eval/loss")] == [(3, 1.25)]


class Numbers(GeneralTracker):
    """A tracker of a user's own."""

    name, requires_logging_directory = "numbers", False
    made: ClassVar[list["Numbers"]] = []

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.run_name, self.config, self.logged = run_name, dict[str, Any](), list[Any]()
        self.made.append(self)

    @property
    def tracker(self) -> list[Any]:
        return self.logged

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        self.logged.append((step, values.get("train/loss")))


def test_a_tracker_by_its_path_gets_the_same_numbers(tmp_path):
    accelerator, run = Accelerator(cpu=True), Run(tmp_path / "run")
    recipe = {"seed": 3, "trackers": [f"{__name__}:Numbers", "tensorboard"]}
    open_trackers(accelerator, run, recipe)
    metrics = Metrics(run, is_main=True, listeners=(track(accelerator),))
    for step in (1, 2):
        metrics.write(trained(step, loss=4.0 / step))
    (own,) = Numbers.made
    assert (own.run_name, own.config["seed"], own.logged) == ("run", 3, [(1, 4.0), (2, 2.0)])
    for name, told in (
        (f"{__name__}:Run", "expected a class of Accelerate's GeneralTracker"),
        (f"{__name__}:Nubmers", f"'{__name__}:Nubmers'.*did you mean 'Numbers'"),
    ):
        with pytest.raises(FinetuneError, match=f"trackers: .*{told}"):
            open_trackers(accelerator, run, recipe | {"trackers": [name]})
    with pytest.raises(FinetuneError, match=r"trackers.*did you mean 'wandb'"):
        SFT(trackers=("wandbb",))


def test_the_environment_holds_versions_and_command_but_no_environment_variable(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_fromTheEnvironment123")
    monkeypatch.setattr(sys, "argv", ["finetune", "train", "--hf-token", "hf_onTheCommandLine123"])
    found = environment(devices=["NVIDIA H100"])
    assert found["versions"]["accelerate"] == __import__("accelerate").__version__
    assert found["python"] == sys.version.split()[0]
    assert found["devices"] == ["NVIDIA H100"]
    assert found["command"] == ["finetune", "train", "--hf-token", "***"]
    assert "hf_" not in json.dumps(found)
    assert environment()["devices"][0].endswith("cores)")


def test_secrets_on_the_command_line_are_hidden():
    for typed, recorded in (
        (["train", "x", "optim.lr=1e-4"], ["train", "x", "optim.lr=1e-4"]),
        (["--max_tokens", "5", "next"], ["--max_tokens", "5", "next"]),
        (["model.tokenizer=gpt2"], ["model.tokenizer=gpt2"]),
        (["--token=abc", "x"], ["--token=***", "x"]),
        (["--api-key", "abc", "x"], ["--api-key", "***", "x"]),
        (["https://u:hf_abcdefghijklmnopqrst@h"], ["https://u:***@h"]),
        (["tracker.password=abc"], ["tracker.password=***"]),
    ):
        assert without_secrets(typed) == recorded


SHOWN: dict[Callable[..., str], dict[Any, str]] = {
    units.count: {
        **{0: "0", 9_999: "9,999", 12_345: "12.3K", 999_949: "1.00M", 999_499: "999K"},
        **{134_515_008: "135M", 8_030_261_248: "8.03B"},
    },
    units.size: {
        **{0: "0 B", 1023: "1.00 KiB", 3 * 2**30: "3.00 GiB"},
        **{71.5 * 2**30: "71.5 GiB", 2**50: "1024 TiB"},
    },
    units.duration: {
        **{0.42: "0.42 s", 4.24: "4.2 s", 59.6: "1 min 00 s", 151: "2 min 31 s"},
        **{3_900: "1 h 05 min", 90_000 + 86_400: "2 d 1 h", math.inf: "-"},
    },
    lambda both: units.share(*both): {
        **{(1_210_000, 134_515_008): "0.9 %", (5, 5): "100 %", (0, 5): "0 %", (0, 0): "-"}
    },
    units.learning_rate: {2e-4: "2e-4", 1.534e-05: "1.53e-5", 0: "0"},
    units.loss: {1.23456: "1.2346"},
}


def test_numbers_are_shown_as_people_read_them():
    for show, numbers in SHOWN.items():
        assert {number: show(number) for number in numbers} == numbers
