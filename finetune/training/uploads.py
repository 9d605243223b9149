"""Upload each best checkpoint of a run to the hub, by a process beside the training."""

import os
import shutil
import subprocess
from collections.abc import Callable

from finetune.process import interpreter
from finetune.process.rendezvous import RENDEZVOUS
from finetune.runs.run import Run

HIDDEN = {"WORLD_SIZE", *RENDEZVOUS}
"""Environment variables of the training that its uploads must not see."""


class Uploads:
    """Runs `finetune export --push` for the best checkpoint, one at a time; on rank 0 only.

    What fails is reported, and does not stop the training.
    """

    def __init__(self, run: Run, name: str | None, report: Callable[[str], None]) -> None:
        """`name` is the repository, None for no upload."""
        self.run, self.name, self.report = run, name, report
        self._child: subprocess.Popen[str] | None = None
        self._sent: int | None = None
        self._folder = run.root / "upload"

    def look(self) -> None:
        """Start an upload if there is a new best checkpoint and none is being uploaded."""
        if self.name is None or (self._child is not None and self._child.poll() is None):
            return
        self._reap()
        best = self.run.best_step()
        if best is not None and best != self._sent:
            self._start(best)

    def finish(self) -> None:
        """Upload the result: the best checkpoint, or the last one, if it is not there yet."""
        if self.name is None:
            return
        self._reap()
        result = self.run.best_step() or self.run.newest()
        if result is not None and result != self._sent:
            self._start(result)
            self._reap()

    def _start(self, step: int) -> None:
        words = ["export", str(self.run.root), "--to", str(self._folder), "--step", str(step)]
        words += ["--check-rows", "0", "--push", str(self.name)]
        seen = {name: value for name, value in os.environ.items() if name not in HIDDEN}
        self._sent = step
        self._child = subprocess.Popen(
            interpreter.python("-m", "finetune", *words),
            env=interpreter.environment(seen | {"CUDA_VISIBLE_DEVICES": ""}),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def _reap(self) -> None:
        """Wait for the upload, and report it if it failed: it is tried again with the next one."""
        if self._child is None:
            return
        _, told = self._child.communicate()
        if self._child.returncode:
            reason = told.strip().splitlines()[-1:] or [f"status {self._child.returncode}"]
            self.report(f"saving.push_to: step {self._sent} was not uploaded: {reason[0]}")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._child = None
