"""A process pool that encodes rows in parallel, started only for large data sets.

Each worker is a separate interpreter that reads chunks from a pipe. Workers are not forked, because
threads of torch and of the launcher are running by then, and not spawned by `multiprocessing`,
which would run the user's script again in each process.
"""

import dataclasses
import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import IO, Any

from finetune.data.chat.template_limits import evaluate_here
from finetune.data.rows.encode import Chunk, Encoded, Encoder
from finetune.errors import FinetuneError
from finetune.process import interpreter
from finetune.process.quiet import tokenise_on_one_core
from finetune.runs.limits import usable_cores

ALONE = 16
"""Chunks that this process encodes before it starts workers, which takes seconds."""
MOST_PROCESSES = 16


def encode(encoder: Encoder, chunks: Iterable[Chunk]) -> Iterator[Encoded]:
    """Yield encoded chunks in order; workers run a few chunks ahead of the consumer."""
    waiting = iter(chunks)
    yield from map(encoder, islice(waiting, ALONE))
    processes = min(usable_cores(), MOST_PROCESSES)
    following = next(waiting, None)
    if following is None:
        return
    with crew(encoder, processes if is_importable(encoder) else 1) as encode_all:
        yield from encode_all(chain([following], waiting))


@contextmanager
def crew(
    encoder: Encoder, processes: int
) -> Iterator[Callable[[Iterable[Chunk]], Iterator[Encoded]]]:
    """Workers for several `encode`s, the function that this yields; this process is one of them."""
    with ExitStack() as stack:
        free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for _ in range(processes - 1):
            free.put(stack.enter_context(Worker(encoder)))
        threads = stack.enter_context(ThreadPoolExecutor(processes))
        yield lambda chunks: _in_order(threads, free, encoder, chunks, ahead=2 * (processes - 1))


def _in_order(
    threads: ThreadPoolExecutor,
    free: "queue.SimpleQueue[Worker]",
    encoder: Encoder,
    chunks: Iterable[Chunk],
    ahead: int,
) -> Iterator[Encoded]:
    """Encoded chunks; this process encodes one when `ahead` others wait for the workers."""

    def work(chunk: Chunk) -> Encoded:
        worker = free.get()
        try:
            return worker.encode(chunk)
        finally:
            free.put(worker)

    running: deque[Future[Encoded]] = deque()
    try:
        for chunk in chunks:
            if sum(not each.done() for each in running) < ahead:
                running.append(threads.submit(work, chunk))
            else:
                running.append(Future())
                running[-1].set_result(encoder(chunk))
            while running and (running[0].done() or len(running) > 2 * ahead):
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


def is_importable(encoder: Encoder) -> bool:
    """Whether another interpreter can import the method and the tokenizer.

    False if a class is defined in the user's script.
    """
    kinds = (type(encoder.recipe), type(encoder.chat.tokenizer))
    return {kind.__module__.split(".")[0] for kind in kinds} <= {"finetune", "transformers"}


class Worker:
    """A process that encodes one chunk at a time."""

    def __init__(self, encoder: Encoder) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        self._process = subprocess.Popen(
            interpreter.python("-c", code), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to: IO[bytes] = self._process.stdin
        self._from: IO[bytes] = self._process.stdout
        # Sent with the first chunk; a copy, because a used Chat holds a compiled template.
        self._encoder: Encoder | None = Encoder(encoder.recipe, dataclasses.replace(encoder.chat))

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._from.close()
        self._to.close()

    def encode(self, chunk: Chunk) -> Encoded:
        """Encode a chunk; raises FinetuneError if the process has ended."""
        try:
            if self._encoder is not None:
                _send(self._to, self._encoder)
                self._encoder = None
            _send(self._to, chunk)
            return pickle.load(self._from)
        except (EOFError, BrokenPipeError):
            status = self._process.wait()
            raise FinetuneError(
                f"{chunk.file}: a process that encoded its rows ended with status {status}; it may "
                "have run out of memory"
            ) from None


def _send(file: IO[bytes], value: Any) -> None:
    pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
    file.flush()


def serve() -> None:
    """Encode chunks from standard input until it ends; redirect stdout to stderr meanwhile."""
    tokenise_on_one_core()
    evaluate_here()
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        encoder = pickle.load(sys.stdin.buffer)
        while True:
            _send(results, encoder(pickle.load(sys.stdin.buffer)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        os._exit(0)  # the other end has closed: nothing to report
