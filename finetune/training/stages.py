"""A training on one rank as a chain of values: inputs read, a model built, a run started."""

import contextlib
import dataclasses
import functools
import platform
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from finetune.cache import cache, keep_compiled
from finetune.checkpoints import checkpoint, stop_tokens
from finetune.checkpoints.base_weights import fingerprint, refuse_other_base
from finetune.checkpoints.checkpoint import Progress
from finetune.checkpoints.copies import bring_state, store_of_parts
from finetune.checkpoints.lock import locked, refuse_unshared
from finetune.checkpoints.resume import claim, refuse_other_data, standing
from finetune.checkpoints.saver import restore_best
from finetune.checks.machine import check_machine
from finetune.checks.model import context
from finetune.checks.start import Job, run_checks
from finetune.data.audit import identity, mistakes
from finetune.data.chat.render import Chat
from finetune.data.prepare import Prepared, prepare
from finetune.data.read.sources import Source, find_sources
from finetune.data.rows.store import Rows
from finetune.data.scratch import scratch_for
from finetune.data.stream.positions import Versions, versions_of
from finetune.data.stream.windows import Counts, Stream
from finetune.distributed.base import Engine
from finetune.distributed.layers import trained_shapes
from finetune.errors import FinetuneError
from finetune.kernels import cpu, pointwise
from finetune.models import (
    adapters,
    composition,
    image_parts,
    model,
    scoring,
    sizes,
    starting_adapter,
    teacher,
)
from finetune.models.packed_attention import layout
from finetune.planner.padding import Padding
from finetune.planner.prompt_sharing import SharedPrompts, shared_prompts
from finetune.recipe import Recipe
from finetune.runs.run import Run
from finetune.training import optim
from finetune.training.eval_metrics import Answering, answering
from finetune.training.memory_meter import Meter
from finetune.training.online.rollouts import Rollouts, rollouts_of
from finetune.training.recorder import Recorder, expected, tokens_of_run
from finetune.training.reference.second_model import second_model
from finetune.training.reference.stored import with_other, with_own, with_values
from finetune.training.run_options import Options


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
    stream: Stream | None = None
    """The rows of each step, if they are prepared while steps run; `data` is then an example."""


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
    adapter: str | None
    """SHA-256 of the adapter that training starts from; None without one."""
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
    # Before any work: another run may hold the directory, or it may not be one to continue.
    resumed = engine.on_rank_0(claimed)
    if (store := store_of_parts(run)) is None:
        refuse_unshared(run, engine)
    else:
        engine.on_every_rank(lambda: bring_state(run, store, resumed))
    tokenizer = model.load_tokenizer(recipe)
    chat = model.load_chat_of(recipe, tokenizer)
    tokenizer.chat_template = chat.saved  # saved: inference then renders as training did
    # First, because its process takes seconds to start.
    stream = _stream(engine, run, chat, resumed, held) if recipe.streams else None
    data = _prepare_on_ranks(engine, recipe, chat)
    if recipe.teaches:
        data = teacher.ready(recipe, tokenizer, data)
    if resumed is not None:
        # A step number stands for rows: of other rows, it would say nothing.
        refuse_other_data(run, resumed, identity(data.counts))
    # The layout of the forecast: the plan read the config file, if there is one yet.
    data = data.side_by_side(plan.padding.free, plan.prompts.shared)
    alone = plan.processes == 1
    data = data.with_image_inputs(image_parts.image_inputs(recipe.model, chat.images, alone))
    steps = plan.steps(len(data.train))
    optim.check(recipe.optim, plan.backend.shard != "none" or plan.backend.axes.any)
    optim.learning_rate(steps - 1, steps, recipe.optim, plan.lr)  # refuses wrong arguments
    on_gpu = engine.device.type == "cuda"
    check_machine(engine, expected(engine, data, steps, 0.0) if on_gpu else None)
    cadences = recipe.evaluation.every, recipe.saving.every
    evaluated, saved = (plan.interval(every, len(data.train)) for every in cadences)
    return Inputs(tokenizer, chat, data, steps, evaluated, saved, resumed, stream)


