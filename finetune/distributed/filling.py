"""Pad the micro-batches of a step to one shape."""

import dataclasses

import torch
import torch.nn.functional as F

from finetune.data.rows.collate import UNTRAINED, MicroBatch


def padded(batches: list[MicroBatch], pad_id: int, multiple: int = 1) -> list[MicroBatch]:
    """Pad micro-batches on the right to one shape, with a multiple of tokens; padding has no loss.

    Causal attention never looks to the right; in packed rows the padding is a separate document.
    """
    rows = max((batch.ids.shape[0] for batch in batches), default=0)
    longest = max((batch.ids.shape[1] for batch in batches), default=0)
    longest += -longest % multiple
    return [_filled(batch, rows, longest, pad_id) for batch in batches]


def _filled(batch: MicroBatch, rows: int, longest: int, pad_id: int) -> MicroBatch:
    more = longest - batch.ids.shape[1]
    by = (0, more, 0, rows - batch.ids.shape[0])
    bounds, mask = batch.boundaries, batch.attention_mask
    if bounds is None and mask is None:
        mask = torch.ones_like(batch.ids)
    if bounds is not None and more:
        extra = torch.arange(more, device=batch.ids.device)
        bounds = dataclasses.replace(
            bounds,
            positions=torch.cat([bounds.positions, extra[None]], 1),
            ends=torch.cat([bounds.ends, bounds.ends.new_tensor([longest])]),
            longest=max(bounds.longest, more),
            numbers=(*bounds.numbers, longest),
        )
    return dataclasses.replace(
        batch,
        ids=F.pad(batch.ids, by, value=pad_id),
        labels=F.pad(batch.labels, by, value=UNTRAINED),
        attention_mask=None,
        noise=None if batch.noise is None else batch.noise.padded(by),
        unpadded=None if mask is None else F.pad(mask, by),
        boundaries=bounds,
    )
