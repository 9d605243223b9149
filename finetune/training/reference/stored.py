"""Log-probabilities of a reference: the model at the start, its base, or another model.

They are computed in one pass without gradients over all rows, before the first step, by the engine
that trains: no second model is in memory, and rewards start at zero. Another model runs before the
trained model is loaded, unsharded on every process unless the backend divides models. The values,
one per document, are stored in the run (`reference.npz`), because a resumed run cannot compute them
again; another run on the same data and model reads them from the cache.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import time
import zipfile
from pathlib import Path

import numpy as np
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from finetune.cache import cache
from finetune.checkpoints.base_weights import fingerprint
from finetune.checks.start import libraries
from finetune.data.prepare import Prepared
from finetune.data.rows.order import rows_of_step
from finetune.distributed.base import Engine
from finetune.errors import FinetuneError
from finetune.models import starting_adapter
from finetune.models.adapters import reads_base
from finetune.models.model import compute_dtype, weight_dtype
from finetune.models.teacher import REFERENCE, compare_tokenizer, refuse_tokens_without_rows
from finetune.planner import Plan
from finetune.recipe import Recipe
from finetune.recipe.references import BASE, START, other_model, reference_of
from finetune.runs.run import Run, replacing
from finetune.training.loop import epoch_of
from finetune.training.passes import DataPasses, StepPasses, logps, used

COLUMN = "reference"
"""Name of the log-probabilities in a batch's columns."""
TRAIN, EVAL = "kl", "kl_eval"
"""Names of `Recipe.reference_of_step` of each step, and of the evaluation."""

UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
Numbers = dict[str, np.ndarray]
"""Values by name, in fp64."""


def with_other(
    engine: Engine,
    run: Run,
    data: Prepared,
    steps: int,
    tokenizer: PreTrainedTokenizerBase,
    resumed: bool,
) -> tuple[Prepared, str]:
    """Like `with_reference`, for another model named by the recipe, before its own is loaded.

    Raises:
        FinetuneError: the other model has a different vocabulary.
    """
    recipe = engine.plan.recipe
    other = other_model(recipe)
    if other is None:
        return data, ""
    engine.on_rank_0(lambda: compare_tokenizer(tokenizer, other, REFERENCE))
    engine.on_rank_0(lambda: refuse_tokens_without_rows(other, data, REFERENCE))
    if not recipe.reads_reference:
        return data, ""
    given = with_reference(engine, run, data, steps, 0, fingerprint(other), resumed)
    gc.collect()
    return given


def with_own(
    engine: Engine,
    run: Run,
    data: Prepared,
    steps: int,
    pad_id: int,
    base: str | None,
    resumed: bool,
) -> tuple[Prepared, str]:
    """Like `with_reference`, for the model at the start of training, or its base."""
    recipe = engine.plan.recipe
    if not recipe.reads_reference or other_model(recipe) is not None:
        return data, ""
    return with_reference(engine, run, data, steps, pad_id, base, resumed)


def with_reference(
    engine: Engine,
    run: Run,
    data: Prepared,
    steps: int,
    pad_id: int,
    base: str | None,
    resumed: bool,
) -> tuple[Prepared, str]:
    """The same rows with the log-probability of each document, and a line on its source.

    Args:
        engine: holds the model at the start of training, unless `resumed`; holds no model yet if
            the recipe names another one.
        run: stores the values.
        data: training and evaluation rows.
        steps: number of steps of the run, each with its `reference_of_step`.
        pad_id: token id for padding.
        base: identity of the weights of the base or the other model; None if not known.
        resumed: whether the run is resumed; then its stored values are used.

    Raises:
        FinetuneError: the stored values cannot be read, or a value is not finite.
    """
    numbers, started, other = used(data), time.perf_counter(), other_model(engine.plan.recipe)
    sizes = {COLUMN: len(numbers)}
    if engine.plan.recipe.passes_before_step:
        sizes |= {TRAIN: steps, EVAL: 1}
    key = cache_key(engine.plan, data, steps, base)
    cached = None if key is None else cache("reference") / f"{key}.npz"
    # Another model can be evaluated again at any time; the start is gone once trained.
    found = engine.on_rank_0(lambda: _known(run, resumed, cached, sizes, again=other is not None))
    origin = "kept with the run" if resumed and run.reference.is_file() else f"from {cached}"
    if found is None:
        found = compute(engine, data, steps, pad_id)
        origin = f"computed in {time.perf_counter() - started:.1f} s"
        if cached is not None:
            engine.on_rank_0(lambda: _write(cached, found))
    values = found[COLUMN]
    wrong = numbers[~np.isfinite(values)]
    if len(wrong):
        raise FinetuneError(
            f"{data.place(int(wrong[0]))}: the reference gives it a log-probability that is not "
            f"finite ({len(wrong)} of {len(numbers)} sequences have one)"
        )
    if not (resumed and engine.on_rank_0(run.reference.is_file)):
        engine.on_rank_0(lambda: _write(run.reference, found))
    whole = np.full(len(data.train.documents), np.nan)
    whole[numbers] = values
    data = data.with_columns({COLUMN: whole}, found.get(TRAIN), found.get(EVAL))
    of = "" if other is None else f" of {other.name}"
    return data, f"\nreference  {len(numbers):,} log-probabilities{of}, {origin}"


