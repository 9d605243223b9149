"""Documents in memory."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from finetune.data.rows.store import Columns, Documents, Rows, single_rows

PACKS = ((0, 1, 2), (3, 4, 5), (6, 7))


def documents_of(columns: Iterable[Columns]) -> Documents:
    parts = list(columns)
    return Documents(
        ids=np.concatenate([ids for ids, _ in parts]),
        trained=np.concatenate([trained for _, trained in parts]),
        offsets=np.cumsum([0, *(len(ids) for ids, _ in parts)]),
        origins=np.zeros((len(parts), 2), dtype=np.int64),
    )


def documents(seed: int = 0) -> Rows:
    """Documents of the lengths above; about half of their tokens are trained."""
    rng = np.random.default_rng(seed)
    columns = (
        (rng.integers(2, 96, length).astype(np.int32), rng.random(length) < 0.5)
        for length in (17, 9, 1, 23, 2, 6, 30, 5)
    )
    return single_rows(documents_of(columns))


def packs(rows: Rows) -> Rows:
    return dataclasses.replace(rows, bounds=np.cumsum([0, *map(len, PACKS)]), packed=True)
