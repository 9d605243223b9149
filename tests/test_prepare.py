"""Data is read whole or refused with file and row, written once, and found again."""

import csv
import dataclasses
import fcntl
import gzip
import hashlib
import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, run_command
from prepared import (
    CHAT,
    PAIRS,
    SAID,
    answers,
    contents,
    counted,
    problems_of,
    ready,
    recipe_of,
    texts,
    write_rows,
)
from pydantic.dataclasses import dataclass
from small_tokenizer import small_tokenizer

from finetune.data.chat.render import Chat, load_chat
from finetune.data.prepare import CHUNK, Prepared
from finetune.data.rows.encode import split
from finetune.data.rows.encode_pool import ALONE
from finetune.data.rows.example import Example
from finetune.data.rows.order import permutation
from finetune.data.rows.store import DocumentWriter, check_origins, digest, single_rows
from finetune.errors import FinetuneError
from finetune.methods.pretrain import Pretrain
from finetune.methods.sft import SFT
from finetune.recipe import STRICT, Data


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    """A file of six questions with their answers."""
    return write_rows(tmp_path / "a.jsonl", PAIRS)


def asked(source: str, **fields: Any) -> Data:
    return Data(source, "question_answer", **fields)


ZEROS = (
    "passed_over untrained dropped truncated eaten tied split overlong empty bad empty_turns "
    "history_thoughts tool_details unserved call_ids markup_asked markup_said no_bos two_bos "
    "unasked unended duplicates left_out short repeated images_rotated images_transparent"
)


def test_rows_of_a_file_become_columns_in_its_order_and_are_counted(pairs, cache):
    prepared = ready(recipe_of(pairs), cache)
    assert answers(prepared.train) == SAID
    assert texts(prepared.train)[0] == (
        "<|im_start|>user\nWhat is 0<|im_end|>\n<|im_start|>assistant\nThe answer is 0<|im_end|>\n"
    )
    documents, lengths = prepared.train.documents, prepared.train.lengths
    assert (documents.ids.dtype, documents.trained.dtype) == (np.int32, bool)
    assert isinstance(documents.ids, np.memmap)
    assert isinstance(documents.trained, np.memmap)
    assert [prepared.place(number) for number in (0, 5)] == [f"{pairs} row 1", f"{pairs} row 6"]
    # "The", " answer", " is", " ", a number and the end; " 4" is one token.
    own = {"samples": 6, "rows": 6, "tokens": int(lengths.sum()), "trained_tokens": 6 * 6 - 1}
    rows = hashlib.sha256(lengths.tobytes() + np.arange(6).tobytes() + np.arange(7).tobytes())
    for number in range(6):
        for column in prepared.train.row(number):
            rows.update(column.tobytes())
    of_source = {"truncated": 0, "eaten": 0, "unended": 0, "bad": 0, "columns_unread": {}}
    of_source |= {"source": pairs, "revision": None, "format": "question_answer"}
    assert prepared.counts["train"] == own | dict.fromkeys(ZEROS.split(), 0) | {
        "sha256": rows.hexdigest(), "columns_unread": {}, "outside": [], "folders": [],
        "fixed_date": False, "first": {}, "documents": 6, "documents_per_row": 1, "labels": {},
        "same_label": False, "scored": False, "longer_chosen": None, "wanted": None,
        "unread": [], "without_rows": [], "longest": int(lengths.max()),
        "longest_sample": int(lengths.max()), "mean_length": float(lengths.mean()),
        "filled": None, "roles": {"assistant": 6, "user": 6},
        "by_source": [own | of_source],
    }  # fmt: skip
    assert len(prepared.eval) == prepared.counts["eval"]["rows"] == 0


def write_as(path: Path, rows: list[dict[str, str]]) -> None:
    match path.suffix:
        case ".jsonl":
            write_rows(path, rows)
        case ".json":
            path.write_text(json.dumps(rows, indent=2))
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case ".arrow":
            table = pyarrow.Table.from_pylist(rows)
            with pyarrow.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow", ".csv"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, cache, suffix):
    rows = [*PAIRS, {"question": 'Name a\ncolour, "red"', "answer": "blue\u00e9" * 50_000}]
    write_as(tmp_path / f"a{suffix}", rows)
    prepared = ready(recipe_of(tmp_path / f"a{suffix}", max_length=10**6), cache)
    assert answers(prepared.train) == [*SAID, "blue\u00e9" * 50_000 + "<|im_end|>"]


