"""A training on one rank as a chain of values: read, built, started; then its steps."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedTokenizerBase

from finetune.checkpoints import checkpoint, handover
from finetune.checkpoints.base_weights import fingerprint, refuse_other_base
from finetune.checkpoints.checkpoint import Progress
from finetune.checkpoints.lock import locked
from finetune.checkpoints.resume import claim, refuse_other_data
from finetune.checkpoints.saver import Saver, restore_best
from finetune.data.audit import identity
from finetune.data.chat.render import Chat, load_chat
from finetune.data.prepare import Prepared
from finetune.distributed.base import Engine
from finetune.distributed.heartbeat import Heartbeat
from finetune.errors import FinetuneError, Interrupted, TrainingFailure
from finetune.exporters.publish import describe, publish
from finetune.models import adapters, experts, model, scoring, sizes, starting_adapter, teacher
from finetune.models.packed_attention import layout
from finetune.planner.padding import Padding
from finetune.planner.shared_prompts import SharedPrompts, shared_prompts, sharing_problems
from finetune.process.signals import Interruption
from finetune.recipe import Recipe
from finetune.rewards.process import RewardFailure
from finetune.runs.run import Run
from finetune.training import optim
from finetune.training.compiled import choose_compiled
from finetune.training.eval_metrics import Answering, answering
from finetune.training.fit import check_context
from finetune.training.loop import StepResult, TakesSteps, evaluate, feeding, train_step
from finetune.training.memory_meter import Meter, peak_bytes
from finetune.training.options import Options
from finetune.training.profiler import STEP, profile_of
from finetune.training.recorder import Reason, Recorder
from finetune.training.reference import with_other, with_own, with_values
from finetune.training.rollouts import Rollouts, rollouts_of, second_model
from finetune.training.shared_rows import prepare_on_ranks
from finetune.training.startup_checks import (
    refuse_full_gpu,
    refuse_weights_not_finite,
    run_checks,
)
from finetune.training.vllm_server import ServerFailure

PEAK, SIGNALLED = "peak", "signalled"
"""Values of a rank in a step: its peak bytes so far, and whether it got a signal."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run reads before its model."""

    tokenizer: PreTrainedTokenizerBase
    chat: Chat
    data: Prepared
    steps: int
    """Steps of the complete run."""
    evaluation_every: int | None
    saving_every: int | None
    """Steps between evaluations, and between checkpoints; None for once, at the end."""
    resumed: int | None
    """Step of the checkpoint to continue from; None at the beginning."""


@dataclasses.dataclass(frozen=True)
class Built:
    """The model in its engine, and what was decided from it and its config."""

    data: Prepared
    """Rows in the layout of the model."""
    tokenizer: PreTrainedTokenizerBase
    """With the stop tokens of the model."""
    pad_id: int
    base: str | None
    """Identity of the base weights; None if it is not known."""
    padding: Padding
    prompts: SharedPrompts
    parameters: tuple[int, int]
    """Counts of trained and of all parameters."""
    stored: dict[str, int]
    reference: nn.Module | None
    """A second model, where the loss needs one in memory."""
    notes: list[str]
    progress: Progress


@dataclasses.dataclass(frozen=True)
class Started:
    """A run that can take its next step."""

    inputs: Inputs
    built: Built
    data: Prepared
    """Rows with everything that was computed for them before the first step."""
    recorder: Recorder
    meter: Meter
    answering: Answering | None
    rollouts: Rollouts | None


def read(engine: Engine, run: Run, options: Options, held: contextlib.ExitStack) -> Inputs:
    """Claim the run directory and prepare its data, the same on every rank.

    Args:
        engine: engine without a model.
        run: directory of the run.
        options: say whether it may continue.
        held: keeps the lock of the directory, on rank 0.
    """

    def claimed() -> int | None:
        held.enter_context(locked(run))
        return claim(run, engine.plan, options.resume)

    plan, recipe = engine.plan, engine.plan.recipe
    resumed = engine.on_rank_0(claimed)
    tokenizer = model.load_tokenizer(recipe)
    chat = load_chat(tokenizer, recipe.model.chat_template, recipe.model.chat_template_kwargs)
    tokenizer.chat_template = chat.saved  # saved: inference then renders as training did
    data = prepare_on_ranks(engine, recipe, chat)
    if recipe.teaches:
        data = teacher.ready(recipe, tokenizer, data)
    if resumed is not None:
        refuse_other_data(run, resumed, identity(data.counts))
    # The layout of the forecast: the plan read the config file, if there is one yet.
    data = data.side_by_side(plan.padding.free, plan.prompts.shared)
    steps = plan.steps(len(data.train))
    optim.check(recipe.optim, plan.backend.shard != "none" or plan.backend.axes.any)
    optim.learning_rate(steps - 1, steps, recipe.optim, plan.lr)  # refuses wrong arguments
    refuse_full_gpu(engine, data, steps)
    cadences = recipe.evaluation.every, recipe.saving.every
    evaluated, saved = (plan.interval(every, len(data.train)) for every in cadences)
    return Inputs(tokenizer, chat, data, steps, evaluated, saved, resumed)


