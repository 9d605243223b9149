"""A source that is never copied or prepared as a whole trains on the rows that it would have."""

import dataclasses
import gzip
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    Train,
    apart,
    assert_same_losses,
    cut_off,
    losses,
    read,
    write_recipe,
    written,
)
from prepared import CHAT, write_rows

from finetune import Run, catalog
from finetune.cache import cache
from finetune.data import prepare as prepared_rows
from finetune.data.prepare import prepare
from finetune.data.read import remote
from finetune.data.read.files import Place, read_file
from finetune.data.read.remote import remote_files
from finetune.data.read.sources import find_sources
from finetune.data.rows.order import rows_of_step
from finetune.data.stream.positions import Position, SourceReader, versions_of
from finetune.data.stream.preparer import prepare_windows
from finetune.data.stream.windows import Stream, Taken
from finetune.errors import FinetuneError
from finetune.methods.sft import SFT
from finetune.planner.data_rules import streams
from finetune.recipe import Data, Recipe

WINDOWS = 10


def numbered(first: int, count: int) -> list[dict[str, str]]:
    return [{"question": f"Is it {n}", "answer": f"It is {n}"} for n in range(first, first + count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of 7, 5 and 9 rows: JSON lines, Parquet and compressed lines."""
    import pyarrow
    import pyarrow.parquet

    there = tmp_path / "rows"
    there.mkdir()
    write_rows(there / "a.jsonl", numbered(0, 7))
    table = pyarrow.Table.from_pylist(numbered(7, 5))
    pyarrow.parquet.write_table(table, there / "b.parquet", row_group_size=2)
    text = "".join(json.dumps(row) + "\n" for row in numbered(12, 9))
    (there / "c.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return there


class Web(ThreadingHTTPServer):
    """Serves the files of a folder with ranges; fails or cuts as it is told."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Range)
        self.folder, self.fails, self.most = folder, 0, 1 << 60
        self.address = f"http://127.0.0.1:{self.server_port}"


class Range(BaseHTTPRequestHandler):
    server: Web

    def do_HEAD(self) -> None:
        self.answer(b"", (self.server.folder / self.path[1:]).stat().st_size)

    def do_GET(self) -> None:
        if self.server.fails:
            self.server.fails -= 1
            self.send_error(503)
            return
        whole = (self.server.folder / self.path[1:]).read_bytes()[: self.server.most]
        given = self.headers.get("Range")
        first, last = given.removeprefix("bytes=").split("-") if given else (0, len(whole))
        part = whole[int(first) : int(last) + 1]
        self.answer(part, len(part), 206 if given else 200)

    def answer(self, content: bytes, size: int, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.send_header("ETag", f'"{(self.server.folder / self.path[1:]).stat().st_size}"')
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    (tmp_path / "web").mkdir()
    with Web(tmp_path / "web") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def recipe_of(*data: Data, buffer: int = 100, **batch: Any) -> Recipe:
    recipe = SFT(data=data, max_steps=9, stream_buffer=buffer, seed=3)
    return recipe.with_batch(**{"rows": 4, **batch})


def source(place: object, **fields: Any) -> Data:
    return Data(str(place), "question_answer", **{"stream": True, **fields})


def taken(
    recipe: Recipe, place: Path, steps: range, state: dict[str, Any] | None = None
) -> list[Taken]:
    """The rows of some steps."""
    sources, _ = find_sources(recipe)
    stream = Stream(recipe, CHAT, sources, versions_of(sources), place, state, None)
    place.mkdir()
    left = iter(range(WINDOWS))
    with pytest.raises(StopIteration):  # here, because a process takes seconds to start
        prepare_windows(stream.job, lambda: next(left))
    like = prepare(recipe, CHAT, place.parent / "cache").train
    return [stream.take(step, like) for step in steps]


def said(rows: Any, chosen: Any) -> list[str]:
    return [CHAT.tokenizer.decode(rows.row(int(index))[0]) for index in chosen]


def places(each: Taken) -> list[str]:
    return [place for row in range(len(each.rows)) for place in each.places(row)]


def of_step(each: Taken) -> list[str]:
    return said(each.rows, range(len(each.rows)))


@pytest.mark.parametrize("packing", [False, True])
def test_a_buffer_that_holds_everything_gives_the_rows_of_every_step(folder, tmp_path, packing):
    recipe = recipe_of(source(folder), packing=packing, max_length=64)
    kept = dataclasses.replace(recipe, data=(source(folder, stream=False),))
    whole = prepare(kept, CHAT, tmp_path / "cache").train
    found = taken(recipe, tmp_path / "stream", range(9))  # more than an epoch
    for step, each in enumerate(found):
        assert of_step(each) == said(whole, rows_of_step(step, len(whole), 4, recipe.seed))


def test_a_small_buffer_reads_each_row_once_in_an_epoch(folder, tmp_path):
    found = taken(recipe_of(source(folder), buffer=5, rows=3), tmp_path / "stream", range(14))
    rows = [row for each in found for row in of_step(each)]
    assert sorted(rows[:21]) == sorted(rows[21:])
    assert len({*rows[:21]}) == 21
    assert rows[:21] != rows[21:]


def test_a_state_continues_with_the_very_next_rows(folder, tmp_path):
    recipe = recipe_of(source(folder), buffer=5, rows=3)
    found = taken(recipe, tmp_path / "stream", range(12))
    for step in (1, 4, 7, 9):
        state = json.loads(json.dumps(found[step - 1].then))
        assert len(json.dumps(state)) < 200
        rest = taken(recipe, tmp_path / f"stream-{step}", range(step, 12), state)
        assert [(of_step(e), places(e), e.then) for e in rest] == [
            (of_step(e), places(e), e.then) for e in found[step:]
        ]


def test_sources_share_each_buffer_by_their_weights(folder, tmp_path):
    few = write_rows(tmp_path / "few.jsonl", numbered(100, 3))
    data = source(folder, weight=3), source(few, weight=1, stream=False)
    found = taken(recipe_of(*data, buffer=8), tmp_path / "stream", range(6))
    for first, then in zip(found[::2], found[1::2], strict=True):
        found_in = places(first) + places(then)
        assert sum(few in place for place in found_in) == 2
    again = [place for each in found for place in places(each) if few in place]
    assert sorted(again) == sorted(2 * [f"{few} row {n}" for n in (1, 2, 3)])


def test_rows_are_counted_as_they_are_used(folder, tmp_path):
    rows = [{"question": "Is it", "answer": n} for n in range(2)]
    write_rows(folder / "d.jsonl", [*rows, *numbered(21, 2)])
    recipe = recipe_of(source(folder, on_bad_row="drop"), buffer=5, rows=3)
    found = taken(recipe, tmp_path / "stream", range(8))
    audits = [audit for each in found for audit in each.audits]
    assert [counts["windows"] for counts, _ in audits] == list(range(1, len(audits) + 1))
    whole = dataclasses.replace(recipe, data=(source(folder, stream=False, on_bad_row="drop"),))
    expected = prepare(whole, CHAT, tmp_path / "cache").counts["train"]
    counts, _ = audits[4]  # 25 rows in buffers of five: an epoch
    same = ("samples", "bad", "rows", "documents", "tokens", "trained_tokens", "longest", "roles")
    assert {name: counts[name] for name in same} == {name: expected[name] for name in same}
    listed = [json.loads(line)["row"] for _, bad in audits[:5] for line in bad.splitlines()]
    assert listed == [1, 2]


@pytest.mark.parametrize("name", ["a.jsonl", "b.parquet", "c.jsonl.gz"])
def test_rows_at_an_address_are_read_from_any_place(folder, name, web):
    shutil.copy(folder / name, web.folder / name)
    (there,) = remote_files(f"{web.address}/{name}").values()
    whole = list(read_file(folder / name))
    assert list(read_file(there)) == whole
    place = Place()
    rows = read_file(there, place)
    for number, _ in rows:
        rest = read_file(there, Place(place.row, place.byte))
        assert list(rest) == [row for row in whole if row[0] > number]


def test_a_connection_that_is_lost_is_opened_again(folder, web, monkeypatch):
    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0))
    monkeypatch.setattr(remote, "BLOCK", 64)
    shutil.copy(folder / "a.jsonl", web.folder)
    (there,) = remote_files(f"{web.address}/a.jsonl").values()
    web.fails = 2
    assert list(read_file(there)) == list(read_file(folder / "a.jsonl"))
    web.fails = 3
    with pytest.raises(FinetuneError, match=r"a.jsonl: cannot be read after byte 0"):
        list(read_file(there))


def test_a_file_that_ends_early_or_changes_is_named(folder, web, monkeypatch):
    monkeypatch.setattr(remote, "WAITS", (0.0,))
    shutil.copy(folder / "a.jsonl", web.folder)
    (there,) = remote_files(f"{web.address}/a.jsonl").values()
    size = (folder / "a.jsonl").stat().st_size
    web.most = 50
    with pytest.raises(FinetuneError, match=f"byte 50 .it ends there, and has {size} bytes"):
        list(read_file(there))
    (web.folder / "a.jsonl").write_text("{}\n")
    with pytest.raises(FinetuneError, match=r"a.jsonl: it has changed since it was listed"):
        list(read_file(there))


def test_a_file_of_this_machine_that_changes_between_buffers_is_named(folder, tmp_path):
    recipe = recipe_of(source(folder / "a.jsonl"), buffer=4)
    sources, _ = find_sources(recipe)
    reader = SourceReader(sources[0], recipe.seed, Position())
    assert len(list(reader.take(4, across=False))) == 4
    text = (folder / "a.jsonl").read_text().splitlines(keepends=True)
    (folder / "a.jsonl").write_text("".join(text[:5]))
    with pytest.raises(FinetuneError, match=r"a.jsonl: it has changed since it was listed"):
        list(reader.take(4, across=False))


NEEDS = {
    "max_steps": {"max_steps": None},
    "evaluation.every": {"saving": {"every": "0.5 epochs"}},
    "eval_rows": {"eval_rows": 2, "eval_data": []},
    "duplicates": {"duplicates": "drop"},
    "method": {"method": "dpo"},
}


@pytest.mark.parametrize("field", NEEDS)
def test_what_needs_all_rows_is_refused(tiny, field):
    recipe = catalog.from_fields(fields_of(tiny, data={"stream": True}) | NEEDS[field])
    (problem,) = streams(recipe)
    assert problem.startswith(field)
    first = dataclasses.replace(recipe.data[0], first=10)  # then the rows are known
    assert not list(streams(dataclasses.replace(recipe, data=(first,))))


def fields_of(tiny: Any, **changes: Any) -> dict[str, Any]:
    data = {"source": str(tiny.data), "format": "messages"} | changes.pop("data", {})
    return tiny.fields(max_steps=5, saving={"every": 2}, **changes) | {"data": [data]}


def test_a_run_on_a_stream_has_the_losses_of_prepared_rows(
    tiny, train: Train, tmp_path, monkeypatch
):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    prepared = train("prepared", fields=fields_of(tiny))
    streamed = train("streamed", fields=fields_of(tiny, data={"stream": True}))
    assert_same_losses(prepared, streamed)
    assert losses(prepared, "eval") == losses(streamed, "eval")
    counts = [read(run.data)["train"] for run in (prepared, streamed)]
    assert counts[1].pop("windows") == 1 + 5 * 8 // counts[0]["rows"]
    assert [name for name in counts[0] if counts[0][name] != counts[1][name]] == ["by_source"]
    (about,) = counts[1]["by_source"]
    assert about["revision"] == {str(tiny.data): [None, tiny.data.stat().st_size]}
    assert not list(cache("streams").iterdir())


def test_a_bad_row_ends_the_run_after_a_checkpoint(tiny, train: Train, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared_rows, "BEGINNING", 8)  # it is found before the first step else
    rows = [line for line in tiny.data.read_text().splitlines() if line][:32]
    path = written(tmp_path / "rows.jsonl", [*map(json.loads, rows), {"messages": 3}])
    fields = fields_of(tiny, data={"source": str(path), "stream": True})
    fields |= {"stream_buffer": 8, "max_steps": 9}
    with pytest.raises(FinetuneError) as error:
        train(fields=fields)
    (problem,) = error.value.problems
    assert problem.startswith(f"{path} row 33: messages is a number, expected a list")
    assert problem.endswith("; then continue with --resume: step 4 is saved")
    run = Run(tmp_path / "run")
    assert (run.newest(), len(losses(run)), read(run.data)["train"]["windows"]) == (4, 4, 4)
    written(path, [*map(json.loads, rows), {"messages": []}])  # it is another file then
    with pytest.raises(
        FinetuneError, match=r"1 of its files have changed, the first is .*rows.jsonl"
    ):
        train(fields=fields, resume=True)


@pytest.mark.slow
def test_a_run_continues_with_the_next_rows_on_any_number_of_processes(
    tiny, finetune, tmp_path, run_of
):
    fields = fields_of(tiny, data={"stream": True}, batch={"rows": 6, "micro_rows": 1})
    fields |= {"stream_buffer": 7, "saving": {"every": 2, "keep": 9}}
    straight = run_of(fields=fields)
    recipe = write_recipe(tmp_path / "r.json", fields)
    for processes, step in ((1, 2), (3, 4)):
        run = cut_off(straight, tmp_path / f"{processes}-{step}", step)
        backend = "single" if processes == 1 else "ddp"
        launch = ["launch", recipe, "--backend", backend, "--processes", str(processes)]
        finetune(*launch, "--precision", "fp32", "--output", run.root, "--resume").passed()
        assert apart(straight, run) < 1e-6
        ends = [read(each.checkpoint(5) / "manifest.json") for each in (straight, run)]
        assert ends[0]["progress"]["stream"] == ends[1]["progress"]["stream"]
        assert read(run.data) == read(straight.data)
