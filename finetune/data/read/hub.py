"""Read data sets from the Hugging Face hub."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from finetune.data.read.arrow import restorers, without_nulls
from finetune.data.read.files import Place
from finetune.errors import FinetuneError, reading
from finetune.recipe import Data


def hub_rows(data: Data) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set in the form that they would have in JSON."""
    with _hub(data) as datasets:
        yield from _as_json(
            _load(datasets.load_dataset, data, split=data.split, streaming=data.stream)
        )


def _as_json(rows: Any) -> Iterator[dict[str, Any]]:
    features = rows.features
    restored = None if features is None else restorers(features.arrow_schema, is_decoded=True)
    for row in rows:
        if restored is None:
            yield {name: without_nulls(value) for name, value in row.items()}
        else:
            yield row | {name: restore(row[name]) for name, restore in restored.items()}


@dataclass(frozen=True)
class HubPart:
    """A shard of a streamed data set."""

    data: Data
    number: int
    shard: Any

    def __str__(self) -> str:
        return f"{self.data.source} ({self.data.split}) part {self.number}"

    def rows(self, place: Place) -> Iterator[tuple[int, Any]]:
        """Rows after a place, which moves with them; those before it are read and left out."""
        with _hub(self.data):
            rows = _as_json(self.shard.skip(place.row))
            for row in rows:
                place.row += 1
                yield place.row, row


def hub_parts(data: Data) -> list[HubPart]:
    """The shards of a data set, which are read where they are."""
    with _hub(data) as datasets:
        rows = _load(datasets.load_dataset, data, split=data.split, streaming=True)
        count = rows.num_shards
        return [HubPart(data, number, rows.shard(count, number)) for number in range(count)]


def hub_version(data: Data) -> str:
    """An identifier of the content of a hub data set."""
    with _hub(data) as datasets:
        if data.stream:  # the commit
            return _load(datasets.load_dataset_builder, data).hash
        # A hash of the split's files and revision.
        return _load(datasets.load_dataset, data, split=data.split)._fingerprint


def _load(load: Callable[..., Any], data: Data, **options: Any) -> Any:
    """Load from the hub; offline what was loaded before, or a snapshot in the hub's cache.

    A revision has its own folder, since `datasets` (5.2) loads the latest entry of one offline.
    """
    from datasets import config
    from huggingface_hub import snapshot_download

    if data.revision is not None:
        own = str(data.revision).replace("/", "--")
        options["cache_dir"] = f"{config.HF_DATASETS_CACHE}/revisions/{own}"
    try:
        return load(data.source, data.subset, revision=data.revision, **options)
    except OSError:
        if not config.HF_HUB_OFFLINE:
            raise
    folder = snapshot_download(data.source, repo_type="dataset", revision=data.revision)
    return load(folder, data.subset, **options)


@contextlib.contextmanager
def _hub(data: Data) -> Iterator[ModuleType]:
    """Import `datasets`, and turn errors of the hub into a FinetuneError with the reason."""
    import datasets  # takes over a second; not needed for local files

    where = f"data.source: '{data.source}'"
    with reading(f"{where} is not a local file or folder, and the hub reports"):
        try:
            yield datasets
        except ImportError as error:  # decoders for images and audio; only text is trained
            raise FinetuneError(f"{where} cannot be read: {error}") from None
