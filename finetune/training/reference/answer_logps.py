"""Compute log-probabilities of answers without gradients."""

from collections.abc import Iterable

import numpy as np
import torch

from finetune.data.rows.collate import MicroBatch, collate
from finetune.data.rows.kl_pairs import mismatched
from finetune.data.rows.order import of_rank, split_rows
from finetune.data.rows.store import Rows
from finetune.distributed.base import Engine
from finetune.methods.losses import sequence_logps


def answer_micro_batches(engine: Engine, rows: Rows) -> list[np.ndarray]:
    """Row numbers of this rank's micro-batches; equally many per rank, for collective passes."""
    recipe = engine.plan.recipe
    batch = recipe.batch
    slots = batch.micro_rows * recipe.row_length if batch.packing else batch.micro_tokens
    cuts = split_rows(np.arange(len(rows)), rows.slots, batch.micro_rows, slots, rows.side_by_side)
    return [taken for _, taken in of_rank(cuts, engine.data_rank, engine.data_world)]


def mismatched_batches(
    engine: Engine, rows: Rows, chosen: np.ndarray, epoch: int, pad_id: int
) -> list[MicroBatch]:
    """This rank's micro-batches of the `mismatched` answers of the `chosen` rows."""
    recipe = engine.plan.recipe
    made = mismatched(rows, chosen, epoch, recipe.seed, recipe.batch.max_length)
    batches = [
        collate(made, taken, pad_id, engine.device) for taken in answer_micro_batches(engine, made)
    ]
    return engine.local_batches(batches, pad_id)


@torch.no_grad()
def sum_logps(engine: Engine, batches: Iterable[MicroBatch]) -> tuple[float, int]:
    """Sum of the log-probabilities of the answers over all ranks, and the number of answers.

    Runs in eval mode, because dropout would make the values random.
    """
    engine.model.eval()
    total, count = torch.zeros((), dtype=torch.float64, device=engine.device), 0
    for batch in batches:

        def forward(_: int, model: torch.nn.Module, batch: MicroBatch = batch) -> torch.Tensor:
            found = sequence_logps(model, batch)[0].sum()
            total.add_(found)
            return found

        engine.forward_only(batch, forward)
        count += len(batch.document_labels)
    engine.reshard()
    brought = [float(total), float(count)] if engine.counts else [0.0, 0.0]
    summed, counted = engine.sum(brought)
    return summed, int(counted)
