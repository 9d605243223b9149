"""A signal ends a run in order, a second one at once, and the same command goes on afterwards."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, environment, losses, slow, start, wait_for, warm_python, write_recipe
from faulty import Process, begin, steps_made, words_of

from finetune import FinetuneError, Run
from finetune.cli import main as cli
from finetune.verification.proofs.runs import family_of

LONG = {"max_steps": 400, "saving": {"every": 100}, "evaluation": {"every": 400}}
SHORT = {"max_steps": 24, "saving": {"every": 10}, "evaluation": {"every": 20}}


def interrupt(process: Process, number: int, run: Run, after: int = 3) -> str:
    wait_for(lambda: steps_made(run) >= after, process)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    return stdout + stderr


def interrupt_all(process: Process, number: int, run: Run, after: int = 3) -> str:
    """And every process of it has ended."""
    wait_for(lambda: steps_made(run) >= after, process)
    family = family_of(process.pid)
    told = interrupt(process, number, run, after)
    assert process.returncode == 75, told
    assert psutil.wait_procs(family, timeout=30)[1] == []
    assert run.newest() == steps_made(run)
    assert "Traceback" not in told
    return told


@pytest.mark.parametrize(
    ("backend", "number"),
    [
        ("single", signal.SIGTERM),
        slow("single", signal.SIGINT),
        ("ddp", signal.SIGTERM),
    ],
)
def test_launch_passes_a_signal_on_and_its_status_back(tiny, tmp_path, backend, number):
    """`accelerate launch` runs one process without torch's agent, and would leave it behind."""
    run = Run(tmp_path / "run")
    words = words_of(tiny, run.root, **LONG)
    words = ["launch", *words[1:], "--backend", backend, "--processes", "12"[backend != "single"]]
    warm = number == signal.SIGTERM  # whose processes are not children of those that start them
    told = interrupt_all(start(words, tmp_path, warm), number, run)
    assert told.count(f"interrupted by {signal.Signals(number).name}") == 1


@pytest.mark.slow
def test_a_signal_to_every_process_of_a_job_is_one_request(tiny, tmp_path):
    """As schedulers send it; the launcher and torch's agent pass on what they get besides."""
    run = Run(tmp_path / "run")
    process = start(words_of(tiny, run.root, "ddp", **(LONG | {"batch": {"rows": 256}})), tmp_path)
    wait_for(lambda: steps_made(run) >= 2, process)
    job = psutil.Process(process.pid)
    for each in reversed([job, *job.children(recursive=True)]):
        each.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 75, stdout + stderr
    assert run.newest() == steps_made(run)
    assert "Traceback" not in stderr


def test_a_signal_before_the_workers_listen_ends_with_75(tiny, tmp_path):
    process = begin(tiny, Run(tmp_path / "run"), "ddp", **LONG)
    wait_for(lambda: len(family_of(process.pid)) > 2, process)  # the command, and what it starts
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    assert "interrupted by SIGTERM" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("verb", ["train", "launch"])
def test_a_signal_while_libraries_load_ends_with_75(tmp_path, verb):
    process = start([verb, "quickstart", "--output", str(tmp_path / "run")], tmp_path)
    status = Path(f"/proc/{process.pid}/status")
    wait_for(lambda: handles(status.read_text(), signal.SIGTERM), process)
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75
    assert stderr == ("error: interrupted by SIGTERM before the training began: nothing to save\n")
    assert not (tmp_path / "run").exists()


def handles(status: str, number: int) -> bool:
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", status)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize(
    ("second", "ends"), [(signal.SIGHUP, (0, "saved\n")), (signal.SIGINT, (75, ""))]
)
def test_a_repeated_signal_does_not_abandon_a_save(second, ends):
    """But a second Ctrl-C of a person does."""
    program = """
import time
from finetune.process.signals import Interruption
with Interruption() as interruption:
    interruption.defer()
    print("saving", flush=True)
    while not interruption.asked:
        time.sleep(0.01)
    interruption.saving = True
    time.sleep(0.6)
    print("saved", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(second)
    told, _ = process.communicate(timeout=60)
    assert (process.returncode, told) == ends


def test_a_loop_that_is_interrupted_goes_on_to_the_end_with_the_same_losses(
    tiny, train, finetune, tmp_path
):
    resumed = Run(tmp_path / "resumed")
    straight = train("straight", **SHORT)
    words = [*words_of(tiny, resumed.root, **SHORT), "--resume", "auto"]
    for number, after in ((signal.SIGINT, 3), (signal.SIGTERM, 12)):
        told = interrupt_all(start(words, tmp_path, warm=True), number, resumed, after)
        newest, name = resumed.newest(), signal.Signals(number).name
        assert f"interrupted by {name} after step {newest} of 24" in told
        assert [record["reason"] for record in resumed.read_metrics("end")][-1] == "interrupted"
    assert (finetune(*words).status, losses(resumed)) == (0, losses(straight))


def test_a_second_signal_ends_at_once(tiny, tmp_path):
    """Even where the main thread waits in a system call of a library: here, it is stopped."""
    run = Run(tmp_path / "run")
    process = begin(tiny, run, **LONG)
    wait_for(lambda: steps_made(run) >= 3, process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert run.newest() in (None, steps_made(run))


def test_an_invalid_timeout_is_refused(capsys):
    for minutes in ("nan", "inf", "-1", "0", "soon"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", "quickstart", f"--timeout={minutes}"])
        assert ended.value.code == 2
        told = f"argument --timeout: got '{minutes}', expected minutes, such as"
        assert told in capsys.readouterr().err


def test_resuming_without_a_run_names_the_options(train, tmp_path):
    with pytest.raises(FinetuneError) as caught:
        train(resume=True)
    assert caught.value.problems == (
        f"{tmp_path / 'run'}: no run to resume; omit --resume to start one, or use "
        "--resume auto, which starts a run if there is none",
    )


@pytest.mark.slow
def test_under_accelerate_launch_a_signal_saves_too(tiny, tmp_path):
    run = Run(tmp_path / "run")
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(**LONG))
    command = [
        warm_python(), "-m", "accelerate.commands.launch", "--config_file",
        str(ROOT / "accelerate_configs/ddp.yaml"), "--num_processes", "2", "--mixed_precision",
        "no", "-m", "finetune", "train", str(recipe), "--output", str(run.root),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, env=environment(tmp_path), start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    told = interrupt(process, signal.SIGTERM, run)
    assert process.returncode != 0  # torch's agent has a status of its own for a signal
    assert run.newest() == steps_made(run)
    assert "interrupted by SIGTERM" in told


@pytest.mark.slow  # its parent process is the subject: nothing is forked
def test_a_run_of_one_process_outlives_the_shell_that_started_it(tiny, tmp_path):
    run = Run(tmp_path / "run")
    words = words_of(tiny, run.root, **SHORT)
    line = f"{sys.executable} -m finetune {' '.join(words)} >out 2>&1 & echo $!"
    started = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=environment(tmp_path), text=True, check=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    psutil.Process(int(started.stdout)).wait(timeout=300)
    assert [record["reason"] for record in run.read_metrics("end")] == ["finished"]
    assert run.newest() == 24
