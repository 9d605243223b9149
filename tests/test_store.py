"""A run on an object store survives its machine, and is read from there."""

import contextlib
import functools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    Train,
    end_tree,
    equal_state,
    losses,
    problems_of,
    read,
    start,
    wait_for,
    write_recipe,
    written,
)

import finetune as ft
from finetune import catalog
from finetune.checkpoints.copies import Copier, insist
from finetune.checkpoints.store import Store
from finetune.cli import main as cli
from finetune.data.read.remote import fetched
from finetune.launchers.accelerate import free_port
from finetune.runs.manifest import damage
from finetune.runs.run import Run
from finetune.training.run_options import Options

SAVES: dict[str, Any] = {"saving": {"every": 2, "keep": 2}}


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a run in a folder that stands for a store, and a cache of its own."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return f"file://{tmp_path}/store/runs/mine"


def on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / name))


def train_at(tiny, address: str, resume: bool | str = False) -> Run:
    recipe = catalog.from_fields(tiny.fields(**SAVES))
    return ft.train(recipe, precision="fp32", options=Options(address, resume, plot=False))


def test_another_machine_continues_and_reads_what_the_store_has(
    tiny, train: Train, address, tmp_path, monkeypatch, capsys
):
    straight = train("straight", **SAVES)
    train_at(tiny, address)
    there = Run(tmp_path / "store/runs/mine")
    assert there.steps() == straight.steps() == [4, 6]
    # A machine that is lost while its first checkpoint is copied leaves a run.
    complete = min(
        (there.checkpoint(step) / "manifest.json").stat().st_mtime_ns for step in there.steps()
    )
    for file in (there.recipe, there.plan, there.data, there.environment):
        assert file.stat().st_mtime_ns < complete
    assert not (there.root / "run.lock").exists()
    # As a machine leaves it that was lost while the checkpoint of step 6 was copied.
    (there.checkpoint(6) / "manifest.json").unlink()
    shutil.rmtree(there.final)
    on_another_machine(tmp_path, monkeypatch, "second")
    assert problems_of(train_at, tiny, address) == (
        f"{address}: contains a run up to step 4; continue it with --resume, or choose another "
        "--output",
    )
    resumed = train_at(tiny, address, "auto")
    assert losses(resumed) == losses(straight) == losses(there)
    assert equal_state(straight.checkpoint(6), there.checkpoint(6))
    on_another_machine(tmp_path, monkeypatch, "third")
    capsys.readouterr()
    assert cli.main(["report", address]) == 0
    assert (there.root / "report.html").is_file()
    assert cli.main(["export", address, "--to", str(tmp_path / "out"), "--step", "4"]) == 0
    assert not list((tmp_path / "third").glob("runs/*/checkpoints/step-00000006"))
    # Without the store, the run begins anew, and the copy of this machine is kept.
    shutil.rmtree(tmp_path / "store")
    again = train_at(tiny, address)
    assert losses(again) == losses(straight)
    assert len(list(again.root.parent.iterdir())) == 2


def test_a_run_that_another_process_trains_is_refused(address, monkeypatch):
    first, second = Store(address), Store(address)
    with first.locked():
        (problem,) = problems_of(second.locked().__enter__)
        assert problem == (
            f"{address}: process {os.getpid()} on {socket.gethostname()} trains there; wait for "
            "it, or choose another --output"
        )
        first.beat()
        # Of another host, it is waited for; one that stands still has ended.
        monkeypatch.setattr("finetune.checkpoints.store.STALE_SECONDS", 3.0)
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        with second.locked():
            with pytest.raises(ft.FinetuneError, match="another process trains there now"):
                first.beat()
            assert second.is_mine()
    assert second.read("run.lock") is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gs://bucket/run", "gs://bucket/run: its library is missing; Please install gcsfs"),
        ("nowhere://bucket/run", "nowhere://bucket/run: Protocol not known: nowhere"),
        ("file:///run", "file:///run: give the run a name below it, such as .../my-run"),
    ],
)
def test_an_address_that_cannot_be_opened_is_refused(given, said):
    (problem,) = problems_of(Store, given)
    assert problem.startswith(said)


def test_a_store_that_cannot_be_written_is_found_before_training(tiny, tmp_path):
    (tmp_path / "store").write_text("a file")
    (problem,) = problems_of(train_at, tiny, f"file://{tmp_path}/store/run")
    assert problem.startswith(f"file://{tmp_path}/store/run: .")
    assert "cannot be written" in problem


