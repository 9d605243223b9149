"""A rank that is lost is named: one whose host is silent, and one that is about to end."""

import dataclasses
import json
import os
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistError, TCPStore

from finetune.distributed import heartbeat
from finetune.distributed.heartbeat import Beat, Heartbeat
from finetune.errors import TrainingFailure

SILENT, GRACE = 1.5, 0.2


@dataclass
class Ranks:
    """What a heartbeat reads of an engine."""

    rank: int
    world: int = 2

    def from_first(self, _: str) -> str:
        return "this start"


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, each the only one of its host; a silence of seconds instead of a minute."""
    monkeypatch.setattr(heartbeat, "SILENT_HOST_SECONDS", SILENT)
    monkeypatch.setattr(heartbeat, "GRACE_SECONDS", GRACE)
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")


def test_a_silent_host_is_named(two_hosts: None, tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lost: dict[int, TrainingFailure] = {}
    heard = threading.Event()

    def beating(rank: int) -> Heartbeat:
        def tell(failure: TrainingFailure) -> None:
            lost[rank] = failure
            heard.set()

        engine: Any = Ranks(rank)
        made = Heartbeat(
            engine, ("127.0.0.1", store.port), None, tmp_path, on_orphan=lambda: None,
            on_loss=tell, standing=lambda: "checkpoint 3 is complete",
        )  # fmt: skip
        made.step = 4 + rank
        made.start()
        return made

    first, second = beating(0), beating(1)
    try:
        assert not heard.wait(2 * SILENT)  # while both beat, nobody is lost
        second.stop()
        begun = time.monotonic()
        assert heard.wait(20)
        assert time.monotonic() - begun > SILENT / 2
    finally:
        first.stop()
        second.stop()
    (message,) = lost[0].problems
    name = f"rank 1 (process {os.getpid()} on {socket.gethostname()})"
    assert message == (
        f"step 4: {name} has sent no heartbeat for {SILENT:g} s; checkpoint 3 is complete"
    )
    assert 1 not in lost


def rank_0(folder: Path) -> tuple[TCPStore, Heartbeat]:
    """A store, and the heartbeat of the first of two ranks that meet there."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    engine: Any = Ranks(0)
    return store, Heartbeat(
        engine, ("127.0.0.1", store.port), None, folder, on_orphan=lambda: None,
        on_loss=lambda _: None, standing=lambda: "checkpoint 3 is complete",
    )  # fmt: skip


def test_a_rank_that_ends_after_its_connections_is_not_taken_for_silent(tmp_path: Path) -> None:
    """As the kernel ends a process: a peer reads that its connection closed while it runs."""
    store, failed = rank_0(tmp_path)
    failed.start()
    with subprocess.Popen(["sleep", "1"]) as ending:
        host = socket.gethostname()
        beat = Beat(1, 1, 4, 0, ending.pid, host, "")
        store.set("finetune/this start/1", json.dumps(dataclasses.asdict(beat)))
        time.sleep(0.3)  # its own first beat
        explained = failed.explain(DistError("Connection closed by peer"))
        failed.stop()
    assert explained is not None
    assert explained.problems[0].startswith(
        f"step 0: rank 1 (process {ending.pid} on {host}) ended without an error message; "
    )


def test_a_rank_that_others_wait_for_is_named_in_a_file_until_it_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(heartbeat, "WAITING_SECONDS", 0.5)
    monkeypatch.setattr(heartbeat, "collectives_begun", lambda: 7)
    store, first = rank_0(tmp_path)

    def second(collectives: int) -> None:
        beat = Beat(1, 1, 4, collectives, os.getpid(), "other", "saver.py:8 in save", 3.0)
        store.set("finetune/this start/1", json.dumps(dataclasses.asdict(beat)))

    def named(wanted: list[str]) -> None:
        until, file = time.monotonic() + 20, tmp_path / "waiting.json"
        while not (file.exists() and json.loads(file.read_text())["ranks"] == wanted):
            assert time.monotonic() < until
            time.sleep(0.05)

    second(6)
    first.start()
    try:
        text = f"rank 1 (process {os.getpid()} on other) did not join a collective for 3 s"
        named([f"{text}; it was last at saver.py:8 in save"])
        second(7)
        named([])
    finally:
        first.stop()
