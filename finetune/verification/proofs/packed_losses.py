"""Prove that packed rows train as separate rows do."""

import dataclasses
from pathlib import Path

from finetune.data.prepare import prepare
from finetune.models.model import load_chat_of
from finetune.recipe import Evaluation, Recipe, Saving
from finetune.runs.run import Run
from finetune.verification.proofs.checks import compare_steps
from finetune.verification.proofs.proof import Check, Grid, Tolerance
from finetune.verification.proofs.runs import steps_of
from finetune.verification.proofs.small_recipe import Subject

STEPS = 2
ROWS = 24


@dataclasses.dataclass(frozen=True)
class Packable:
    """A recipe in two variants: every step sees all rows equally often, unpacked or packed.

    Sampled completions are not packed; their variants are padded and padding-free.
    """

    unpacked: Recipe
    packed: Recipe


def make_packable(subject: Subject, processes: int, cache: Path) -> Packable:
    """The subject with steps that each cover all of a few rows.

    Rows per step are chosen so that both variants see each document equally often and divide among
    the processes: documents x 2 x processes, and packs x 2 x processes. Dropout is off, because its
    mask depends on the position of a row.
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
    packed = recipe.with_batch(packing=True)

    def filled(each: Recipe) -> Recipe:
        chat = load_chat_of(each)
        rows = len(prepare(each, chat, cache).train)
        return each.with_batch(rows=rows * 2 * processes, micro_rows=2)

    return Packable(filled(recipe), filled(packed))


def check_packing(
    kind: str, backend: str, unpacked: Run, packed: Run, limits: Tolerance, scale: float = 0.0
) -> Check:
    """Compare each step's loss, gradient norm and trained tokens, packed on the backend and
    unpacked on one process. They agree only if no token attends to another document."""
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