def _stream(
    engine: Engine, run: Run, chat: Chat, resumed: int | None, held: contextlib.ExitStack
) -> Stream:
    """The stream of a recipe's rows, from its beginning or from a checkpoint."""

    recipe = engine.plan.recipe

    def begin() -> tuple[list[Source], Versions, dict[str, Any] | None, Counts | None]:
        sources, _ = find_sources(recipe)
        versions = versions_of(sources)
        return sources, versions, *standing(run, resumed, versions)

    sources, versions, state, counts = engine.on_rank_0(begin)
    here, folder = platform.node(), cache("streams") / "rows"
    if is_first := engine.accelerator.is_local_main_process:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder = held.enter_context(scratch_for(folder))
    folders = {node: path for node, path, first in engine.gather((here, folder, is_first)) if first}
    stream = Stream(recipe, chat, sources, versions, folders[here], state, counts, len(folders))
    held.enter_context(stream.preparing(is_first))
    return stream


def start(
    engine: Engine, run: Run, options: Options, inputs: Inputs, recorder: Recorder
) -> Started:
    """Build the model, check it, and compute what its method needs before the first step."""
    resumed, steps = inputs.resumed is not None, inputs.steps
    meter = Meter(engine.device)
    # Another model as reference runs first: it has left memory when the model is loaded.
    data, other = with_other(engine, run, inputs.data, steps, inputs.tokenizer, resumed)
    built = build(engine, run, dataclasses.replace(inputs, data=data), recorder)
    job = Job(engine, run, inputs, built, recorder.forecast, options.timeout_minutes)
    report = run_checks(job)
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
    padding, prompts = (
        layout(recipe, network.config),
        shared_prompts(recipe, plan.backend, network.config.to_dict()),
    )
    data = data.side_by_side(padding.free, prompts.shared)
    pad_id, vocabulary_notes = scoring.fit_tokens(
        recipe, network, inputs.tokenizer, data.train.documents
    )
    if inputs.stream is not None:
        inputs.stream.check = functools.partial(
            _check_rows, recipe, network, inputs.tokenizer, data
        )
    tokenizer = stop_tokens.set_stop_tokens(network, inputs.chat, data.train)
    parameters, stored = sizes.counts(network), sizes.stored(engine, network)
    notes = [
        *plan.notes(), *recipe.data_advice(data.counts["train"]),
        *vocabulary_notes,
        *context(recipe, network, data), *model.kernel_notes(network, plan), *compiled,
        *composition.notes(network, recipe), *_cadences(recipe, inputs),
        *engine.on_every_rank(lambda: optim.group_notes(trained_shapes(network), recipe.optim)),
    ]  # fmt: skip
    adapter = None
    if recipe.model.adapter is not None:
        origin = starting_adapter.identity(recipe.model.adapter)
        is_new, adapter = inputs.resumed is None, str(origin["sha256"])
        notes += [engine.on_rank_0(lambda: starting_adapter.record(origin, recipe, run, is_new))]
    engine.on_rank_0(recorder.write_request)
    folder = None if inputs.resumed is None else run.checkpoint(inputs.resumed)
    if folder is None and engine.is_main and adapters.reads_base(recipe.adapter):
        # Such an adapter subtracted its initial product from the base: keep it to undo that.
        network.save_pretrained(run.initial_adapter)
        stop_tokens.follow_umask(run.initial_adapter)
    reference = second_model(engine, network)  # a copy of the start, so before the checkpoint
    if folder is not None:
        if recipe.adapter is not None or recipe.model.trainable:
            refuse_other_base(folder, recipe.model)
        # Complete weights go into the model before it is sharded, the optimizer's state after.
        checkpoint.load_weights(network, folder)
    made = engine.on_every_rank(lambda: optim.build(network, recipe.optim, plan.lr, plan))
    engine.prepare(network, made)
    progress = Progress(data=identity(data.counts), base=base)
    if folder is not None:
        checkpoint.load_state(engine, folder)
        engine.on_every_rank(lambda: optim.take_over(engine))
        saved = checkpoint.progress_of(folder)
        # The identities of this start, which were compared with the saved ones.
        progress = dataclasses.replace(saved, data=progress.data, base=base)
        engine.on_rank_0(lambda: restore_best(run, progress))
    return Built(
        data, tokenizer, pad_id, base, adapter, padding, prompts, parameters, stored, reference,
        notes + engine.notes, progress,
    )  # fmt: skip


