"""When a checkpoint is due: write it while training waits, or in a thread while it goes on.

In the background, training waits only for a copy of the state in host memory. At most one
checkpoint is being written: the next one waits for it. The thread meets the other ranks' threads in
a process group of its own, so that its collectives never mix with those of the training.
"""

import threading
import time

import torch
from transformers import PreTrainedTokenizerBase

from finetune import checkpoint
from finetune.checkpoint import Progress
from finetune.engine import Engine
from finetune.errors import FinetuneError
from finetune.recipe import Saving
from finetune.record.metrics import Saved
from finetune.run import Run, write_json


class Saver:
    """Writes the checkpoints of a run, on every rank together."""

    def __init__(
        self, engine: Engine, run: Run, tokenizer: PreTrainedTokenizerBase, saving: Saving
    ) -> None:
        self._engine, self._run, self._tokenizer = engine, run, tokenizer
        self._saving = saving
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written: list[Saved] = []
        self._group: torch.distributed.ProcessGroup | None = None
        if saving.background and engine.world > 1:
            self._group = torch.distributed.new_group(backend="gloo")

    def save(self, progress: Progress, best: bool) -> None:
        """Write a checkpoint, and say in `best.json` where it is the best so far.

        Raises:
            TrainingFailure: this or the one before it could not be written.
        """
        self.finish()
        begun = time.perf_counter()
        taken = checkpoint.take(self._engine)
        if not self._saving.background:
            self._write(taken, progress, best, begun, None)
            return
        waited = time.perf_counter() - begun
        arguments = (taken, progress, best, begun, waited)
        self._thread = threading.Thread(target=self._write_apart, args=arguments, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; raises what stopped it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def written(self) -> list[Saved]:
        """Records of the checkpoints that were completed since this was last asked."""
        done, self._written = self._written, []
        return done

    def _write_apart(
        self, taken: checkpoint.State, progress: Progress, best: bool, begun: float, waited: float
    ) -> None:
        try:
            self._write(taken, progress, best, begun, waited)
        except (FinetuneError, OSError, RuntimeError) as error:  # raised by `finish`
            self._error = error

    def _write(
        self,
        taken: checkpoint.State,
        progress: Progress,
        best: bool,
        begun: float,
        waited: float | None,
    ) -> None:
        size = checkpoint.write(
            self._engine, self._run, progress, self._tokenizer, taken, self._group
        )
        if self._engine.speaks:
            if best:
                write_json(self._run.best, {"step": progress.step, "loss": progress.best_loss})
            checkpoint.prune(self._run, self._saving.keep, progress.best_step)
        seconds = time.perf_counter() - begun if waited is None else waited
        self._written.append(Saved(step=progress.step, seconds=seconds, bytes=size))
