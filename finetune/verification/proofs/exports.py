"""Export and merge results, and load them in a process without this package."""

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from finetune.data.rows.store import Rows
from finetune.errors import FinetuneError, TrainingFailure
from finetune.exporters.export import export
from finetune.methods.online import Online
from finetune.models.image_parts import image_inputs
from finetune.models.model import load_chat_of, load_tokenizer
from finetune.runs.run import Run
from finetune.verification.proofs.checks import apart_by
from finetune.verification.proofs.online_runs import mean_reward
from finetune.verification.proofs.proof import Check, Tolerance
from finetune.verification.proofs.small_recipe import Subject

PLAIN = Path(__file__).with_name("plain_loader.py")


@dataclasses.dataclass(frozen=True)
class Delivery:
    """A finished run whose result is loaded with plain libraries."""

    kind: str
    backend: str
    subject: Subject
    run: Run
    bf16: bool


def check_deliveries(deliveries: Sequence[Delivery], tolerance: Tolerance) -> list[Check]:
    """Export each result, load all of them in one separate process, and check its answers."""
    checks: list[Check] = []
    tasks: list[tuple[Delivery, dict[str, Any]]] = []
    for delivery in deliveries:
        try:
            tasks.append((delivery, _task(delivery)))
        except FinetuneError as error:
            checks.append(_check(delivery, False, str(error)))
    if tasks:
        answers = _ask([task for _, task in tasks])
        checks += [
            judge(delivery, answer, tolerance)
            for (delivery, _), answer in zip(tasks, answers, strict=True)
        ]
    return checks


def _check(delivery: Delivery, passed: bool, summary: str) -> Check:
    return Check(delivery.kind, delivery.backend, "end to end", passed, summary)


def _task(delivery: Delivery) -> dict[str, Any]:
    run, recipe = delivery.run, delivery.subject.recipe
    model = recipe.model
    merged = None
    if recipe.adapter is not None:
        merged = str(export(run, run.root / "merged", merge=True, check_rows=0))  # compared there
    rows = delivery.subject.data.eval
    result = str(run.final)
    return {
        "base": model.name if recipe.adapter is not None else None,
        "revision": model.revision,
        "quantization": model.quantization,
        "bf16": delivery.bf16,
        # The base of an adapter on a model from scratch cannot be loaded by PEFT.
        "result": merged if model.name is None and merged else result,
        "merged": merged if model.name is not None else None,
        "scores": recipe.head.config or None,
        "pixels": _pixels(delivery, rows) if model.reads else None,
        "limit": recipe.max_completion_length if isinstance(recipe, Online) else None,
        "eos": delivery.subject.eos,
        "rows": [
            [column.tolist() for column in rows.documents.document(int(number))]
            for number in rows.members
        ],
    }


def _pixels(delivery: Delivery, rows: Rows) -> str:
    """A file with the inputs for the images of each row."""
    recipe, path = delivery.subject.recipe, delivery.run.root / "pixels.safetensors"
    inputs = image_inputs(recipe.model, load_chat_of(recipe).images, alone=True)
    assert inputs is not None
    documents = [int(number) for number in rows.members]
    found = {
        f"{row}.{name}": tensor.contiguous()
        for row, number in enumerate(documents)
        for name, tensor in inputs.of_row(
            rows.documents.document(number)[0].tolist(), rows.documents.images_of(number)
        ).items()
    }
    save_file(found, path)
    return str(path)


def _ask(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run plain_loader.py by path, isolated from this package (-P: without its own folder)."""
    done = subprocess.run(
        [sys.executable, "-P", str(PLAIN)],
        input=json.dumps(tasks),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise TrainingFailure(f"plain transformers and PEFT could not load the results: {last[0]}")
    return json.loads(done.stdout)


def _token_loss(record: dict[str, Any]) -> float:
    """Mean cross-entropy over the trained tokens of an evaluation, independent of the method.

    For a model with a score head the mean score; for an online method the mean reward.
    """
    metrics = record.get("metrics") or {}
    for name in ("reward", "mean_score", "mean_reward", "nll", "token_loss"):
        if name in metrics:
            return metrics[name]
    return record["loss"]


def judge(delivery: Delivery, answer: dict[str, Any], tolerance: Tolerance) -> Check:
    """Check for missing tensors, and compare the loss with training and the merged logits."""
    run = delivery.run
    step = run.best_step() or run.newest()
    recorded = {r["step"]: _token_loss(r) for r in run.read_metrics("eval")}
    problems, loss, apart = list(answer["problems"]), answer["loss"], math.inf
    if answer.get("completions") is not None:
        tokenizer = load_tokenizer(delivery.subject.recipe)
        loss = mean_reward(delivery.subject, tokenizer, answer["completions"])
    if loss is not None and step in recorded:
        apart = apart_by(recorded[step], loss)
    if step not in recorded:
        problems.append(f"no evaluation of step {step} is recorded")
    elif not apart <= tolerance.answers:
        problems.append(
            f"evaluation gives {loss} in plain transformers, {recorded[step]} in training"
        )
    difference = answer["difference"]
    if difference is not None and not difference <= tolerance.logits:
        problems.append(
            f"merged logits {difference:.1e} from the adapter's, at most {tolerance.logits:.0e}"
        )
    merged = "" if difference is None else f", merged logits {difference:.1e} apart"
    summary = "; ".join(problems[:4]) or (
        f"{answer['tensors']} tensors, none empty or missing; evaluation as in training to "
        f"{apart:.1e} (at most {tolerance.answers:.0e}){merged}"
    )
    return _check(delivery, not problems, summary)
