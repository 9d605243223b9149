"""Cross-entropy of rows, computed with the loss masks and the loss code of training."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from finetune.checkpoints.stop_tokens import network_of
from finetune.data.chat.render import Chat
from finetune.data.images.image_file import PlacedImage
from finetune.data.rows.collate import collate
from finetune.data.rows.encode import fit, images_of
from finetune.data.rows.order import split_rows
from finetune.data.rows.store import Columns, composed, single_rows
from finetune.data.samples import Sample
from finetune.data.tally import Tally
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError, refuse
from finetune.inference.generate import Loaded
from finetune.kernels.head import WithLoss, give_loss
from finetune.methods.losses import token_logps
from finetune.models.load_checks import token_rows
from finetune.models.vocabulary import pad_id
from finetune.planner.families import family_of
from finetune.process.progress import counted
from finetune.recipe import Batch, Recipe

UNBOUNDED = Batch(max_length=10**12)


@dataclasses.dataclass(frozen=True)
class RowLosses:
    """Loss sums of each row, in order; 0 for rows that training drops."""

    nll: np.ndarray  # (rows, documents) fp64: summed over trained tokens, in nats
    tokens: np.ndarray  # (rows, documents) int64: trained tokens

    def sums(self, document: int = 0) -> np.ndarray:
        """Loss and trained tokens of one document of every row.  # (rows, 2)"""
        return np.stack([self.nll[:, document], self.tokens[:, document]], axis=1)


def row_losses(
    loaded: Loaded,
    recipe: Recipe,
    chat: Chat,
    samples: Sequence[Sample],
    batch_rows: int,
    bounded: bool = False,
) -> RowLosses:
    """The loss of each row with the loss mask of `recipe`.

    Args:
        bounded: Truncate or drop rows as the recipe does; otherwise use complete rows.

    Raises:
        FinetuneError: a row cannot be rendered, or is longer than the model's context.
    """
    columns, images, owners = _encoded(
        recipe, chat, samples, recipe.batch if bounded else UNBOUNDED
    )
    _refuse_overlong(loaded, columns)
    sums = document_sums(loaded, columns, images, batch_rows)  # (documents, 2)
    documents = recipe.documents_per_row
    found = np.zeros((len(samples), documents, 2))
    for number, owner in enumerate(owners):
        found[owner] += sums[number * documents : (number + 1) * documents]
    return RowLosses(found[..., 0], found[..., 1].astype(np.int64))


def _encoded(
    recipe: Recipe, chat: Chat, samples: Sequence[Sample], batch: Batch
) -> tuple[list[Columns], list[list[PlacedImage]], list[int]]:
    """Documents of all rows, the images of each, and the row of each `documents_per_row`."""
    columns, images = list[Columns](), list[list[PlacedImage]]()
    owners, problems = list[int](), list[str]()
    for number, sample in enumerate(samples):
        try:
            example = recipe.encode(sample, chat)
        except (FinetuneError, RowProblem) as error:
            reasons = error.problems if isinstance(error, FinetuneError) else (error,)
            problems += [f"row {number + 1}: {each}" for each in reasons]
            continue
        for piece in fit(example, batch, Tally(), ""):
            columns += piece
            images += images_of(example, piece)
            owners.append(number)
    refuse(problems[:10])
    return columns, images, owners


def _refuse_overlong(loaded: Loaded, columns: Sequence[Columns]) -> None:
    longest = max((len(ids) for ids, _ in columns), default=0)
    if loaded.context is not None and longest > loaded.context:
        raise FinetuneError(
            f"a row has {longest} tokens, but the context of the model has {loaded.context}; give "
            "shorter rows with --data"
        )


def document_sums(
    loaded: Loaded, columns: list[Columns], images: Sequence[Sequence[PlacedImage]], batch_rows: int
) -> np.ndarray:
    """Summed cross-entropy and number of trained tokens of each document.  # (documents, 2) fp64

    Logits are computed in chunks if the head is a plain linear layer.
    """
    if not columns:
        return np.zeros((0, 2))
    _enable_loss(loaded)
    rows = single_rows(composed(columns, images))
    rows = dataclasses.replace(rows, image_inputs=loaded.images)
    model: Any = loaded.model
    pad = pad_id(loaded.tokenizer, token_rows(model))
    found = np.zeros((len(rows), 2))
    parts = split_rows(np.arange(len(rows)), rows.slots, batch_rows, None, side_by_side=False)
    for chosen in counted(parts, "losses", len(rows), size=len):
        batch = collate(rows, chosen, pad, model.device)
        with torch.inference_mode():
            logps, _ = token_logps(model, batch)  # (trained_tokens,)
        counts = batch.document_labels.tolist()
        for index, part in zip(chosen, logps.double().cpu().split(counts), strict=True):
            found[index] = -part.sum().item(), len(part)
    return found


def _enable_loss(loaded: Loaded) -> None:
    """Make a loaded model compute its loss, in chunks if its head supports it."""
    network: Any = network_of(loaded.model)
    if isinstance(network, WithLoss):
        return
    head = network.get_output_embeddings()
    plain = type(head) is torch.nn.Linear and family_of(network.config.model_type).logits
    give_loss(network, chunked=plain)
