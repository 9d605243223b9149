"""The rows of each step of a stream, from the buffers that the preparing process writes.

Each machine prepares the buffers for its processes; nothing is communicated. Rows of a buffer are
shuffled by the seed and its number, and steps take them in that order, buffer after buffer; a step
may begin in one and end in the next.
"""

import contextlib
import json
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.audit import merged, mistakes
from finetune.data.chat.render import Chat
from finetune.data.prepare import BAD_ROWS
from finetune.data.read.sources import Source
from finetune.data.rows.order import permutation
from finetune.data.rows.store import Rows, gathered, open_documents, open_rows
from finetune.data.stream.positions import Position, Versions
from finetune.data.stream.preparer import ABOUT, FAILED, JOB, Job, window_folder
from finetune.errors import FinetuneError
from finetune.process import interpreter
from finetune.recipe import Recipe

POLL = 0.02
"""Seconds between two looks for a buffer."""
KEPT_STEPS = 2
"""Steps for which a buffer is kept after its last row, until every process has taken its rows."""


class StreamFailure(FinetuneError):
    """The next rows of a stream cannot be prepared; the model's weights are not affected."""


@dataclass(frozen=True)
class Buffer:
    """A prepared buffer of rows."""

    number: int
    rows: Rows
    positions: list[list[int]]
    """Positions of the sources at its start."""
    files: list[str]
    counts: dict[str, Any]
    bad_rows: str
    """Lines of `bad_rows.jsonl`."""

    @classmethod
    def open(cls, folder: Path, number: int, packed: bool) -> "Buffer":
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        rows = open_rows(open_documents(folder / "documents"), folder / "train", packed)
        bad = folder / BAD_ROWS
        listed = bad.read_text(encoding="utf-8") if bad.is_file() else ""
        return cls(number, rows, about["positions"], about["files"], about["counts"], listed)


Counts = dict[str, Any]
"""Counts of the buffers that steps have begun to use, as of prepared rows (`audit.count_rows`), and
`windows`: their number."""


@dataclass(frozen=True)
class Taken:
    """The rows of a step of a stream."""

    rows: Rows
    parts: list[tuple[Buffer, np.ndarray]]
    """Their buffers, and their numbers there."""
    window: int
    """Buffer of the first row."""
    then: dict[str, Any]
    """State after the step, from which a `Stream` continues: see `Progress.stream`."""
    audits: list[tuple[Counts, str]]
    """The counts with each buffer that the step is the first to use, and lines of its bad rows."""

    def places(self, row: int) -> list[str]:
        """File and row of each document of a row."""
        each = [(buffer, index) for buffer, chosen in self.parts for index in chosen]
        buffer, index = each[row]
        origins = buffer.rows.documents.origins[buffer.rows.numbers(int(index))]
        return [f"{buffer.files[file]} row {number}" for file, number in origins]


