"""Log-probabilities of answers without gradients, also of those that belong to another prompt."""

import dataclasses
from collections.abc import Iterable

import numpy as np
import torch

from finetune.data.images.image_file import PlacedImage
from finetune.data.rows.collate import MicroBatch, collate
from finetune.data.rows.order import of_rank, permutation, split_rows
from finetune.data.rows.store import Columns, Rows, composed, single_rows
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


def mismatched(rows: Rows, chosen: np.ndarray, epoch: int, seed: int, max_length: int) -> Rows:
    """Combine the prompt of each document of a step with the answer of the previous document.

    The first document gets the answer of the last. Documents are in the order of the shuffle of
    `epoch`, each once, so the partners do not depend on ranks, micro-batches or packing:

        step     prompt a, answer a    prompt b, answer b    prompt c, answer c
        here     prompt a, answer c    prompt b, answer a    prompt c, answer b

    Args:
        rows: Rows of one document each, or packed rows.
        chosen: (rows,) indices of the step's rows.
        epoch: Epoch in which the step begins.
        seed: Seed of the shuffle.
        max_length: Tokens at which a document is truncated; if its prompt fills them, it is
            dropped.
    """
    parts = [rows.numbers(int(index)) for index in chosen]
    numbers = np.unique(np.concatenate([np.empty(0, np.int64), *parts]))
    place = np.empty(len(rows.used), dtype=np.int64)
    place[permutation(len(rows.used), seed, epoch)] = np.arange(len(rows.used))
    ordered = numbers[np.argsort(place[np.searchsorted(rows.used, numbers)])]
    documents = [rows.documents.document(int(number)) for number in ordered]
    joined, images = list[Columns](), list[list[PlacedImage]]()
    for index, number in enumerate(ordered) if len(documents) > 1 else ():
        whole = _joined(documents[index], documents[index - 1], max_length)
        if whole[1].any():
            joined.append(whole)
            asked = int(documents[index][1].argmax())
            of_prompt = rows.documents.images_of(int(number))
            images.append([image for image in of_prompt if image.end <= asked])
    made = single_rows(composed(joined, images))
    inputs = rows.image_inputs
    return dataclasses.replace(made, padding_free=rows.side_by_side, image_inputs=inputs)


def _joined(asked: Columns, reply: Columns, max_length: int) -> Columns:
    """The prompt of one document followed by the answer of another."""
    (ids, trained), (other, answered) = asked, reply
    prompt, start = int(trained.argmax()), int(answered.argmax())
    whole = np.concatenate([ids[:prompt], other[start:]])
    labels = np.concatenate([np.zeros(prompt, bool), answered[start:]])
    return whole[:max_length], labels[:max_length]