def compute(engine: Engine, data: Prepared, steps: int, pad_id: int) -> Numbers:
    """Log-probabilities of the documents of `used`, on every rank, and `reference_of_step`s."""
    recipe, passes = engine.plan.recipe, DataPasses(engine, data, pad_id)
    other = other_model(recipe)
    with _own(engine) if other is None else passes.other(other):
        value = functools.partial(logps, tail=recipe.tail_weight)
        found = {COLUMN: passes.of_documents(value, share_prompts=other is None)[used(data)]}
        if recipe.passes_before_step:
            rows, size = data.train, recipe.batch.rows
            found[TRAIN] = np.array([
                recipe.reference_of_step(StepPasses(
                    engine, rows, pad_id, rows_of_step(step, len(rows), size, recipe.seed), step,
                    epoch_of(step, recipe, rows),
                ))
                for step in range(steps)
            ])  # fmt: skip
            held_out = StepPasses(engine, data.eval, pad_id, np.arange(len(data.eval)), 0, 0)
            found[EVAL] = np.array([recipe.reference_of_step(held_out)])
    return found


def _own(engine: Engine) -> contextlib.AbstractContextManager[None]:
    """Make the engine's model the recipe's reference inside this context.

    An initialization that subtracts the adapter's product from the base equals the base only with
    the adapter enabled; then both references are the same.
    """
    recipe, module = engine.plan.recipe, engine.module
    switched_off = reference_of(recipe) == BASE
    if switched_off and isinstance(module, PeftModel) and not reads_base(recipe.adapter):
        return module.disable_adapter()
    return contextlib.nullcontext()


def cache_key(plan: Plan, data: Prepared, steps: int, base: str | None) -> str | None:
    """Hash of everything that the values depend on; None if the base has no known identity.

    The engine, the number of processes and the micro-batch size are not part of it.

    Args:
        plan: plan of the run.
        data: rows of the run.
        steps: number of steps; part of the hash only if it has a `reference_of_step`.
        base: identity of the base's weights.
    """
    recipe = plan.recipe
    other, adapter = other_model(recipe), recipe.adapter
    model = other or recipe.model
    if model.name is not None and base is None:
        return None
    start = "zero"
    if other is not None:
        start = "another"
    elif reference_of(recipe) == START and model.adapter is not None:
        start = starting_adapter.identity(model.adapter)["sha256"]
    elif adapter is not None and (reads_base(adapter) or adapter.use_dora):
        start = json.dumps([dataclasses.asdict(adapter), recipe.seed], sort_keys=True)
    parts = {
        "rows": data.folder.name,
        "base": base or [model.config, recipe.seed],
        "model": [model.quantization, model.attention, list(model.add_tokens)],
        "adapter": start,
        "steps": [steps, recipe.batch.rows, recipe.seed] if recipe.passes_before_step else None,
        "precision": [str(compute_dtype(plan)), str(weight_dtype(plan))],
        "kernels": dataclasses.asdict(recipe.kernels),
        "libraries": libraries(""),
        "tail": recipe.tail_weight,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def with_values(engine: Engine, run: Run, data: Prepared, pad_id: int, resumed: bool) -> Prepared:
    """The same rows with what the method computes once for each document (`before_training`).

    Raises:
        FinetuneError: a resumed run has lost its values.
    """
    recipe, count = engine.plan.recipe, len(data.train.documents)
    if type(recipe).before_training is Recipe.before_training:
        return data
    found: Numbers | None = None
    if resumed:
        found = engine.on_rank_0(lambda: _read_values(run.values, count))
    if found is None:
        found = dict(recipe.before_training(DataPasses(engine, data, pad_id)))
        engine.on_rank_0(lambda: _write(run.values, found))
    return data.with_columns(found)


def _read_values(path: Path, count: int) -> Numbers:
    try:
        with np.load(path) as found:
            values = dict(found)
        if wrong := [name for name, each in values.items() if len(each) != count]:
            raise ValueError(f"{wrong[0]} has values of {len(values[wrong[0]])} documents")
    except UNREADABLE as error:
        raise _lost(path, "values of the documents", error) from None
    return values


def _lost(path: Path, what: str, problem: Exception | None) -> FinetuneError:
    return FinetuneError(
        f"{path}: the {what} cannot be read ({problem}); they were computed before the first step, "
        "and cannot be computed from a checkpoint: restore the file from a copy, or choose another "
        "--output"
    )


def _known(
    run: Run, resumed: bool, cached: Path | None, sizes: dict[str, int], again: bool
) -> Numbers | None:
    """The values stored in a resumed run, otherwise in the cache; None if there are none.

    Raises:
        FinetuneError: the run is resumed, neither has the values, and they cannot be computed
            `again`.
    """
    problem: Exception | None = None
    for path in ([run.reference] if resumed else []) + ([cached] if cached is not None else []):
        try:
            return _read(path, sizes)
        except UNREADABLE as error:
            problem = problem or error
    if resumed and not again:
        raise _lost(run.reference, "log-probabilities of the reference", problem)
    return None


def _read(path: Path, sizes: dict[str, int]) -> Numbers:
    """Values in a file, without those of later steps; reading verifies the zip checksums."""
    with np.load(path) as found:
        read = {name: found[name] for name in sizes}
    for name, count in sizes.items():
        values = read[name]
        if name == TRAIN and values.ndim == 1 and len(values) < count:
            raise ValueError(
                f"they were computed for {len(values)} steps, and the run now has {count}: "
                "max_steps and epochs of this method cannot be raised"
            )
        read[name] = values[:count] if name == TRAIN else values
        if read[name].shape != (count,) or values.dtype.kind != "f":
            raise ValueError(f"{name} is {values.dtype} {values.shape}, expected ({count},)")
    return {name: values.astype(np.float64) for name, values in read.items()}


def _write(path: Path, found: Numbers) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as scratch, scratch.open("wb") as file:
        np.savez(file, **found)  # type: ignore[arg-type]