def test_a_store_that_fails_for_a_moment_is_named_once_and_written(address, tmp_path, capsys):
    store = Store(address)
    part = store.local.root / "checkpoints/.step-00000002.partial/state/rank-00001-of-00002.a"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"a part")
    (tmp_path / "store").write_text("in the way")
    threading.Timer(0.5, (tmp_path / "store").unlink).start()
    insist(lambda: store.push_part(part))
    assert store.read("checkpoints/step-00000002/state/rank-00001-of-00002.a") == b"a part"
    told = capsys.readouterr().err
    assert told.startswith(f"note: {address}: checkpoints/step-00000002/state/rank-00001")
    assert told.count("it is tried again\n") == 1


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The address of a folder that a server of this test shows."""
    folder = tmp_path / "web"
    folder.mkdir()
    handler = functools.partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_rows_of_an_address_are_those_of_the_file(tiny, train: Train, web, address, tmp_path):
    shutil.copy(tiny.data, tmp_path / "web/rows.jsonl")
    short = {"max_steps": 2}
    local = train("local", **short)
    for name, source in {"web": f"{web}/rows.jsonl", "files": f"file://{tiny.data}"}.items():
        run = train(f"of-{name}", data=[{"source": source, "format": "messages"}], **short)
        assert losses(run) == losses(local)
        (about,) = read(run.data)["train"]["by_source"]
        assert about["source"] == source
        assert [size for _, size in about["revision"].values()] == [tiny.data.stat().st_size]


def test_a_file_is_copied_again_only_if_it_has_changed(address, tmp_path):
    folder = tmp_path / "there"
    (folder / "deep").mkdir(parents=True)
    written(folder / "a.jsonl", [{"text": "a"}])
    written(folder / "deep/b.jsonl", [{"text": "b"}])
    there = fetched(f"file://{folder}")
    times = [(there / name).stat().st_mtime_ns for name in ("a.jsonl", "deep/b.jsonl")]
    written(folder / "a.jsonl", [{"text": "another"}])
    assert fetched(f"file://{folder}") == there
    assert (there / "a.jsonl").read_text() == (folder / "a.jsonl").read_text()
    assert (there / "deep/b.jsonl").stat().st_mtime_ns == times[1]
    (folder / "deep/b.jsonl").unlink()
    fetched(f"file://{folder}")
    assert not (there / "deep/b.jsonl").exists()
    pattern = fetched(f"file://{folder}/*.jsonl")
    assert [path.name for path in pattern.glob("*.jsonl")] == ["a.jsonl"]


def test_rows_that_are_not_there_are_named(tiny, web):
    recipe = tiny.fields(data=[{"source": f"{web}/none.jsonl", "format": "messages"}])
    (problem,) = problems_of(ft.train, catalog.from_fields(recipe), precision="fp32")
    assert problem == f"data.source: '{web}/none.jsonl' has no files"


# --- a real S3 server, behind a connection that is cut and slow -------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of moto's S3 server, whose libraries are its own (its botocore is another one)."""
    pytest.importorskip("s3fs")
    place = tmp_path_factory.mktemp("moto")
    install = ["pip", "install", "-q", "--no-compile", "--target", place, "moto[server]==5.2.5"]
    if subprocess.run([sys.executable, "-m", *install], capture_output=True).returncode:
        pytest.skip("moto cannot be installed here")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (place / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": str(place)}
        )
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield port
    process.terminate()
    process.wait()


class Line(threading.Thread):
    """A connection to a server that is cut after a drawn number of bytes, if `cuts`."""

    def __init__(self, to: int) -> None:
        super().__init__(daemon=True)
        self.to, self.cuts, self.cut = to, False, 0
        self.ends: list[socket.socket] = []
        self.drawn = random.Random(5)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.start()

    def run(self) -> None:
        while self.listening.fileno() >= 0:  # until it is closed
            try:
                near, _ = self.listening.accept()
            except OSError:
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:  # as a cut
                near.close()
                continue
            self.ends += [near, far]
            left = self.drawn.randrange(1_000, 3_000_000) if self.cuts else 1 << 60
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(*pair, left), daemon=True).start()

    def down(self) -> None:
        """No connection stays or is made."""
        self.listening.shutdown(socket.SHUT_RDWR)  # wakes accept, which close does not
        self.listening.close()
        for each in self.ends:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _pass(self, source: socket.socket, target: socket.socket, left: int) -> None:
        try:
            while left > 0 and (piece := source.recv(1 << 16)):
                target.sendall(piece)
                left -= len(piece)
            self.cut += left <= 0
        except OSError:
            pass
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # close waits for the thread that reads from it
            each.close()


@pytest.fixture
def line(server: int, monkeypatch: pytest.MonkeyPatch) -> Line:
    made = Line(server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-printed")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.port}")
    import fsspec

    # One made for an earlier line is kept by fsspec, whose key has no endpoint of the environment.
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    fsspec.filesystem("s3").makedirs("bucket", exist_ok=True)
    return made


LOST = int(os.environ.get("LOST_MACHINES", "2"))


