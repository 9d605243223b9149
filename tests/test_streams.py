"""A source that is never copied or prepared as a whole trains on the rows that it would have."""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Train, assert_same_losses, losses, read
from prepared import CHAT, write_rows

from finetune.data.prepare import prepare
from finetune.data.read.sources import find_sources
from finetune.data.rows.order import rows_of_step
from finetune.data.stream.preparer import prepare_windows
from finetune.data.stream.windows import Audit, Stream, Taken
from finetune.methods.sft import SFT
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
    stream = Stream(recipe, CHAT, sources, place, state, Audit())
    place.mkdir()
    left = iter(range(WINDOWS))
    with pytest.raises(StopIteration):  # here, because a process takes seconds to start
        prepare_windows(stream.job, lambda: next(left))
    like = prepare(recipe, CHAT, place.parent / "cache").train
    return [stream.take(step, like) for step in steps]


def said(rows: Any, chosen: Any) -> list[str]:
    return [CHAT.tokenizer.decode(rows.row(int(index))[0]) for index in chosen]


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
        assert [(of_step(e), e.places, e.then) for e in rest] == [
            (of_step(e), e.places, e.then) for e in found[step:]
        ]


def fields_of(tiny: Any, **changes: Any) -> dict[str, Any]:
    data = {"source": str(tiny.data), "format": "messages"} | changes.pop("data", {})
    return tiny.fields(max_steps=5, saving={"every": 2}, **changes) | {"data": [data]}


def test_a_run_on_a_stream_has_the_losses_of_prepared_rows(tiny, train: Train, tmp_path):
    prepared = train("prepared", fields=fields_of(tiny))
    streamed = train("streamed", fields=fields_of(tiny, data={"stream": True}))
    assert_same_losses(prepared, streamed)
    assert losses(prepared, "eval") == losses(streamed, "eval")
    counts = [read(run.data)["train"] for run in (prepared, streamed)]
    assert counts[1].pop("windows") == 1 + 5 * 8 // counts[0]["rows"]
    assert {name for name in counts[0] if counts[0][name] != counts[1][name]} <= {
        "sha256", "samples", "rows", "documents", "tokens", "trained_tokens", "roles", "by_source",
    }  # fmt: skip
    assert counts[1]["tokens"] == counts[0]["tokens"]
