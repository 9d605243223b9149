"""Write checkpoints while training waits, or in a background thread.

In the background, training waits only for a copy of the state to host memory, which on a GPU is
page-locked and kept between checkpoints. At most one checkpoint is written at a time; the next one
waits for it. The threads of the ranks use their own
process group, so that their collectives never mix with those of the training.
"""

import dataclasses
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from finetune.checkpoints import checkpoint
from finetune.checkpoints.checkpoint import Group, Progress
from finetune.checkpoints.staging import Staging
from finetune.data.images.processor import ImageProcessor
from finetune.distributed.base import Engine
from finetune.errors import TrainingFailure
from finetune.recipe import Saving
from finetune.runs.metrics import Saved
from finetune.runs.run import Run, write_json


class Saver:
    """Writes the checkpoints of a run; its methods are collective."""

    def __init__(
        self,
        engine: Engine,
        run: Run,
        tokenizer: PreTrainedTokenizerBase,
        saving: Saving,
        images: ImageProcessor | None = None,
    ) -> None:
        self._engine, self._run, self._tokenizer = engine, run, tokenizer
        self._saving, self._images = saving, images
        is_gpu = engine.device.type == "cuda"
        self._staging = Staging(engine.device, keep=saving.background and is_gpu)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._written: list[Saved] = []
        self.last = 0
        """Step of the newest checkpoint that was begun; 0 if there is none."""
        self.slowest = 0.0
        """Seconds of the slowest checkpoint so far, written in the background or not."""
        self._group: Group | None = None
        if saving.background and engine.world > 1:
            self._group = torch.distributed.new_group(backend="gloo")

    def save(self, progress: Progress, best: bool) -> None:
        """Write a checkpoint; if it is the best so far, record it in `best.json`.

        Raises:
            TrainingFailure: this checkpoint or the previous one could not be written.
        """
        self.finish()
        self.last = progress.step
        started = time.perf_counter()
        progress = dataclasses.replace(progress, scale=self._engine.scale.state())
        taken = checkpoint.take(self._engine, self._staging)
        if not self._saving.background:
            self._write(taken, progress, best, started, None)
            return
        waited = time.perf_counter() - started
        arguments = (taken, progress, best, started, waited)
        self._thread = threading.Thread(target=self._write_apart, args=arguments, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; raises its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """`finish`, and free the memory for copies."""
        self.finish()
        self._staging.release()

    def written(self) -> list[Saved]:
        """Records of the checkpoints completed since the last call."""
        done, self._written = self._written, []
        return done

    def _write_apart(
        self, taken: checkpoint.State, progress: Progress, best: bool, started: float, waited: float
    ) -> None:
        try:
            self._write(taken, progress, best, started, waited)
        except Exception as error:  # `finish` raises it, so that no failure goes unnoticed
            self._error = error

    def _write(
        self,
        taken: checkpoint.State,
        progress: Progress,
        best: bool,
        started: float,
        waited: float | None,
    ) -> None:
        size = checkpoint.write(
            self._engine, self._run, progress, self._tokenizer, taken, self._images, self._group
        )
        tidy(self._engine, self._run, progress, best, self._saving.keep, self._group)
        took = time.perf_counter() - started
        self.slowest = max(self.slowest, took)
        seconds = took if waited is None else waited
        self._written.append(Saved(step=progress.step, seconds=seconds, bytes=size))


def tidy(
    engine: Engine, run: Run, progress: Progress, best: bool, keep: int, group: Group | None = None
) -> None:
    """Update `best.json` if a checkpoint is the best, and remove old ones; collective.

    Keeps the newest `keep` checkpoints and the best.

    Raises:
        TrainingFailure: on every rank, if a file could not be written or removed.
    """

    def work() -> None:
        if best:
            write_best(run, progress)
        prune(run, keep, progress.best_step)

    mine = checkpoint.attempt(work) if engine.is_main else None
    causes = checkpoint.causes_of(engine.gather(mine, group))
    if causes:
        raise TrainingFailure(
            f"{run.root}: the checkpoint of step {progress.step} is complete, but best.json could "
            f"not be written or older ones not removed ({causes}); free disk space or allow "
            "writing, and resume"
        )


def write_best(run: Run, progress: Progress) -> None:
    write_json(run.best, {"step": progress.best_step, "loss": progress.best_loss})


def restore_best(run: Run, progress: Progress) -> None:
    """Rewrite `best.json` from a checkpoint's progress, which a kill may have left behind it."""
    if progress.best_step is None:
        run.best.unlink(missing_ok=True)
    else:
        write_best(run, progress)


def prune(run: Run, keep: int, best: int | None) -> None:
    """Remove complete checkpoints beyond the newest `keep` and the best, and unfinished ones."""
    for step in run.steps()[:-keep]:
        if step != best:
            doomed = run.checkpoint(step)
            (doomed / "manifest.json").unlink()  # from here on every reader sees it as incomplete
            shutil.rmtree(doomed, ignore_errors=True)
    for partial in _unfinished(run):
        shutil.rmtree(partial, ignore_errors=True)


def _unfinished(run: Run) -> Iterator[Path]:
    yield from run.checkpoints.glob(".step-*.partial")
    for folder in run.checkpoints.glob("step-????????"):
        if not (folder / "manifest.json").exists():
            yield folder
