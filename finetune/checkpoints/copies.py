"""Train where a run is copied to an object store, and read runs from there."""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from finetune.checkpoints.store import HERE, Store
from finetune.errors import FinetuneError, TrainingFailure, first_line
from finetune.process import rendezvous
from finetune.runs.addresses import is_address
from finetune.runs.run import Run

LOOK_SECONDS = 1.0
"""Seconds between looks at the local directory."""
BEAT_SECONDS = 20.0
"""Seconds between two writes of the lock by its holder."""
PATIENCE_SECONDS = 300.0
"""Seconds for which a failed copy is tried again at the end, or of a part of a checkpoint."""


@contextlib.contextmanager
def stored(
    output: str | Path, resume: bool | str, machine: int = 0, machines: int = 1
) -> Iterator[Path]:
    """The local directory of a run, copied to its store until the end; of a path, the path.

    Args:
        output: A path, or the address of a store.
        resume: As in `finetune.launchers.job.launch`; a resumed run is first copied here.
        machine: Which of the machines of the job this is. Machine 0 locks and copies.
        machines: How many there are.

    Raises:
        FinetuneError: the store cannot be written, another process trains there, or it has a run
            although `resume` is False.
        TrainingFailure: at the end, what was trained could not be copied.
    """
    if not is_address(output):
        yield Path(output)
        return
    store = Store(str(output), machine, machines)
    store.try_out()
    if machine:
        store.fetch_to_train(resume)
        yield store.local.root
        return
    with store.locked():
        store.fetch_to_train(resume)
        copier = Copier(store)
        try:
            yield store.local.root
        except BaseException:
            with contextlib.suppress(TrainingFailure):  # its reason is on stderr
                copier.finish()
            raise
        copier.finish()
        print(f"Copied to {store.address}.", flush=True)


def opened(word: str) -> str:
    """A word that names a run or a model: the local copy if it is an address, else the word.

    The copy has what a result consists of; of a run without `final/`, the newest and the best
    checkpoint. `bring` adds another one.

    Raises:
        FinetuneError: there is no run at the address, or it cannot be read.
    """
    if not is_address(word):
        return word
    store = Store(word)
    store.fetch_to_read()
    return str(store.local.root)


def bring(run: Run, step: int) -> None:
    """Copy the checkpoint of a step from the store of a run, if it has one and the checkpoint."""
    if (store := _store_of(run)) is not None:
        store.fetch_to_read(step)


def share(run: Run) -> None:
    """Copy what a command wrote into a run to its store, if it has one."""
    if (store := _store_of(run)) is not None:
        store.push(prune=False)


def _store_of(run: Run) -> "Store | None":
    marker = run.root / HERE
    return Store(**json.loads(marker.read_text())) if marker.is_file() else None


def store_of_parts(run: Run) -> "Store | None":
    """The store through which the machines of a run exchange parts; None if they share its disk."""
    store = _store_of(run)
    return store if store is not None and store.machines > 1 else None


def bring_state(run: Run, store: Store, step: int | None) -> None:
    """Copy what a resumed rank reads to the directory of its machine; its first process does."""
    if step is not None and store.machine and rendezvous.local_rank() == 0:
        insist(lambda: store.fetch_state(step))


def insist(work: Callable[[], None]) -> None:
    """Do what a store may refuse for a moment, and say the first time that it does.

    Raises:
        FinetuneError: it still does after `PATIENCE_SECONDS`.
    """
    until, pause = time.monotonic() + PATIENCE_SECONDS, 1.0
    while True:
        try:
            return work()
        except FinetuneError as error:
            if time.monotonic() > until:
                raise
            if pause == 1.0:
                _say(error)
        time.sleep(pause)
        pause = min(2 * pause, 30.0)


def _say(error: Exception) -> None:
    print(f"note: {first_line(error)}; it is tried again", file=sys.stderr, flush=True)


class Copier:
    """A thread that copies a run to its store: each complete checkpoint, and at the end the rest.

    Errors are said once, and the copy is tried again with growing pauses.
    """

    def __init__(self, store: Store) -> None:
        self.store, self._ending = store, threading.Event()
        self._seen: object = None
        self._lost: TrainingFailure | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Copy what is left, and wait for it.

        Raises:
            TrainingFailure: it could not be copied for `PATIENCE_SECONDS`.
        """
        self._ending.set()
        self._thread.join()
        if self._lost is not None:
            raise self._lost
        try:
            insist(self.store.push)
        except FinetuneError as error:
            raise TrainingFailure(
                f"{error}; what is missing there is in {self.store.local.root}: the same command "
                "with --resume copies it"
            ) from None

    def _work(self) -> None:
        pause, beaten = LOOK_SECONDS, time.monotonic()
        while not self._ending.wait(pause):
            try:
                if time.monotonic() - beaten > BEAT_SECONDS:
                    beaten = time.monotonic()
                    self.store.beat()
                now = self.store.local.steps()
                if now and now != self._seen:
                    self.store.push()
                    self._seen = now
                pause = LOOK_SECONDS
            except TrainingFailure as error:
                self._lost = error
                return
            except (FinetuneError, OSError) as error:
                if pause == LOOK_SECONDS:
                    _say(error)
                pause = min(2 * pause, 60.0)