class Stream:
    """The rows of each step of a recipe, in order, from a state on."""

    def __init__(
        self,
        recipe: Recipe,
        chat: Chat,
        sources: list[Source],
        versions: Versions,
        folder: Path,
        state: dict[str, Any] | None,
        counts: Counts | None,
        machines: int = 1,
    ) -> None:
        """Begin a stream.

        Args:
            versions: of the files of each source.
            folder: for the buffers, of this machine and run alone.
            state: where to continue; None at the beginning.
            counts: of the buffers that were used before; None at the beginning.
            machines: that prepare the same buffers. One of several may fail alone, and the others
                would wait for it in a save.
        """
        self._failure = StreamFailure if machines == 1 else FinetuneError
        first = [[*vars(Position()).values()] for _ in sources]
        state = state or {"window": 0, "row": 0, "positions": first}
        self._recipe, self._folder, self.counts = recipe, folder, counts
        self.job = Job(recipe, chat, sources, versions, folder, state["window"], state["positions"])
        self._window, self._row = int(state["window"]), int(state["row"])
        self._buffer: Buffer | None = None
        self._used: list[tuple[Path, int]] = []  # folder and last step
        self._process: subprocess.Popen[bytes] | None = None
        self.check: Callable[[Rows], object] = lambda _: None
        """Raises FinetuneError for rows that the model cannot be trained on."""

    @contextlib.contextmanager
    def preparing(self, first: bool) -> Iterator[None]:
        """Prepare buffers in this context, by a process of the `first` rank of each machine."""
        if not first:
            yield
            return
        # A copy of the chat, because a used one holds a compiled template.
        job = replace(self.job, chat=replace(self.job.chat))
        (self._folder / JOB).write_bytes(pickle.dumps(job))
        given = f"sys.path[:] = {sys.path!r}; from {Job.__module__} import serve"
        words = interpreter.python("-c", f"import sys; {given}; serve({str(self._folder)!r})")
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        try:
            yield
        finally:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.kill()
            self._process.wait()

    def _ask(self) -> None:
        """Ask for one more buffer."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # `_opened` tells that it has ended
                self._process.stdin.write(b"+")
                self._process.stdin.flush()

    def take(self, step: int, like: Rows) -> Taken:
        """The rows of the next step, whose number is `step`, in the layout of other rows.

        Raises:
            StreamFailure: they cannot be prepared, or the counts so far can only be a mistake.
        """
        self._forget(step)
        left, audits = self._recipe.batch.rows, list[tuple[Counts, str]]()
        parts = list[tuple[Buffer, np.ndarray]]()
        while left:
            if self._buffer is None or self._row >= len(self._buffer.rows):
                audits += self._next(step)
            buffer = self._buffer
            assert buffer is not None
            order = permutation(len(buffer.rows), self._recipe.seed, buffer.number)
            chosen = order[self._row : self._row + left]
            parts.append((buffer, chosen))
            self._row, left = self._row + len(chosen), left - len(chosen)
        rows = gathered([(buffer.rows, chosen) for buffer, chosen in parts])
        rows = replace(
            rows, padding_free=like.padding_free, share_prompts=like.share_prompts,
            image_inputs=like.image_inputs,
        )  # fmt: skip
        last = parts[-1][0]
        then = {"window": last.number, "row": self._row, "positions": last.positions}
        return Taken(rows, parts, parts[0][0].number, then, audits)

    def _next(self, step: int) -> Iterator[tuple[Counts, str]]:
        """Open the next buffer; yields the counts with it, if they are new."""
        if self._buffer is not None:
            self._used.append((window_folder(self._folder, self._buffer.number), step))
            self._window, self._row = self._window + 1, 0
            self._ask()
        self._buffer = buffer = self._opened(self._window)
        try:
            self.check(buffer.rows)
            if self.counts is None or buffer.number >= self.counts["windows"]:
                counts = merged(self.counts, buffer.counts)
                self.counts = {**counts, "windows": buffer.number + 1}
                problems = list(mistakes(counts))
                if problems and self._recipe.data_checks == "refuse":
                    raise FinetuneError(*problems)
                yield self.counts, buffer.bad_rows
        except FinetuneError as error:
            raise StreamFailure(*error.problems) from None

    def _opened(self, window: int) -> Buffer:
        folder, failed = window_folder(self._folder, window), self._folder / FAILED
        while not folder.is_dir():
            if failed.is_file():
                raise self._failure(*json.loads(failed.read_text(encoding="utf-8"))["problems"])
            if self._process is not None and (status := self._process.poll()) is not None:
                raise FinetuneError(
                    f"data: the process that prepares the stream ended with status {status}; it "
                    "may have run out of memory"
                )
            time.sleep(POLL)
        return Buffer.open(folder, window, self._recipe.batch.packing)

    def _forget(self, step: int) -> None:
        """Remove buffers that no process needs before `step`."""
        while self._used and self._used[0][1] + KEPT_STEPS <= step:
            old, _ = self._used.pop(0)
            if self._process is not None:
                shutil.rmtree(old, ignore_errors=True)
