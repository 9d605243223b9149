"""Files of every ending, splits of folders, columns by other names, and rows that are dropped."""

import bz2
import contextlib
import dataclasses
import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conftest
import datasets
import pyarrow
import pytest
from prepared import PAIRS, SAID, answers, counted, problems_of, ready, recipe_of, texts, write_rows
from small_tokenizer import small_tokenizer

from finetune.checks.files import check_files
from finetune.data.audit import describe, mistakes
from finetune.data.chat.render import Chat, load_chat
from finetune.data.formats import read_row
from finetune.data.read.files import raw_lines
from finetune.data.read.sources import find_source
from finetune.errors import FinetuneError
from finetune.methods.sft import SFT
from finetune.planner import plan
from finetune.recipe import Data, Model


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def zstandard(content: bytes) -> bytes:
    buffer = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(buffer, "zstd") as file:
        file.write(content)
    return buffer.getvalue().to_pybytes()


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".BZ2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard,
}  # fmt: skip
ROWS = "".join(json.dumps(row) + "\n" for row in PAIRS).encode()


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_files_are_read_also_of_several_parts(tmp_path, cache, ending):
    path = tmp_path / f"a.v1.jsonl{ending}"
    half = len(b"".join(ROWS.splitlines(keepends=True)[:3]))
    path.write_bytes(COMPRESS[ending](ROWS[:half]) + COMPRESS[ending](ROWS[half:]))
    assert answers(ready(recipe_of(str(path)), cache).train) == SAID
    whole = path.read_bytes()
    behind = [] if ending == ".xz" else [whole + b"and more text, which is not compressed"]
    for wrong in (whole[:-5], *behind):
        path.write_bytes(wrong)
        (problem,) = problems_of(recipe_of(str(path)), tmp_path / "empty")
        assert problem.startswith(f"{path}: it cannot be decompressed: ")
    if ending == ".gz":  # the others have no padding here
        path.write_bytes(whole + bytes(8))
        assert answers(ready(recipe_of(str(path)), tmp_path / "padded").train) == SAID


def test_a_large_compressed_file_is_read_whole(tmp_path):
    """Many times what a decompressor is given and returns at once."""
    lines = [f"{n} {n * n}\n".encode() for n in range(100_000)]
    for ending, compress in ((".bz2", bz2.compress), (".xz", lzma.compress)):
        path = tmp_path / f"a.txt{ending}"
        path.write_bytes(b"".join(compress(b"".join(part)) for part in halves(lines)))
        assert list(raw_lines(path)) == lines


