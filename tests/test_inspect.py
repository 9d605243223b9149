"""`finetune inspect` shows what the model is trained to say, and training says what it counts."""

import contextlib
import html
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny, write_recipe
from rich.console import Console
from small_tokenizer import small_tokenizer
from transformers import AutoTokenizer

from finetune import catalog
from finetune.cli import main as cli
from finetune.data.chat.render import load_chat
from finetune.data.prepare import prepare
from finetune.reports.inspection import inspect_rows, pieces, show, visible, write_page


@pytest.fixture(scope="module")
def recipe(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = tiny.fields(batch={"packing": True})
    return write_recipe(tmp_path_factory.mktemp("inspect") / "r.json", fields)


@pytest.fixture(scope="module")
def found(recipe: Path) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert cli.main(["inspect", str(recipe), "--rows", "2", "--json"]) == 0
    return json.loads(told.getvalue())


def test_the_tokens_of_a_row_are_its_text_and_the_trained_ones_its_answer(found, tiny):
    lines = tiny.data.read_text().splitlines()
    assert len(found["rows"]) == 2
    for document in (each for row in found["rows"] for each in row):
        name, _, number = document["place"].rpartition(" row ")
        question, answer = json.loads(lines[int(number) - 1])["messages"]
        assert name == str(tiny.data)
        assert "".join(piece["text"] for piece in document["pieces"]) == (
            f"<|im_start|>user\n{question['content']}<|im_end|>\n"
            f"<|im_start|>assistant\n{answer['content']}<|im_end|>\n"
        )
        trained = "".join(piece["text"] for piece in document["pieces"] if piece["trained"])
        assert trained == f"{answer['content']}<|im_end|>"
    train = found["counts"]["train"]
    assert (train["samples"], train["documents"], train["roles"]) == (
        48, 48, {"assistant": 48, "user": 48},
    )  # fmt: skip
    assert found["mistakes"] == []


@pytest.mark.parametrize(
    ("row", "read"),
    [
        ({"question": "Hi", "answer": "Bye"}, "format 'question_answer' and method 'sft'"),
        (
            {"query": "Hi", "response": "Bye"},
            """format 'question_answer' with columns={"query": "question", "response": "answer"} """
            "and method 'sft'",
        ),
        ({"prompt": "Hi", "chosen": "Bye", "rejected": "No"}, "'preference' and method 'dpo'"),
        ({"prompt": "Hi", "completion": "Bye", "label": 1}, "format 'kto' and method 'kto'"),
    ],
)
def test_data_is_read_for_a_model_without_a_recipe(tiny, tmp_path, capsys, row, read):
    data = tmp_path / "data.json"
    data.write_text(json.dumps([row]))
    assert cli.main(["inspect", str(data)]) == 2
    told = capsys.readouterr().err
    assert read in told
    assert "add --model NAME" in told
    assert cli.main(["inspect", str(data), "--model", str(tiny.model)]) == 0
    shown = capsys.readouterr().out
    assert "Bye<|im_end|>⟧" in shown or "⟦Bye" in shown
    assert f"note   {data}: read with " in shown
    assert read in shown


def test_words_after_data_come_last(tiny, tmp_path, capsys):
    words = ["inspect", str(tiny.data), "--model", str(tiny.model), "--json"]
    assert cli.main([*words, "batch.max_length=16", "batch.overlong=drop"]) == 2
    assert "48 longer than batch.max_length=16" in capsys.readouterr().err
    assert cli.main([*words, "data.0.format=text"]) == 2
    assert "format 'text' needs 'text'" in capsys.readouterr().err
    assert cli.main([*words, "--completions", "2"]) == 2
    assert "name a recipe of an online method" in capsys.readouterr().err


def test_the_page_marks_the_answers_and_asks_for_nothing(found, recipe, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert cli.main(["inspect", str(recipe), "--rows", "2", "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    written = page.read_text()
    assert re.findall(r"<[^>]*\b(?:src|href)=", written) == []
    texts = written.split('<pre class="tokens">')[1:]
    shown = (re.findall(r"<b [^>]*>(.*?)</b>", text, re.S) for text in texts)
    assert [html.unescape("".join(texts)) for texts in shown] == [
        "".join(piece["text"] for piece in document["pieces"] if piece["trained"])
        for row in found["rows"]
        for document in row
    ]


def test_a_pipe_gets_brackets_for_colours_and_the_counts(recipe, capsys):
    assert cli.main(["inspect", str(recipe), "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    assert "<|im_start|>assistant\n⟦" in shown
    assert "<|im_end|>⟧\n" in shown
    assert "\ntrain  48 rows in " in shown
    assert "       48 assistant, 48 user\n" in shown
    assert "\x1b" not in shown


def test_no_character_of_the_data_steers_a_terminal():
    assert visible("a\x1b[31mb\x00\x9b\tc\n") == "a\u241b[31mb\u2400\ufffd\tc\n"


def test_names_that_are_not_utf8_end_no_inspection(finetune, tiny, tmp_path):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Bye"}]
    (tmp_path / "data").mkdir()
    file = os.fsdecode(os.fsencode(tmp_path) + b"/data/caf\xe9.jsonl")
    Path(file).write_text(json.dumps({"messages": talk, "note\ud83d": 1}) + "\n")
    fields = tiny.fields(data=[{"source": str(tmp_path / "data"), "format": "messages"}])
    recipe = write_recipe(tmp_path / "r.json", fields | {"eval_data": []})
    shown = finetune("inspect", recipe)
    assert (shown.status, r"caf\udce9.jsonl row 1" in shown.stdout) == (0, True), shown.output
    found = json.loads(finetune("inspect", recipe, "--json").stdout)
    assert found["rows"][0][0]["place"] == f"{file} row 1"
    assert found["counts"]["train"]["columns_unread"] == {"note\ud83d": 1}
    page = finetune("inspect", recipe, "--html", tmp_path / "page.html")
    assert (page.status, "caf?.jsonl" in (tmp_path / "page.html").read_text()) == (0, True)


def test_inspection_errors_have_no_traceback(recipe, tiny, tmp_path, capsys):
    nameless = write_recipe(tmp_path / "r.json", tiny.fields() | {"model": {}})
    for words, told in (
        ([nameless], "error: model: set model.name or model.tokenizer; the data needs a tokenizer"),
        ([recipe, "--html", tmp_path / "no" / "x.html"], "x.html: No such file"),
        ([recipe, "data.0.format=mesages"], "did you mean 'messages'?"),
    ):
        assert cli.main(["inspect", *map(str, words)]) == 2
        said = capsys.readouterr()
        assert told in said.err
        assert "Traceback" not in said.out + said.err


def test_a_character_of_several_tokens_is_one_piece():
    tokenizer = small_tokenizer()
    ids = tokenizer("Hi 😀 there é", add_special_tokens=False)["input_ids"]
    found = list(pieces(tokenizer, ids, [False] * 3 + [True] * (len(ids) - 3)))
    assert "".join(piece.text for piece in found).startswith("Hi ")
    assert [token for piece in found for token in piece.ids] == ids


def test_ignored_dropped_and_leaked_rows_are_shown_by_inspect_and_at_a_start(
    finetune, tiny, tmp_path
):
    rows = [json.loads(line) | {"id": 1} for line in tiny.data.read_text().splitlines()]
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    section = {"source": str(data), "format": "messages", "on_bad_row": "drop"}
    held_out = {"source": str(tiny.data), "format": "messages", "first": 1}
    recipe = write_recipe(
        tmp_path / "r.json", tiny.fields(data=[section], eval_data=[held_out], max_steps=1)
    )
    shown = [
        "columns that the format does not read: id (48 rows)",
        f"1 bad rows dropped (first: {data} row 49: broken JSON",
        f"1 also in the training data (first: {tiny.data} row 1, as {data} row 1)",
    ]
    loaded = catalog.load(recipe)
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    prepared = prepare(loaded, load_chat(tokenizer, None), tmp_path / "cache")
    inspection = inspect_rows(loaded, prepared, tokenizer, rows=1)
    written = io.StringIO()
    show(inspection, Console(file=written, width=80))
    write_page(inspection, "rows", tmp_path / "page.html")
    done = finetune("train", recipe, "--output", tmp_path / "run").passed()
    start = "".join(done.output.replace("│", " ").split())
    for line in shown:
        assert line in written.getvalue()
        assert line in (tmp_path / "page.html").read_text()
        assert line.replace(" ", "") in start
    counts = inspection.counts
    assert counts["train"]["columns_unread"] == {"id": 48}
    assert (counts["train"]["bad"], counts["eval"]["also_trained"]) == (1, 1)
    assert f"the bad rows that were dropped are listed in {prepared.bad_rows}" in written.getvalue()
    (bad,) = (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines()
    assert json.loads(bad)["row"] == 49
