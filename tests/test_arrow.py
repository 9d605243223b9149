"""Rows of Parquet, Arrow and the hub library are those of the same rows in JSON."""

import datetime
import decimal
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from conftest import run_command
from prepared import problems_of, ready, recipe_of, texts, write_rows

from finetune.data.read.files import READERS
from finetune.data.read.sources import Source
from finetune.methods.sft import SFT
from finetune.recipe import Data


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def called(name: str, arguments: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    messages = [
        {"role": "user", "content": f"Call {name}"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": function}]},
        {"role": "tool", "content": "done", "tool_call_id": "a"},
        {"role": "assistant", "content": "Done"},
    ]
    tool = {"type": "function", "function": {"name": name, "parameters": schema}}
    return {"messages": messages, "tools": [tool]}


CALLS = [
    called("weather", {"city": "Oslo", "days": [1, 2], "place": {"lat": 1.5}},
        {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", None]}}}),
    called("add", {"place": {"name": "here"}, "terms": [{"a": 2**60}, {"b": "x"}]},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": []}),
    called("now", {}, {"type": "object", "properties": {}}),
]  # fmt: skip


def write_table(path: Path, rows: list[Any], schema: pyarrow.Schema | None = None) -> None:
    table = pyarrow.Table.from_pylist(rows, schema)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.stem == "feather":
        pyarrow.feather.write_feather(table, str(path))
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as file:
            file.write_table(table)


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "feather.arrow"])
def test_tool_calls_of_typed_columns_are_those_of_json(tmp_path, cache, name):
    path = tmp_path / name
    write_table(path, CALLS)
    assert [row for _, row in READERS[path.suffix](path)] == CALLS
    lines = write_rows(tmp_path / "a.jsonl", CALLS)
    ours, json_rows = (
        ready(recipe_of(each, "messages", max_length=10**4), cache).train
        for each in (str(path), lines)
    )
    assert texts(ours) == texts(json_rows)
    assert '"city": "Oslo"' in texts(ours)[0]
    assert "null" not in texts(ours)[1]


def test_a_null_that_stands_in_json_stays(tmp_path, cache):
    row = called("f", {"a": None, "b": {"c": None}}, {"properties": {"a": {"default": None}}})
    source = write_rows(tmp_path / "a.jsonl", [row])
    (text,) = texts(ready(recipe_of(source, "messages"), cache).train)
    assert '{"a": null, "b": {"c": null}}' in text
    assert '"default": null' in text


def test_maps_lists_dictionaries_and_json_columns_keep_their_nulls(tmp_path):
    text = pyarrow.string()
    x, both = (pyarrow.struct([(key, text) for key in keys]) for keys in ("x", "xy"))
    kinds = {
        "map": pyarrow.map_(text, both), "list": pyarrow.list_(x), "top": text,
        "dictionary": pyarrow.dictionary(pyarrow.int32(), text), "json": pyarrow.json_(text),
        "large": pyarrow.large_list(both),
    }  # fmt: skip
    row = {
        "map": [("a", {"x": "1", "y": None}), ("b", None)], "list": [None, {"x": None}],
        "top": None, "dictionary": "often", "json": '{"a": null}',
        "large": [{"x": None, "y": "2"}],
    }  # fmt: skip
    write_table(tmp_path / "a.arrow", [row], pyarrow.schema(list(kinds.items())))
    ((_, found),) = READERS[".arrow"](tmp_path / "a.arrow")
    assert found == {
        "map": {"a": {"x": "1"}, "b": None}, "list": [None, {}], "top": None,
        "dictionary": "often", "json": {"a": None}, "large": [{"y": "2"}],
    }  # fmt: skip


VALUES: dict[str, tuple[Any, str]] = {
    "a date": (datetime.datetime(2024, 5, 1), "of type datetime"),
    "bytes": (b"a", "of type bytes"),
    "a decimal": (decimal.Decimal("1.5"), "of type Decimal"),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_json_does_not_have_is_refused_in_arguments_and_schemas(tmp_path, cache, name):
    value, kind = VALUES[name]
    path = tmp_path / "a.parquet"
    why = f"is {kind}, which has no JSON form; store it as text"
    write_table(path, [called("f", {"when": [value]}, {"type": "object"})])
    assert problems_of(recipe_of(str(path), "messages"), cache) == [
        f"{path} row 1: messages[1].tool_calls[0].arguments.when[0] {why}"
    ]
    write_table(path, [called("f", {"a": 1}, {"default": value}) | {"when": value}])
    assert problems_of(recipe_of(str(path), "messages"), cache) == [
        f"{path} row 1: tools[0].function.parameters.default {why}"
    ]


LOADING = """
import json
from datasets import load_dataset
from finetune.data.read.sources import Source
from finetune.recipe import Data
for stream in (False, True):
    data = Data(FOLDER, "messages", stream=stream)
    print(json.dumps([row.value for row in Source(data, ()).rows()]))
load_dataset(FOLDER, split="train").save_to_disk("saved")
"""


@pytest.mark.slow
def test_the_hub_library_and_what_it_saves_give_the_rows_of_json(tmp_path):
    """In a process of its own: that library is asked for a folder, which it reads as the hub."""
    (tmp_path / "data").mkdir()
    write_table(tmp_path / "data/a.parquet", CALLS)
    command = [sys.executable, "-c", LOADING.replace("FOLDER", repr(str(tmp_path / "data")))]
    done = run_command(command, tmp_path, env={"HF_HOME": str(tmp_path / "home")}).passed()
    assert [json.loads(line) for line in done.stdout.splitlines()[-2:]] == [CALLS, CALLS]
    saved = sorted((tmp_path / "saved").glob("*.arrow"))
    rows = Source(Data(str(tmp_path / "saved"), "messages"), tuple(saved)).rows()
    assert [row.value for row in rows] == CALLS


def test_texts_that_the_hub_library_notes_as_json_are_parsed(tmp_path):
    from datasets import Dataset, Features, Json, List, Value

    kinds = {"role": Value("string"), "content": Value("string"), "extra": Json()}
    features = Features({"messages": List(kinds), "meta": Json()})
    row = {
        "messages": [{"role": "user", "content": "Hi", "extra": {"a": None}}],
        "meta": [{"b": None}],
    }
    Dataset.from_list([row], features=features).to_parquet(tmp_path / "a.parquet")
    assert [each for _, each in READERS[".parquet"](tmp_path / "a.parquet")] == [row]


def test_a_column_that_occurs_twice_is_refused(tmp_path, cache):
    columns = [pyarrow.array([text]) for text in ("q", "a", "b")]
    table = pyarrow.table(columns, names=["question", "answer", "answer"])
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path)
    assert problems_of(recipe_of(str(path)), cache) == [
        f"{path}: it has the column 'answer' more than once"
    ]


def test_a_dropped_row_is_listed_whatever_keys_its_maps_have(tmp_path, cache):
    text = pyarrow.string()
    days = pyarrow.map_(pyarrow.date32(), text)
    kinds = pyarrow.schema([("question", text), ("answer", text), ("days", days)])
    days = [(datetime.date(2020, 1, 2), "x")]
    path = tmp_path / "a.parquet"
    rows = [{"question": "q", "answer": answer, "days": days} for answer in ("Bye", None)]
    write_table(path, rows, kinds)
    prepared = ready(SFT().with_data(Data(str(path), "question_answer", on_bad_row="drop")), cache)
    assert json.loads(prepared.bad_rows.read_text())["value"] == {
        "question": "q", "answer": None, "days": {"2020-01-02": "x"},
    }  # fmt: skip
