"""Prove that packed rows train as separate rows do."""

import dataclasses
from pathlib import Path

from finetune.data.chat.render import load_chat
from finetune.data.prepare import prepare
from finetune.models.model import load_tokenizer
from finetune.recipe import Batch, Evaluation, Recipe, Saving
from finetune.runs.run import Run
from finetune.verification.proofs.checks import compare_steps
from finetune.verification.proofs.proof import Check, Grid, Tolerance
from finetune.verification.proofs.runs import steps_of
from finetune.verification.proofs.small_recipe import Subject

FIELD = "packing"
"""The field of `batch` that packs rows."""
STEPS = 2
ROWS = 24


@dataclasses.dataclass(frozen=True)
class Packable:
    """One recipe twice: every step sees all rows equally often, a row at a time or packed.

    Completions that are sampled are not packed: padded, or side by side.
    """

    unpacked: Recipe
    packed: Recipe


def available() -> bool:
    """Whether recipes can pack."""
    return FIELD in {field.name for field in dataclasses.fields(Batch)}


def make_packable(subject: Subject, processes: int, cache: Path) -> Packable:
    """The subject with steps that go over the whole of a few rows.

    So many rows or packs make a step that both see each document equally often, and that they
    divide among the processes: documents x 2 x processes, and packs x 2 x processes. Nothing is
    dropped: which inputs are depends on where a row lies.
    """
    adapter = subject.recipe.adapter
    recipe = dataclasses.replace(
        subject.recipe,
        data=tuple(
            dataclasses.replace(d, first=min(d.first or ROWS, ROWS)) for d in subject.recipe.data
        ),
        adapter=dataclasses.replace(adapter, dropout=0.0) if adapter is not None else None,
        eval_data=(),
        eval_rows=None,
        evaluation=Evaluation(),
        saving=Saving(),
        max_steps=STEPS,
    )
    if recipe.takes == "prompts":
        padded = recipe.with_batch(padding_free=False, micro_rows=1)
        return Packable(padded, recipe.with_batch(padding_free="auto"))
    packed = recipe.with_batch(**{FIELD: True})

    def filled(each: Recipe) -> Recipe:
        chosen = each.model
        chat = load_chat(load_tokenizer(each), chosen.chat_template, chosen.chat_template_kwargs)
        rows = len(prepare(each, chat, cache).train)
        return each.with_batch(rows=rows * 2 * processes, micro_rows=2)

    return Packable(filled(recipe), filled(packed))


def absent(kind: str, backend: str) -> Check:
    """The answer where recipes cannot pack."""
    reason = f"not available: recipes have no batch.{FIELD}"
    return Check(kind, backend, "packing", None, reason)


def check_packing(
    kind: str, backend: str, unpacked: Run, packed: Run, limits: Tolerance, scale: float = 0.0
) -> Check:
    """Losses, gradient norms and trained tokens of each step, packed on the backend against
    unpacked on one process. They agree only where no token sees another document."""
    alone, together = steps_of(unpacked.metrics), steps_of(packed.metrics)
    wrong, worst = compare_steps(alone, together, range(1, STEPS + 1), limits, scale)
    columns = ("step", "loss", "packed", "norm", "packed norm", "tokens", "packed tokens")
    rows: list[tuple[int | float | None, ...]] = []
    for step in range(1, STEPS + 1):
        first, second = alone.get(step, {}), together.get(step, {})
        row: list[int | float | None] = [step]
        for key in ("loss", "grad_norm", "trained_tokens"):
            row += [first.get(key), second.get(key)]
        rows.append(tuple(row))
        if first.get("trained_tokens") != second.get("trained_tokens"):
            wrong.append(
                f"step {step}: {second.get('trained_tokens')} trained tokens together, "
                f"{first.get('trained_tokens')} apart"
            )
    tokens = int(alone.get(1, {}).get("trained_tokens", 0))
    summary = "; ".join(wrong) or (
        f"loss {worst[0]:.1e} apart, norm {worst[1]:.1e}, over {tokens:,} trained tokens a step"
    )
    return Check(kind, backend, "packing", not wrong, summary, Grid(columns, tuple(rows)))
