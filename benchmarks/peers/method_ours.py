"""This toolkit in a race of methods: the worker of `finetune train`, one step at a time.

`our_start` runs it. The forward pass of the reference, which a run
computes before its first step, is repeated for the rows of each step and included in its time: its
cost is then that of one epoch.
"""

import dataclasses
import datetime
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers import method_job
from benchmarks.peers.method_job import MethodJob, read_job
from benchmarks.peers.ours import nothing_compiled
from benchmarks.peers.turns import Turns
from finetune import catalog
from finetune.checkpoints.checkpoint import Progress
from finetune.checks.request import check_here
from finetune.data.prepare import Prepared
from finetune.data.rows.order import rows_of_step
from finetune.data.rows.store import Rows, documents_of_rows
from finetune.distributed.build import build
from finetune.recipe import Recipe
from finetune.runs.run import Run
from finetune.training.loop import StepResult, TakesSteps
from finetune.training.reference import stored
from finetune.training.run_options import Options
from finetune.training.steps import Training
from finetune.training.worker import Worker

FORMATS = {"kto": "kto", "grpo": "prompts", "images": "prompt_completion"}
LONGEST = 2048


class InTurn(Training):
    """Takes one step per line of input."""

    turns: Turns

    def train(self) -> None:
        if self.recipe.method != "grpo":
            self.turns.watch(self.engine.model, read)
        self.turns.ready()
        super().train()

    def take_step(
        self,
        feed: TakesSteps,
        progress: Progress,
        measuring: AbstractContextManager[None] | None,
    ) -> StepResult:
        self.turns.wait()
        if self.recipe.reads_reference:
            stored.compute(self.engine, self._of_step(progress.step), 1, self.built.pad_id)
        result = super().take_step(feed, progress, None)
        metrics = dict(result.metrics) | {"num_tokens": result.tokens.real}
        self.turns.answer(result.loss, metrics)
        return result

    def _of_step(self, step: int) -> Prepared:
        """Only the rows of a step."""
        train, each = self.data.train, self.recipe.documents_per_row
        chosen = rows_of_step(step, len(train), self.recipe.batch.rows, self.recipe.seed)
        members = train.members[documents_of_rows(chosen, each)]
        bounds = np.arange(len(chosen) + 1) * each
        rows = dataclasses.replace(train, members=members, bounds=bounds)
        none = Rows(train.documents, members[:0], bounds[:1], packed=False)
        return dataclasses.replace(self.data, train=rows, eval=none)


def read(
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    document_tokens: torch.Tensor | None = None,
    **_: Any,  # places, targets, boundaries for kernels
) -> dict[str, Any]:
    """The inputs of a forward pass, under the names of `turns.documents`.

    A prompt that documents share is repeated for each of them.
    """
    if document_tokens is not None:
        assert position_ids is not None
        input_ids, position_ids = (each[:, document_tokens] for each in (input_ids, position_ids))
    return {
        "ids": input_ids, "labels": input_ids, "mask": attention_mask, "positions": position_ids,
    }  # fmt: skip


def recipe_of(job: MethodJob, place: Path) -> Recipe:
    """The recipe of a job, otherwise with defaults; code is compiled as in a run of many tokens."""
    fields: dict[str, Any] = {
        "method": "sft" if job.method == "images" else job.method,
        "model": {"name": str(place / "model")},
        "data": [
            {"source": str(place / "ours.jsonl"), "format": FORMATS.get(job.method, "preference")}
        ],
        "adapter": {"r": job.r, "alpha": job.alpha},
        "batch": {"rows": job.rows, "micro_rows": job.rows, "max_length": LONGEST},
        "optim": {"lr": job.lr, "schedule": "constant", "warmup": 0},
        "kernels": {"pointwise": "compiled", "allocator": "pooled"},
        "max_steps": job.steps + 1,  # waiting for one more step ends the process
        "data_checks": "report",
        "seed": job.seed,
    }
    if job.method == "images":
        fields["model"]["reads"] = ["image"]
    if job.method in ("dpo", "kto"):
        fields["reference"] = "base"  # so that it does not change with steps
    if job.method == "grpo":
        fields |= {
            "num_generations": method_job.GENERATIONS,
            "max_completion_length": method_job.COMPLETION_TOKENS,
            "reward_funcs": ["benchmarks.peers.method_job:even_share"],
        }
    return catalog.from_fields(fields)


def main(_: str, place: Path) -> None:
    turns, job = Turns(), read_job(place)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    shutil.rmtree(place / "run", ignore_errors=True)
    with nothing_compiled():
        settled = check_here(recipe_of(job, place), "single", "fp32")
        engine = build(settled, place / "offload", datetime.timedelta(minutes=5))
        options = Options(place / "run", plot=False)
        InTurn.turns = turns
        Worker(engine, Run(place / "run"), options, steps=InTurn).train()
