"""Stages of a training on one rank: claim, prepare, build, step, evaluate, save, publish."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from finetune.checkpoints import checkpoint, handover
from finetune.checkpoints.base_weights import fingerprint, refuse_other_base
from finetune.checkpoints.checkpoint import Progress
from finetune.checkpoints.lock import locked
from finetune.checkpoints.resume import claim, refuse_other_data
from finetune.checkpoints.saver import Saver, restore_best
from finetune.data.audit import identity
from finetune.data.chat.render import load_chat
from finetune.data.prepare import Prepared
from finetune.distributed.base import Engine
from finetune.distributed.heartbeat import Heartbeat
from finetune.errors import FinetuneError, Interrupted, TrainingFailure
from finetune.exporters.publish import describe, publish
from finetune.models import adapters, experts, model, scoring, sizes, starting_adapter, teacher
from finetune.models.packed_attention import layout
from finetune.planner import Plan
from finetune.planner.estimate.forecast import Forecast
from finetune.planner.shared_prompts import SharedPrompts, shared_prompts, sharing_problems
from finetune.process.signals import Interruption
from finetune.recipe import Recipe
from finetune.rewards.process import RewardFailure
from finetune.runs.run import Run
from finetune.training import optim
from finetune.training.answering import answering
from finetune.training.compiled import choose_compiled
from finetune.training.fit import check_context
from finetune.training.loop import StepResult, TakesSteps, evaluate, feeding, train_step
from finetune.training.memory_meter import Meter, peak_bytes
from finetune.training.options import Options
from finetune.training.profiler import STEP, profile_of
from finetune.training.recorder import Reason, Recorder
from finetune.training.reference import with_other, with_own
from finetune.training.rollouts import rollouts_of, second_model
from finetune.training.shared_rows import prepare_on_ranks
from finetune.training.startup_checks import (
    refuse_full_gpu,
    refuse_weights_not_finite,
    run_checks,
)
from finetune.training.vllm_server import ServerFailure


class Training:
    """The stages of one run on one rank: `prepare`, then `train`."""

    def __init__(
        self,
        engine: Engine,
        run: Run,
        options: Options,
        interruption: Interruption,
        heartbeat: Heartbeat,
    ) -> None:
        self.engine = engine
        self.run = run
        self.options = options
        self.interruption = interruption
        self.heartbeat = heartbeat
        self.resources = contextlib.ExitStack()
        """Holds the lock of the run directory, on rank 0."""
        self.forecast: Forecast | None = None
        """The prediction for this run; None until the data is prepared, or without formulas."""
        self.plan: Plan = engine.plan
        self.recipe: Recipe = engine.plan.recipe

    def prepare(self) -> None:
        if self.engine.is_main:
            for note in self.engine.notes:  # on the device: printed before the model is loaded
                print(f"note: {note}", flush=True)
        self.engine.notes.clear()
        self.resumed = self.engine.on_rank_0(self._claim)
        self.tokenizer = model.load_tokenizer(self.recipe)
        self.data = self._data()
        if self.resumed is not None:
            refuse_other_data(self.run, self.resumed, identity(self.data.counts))
        self.steps = self.plan.steps(len(self.data.train))
        plan = self.plan  # its layout is that of the forecast
        self.data = self.data.side_by_side(plan.padding.free, plan.prompts.shared)
        refuse_full_gpu(self.engine, self.data, self.steps)
        self.recorder = Recorder(self.engine, self.run, self.data, self.steps)
        self.forecast = self.recorder.forecast
        self.meter = Meter(self.engine.device)
        self.data, other = with_other(
            self.engine, self.run, self.data, self.steps, self.tokenizer, self.resumed is not None
        )
        self.progress = self._build()
        (self.peak,) = self.engine.largest([peak_bytes(self.engine.device)])
        report = run_checks(self) + other
        self.answering = answering(self.engine, self.data, self.chat, self.pad_id)
        self.data, own = with_own(
            self.engine, self.run, self.data, self.steps, self.pad_id, self.base,
            self.resumed is not None,
        )  # fmt: skip
        self.rollouts = rollouts_of(
            self.engine, self.run, self.data.train, self.tokenizer, self.pad_id, self.reference
        )
        if self.engine.is_main:
            print(report + own, flush=True)

    def _claim(self) -> int | None:
        self.resources.enter_context(locked(self.run))
        return claim(self.run, self.plan, self.options.resume)

    def train(self) -> None:
        left = self.steps - self.progress.step
        if self.options.profile and left <= STEP:
            self.notes.append(
                f"--profile has no effect: it traces step {STEP + 1} after a start, and {left} "
                "remain"
            )
        layout = self.prompts.line(self.padding)
        self.recorder.open(
            self.progress, self.resumed, self.parameters, self.notes, self.padding, layout
        )
        try:
            self._loop()
        finally:
            self.recorder.close()

    def _data(self) -> Prepared:
        chosen = self.recipe.model
        self.chat = chat = load_chat(
            self.tokenizer, chosen.chat_template, chosen.chat_template_kwargs
        )
        self.tokenizer.chat_template = chat.saved  # saved: inference then renders as training did
        data = prepare_on_ranks(self.engine, self.recipe, chat)
        return teacher.ready(self.recipe, self.tokenizer, data) if self.recipe.teaches else data

    def _build(self) -> Progress:
        """Build model, optimizer and engine; load the newest checkpoint when resuming."""
        engine = self.engine
        compiled = choose_compiled(engine, self.data, self.steps)
        network = engine.on_every_rank(lambda: model.build(engine, self.recipe.seed))
        self.base = fingerprint(self.recipe.model)  # a hub model is downloaded by now
        self.padding = layout(self.recipe, network.config)
        self.prompts = self._prompts(network.config.to_dict())
        self.data = self.data.side_by_side(self.padding.free, self.prompts.shared)
        self.pad_id, vocabulary_notes = scoring.fit_tokens(
            self.recipe, network, self.tokenizer, self.data.train.documents
        )
        self.tokenizer = handover.set_stop_tokens(network, self.chat, self.data.train)
        self.parameters = sizes.counts(network)
        self.stored = sizes.stored(engine, network)
        self.notes = [
            *self.plan.notes(), *self.recipe.data_advice(self.data.counts["train"]),
            *self._origin(), *vocabulary_notes,
            *check_context(self.recipe, network, self.data),
            *model.kernel_notes(network, self.plan), *compiled,
            *experts.notes(network, self.recipe),
        ]  # fmt: skip
        self.engine.on_rank_0(self.recorder.write_request)
        folder = None if self.resumed is None else self.run.checkpoint(self.resumed)
        if folder is None and engine.is_main and adapters.reads_base(self.recipe.adapter):
            # Such an adapter subtracted its initial product from the base: keep it to undo that.
            network.save_pretrained(self.run.initial_adapter)
            handover.follow_umask(self.run.initial_adapter)
        self.reference = second_model(engine, network)
        if folder is not None:
            if self.recipe.adapter is not None:
                refuse_other_base(folder, self.recipe.model)
            checkpoint.load_weights(network, folder)
        rules = optim.build(network, self.recipe.optim, self.plan.lr, engine.device)
        engine.prepare(network, rules)
        self.notes += engine.notes
        rows = identity(self.data.counts)
        if folder is None:
            return Progress(data=rows, base=self.base)
        checkpoint.load_state(engine, folder)
        progress = dataclasses.replace(checkpoint.progress_of(folder), data=rows, base=self.base)
        self.engine.on_rank_0(lambda: restore_best(self.run, progress))
        return progress

    def _prompts(self, fields: dict[str, Any]) -> SharedPrompts:
        """Whether documents share prompts with a model of this config.

        Raises:
            FinetuneError: the recipe requires it, and they cannot.
        """
        given = self.recipe, self.plan.backend, fields
        if problems := list(sharing_problems(*given)):
            raise FinetuneError(*problems)
        return shared_prompts(*given)

    def _origin(self) -> list[str]:
        """Record the adapter that training starts from; returns a note about it."""
        if self.recipe.model.adapter is None:
            return []
        given = self.recipe, self.run, self.resumed is None
        return [self.engine.on_rank_0(lambda: starting_adapter.record(*given))]

    def _loop(self) -> None:
        self.saver = Saver(self.engine, self.run, self.tokenizer, self.recipe.saving)
        self.interruption.defer()
        if self.rollouts is None:
            with feeding(self.engine, self.data.train, self.pad_id, self.steps) as feed:
                stop = self._take_steps(feed)
        else:
            with contextlib.closing(self.rollouts):
                stop = self._take_steps(self.rollouts)
        self._finish_saving()
        self._end("early stop" if stop else "finished")

    def _take_steps(self, feed: TakesSteps) -> bool:
        """Train to the last step or until patience runs out; returns whether it ran out."""
        self._make_up_evaluation()
        first, stop = self.progress.step, self._patience_is_over()
        folder = self.run.profile if self.options.profile else None
        profile = profile_of(self.engine, folder, self.recorder.forecast)
        while self.progress.step < self.steps and not stop:
            step = self.progress.step
            self.heartbeat.step = step + 1
            # The second step of a process is the first to begin with optimizer moments in memory.
            counted = step == min(first + 1, self.steps - 1)
            measuring = self.meter.measuring(self.engine.model, self.reference) if counted else None
            with profile.of_step(step - first):
                result = self._step(feed, measuring)
            self.progress = dataclasses.replace(self.progress, step=step + 1)
            self.peak, interrupted = result.largest
            self._record(result)
            self._warn()
            if counted:
                self.recorder.memory(step + 1, result, self.meter.peak)
            if step == first:
                self.recorder.realised(self.parameters, self.stored)
                self.recorder.compiled()
            better = self._evaluate_if_due(step + 1 == self.steps)
            stop = self._patience_is_over()
            done = stop or step + 1 == self.steps
            self._save_if_due(done or bool(interrupted), better)
            self.recorder.saved(self.saver.written())
            if interrupted and not done:
                self._finish_saving()
                self._end_interrupted()
        return stop

    def _step(
        self, feed: TakesSteps, measuring: contextlib.AbstractContextManager[None] | None
    ) -> StepResult:
        step = self.progress.step
        with self._saving_if_sampling_fails():
            return train_step(self.engine, feed, step, self.steps, measuring, self._local_values)

    @contextlib.contextmanager
    def _saving_if_sampling_fails(self) -> Iterator[None]:
        """Save the progress before the failure of a reward or of a sampling server is raised."""
        try:
            yield
        except (RewardFailure, ServerFailure) as error:
            step = self.progress.step
            if step > self.saver.last:
                self.saver.save(self.progress, False)
            self._finish_saving()
            then = f"continue with --resume: step {step} is saved"
            if not step:
                then = "start again: no step is finished, and nothing is saved"
            raise type(error)(*(f"{problem}; then {then}" for problem in error.problems)) from None

    def _local_values(self) -> list[int]:
        """This rank's values to reduce in a step: peak bytes, and whether it got a signal."""
        return [peak_bytes(self.engine.device), int(self.interruption.asked)]

    def _finish_saving(self) -> None:
        self.saver.close()
        self.recorder.saved(self.saver.written())

    def _patience_is_over(self) -> bool:
        patience = self.recipe.evaluation.patience
        return patience is not None and self.progress.stale >= patience

    def _warn(self) -> None:
        if self.rollouts is not None:
            for warning in self.rollouts.warnings:
                self.recorder.warned(self.progress.step, warning)
            self.rollouts.warnings.clear()

    def _record(self, result: StepResult) -> None:
        if result.suspects is None:
            self.recorder.step(self.progress, result, self.peak)
            return
        if not self.progress.skipped:
            refuse_weights_not_finite(self.engine)
        self.progress = dataclasses.replace(self.progress, skipped=self.progress.skipped + 1)
        self.recorder.skipped(self.progress, result, result.suspects)

    def _end_interrupted(self) -> None:
        self.recorder.end(self.progress.step, "interrupted", self.peak)
        raise Interrupted(
            f"interrupted by {self.interruption.name} after step {self.progress.step} of "
            f"{self.steps}, which is saved: continue with --resume, or --resume auto"
        )

    def _end(self, reason: Reason) -> None:
        """Write the result, the final record and the model card."""
        self._finish_record(self._publish)
        self.recorder.end(self.progress.step, reason, self.peak)
        self._finish_record(lambda: describe(self.run, self.options.plot))
        self.engine.accelerator.wait_for_everyone()

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

    def _evaluate_if_due(self, done: bool) -> bool:
        """Evaluate if due; returns whether the result is the best so far."""
        every = self.recipe.evaluation.every
        due = done or (every is not None and self.progress.step % every == 0)
        if not due or not len(self.data.eval):
            return False
        if self.rollouts is None:
            result = evaluate(self.engine, self.data.eval, self.pad_id)
        else:
            with self._saving_if_sampling_fails():
                result = self.rollouts.evaluate(self.data.eval)
            self._warn()
        if self.answering is not None:
            result = result.with_metrics(self.answering.measure(self.engine))
        judged, best = result.judged_by(self.recipe.evaluation.best), self.progress.best_loss
        better = math.isfinite(judged) and (best is None or judged < best)
        if better:
            self.progress = dataclasses.replace(
                self.progress, best_loss=judged, best_step=self.progress.step, stale=0
            )
        else:
            self.progress = dataclasses.replace(self.progress, stale=self.progress.stale + 1)
        self.recorder.evaluated(self.progress.step, result, better)
        return better

    def _make_up_evaluation(self) -> None:
        """Evaluate the step that a run resumes from, if a reward function failed there."""
        step, every = self.progress.step, self.recipe.evaluation.every
        if not step or self.rollouts is None or (step < self.steps and every is None):
            return
        known = self.engine.on_rank_0(
            lambda: {each["step"] for each in self.run.read_metrics("eval")}
        )
        if step not in known and self._evaluate_if_due(step == self.steps):
            self.saver.save(self.progress, True)

    def _save_if_due(self, done: bool, better: bool) -> None:
        every = self.recipe.saving.every
        due = done or (every is not None and self.progress.step % every == 0)
        if not (due or better):
            return
        self.saver.save(self.progress, better)