def test_json_lines_may_be_named_json_and_have_a_mark_and_line_ends_of_windows(tmp_path, cache):
    write_rows(tmp_path / "a.json", PAIRS)
    lines = b"\r\n".join(json.dumps(row).encode() for row in PAIRS)
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + lines + b"\r\n\r\n")
    for name in ("a.json", "b.jsonl"):
        assert answers(ready(recipe_of(tmp_path / name), cache).train) == SAID


def test_a_text_file_is_a_document_or_several(tmp_path, cache):
    (tmp_path / "a.txt").write_text("Hi there\n\nBye\n")
    (tmp_path / "b.txt").write_bytes(b"Hi\r\nthere\r\n<|endoftext|>\r\n\n<|endoftext|>\nBye\n")
    rows = ready(Pretrain().with_data(Data(str(tmp_path), "text")), cache).train
    assert texts(rows) == ["Hi there\n\nBye</s>", "Hi\nthere</s>", "Bye</s>"]
    trained = [int(rows.row(index)[1].sum()) for index in range(3)]
    assert trained == [length - 1 for length in rows.lengths.tolist()]


def test_a_folder_and_a_glob_are_their_files_in_order(tmp_path, cache):
    folder = tmp_path / "data"
    for inside in ("sub", ".hidden"):
        (folder / inside).mkdir(parents=True)
    write_rows(folder / "b.jsonl", PAIRS[2:4])
    write_rows(folder / "a.jsonl", PAIRS[:2])
    write_rows(folder / "sub" / "c.jsonl", PAIRS[4:])
    write_rows(folder / ".hidden" / "d.jsonl", [{"no": "row"}])
    (folder / "README.md").write_text("not data")
    assert answers(ready(recipe_of(folder), cache).train) == SAID
    assert answers(ready(recipe_of(folder / "*.jsonl"), cache).train) == SAID[:4]


def test_a_data_set_that_was_saved_to_disk_is_its_rows(tmp_path, cache):
    from datasets import Dataset, DatasetDict

    whole, place = Dataset.from_list(PAIRS), str(tmp_path / "d")
    DatasetDict({"test": whole.select([0]), "train": whole}).save_to_disk(place)
    for data, said in (
        (asked(place), SAID), (asked(f"{place}/train"), SAID),
        (asked(place, split="test"), SAID[:1]),
    ):  # fmt: skip
        assert answers(ready(SFT().with_data(data), cache).train) == said
    assert problems_of(SFT().with_data(asked(place, split="tset")), tmp_path / "empty") == [
        f"data.split: {place} has no split 'tset'; did you mean 'test'?; it has test, train"
    ]


def test_old_files_and_caches_next_to_a_saved_data_set_are_not_its_rows(tmp_path, cache):
    from datasets import Dataset, load_from_disk

    saved = tmp_path / "data" / "d"
    Dataset.from_list(PAIRS).save_to_disk(saved, num_shards=3)
    Dataset.from_list(PAIRS[:4]).save_to_disk(saved, num_shards=2)
    load_from_disk(saved).map(lambda row: {"answer": "changed"})
    assert len(list(saved.glob("*.arrow"))) == 6  # 3 of the first, 2 of the second, a cache
    for source in (saved, saved.parent):
        assert answers(ready(recipe_of(source), cache).train) == SAID[:4]
    recipe = SFT().with_data(asked(str(saved), subset="small"))
    (problem,) = problems_of(recipe, tmp_path / "empty")
    assert problem.startswith(f"data.subset: {saved} is a single saved split and has no subsets")
    (saved / "data-00001-of-00002.arrow").unlink()
    assert problems_of(recipe_of(saved), tmp_path / "empty") == [
        f"data.source: {saved}/state.json names data-00001-of-00002.arrow, which is missing"
    ]


