"""The steps of a started run on one rank: train, evaluate, save, publish."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NoReturn

from finetune.checkpoints import checkpoint
from finetune.checkpoints.checkpoint import Progress
from finetune.checkpoints.saver import Saver
from finetune.checks.model import finite_weights
from finetune.data.stream.windows import StreamFailure
from finetune.distributed import averages
from finetune.distributed.base import Engine
from finetune.distributed.heartbeat import Heartbeat
from finetune.errors import Interrupted, TrainingFailure
from finetune.exporters.publish import describe, publish
from finetune.process.signals import Interruption
from finetune.rewards.process import RewardFailure
from finetune.runs.run import Run
from finetune.training.loop import (
    StepResult,
    TakesSteps,
    evaluate,
    feeding,
    streaming,
    train_step,
)
from finetune.training.memory_meter import peak_bytes
from finetune.training.online.vllm_server import ServerFailure
from finetune.training.optim import PLATEAU, plateau
from finetune.training.profiler import STEP, profile_of
from finetune.training.recorder import Reason
from finetune.training.run_options import Options
from finetune.training.stages import Started
from finetune.training.time_limit import TimeLimit
from finetune.training.uploads import Uploads

PEAK, SIGNALLED = "peak", "signalled"
"""Values of a rank in a step: its peak bytes so far, and whether it got a signal."""


class Training:
    """The steps of a started run on one rank: train, evaluate, save, publish.

    `Progress` is handed from step to step; nothing here changes but the run's files.
    """

    def __init__(
        self,
        engine: Engine,
        run: Run,
        options: Options,
        interruption: Interruption,
        heartbeat: Heartbeat,
        started: Started,
    ) -> None:
        self.engine, self.run, self.options = engine, run, options
        self.interruption, self.heartbeat = interruption, heartbeat
        self.recipe, self.started, self.built = engine.plan.recipe, started, started.built
        self.data, self.steps = started.data, started.inputs.steps
        self.recorder, self.rollouts = started.recorder, started.rollouts
        self.limit = TimeLimit(run, options.end_by)
        self.recorder.listeners.append(self.limit.listen)
        images = started.inputs.chat.images
        self.uploads = Uploads(
            run,
            self.recipe.saving.push_to if engine.is_main else None,
            lambda told: self.recorder.warned(self.heartbeat.step, told),
        )
        self.saver = Saver(engine, run, self.built.tokenizer, self.recipe.saving, images)

    def train(self) -> None:
        """Take all steps that are left, and write the result."""
        built, progress = self.built, self.built.progress
        left, notes = self.steps - progress.step, list(built.notes)
        if self.options.profile and left <= STEP:
            notes.append(
                f"--profile has no effect: it traces step {STEP + 1} after a start, and {left} "
                "remain"
            )
        self.recorder.open(
            progress, self.started.inputs.resumed, built.parameters, notes, built.padding,
            built.prompts.line(built.padding),
        )  # fmt: skip
        try:
            # From here on a signal ends the run after a step and its checkpoint, not at once.
            self.interruption.defer()
            with self._feed() as feed:
                progress, reason, peak = self._take_steps(feed, progress)
            self._finish_saving()
            self._end(progress, reason, peak)
        finally:
            self.recorder.close()

    def _feed(self) -> contextlib.AbstractContextManager[TakesSteps]:
        if self.rollouts is not None:
            return contextlib.closing(self.rollouts)
        data, pad_id, stream = self.data.train, self.built.pad_id, self.started.inputs.stream
        if stream is not None:
            return streaming(self.engine, stream, data, pad_id, self.steps)
        return feeding(self.engine, data, pad_id, self.steps)

    def _take_steps(self, feed: TakesSteps, progress: Progress) -> tuple[Progress, Reason, int]:
        """Train to the last step or until patience runs out; returns why it ended, and the peak."""
        # A resumed run may have no step left, and its record still states a peak.
        (peak,) = self.engine.largest([peak_bytes(self.engine.device)])
        progress = self._make_up_evaluation(progress)
        first, stop = progress.step, self._patience_is_over(progress)
        folder = self.run.profile if self.options.profile else None
        profile = profile_of(self.engine, folder, self.recorder.forecast)
        meter, high = self.started.meter, 0
        while progress.step < self.steps and not stop:
            step = progress.step
            self.heartbeat.step = step + 1
            # The second step of a process is the first to begin with optimizer moments in memory.
            counted = step == min(first + 1, self.steps - 1)
            measuring = (
                meter.measuring(self.engine.model, self.built.reference) if counted else None
            )
            with profile.of_step(step - first):
                result = self.take_step(feed, progress, measuring)
            peak = int(result.noticed[PEAK])
            state = None if result.taken is None else result.taken.then
            progress = dataclasses.replace(progress, step=step + 1, stream=state)
            # Before a checkpoint of the step can exist: a saved step always has its record.
            progress = self._record(progress, result, peak)
            high = high + 1 if self._is_high(result.loss) else 0
            if high == self.recipe.optim.max_loss_steps:
                self._end_diverged(progress, result.loss)  # before a checkpoint of these weights
            if counted:
                self.recorder.memory(step + 1, result, meter.peak)
            if step == first:
                self.recorder.realised(self.built.parameters, self.built.stored)
                self.recorder.compiled()
            # Before saving, so that a checkpoint contains the result of its own evaluation.
            progress, better = self._evaluate_if_due(progress)
            stop = self._patience_is_over(progress)
            # A maximum over ranks: all stop after the same step, whichever of them got the signal.
            interrupted, done = bool(result.noticed[SIGNALLED]), stop or step + 1 == self.steps
            due = self._due(progress, self.started.inputs.saving_every)
            self.interruption.saving = interrupted  # from here to the end: nothing but to save
            if better or done or interrupted or due:
                self.saver.save(progress, better)
            self.recorder.saved(self.saver.written())
            self.uploads.look()
            if interrupted and not done:
                self._finish_saving()
                self._end_interrupted(progress, peak)
        return progress, "early stop" if stop else "finished", peak

    def take_step(
        self,
        feed: TakesSteps,
        progress: Progress,
        measuring: contextlib.AbstractContextManager[None] | None,
    ) -> StepResult:
        """Take the step after `progress`."""
        peak = None if progress.plateau is None else progress.plateau["lr"]
        with self._saving_if_sampling_fails(progress):
            return train_step(
                self.engine, feed, progress.step, self.steps, measuring, self._local_values, peak
            )

    @contextlib.contextmanager
    def _saving_if_sampling_fails(self, progress: Progress) -> Iterator[None]:
        """Save the progress before the failure of a reward, a sampling server or a stream."""
        try:
            yield
        except (RewardFailure, ServerFailure, StreamFailure) as error:
            step = progress.step
            if step > self.saver.last:
                self.saver.save(progress, False)
            self._finish_saving()
            then = f"continue with --resume: step {step} is saved"
            if not step:
                then = "start again: no step is finished, and nothing is saved"
            raise type(error)(*(f"{problem}; then {then}" for problem in error.problems)) from None

    def _local_values(self) -> dict[str, int]:
        if self.engine.is_main and self.limit.reached(self.saver.slowest):
            self.interruption.request("the time limit")
        return {PEAK: peak_bytes(self.engine.device), SIGNALLED: int(self.interruption.asked)}

    def _record(self, progress: Progress, result: StepResult, peak: int) -> Progress:
        """Record a step, taken or skipped; returns the progress after it."""
        for audit in [] if result.taken is None else result.taken.audits:
            self.recorder.counted(*audit)
        if result.suspects is None:
            self.recorder.step(progress, result, peak)
        else:
            if not progress.skipped:
                # At the first skipped step only: a skipped step leaves the weights as they are.
                finite_weights(self.engine)
            progress = dataclasses.replace(progress, skipped=progress.skipped + 1)
            self.recorder.skipped(progress, result, result.suspects)
        self._warn(progress)
        return progress

    def _warn(self, progress: Progress) -> None:
        if self.rollouts is not None:
            for warning in self.rollouts.warnings:
                self.recorder.warned(progress.step, warning)
            self.rollouts.warnings.clear()

    def _due(self, progress: Progress, every: int | None) -> bool:
        return every is not None and progress.step % every == 0

    def _patience_is_over(self, progress: Progress) -> bool:
        patience = self.recipe.evaluation.patience
        return patience is not None and progress.stale >= patience

    def _evaluate_if_due(self, progress: Progress) -> tuple[Progress, bool]:
        """Evaluate if due; returns the progress, and whether the result is the best so far."""
        chosen, step = self.recipe.evaluation, progress.step
        due = step == self.steps or self._due(progress, self.started.inputs.evaluation_every)
        if not due or not len(self.data.eval):
            return progress, False
        with self._saving_if_sampling_fails(progress), averages.in_place(self.engine):
            if self.rollouts is None:
                result = evaluate(self.engine, self.data.eval, self.built.pad_id)
            else:
                result = self.rollouts.evaluate(self.data.eval)
            if self.started.answering is not None:
                result = result.with_metrics(self.started.answering.measure(self.engine))
        self._warn(progress)
        judged, best = result.judged_by(chosen.best), progress.best_loss
        better = math.isfinite(judged) and (best is None or judged < best)
        self.recorder.evaluated(step, result, better)
        if self.recipe.optim.schedule == PLATEAU:
            state, optim, peak = progress.plateau, self.recipe.optim, self.engine.plan.lr
            progress = dataclasses.replace(
                progress, plateau=plateau(state, result.loss, optim, peak)
            )
        if better:
            now = dataclasses.replace(progress, best_loss=judged, best_step=step, stale=0)
        else:
            now = dataclasses.replace(progress, stale=progress.stale + 1)
        return now, better

    def _make_up_evaluation(self, progress: Progress) -> Progress:
        """Evaluate the step that a run resumes from, if a reward function failed there."""
        step, every = progress.step, self.started.inputs.evaluation_every
        if not step or self.rollouts is None or (step < self.steps and every is None):
            return progress
        known = self.engine.on_rank_0(
            lambda: {each["step"] for each in self.run.read_metrics("eval")}
        )
        if step in known:
            return progress
        progress, better = self._evaluate_if_due(progress)
        if better:
            self.saver.save(progress, True)
        return progress

    def _finish_saving(self) -> None:
        self.saver.close()
        self.recorder.saved(self.saver.written())

    def _is_high(self, loss: float) -> bool:
        most = self.recipe.optim.max_loss
        return most is not None and loss > most

    def _end_diverged(self, progress: Progress, loss: float) -> NoReturn:
        """End a run whose loss stays high; its checkpoints are from before."""
        self._finish_saving()
        optim = self.recipe.optim
        raise TrainingFailure(
            f"step {progress.step}: loss {loss:g}: it was above optim.max_loss={optim.max_loss:g} "
            f"for {optim.max_loss_steps} steps in a row; lower optim.lr or fix the data, and "
            "resume from the newest checkpoint"
        )

    def _end_interrupted(self, progress: Progress, peak: int) -> None:
        self.recorder.end(progress.step, "interrupted", peak)
        raise Interrupted(
            f"interrupted by {self.interruption.name} after step {progress.step} of "
            f"{self.steps}, which is saved: continue with --resume, or --resume auto"
        )

    def _end(self, progress: Progress, reason: Reason, peak: int) -> None:
        """Write the result, the final record and the model card."""
        self._finish_record(self._publish)
        # After the result and before the card, which reads this record.
        self.recorder.end(progress.step, reason, peak)
        self._finish_record(lambda: describe(self.run, self.options.plot))
        self.engine.accelerator.wait_for_everyone()
        self.uploads.finish()

    def _finish_record(self, work: Callable[[], None]) -> None:
        outcome = self.engine.on_rank_0(lambda: checkpoint.attempt(work))
        if causes := checkpoint.causes_of([outcome]):
            raise TrainingFailure(
                f"{self.run.root}: trained to the end, but the result could not be written "
                f"({causes}); its checkpoint is complete: free disk space or allow writing, and "
                "resume"
            )

    def _publish(self) -> None:
        with self.engine.without_partitioning():  # of a model loaded on one rank, by ZeRO-3
            publish(self.run)
