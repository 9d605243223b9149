"""Schedule requests with continuous batching: each joins and leaves the batch between two tokens.

All computation runs on one thread. Requests to one model share its forward passes; an adapter and
its base are two models with shared weights, which take turns after each token.
"""

import contextlib
import queue
import threading
from collections import deque

import torch

from finetune.inference.batch import can_join
from finetune.inference.decoder import Decoder
from finetune.inference.generate import pad_of
from finetune.serving.models import Served
from finetune.serving.reply import Reply

READ_AT_ONCE = 2048
"""Maximum number of prompt tokens, including padding, that are read between two tokens of running
answers; a longer prompt is read alone."""


class Scheduler:
    """Computes replies in order of arrival, at most `rows` at once."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._new: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        self._waiting: deque[Reply] = deque()
        self._groups: dict[tuple[int, str | None], _Group] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def submit(self, reply: Reply) -> None:
        """Queue a reply; its text is written on the scheduler's thread."""
        self._new.put(reply)

    def close(self) -> None:
        """End all unfinished replies."""
        self._closing.set()
        self._new.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        active: Served | None = None
        with torch.inference_mode(), contextlib.ExitStack() as adapter:
            while not self._closing.is_set():
                self._admit()
                for key, group in list(self._groups.items()):
                    if group.served is not active:  # switching adapters takes time
                        adapter.close()
                        adapter.enter_context(group.served.answering())
                        active = group.served
                    group.step()
                    if not group.replies:
                        del self._groups[key]
        for group in self._groups.values():
            self._waiting.extend(group.replies)
        for reply in self._waiting:
            reply.finish()

    def _admit(self) -> None:
        """Assign new replies to groups; blocks until one arrives if there is nothing to do."""
        busy = sum(len(group.replies) for group in self._groups.values())
        with contextlib.suppress(queue.Empty):
            while (reply := self._new.get(block=not busy and not self._waiting)) is not None:
                self._waiting.append(reply)
        for reply in [reply for reply in self._waiting if reply.ended]:
            self._waiting.remove(reply)
            reply.finish()
        while self._waiting and busy < self.rows:
            served = self._waiting[0].served
            key = (id(served.loaded.model), served.adapter)
            group = self._groups.setdefault(key, _Group(served, self.rows))
            group.add(self._waiting.popleft())
            busy += 1


class _Group:
    """The replies of one model."""

    def __init__(self, served: Served, rows: int) -> None:
        self.served = served
        self.replies: list[Reply] = []
        model = served.loaded.model
        rows = rows if can_join(model) else 1  # a reply must not depend on the others
        loaded = served.loaded
        self._decoder = Decoder(
            model, pad_of(loaded), rows, read_at_once=READ_AT_ONCE, inputs=loaded.images
        )

    def add(self, reply: Reply) -> None:
        self.replies.append(reply)
        self._decoder.waiting.append(reply)

    def step(self) -> None:
        """Generate a token for each running reply; an error such as out of memory ends all."""
        try:
            self._decoder.step()
        except Exception as error:
            for reply in self.replies:
                reply.fail(error)
        for reply in self.replies:
            if reply.ended:
                reply.finish()
        self.replies = [reply for reply in self.replies if not reply.ended]