def test_a_saved_data_set_with_a_mapping_of_indices_is_refused(tmp_path, cache):
    from datasets import Dataset

    Dataset.from_list(PAIRS).save_to_disk(tmp_path / "d")
    state = json.loads((tmp_path / "d/state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "d/state.json").write_text(json.dumps(state))
    (problem,) = problems_of(recipe_of(tmp_path / "d"), cache)
    assert problem.startswith(f"data.source: {tmp_path}/d has a mapping of indices")


def test_all_tokens_with_white_space_behind_the_last_turn_are_trained_to_end(pairs, cache):
    recipe = dataclasses.replace(recipe_of(pairs), train_on="all")
    prepared = ready(recipe, cache)
    assert texts(prepared.train)[0].endswith("The answer is 0<|im_end|>\n")
    assert prepared.counts["train"]["unended"] == 0
    cut = recipe.with_batch(max_length=6, overlong="truncate")
    assert counted(cut, cache)["unended"] == len(PAIRS)


def test_a_mixture_takes_the_first_rows_and_repeats_them(pairs, tmp_path, cache):
    other = Data(write_rows(tmp_path / "b.jsonl", [{"text": "Hi there"}]), "text")
    prepared = ready(SFT().with_data(asked(pairs, first=2, repeat=2), other), cache)
    assert answers(prepared.train) == [*SAID[:2], *SAID[:2], " there</s>"]
    counts = prepared.counts["train"]
    assert [counts[key] for key in ("samples", "rows", "trained_tokens")] == [3, 5, 26]
    assert [each["rows"] for each in counts["by_source"]] == [4, 1]
    assert [each["trained_tokens"] for each in counts["by_source"]] == [24, 2]


@pytest.fixture
def halves(tmp_path: Path) -> tuple[str, str]:
    """Files of four of the pairs, and of the other two."""
    parts = (("four", PAIRS[:4]), ("two", PAIRS[4:]))
    four, two = (write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in parts)
    return four, two


@pytest.mark.parametrize(
    ("weights", "expected"),
    [((1, 1), [2, 2]), ((4, 1), [4, 1]), ((0.7, 0.3), [4, 1]), ((3, 2), [3, 2])],
)
def test_weights_give_the_shares_of_an_epoch(halves, cache, weights, expected):
    sources = (asked(part, weight=weight) for part, weight in zip(halves, weights, strict=True))
    prepared = ready(SFT().with_data(*sources), cache)
    counts = prepared.counts["train"]
    assert [each["rows"] for each in counts["by_source"]] == expected
    assert len(set(answers(prepared.train))) == sum(expected)
    assert counts["left_out"] == len(PAIRS) - sum(expected)


def test_a_weight_that_gives_no_row_is_refused(halves, cache):
    four, two = (asked(part, weight=weight) for part, weight in zip(halves, (9, 1), strict=True))
    with pytest.raises(FinetuneError, match=r"data.weight: 1.0 gives no row of .*two.jsonl"):
        ready(SFT().with_data(four, two), cache)


def test_the_seed_chooses_the_rows_of_a_weighted_source(halves, tmp_path, cache):
    many = asked(halves[0], weight=1)
    one = Data(write_rows(tmp_path / "b.jsonl", [{"text": "Hi there"}]), "text", weight=1)
    recipes = (SFT(data=(many, one), seed=seed) for seed in range(6))
    chosen = {answers(ready(recipe, cache).train)[0] for recipe in recipes}
    assert len(chosen) > 1
    assert chosen <= set(SAID[:4])


def test_held_out_rows_are_chosen_by_the_seed_and_never_trained(pairs, cache):
    chosen = []
    for seed in range(4):
        recipe = SFT(data=(asked(pairs, repeat=3),), eval_rows=2, seed=seed)
        prepared = ready(recipe, cache)
        held_out, trained = answers(prepared.eval), answers(prepared.train)
        assert sorted(held_out + trained[:4]) == SAID
        assert trained == trained[:4] * 3
        assert prepared.counts["eval"]["rows"] == 2
        chosen.append(tuple(held_out))
    assert len(set(chosen)) > 1


def test_evaluation_data_is_read_with_the_training_data(halves, cache):
    four, two = map(asked, halves)
    prepared = ready(SFT(eval_rows=1).with_data(four, eval_data=two), cache)
    assert (answers(prepared.train), answers(prepared.eval)) == (SAID[:4], SAID[4:])


def test_a_recipe_that_leaves_no_rows_to_train_on_is_refused(pairs, cache):
    assert problems_of(dataclasses.replace(recipe_of(pairs), eval_rows=6), cache) == [
        "eval_rows: 6 rows held out of 6 leave none to train on; set eval_rows below 6"
    ]
    assert problems_of(SFT(), cache) == [
        "data: the recipe has no data; use with_data(Data(source, format))"
    ]


@pytest.fixture
def long(tmp_path: Path) -> str:
    """A file of three rows, of which the second has 72 tokens."""
    middle = {"question": "Hi", "answer": "Hello there " * 30}
    return write_rows(tmp_path / "long.jsonl", [PAIRS[0], middle, PAIRS[1]])


def shortened(source: str, cache: Path, overlong: str) -> Prepared:
    return ready(recipe_of(source, max_length=24, overlong=overlong), cache)


def test_overlong_rows_are_an_error_with_their_length(long, cache):
    with pytest.raises(FinetuneError) as error:
        shortened(long, cache, "error")
    assert str(error.value) == (
        f"{long}: 1 of 3 rows are longer than batch.max_length=24 tokens, the longest 72 "
        f"({long} row 2); set batch.max_length=72, or batch.overlong to drop, truncate or split"
    )


def test_overlong_rows_are_dropped_on_request(long, cache):
    prepared = shortened(long, cache, "drop")
    assert answers(prepared.train) == SAID[:2]
    counts = prepared.counts["train"]
    assert (counts["dropped"], counts["rows"], counts["longest_sample"]) == (1, 2, 72)


def test_overlong_rows_are_cut_on_request(long, cache):
    prepared = shortened(long, cache, "truncate")
    ids, trained = prepared.train.row(1)
    assert (len(ids), prepared.counts["train"]["truncated"]) == (24, 1)
    whole = ready(recipe_of(long), cache).train.row(1)
    assert np.array_equal(ids, whole[0][:24])
    assert np.array_equal(trained, whole[1][:24])


def test_overlong_rows_are_split_and_every_token_is_trained_once(long, cache):
    prepared = shortened(long, cache, "split")
    whole = ready(recipe_of(long), cache).train.row(1)
    pieces = [prepared.train.row(index) for index in range(1, len(prepared.train) - 1)]
    assert [len(ids) for ids, _ in pieces] == [24, 24, 24, 3]
    said = np.concatenate([ids[trained] for ids, trained in pieces])
    assert np.array_equal(said, whole[0][whole[1]])
    assert prepared.counts["train"]["split"] == 1


def test_pieces_overlap_by_the_token_that_the_next_one_follows():
    ids, trained = np.arange(7, dtype=np.int32), np.ones(7, dtype=bool)
    assert [ids.tolist() for ids, _ in split((ids, trained), 4)] == [[0, 1, 2, 3], [3, 4, 5, 6]]
    assert [ids.tolist() for ids, _ in split((ids, trained), 5)] == [[0, 1, 2, 3, 4], [4, 5, 6]]


def test_rows_without_a_trained_token_are_counted_and_left_out(tmp_path, cache):
    only_asked = {"messages": [{"role": "user", "content": "Hi"}]}
    answered = {"messages": [*only_asked["messages"], {"role": "assistant", "content": "Bye"}]}
    source = write_rows(tmp_path / "a.jsonl", [only_asked, answered])
    prepared = ready(recipe_of(source, "messages"), cache)
    assert answers(prepared.train) == ["Bye<|im_end|>"]
    assert prepared.counts["train"]["untrained"] == 1
    write_rows(tmp_path / "a.jsonl", [only_asked, only_asked])
    assert problems_of(recipe_of(source, "messages"), tmp_path / "empty") == [
        f"{source}: none of its 2 rows is left to train on (2 without a trained token, 0 longer "
        "than batch.max_length=1024, 0 skipped by format 'messages')"
    ]


def test_packed_rows_hold_every_document_once_and_are_counted(pairs, cache):
    recipe = recipe_of(pairs, max_length=64, packing=True)
    prepared = ready(recipe, cache)
    single = ready(recipe.with_batch(packing=False), cache).train
    rows, counts = prepared.train, prepared.counts["train"]
    assert sorted(rows.members.tolist()) == list(range(6))
    assert rows.lengths.tolist() == [rows.row(index)[0].size for index in range(len(rows))]
    assert int(rows.lengths.max()) <= 64
    for number in range(6):
        alone, together = single.row(number), rows.documents.document(number)
        assert all(np.array_equal(*pair) for pair in zip(alone, together, strict=True))
    assert (counts["rows"], counts["documents"], counts["samples"]) == (len(rows), 6, 6)
    assert counts["filled"] == int(rows.lengths.sum()) / (64 * len(rows))


def test_many_rows_are_encoded_by_several_processes_as_by_one(tmp_path, cache):
    """The first chunks are encoded here, the rest by others where there is more than one core."""
    (tmp_path / "many").mkdir()
    sizes = [CHUNK + 2, *[2] * (ALONE + 2)]  # a chunk holds rows of one file
    places = [(file, row) for file, size in enumerate(sizes) for row in range(1, size + 1)]
    rows = [{"question": f"Hi {n}", "answer": f"Bye {n % 7}"} for n in range(len(places))]

    def write(rows: list[Any]) -> str:
        for number, size in enumerate(sizes):
            start = sum(sizes[:number])
            name = write_rows(tmp_path / f"many/{number:02}.jsonl", rows[start : start + size])
        return name

    last = write([*rows[:-1], {"question": "no answer"}])
    assert problems_of(recipe_of(tmp_path / "many"), cache)[0].startswith(
        f"{last} row 2: format 'question_answer' needs 'question' + 'answer'"
    )
    write(rows)
    prepared = ready(recipe_of(tmp_path / "many"), cache)
    assert answers(prepared.train) == [f"Bye {n % 7}<|im_end|>" for n in range(len(rows))]
    assert prepared.train.documents.origins.tolist() == list(map(list, places))


def test_the_same_data_is_prepared_once(pairs, tmp_path, cache):
    first = ready(recipe_of(pairs), cache)
    before, written = contents(first.folder), (first.folder / "counts.json").stat().st_mtime_ns
    for recipe in (
        recipe_of(pairs).with_optim(lr=1.0), dataclasses.replace(recipe_of(pairs), seed=5),
    ):  # fmt: skip
        again = ready(recipe, cache)
        assert (again.folder, again.counts) == (first.folder, first.counts)
    assert (first.folder / "counts.json").stat().st_mtime_ns == written
    assert contents(ready(recipe_of(pairs), tmp_path / "other").folder) == before
    assert [path.name for path in cache.iterdir()] == [first.folder.name]


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("documents/ids.bin", lambda content: flipped(content, -1)),
        ("train/members.npy", lambda content: flipped(content, -1)),
        ("counts.json", lambda content: flipped(content, content.index(b"6"))),
        *((name, lambda content: content[:5])
          for name in ("counts.json", "documents/ids.bin", "documents/lengths.npy")),
        *(("counts.json", lambda _, text=text: text)
          for text in (b"{}", b"null", b"[]", b"5", b"[" * 100_000)),
    ],
)  # fmt: skip
def test_prepared_data_that_is_damaged_is_refused(pairs, cache, name, damage):
    folder = ready(recipe_of(pairs), cache).folder
    content = (folder / name).read_bytes()
    damaged = damage(content)
    (folder / name).write_bytes(damaged)
    told = r"the prepared data is damaged .* delete that folder"
    with pytest.raises(FinetuneError, match=told) as refused:
        ready(recipe_of(pairs), cache)
    if len(damaged) == len(content):  # a bit turned: its sum is another
        assert name in str(refused.value)
    shutil.rmtree(folder)
    assert answers(ready(recipe_of(pairs), cache).train) == SAID


