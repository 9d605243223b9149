"""Whatever is wrong with data is named with its file and row, once, and nothing is lost unseen."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from prepared import CHAT, answers, counted, problems_of, ready, recipe_of, write_rows
from small_tokenizer import small_tokenizer

from finetune.data.audit import describe, mistakes
from finetune.data.chat.render import Chat, load_chat
from finetune.methods.sft import SFT
from finetune.recipe import Data


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


SAY: dict[str, Any] = {"messages": [
    {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Bye"},
]}  # fmt: skip


def test_rows_without_content_are_named(tmp_path, cache):
    rows = [SAY, {}, {"messages": []}, {"messages": None}, {"messages": [None]}, None, [], 3]
    source = write_rows(tmp_path / "a.jsonl", rows)
    told = [
        "format 'messages' needs 'messages', the row has no columns",
        "messages is empty",
        "format 'messages' needs 'messages', the row has 'messages' (null)",
        "messages[0] is null, expected an object with role and content",
        *(f"is {kind}, expected an object with columns" for kind in ("null", "a list", "a number")),
    ]
    problems = problems_of(recipe_of(source, "messages"), cache)
    assert problems == [f"{source} row {row}: {each}" for row, each in enumerate(told, 2)]


NESTED: dict[str, tuple[list[Any], list[str]]] = {
    "messages": ([SAY, {"messages": [None, SAY["messages"][1]]},
        {"messages": [{"role": None, "content": "a"}]},
        {"messages": [SAY["messages"][0], {"role": "assistant", "content": None}]}],
        ["row 2: messages[0] is null, expected an object with role and content",
            "row 3: messages[0] has no 'role' (it has content)",
            "row 4: messages[1].content is null, expected text"]),
    "sharegpt": ([{"conversations": [None]}, {"conversations": [{"from": "human", "value": None}]}],
        ["row 1: conversations[0] needs 'from' and 'value', it has null",
            "row 2: conversations[0] needs 'from' and 'value', it has from"]),
    "oasst": ([
        {"message_tree_id": "a", "prompt": {"role": "prompter", "text": None, "replies": None}},
        {"message_tree_id": "b", "prompt": {"role": "prompter", "text": "", "replies": [None]}}],
        ["row 1: text is null, expected text", "row 2: replies contain null, expected messages"]),
    "self_instruct":
        ([{"instruction": "a", "instances": [None]}], ["row 1: instances[0] has no 'output'"]),
}  # fmt: skip


@pytest.mark.parametrize("data_format", NESTED)
def test_nulls_inside_a_parquet_file_are_named(tmp_path, cache, data_format):
    rows, told = NESTED[data_format]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    problems = problems_of(recipe_of(str(path), data_format), cache)
    assert problems == [f"{path} {each}" for each in told]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_column_that_cannot_be_read_is_named(tmp_path, cache, suffix):
    broken = pyarrow.array([b"Hi", b"a\xff"])
    columns = {
        "question": pyarrow.Array.from_buffers(pyarrow.string(), 2, broken.buffers()),
        "answer": pyarrow.array(["Bye", "Bye"]),
    }
    late = {name: pyarrow.array(["a"]) for name in columns}
    late["when"] = pyarrow.array([10**18], pyarrow.timestamp("ms"))
    told = {
        "text": ": it is damaged in its column 'question': ",
        "date": " row 1: cannot be read: ",
    }
    for name, table in (("text", pyarrow.table(columns)), ("date", pyarrow.table(late))):
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            pyarrow.feather.write_feather(table, str(path))
        (problem,) = problems_of(recipe_of(str(path)), cache)
        assert problem.startswith(f"{path}{told[name]}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one file, of one row."""
    (tmp_path / "data").mkdir()
    return Path(write_rows(tmp_path / "data/a.jsonl", [SAY])).parent


def test_a_folder_of_several_formats_names_each_file_that_does_not_fit(folder, cache):
    (folder / "b.csv").write_text("question,answer\n1,2\n")
    (folder / "c.txt").write_text("Hi there")
    needs = "format 'messages' needs 'messages', the row has"
    assert problems_of(recipe_of(folder, "messages"), cache) == [
        f"{folder}/b.csv row 1: {needs} 'question', 'answer'; format 'question_answer' would fit",
        f"{folder}/c.txt row 1: {needs} 'text'; format 'text' would fit",
    ]


