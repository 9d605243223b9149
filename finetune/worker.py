"""One process of a training run: builds the stages of a plan and drives the loop."""

import dataclasses
import datetime
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from accelerate.state import AcceleratorState
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from finetune import backend as backends
from finetune import catalog, checkpoint, model, optim
from finetune.checkpoint import Progress
from finetune.data.prepare import Prepared, prepare
from finetune.data.render import load_chat
from finetune.engine import Engine
from finetune.errors import FinetuneError
from finetune.loop import StepResult, evaluate, train_step
from finetune.memory import peak_bytes
from finetune.planner import Plan
from finetune.planner.families import shape_of
from finetune.planner.timing import step_flops
from finetune.preflight import check_here
from finetune.profile import Profile
from finetune.recipe import Recipe
from finetune.record.card import write_card
from finetune.record.display import Display
from finetune.record.environment import environment
from finetune.record.metrics import Ended, Evaluated, Metrics, Saved, Start, Trained
from finetune.record.plot import plot_loss
from finetune.record.trackers import open_trackers, track
from finetune.result.exporter import export
from finetune.roofline import matmul_rate
from finetune.run import Run, write_json

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Options:
    """How a run is carried out; none of it changes what is learned."""

    output: Path
    resume: bool = False
    nvme_path: Path | None = None
    """Folder on a local disk for a backend that offloads to NVMe; by default inside the run."""
    timeout_minutes: float = 30.0
    """How long a rank waits for the others before it gives up."""
    profile: bool = False
    """Trace one step with torch's profiler, and say where its time went."""


def train(
    recipe: Recipe,
    backend: str | None = None,
    precision: backends.Precision | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    options: Options | None = None,
) -> Run:
    """Train in this process, or as one of the processes that `accelerate launch` started.

    Raises:
        FinetuneError: the request cannot be honoured; nothing was changed.
        TrainingFailure: training was started and could not go on.
    """
    settled = check_here(recipe, backend, precision)
    options = options or Options(Path(output or "runs/latest"), resume)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    nvme = options.nvme_path or options.output / "offload"
    try:
        timeout = datetime.timedelta(minutes=options.timeout_minutes)
        engine = Engine(settled, nvme, timeout)
        return Training(engine, Run(options.output), options).go()
    finally:
        if (
            settled.processes == 1
        ):  # a notebook trains again, perhaps with another plan, in this process
            AcceleratorState._reset_state(reset_partial_state=True)