@dataclass(frozen=True, config=STRICT)
class Growing(SFT):
    """Another program writes to the first source while it is read."""

    def encode(self, sample: Any, chat: Chat) -> Any:
        with open(self.data[0].source, "a", encoding="utf-8") as file:
            file.write(json.dumps(PAIRS[0]) + "\n")
        return super().encode(sample, chat)


def test_a_file_that_grows_while_it_is_read_is_refused(pairs, cache):
    (problem,) = problems_of(Growing().with_data(asked(pairs)), cache)
    assert problem.startswith(f"data: {pairs}: changed while it was read")


def test_what_a_dead_process_left_in_the_cache_goes_and_a_living_ones_stays(pairs, cache):
    dead, living = cache / ".of-a-dead-process.rows", cache / ".of-a-living-one.rows"
    for folder in (dead, living):
        folder.mkdir(parents=True)
    (dead / "ids.bin").write_bytes(b"0")
    held = os.open(living, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    folder = ready(recipe_of(pairs), cache).folder
    os.close(held)
    assert sorted(path.name for path in cache.iterdir()) == sorted([living.name, folder.name])


def test_whatever_changes_the_rows_changes_the_key(pairs, tmp_path, cache):
    recipe = recipe_of(pairs)
    longer, renamed = small_tokenizer(), small_tokenizer()
    longer.add_tokens(["answer is"])
    renamed.eos_token = "<|im_end|>"
    recipes = [
        recipe, dataclasses.replace(recipe, train_on="completion"),
        recipe.with_batch(max_length=100), recipe.with_batch(overlong="drop"),
        recipe.with_batch(packing=True), dataclasses.replace(recipe, eval_rows=1),
        dataclasses.replace(recipe, eval_rows=1, seed=1), recipe.with_data(asked(pairs, first=3)),
        recipe.with_data(recipe.data[0], eval_data=recipe.data),
        recipe.with_data(recipe.data[0], recipe.data[0]),
    ]  # fmt: skip
    variants = [ready(each, cache) for each in recipes]
    marked = Chat(CHAT.tokenizer, f"{CHAT.template} ")
    for chat in (marked, load_chat(longer, "chatml"), load_chat(renamed, "chatml")):
        variants.append(ready(recipe, cache, chat))
    write_rows(tmp_path / "a.jsonl", PAIRS[:5])
    variants.append(ready(recipe, cache))
    assert len({each.folder for each in variants}) == len(variants) == 14
    assert answers(variants[-1].train) == SAID[:5]


@pytest.mark.parametrize("files", [0, 2])
def test_documents_come_from_files_that_are_counted(pairs, cache, files):
    documents = ready(recipe_of(pairs), cache).train.documents
    check_origins(documents, 1)
    elsewhere = dataclasses.replace(documents, origins=documents.origins + np.array([files - 1, 0]))
    with pytest.raises(ValueError, match=r"^origins.npy names a file that is not one of 1$"):
        check_origins(elsewhere, 1)


OWN = """
class Own(SFT):
    def encode(self, sample, chat):
        (row,) = super().encode(sample, chat).sequences
        def kept(ids):
            return [token not in UNTRAINED for token in ids]
        said = [a and b for a, b in zip(row.trained, kept(row.ids))]
        return Example((type(row)(row.ids, said),))
"""


@pytest.mark.parametrize(("first", "second"), [("(5, 6)", "(7, 8)"), ("[0 for _ in ids]", "[]")])
def test_a_method_that_encodes_otherwise_changes_the_key(pairs, cache, first, second):
    folders = set[Path]()
    for untrained in (first, second):
        names: dict[str, Any] = {"SFT": SFT, "Example": Example}
        exec(OWN.replace("UNTRAINED", untrained), names)
        folders.add(ready(names["Own"]().with_data(asked(pairs)), cache).folder)
    assert len(folders) == 2


def test_every_problem_of_the_sections_is_reported_at_once(tmp_path, cache):
    write_rows(tmp_path / "train.jsonl", PAIRS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.xlsx").write_text("x")
    named = {
        "trian.jsonl": "question_answer", "no/a.jsonl": "question_answer",
        "train.jsonl": "mesages", "*.parquet": "text", "*.xlsx": "text", "empty": "text",
        "a.xlsx": "text",
    }  # fmt: skip
    recipe = SFT().with_data(*(Data(f"{tmp_path}/{name}", kind) for name, kind in named.items()))
    known = (
        ".jsonl, .ndjson, .json, .parquet, .arrow, .csv, .tsv, .txt (text also as .gz, .bz2, .xz, "
        ".zst)"
    )
    assert problems_of(recipe, cache) == [
        f"data.source: no such file or folder: {tmp_path}/trian.jsonl; did you mean "
        f"'{tmp_path}/train.jsonl'?",
        f"data.source: no such file or folder: {tmp_path}/no/a.jsonl (there is no folder "
        f"{tmp_path}/no)",
        "data.format: 'mesages' is not a format; did you mean 'messages'? (known: alpaca, "
        "alpaca_preference, hh, kto, labelled, messages, oasst, preference, prompt_completion, "
        "prompts, question_answer, ranked, ranked_all, ranked_best, self_instruct, sharegpt, "
        "sharegpt_preference, text)",
        f"data.source: '{tmp_path}/*.parquet' matches nothing",
        f"data.source: '{tmp_path}/*.xlsx' matches 1 paths, but no file that can be read; "
        f"{tmp_path}/a.xlsx is not a {known} file",
        f"data.source: the folder {tmp_path}/empty has no file that can be read",
        f"data.source: {tmp_path}/a.xlsx is not a {known} file",
    ]


BROKEN: list[tuple[str, bytes, str]] = [
    ("a.jsonl", b"", "{path}: the file is empty"),
    ("a.jsonl", b"\n\n", "{path}: it has no rows"),
    ("a.json", b"[]", "{path}: it has no rows"),
    ("a.jsonl", b'{"question": "a", "answer": "b"}\n{"question": "caf\xe9"}\n',
        "{path} row 2: not UTF-8 (byte 17 of the line is 0xe9); convert it from its encoding, as "
        "in iconv -f LATIN1 -t UTF-8"),
    ("a.jsonl", '{"question": "a", "answer": "b"}\n'.encode("utf-16"),
        "{path} row 1: not UTF-8 but UTF-16; convert it: iconv -f UTF-16 -t UTF-8"),
    ("a.txt", "Hi there".encode("utf-32-le"),
        "{path} row 1: not UTF-8 but UTF-32LE; convert it: iconv -f UTF-32LE -t UTF-8"),
    ("a.jsonl", gzip.compress(b'{"question": "a", "answer": "b"}\n'),
        "{path}: it is compressed with gzip; rename it to end in .gz"),
    ("a.jsonl.gz", gzip.compress(b'{"question": "a", "answer": "b"}\n')[:-9],
        "{path}: it cannot be decompressed: Compressed file ended before the end-of-stream "
        "marker was reached"),
    ("a.jsonl.gz", b"not compressed",
        "{path}: it cannot be decompressed: Not a gzipped file (b'no')"),
    ("a.jsonl", b'[{"question": "a", "answer": "b"}]',
        "{path}: it contains a JSON list, expected one row per line; rename it to end in .json"),
    ("a.jsonl", b'[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]',
        "{path} row 1: is a list, expected an object with columns"),
    ("a.jsonl", b'[\n{"question": "a", "answer": "b"}\n]',
        "{path}: it contains a JSON list, expected one row per line; rename it to end in .json"),
    ("a.jsonl", b'{\n"question": "a",\n"answer": "b"\n}\n',
        "{path}: its first row spans several lines, expected one row per line; write each row on "
        "one line (jq -c . does), or a list of rows to a file that ends in .json"),
    ("a.csv", b"question;answer\na;b\n",
        "{path}: its header is one column, 'question;answer': the delimiter is ';', expected "
        "','; write it with commas"),
    ("a.csv", b"question\tanswer\na\tb\n",
        "{path}: its header is one column, 'question\\tanswer': the delimiter is a tab, expected "
        "','; rename it to end in .tsv"),
    ("a.jsonl", b'{"question": "a", "answer": "b"}\n\n{"question": "a", "answer"\n',
        "{path} row 3: broken JSON at column 27: Expecting ':' delimiter near "
        '\'tion": "a", "answer"\''),
    ("a.json", b'[{"question": "a"},\n {"question": }]',
        "{path}: broken JSON at line 2 column 15: Expecting value near "
        '\'"a"}},\\n {{"question": }}]\''),
    ("a.json", b'{"a": 1}', "{path}: it contains one JSON value, expected a list of rows"),
    ("a.tsv", b'question\tanswer\n"a\nb"\t2\n"Hello\tworld\nHi\tthere\nBye"\tsee you\n',
        "{path} row 2: a quote at the start of a cell joins 3 lines, each of which is a row of its "
        "own by its tabs; write a quote that belongs to the text twice within quotes: "
        '"""Hello"" she said"'),
    ("a.jsonl", b"[1]\n", "{path} row 1: is a list, expected an object with columns"),
    ("a.csv", b"question,answer\na,b,c\n",
        "{path} row 1: 1 more cells than the header has columns"),
    ("a.csv", b"question,answer\na,b\na\n",
        "{path} row 2: format 'question_answer' needs 'question' + 'answer', the row has "
        "'question', 'answer' (null)"),
    ("a.csv", b"question,answer,answer\na,b,c\n",
        "{path}: the header has the column 'answer' more than once"),
    ("a.jsonl", b'{"question": "a", "answer": "b"}\n{"question": ' + b"1" * 5000 + b"}\n",
        "{path} row 2: broken JSON: Exceeds the limit (4300 digits) for integer string "
        "conversion: value has 5000 digits; use sys.set_int_max_str_digits() to increase the "
        "limit"),
    ("a.json", b'{"question":\n' + b"1" * 5000 + b"}",
        "{path}: broken JSON: Exceeds the limit (4300 digits) for integer string conversion: "
        "value has 5000 digits; use sys.set_int_max_str_digits() to increase the limit"),
    ("a.csv", b'question,answer\na,"b\n', "{path} row 1: broken CSV: unexpected end of data"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "content", "told"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_named_with_its_row(tmp_path, cache, file, content, told):
    path = tmp_path / file
    path.write_bytes(content)
    assert problems_of(recipe_of(path), cache) == [told.format(path=path)]


def test_a_part_of_a_split_without_rows_is_named(tmp_path, cache):
    source = write_rows(tmp_path / "a.jsonl", PAIRS)
    recipe = recipe_of(source)
    data = dataclasses.replace(recipe.data[0], split="train[:1%]")
    assert problems_of(recipe.with_data(data), cache) == [f"{source}: split train[:1%] has no rows"]


def test_a_torn_parquet_file_is_named(tmp_path, cache):
    path = tmp_path / "a.parquet"
    write_as(path, PAIRS)
    path.write_bytes(path.read_bytes()[:-20])
    (problem,) = problems_of(recipe_of(path), cache)
    assert problem.startswith(f"{path}: it is not a complete Parquet file: ")


def test_several_bad_rows_are_reported_at_once_up_to_a_limit(tmp_path, cache):
    bad = [{"question": n, "answer": "x"} for n in range(3)]
    rows = [PAIRS[0], *bad, PAIRS[1], {"question": "x", "answer": None}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    assert problems_of(recipe_of(source), cache) == [
        f"{source} row 2 (and 2 more rows): question is a number, expected text",
        f"{source} row 6: format 'question_answer' needs 'question' + 'answer', the row has "
        "'question', 'answer' (null)",
    ]
    write_rows(tmp_path / "a.jsonl", bad * 1000)
    assert problems_of(recipe_of(source), cache) == [
        f"{source} row 1 (and 1023 more rows): question is a number, expected text",
        "reading stopped here; there may be more",
    ]


def test_conversations_without_a_template_are_reported_once(pairs, cache):
    assert problems_of(recipe_of(pairs), cache, Chat(small_tokenizer(), None)) == [
        f"{pairs} row 1 (and 5 more rows): model.chat_template: the data has conversations and "
        "the tokenizer has no chat template; set model.chat_template to a file or to one of "
        "chatml, plain"
    ]


PINNED = """
from finetune.data.read.hub import hub_rows, hub_version
from finetune.errors import FinetuneError
from finetune.recipe import Data

versions = set()
for revision, split in [*((each, "train") for each in (None, "v1", "a" * 40, "v2")), (None, "x")]:
    data = Data("someone/chats", "text", revision=revision, split=split)
    try:
        print(revision, [row["text"] for row in hub_rows(data)])
        versions.add(hub_version(data))
    except FinetuneError as error:
        print(error)
print(len(versions))
"""


def test_a_revision_of_a_hub_data_set_is_read_from_the_cache_of_the_hub_without_a_network(tmp_path):
    stored = tmp_path / "hf/hub/datasets--someone--chats"
    for name, commit in (("main", "b" * 40), ("v1", "a" * 40)):
        (stored / "refs").mkdir(parents=True, exist_ok=True)
        (stored / "refs" / name).write_text(commit)
        (stored / "snapshots" / commit).mkdir(parents=True)
        write_rows(stored / "snapshots" / commit / "train.jsonl", [{"text": name}])
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT)}
    done = run_command([sys.executable, "-c", PINNED], tmp_path, env=variables)
    assert done.status == 0, done.output
    *read, absent, no_split, versions = done.stdout.splitlines()
    assert read == ["None ['main']", "v1 ['v1']", f"{'a' * 40} ['v1']"]
    assert absent.startswith("data.source: 'someone/chats' is not a local file or folder, and the")
    assert "the hub reports: Unknown split" in no_split
    assert versions == "2"


def test_a_full_disk_or_a_file_as_cache_is_refused_and_nothing_half_written(tmp_path, cache):
    """A limit on the size of files stands in for the full disk: the write itself fails."""
    source = write_rows(tmp_path / "a.jsonl", PAIRS * 100)
    small = ready(SFT().with_data(asked(source, first=1)), cache)
    before = contents(cache)
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
    try:
        with pytest.raises(FinetuneError, match="cannot write the prepared data"):
            ready(recipe_of(source), cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
    assert contents(cache) == before
    assert [path.name for path in cache.iterdir()] == [small.folder.name]
    (tmp_path / "file").write_text("a file")
    with pytest.raises(FinetuneError, match="cannot write the prepared data"):
        ready(recipe_of(source), tmp_path / "file")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_pass_over_mapped_rows_holds_little_of_them(tmp_path):
    def kibibytes(of: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{of}:")[1].split()[0])

    count, length = 80_000, 128
    writer = DocumentWriter(tmp_path / "documents")
    writer.append(
        np.zeros(count * length, np.int32),
        np.ones(count * length, bool),
        np.full(count, length),
        np.zeros((count, 2), np.int64),
    )
    documents = writer.close()
    rows = single_rows(documents, permutation(count, 0, 0))  # as packs are: not the file's order
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = kibibytes("VmRSS")
    digest(rows)
    assert kibibytes("VmHWM") - before < 24 * 1024  # of 49 MiB
    assert documents.document(count - 1)[1].all()