@pytest.mark.slow
def test_machines_are_lost_and_uploads_cut_and_nothing_of_the_run_is(
    line: Line, tiny, train: Train, tmp_path
):
    """Each machine is killed at a drawn moment and its disk is lost; the next one continues."""
    fields: dict[str, Any] = {"max_steps": 30, "saving": {"every": 2, "keep": 2}}
    straight = train("straight", **fields)
    recipe = write_recipe(tmp_path / "recipe.json", tiny.fields(**fields))
    address, line.cuts = "s3://bucket/lost", True
    words = ["launch", str(recipe), "--backend", "single", "--precision", "fp32", "--no-plot"]
    words += ["--output", address, "--resume", "auto"]
    seen, drawn = 0, random.Random(LOST)
    for number in range(LOST):
        disk = tmp_path / f"disk-{number}"
        process = start(words, disk, warm=True)
        wanted = seen + drawn.randrange(1, 6)
        wait_for(lambda disk=disk, wanted=wanted: newest_row(disk) >= min(wanted, 28), process)
        time.sleep(drawn.random())
        end_tree(process.pid)
        process.communicate()
        shutil.rmtree(disk)
        newest = max(remote_steps(address), default=0)
        assert newest >= seen  # what was complete there stays
        seen = newest
    process = start(words, tmp_path / "last", warm=True)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    assert "not-to-be-printed" not in out + err
    line.cuts = False
    store = Store(address)
    store.local = Run(tmp_path / "copy")
    store.fetch_to_read(30)
    assert losses(store.local) == losses(straight)
    assert equal_state(straight.checkpoint(30), store.local.checkpoint(30))
    assert line.cut > 0


@pytest.mark.slow
def test_machines_without_a_shared_disk_lose_their_disks_and_nothing_else(
    line: Line, run_of, tmp_path
):
    """Each writes its part of a checkpoint to the store, and reads from there what it needs."""
    line.cuts = "CUT_LINES" in os.environ
    fields: dict[str, Any] = {"max_steps": 180, "saving": {"every": 60, "keep": 2}}
    straight, address = run_of("fsdp_full_shard", **fields), "s3://bucket/apart"
    words = ["launch", str(straight.recipe), "--backend", "fsdp_full_shard", "--processes", "2"]
    words += ["--precision", "fp32", "--no-plot", "--output", address, "--resume", "auto"]
    first = machines_of(words, tmp_path / "first")

    def first_checkpoint() -> bool:
        assert first[1].poll() is None, first[1].communicate()
        time.sleep(0.5)  # each question is work of the server
        return max(remote_steps(address), default=0) >= 60

    wait_for(first_checkpoint, first[0])
    for each in first:
        end_tree(each.pid)
        each.communicate()
    shutil.rmtree(tmp_path / "first")
    kept = max(remote_steps(address))
    assert kept < 180
    second = machines_of(words, tmp_path / "second")
    told = [each.communicate(timeout=600) for each in second]
    assert [each.returncode for each in second] == [0, 0], told
    (part,) = (tmp_path / "second/1").glob("runs/*/checkpoints/step-????????")
    assert part.name == f"step-{kept:08d}"  # what it resumed from, without the model
    assert sorted(each.name for each in part.iterdir()) == ["manifest.json", "state"]
    assert not list((tmp_path / "second/1").rglob("*.partial/state/*"))
    assert line.cut > 0 or not line.cuts
    store = Store(address)
    store.local = Run(tmp_path / "copy")
    store.fetch_to_read(180)
    assert damage(store.local.checkpoint(180)) == []
    assert losses(store.local) == losses(straight)
    assert equal_state(straight.checkpoint(180), store.local.checkpoint(180))
    again = machines_of(words, tmp_path / "third")
    told = [each.communicate(timeout=600) for each in again]
    assert [each.returncode for each in again] == [0, 0], told
    assert all("complete, nothing to resume" in out for out, _ in told)


def machines_of(words: list[str], place: Path) -> list["subprocess.Popen[str]"]:
    """The launches of two machines, each with a disk of its own."""
    port = str(free_port())
    found = []
    for machine in range(2):
        (place / str(machine)).mkdir(parents=True)
        where = ["--num_machines", "2", "--machine_rank", str(machine)]
        where += ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
        found.append(start([*words, *where], place / str(machine), warm=True))
    return found


def newest_row(disk: Path) -> int:
    """Steps in the metrics of the run on a disk."""
    rows = [json.loads(row) for path in disk.glob("runs/*/metrics.jsonl") for row in path.open()]
    return max((row.get("step", 0) for row in rows), default=0)


def remote_steps(address: str) -> list[int]:
    from finetune.checkpoints.store import steps_of

    return steps_of(Store(address).sizes())


@pytest.mark.slow
def test_a_store_that_fails_at_the_end_is_told_and_the_run_stays_here(
    line: Line, tiny, tmp_path, monkeypatch
):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("finetune.checkpoints.copies.PATIENCE_SECONDS", 0.0)
    (problem,) = problems_of(Store("s3://missing/run").try_out)
    assert problem.startswith("s3://missing/run: .")
    store = Store("s3://bucket/ends")
    store.local.root.mkdir(parents=True)
    copier = Copier(store)
    (store.local.root / "recipe.json").write_text("{}")
    line.down()
    (problem,) = problems_of(copier.finish)
    assert "the same command with --resume copies it" in problem
    assert store.local.recipe.exists()
