"""A launched process knows the file that its backend comes from, however the launch was spelt."""

import re
import sys

import pytest
from conftest import accelerate_launch, run_command
from divided import write_config

from finetune.errors import FinetuneError
from finetune.process import error_report, rendezvous


@pytest.mark.parametrize(
    "command",
    [
        "/bin/accelerate launch --config_file a-b.yaml",
        "/bin/accelerate launch --config-file=a-b.yaml",
        "/bin/accelerate-launch --config-file a-b.yaml",
        "-m accelerate.commands.launch --config_file a-b.yaml",
        "/lib/accelerate/commands/launch.py --config_file=a-b.yaml",
        "-X dev -W ignore -m accelerate.commands.launch --config_file a-b.yaml",
    ],
)
def test_every_spelling_of_accelerate_launch_is_known(command):
    words = f"python {command} --mixed-precision no -m finetune".split()
    read = ["--config_file", "a-b.yaml", "--mixed_precision", "no", "-m", "finetune"]
    assert rendezvous.launch_words(words) == read


def test_other_commands_are_not_accelerate_launch():
    words = ["/accelerate/bin/finetune", "launch", "quickstart", "--backend", "ddp"]
    assert rendezvous.launch_words(["/accelerate/bin/python", *words]) is None
    assert rendezvous.launch_words(["bash", "-c", "accelerate launch x"]) is None


def test_settings_dropped_by_accelerate_are_reported(tmp_path):
    """The same file, its launch spelt as Accelerate's documents do not: nothing is trained."""
    change = ("reshard_after_forward", "reshard_after_forwrd")
    path = write_config(tmp_path / "mine.yaml", "fsdp_shard_grad_op", change)
    launched = [sys.executable, "-m", "accelerate.commands.launch", "--config-file", str(path)]
    done = run_command([*launched, "-m", "finetune", "train", "quickstart"], tmp_path)
    assert done.status != 0
    told = f"error: {path}: fsdp_config.fsdp_reshard_after_forwrd: unknown key; did you mean "
    assert told in done.stderr


LATE = """
import os, time
from finetune.cli import run
time.sleep(1 * (os.environ["RANK"] == "{rank}"))
run()
"""


@pytest.mark.parametrize("slow", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_mistake_is_reported_once_whichever_rank_is_faster(slow, tmp_path):
    """torch's agent ends the job with its first process, which may be one that does not speak."""
    script = tmp_path / "late.py"
    script.write_text(LATE.format(rank=slow))
    done = accelerate_launch("ddp", tmp_path, script, "train", "quikstart")
    assert done.status != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert len(told) == 1, done.stderr
    assert told[0].startswith("error: ")
    assert "did you mean 'quickstart'?" in told[0]
    root = done.stderr.split("Root Cause (first observed failure):")[1]
    assert re.search(r"exitcode +: 2 .*\n.*\n  traceback : " + re.escape(told[0]) + "\n", root)


def test_a_mistake_is_reported_by_the_rank_that_finds_it(monkeypatch, capsys):
    """Its machine lacks a file, say; nobody ends it while it waits."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(error_report, "SECONDS_FOR_THE_FIRST", 0)
    assert error_report.report(FinetuneError("no such file")) == FinetuneError.exit_status
    assert capsys.readouterr().err == "error [rank 1]: no such file\n"


def test_an_error_that_cannot_be_passed_to_the_launcher_is_printed(monkeypatch, capsys):
    for variable in (error_report.STATUS_FILE, error_report.AGENTS_FILE):
        monkeypatch.setenv(variable, "/proc/no-file-can-be-made-here")
    assert error_report.report(FinetuneError("first", "second")) == FinetuneError.exit_status
    assert capsys.readouterr().err == "error: first\nerror: second\n"
