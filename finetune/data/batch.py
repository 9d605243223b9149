"""Rows as the tensors of one forward pass."""

from dataclasses import dataclass

import numpy as np
import torch

from finetune.data.rows import Rows

UNTRAINED = -100
"""The label that PyTorch's cross entropy leaves out."""


@dataclass(frozen=True)
class MicroBatch:
    """What one device sees in one forward pass."""

    ids: torch.Tensor  # (micro_rows, longest) int64
    labels: (
        torch.Tensor
    )  # (micro_rows, longest) int64: the ids where trained, else -100; not shifted
    attention_mask: torch.Tensor | None  # (micro_rows, longest) int64; None when nothing is padded
    rows: int
    """Rows of data in it; 0 for a batch that only keeps a rank in step."""
    trained_tokens: int
    """Labels that count."""
    real_tokens: int
    """Tokens that are no padding."""


def collate(rows: Rows, indices: np.ndarray, pad_id: int, device: torch.device | str) -> MicroBatch:
    """Rows side by side, padded on the right, on a device.

    Padding is known by its position, never by its id, so `pad_id` may be any token. No indices give
    a row of two tokens with nothing trained, for a rank that must run its collectives all the same.
    """
    if not len(indices):
        ids = torch.full((1, 2), pad_id, dtype=torch.int64, device=device)
        return MicroBatch(ids, torch.full_like(ids, UNTRAINED), None, 0, 0, 0)
    picked = [rows.row(int(index)) for index in indices]
    lengths = [len(ids) for ids, _ in picked]
    shape = (len(picked), max(lengths))
    ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, UNTRAINED, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.int64)
    for place, (row_ids, trained) in enumerate(picked):
        length = lengths[place]
        ids[place, :length] = row_ids
        labels[place, :length] = np.where(trained, row_ids, UNTRAINED)
        mask[place, :length] = 1
    labels[:, 0] = UNTRAINED  # the first token follows nothing
    padded = min(lengths) < max(lengths)
    return MicroBatch(
        ids=torch.from_numpy(ids).to(device),
        labels=torch.from_numpy(labels).to(device),
        attention_mask=torch.from_numpy(mask).to(device) if padded else None,
        rows=len(picked),
        trained_tokens=int((labels != UNTRAINED).sum()),
        real_tokens=sum(lengths),
    )