def halves(lines: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    return lines[: len(lines) // 2], lines[len(lines) // 2 :]


TABLE = "".join(f"{row['question']}\t{row['answer']}\n" for row in PAIRS)


ENDINGS = {
    "a.ndjson": ROWS, "a.JSONL": ROWS, "a.tsv": f"question\tanswer\n{TABLE}".encode(),
    "a.Json.gz": gzip.compress(json.dumps(PAIRS).encode()),
    "a.CSV.gz": gzip.compress(f"question\tanswer\n{TABLE}".replace("\t", ",").encode()),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_other_endings_are_read(tmp_path, cache, name):
    (tmp_path / name).write_bytes(ENDINGS[name])
    recipe = recipe_of(str(tmp_path / name))
    assert answers(ready(recipe, cache).train) == SAID


@pytest.mark.parametrize("name", ["a.zip", "a.jsonl.tar.gz", "a.gz", "a.parquet.gz"])
def test_what_has_to_be_unpacked_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(FinetuneError, match=r"unpack it$"):
        find_source(Data(str(tmp_path / name), "text"))


CARD = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: some/*.jsonl}
  - {split: test, path: [other/a.jsonl, other/b.jsonl]}
- config_name: small
  data_files: some/a.jsonl
---
# A data set
"""

SHARDS = ["data/train_sft-00000-of-00002.jsonl", "data/train_sft-00001-of-00002-ab12.jsonl"]
SPLITS: dict[str, tuple[list[str], dict[str, list[str]]]] = {
    "keywords in names of files": (
        ["my_train.jsonl", "TEST-1.jsonl", "val.v2.jsonl", "trains.jsonl", "x/dev 0.jsonl"],
        {"train": ["my_train.jsonl"], "test": ["TEST-1.jsonl"],
            "validation": ["val.v2.jsonl", "x/dev 0.jsonl"]}),
    "keywords in names of folders go first": (
        ["training/test.jsonl", "a/eval_1/x.jsonl", "train.jsonl"],
        {"train": ["training/test.jsonl"], "test": ["a/eval_1/x.jsonl"]}),
    "shards": ([*SHARDS, "data/test-00000-of-00001.jsonl", "train.jsonl"],
        {"train_sft": SHARDS, "test": ["data/test-00000-of-00001.jsonl"]}),
    "no names of splits": (["a.jsonl", "x/b.jsonl"], {"train": ["a.jsonl", "x/b.jsonl"]}),
}  # fmt: skip


def write_files(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(folder / name, PAIRS)


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_of_a_folder_is_the_files_that_the_hub_would_give(tmp_path, name):
    names, splits = SPLITS[name]
    write_files(tmp_path, names)
    for split, files in splits.items():
        source = find_source(Data(str(tmp_path), "text", split=split))
        assert [str(path.relative_to(tmp_path)) for path in source.files] == files
    inside = {file for files in splits.values() for file in files}
    outside = find_source(Data(str(tmp_path), "text", split=next(iter(splits)))).outside
    assert {str(path.relative_to(tmp_path)) for path in outside} == set(names) - inside
    with pytest.raises(FinetuneError, match=f"data.split: {tmp_path} has no split 'trane'"):
        find_source(Data(str(tmp_path), "text", split="trane"))


def test_the_hub_library_gives_the_same_splits(tmp_path):
    from datasets.data_files import get_data_patterns, resolve_pattern

    for name, (names, _) in SPLITS.items():
        folder = tmp_path / name.replace(" ", "_")
        write_files(folder, [each.lower() for each in names])
        for split, patterns in get_data_patterns(str(folder)).items():
            theirs = set[str]()
            for pattern in patterns:
                with contextlib.suppress(FileNotFoundError):
                    theirs.update(resolve_pattern(pattern, str(folder)))
            ours = find_source(Data(str(folder), "text", split=str(split))).files
            assert {str(path) for path in ours} == {p for p in theirs if p.endswith(".jsonl")}


def test_the_card_of_a_data_set_names_its_splits_and_subsets(tmp_path):
    write_files(tmp_path, ["some/a.jsonl", "some/b.jsonl", "other/a.jsonl", "other/c.jsonl"])
    (tmp_path / "README.md").write_text(CARD)

    def names(**fields: Any) -> list[str]:
        source = find_source(Data(str(tmp_path), "text", **fields))
        return [str(path.relative_to(tmp_path)) for path in source.files]

    assert names() == ["some/a.jsonl", "some/b.jsonl"]
    assert names(split="test") == ["other/a.jsonl"]
    assert names(subset="small") == ["some/a.jsonl"]
    with pytest.raises(FinetuneError, match="got 'smal'; did you mean 'small'"):
        names(subset="smal")
    (tmp_path / "README.md").unlink()
    with pytest.raises(FinetuneError, match=r"data.subset: .* has no subsets"):
        names(subset="small")


def test_subsets_are_named_by_folders_or_by_files(tmp_path):
    write_files(tmp_path, ["a/train.jsonl", "a/test.jsonl", "b/rows.jsonl"])
    card = "---\nconfigs:\n- {config_name: a, data_dir: a}\n- {config_name: b, "
    for other in ("data_dir: b}", "data_files: b/*}"):
        (tmp_path / "README.md").write_text(card + other + "\n---\n")
        found = {n: find_source(Data(str(tmp_path), "text", subset=n)).files for n in "ab"}
        assert found == {"a": (tmp_path / "a/train.jsonl",), "b": (tmp_path / "b/rows.jsonl",)}
        with pytest.raises(FinetuneError, match=r"has the subsets a, b in its README.md, got none"):
            find_source(Data(str(tmp_path), "text"))
    with pytest.raises(
        FinetuneError, match=r"data.revision: .* has no revisions, .*; leave it out"
    ):
        find_source(Data(str(tmp_path), "text", subset="a", revision="main"))


def test_a_folder_without_the_split_names_what_it_has(tmp_path):
    write_files(tmp_path, ["a.jsonl", "test.jsonl"])
    with pytest.raises(FinetuneError) as error:
        find_source(Data(str(tmp_path), "text"))
    told = "has no split 'train'; it has test (test.jsonl); a.jsonl in no split"
    assert str(error.value) == f"data.split: {tmp_path} {told}"
    write_files(tmp_path, ["train-eval.jsonl", "train.jsonl"])
    with pytest.raises(FinetuneError, match="belongs to the splits train and test"):
        find_source(Data(str(tmp_path), "text"))


def test_what_describes_a_data_set_holds_no_rows(tmp_path):
    write_files(tmp_path, ["a.jsonl"])
    (tmp_path / "dataset_infos.json").write_text("{}")
    source = find_source(Data(str(tmp_path), "text"))
    assert source.files == (tmp_path / "a.jsonl",)
    assert source.unread == (tmp_path / "dataset_infos.json",)


def test_links_are_followed_once_and_never_lost(tmp_path):
    inside, far = tmp_path / "data", tmp_path / "disk"
    for folder in (inside, far):
        folder.mkdir()
    write_files(inside, ["a.jsonl"])
    write_files(far, ["b.jsonl"])
    (inside / "part2").symlink_to(far)
    (inside / "part3").symlink_to(far)
    (inside / "self").symlink_to(inside)
    source = Data(str(inside), "text")
    assert find_source(source).files == (inside / "a.jsonl", inside / "part2" / "b.jsonl")
    (inside / "c.jsonl").symlink_to(tmp_path / "gone.jsonl")
    for each in (source, Data(str(inside / "*.jsonl"), "text")):
        with pytest.raises(FinetuneError) as error:
            find_source(each)
        assert str(error.value) == (
            f"data.source: {inside}/c.jsonl links to {tmp_path}/gone.jsonl, which does not exist; "
            "mount or restore it, or remove the link"
        )


def test_folders_that_a_pattern_matches_are_named(tmp_path, cache):
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / "empty").mkdir()
    write_rows(tmp_path / "d" / "a.jsonl", PAIRS)
    write_rows(tmp_path / "d" / "sub" / "b.jsonl", PAIRS[:1])
    prepared = ready(recipe_of(f"{tmp_path}/d/*"), cache)
    assert answers(prepared.train) == SAID
    assert describe(prepared.counts["train"])[-1] == (
        f"not read, folders that the pattern matches (** reads their files): {tmp_path}/d/sub"
    )
    both = ready(recipe_of(f"{tmp_path}/d/**"), cache)
    assert answers(both.train) == [*SAID, SAID[0]]
    assert both.counts["train"]["folders"] == []


@pytest.mark.parametrize("part", ["[:20%]", "[-3:]", "[10:]", "[35%:80%]", "[:2]", "[:100]"])
def test_a_part_of_a_split_is_that_of_the_hub_library(tmp_path, part):
    path = write_rows(tmp_path / "train.jsonl", [{"text": f"row {n}"} for n in range(23)])
    wanted = datasets.load_dataset("json", data_files=str(path), split=f"train{part}")["text"]
    for source in (path, tmp_path):  # a file, and a folder with splits
        data = Data(str(source), "text", split=f"train{part}")
        assert [row.value["text"] for row in find_source(data).rows()] == list(wanted)
    with pytest.raises(FinetuneError, match="a part such as"):
        Data(str(path), "text", split="train[:20%")


def test_a_file_has_no_splits(tmp_path):
    source = write_rows(tmp_path / "test.jsonl", PAIRS)
    for name in (source, str(tmp_path / "*.jsonl")):
        assert find_source(Data(name, "text")).files == (tmp_path / "test.jsonl",)
        with pytest.raises(FinetuneError, match=r"data.split: .*, got 'test'; leave it out, or"):
            find_source(Data(name, "text", split="test"))
        with pytest.raises(FinetuneError, match=r"data.subset: .*, got 'a'; leave it out"):
            find_source(Data(name, "text", subset="a"))


def test_files_in_no_split_are_named(tmp_path, cache):
    write_files(tmp_path / "data", ["train.jsonl", "other.jsonl", "test.jsonl"])
    counts = counted(recipe_of(str(tmp_path / "data")), cache)
    assert describe(counts)[-1] == (
        f"not read, not in a split by their names: {tmp_path}/data/other.jsonl"
    )


def test_columns_are_read_by_other_names(tmp_path, cache):
    rows = [{"text": row["question"], "code": row["answer"], "answer": 0} for row in PAIRS]
    source = write_rows(tmp_path / "a.jsonl", rows)
    columns = {"text": "question", "code": "answer", "answer": None}
    data = Data(source, "question_answer", columns=columns)
    prepared = ready(SFT(data=(data,)), cache)
    assert answers(prepared.train) == SAID
    assert prepared.counts["train"]["columns_unread"] == {}


READS = (
    "it reads question, answer, system, tools, functions, chat_template_kwargs, images, image, "
    "history"
)
COLUMNS: dict[str, tuple[dict[str, str | None], str]] = {
    "a name that the format does not read": ({"a": "qestion"},
        "data.columns: format 'question_answer' does not read a column 'qestion'; did you mean "
        f"'question'?; {READS}"),
    "the wrong way round": ({"question": "a"},
        f"data.columns: format 'question_answer' does not read a column 'a'; {READS}; columns "
        "maps names of the file to those of the format"),
    "two of one name": ({"a": "question", "b": "question"},
        "data.columns: two columns would be renamed to 'question'; rename only one of them"),
    "a name that no row has": ({"sistem": "system"},
        "data.columns: no row of {source} has a column 'sistem'; its columns are answer, prompt, "
        "question, system"),
    "a name that a row has already": ({"prompt": "question"},
        "{source} row 1: columns renames 'prompt' to 'question', but the row also has a column of "
        "that name; leave that one out: {{\"question\": null}}"),
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_names_that_do_not_fit_are_refused(tmp_path, cache, name):
    columns, told = COLUMNS[name]
    source = write_rows(tmp_path / "a.jsonl", [PAIRS[0] | {"system": "", "prompt": "Hi"}])
    recipe = SFT().with_data(Data(source, "question_answer", columns=columns))
    (problem,) = problems_of(recipe, cache)
    assert problem.replace("; did you mean 'system'?", "") == told.format(source=source)


def chat_of(template: str, folder: Path) -> Chat:
    (folder / "template.jinja").write_text(template)
    return load_chat(small_tokenizer(), str(folder / "template.jinja"))


CHATML = load_chat(small_tokenizer(), "chatml").template or ""


def talk(asked: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi", **asked},
                         {"role": "assistant", "content": "Bye", **said}]}  # fmt: skip


def test_names_of_speakers_are_used_by_the_template_or_reported(tmp_path, cache):
    """A template with tools has the word `name` in it, and need not read that of a message."""
    of_tools = "{#- tool.function.name and message['name'] -#}" + CHATML
    of_speakers = CHATML.replace(
        "+ message.role + '\\n'",
        "+ message.role + (' ' + message.name if message.name else '') + '\\n'",
    )
    assert of_speakers != CHATML
    rows = [talk({"name": name}, {}) for name in ("Ann", "", "Bob")]
    source = write_rows(tmp_path / "a.jsonl", rows)
    named = {"messages[].name": 2}
    for template, unread in ((CHATML, named), (of_tools, named), (of_speakers, {})):
        chat = chat_of(template, tmp_path)
        prepared = ready(recipe_of(source, "messages"), cache, chat)
        assert prepared.counts["train"].get("columns_unread", {}) == unread
        assert ("Ann" in texts(prepared.train, chat)[0]) == (not unread)


def test_columns_and_keys_that_nothing_reads_are_named_with_their_rows(tmp_path, cache):
    part = {"type": "text", "text": "Bye", "citations": [1], "annotations": [], "weight": 1}
    said = talk({}, {"content": [part, part], "mood": "good"})
    rows = [said | {"id": number, "note": note} for number, note in enumerate(["a", None, ""])]
    source = write_rows(tmp_path / "a.jsonl", rows)
    counts = counted(recipe_of(source, "messages"), cache)
    cited = "messages[].content[].citations"
    assert counts["columns_unread"] == {"id": 3, "messages[].mood": 3, cited: 3, "note": 1}
    assert describe(counts)[-1] == (
        "columns that the format does not read: id (3 rows), messages[].content[].citations "
        "(3 rows), messages[].mood (3 rows), note (1 row)"
    )


def test_keys_of_tool_calls_reach_the_template_or_are_named(tmp_path, cache):
    called = {"name": "find", "arguments": {"at": 1}, "result": "5", "empty": None}
    calls = ({"id": "a", "function": called, "mood": "good"}, called)
    rows = [talk({}, {"tool_calls": [call]}) for call in calls]
    source = write_rows(tmp_path / "a.jsonl", rows)
    writing = re.sub(r"{{- '<tool_call>.* }}", "{{- call.function | tojson }}", CHATML)
    result, mood = (f"messages[].tool_calls[].{key}" for key in ("function.result", "mood"))
    for template, unread in ((writing, {mood: 1}), (CHATML, {result: 2, mood: 1})):
        chat = chat_of(template, tmp_path)
        prepared = ready(recipe_of(source, "messages"), cache, chat)
        assert prepared.counts["train"]["columns_unread"] == unread
        assert ('"result": "5"' in texts(prepared.train, chat)[0]) == (result not in unread)


def test_a_column_without_a_name_is_shown_in_quotes(tmp_path, cache):
    path = tmp_path / "a.csv"
    path.write_text(",question,answer\n0,Hi,Bye\n")
    counts = counted(recipe_of(str(path)), cache)
    assert describe(counts)[-1] == "columns that the format does not read: '' (1 row)"


def test_a_text_with_an_answer_is_refused_with_a_format_for_both(tmp_path, cache):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "Add two numbers", "code": "a + b"}])
    counts = counted(recipe_of(source, "text"), cache)
    assert describe(counts)[-2:] == [
        "columns that the format does not read: code (1 row)",
        f"{source}: format 'text' trains only the column 'text'; format 'question_answer' would "
        'fit with columns={"text": "question", "code": "answer"}',
    ]


def test_bad_rows_are_dropped_on_request_and_listed(tmp_path, cache):
    path = tmp_path / "a.jsonl"
    bad = [b'{"question": "a', json.dumps({"question": "a", "answer": 4}).encode(), b"caf\xe9"]
    half = json.dumps({"question": "Hi", "answer": "a \udfff"}).encode()
    path.write_bytes(b"\n".join([bad[0], *ROWS.splitlines(), *bad[1:], half]) + b"\n")
    recipe = SFT().with_data(Data(str(path), "question_answer", on_bad_row="drop"))
    prepared = ready(recipe, cache)
    assert answers(prepared.train) == SAID
    counts = prepared.counts["train"]
    assert (counts["samples"], counts["bad"]) == (10, 4)
    assert counts["roles"] == {"assistant": 6, "user": 6}
    why = 'broken JSON at column 14: Unterminated string starting at near \'{"question": "a\''
    assert describe(counts)[1] == f"4 bad rows dropped (first: {path} row 1: {why})"
    assert prepared.bad_rows is not None
    listed = [json.loads(line) for line in prepared.bad_rows.read_text().splitlines()]
    assert {each["file"] for each in listed} == {str(path)}
    told = (re.split(r" \(|:", each["problem"])[0] for each in listed)
    assert list(zip((each["row"] for each in listed), told, strict=True)) == [
        (1, "broken JSON at column 14"),
        (8, "answer is a number, expected text"),
        (9, "not UTF-8"),
        (10, "the text contains an unpaired surrogate"),
    ]
    values = ({"question": "a", "answer": 4}, "caf\ufffd", {"question": "Hi", "answer": "a \udfff"})
    assert [each["value"] for each in listed] == ['{"question": "a', *values]


def test_a_source_of_which_most_rows_are_bad_is_a_mistake_and_of_all_leaves_none(tmp_path, cache):
    source = write_rows(tmp_path / "a.jsonl", [{"a": 1}, {"a": 2}])
    recipe = SFT().with_data(Data(source, "text", on_bad_row="drop"))
    (problem,) = problems_of(recipe, cache)
    assert problem.endswith(
        f"0 skipped by format 'text', 2 dropped as bad rows, the first: {source} row 1: format "
        "'text' needs 'text', the row has 'a')"
    )
    write_rows(tmp_path / "a.jsonl", [{"a": 1}, {"text": "Hi"}, {"a": 2}])
    counts = counted(recipe, cache)
    assert list(mistakes(counts)) == [
        f"{source}: 2 of its 3 rows are bad and were dropped, the first: {source} row 1: format "
        "'text' needs 'text', the row has 'a'; if this is intended, set data_checks=report"
    ]


def test_evaluation_rows_that_are_trained_too_are_counted(tmp_path, cache):
    train = write_rows(tmp_path / "a.jsonl", PAIRS)
    held_out = write_rows(tmp_path / "b.jsonl", [{"question": "Hi", "answer": "x"}, PAIRS[2]])
    sources = (Data(each, "question_answer") for each in (train, held_out))
    recipe = recipe_of(train).with_data(next(sources), eval_data=next(sources))
    told = f"1 also in the training data (first: {held_out} row 2, as {train} row 3)"
    assert describe(ready(recipe, cache).counts["eval"])[1] == told
    source = write_rows(tmp_path / "c.jsonl", [PAIRS[0]] * 3)
    alike = SFT(data=(Data(source, "question_answer"),), eval_rows=1)
    counts = ready(alike, cache).counts
    assert (counts["eval"]["also_trained"], counts["train"]["duplicates"]) == (1, 1)


def test_rows_that_are_repeated_or_short_are_dropped_if_the_recipe_says_so(tmp_path, cache):
    """A row of training stays out of the evaluation; the first of equal rows stays."""
    train = write_rows(tmp_path / "a.jsonl", [*PAIRS, PAIRS[1], PAIRS[1]])
    held_out = write_rows(tmp_path / "b.jsonl", [{"question": "Hi", "answer": "x"}, PAIRS[2]])
    sources = (Data(each, "question_answer") for each in (train, held_out))
    recipe = recipe_of(train).with_data(next(sources), eval_data=next(sources))
    prepared = ready(dataclasses.replace(recipe, duplicates="drop"), cache)
    assert answers(prepared.train) == SAID
    counts = prepared.counts
    assert [counts[each]["repeated"] for each in ("train", "eval")] == [2, 1]
    assert (counts["train"]["duplicates"], counts["eval"]["also_trained"]) == (0, 0)
    longest = counts["train"]["longest"]
    kept = ready(recipe.with_batch(min_length=longest), cache).counts
    assert (kept["train"]["short"], kept["train"]["rows"]) == (1, 7)  # " 4" is one token
    assert kept["eval"]["short"] == 1


def test_contradicting_weights_are_refused_by_every_reader(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", PAIRS)
    one, other = (Data(source, "question_answer", weight=w) for w in (1, None))
    repeated = Data(source, "question_answer", weight=1, repeat=2)
    recipe = SFT(Model("owner/model"), data=(repeated, other))
    told = (
        "data.0.repeat: 2, but the weights determine how much of each source an epoch contains; "
        "remove one of the two",
        "data.1.weight: none, while data.0 has one; give every source of the mixture a weight, or "
        "none of them",
    )
    for reader in (check_files, plan):
        assert conftest.problems_of(reader, recipe) == told
        assert conftest.problems_of(reader, recipe.with_data(one, other)) == told[1:]


def test_a_repeated_key_is_refused_where_it_is(tmp_path, cache):
    twice = '{"role": "assistant", "content": "a", "content": "b"}'
    turn = '{"messages": [{"role": "user", "content": "Hi"}, %s]}'
    lines, whole = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines.write_text((turn % twice.replace('"content": "a", ', "")) + "\n" + turn % twice)
    whole.write_text(f"[{turn % twice}]")
    problem = "the key 'content' occurs 2 times in one object, with 'a', 'b'; keep one"
    for path, place in ((lines, f"{lines} row 2"), (whole, f"{whole}")):
        recipe = recipe_of(str(path), "messages")
        assert problems_of(recipe, cache) == [f"{place}: broken JSON: {problem}"]
    call = {"name": "look", "arguments": '{"city": "Bern", "city": "Rome"}'}
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "function_call": call}]
    source = write_rows(tmp_path / "b.jsonl", [{"messages": said}])
    assert problems_of(recipe_of(source, "messages"), cache) == [
        f"{source} row 1: messages[1].function_call.arguments is not JSON: the key 'city' occurs "
        "2 times in one object, with 'Bern', 'Rome'; keep one"
    ]


@pytest.mark.parametrize("key", ["tools", "functions", "reasoning_details"])
def test_a_key_with_meaning_is_read_by_the_template_or_refused(tmp_path, cache, key):
    source = write_rows(tmp_path / "a.jsonl", [talk({key: "look "}, {})])
    recipe = recipe_of(source, "messages")
    (problem,) = problems_of(recipe, cache)
    assert problem.partition(", which")[0] == f"{source} row 1: message 0 has '{key}'"
    reads = f"+ (message.{key} or '') + message.role"
    reading = chat_of(CHATML.replace("+ message.role", reads), tmp_path)
    prepared = ready(recipe, cache, reading)
    assert "look user" in texts(prepared.train, reading)[0]
    assert not prepared.counts["train"].get("columns_unread")


@pytest.mark.parametrize("column", ["reasoning_content", "thinking"])
def test_a_column_of_reasoning_is_refused_and_a_flag_is_not(tmp_path, cache, column):
    source = write_rows(tmp_path / "a.jsonl", [{**PAIRS[0], column: "because"}])
    assert problems_of(recipe_of(source), cache) == [
        f"{source} row 1: column '{column}' is not read by format 'question_answer': the reasoning "
        f"would be lost; format 'messages' reads it in a message; to leave it out: "
        f'columns={{"{column}": null}}'
    ]
    source = write_rows(tmp_path / "b.jsonl", [{**row, column: True} for row in PAIRS])
    counts = counted(recipe_of(source), cache)
    assert counts["columns_unread"] == {column: len(PAIRS)}


def test_turns_of_other_names_are_those_of_the_format(tmp_path):
    """Keys, roles, a system prompt where there is none, and texts; a misspelt key is refused."""
    said = ({"speaker": "visitor", "said": "Who?"}, {"speaker": "bot", "said": "{{NAME}}."})
    told = {"speaker": "system", "said": "Be brief, {{NAME}}."}
    rows = [{"talk": [*said]}, {"talk": [told, *said]}]
    data = Data(
        str(write_rows(tmp_path / "talks.jsonl", rows)), "messages",
        columns={"talk": "messages", "talk[].speaker": "role", "talk[].said": "content"},
        roles={"visitor": "user", "bot": "assistant"}, system="Help.", replace={"{{NAME}}": "Ada"},
    )  # fmt: skip
    asked = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada."}
    first, second = (
        read_row("messages", row.value).messages  # type: ignore[union-attr]
        for row in find_source(data).rows()
    )
    assert first == ({"role": "system", "content": "Help."}, *asked)
    assert second == ({"role": "system", "content": "Be brief, Ada."}, *asked)
    wrong = dataclasses.replace(data, columns={**data.columns, "talk[].word": "content"})
    with pytest.raises(FinetuneError, match=r"no row of .* has a column 'talk\[\].word'"):
        list(find_source(wrong).rows())
