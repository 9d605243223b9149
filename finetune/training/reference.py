"""Log-probabilities of a reference: the model at the start, its base, or another model.

They are computed in one pass without gradients over all rows, before the first step, by the engine
that trains: no second model is in memory, and rewards start at zero. Another model runs before the
trained model is loaded, unsharded on every process unless the backend divides models. The values,
one per document, are stored in the run (`reference.npz`), because a resumed run cannot compute them
again; another run on the same data and model reads them from the cache.
"""

import contextlib
import dataclasses
import gc
import hashlib
import json
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from finetune.cache import cache
from finetune.checkpoints.base_weights import fingerprint
from finetune.data.collate import MicroBatch, collate
from finetune.data.order import rows_of_step
from finetune.data.prepare import Prepared
from finetune.data.store import Rows
from finetune.distributed.base import Engine
from finetune.errors import FinetuneError
from finetune.methods.losses import sequence_logps
from finetune.models import starting_adapter
from finetune.models.adapters import reads_base
from finetune.models.model import compute_dtype, frozen, weight_dtype
from finetune.models.teacher import REFERENCE, compare_tokenizer, refuse_tokens_without_rows
from finetune.planner import Plan
from finetune.recipe import Model
from finetune.recipe.references import BASE, START, other_model, reference_of
from finetune.runs.run import Run, replacing
from finetune.training.answers import answer_micro_batches, mismatched_batches, sum_logps
from finetune.training.loop import epoch_of
from finetune.training.startup_checks import libraries

COLUMN = "reference"
"""Name of the log-probabilities in a batch's columns."""
TRAIN, EVAL = "kl", "kl_eval"
"""Names of the sums over `mismatched` answers, of each step and of the evaluation."""

Numbers = dict[str, np.ndarray]
"""Values of a reference by these names, in fp64."""


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
        steps: number of steps of the run; methods that read the KL have one sum per step.
        pad_id: token id for padding.
        base: identity of the weights of the base or the other model; None if not known.
        resumed: whether the run is resumed; then its stored values are used.

    Raises:
        FinetuneError: the stored values cannot be read, or a value is not finite.
    """
    numbers, started, other = used(data), time.perf_counter(), other_model(engine.plan.recipe)
    sizes = {COLUMN: len(numbers)}
    if engine.plan.recipe.reads_kl:
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


def used(data: Prepared) -> np.ndarray:
    """Numbers of the documents used by any row, ascending.  # (documents,) int64"""
    return np.unique(np.concatenate([data.train.members, data.eval.members]))


def compute(engine: Engine, data: Prepared, steps: int, pad_id: int) -> Numbers:
    """Log-probabilities of the documents of `used`, on every rank.

    For methods that read the KL of a step, also the sums over the `mismatched` answers of each of
    the `steps` and of the evaluation.
    """
    recipe = engine.plan.recipe
    with _as_reference(engine):
        found = {COLUMN: _document_logps(engine, data, pad_id)}
        if recipe.reads_kl:
            found[TRAIN] = np.array([
                sum_logps(engine, mismatched_batches(
                    engine, data.train,
                    rows_of_step(step, len(data.train), recipe.batch.rows, recipe.seed),
                    epoch_of(step, recipe, data.train), pad_id,
                ))[0]
                for step in range(steps)
            ])  # fmt: skip
            held_out = np.arange(len(data.eval))
            given = mismatched_batches(engine, data.eval, held_out, 0, pad_id)
            found[EVAL] = np.array([sum_logps(engine, given)[0]])
    return found


@torch.no_grad()
def _document_logps(engine: Engine, data: Prepared, pad_id: int) -> np.ndarray:
    """(documents,) fp64, in eval mode, because dropout would make the values random."""
    numbers, each = used(data), engine.plan.recipe.documents_per_row
    bounds = np.arange(0, len(numbers) + 1, each)
    train, other = data.train, other_model(engine.plan.recipe)
    rows = Rows(
        train.documents, numbers, bounds, packed=train.side_by_side,
        share_prompts=train.share_prompts and other is None,
    )  # fmt: skip
    places, found = [np.empty(0, np.int64)], [np.empty(0, np.float64)]
    engine.model.eval()
    for indices in answer_micro_batches(engine, rows):
        (batch,) = engine.local_batches([collate(rows, indices, pad_id, engine.device)], pad_id)

        def forward(
            _: int,
            model: torch.nn.Module,
            batch: MicroBatch = batch,
            indices: np.ndarray = indices,
        ) -> torch.Tensor:
            logps, _ = sequence_logps(model, batch)
            if len(logps):  # documents of divided rows are on one process
                places.extend(rows.bounds[index] + np.arange(each) for index in indices)
                found.append(logps.cpu().numpy())
            return logps.sum()

        engine.forward_only(batch, forward)
    engine.reshard()
    values = np.full(len(numbers), np.nan)
    for at, logps in engine.gather((np.concatenate(places), np.concatenate(found))):
        values[at] = logps
    return values


def _as_reference(engine: Engine) -> contextlib.AbstractContextManager[None]:
    """Make the engine's model the recipe's reference inside this context.

    An initialization that subtracts the adapter's product from the base equals the base only with
    the adapter enabled; then both references are the same.
    """
    recipe = engine.plan.recipe
    other = other_model(recipe)
    if other is not None:
        return _as_other(engine, other)
    module, switched_off = engine.module, reference_of(recipe) == BASE
    if switched_off and isinstance(module, PeftModel) and not reads_base(recipe.adapter):
        return module.disable_adapter()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _as_other(engine: Engine, chosen: Model) -> Iterator[None]:
    """Run another model in the engine inside this context, in training's compute precision."""
    dtype = compute_dtype(engine.plan)
    with (
        engine.running(frozen(engine, chosen)),
        torch.autocast(engine.device.type, dtype, enabled=dtype != torch.float32),
    ):
        yield


def cache_key(plan: Plan, data: Prepared, steps: int, base: str | None) -> str | None:
    """Hash of everything that the values depend on; None if the base has no known identity.

    The engine, the number of processes and the micro-batch size are not part of it.

    Args:
        plan: plan of the run.
        data: rows of the run.
        steps: number of steps; part of the hash only for methods that read the KL of a step.
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
        "steps": [steps, recipe.batch.rows, recipe.seed] if recipe.reads_kl else None,
        "precision": [str(compute_dtype(plan)), str(weight_dtype(plan))],
        "kernels": dataclasses.asdict(recipe.kernels),
        "libraries": libraries(""),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


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
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            problem = problem or error
    if resumed and not again:
        raise FinetuneError(
            f"{run.reference}: the log-probabilities of the reference cannot be read ({problem}); "
            "they were computed before the first step, and cannot be computed from a checkpoint: "
            "restore the file from a copy, or choose another --output"
        )
    return None


def _read(path: Path, sizes: dict[str, int]) -> Numbers:
    """Values in a file, without those of later steps; reading verifies the zip checksums."""
    with np.load(path) as found:
        read = {name: found[name] for name in sizes}
    for name, count in sizes.items():
        values = read[name]
        if name == TRAIN and values.ndim == 1 and len(values) < count:
            raise ValueError(
                f"the KL was computed for {len(values)} steps, and the run now has {count}: "
                "max_steps and epochs of a method that reads it cannot be raised"
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
