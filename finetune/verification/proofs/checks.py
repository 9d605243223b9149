"""Check the records of a proof's runs; each check returns the numbers that it compared."""

import json
import math
from pathlib import Path

import torch

from finetune.checkpoints.checkpoint import progress_of, read_manifest
from finetune.distributed.reader import Reader
from finetune.planner import Plan
from finetune.runs.run import Run
from finetune.verification.proofs import online_runs
from finetune.verification.proofs.proof import Check, Grid, Tolerance
from finetune.verification.proofs.runs import steps_of

UNEVEN = 1.25
"""Maximum size of a shard relative to an equal share, as rows and pieces may not divide evenly."""


def check_realised(kind: str, plan: Plan, run: Run) -> Check:
    """Compare elements of parameters, gradients and optimizer state per rank with the promise."""
    realised = json.loads(run.realised.read_text())
    stored, ranks = realised["stored"], realised["ranks"]
    wrong: list[str] = []
    if len(ranks) != plan.processes:
        wrong.append(f"{len(ranks)} ranks instead of {plan.processes}")
    for what, whole in (
        ("parameters", stored["parameters"]),
        ("gradients", stored["trained"]),
        ("optimizer", stored["trained"]),
    ):
        counts = [rank[what] for rank in ranks]
        least, most = _expected_elements(plan, what, whole, stored["small"])
        if plan.traits.divides:
            least, most = whole, _expected_of_division(plan, what, whole, stored)
        # Gradients of large partitions are written to the disk of the optimizer state.
        on_disk = what != "parameters" and plan.backend.device == "nvme"
        if max(counts) > most or (sum(counts) < least and not on_disk):
            wrong.append(f"{what}: {counts} of {whole}, promised at most {most} a process")
    rows = [(rank, *(counts[key] for key in _HELD)) for rank, counts in enumerate(ranks)]
    rows.append(("unsharded", stored["parameters"], stored["trained"], stored["trained"]))
    largest = max(rank["parameters"] for rank in ranks)
    summary = "; ".join(wrong) or (
        f"a process holds {largest:,} of {stored['parameters']:,} parameters and "
        f"{max(rank['optimizer'] for rank in ranks):,} of {stored['trained']:,} moments"
    )
    grid = Grid(("process", *_HELD), tuple(rows))
    return Check(kind, plan.backend.name, "realised", not wrong, summary, grid)


_HELD = ("parameters", "gradients", "optimizer")


def _expected_elements(plan: Plan, what: str, whole: int, small: int) -> tuple[int, int]:
    """Minimum number of elements over all ranks, and maximum on one rank."""
    backend, mesh = plan.backend, plan.mesh
    zero = plan.traits.masters
    sharded = {
        "none": (),
        "optimizer": ("optimizer",),
        "grads": ("gradients", "optimizer"),
        "params": _HELD,
    }[backend.shard]
    if plan.traits.shards_all:  # SHARD_GRAD_OP reshards after the backward pass
        sharded = _HELD
    if what not in sharded:
        # ZeRO-1 in fp32 reduces only each rank's part, which is less than it promises to hold. In
        # bf16 it holds each gradient twice: as computed, and in fp32 for accumulation.
        # Its flat buffers end with padding.
        copies = 2 if what == "gradients" and backend.precision == "bf16" else 1
        return (
            (whole, math.ceil(UNEVEN * copies * whole)) if zero else (whole * plan.processes, whole)
        )
    kept = small if zero and what == "parameters" else 0
    return whole * mesh.replicate, kept + math.ceil(UNEVEN * (whole - kept) / mesh.shard)


def _expected_of_division(plan: Plan, what: str, whole: int, stored: dict[str, int]) -> int:
    """Maximum elements on one process: a stage's layers, and the first or last stage's embeddings.

    Tensor parallelism replicates norms, and the gradient of an embedding is unsharded (torch 2.13).
    """
    mesh, tables, tensor = plan.mesh, min(stored["tables"], whole), plan.mesh.tensor
    if plan.recipe.adapter is not None and what != "parameters":
        tables, tensor = 0, 1  # one factor of each pair is on every process
    layers = math.ceil(UNEVEN * (whole - tables) / mesh.pipeline / tensor)
    kept = stored["small"] if mesh.tensor > 1 else 0
    held = tables if what == "gradients" else math.ceil(tables / tensor)
    return kept + math.ceil(UNEVEN * (layers + held) / mesh.shard)


def check_equal(
    kind: str,
    backend: str,
    reference: Run,
    run: Run,
    tolerance: Tolerance,
    steps: range,
    scale: float = 0.0,
) -> Check:
    """Compare each step's loss and gradient norm, evaluation and weights with one process.

    For online methods also completions and rewards. `scale` is that of `compare_steps`.
    """
    alone, here = steps_of(reference.metrics), steps_of(run.metrics)
    wrong, worst = compare_steps(alone, here, steps, tolerance, scale)
    wrong += online_runs.differences(reference, run, tolerance)
    apart = weights_apart(reference, run, steps[-1], tolerance.strays)
    if not apart <= tolerance.weights:
        wrong.append(f"trained weights {apart:.1e} apart, at most {tolerance.weights:.0e}")
    wrong += _evaluation_differs(reference, run, steps[-1], tolerance)
    summary = "; ".join(wrong) or (
        f"loss {worst[0]:.1e} apart (at most {tolerance.loss:.0e}), gradient norm {worst[1]:.1e} "
        f"({tolerance.norm:.0e}), trained weights {apart:.1e} ({tolerance.weights:.0e})"
    )
    columns = ("step", "one process", backend, "apart", "norm alone", "norm here", "norms apart")
    grid = Grid(columns, tuple(_row(step, alone, here, scale) for step in steps))
    return Check(kind, backend, "equal", not wrong, summary, grid)


