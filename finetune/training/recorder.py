"""Write the record of a run: the request, the prediction, and every step."""

import dataclasses
import math
import shutil
import time
from typing import Literal

import numpy as np
import torch

from finetune import catalog
from finetune.checkpoints.checkpoint import Progress
from finetune.data.prepare import Prepared
from finetune.data.rows.order import rows_of_step, split_rows
from finetune.data.rows.pack_statistics import filling_notes
from finetune.data.rows.shared_prompts import computed_lengths
from finetune.data.rows.store import Rows
from finetune.data.stream.windows import Counts, Stream
from finetune.distributed.base import Engine
from finetune.errors import FinetuneError
from finetune.kernels import cpu, pointwise
from finetune.kernels.matmul_rate import matmul_flops
from finetune.methods.online import Online
from finetune.models import compiled_blocks, model
from finetune.planner import Plan
from finetune.planner.estimate import hardware
from finetune.planner.estimate.forecast import Facts, Forecast, forecast
from finetune.planner.estimate.moments import Moment
from finetune.planner.estimate.timing import step_flops
from finetune.planner.padding import Padding
from finetune.reports.display import Display
from finetune.runs import limits
from finetune.runs.environment import environment
from finetune.runs.metrics import (
    Ended,
    Evaluated,
    Listener,
    Measured,
    Metrics,
    Saved,
    Skipped,
    Start,
    Trained,
    Warned,
    unwritable,
)
from finetune.runs.run import Run, write_json
from finetune.runs.trackers import open_trackers, track
from finetune.training.loop import EvalResult, Peak, StepResult
from finetune.training.nonfinite import places, verdict
from finetune.training.pair_watch import PairWatch

COUNTED_STEPS = 8
"""Steps sampled to estimate the token slots of an average step."""
Reason = Literal["finished", "early stop", "interrupted"]


