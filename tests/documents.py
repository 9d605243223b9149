"""Documents in memory."""

from collections.abc import Iterable

import numpy as np

from finetune.data.store import Columns, Documents


def documents_of(columns: Iterable[Columns]) -> Documents:
    parts = list(columns)
    return Documents(
        ids=np.concatenate([ids for ids, _ in parts]),
        trained=np.concatenate([trained for _, trained in parts]),
        offsets=np.cumsum([0, *(len(ids) for ids, _ in parts)]),
        origins=np.zeros((len(parts), 2), dtype=np.int64),
    )