def start(
    engine: Engine, run: Run, options: Options, inputs: Inputs, recorder: Recorder
) -> Started:
    """Build the model, check it, and compute what its method needs before the first step."""
    resumed, steps = inputs.resumed is not None, inputs.steps
    meter = Meter(engine.device)
    # Another model as reference runs first: it has left memory when the model is loaded.
    data, other = with_other(engine, run, inputs.data, steps, inputs.tokenizer, resumed)
    built = build(engine, run, dataclasses.replace(inputs, data=data), recorder)
    report = run_checks(engine, run, options, inputs, built, recorder)
    asked = answering(engine, built.data, inputs.chat, built.pad_id)
    # The model itself as reference needs its engine, and the weights at the start.
    data, own = with_own(engine, run, built.data, steps, built.pad_id, built.base, resumed)
    data = with_values(engine, run, data, built.pad_id, resumed)
    rollouts = rollouts_of(engine, run, data.train, built.tokenizer, built.pad_id, built.reference)
    if engine.is_main:
        print(report + other + own, flush=True)
    return Started(inputs, built, data, recorder, meter, asked, rollouts)


def build(engine: Engine, run: Run, inputs: Inputs, recorder: Recorder) -> Built:
    """Build model, optimizer and engine; load the newest checkpoint when resuming.

    The order is that of what may fail: a mistake leaves the run directory unused.
    """
    plan, recipe, data = engine.plan, engine.plan.recipe, inputs.data
    compiled = choose_compiled(engine, data, inputs.steps)
    network: Any = engine.on_every_rank(lambda: model.build(engine, recipe.seed))
    base = fingerprint(recipe.model)  # a hub model is downloaded by now
    padding, prompts = layout(recipe, network.config), _prompts(engine, network.config.to_dict())
    data = data.side_by_side(padding.free, prompts.shared)
    pad_id, vocabulary_notes = scoring.fit_tokens(
        recipe, network, inputs.tokenizer, data.train.documents
    )
    tokenizer = handover.set_stop_tokens(network, inputs.chat, data.train)
    parameters, stored = sizes.counts(network), sizes.stored(engine, network)
    notes = [
        *plan.notes(), *recipe.data_advice(data.counts["train"]),
        *_origin(engine, run, inputs.resumed), *vocabulary_notes,
        *check_context(recipe, network, data), *model.kernel_notes(network, plan), *compiled,
        *experts.notes(network, recipe), *_cadences(recipe, inputs),
    ]  # fmt: skip
    engine.on_rank_0(recorder.write_request)
    folder = None if inputs.resumed is None else run.checkpoint(inputs.resumed)
    if folder is None and engine.is_main and adapters.reads_base(recipe.adapter):
        # Such an adapter subtracted its initial product from the base: keep it to undo that.
        network.save_pretrained(run.initial_adapter)
        handover.follow_umask(run.initial_adapter)
    reference = second_model(engine, network)  # a copy of the start, so before the checkpoint
    if folder is not None:
        if recipe.adapter is not None:
            refuse_other_base(folder, recipe.model)
        checkpoint.load_weights(network, folder)
    engine.prepare(network, optim.build(network, recipe.optim, plan.lr, engine.device))
    progress = Progress(data=identity(data.counts), base=base)
    if folder is not None:
        checkpoint.load_state(engine, folder)
        saved = checkpoint.progress_of(folder)
        progress = dataclasses.replace(saved, data=progress.data, base=base)
        engine.on_rank_0(lambda: restore_best(run, progress))
    return Built(
        data, tokenizer, pad_id, base, padding, prompts, parameters, stored, reference,
        notes + engine.notes, progress,
    )  # fmt: skip


