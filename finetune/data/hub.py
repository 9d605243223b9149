"""Rows of data sets of the Hugging Face hub."""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from finetune.data.arrow import restorers, without_nulls
from finetune.errors import FinetuneError
from finetune.recipe import Data


def hub_rows(data: Data) -> Iterator[dict[str, Any]]:
    """Rows of a data set, as the same rows in JSON would be."""
    with _hub(data) as datasets:
        rows = datasets.load_dataset(
            data.source, data.subset, split=data.split, streaming=data.stream
        )
        features = rows.features
        restored = None if features is None else restorers(features.arrow_schema, is_decoded=True)
        for row in rows:
            if restored is None:
                yield {name: without_nulls(value) for name, value in row.items()}
            else:
                yield row | {name: restore(row[name]) for name, restore in restored.items()}


def hub_version(data: Data) -> str:
    """What tells one content of a hub data set from another."""
    with _hub(data) as datasets:
        if data.stream:  # the commit
            return datasets.load_dataset_builder(data.source, data.subset).hash
        # A hash of the split's files and revision.
        return datasets.load_dataset(data.source, data.subset, split=data.split)._fingerprint


@contextlib.contextmanager
def _hub(data: Data) -> Iterator[ModuleType]:
    """`datasets`, where what the hub refuses is a FinetuneError with its reason."""
    import datasets  # takes over a second, and local files do not need it
    from datasets.exceptions import DatasetsError

    try:
        yield datasets
    except ImportError as error:  # pictures and sound, which only text is trained without
        raise FinetuneError(f"data.source: '{data.source}' cannot be read: {error}") from None
    except (OSError, ValueError, DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FinetuneError(
            f"data.source: '{data.source}' is no file or folder here, and the hub gave: {reason}"
        ) from None