class Recorder:
    """Writes the record of one run. Every rank makes the same calls; only rank 0 writes."""

    def __init__(
        self, engine: Engine, run: Run, data: Prepared, steps: int, stream: Stream | None = None
    ) -> None:
        self.engine = engine
        self.run = run
        self.data = data
        self.stream = stream
        self.plan = engine.plan
        self.steps = steps
        mine = matmul_flops(engine.device, model.compute_dtype(engine.plan))
        (self.flops,) = engine.sum([mine])
        """Measured FLOP/s of matrix products, summed over all processes."""
        self.forecast = expected(engine, data, steps, self.flops / engine.world)
        self.tokens, self.spent = 0, 0.0
        self.watch = PairWatch()
        self.listeners: list[Listener] = []
        """More listeners of the metrics, which are opened later."""

    def write_request(self) -> None:
        """Write the files of the request: recipe, plan, environment and data.

        Called after data and model are checked, so that a mistake leaves the directory unused.
        """
        write_json(self.run.recipe, catalog.to_fields(self.plan.recipe))
        prediction = self.forecast.summary() if self.forecast is not None else None
        write_json(self.run.plan, {**self.plan.summary(), "prediction": prediction})
        write_json(self.run.environment, environment(accelerators()))
        if self.stream is None or self.stream.counts is None:
            self._write_counts(self.data.counts["train"])
        if self.data.bad_rows is not None and self.stream is None:
            shutil.copyfile(self.data.bad_rows, self.run.bad_rows)

    def _write_counts(self, train: Counts) -> None:
        first = self.data.counts  # has what is known of all rows, such as files of other kinds
        counts = {"train": {**first["train"], **train}, "eval": first["eval"]}
        write_json(self.run.data, counts)

    def counted(self, counts: Counts, bad_rows: str) -> None:
        """Write the counts of the rows of a stream up to those of a new buffer."""
        if not self.engine.is_main:
            return
        self._write_counts(counts)
        if bad_rows:
            with self.run.bad_rows.open(
                "a" if counts["windows"] > 1 else "w", encoding="utf-8"
            ) as file:
                file.write(bad_rows)

    def open(
        self,
        progress: Progress,
        resumed: int | None,
        parameters: tuple[int, int],
        notes: list[str],
        padding: Padding,
        layout: str,
    ) -> None:
        """Begin the metrics, the display and the trackers.

        Args:
            padding: how rows are laid out in a micro-batch.
            layout: the same in one line, with prompts that rows share.
            parameters: counts of trainable and of all parameters.
            notes: warnings that do not prevent the run.
        """
        engine, recipe = self.engine, self.plan.recipe
        self.parameters = parameters
        notes = [*notes, *filling_notes(self.data.train, recipe, padding, self.steps)]
        self.display = Display(self.run, is_main=engine.is_main, notes=notes)
        listeners = [self.display.show, *self.listeners]
        if recipe.trackers:
            open_trackers(engine.accelerator, self.run, catalog.to_fields(recipe))
            listeners.append(track(engine.accelerator))
        self.metrics = Metrics(self.run, is_main=engine.is_main, listeners=listeners)
        self.metrics.resume_at(progress.step)
        self.started = time.perf_counter()
        self.metrics.write(
            Start(
                step=progress.step,
                processes=engine.world,
                groups=engine.data_world if engine.data_world < engine.world else None,
                backend=self.plan.backend.name,
                precision=self.plan.backend.precision,
                micro_rows=recipe.batch.micro_rows,
                accumulation=self.plan.accumulation,
                rows_per_step=recipe.batch.rows,
                steps=self.steps,
                trainable_parameters=parameters[0],
                parameters=parameters[1],
                train_rows=len(self.data.train) if self.stream is None else 0,
                eval_rows=len(self.data.eval),
                trained_tokens=self.data.counts["train"]["trained_tokens"],
                packing=recipe.batch.packing,
                padding=layout,
                micro_tokens=recipe.batch.micro_tokens,
                unit=recipe.unit,
                rows_per_sample=recipe.rows_per_sample,
                resumed_from=resumed,
            )
        )

    def close(self) -> None:
        self.metrics.close()
        self.display.close()

    def step(self, progress: Progress, result: StepResult, peak: int) -> None:
        """Record a step.

        Args:
            peak: largest peak memory of any process so far, in bytes.
        """
        tokens = result.tokens
        self.tokens, self.spent = self.tokens + tokens.real, self.spent + result.seconds
        self.metrics.write(
            Trained(
                step=progress.step,
                loss=result.loss,
                router_aux_loss=result.balance,
                grad_norm=result.grad_norm,
                lr=result.lr,
                trained_tokens=tokens.trained,
                real_tokens=tokens.real,
                slots=tokens.slots,
                seconds=result.seconds,
                tokens_per_second=tokens.real / result.seconds,
                memory=peak,
                data_seconds=result.data_seconds,
                mfu=self._mfu(result),
                epoch=self._epoch(progress),
                metrics=dict(result.metrics),
            )
        )
        for warning in self.watch.warnings(result.metrics, self.plan.recipe.reads_reference):
            self.warned(progress.step, warning)

    def _epoch(self, progress: Progress) -> float:
        """Passes over the training rows; complete ones of the shortest source of a stream."""
        if progress.stream is not None:
            return float(max(position[0] for position in progress.stream["positions"]))
        return progress.step * self._rows_per_step / len(self.data.train)

    @property
    def _rows_per_step(self) -> float:
        """Rows of the data used by a step."""
        recipe = self.plan.recipe
        return recipe.batch.rows / recipe.rows_per_sample

    def _mfu(self, result: StepResult) -> float:
        """FLOPs that the step needed, divided by those of matrix products in the same time."""
        if self.forecast is None:
            return math.nan
        recipe = self.plan.recipe
        needed = step_flops(
            self.forecast.workload.shape,
            tokens=min(result.tokens.real, result.tokens.slots),
            trained_tokens=result.tokens.trained,
            length=float(self.data.train.documents.lengths.mean()),
            adapter=self.parameters[0] if recipe.adapter is not None else 0,
        )
        return needed / (result.seconds * self.flops)

    def skipped(self, progress: Progress, result: StepResult, suspects: list[int]) -> None:
        """Record a skipped step.

        Raises:
            TrainingFailure: the recipe says to stop.
        """
        taken, step = result.taken, progress.step
        if taken is None:
            rows = places(suspects, self.data)
        else:
            rows = [place for row in suspects for place in taken.places(row)]
        loss, norm = result.loss, result.grad_norm
        reason = verdict(self.plan.recipe.optim, step, loss, norm, rows, progress.skipped)
        self.metrics.write(Skipped(step=step, loss=loss, grad_norm=norm, rows=rows, told=reason))

    def warned(self, step: int, message: str) -> None:
        """Record a warning about the training."""
        self.metrics.write(Warned(step=step, told=message))

    def compiled(self) -> None:
        """Print what `kernels.blocks=compiled` made of the blocks in the first step."""
        if self.engine.plan.recipe.kernels.blocks == "compiled":
            self.display.note(compiled_blocks.compiled().line())

    def memory(self, step: int, result: StepResult, counted: int | None) -> None:
        """Record the measured peak memory of a step next to the planned peak.

        Args:
            counted: peak bytes on this rank; None if they could not be measured.
        """
        ranks: list[tuple[int, Peak]] = self.engine.gather((counted or 0, result.peak))
        peaks, held = [bytes_ for bytes_, _ in ranks], [peak for _, peak in ranks]
        # With sequence parallelism each process has a part of a row's tokens.
        shares = self.plan.mesh.sequence
        rows = max(each.shape[0] for each in held)
        length = max(each.shape[1] for each in held) * shares
        if not max(peaks):
            return
        planned, stages = list[int](), list[Moment]()
        if self.forecast is not None:
            stages = self.forecast.peaks(
                rows, length, any(each.padded for each in held),
                max(each.labelled for each in held) * shares,
                max(each.longest for each in held),
                max(each.attended for each in held) / (rows * length),
                max(each.images for each in held),
            )  # fmt: skip
            planned = self.forecast.of_ranks(stages)
        # Padding-free rows may count as one row of `length` tokens: give each row its share.
        each = max(rows, self.plan.recipe.most_micro_rows)
        length = -(-rows * length // each)
        self.metrics.write(
            Measured(
                step=step,
                length=length,
                peak=max(peaks),
                predicted=max(planned, default=None),
                peaks=peaks,
                planned=planned,
                parts=[{n: round(b) for n, b in s.parts.items() if b} for s in stages],
            )
        )

    def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
        self.metrics.write(
            Evaluated(
                step=step,
                loss=result.loss,
                tokens=result.tokens,
                best=best,
                seconds=result.seconds,
                metrics=dict(result.metrics),
            )
        )

        name = self.plan.recipe.evaluation.best.removeprefix("-")
        if name not in ("loss", *result.metrics):
            known = ", ".join(["loss", *result.metrics])
            problem = f"evaluation.best: {name} was not measured, so no checkpoint is the best"
            self.warned(step, f"{problem}; measured are: {known}")

    def saved(self, records: list[Saved]) -> None:
        for record in records:
            self.metrics.write(record)

    def end(self, step: int, reason: Reason, peak: int) -> None:
        self.metrics.write(
            Ended(
                step=step,
                seconds=time.perf_counter() - self.started,
                reason=reason,
                peak_memory=peak,
                tokens_per_second=self.tokens / self.spent if self.spent else 0.0,
            )
        )

    def realised(self, parameters: tuple[int, int], stored: dict[str, int]) -> None:
        """Write what the engine built and what each rank holds; call it after a step.

        Raises TrainingFailure if the file cannot be written.
        """
        ranks = self.engine.gather(dataclasses.asdict(self.engine.element_counts()))
        if not self.engine.is_main:
            return
        accelerator = self.engine.accelerator
        found = {
            "distributed_type": accelerator.distributed_type.value,
            "processes": accelerator.num_processes,
            "mixed_precision": accelerator.mixed_precision,
            "device": str(accelerator.device),
            "trainable_parameters": parameters[0],
            "parameters": parameters[1],
            "stored": stored,
            "ranks": ranks,
        }
        try:
            write_json(self.run.realised, found)
        except OSError as error:
            raise unwritable(self.run.realised, error) from error


def expected(engine: Engine, data: Prepared, steps: int, flops: float) -> Forecast | None:
    """Prediction for a run on its actual rows; None for a model without formulas.

    Args:
        flops: FLOP/s of one process in matrix products; only read on CPUs.
    """
    cpu, machine = engine.device.type == "cpu", None
    if cpu:
        machine = hardware.processor(flops, engine.world, limits.memory().total)
    elif (card := hardware_of(engine.device)) is not None:
        machine = hardware.machine(card, engine.world)
    return forecast(engine.plan, steps, facts(engine, data, steps), machine)


def facts(engine: Engine, data: Prepared, steps: int) -> Facts:
    """Facts about a run's rows and kernels that the planner needs."""
    recipe, rows, plan = engine.plan.recipe, data.train, engine.plan
    batch, lengths = recipe.batch, computed_lengths(rows)
    longest_row, each, documents = int(lengths.argmax()), recipe.documents_per_row, rows.documents
    length = -(-int(lengths.max()) // each)  # of a document: the planner counts each as a row
    padded = False
    if not rows.side_by_side:
        length = int(documents.lengths.max())
        padded = batch.micro_rows * each > 1 and documents.lengths.min() < length
    most = int(np.sort(rows.labelled)[-recipe.most_micro_rows :].sum())
    longest = recipe.completion_length
    if longest:  # completions of varying length follow the prompts
        padded, most = not rows.side_by_side, recipe.most_micro_rows * longest
    dtype = model.compute_dtype(plan)
    tokens = tokens_of_run(plan, data, steps)
    slots = _completed(plan, data, steps) if longest else _slots(plan, rows, lengths, steps)
    on_cpu = engine.device.type == "cpu"
    chained = on_cpu and pointwise.settle(recipe.kernels.pointwise, engine.device, tokens, dtype)[0]
    products = on_cpu and rows.side_by_side and cpu.by_products(dtype, chained)
    return Facts(
        length=length + longest,
        padded=bool(padded),
        labelled=most,
        slots=slots,
        document=float(documents.lengths.mean()) + longest,
        cpu=on_cpu,
        chained=chained,
        apart=on_cpu and rows.side_by_side and dtype == torch.float32,
        scored=int(documents.lengths.max()) + longest if products else 0,
        repeated=max(1.0, tokens / steps / slots) if rows.share_prompts else 1.0,
        repeated_in_longest=float(rows.lengths[longest_row] / lengths[longest_row]),
    )


def _completed(plan: Plan, data: Prepared, steps: int) -> float:
    """Token slots of a step with sampled completions.

    Completions of a micro-batch that share a prompt compute it once. Micro-batches are cut from
    completions in the order of their prompts, so each prompt is in as few as possible.
    """
    recipe, given = plan.recipe, tokens_of_run(plan, data, steps) / steps
    if not isinstance(recipe, Online) or not data.train.share_prompts:
        return given
    each, rows, micro_rows = recipe.num_generations, recipe.batch.rows, recipe.most_micro_rows
    starts = np.arange(0, rows, each)
    computed = int(((starts + each - 1) // micro_rows - starts // micro_rows + 1).sum())
    prompts = given - rows * recipe.max_completion_length
    return given - prompts * (1 - computed / rows)


def tokens_of_run(plan: Plan, data: Prepared, steps: int) -> float:
    """Tokens of all steps; sampled completions count with their maximum length."""
    rows = plan.recipe.batch.rows * steps
    given = data.counts["train"]["tokens"] * rows / len(data.train)
    return given + rows * plan.recipe.completion_length


def _slots(plan: Plan, rows: Rows, computed: np.ndarray, steps: int) -> float:
    """Token slots of a step, averaged over the first few steps.

    Args:
        computed: (rows,) `computed_lengths` of the rows.
    """
    batch, seed = plan.recipe.batch, plan.recipe.seed
    found: list[int] = []
    for step in range(min(steps, COUNTED_STEPS)):
        chosen = rows_of_step(step, len(rows), batch.rows, seed)
        cuts = split_rows(
            chosen, rows.slots, batch.micro_rows, batch.micro_tokens, rows.side_by_side
        )
        sizes = [
            int(computed[each].sum() if rows.side_by_side else rows.slots[each].max() * len(each))
            for each in cuts
        ]
        # A pipeline pads the micro-batches of a step to one shape.
        found.append(max(sizes) * len(sizes) if plan.mesh.pipeline > 1 else sum(sizes))
    return sum(found) / len(found)


def hardware_of(device: torch.device) -> hardware.GPU | None:
    """Specifications of this process's GPU; None if its speed is not known."""
    card = torch.cuda.get_device_properties(device)
    try:
        return hardware.of_driver(card.name, card.total_memory)
    except FinetuneError:  # memory can still be predicted
        return None


def accelerators() -> list[str]:
    """Names of the accelerators of this machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(index) for index in range(count)]