def _prompts(engine: Engine, fields: dict[str, Any]) -> SharedPrompts:
    """Whether documents share prompts with a model of this config.

    Raises:
        FinetuneError: the recipe requires it, and they cannot.
    """
    given = engine.plan.recipe, engine.plan.backend, fields
    if problems := list(sharing_problems(*given)):
        raise FinetuneError(*problems)
    return shared_prompts(*given)


def _origin(engine: Engine, run: Run, resumed: int | None) -> list[str]:
    """Record the adapter that training starts from; returns a note about it."""
    recipe = engine.plan.recipe
    if recipe.model.adapter is None:
        return []
    return [engine.on_rank_0(lambda: starting_adapter.record(recipe, run, resumed is None))]


def _cadences(recipe: Recipe, inputs: Inputs) -> Iterator[str]:
    """What the cadences of a recipe that are not given in steps come to."""
    for field, given, steps in (
        ("evaluation.every", recipe.evaluation.every, inputs.evaluation_every),
        ("saving.every", recipe.saving.every, inputs.saving_every),
    ):
        if given != steps:
            yield f"{field}: {given} is every {steps} of {inputs.steps} steps"


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
        self.saver = Saver(engine, run, self.built.tokenizer, self.recipe.saving)

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
        return feeding(self.engine, self.data.train, self.built.pad_id, self.steps)

    def _take_steps(self, feed: TakesSteps, progress: Progress) -> tuple[Progress, Reason, int]:
        """Train to the last step or until patience runs out; returns why it ended, and the peak."""
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
            progress = self._record(dataclasses.replace(progress, step=step + 1), result, peak)
            high = high + 1 if self._is_high(result.loss) else 0
            if high == self.recipe.optim.max_loss_steps:
                self._end_diverged(progress, result.loss)
            if counted:
                self.recorder.memory(step + 1, result, meter.peak)
            if step == first:
                self.recorder.realised(self.built.parameters, self.built.stored)
                self.recorder.compiled()
            progress, better = self._evaluate_if_due(progress)
            stop = self._patience_is_over(progress)
            interrupted, done = bool(result.noticed[SIGNALLED]), stop or step + 1 == self.steps
            due = self._due(progress, self.started.inputs.saving_every)
            if better or done or interrupted or due:
                self.saver.save(progress, better)
            self.recorder.saved(self.saver.written())
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
        with self._saving_if_sampling_fails(progress):
            return train_step(
                self.engine, feed, progress.step, self.steps, measuring, self._local_values
            )

    @contextlib.contextmanager
    def _saving_if_sampling_fails(self, progress: Progress) -> Iterator[None]:
        """Save the progress before the failure of a reward or of a sampling server is raised."""
        try:
            yield
        except (RewardFailure, ServerFailure) as error:
            step = progress.step
            if step > self.saver.last:
                self.saver.save(progress, False)
            self._finish_saving()
            then = f"continue with --resume: step {step} is saved"
            if not step:
                then = "start again: no step is finished, and nothing is saved"
            raise type(error)(*(f"{problem}; then {then}" for problem in error.problems)) from None

    def _local_values(self) -> dict[str, int]:
        return {PEAK: peak_bytes(self.engine.device), SIGNALLED: int(self.interruption.asked)}

    def _record(self, progress: Progress, result: StepResult, peak: int) -> Progress:
        """Record a step, taken or skipped; returns the progress after it."""
        if result.suspects is None:
            self.recorder.step(progress, result, peak)
        else:
            if not progress.skipped:
                refuse_weights_not_finite(self.engine)
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
        if self.rollouts is None:
            result = evaluate(self.engine, self.data.eval, self.built.pad_id)
        else:
            with self._saving_if_sampling_fails(progress):
                result = self.rollouts.evaluate(self.data.eval)
            self._warn(progress)
        if self.started.answering is not None:
            result = result.with_metrics(self.started.answering.measure(self.engine))
        judged, best = result.judged_by(chosen.best), progress.best_loss
        better = math.isfinite(judged) and (best is None or judged < best)
        self.recorder.evaluated(step, result, better)
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
        self.recorder.end(progress.step, reason, peak)
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
