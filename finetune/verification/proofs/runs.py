"""Start the runs of a proof through `accelerate launch`; kill, copy and resume them."""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from finetune.backend import Precision
from finetune.checkpoints.checkpoint import progress_of
from finetune.errors import FinetuneError, TrainingFailure
from finetune.launchers.accelerate import begin
from finetune.process import warm
from finetune.runs.limits import usable_cores
from finetune.runs.run import Run, read_lines, write_json

LIMIT_SECONDS = 1800
"""Seconds for one run; a start that compiles a DeepSpeed operator takes minutes."""
SHOWN_LINES = 40
POLL_SECONDS = 0.01
KILL_TRIES = 3
SUSPEND_SECONDS = 5
"""Seconds for a suspended process to stop; one that waits for a disk may take longer."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One launch of a run."""

    recipe: Path
    backend: str
    processes: int
    precision: Precision
    run: Run
    resume: bool = False
    kill_after: int | None = None
    """End every process with SIGKILL once this step is recorded."""

    @property
    def killed_record(self) -> Path:
        """Copy of the metrics file when the run was killed."""
        return self.run.root / "killed.jsonl"


class Launches:
    """The running launches, in their own sessions, so that terminal signals do not reach them."""

    def __init__(self, jobs: int = 1) -> None:
        self.jobs = jobs
        """Concurrent launches; the machine's cores are divided among their processes."""
        self.closed = False
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []
        self._warm: warm.Warm | None = None

    def begin(self, trial: Trial, log: Path) -> subprocess.Popen[bytes]:
        """Start a launch; raises TrainingFailure after `end_all` was called."""
        with self._lock:
            if self.closed:
                raise TrainingFailure("not started: the proof was interrupted")
            threads = max(1, usable_cores() // (trial.processes * self.jobs))
            process = begin(_words(trial), log, threads, self._python())
            self._running = [each for each in self._running if each.poll() is None]
            self._running.append(process)
            return process

    def _python(self) -> str:
        """A warm interpreter if available, because imports dominate a short launch."""
        if self._warm is None and warm.available():
            self._warm = warm.Warm(warm.TRAINING)
        return sys.executable if self._warm is None else self._warm.python

    def close(self) -> None:
        """Refuse further launches."""
        self.closed = True
        if self._warm is not None:
            self._warm.close()

    def end_all(self) -> None:
        """Kill all launches with their child processes, and refuse further ones."""
        with self._lock:
            self.closed = True
            end(self._suspended())

    def _suspended(self) -> list[psutil.Process]:
        """All processes of the launches, suspended, so that none starts another one."""
        found: set[psutil.Process] = set()
        until = time.monotonic() + SUSPEND_SECONDS
        while True:
            running = [each.pid for each in self._running if each.poll() is None]
            now = {each for pid in running for each in family_of(pid)}
            now |= set(self._warm.family() if self._warm is not None else [])
            for process in now - found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            if now <= found and (all(map(_is_still, found)) or time.monotonic() > until):
                return list(found)
            found |= now


def carry_out(trial: Trial, log: Path, launches: Launches) -> None:
    """Run a trial to its end or until it is killed.

    Raises:
        TrainingFailure: the run failed; with the last lines of its output.
    """
    for _ in range(KILL_TRIES if trial.kill_after is not None else 1):
        process = launches.begin(trial, log)
        try:
            if trial.kill_after is None:
                if process.wait(LIMIT_SECONDS):
                    raise TrainingFailure(_last_words(process.returncode, log))
                return
            if _killed(process, trial, trial.kill_after, log):
                return
        except subprocess.TimeoutExpired:
            raise TrainingFailure(f"no end after {LIMIT_SECONDS} s; see {log}") from None
        finally:
            if process.poll() is None:
                end(family_of(process.pid))
                process.wait()
        shutil.rmtree(trial.run.root)
    raise TrainingFailure(f"ended before it could be killed, {KILL_TRIES} times: use more --steps")


def _words(trial: Trial) -> list[str]:
    return [
        str(trial.recipe), "--backend", trial.backend, "--processes", str(trial.processes),
        "--precision", trial.precision, "--output", str(trial.run.root), "--no-plot",
        *(["--resume"] if trial.resume else []),
    ]  # fmt: skip


def _killed(process: subprocess.Popen[bytes], trial: Trial, step: int, log: Path) -> bool:
    """SIGKILL a run after a step; False if a later checkpoint was already complete."""
    _await_step(process, trial.run, 1, log)
    family = family_of(process.pid)  # looked up now: the kill itself must be quick
    _await_step(process, trial.run, step, log)
    end(family)
    process.wait()
    newest = trial.run.newest()
    if newest is None or newest > step:
        return False
    trial.killed_record.write_bytes(trial.run.metrics.read_bytes())
    return True


def _await_step(process: subprocess.Popen[bytes], run: Run, step: int, log: Path) -> None:
    """Wait until a step is recorded and, except for step 1, a checkpoint is complete."""
    until = time.monotonic() + LIMIT_SECONDS
    while not _has_step(run, step) or (step > 1 and run.newest() is None):
        if process.poll() is not None:
            raise TrainingFailure(_last_words(process.returncode, log))
        if time.monotonic() > until:
            raise TrainingFailure(f"step {step} not reached in {LIMIT_SECONDS} s; see {log}")
        time.sleep(POLL_SECONDS)


def _has_step(run: Run, step: int) -> bool:
    return any(record["step"] >= step for record in run.read_metrics("train"))


def family_of(pid: int) -> list[psutil.Process]:
    """A process and its descendants, which come first; torch gives each worker its own session."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (*root.children(recursive=True), root):
            with contextlib.suppress(psutil.NoSuchProcess):
                asked = warm.asked_by(process.cmdline(), process.pid)
                family += family_of(asked) if asked is not None else []
            family.append(process)
    return family


def _is_still(process: psutil.Process) -> bool:
    """Whether a process is stopped or has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return True


def end(family: list[psutil.Process]) -> None:
    """SIGKILL all processes of a family."""
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=30)


def _last_words(status: int | None, log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    messages = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if messages and status == FinetuneError.exit_status:
        return "; ".join(messages)
    # A crash: the launcher's report does not have the reason, but the lines before it do.
    return "\n".join([f"ended with status {status}; the end of {log}:", *lines[-SHOWN_LINES:]])


def copy_at_step(source: Run, target: Run, step: int) -> None:
    """Copy a run as it is left by a kill after the checkpoint of a step.

    Weights are hard-linked, because no run writes to a file of a complete checkpoint.
    """
    shutil.rmtree(target.root, ignore_errors=True)
    target.root.mkdir(parents=True)
    for file in (source.recipe, source.metrics, source.reference, source.completions):
        if file.is_file():
            shutil.copy2(file, target.root / file.name)
    for folder in (source.rollouts, source.initial_adapter):
        if folder.exists():
            shutil.copytree(folder, target.root / folder.name)
    folder = target.checkpoint(step)
    shutil.copytree(source.checkpoint(step), folder, copy_function=_link)
    progress = progress_of(folder)
    if progress.best_step == step:
        write_json(target.best, {"step": step, "loss": progress.best_loss})


def _link(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def steps_of(path: Path) -> dict[int, dict[str, float]]:
    """Optimizer steps in a metrics file by step number, without an incomplete last line."""
    return {each["step"]: each for each in read_lines(path) if each.get("kind") == "train"}
