"""A signal ends a run in order, a second one at once, and the same command goes on afterwards."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, Finetune, Tiny, environment, start, wait_for, write_recipe
from test_backends import losses

from finetune.runs.run import Run

LONG = {"max_steps": 400, "saving": {"every": 100}, "evaluation": {"every": 400}}
SHORT = {"max_steps": 20, "saving": {"every": 10}, "evaluation": {"every": 20}}


def words_of(
    tiny: Tiny,
    place: Path,
    backend: str = "single",
    precision: str = "fp32",
    **sections: object,
) -> list[str]:
    recipe = write_recipe(place.with_suffix(".json"), tiny.fields(**sections))
    common = ["--precision", precision, "--output", str(place)]
    if backend == "single":
        return ["train", str(recipe), *common]
    return ["launch", str(recipe), "--backend", backend, "--processes", "2", *common]


def steps_made(run: Run) -> int:
    return sum(1 for _ in run.read_metrics("train"))


def interrupt(process: "subprocess.Popen[str]", number: int, run: Run, after: int = 3) -> str:
    wait_for(lambda: steps_made(run) >= after, process)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    return stdout + stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_with_status_75(tiny: Tiny, tmp_path: Path, number: int) -> None:
    run = Run(tmp_path / "run")
    process = start(words_of(tiny, run.root, **LONG), tmp_path)
    told = interrupt(process, number, run)
    assert process.returncode == 75, told
    newest = run.newest()
    assert newest == steps_made(run) < 100
    assert f"interrupted by {signal.Signals(number).name} after step {newest} of 400" in told
    assert "Traceback" not in told
    assert [record["reason"] for record in run.read_metrics("end")] == ["interrupted"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_launch_of_one_process_passes_a_signal_on_too(
    tiny: Tiny, tmp_path: Path, number: int
) -> None:
    """`accelerate launch` runs it without torch's agent, and by itself would leave it behind."""
    run = Run(tmp_path / "run")
    words = ["launch", *words_of(tiny, run.root, **LONG)[1:], "--backend", "single"]
    process = start(words, tmp_path)
    wait_for(lambda: steps_made(run) >= 3, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    told = interrupt(process, number, run)
    assert process.returncode == 75, told
    assert run.newest() == steps_made(run)
    assert "Traceback" not in told
    assert told.count(f"interrupted by {signal.Signals(number).name} after step") == 1
    assert not [worker for worker in workers if worker.is_running()]


@pytest.mark.slow
def test_a_signal_to_every_process_of_a_job_is_one_request(tiny: Tiny, tmp_path: Path) -> None:
    """As schedulers send it; the launcher and torch's agent pass on what they get besides."""
    run = Run(tmp_path / "run")
    slow = LONG | {"batch": {"rows": 256}}
    process = start(words_of(tiny, run.root, "ddp", **slow), tmp_path)
    wait_for(lambda: steps_made(run) >= 2, process)
    job = psutil.Process(process.pid)
    for each in reversed([job, *job.children(recursive=True)]):
        each.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 75, stdout + stderr
    assert run.newest() == steps_made(run)
    assert "Traceback" not in stderr


def test_a_signal_before_the_workers_listen_ends_with_75(tiny: Tiny, tmp_path: Path) -> None:
    process = start(words_of(tiny, tmp_path / "run", "ddp", **LONG), tmp_path)
    job = psutil.Process(process.pid)
    wait_for(lambda: bool(job.children()), process)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    assert "interrupted by SIGTERM" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    "backend",
    [
        "ddp",
        pytest.param("fsdp_full_shard", marks=pytest.mark.slow),
        pytest.param("zero2", marks=pytest.mark.slow),
    ],
)
def test_launch_passes_a_signal_on_and_its_status_back(
    tiny: Tiny, finetune: Finetune, tmp_path: Path, backend: str
) -> None:
    run = Run(tmp_path / "run")
    words = words_of(tiny, run.root, backend, **LONG)
    process = start(words, tmp_path)
    wait_for(lambda: steps_made(run) >= 3, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    told = interrupt(process, signal.SIGTERM, run)
    assert process.returncode == 75, told
    assert run.newest() == steps_made(run)
    assert "Traceback" not in told
    assert told.count("interrupted by SIGTERM") == 1
    assert not [worker for worker in workers if worker.is_running()]


def test_a_schedulers_loop_goes_on_to_the_end_with_the_same_losses(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    straight, resumed = Run(tmp_path / "straight"), Run(tmp_path / "resumed")
    long = SHORT | {"max_steps": 60}
    assert finetune(*words_of(tiny, straight.root, **long)).status == 0
    words = [*words_of(tiny, resumed.root, **long), "--resume", "auto"]
    statuses = []
    for after in (3, 20):
        process = start(words, tmp_path)
        interrupt(process, signal.SIGTERM, resumed, after)
        statuses.append(process.returncode)
    statuses.append(finetune(*words).status)
    assert statuses == [75, 75, 0]
    assert losses(resumed) == losses(straight)
    begun = time.monotonic()
    again = finetune(*words)
    assert (again.status, again.stdout) == (0, f"{resumed.root}: complete, nothing to resume\n")
    assert time.monotonic() - begun < 60  # no model is loaded
    assert losses(resumed) == losses(straight)


def test_a_second_signal_ends_at_once(tiny: Tiny, tmp_path: Path) -> None:
    """Even where the main thread waits in a system call of a library: here, it is stopped."""
    run = Run(tmp_path / "run")
    process = start(words_of(tiny, run.root, **LONG), tmp_path)
    wait_for(lambda: steps_made(run) >= 3, process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert run.newest() in (None, steps_made(run))


@pytest.mark.parametrize("minutes", ["nan", "inf", "-1", "0", "soon"])
def test_an_invalid_timeout_is_refused(finetune: Finetune, minutes: str) -> None:
    done = finetune("train", "quickstart", f"--timeout={minutes}")
    assert done.status == 2
    assert f"argument --timeout: got '{minutes}', expected minutes, such as" in done.stderr


def test_resuming_without_a_run_names_the_options(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    words = words_of(tiny, tmp_path / "run", **SHORT)
    done = finetune(*words, "--resume")
    assert done.status == 2
    assert done.stderr == (
        f"error: {tmp_path / 'run'}: no run to resume; omit --resume to start one, or use "
        "--resume auto, which starts a run if there is none\n"
    )


def test_under_accelerate_launch_a_signal_saves_too(tiny: Tiny, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(**LONG))
    command = [
        str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file",
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


def test_a_run_of_one_process_outlives_the_shell_that_started_it(
    tiny: Tiny, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    words = words_of(tiny, run.root, **SHORT | {"max_steps": 200})
    line = f"{sys.executable} -m finetune {' '.join(words)} >out 2>&1 & echo $!"
    started = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=environment(tmp_path), text=True, check=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    worker = psutil.Process(int(started.stdout))
    worker.wait(timeout=300)
    assert [record["reason"] for record in run.read_metrics("end")] == ["finished"]
    assert run.newest() == 200