def test_files_of_a_folder_that_are_not_read_or_have_no_row_are_named(folder, cache):
    assert len(describe(counted(recipe_of(folder, "messages"), cache))) == 1
    for name in ("b.jsonl.rar", "c.JS", "d.parquet.gz", "e.md", ".hidden"):
        (folder / name).write_text("x")
    unread = ", ".join(f"{folder}/{name}" for name in ("b.jsonl.rar", "c.JS", "d.parquet.gz"))
    for source in (folder, folder / "*"):
        counts = counted(recipe_of(source, "messages"), cache)
        assert describe(counts)[-1] == f"not read, unsupported file type: {unread} and 1 more"
    empty = {"b.json": "[]", "c.csv": "messages\n", "d.jsonl": "\n\n"}
    for name, content in empty.items():
        (folder / name).write_text(content)
    named = ", ".join(f"{folder}/{name}" for name in empty)
    counts = counted(recipe_of(folder, "messages"), cache)
    assert f"without rows: {named}" in describe(counts)


def test_half_a_character_is_named(tmp_path, cache):
    source = write_rows(tmp_path / "a.jsonl", [{"question": "Hi", "answer": "a \udfff"}])
    assert problems_of(recipe_of(source), cache) == [
        f"{source} row 1: the text contains an unpaired surrogate ('\\udfff'), which tokenizers "
        "cannot encode; the text may have been cut inside a character"
    ]


def test_a_line_of_megabytes_is_too_long_and_named_at_once(tmp_path, cache):
    words = 1_300_000  # of eight bytes
    long = {"question": "Hi", "answer": "the cat " * words}
    source = write_rows(tmp_path / "a.jsonl", [{"question": "Hi", "answer": "Bye"}, long])
    least = (2 + 8 * words) // (4 * max(map(len, small_tokenizer().get_vocab())))
    assert problems_of(recipe_of(source), cache) == [
        f"{source}: 1 of 2 rows are longer than batch.max_length=1024 tokens, the longest {least} "
        f"({source} row 2, a lower bound); set batch.max_length={least}, or batch.overlong to "
        "drop, truncate or split"
    ]
    prepared = ready(recipe_of(source, overlong="drop"), cache)
    assert answers(prepared.train) == ["Bye<|im_end|>"]
    assert prepared.counts["train"]["dropped"] == 1


BROKEN = {
    "{{ nothing.here }}": "it refuses this conversation",
    "{% for m in messages %}{{ m.content }}{% endfor %}": "closes with '0', which is not an end",
    "{% for m in messages %}{{ m.role }}{% endfor %}": "it leaves out message 0",
}


@pytest.mark.parametrize("template", BROKEN)
def test_a_broken_chat_template_is_reported_once(tmp_path, cache, template):
    rows = [{"question": f"Hi {n}", "answer": f"Bye {n}"} for n in range(40)]
    source = write_rows(tmp_path / "a.jsonl", rows)
    broken = Chat(CHAT.tokenizer, template)
    (problem,) = problems_of(recipe_of(source), cache, broken)
    assert problem.startswith(f"{source} row 1 (and 39 more rows): chat template: ")
    assert BROKEN[template] in problem


def test_a_prompt_and_its_completion_need_no_chat_template(tmp_path, cache):
    source = write_rows(tmp_path / "a.jsonl", [{"prompt": "Hi", "completion": " there"}])
    chat = load_chat(small_tokenizer(), None)
    assert chat.template is None
    prepared = ready(recipe_of(source, "prompt_completion"), cache, chat)
    assert answers(prepared.train, chat) == [" there</s>"]


ANSWERS = [{"question": f"Hi {n}", "answer": "Hello there " * 20} for n in range(5)]


