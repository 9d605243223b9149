"""Prepared rows: columns of token ids in one memory-mapped folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Columns = tuple[np.ndarray, np.ndarray]
"""A row: its ids, (tokens,) int32, and which of them are trained, (tokens,) bool."""


@dataclass(frozen=True)
class Rows:
    """Rows of token ids, end to end; row i is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: np.ndarray  # (tokens,) int32
    trained: np.ndarray  # (tokens,) bool: the model is trained to say this token
    offsets: np.ndarray  # (rows + 1,) int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> Columns:
        """Views of a row's ids and of its trained tokens."""
        start, end = self.offsets[index], self.offsets[index + 1]
        return self.ids[start:end], self.trained[start:end]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row.  # (rows,) int64"""
        return np.diff(self.offsets)


def pack_rows(rows: Sequence[Columns]) -> Rows:
    """Rows end to end, in memory."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(ids) for ids, _ in rows], out=offsets[1:])
    ids = np.concatenate([ids for ids, _ in rows] or [np.empty(0, dtype=np.int32)])
    trained = np.concatenate([trained for _, trained in rows] or [np.empty(0, dtype=bool)])
    return Rows(ids, trained, offsets)


def save_rows(rows: Rows, folder: Path) -> None:
    folder.mkdir(parents=True)
    np.save(folder / "ids.npy", rows.ids)
    np.save(folder / "trained.npy", rows.trained)
    np.save(folder / "offsets.npy", rows.offsets)


def open_rows(folder: Path) -> Rows:
    """Rows of a folder, mapped, not read."""
    offsets = np.load(folder / "offsets.npy")
    mode = "r" if offsets[-1] else None  # an empty array cannot be mapped
    ids = np.load(folder / "ids.npy", mmap_mode=mode)
    return Rows(ids, np.load(folder / "trained.npy", mmap_mode=mode), offsets)
