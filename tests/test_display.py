"""What rank 0 prints: exact lines in a log, a bar in a terminal, nothing elsewhere."""

import contextlib
import dataclasses
import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from records import RECIPE, START, ended, evaluated, many_steps, trained, whole_run, write_run
from rich.console import Console

from finetune.process import progress
from finetune.reports.display import Display, Pace, next_commands
from finetune.runs.metrics import Record
from finetune.runs.run import Run

HERE = Path(__file__).parent


class Clock:
    """Seconds that pass only when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(
    root: Path, records: list[Record], step_seconds: float = 0.0, notes: tuple[str, ...] = ()
) -> str:
    """What a plain log holds after these records."""
    output, clock = io.StringIO(), Clock()
    console = Console(file=output, width=100, force_terminal=False)
    display = Display(Run(root), notes=notes, console=console, clock=clock)

    def tick(record: Record) -> None:
        clock.now += step_seconds if record.kind == "train" else 0.0
        display.show(record)

    write_run(root, records, listeners=(tick,))
    return output.getvalue()


def cells(lines: list[str]) -> list[list[str]]:
    """The cells of the tables among these lines."""
    return [re.split(r"\s*│\s*", line)[1:-1] for line in lines if "│" in line]


def test_the_start_says_what_will_be_trained(tmp_path):
    lines = shown(
        tmp_path / "run", [START], notes=("a [bold]note[/bold] with brackets",)
    ).splitlines()
    assert lines[0].rstrip() == "SFT of acme/tiny-llama: QLoRA (NF4), r=16"
    assert cells(lines) == [
        ["trains", "12.3K of 260K parameters (4.7 %)"],
        ["batch", "16 rows = 4 micro x 2 accumulation x 2 processes"],
        ["steps", "10, which is 2.00 passes over the data"],
        ["data", "80 rows with 5,432 trained tokens; 8 held out"],
        ["backend", "ddp, bf16, 2 processes"],
        ["run", str(tmp_path / "run")],
    ]
    assert lines[-1] == "note: a [bold]note[/bold] with brackets"


@pytest.mark.parametrize(
    ("steps", "seconds", "expected"),
    [(1_000, 0.001, [1, *range(101, 1_000, 100), 1_000]), (20, 6.0, [*range(1, 20, 2)])],
    ids=["one for each tenth", "every few seconds"],
)
def test_a_log_has_a_line_for_each_tenth_of_the_steps_or_for_a_few_slow_ones(
    tmp_path, steps, seconds, expected
):
    records = [dataclasses.replace(START, steps=1_000), *many_steps(steps)]
    lines = shown(tmp_path, records, step_seconds=seconds).splitlines()
    told = [line for line in lines if line.startswith("step ")]
    assert [int(line.split()[1].split("/")[0]) for line in told] == expected


@pytest.mark.parametrize("terminal", [False, True])
def test_long_work_says_how_far_it_is_and_short_work_nothing(terminal, monkeypatch):
    monkeypatch.setattr(progress, "REDRAWN", 0.001)
    told = io.StringIO()
    told.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", told)
    assert list(progress.counted(range(3), "writing", 3, "weights")) == [0, 1, 2]
    assert told.getvalue() == ""
    monkeypatch.setattr(progress, "QUIET", 0.0)
    with progress.progress("evaluating", 8) as count, progress.progress("losses", 8) as inner:
        count(1)
        for line in ("losses: 2 of 8 rows, ", "losses: 4 of 8 rows, ", ""):
            inner(2)
            while line not in told.getvalue():
                time.sleep(0.001)
            monkeypatch.setattr(progress, "APART", 0.001)
    lines = told.getvalue()
    assert " left" in lines
    assert lines.endswith("\r\x1b[2K" if terminal else "\n")


def test_the_end_of_an_online_run_shows_its_reward(tmp_path):
    records = [
        dataclasses.replace(record, loss=-0.0, metrics={"reward": 0.75})
        if record.kind in ("train", "eval") else record
        for record in whole_run()
    ]  # fmt: skip
    found = dict(cells(shown(tmp_path / "run", records).splitlines())[-6:])
    assert found["final reward"] == "0.7500 on the last training batch"
    assert found["best eval"] == "0.7500 at step 5"


def test_a_day_of_training_makes_a_log_that_can_be_read():
    pace = Pace(steps=43_200)
    lines = sum(pace.due(step, now=2.0 * step) for step in range(1, 43_201))
    assert lines == 302  # not 8,640, which is one every ten seconds


def test_the_lines_of_a_log_are_these(tmp_path):
    root = tmp_path / "run"
    lines = shown(root, whole_run(), step_seconds=20).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("step "))
    assert lines[begin : begin + 6] == [
        "step  1/10   10%  loss 4.0000  lr 1.8e-4  500 tokens/s  80% real  3.00 GiB",
        "step  2/10   20%  loss 2.0000  lr 1.6e-4  500 tokens/s  80% real  3.00 GiB  16 s left",
        "step  3/10   30%  loss 1.3333  lr 1.4e-4  500 tokens/s  80% real  3.00 GiB  14 s left",
        "step  4/10   40%  loss 1.0000  lr 1.2e-4  500 tokens/s  80% real  3.00 GiB  12 s left",
        "step  5/10   50%  loss 0.8000  lr 1e-4  500 tokens/s  80% real  3.00 GiB  10 s left",
        "eval  step 5  loss 1.2500  * best  321 tokens in 0.5 s",
    ]
    assert "saved step-00000005  4.00 KiB in 0.25 s" in lines
    assert "eval  step 10  loss 1.5000  (+0.2500)  321 tokens in 0.5 s" in lines
    assert cells(lines[begin:]) == [
        ["steps", "10 in 20 s"],
        ["final loss", "0.4000 on the last training batch"],
        ["best eval", "1.2500 at step 5"],
        ["speed", "500 tokens/s"],
        ["memory", "3.00 GiB at the peak"],
        ["run", str(root)],
    ]
    assert lines[-3:] == [
        f"  chat    finetune chat {root}",
        f"  export  finetune export {root} --to {root}-merged --merge",
        f"  report  finetune report {root}",
    ]


def test_the_next_commands_fit_the_run(tmp_path):
    run = write_run(tmp_path / "my run", [START], recipe=RECIPE | {"adapter": None})
    export = f"finetune export '{run.root}' --to '{run.root}-export'"
    assert next_commands(run, ended())[1] == ("export", export)
    left = [purpose for purpose, _ in next_commands(run, ended(5, reason="interrupted"))]
    assert left == ["resume", "report"]


def test_a_resumed_run_knows_its_earlier_evaluations(tmp_path):
    write_run(tmp_path, [START, trained(1), evaluated(1, 1.0, best=True)])
    again = dataclasses.replace(START, step=1, resumed_from=1, time=START.time + 100)
    text = shown(tmp_path, [again, trained(2), evaluated(2, 1.5, best=False), ended(2)])
    assert "resumes │ from the checkpoint of step 1" in text
    assert "eval  step 2  loss 1.5000  (+0.5000)  321 tokens" in text
    assert "best eval  │ 1.0000 at step 1 " in text


PROGRAM = (
    "import sys; from pathlib import Path; from records import whole_run, write_run\n"
    "from finetune.reports.display import Display; from finetune.runs.run import Run\n"
    "display = Display(Run(Path(sys.argv[1])))\n"
    "display.note('loading')\n"
    "write_run(Path(sys.argv[1]), whole_run(), listeners=(display.show,))"
)

COLOURS = os.environ | {
    "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}", "FORCE_COLOR": "1", "CLICOLOR": "1",
    "TERM": "xterm-256color",
}  # fmt: skip
"""The environment of a process started from a notebook, whose kernel forces colours."""


def printed(root: Path, **variables: str) -> tuple[bytes, bytes]:
    command = [sys.executable, "-c", PROGRAM, str(root)]
    done = subprocess.run(command, capture_output=True, check=True, env=COLOURS | variables)
    return done.stdout, done.stderr


def test_a_notebooks_subprocess_prints_no_control_characters(tmp_path):
    stdout, stderr = printed(tmp_path / "run")
    assert set(range(32)) & set(stdout) == {ord("\n")}
    assert b"step 10/10  100%  loss 0.4000" in stdout
    assert stderr == b""


def test_a_log_that_cannot_hold_every_character_is_still_written(tmp_path):
    stdout, _ = printed(tmp_path / "läuft", PYTHONIOENCODING="ascii")
    assert b"| batch   | 16 rows = 4 micro x 2 accumulation x 2 processes" in stdout
    assert stdout.decode("ascii").endswith("/l?uft'\n")


def test_only_the_main_process_prints(tmp_path, capfd):
    display = Display(Run(tmp_path / "run"), is_main=False)
    display.note("loading")
    write_run(tmp_path / "run", whole_run(), listeners=(display.show,))
    assert capfd.readouterr() == ("", "")


def plain(text: str) -> str:
    """A terminal's text without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    environment = COLOURS | {"COLUMNS": "100", "LINES": "40"}
    child = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(ours, 65_536):
            seen += piece
    os.close(ours)
    assert child.wait(timeout=60) == 0
    text = plain(seen.decode())
    assert "10/10" in text
    assert "loss 0.4000" in text
    assert "step 10/10" not in text  # lines about steps belong to a log
    assert b"\x1b[?25h" in seen  # the cursor is shown again
    assert text.rstrip().splitlines()[-1].strip() == f"report  finetune report {tmp_path / 'run'}"


def bar_of(root: Path, records: list[Record], **console: Any) -> str:
    """What a terminal gets of these records, whose display is closed twice."""
    output = io.StringIO()
    terminal = Console(file=output, force_terminal=True, **console)
    display = Display(Run(root), console=terminal, clock=Clock())
    write_run(root, records, listeners=(display.show,))
    display.close()
    display.close()
    return output.getvalue()


@pytest.mark.parametrize("width", [40, 76, 80, 200])
def test_the_bar_fits_on_one_line(tmp_path, width):
    records = [START, *(trained(step) for step in range(1, 11))]
    text = plain(bar_of(tmp_path, records, width=width, height=40, color_system=None))
    bar = [line for line in re.split(r"[\r\n]", text) if "10/10" in line]
    assert len(set(bar)) == 1  # drawn by the last step, and once more when it is taken away
    assert len(bar[0].rstrip()) <= width
    assert "loss 0.4000" in bar[0]


def test_a_failure_takes_the_bar_away_first(tmp_path):
    erased = "\x1b[2K"  # the bar's line
    assert bar_of(tmp_path, [START, trained(1)], width=80).endswith(erased)