def test_losing_the_end_of_every_row_is_an_error(tmp_path, cache):
    source = write_rows(tmp_path / "a.jsonl", ANSWERS)
    recipe = recipe_of(source, max_length=24, overlong="truncate")
    counts = counted(recipe, cache)
    assert (counts["truncated"], counts["unended"], counts["eaten"]) == (5, 5, 0)
    assert counts["first"]["unended"] == f"{source} row 1"
    assert list(mistakes(counts)) == [
        "data: none of the 5 rows is trained to end (5 rows are truncated), so the model would "
        "never stop; raise batch.max_length, or set batch.overlong=drop; if this is intended, set "
        "data_checks=report"
    ]


def test_truncating_every_answer_away_is_an_error(tmp_path, cache):
    asked = [{"question": "What is " * 30, "answer": "Bye"}] * 2
    source = write_rows(tmp_path / "a.jsonl", [{"question": "Hi", "answer": "Bye"}, *asked])
    recipe = recipe_of(source, max_length=24, overlong="truncate")
    counts = counted(recipe, cache)
    found = [counts[key] for key in ("rows", "truncated", "eaten", "untrained")]
    assert found == [1, 2, 2, 2]
    assert list(mistakes(counts)) == [
        f"{source}: truncation removed the complete answer of all 2 truncated rows, of 3 rows; "
        "raise batch.max_length, or set batch.overlong=drop; if this is intended, set "
        "data_checks=report"
    ]
    write_rows(tmp_path / "a.jsonl", asked)
    assert problems_of(recipe, tmp_path / "empty") == [
        f"{source}: none of its 2 rows is left to train on (2 without a trained token, 2 of them "
        "because truncation removed their answer, 0 longer than batch.max_length=24, 0 skipped by "
        "format 'question_answer')"
    ]


def test_empty_masked_and_too_long_rows_are_counted_with_the_first_of_each(tmp_path, cache):
    asked = {"role": "user", "content": "Hi"}
    answers = ("Bye", " \n", "Bye", "", "Bye " * 30)
    talks = [[asked, {"role": "assistant", "content": answer}] for answer in answers]
    rows = [{"messages": each} for each in [*talks[:2], [asked], *talks[2:], [asked]]]
    source = write_rows(tmp_path / "a.jsonl", rows)
    recipe = recipe_of(source, "messages", max_length=32, overlong="drop")
    counts = counted(recipe, cache)
    assert describe(counts)[1] == (
        f"2 with only empty answers (first: {source} row 2), "
        f"2 without a trained token (first: {source} row 3), "
        f"1 dropped because of their length (first: {source} row 6), 1 duplicates"
    )


def test_a_source_whose_rows_never_end_is_refused_in_a_mixture(tmp_path, cache):
    cut = write_rows(tmp_path / "cut.jsonl", [{"question": "Hi", "answer": "Bye " * 40}] * 3)
    whole = write_rows(tmp_path / "whole.jsonl", [{"question": "Hi", "answer": "Bye"}])
    sources = (Data(source, "question_answer") for source in (whole, cut))
    recipe = SFT().with_data(*sources).with_batch(max_length=24, overlong="truncate")
    counts = counted(recipe, cache)
    (said,) = mistakes(counts)
    assert said.startswith(f"{cut}: none of its 3 rows is trained to end (3 are truncated); raise")


def test_unusual_rows_are_counted_and_reported(tmp_path, cache):
    short = {"question": "Hi", "answer": "Bye"}
    only_asked = {"messages": [{"role": "user", "content": "Hi"}]}
    rows = [short, short, short, ANSWERS[0], {**short, "messages": only_asked}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    recipe = recipe_of(source, max_length=24, overlong="truncate")
    counts = counted(recipe, cache)
    tokens, trained = counts["tokens"], counts["trained_tokens"]
    assert describe(counts) == [
        f"5 rows; {tokens} tokens, {trained / tokens:.1%} trained; longest 24",
        f"1 truncated (first: {source} row 4), 1 whose end is not trained (first: {source} row 4), "
        "3 duplicates",
        "columns that the format does not read: messages (1 row)",
    ]
    assert json.dumps(counts["roles"]) == '{"assistant": 5, "user": 5}'