def _check_rows(
    recipe: Recipe,
    network: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: Prepared,
    rows: Rows,
) -> None:
    """Refuse a buffer of a stream whose tokens or lengths the model does not have."""
    largest = int(rows.documents.ids.max(initial=0))
    scoring.refuse_tokens_without_rows(recipe, tokenizer, scoring.token_rows(network), largest)
    context(recipe, network, dataclasses.replace(data, train=rows))


def _cadences(recipe: Recipe, inputs: Inputs) -> Iterator[str]:
    """What cadences that are not given in steps come to, and which are longer than the run."""
    for field, given, steps in (
        ("evaluation.every", recipe.evaluation.every, inputs.evaluation_every),
        ("saving.every", recipe.saving.every, inputs.saving_every),
    ):
        if given != steps:
            yield f"{field}: {given} is every {steps} of {inputs.steps} steps"
        elif steps is not None and steps > inputs.steps:
            yield f"{field}: {given} is more than the {inputs.steps} steps: only at the end"


def _prepare_on_ranks(engine: Engine, recipe: Recipe, chat: Chat) -> Prepared:
    """Rows of a recipe's data, the same on every rank.

    Raises:
        FinetuneError: on every rank, with problems of the data, or if a rank reads different data.
    """
    folder = cache("data")
    with engine.patient():
        counts = engine.on_rank_0(lambda: prepare(recipe, chat, folder).counts)
        # Check once on each machine, which may have its own disk.
        check = engine.accelerator.is_local_main_process and not engine.is_main
        prepared = prepare(recipe, chat, folder, check=check)
        engine.sums_and_maxima([], [len(prepared.train)])
    if prepared.counts != counts:
        raise FinetuneError(f"rank {engine.rank} reads different data than rank 0")
    problems = list(mistakes(counts["train"]))
    if problems and recipe.data_checks == "refuse":
        raise FinetuneError(*problems)
    return prepared


def _check_compiler(engine: Engine) -> None:
    """Compile and run one kernel if the blocks of the model will be compiled; collective.

    Raises:
        FinetuneError: on every rank, if one cannot compile.
    """
    if engine.plan.recipe.kernels.blocks == "eager":
        return
    keep_compiled(pointwise.usual_folder)
    reasons = engine.gather(pointwise.against_inductor(engine.device))
    for rank, reason in enumerate(reasons):
        if reason is not None:
            place = f"rank {rank}: " if engine.world > 1 else ""
            raise FinetuneError(f"kernels.blocks: {place}{reason}; use kernels.blocks=eager")


def choose_compiled(engine: Engine, data: Prepared, steps: int) -> list[str]:
    """Switch compiled pointwise chains and the memory pool on or off; returns notes for the log.

    If one rank cannot compile the chains, no rank uses them: a job is as fast as its slowest rank.
    """
    _check_compiler(engine)
    keep_compiled(pointwise.usual_folder)
    kernels, device = engine.plan.recipe.kernels, engine.device
    tokens = tokens_of_run(engine.plan, data, steps)
    dtype = model.compute_dtype(engine.plan)
    chained, of_chains = pointwise.settle(kernels.pointwise, device, tokens, dtype)
    somewhere_eager = bool(engine.largest([int(not chained)])[0])
    if chained and somewhere_eager:
        chained, of_chains = False, "kernels.pointwise: eager, because another rank cannot compile"
    pointwise.compile_chains(chained)
    pooled, of_pool = cpu.settle_pool(kernels.allocator, device, tokens)
    cpu.use_pool(pooled)
    return [note for note in (of_chains, of_pool) if note is not None]