class Training:
    """The stages of one run on one rank, in the order in which `go` takes them."""

    def __init__(self, engine: Engine, run: Run, options: Options) -> None:
        self.engine = engine
        self.run = run
        self.options = options
        self.plan: Plan = engine.plan
        self.recipe: Recipe = engine.plan.recipe

    def go(self) -> Run:
        """Train to the end; returns the run."""
        self.resumed = self._on_one(lambda: claim(self.run, self.recipe, self.options.resume))
        self.tokenizer, self.pad_id = self._tokenizer()
        self.data = self._data()
        self.steps = self.plan.steps(len(self.data.train))
        self.progress = self._build()
        self._open_metrics()
        try:
            self._loop()
        finally:
            self.metrics.close()
            self.display.close()
        self.engine.close()
        return self.run

    def _on_one(self, work: Callable[[], T]) -> T:
        """Do something on one rank; all get its result, or raise its error."""
        outcome: list[object] = [None]
        if self.engine.speaks:
            try:
                outcome = [work()]
            except FinetuneError as error:
                outcome = [error]
        if self.engine.world > 1:
            torch.distributed.broadcast_object_list(outcome, src=0)
        if isinstance(outcome[0], FinetuneError):
            raise outcome[0]
        return outcome[0]  # type: ignore[return-value]

    def _write_record(self) -> None:
        """Only once data and model are known to be good: a mistake leaves the directory free."""
        write_json(self.run.recipe, catalog.to_fields(self.recipe))
        write_json(self.run.plan, self.plan.summary())
        write_json(self.run.environment, environment(accelerators()))
        write_json(self.run.data, self.data.counts)

    def _tokenizer(self) -> tuple[PreTrainedTokenizerBase, int]:
        tokenizer = model.load_tokenizer(self.recipe)
        # Padding is masked by position, never by its id: any id serves.
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        return tokenizer, pad

    def _data(self) -> Prepared:
        chat = load_chat(self.tokenizer, self.recipe.model.chat_template)
        self.tokenizer.chat_template = chat.template  # what is saved answers as it was trained
        cache = data_cache()
        counts = self._on_one(lambda: prepare(self.recipe, chat, cache).counts)
        prepared = prepare(self.recipe, chat, cache)
        if prepared.counts != counts:
            raise FinetuneError(f"rank {self.engine.rank} sees other data than rank 0")
        return prepared

    def _build(self) -> Progress:
        """Model, optimizer and engine, continued from the newest checkpoint when resuming."""
        engine = self.engine
        network = model.build(engine, self.recipe.seed)
        self.parameters = model.counts(network)
        self.notes = [*self.plan.notes(), *model.kernel_notes(network, self.plan)]
        self._on_one(self._write_record)
        folder = None if self.resumed is None else self.run.checkpoint(self.resumed)
        if folder is None and engine.speaks and model.reads_base(self.recipe.adapter):
            # Such an adapter took its product out of the base: to undo that, the product is kept.
            network.save_pretrained(self.run.initial_adapter)
        if folder is not None:
            checkpoint.load_weights(network, folder)
        self.shape = shape_of(network.config.to_dict())
        rate = matmul_rate(engine.device, model.compute_dtype(self.plan))
        (self.matmul_rate,) = engine.sum([rate])
        rules = optim.build(network, self.recipe.optim, self.plan.lr, engine.device)
        engine.prepare(network, rules)
        if folder is None:
            return Progress()
        checkpoint.load_state(engine, folder)
        return checkpoint.progress_of(folder)

    def _open_metrics(self) -> None:
        engine, recipe, counts = self.engine, self.recipe, self.data.counts
        self.display = Display(self.run, speaks=engine.speaks, warnings=self.notes)
        listeners = [self.display.show]
        if recipe.trackers:
            open_trackers(engine.accelerator, self.run, catalog.to_fields(recipe))
            listeners.append(track(engine.accelerator))
        self.metrics = Metrics(self.run, speaks=engine.speaks, listeners=listeners)
        self.metrics.resume_at(self.progress.step)
        trainable, total = self.parameters
        self.metrics.write(
            Start(
                step=self.progress.step,
                processes=engine.world,
                backend=self.plan.backend.name,
                precision=self.plan.backend.precision,
                micro_rows=recipe.batch.micro_rows,
                accumulation=self.plan.accumulation,
                rows_per_step=recipe.batch.rows,
                steps=self.steps,
                trainable_parameters=trainable,
                parameters=total,
                train_rows=len(self.data.train),
                eval_rows=len(self.data.eval),
                trained_tokens=counts["train"]["trained_tokens"],
                resumed_from=self.resumed,
            )
        )

    def _loop(self) -> None:
        begun = time.perf_counter()
        reason, tokens, spent = "finished", 0, 0.0
        first = self.progress.step
        profile = self._profile()
        for step in range(first, self.steps):
            with profile.of_step(step - first):
                result = train_step(self.engine, self.data.train, step, self.steps, self.pad_id)
            tokens, spent = tokens + result.real_tokens, spent + result.seconds
            self.progress = dataclasses.replace(self.progress, step=step + 1)
            self.metrics.write(
                Trained(
                    step=step + 1,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    lr=result.lr,
                    trained_tokens=result.trained_tokens,
                    real_tokens=result.real_tokens,
                    slots=result.slots,
                    seconds=result.seconds,
                    tokens_per_second=result.real_tokens / result.seconds,
                    memory=self._peak_memory(),
                    data_seconds=result.data_seconds,
                    mfu=self._mfu(result),
                    epoch=(step + 1) * self.recipe.batch.rows / len(self.data.train),
                )
            )
            if step == first:
                self._write_realised()
            done = step + 1 == self.steps
            better = self._evaluate_if_due(done)
            patience = self.recipe.evaluation.patience
            stop = patience is not None and self.progress.stale >= patience
            if stop:
                reason = "early stop"
            self._save_if_due(done or stop, better)
            if stop:
                break
        if self.engine.speaks:
            with self.engine.whole_weights():  # ZeRO-3 would partition what one rank loads
                publish(self.run)
        self.metrics.write(
            Ended(
                step=self.progress.step,
                seconds=time.perf_counter() - begun,
                reason=reason,
                peak_memory=self._peak_memory(),
                tokens_per_second=tokens / spent if spent else 0.0,
            )
        )
        if self.engine.speaks:
            plot_loss(self.run)
            if self.run.final.exists():
                write_card(self.run, self.run.final)
        self.engine.accelerator.wait_for_everyone()

    def _profile(self) -> Profile:
        adapter, shape = self.recipe.adapter, self.shape
        ranks = (adapter.r, *adapter.rank_pattern.values()) if adapter is not None else ()
        return Profile(
            self.run.profile if self.options.profile else None,
            self.engine.rank,
            print if self.engine.speaks else None,
            vocabulary=shape.vocab if shape is not None else 0,
            ranks=frozenset(ranks),
        )

    def _mfu(self, result: StepResult) -> float:
        """FLOPs that the step needed over those of matrix products alone in the same time."""
        if self.shape is None:
            return math.nan
        flops = step_flops(
            self.shape,
            result.real_tokens,
            result.trained_tokens,
            result.real_tokens / self.recipe.batch.rows,
            self.parameters[0] if self.recipe.adapter is not None else 0,
        )
        return flops / (result.seconds * self.matmul_rate)

    def _peak_memory(self) -> int:
        """Largest peak of any rank, in bytes."""
        mine = peak_bytes(self.engine.device)
        if self.engine.world == 1:
            return mine
        tensor = torch.tensor(mine, dtype=torch.int64, device=self.engine.device)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        return int(tensor.item())

    def _write_realised(self) -> None:
        held = dataclasses.asdict(self.engine.held())
        ranks: list[object] = [held]
        if self.engine.world > 1:
            ranks = [None] * self.engine.world
            torch.distributed.all_gather_object(ranks, held)
        accelerator = self.engine.accelerator
        if self.engine.speaks:
            write_json(
                self.run.realised,
                {
                    "distributed_type": accelerator.distributed_type.value,
                    "processes": accelerator.num_processes,
                    "mixed_precision": accelerator.mixed_precision,
                    "device": str(accelerator.device),
                    "trainable_parameters": self.parameters[0],
                    "parameters": self.parameters[1],
                    "ranks": ranks,
                },
            )

    def _evaluate_if_due(self, done: bool) -> bool:
        """Evaluate where it is due; returns whether it was the best so far."""
        every = self.recipe.evaluation.every
        due = done or (every is not None and self.progress.step % every == 0)
        if not due or not len(self.data.eval):
            return False
        result = evaluate(self.engine, self.data.eval, self.pad_id)
        best = self.progress.best_loss
        better = best is None or result.loss < best
        if better:
            self.progress = dataclasses.replace(
                self.progress, best_loss=result.loss, best_step=self.progress.step, stale=0
            )
        else:
            self.progress = dataclasses.replace(self.progress, stale=self.progress.stale + 1)
        self.metrics.write(
            Evaluated(
                step=self.progress.step,
                loss=result.loss,
                tokens=result.tokens,
                best=better,
                seconds=result.seconds,
            )
        )
        return better

    def _save_if_due(self, done: bool, better: bool) -> None:
        every = self.recipe.saving.every
        due = done or (every is not None and self.progress.step % every == 0)
        if not (due or better):
            return
        begun = time.perf_counter()
        size = checkpoint.save(self.engine, self.run, self.progress, self.tokenizer)
        if self.engine.speaks:
            if better:
                record = {"step": self.progress.step, "loss": self.progress.best_loss}
                write_json(self.run.best, record)
            checkpoint.prune(self.run, self.recipe.saving.keep, self.progress.best_step)
        seconds = time.perf_counter() - begun
        self.metrics.write(Saved(step=self.progress.step, seconds=seconds, bytes=size))


