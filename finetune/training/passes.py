"""Forward passes without gradients that a method asks for: over all documents, or over a step."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from finetune.data.prepare import Prepared
from finetune.data.rows.collate import MicroBatch, collate
from finetune.data.rows.store import Rows
from finetune.distributed.base import Engine
from finetune.errors import FinetuneError
from finetune.methods.losses import sequence_logps
from finetune.models.model import compute_dtype, frozen
from finetune.recipe import Model
from finetune.training.reference.answer_logps import (
    answer_micro_batches,
    mismatched_batches,
    sum_logps,
)

Value = Callable[[torch.nn.Module, MicroBatch], torch.Tensor]
"""Values of each document of a micro-batch from the model, (documents, ...)."""


def logps(model: torch.nn.Module, batch: MicroBatch, tail: float = 1.0) -> torch.Tensor:
    """Log-probability of the trained tokens of each document, (documents,) fp64.

    `tail` is `Recipe.tail_weight`.
    """
    return sequence_logps(model, batch, tail)[0]


def used(data: Prepared) -> np.ndarray:
    """Numbers of the documents used by any row, ascending.  # (documents,) int64"""
    return np.unique(np.concatenate([data.train.members, data.eval.members]))


@dataclasses.dataclass(frozen=True)
class DataPasses:
    """Passes over all documents of a run, before its first step."""

    engine: Engine
    data: Prepared
    pad_id: int

    @contextlib.contextmanager
    def other(self, chosen: Model) -> Iterator[None]:
        """Run another model in this context, in the compute precision of training."""
        dtype = compute_dtype(self.engine.plan)
        with (
            self.engine.running(frozen(self.engine, chosen)),
            torch.autocast(self.engine.device.type, dtype, enabled=dtype != torch.float32),
        ):
            yield

    @torch.no_grad()
    def of_documents(self, value: Value = logps, share_prompts: bool = True) -> np.ndarray:
        """Values of each document on every rank, (documents, ...) fp64; NaN where none is used.

        In eval mode, because dropout would make the values random.

        Args:
            value: computes them from a micro-batch; log-probabilities by default.
            share_prompts: whether rows may share prompts, as they do for the trained model.
        """
        engine, train = self.engine, self.data.train
        numbers, each = used(self.data), engine.plan.recipe.documents_per_row
        rows = Rows(
            train.documents, numbers, np.arange(0, len(numbers) + 1, each),
            packed=train.side_by_side, share_prompts=train.share_prompts and share_prompts,
            image_inputs=train.image_inputs,
        )  # fmt: skip
        found = list[tuple[np.ndarray, np.ndarray]]()
        engine.model.eval()
        for indices in answer_micro_batches(engine, rows):
            collated = collate(rows, indices, self.pad_id, engine.device)
            (batch,) = engine.local_batches([collated], self.pad_id)

            def forward(
                _: int,
                model: torch.nn.Module,
                batch: MicroBatch = batch,
                indices: np.ndarray = indices,
            ) -> torch.Tensor:
                values = value(model, batch)
                if len(values):  # documents of divided rows are on one process
                    places = [rows.bounds[index] + np.arange(each) for index in indices]
                    found.append((numbers[np.concatenate(places)], values.double().cpu().numpy()))
                return values.sum()

            engine.forward_only(batch, forward)
        engine.reshard()
        everywhere = [part for rank in engine.gather(found) for part in rank]
        shape = everywhere[0][1].shape[1:] if everywhere else ()
        whole = np.full((len(train.documents), *shape), np.nan)
        for documents, values in everywhere:
            whole[documents] = values
        return whole


@dataclasses.dataclass(frozen=True)
class StepPasses:
    """Passes over the rows of a step, or of an evaluation, before its own passes."""

    engine: Engine
    rows: Rows
    pad_id: int
    chosen: np.ndarray  # (rows,) int64: row numbers of the step, over all ranks
    number: int
    """Number of the step, from 0; 0 for an evaluation."""
    epoch: int
    """Epoch in which the step begins; 0 for an evaluation."""
    mine: Sequence[np.ndarray] = ()  # (micro_rows,) int64 each
    """Row numbers of this rank's micro-batches."""
    batch_of: Callable[[int], MicroBatch] | None = None
    """This rank's micro-batch of an index; None where there are only other rows to pass over."""
    seeds: tuple[int, ...] = ()
    """Dropout seed of each micro-batch; empty for an evaluation, which has no dropout."""

    @property
    def reference(self) -> float:
        """`Recipe.reference_of_step` of this step, computed before the first one."""
        assert self.rows.step_reference is not None
        return float(self.rows.step_reference[self.number])

    def mismatched_logps(self) -> tuple[float, int]:
        """Sum of the log-probabilities of answers to other rows' prompts, and their number.

        Over all ranks; see `finetune.data.mismatched`.
        """
        return sum_logps(
            self.engine,
            mismatched_batches(self.engine, self.rows, self.chosen, self.epoch, self.pad_id),
        )

    @torch.no_grad()
    def of_rows(self, value: Value) -> torch.Tensor:
        """Values of each document of the step on every rank: (documents, ...) fp32 on its device.

        Ascending by row number, a row that is twice in the step once. With the dropout of the
        passes that follow, so that a rank's own documents have the same values there.

        Raises:
            FinetuneError: no process has all layers and all tokens of a document.
        """
        engine, mesh = self.engine, self.engine.plan.mesh
        if mesh.pipeline * mesh.sequence > 1:
            raise FinetuneError(
                f"method: {engine.plan.recipe.method} reads values of all documents of a step, and "
                "no process has a complete document under this backend; use fsdp_full_shard"
            )
        found = list[tuple[np.ndarray, torch.Tensor]]()
        engine.model.train(bool(self.seeds))
        assert self.batch_of is not None
        for at in range(len(self.mine)):
            batch = self.batch_of(at)
            if self.seeds:
                torch.manual_seed(self.seeds[at])

            def forward(
                _: int, model: torch.nn.Module, batch: MicroBatch = batch, at: int = at
            ) -> torch.Tensor:
                values = value(model, batch)
                found.append((self.places(at), values.float().cpu()))
                return values.sum()

            engine.forward_only(batch, forward)
        engine.reshard()
        parts = [part for rank in engine.gather(found) for part in rank if len(part[0])]
        whole = torch.empty(int(self._ends[-1]), *parts[0][1].shape[1:])
        for places, values in parts:
            whole[torch.from_numpy(places)] = values
        return whole.to(engine.device)

    def places(self, at: int) -> np.ndarray:
        """Places in `of_rows` of the documents of this rank's micro-batch `at`.  # (documents,)"""
        rows = np.searchsorted(np.unique(self.chosen), self.mine[at])
        starts = np.concatenate([[0], self._ends])
        parts = [np.arange(starts[row], starts[row + 1]) for row in rows]
        return np.concatenate([np.empty(0, np.int64), *parts])

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        """Number of documents up to and with each row of the step."""
        return np.cumsum([len(self.rows.numbers(int(row))) for row in np.unique(self.chosen)])
