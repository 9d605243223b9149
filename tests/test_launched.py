"""A launched process knows the file that its backend comes from, however the launch was spelt."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, environment

from finetune.errors import FinetuneError
from finetune.process import error_report, rendezvous


@pytest.mark.parametrize(
    "command",
    [
        ["python", "/bin/accelerate", "launch", "--config_file", "a-b.yaml"],
        ["python", "/bin/accelerate", "launch", "--config-file=a-b.yaml"],
        ["python", "/bin/accelerate-launch", "--config-file", "a-b.yaml"],
        ["python", "-m", "accelerate.commands.launch", "--config_file", "a-b.yaml"],
        ["python", "/lib/accelerate/commands/launch.py", "--config_file=a-b.yaml"],
        [
            "python",
            "-X",
            "dev",
            "-W",
            "ignore",
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            "a-b.yaml",
        ],
    ],
)
def test_every_spelling_of_accelerate_launch_is_known(command):
    given = rendezvous.launch_words([*command, "--mixed-precision", "no", "-m", "finetune"])
    read = ["--config_file", "a-b.yaml", "--mixed_precision", "no", "-m", "finetune"]
    assert given == read


def test_other_commands_are_not_accelerate_launch():
    words = ["/accelerate/bin/finetune", "launch", "quickstart", "--backend", "ddp"]
    assert rendezvous.launch_words(["/accelerate/bin/python", *words]) is None
    assert rendezvous.launch_words(["bash", "-c", "accelerate launch x"]) is None


def test_settings_dropped_by_accelerate_are_reported(tmp_path):
    """The same file, its launch spelt as Accelerate's documents do not: nothing is trained."""
    path = tmp_path / "mine.yaml"
    fsdp = yaml.safe_load((ROOT / "accelerate_configs/fsdp_shard_grad_op.yaml").read_text())
    fsdp["fsdp_config"]["fsdp_reshard_after_forwrd"] = fsdp["fsdp_config"].pop(
        "fsdp_reshard_after_forward"
    )
    path.write_text(yaml.safe_dump(fsdp))
    launched = [
        sys.executable, "-m", "accelerate.commands.launch", "--config-file", str(path),
        "-m", "finetune", "train", "quickstart",
    ]  # fmt: skip
    done = run(launched, environment(tmp_path), tmp_path)
    assert done.returncode != 0
    told = f"error: {path}: fsdp_config.fsdp_reshard_after_forwrd: unknown key; did you mean "
    assert told in done.stderr


LAUNCHED = [
    sys.executable, "-m", "accelerate.commands.launch", "--config_file",
    str(ROOT / "accelerate_configs/ddp.yaml"), "-m", "finetune", "train", "quikstart",
]  # fmt: skip


def run(
    command: list[str], environment: dict[str, str], folder: Path
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )


def late(rank: int, folder: Path) -> dict[str, str]:
    """An environment in which one rank starts three seconds after the others."""
    (folder / "sitecustomize.py").write_text(
        f"import os, time\ntime.sleep(3 * (os.environ.get('RANK') == '{rank}'))\n"
    )
    given = environment(folder)
    return given | {"PYTHONPATH": os.pathsep.join([str(folder), given.get("PYTHONPATH", "")])}


@pytest.mark.parametrize("slow", [0, 1])
def test_a_mistake_is_reported_once_whichever_rank_is_faster(slow, tmp_path):
    """torch's agent ends the job with its first process, which may be one that does not speak."""
    done = run(LAUNCHED, late(slow, tmp_path), tmp_path)
    assert done.returncode != 0
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