Steps = dict[int, dict[str, float]]


def _row(step: int, alone: Steps, here: Steps, scale: float) -> tuple[int | float | None, ...]:
    first, second = alone.get(step, {}), here.get(step, {})
    row: list[int | float | None] = [step]
    for key, least in (("loss", scale), ("grad_norm", 0.0)):
        row += [first.get(key), second.get(key), apart_by(first.get(key), second.get(key), least)]
    return tuple(row)


def apart_by(first: float | None, second: float | None, scale: float = 0.0) -> float:
    """Difference relative to the larger of `first` and `scale`.

    Infinite if one value is missing or, as null, not finite.
    """
    if first is None or second is None:
        return math.inf
    if first == second:
        return 0.0
    return abs(first - second) / max(abs(first), scale, 1e-12)


def compare_steps(
    alone: Steps, here: Steps, numbers: range, tolerance: Tolerance, scale: float = 0.0
) -> tuple[list[str], tuple[float, float]]:
    """Values out of tolerance, and the largest differences of loss and gradient norm.

    Args:
        alone: steps on one process.
        here: steps on the backend.
        numbers: step numbers to compare.
        tolerance: maximum differences.
        scale: size of the terms of a loss that nearly cancel; its difference is relative to that.
    """
    wrong: list[str] = []
    worst = [0.0, 0.0]
    for step in numbers:
        for index, (key, name, limit) in enumerate(
            (("loss", "loss", tolerance.loss), ("grad_norm", "gradient norm", tolerance.norm))
        ):
            first, second = alone.get(step, {}).get(key), here.get(step, {}).get(key)
            apart = apart_by(first, second, scale if key == "loss" else 0.0)
            worst[index] = max(worst[index], apart)
            if not apart <= limit:
                wrong.append(
                    f"step {step}: {name} {second} instead of {first} (at most {limit:.0e} apart)"
                )
    more = len(wrong) - 3
    return wrong[:3] + ([f"{more} more"] if more > 0 else []), (worst[0], worst[1])


def weights_apart(reference: Run, run: Run, steps: int, strays: float = 1e-4) -> float:
    """Distance of two runs' trained weights, relative to the reference's change since its middle.

    Both are Euclidean norms over the trained elements in fp32. The distance leaves out the share
    `strays` of each tensor that differs most: where the first gradient of an element is rounding
    noise, the sign of that noise moves it by a full learning rate under Adam.
    """
    folders = reference.checkpoint(reference.steps()[0]), reference.checkpoint(steps)
    other = run.checkpoint(steps)
    if not (other / "manifest.json").is_file():
        return math.inf
    names = read_manifest(folders[1])["shapes"]
    if names != read_manifest(other)["shapes"]:
        return math.inf
    moved = apart = 0.0
    with Reader(folders[0]) as middle, Reader(folders[1]) as end, Reader(other) as here:
        for name in names:
            last = end.full(name, "weight").double()
            moved += _square(last - middle.full(name, "weight").double())
            apart += _square_without_largest(last - here.full(name, "weight").double(), strays)
    return math.sqrt(apart / moved) if moved else math.inf


def _square_without_largest(values: torch.Tensor, share: float) -> float:
    """Sum of squares of all elements but a share of the largest, at least one."""
    squares = (values * values).flatten()
    strays = squares.topk(min(len(squares), math.ceil(share * len(squares)))).values
    return max(0.0, float(squares.sum() - strays.sum()))


def _square(values: torch.Tensor) -> float:
    return float((values * values).sum())


def _evaluation_differs(reference: Run, run: Run, steps: int, tolerance: Tolerance) -> list[str]:
    """Differences in the final evaluation state: best loss, its step, evaluations since."""
    if not (run.checkpoint(steps) / "manifest.json").is_file():
        return [f"no checkpoint of step {steps}"]
    alone, here = (progress_of(each.checkpoint(steps)) for each in (reference, run))
    if alone.best_loss is None and here.best_loss is None:
        return []
    wrong: list[str] = []
    if (alone.best_step, alone.stale) != (here.best_step, here.stale):
        wrong.append(f"best evaluation at step {here.best_step} instead of {alone.best_step}")
    elif not apart_by(alone.best_loss, here.best_loss) <= tolerance.loss:
        wrong.append(f"best evaluation {here.best_loss} instead of {alone.best_loss}")
    return wrong


def check_same_bits(kind: str, backend: str, killed: Path, run: Run, middle: int) -> Check:
    """Compare bit for bit the steps between a checkpoint and the kill with their repetition."""
    before, after = steps_of(killed), steps_of(run.metrics)
    again = [step for step in before if step > middle]
    keys = ("loss", "grad_norm", "lr")
    wrong = [
        f"step {step}: {key} {after.get(step, {}).get(key)} instead of {before[step][key]}"
        for step in again
        for key in keys
        if after.get(step, {}).get(key) != before[step][key]
    ]
    continued = [record["resumed_from"] for record in run.read_metrics("start")]
    if continued[-1:] != [middle]:
        wrong.append(f"continued from step {continued[-1:]}, not {middle}")
    if not again:
        wrong.append("the run was killed before it took a step after its checkpoint")
    summary = "; ".join(wrong[:3]) or (
        f"killed -9 after step {max(before)}, continued from step {middle}: "
        f"steps {again[0]} to {again[-1]} have the same bits"
    )
    columns = ("step", "loss before the kill", "loss after", "norm before the kill", "norm after")
    rows = [
        (
            step,
            before[step]["loss"], after.get(step, {}).get("loss"),
            before[step]["grad_norm"], after.get(step, {}).get("grad_norm"),
        )
        for step in again
    ]  # fmt: skip
    return Check(kind, backend, "resume", not wrong, summary, Grid(columns, tuple(rows)))
