"""A process that prepares the buffers of a stream, one after another, ahead of the steps.

The folder of a buffer is renamed into place when it is complete:

    window-00000012/   window.json: positions of the sources at its start, counts, files
                       bad_rows.jsonl  documents/  train/  as prepared rows
    failed.json        problems, after the last buffer that could be prepared

It is a process of its own, so that reading and parsing take no time of the Python of a step.
"""

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.data.audit import count_rows
from finetune.data.chat.render import Chat
from finetune.data.chat.template_limits import evaluate_here
from finetune.data.prepare import Section, encode_sections, made_rows
from finetune.data.read.sources import Source
from finetune.data.rows.encode import Chunk, Encoded, Encoder
from finetune.data.rows.encode_pool import MOST_PROCESSES, crew, is_importable
from finetune.data.rows.store import save_rows
from finetune.data.stream.positions import Position, SourceReader, Versions, buffer_of
from finetune.errors import FinetuneError, first_line
from finetune.process.quiet import tokenise_on_one_core
from finetune.recipe import Recipe
from finetune.runs.limits import usable_cores
from finetune.runs.run import write_json

AHEAD = 2
"""Buffers that are prepared while an earlier one is used."""
JOB, FAILED, ABOUT = "job", "failed.json", "window.json"


@dataclass(frozen=True)
class Job:
    """What a process prepares."""

    recipe: Recipe
    chat: Chat
    sources: list[Source]
    versions: Versions
    folder: Path
    window: int
    """Number of the first buffer."""
    positions: list[list[int]]
    """Where its sources begin."""


def window_folder(folder: Path, window: int) -> Path:
    return folder / f"window-{window:08d}"


def serve(folder: str) -> None:
    """Prepare the buffers of the `Job` in a folder; a byte of standard input asks for one more."""
    tokenise_on_one_core()
    evaluate_here()
    os.dup2(2, 1)
    job: Job = pickle.loads((Path(folder) / JOB).read_bytes())
    asked = threading.Semaphore(AHEAD)

    def listen() -> None:
        while sys.stdin.buffer.read(1):
            asked.release()
        os._exit(0)  # the training has ended

    threading.Thread(target=listen, daemon=True).start()
    try:
        prepare_windows(job, asked.acquire)
    except Exception as error:  # the steps end with it, at the buffer that they miss
        known = isinstance(error, FinetuneError)
        problems = list(error.problems) if known else [f"data: {first_line(error)}"]
        write_json(job.folder / FAILED, {"problems": problems})
        if not isinstance(error, FinetuneError | OSError):
            raise
    threading.Event().wait()


def prepare_windows(job: Job, wait: Callable[[], object]) -> None:
    """Prepare one buffer after each `wait`, without end.

    Raises:
        FinetuneError: with the problems of the data.
    """
    encoder = Encoder(job.recipe, job.chat)
    processes = min(MOST_PROCESSES, usable_cores() // 2) if is_importable(encoder) else 1
    readers = [
        SourceReader(source, job.recipe.seed, Position(*position))
        for source, position in zip(job.sources, job.positions, strict=True)
    ]
    with crew(encoder, max(1, processes)) as encode_all:
        window = job.window
        while True:
            wait()
            _write(job, window, readers, encoder, encode_all)
            window += 1


def _write(
    job: Job,
    window: int,
    readers: list[SourceReader],
    encoder: Encoder,
    encode_all: Callable[[Iterable[Chunk]], Iterator[Encoded]],
) -> None:
    recipe, folder = job.recipe, job.folder / f".window-{window}"
    begin = [reader.position for reader in readers]
    parts = buffer_of(readers, job.sources, window, recipe.stream_buffer)
    sections = [Section(s, part=p) for s, p in zip(job.sources, parts, strict=True)]
    documents, facts, files = encode_sections(folder / "documents", encoder, sections, encode_all)
    order = {name: n for n, name in enumerate(name for each in readers for name in each.names)}
    ranks = np.array([order[name] for name in files], dtype=np.int64)
    for section in sections:
        # The order of the files, not that in which they were read: in a buffer that holds
        # everything, rows are those that would be prepared without a stream.
        origins = documents.origins[:: recipe.documents_per_row][section.members]
        section.members = section.members[np.lexsort((origins[:, 1], ranks[origins[:, 0]]))]
    rows = made_rows(documents, np.concatenate([each.members for each in sections]), recipe)
    save_rows(rows, folder / "train")
    shares = [(each.source.data, each.tally, each.members) for each in sections]
    counts = count_rows(rows, facts, shares, recipe, files)
    for about, versions in zip(counts["by_source"], job.versions, strict=True):
        about["revision"] = versions
    counts["left_out"] = 0  # a source that ends begins again
    write_json(folder / ABOUT, {"positions": begin, "counts": counts, "files": files})
    folder.rename(window_folder(job.folder, window))