def publish(run: Run) -> None:
    """Put the result into `final/`: adapter or model of the best checkpoint, else the last one."""
    step = run.best_step() or run.newest()
    if step is None:
        return
    source = run.checkpoint(step)
    if (source / "adapter").exists():
        export(run, run.final, step=step)
        return
    # A whole model is copied: `export` would hold all of it in fp32.
    scratch = run.final.with_name(".final.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source / "model", scratch)
    shutil.copytree(source / "tokenizer", scratch, dirs_exist_ok=True)
    shutil.rmtree(run.final, ignore_errors=True)
    scratch.rename(run.final)


def claim(run: Run, recipe: Recipe, resume: bool) -> int | None:
    """Take a directory for a run; returns the step to continue from, None for a new start.

    Raises:
        FinetuneError: it holds another recipe's run, or one that was not asked to be continued.
    """
    if not run.recipe.exists():
        try:
            run.root.mkdir(parents=True, exist_ok=True)
            others = sorted(path.name for path in run.root.iterdir())
        except OSError as error:
            raise FinetuneError(
                f"{run.root}: no directory for a run ({error.strerror}); choose another --output"
            ) from None
        if others:
            raise FinetuneError(
                f"{run.root}: not empty and not a run (it holds {others[0]}"
                f"{f' and {len(others) - 1} more' if others[1:] else ''}); choose another --output"
            )
        return None
    changed = catalog.differences(catalog.load(run.recipe), recipe)
    if changed:
        raise FinetuneError(
            f"{run.root}: holds the run of another recipe; choose another --output. "
            f"They differ in {'; '.join(changed)}"
        )
    newest = run.newest()
    if resume:
        return newest
    if newest is not None:
        raise FinetuneError(
            f"{run.root}: holds this recipe's run up to step {newest}; continue it with --resume, "
            "or choose another --output"
        )
    return None


def accelerators() -> list[str]:
    """Names of the accelerators of this machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(index) for index in range(count)]


def data_cache() -> Path:
    """Where prepared rows are kept: FINETUNE_CACHE, else the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "finetune"
    return Path(os.environ.get("FINETUNE_CACHE", default)).expanduser() / "data"
