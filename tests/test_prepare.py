"""Data is read whole or refused with file and row, written once, and found again."""

import csv
import dataclasses
import fcntl
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from pydantic.dataclasses import dataclass
from small_tokenizer import small_tokenizer
from transformers import AutoTokenizer

from finetune.data.chat.render import Chat, load_chat
from finetune.data.encode import split
from finetune.data.encode_pool import ALONE
from finetune.data.example import Example
from finetune.data.order import permutation
from finetune.data.prepare import CHUNK, Prepared, prepare
from finetune.data.store import DocumentWriter, Rows, check_origins, digest, single_rows
from finetune.errors import FinetuneError
from finetune.methods.pretrain import Pretrain
from finetune.methods.sft import SFT
from finetune.recipe import STRICT, Data, Recipe

CHAT = load_chat(small_tokenizer(), "chatml")
PAIRS = [{"question": f"What is {n}", "answer": f"The answer is {n}"} for n in range(6)]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def recipe_of(source: str, data_format: str = "question_answer", **batch: Any) -> SFT:
    return SFT().with_data(Data(source, data_format)).with_batch(**batch)


def texts(rows: Rows, chat: Chat = CHAT) -> list[str]:
    return [chat.tokenizer.decode(rows.row(index)[0]) for index in range(len(rows))]


def answers(rows: Rows, chat: Chat = CHAT) -> list[str]:
    """What each row is trained to say."""
    return [
        chat.tokenizer.decode(ids[trained])
        for ids, trained in (rows.row(index) for index in range(len(rows)))
    ]


def problems_of(recipe: Recipe, cache: Path, chat: Chat = CHAT) -> list[str]:
    with pytest.raises(FinetuneError) as error:
        prepare(recipe, chat, cache)
    assert [path for path in cache.glob("*") if path.is_dir()] == []
    return list(error.value.problems)


SAID = [f"The answer is {n}<|im_end|>" for n in range(6)]


# Files.


def test_rows_of_a_file_become_columns_in_its_order(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", PAIRS)
    prepared = prepare(recipe_of(source), CHAT, tmp_path / "cache")
    rows = prepared.train
    assert answers(rows) == SAID
    assert texts(rows)[0] == (
        "<|im_start|>user\nWhat is 0<|im_end|>\n<|im_start|>assistant\nThe answer is 0<|im_end|>\n"
    )
    documents = rows.documents
    assert (documents.ids.dtype, documents.trained.dtype) == (np.int32, bool)
    assert isinstance(documents.ids, np.memmap)
    assert isinstance(documents.trained, np.memmap)
    assert [prepared.place(number) for number in (0, 5)] == [f"{source} row 1", f"{source} row 6"]
    assert len(prepared.eval) == 0


def test_counts_describe_the_prepared_rows(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", PAIRS)
    prepared = prepare(recipe_of(source), CHAT, tmp_path / "cache")
    lengths = prepared.train.lengths
    # "The", " answer", " is", " ", a number and the end; " 4" is one token.
    own = {"samples": 6, "rows": 6, "tokens": int(lengths.sum()), "trained_tokens": 6 * 6 - 1}
    rows = hashlib.sha256(lengths.tobytes() + np.arange(6).tobytes() + np.arange(7).tobytes())
    for number in range(6):
        for column in prepared.train.row(number):
            rows.update(column.tobytes())
    assert prepared.counts["train"] == {
        **own,
        "sha256": rows.hexdigest(),
        "passed_over": 0,
        "untrained": 0,
        "dropped": 0,
        "truncated": 0,
        "eaten": 0,
        "tied": 0,
        "split": 0,
        "overlong": 0,
        "empty": 0,
        "bad": 0,
        "columns_unread": {},
        "outside": [],
        "folders": [],
        "empty_turns": 0,
        "history_thoughts": 0,
        "tool_details": 0,
        "unserved": 0,
        "call_ids": 0,
        "markup_asked": 0,
        "markup_said": 0,
        "no_bos": 0,
        "two_bos": 0,
        "unasked": 0,
        "fixed_date": False,
        "first": {},
        "documents": 6,
        "unended": 0,
        "duplicates": 0,
        "documents_per_row": 1,
        "labels": {},
        "same_label": False,
        "scored": False,
        "longer_chosen": None,
        "wanted": None,
        "left_out": 0,
        "unread": [],
        "without_rows": [],
        "longest": int(lengths.max()),
        "longest_sample": int(lengths.max()),
        "mean_length": float(lengths.mean()),
        "filled": None,
        "roles": {"assistant": 6, "user": 6},
        "by_source": [
            {
                "source": source, "format": "question_answer", **own,
                "truncated": 0, "eaten": 0, "unended": 0, "bad": 0, "columns_unread": {},
            }
        ],
    }  # fmt: skip
    assert prepared.counts["eval"]["rows"] == 0


def write_as(path: Path, rows: list[dict[str, str]]) -> None:
    match path.suffix:
        case ".jsonl":
            write_jsonl(path, rows)
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
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, suffix: str):
    rows = [*PAIRS, {"question": 'Name a\ncolour, "red"', "answer": "blue\u00e9" * 50_000}]
    write_as(tmp_path / f"a{suffix}", rows)
    recipe = recipe_of(str(tmp_path / f"a{suffix}"), max_length=10**6)
    prepared = prepare(recipe, CHAT, tmp_path / "cache")
    assert answers(prepared.train) == [*SAID, "blue\u00e9" * 50_000 + "<|im_end|>"]


def test_json_lines_under_the_name_of_json_are_read(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.json", PAIRS)
    assert answers(prepare(recipe_of(source), CHAT, tmp_path / "cache").train) == SAID


def test_a_byte_order_mark_and_windows_line_ends_are_ignored(tmp_path: Path):
    lines = b"\r\n".join(json.dumps(row).encode() for row in PAIRS)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines + b"\r\n\r\n")
    recipe = recipe_of(str(tmp_path / "a.jsonl"))
    assert answers(prepare(recipe, CHAT, tmp_path / "cache").train) == SAID


def test_a_text_file_is_a_document_or_several(tmp_path: Path):
    (tmp_path / "a.txt").write_text("Hi there\n\nBye\n")
    (tmp_path / "b.txt").write_bytes(b"Hi\r\nthere\r\n<|endoftext|>\r\n\n<|endoftext|>\nBye\n")
    recipe = Pretrain().with_data(Data(str(tmp_path), "text"))
    prepared = prepare(recipe, CHAT, tmp_path / "cache")
    assert texts(prepared.train) == ["Hi there\n\nBye</s>", "Hi\nthere</s>", "Bye</s>"]
    trained = [int(prepared.train.row(index)[1].sum()) for index in range(3)]
    assert trained == [length - 1 for length in prepared.train.lengths.tolist()]


def test_a_folder_and_a_glob_are_their_files_in_order(tmp_path: Path):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    write_jsonl(folder / "b.jsonl", PAIRS[2:4])
    write_jsonl(folder / "a.jsonl", PAIRS[:2])
    write_jsonl(folder / "sub" / "c.jsonl", PAIRS[4:])
    write_jsonl(folder / ".hidden" / "d.jsonl", [{"no": "row"}])
    (folder / "README.md").write_text("not data")
    whole = prepare(recipe_of(str(folder)), CHAT, tmp_path / "cache")
    assert answers(whole.train) == SAID
    part = prepare(recipe_of(str(folder / "*.jsonl")), CHAT, tmp_path / "cache")
    assert answers(part.train) == SAID[:4]


def test_a_data_set_that_was_saved_to_disk_is_its_rows(tmp_path: Path):
    from datasets import Dataset, DatasetDict

    whole = Dataset.from_list(PAIRS)
    DatasetDict({"test": whole.select([0]), "train": whole}).save_to_disk(tmp_path / "d")
    for source in (tmp_path / "d", tmp_path / "d" / "train"):
        recipe = recipe_of(str(source))
        assert answers(prepare(recipe, CHAT, tmp_path / "cache").train) == SAID
    held_out = SFT().with_data(Data(str(tmp_path / "d"), "question_answer", split="test"))
    assert answers(prepare(held_out, CHAT, tmp_path / "cache").train) == SAID[:1]
    other = SFT().with_data(Data(str(tmp_path / "d"), "question_answer", split="tset"))
    assert problems_of(other, tmp_path / "empty") == [
        f"data.split: {tmp_path / 'd'} has no split 'tset'; did you mean 'test'?; it has test, "
        "train"
    ]


def test_old_files_and_caches_next_to_a_saved_data_set_are_not_its_rows(tmp_path: Path):
    from datasets import Dataset, load_from_disk

    saved = tmp_path / "data" / "d"
    Dataset.from_list(PAIRS).save_to_disk(saved, num_shards=3)
    Dataset.from_list(PAIRS[:4]).save_to_disk(saved, num_shards=2)
    load_from_disk(saved).map(lambda row: {"answer": "changed"})
    assert len(list(saved.glob("*.arrow"))) == 6  # 3 of the first, 2 of the second, a cache
    for source in (saved, saved.parent):
        prepared = prepare(recipe_of(str(source)), CHAT, tmp_path / "cache")
        assert answers(prepared.train) == SAID[:4]
    (problem,) = problems_of(
        SFT().with_data(Data(str(saved), "question_answer", subset="small")), tmp_path / "empty"
    )
    assert problem.startswith(f"data.subset: {saved} is a single saved split and has no subsets")
    (saved / "data-00001-of-00002.arrow").unlink()
    assert problems_of(recipe_of(str(saved)), tmp_path / "empty") == [
        f"data.source: {saved}/state.json names data-00001-of-00002.arrow, which is missing"
    ]


def test_a_saved_data_set_with_a_mapping_of_indices_is_refused(tmp_path: Path):
    from datasets import Dataset

    Dataset.from_list(PAIRS).save_to_disk(tmp_path / "d")
    state = json.loads((tmp_path / "d/state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "d/state.json").write_text(json.dumps(state))
    (problem,) = problems_of(recipe_of(str(tmp_path / "d")), tmp_path / "cache")
    assert problem.startswith(f"data.source: {tmp_path}/d has a mapping of indices")


def test_all_tokens_with_white_space_behind_the_last_turn_are_trained_to_end(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", PAIRS)
    recipe = dataclasses.replace(recipe_of(source), train_on="all")
    prepared = prepare(recipe, CHAT, tmp_path / "cache")
    assert texts(prepared.train)[0].endswith("The answer is 0<|im_end|>\n")
    assert prepared.counts["train"]["unended"] == 0
    cut = dataclasses.replace(recipe.with_batch(max_length=6, overlong="truncate"))
    assert prepare(cut, CHAT, tmp_path / "cache").counts["train"]["unended"] == len(PAIRS)


# Mixtures, held-out rows.


def test_a_mixture_takes_the_first_rows_and_repeats_them(tmp_path: Path):
    a = Data(write_jsonl(tmp_path / "a.jsonl", PAIRS), "question_answer", first=2, repeat=2)
    b = Data(write_jsonl(tmp_path / "b.jsonl", [{"text": "Hi there"}]), "text")
    prepared = prepare(SFT().with_data(a, b), CHAT, tmp_path / "cache")
    assert answers(prepared.train) == [*SAID[:2], *SAID[:2], " there</s>"]
    counts = prepared.counts["train"]
    assert (counts["samples"], counts["rows"]) == (3, 5)
    assert [each["rows"] for each in counts["by_source"]] == [4, 1]
    assert [each["trained_tokens"] for each in counts["by_source"]] == [24, 2]
    assert counts["trained_tokens"] == 26


@pytest.mark.parametrize(
    ("weights", "expected"),
    [((1, 1), [2, 2]), ((4, 1), [4, 1]), ((0.7, 0.3), [4, 1]), ((3, 2), [3, 2])],
)
def test_weights_give_the_shares_of_an_epoch(
    tmp_path: Path, weights: tuple[float, float], expected: list[int]
):
    a = write_jsonl(tmp_path / "a.jsonl", PAIRS[:4])
    b = write_jsonl(tmp_path / "b.jsonl", PAIRS[4:])
    first = Data(a, "question_answer", weight=weights[0])
    second = Data(b, "question_answer", weight=weights[1])
    prepared = prepare(SFT().with_data(first, second), CHAT, tmp_path / "cache")
    counts = prepared.counts["train"]
    assert [each["rows"] for each in counts["by_source"]] == expected
    assert len(set(answers(prepared.train))) == sum(expected)
    assert counts["left_out"] == len(PAIRS) - sum(expected)


def test_a_weight_that_gives_no_row_is_refused(tmp_path: Path):
    a = Data(write_jsonl(tmp_path / "a.jsonl", PAIRS[:4]), "question_answer", weight=9)
    b = Data(write_jsonl(tmp_path / "b.jsonl", PAIRS[4:]), "question_answer", weight=1)
    with pytest.raises(FinetuneError, match=r"data.weight: 1.0 gives no row of .*b.jsonl"):
        prepare(SFT().with_data(a, b), CHAT, tmp_path / "cache")


def test_the_seed_chooses_the_rows_of_a_weighted_source(tmp_path: Path):
    many = Data(write_jsonl(tmp_path / "a.jsonl", PAIRS[:4]), "question_answer", weight=1)
    one = Data(write_jsonl(tmp_path / "b.jsonl", [{"text": "Hi there"}]), "text", weight=1)
    chosen = {
        answers(prepare(SFT(data=(many, one), seed=seed), CHAT, tmp_path / "cache").train)[0]
        for seed in range(6)
    }
    assert len(chosen) > 1
    assert chosen <= set(SAID[:4])


def test_held_out_rows_are_chosen_by_the_seed_and_never_trained(tmp_path: Path):
    data = Data(write_jsonl(tmp_path / "a.jsonl", PAIRS), "question_answer", repeat=3)
    chosen = []
    for seed in range(4):
        recipe = SFT(data=(data,), eval_rows=2, seed=seed)
        prepared = prepare(recipe, CHAT, tmp_path / "cache")
        held_out, trained = answers(prepared.eval), answers(prepared.train)
        assert sorted(held_out + trained[:4]) == SAID
        assert trained == trained[:4] * 3
        assert prepared.counts["eval"]["rows"] == 2
        chosen.append(tuple(held_out))
    assert len(set(chosen)) > 1


def test_evaluation_data_is_read_with_the_training_data(tmp_path: Path):
    train = Data(write_jsonl(tmp_path / "a.jsonl", PAIRS[:4]), "question_answer")
    held_out = Data(write_jsonl(tmp_path / "b.jsonl", PAIRS[4:]), "question_answer")
    recipe = dataclasses.replace(SFT(eval_rows=1).with_data(train, eval_data=held_out))
    prepared = prepare(recipe, CHAT, tmp_path / "cache")
    assert (answers(prepared.train), answers(prepared.eval)) == (SAID[:4], SAID[4:])


def test_more_rows_held_out_than_there_are_is_refused(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", PAIRS)
    recipe = dataclasses.replace(recipe_of(source), eval_rows=6)
    assert problems_of(recipe, tmp_path / "cache") == [
        "eval_rows: 6 rows held out of 6 leave none to train on; set eval_rows below 6"
    ]


# Overlong rows.

LONG = [PAIRS[0], {"question": "Hi", "answer": "Hello there " * 30}, PAIRS[1]]


def prepare_long(tmp_path: Path, overlong: str) -> Prepared:
    source = write_jsonl(tmp_path / "a.jsonl", LONG)
    recipe = recipe_of(source, max_length=24, overlong=overlong)
    return prepare(recipe, CHAT, tmp_path / "cache")


def test_overlong_rows_are_an_error_with_their_length(tmp_path: Path):
    with pytest.raises(FinetuneError) as error:
        prepare_long(tmp_path, "error")
    source = tmp_path / "a.jsonl"
    assert str(error.value) == (
        f"{source}: 1 of 3 rows are longer than batch.max_length=24 tokens, the longest 72 "
        f"({source} row 2); set batch.max_length=72, or batch.overlong to drop, truncate or split"
    )


def test_overlong_rows_are_dropped_on_request(tmp_path: Path):
    prepared = prepare_long(tmp_path, "drop")
    assert answers(prepared.train) == SAID[:2]
    counts = prepared.counts["train"]
    assert (counts["dropped"], counts["rows"], counts["longest_sample"]) == (1, 2, 72)


def test_overlong_rows_are_cut_on_request(tmp_path: Path):
    prepared = prepare_long(tmp_path, "truncate")
    ids, trained = prepared.train.row(1)
    assert (len(ids), prepared.counts["train"]["truncated"]) == (24, 1)
    whole = prepare(recipe_of(str(tmp_path / "a.jsonl")), CHAT, tmp_path / "cache").train.row(1)
    assert np.array_equal(ids, whole[0][:24])
    assert np.array_equal(trained, whole[1][:24])


def test_overlong_rows_are_split_and_every_token_is_trained_once(tmp_path: Path):
    prepared = prepare_long(tmp_path, "split")
    whole = prepare(recipe_of(str(tmp_path / "a.jsonl")), CHAT, tmp_path / "cache").train.row(1)
    pieces = [prepared.train.row(index) for index in range(1, len(prepared.train) - 1)]
    assert [len(ids) for ids, _ in pieces] == [24, 24, 24, 3]
    said = np.concatenate([ids[trained] for ids, trained in pieces])
    assert np.array_equal(said, whole[0][whole[1]])
    assert prepared.counts["train"]["split"] == 1


def test_pieces_overlap_by_the_token_that_the_next_one_follows():
    ids, trained = np.arange(7, dtype=np.int32), np.ones(7, dtype=bool)
    assert [ids.tolist() for ids, _ in split((ids, trained), 4)] == [[0, 1, 2, 3], [3, 4, 5, 6]]
    assert [ids.tolist() for ids, _ in split((ids, trained), 5)] == [[0, 1, 2, 3, 4], [4, 5, 6]]


def test_rows_without_a_trained_token_are_counted_and_left_out(tmp_path: Path):
    only_asked = {"messages": [{"role": "user", "content": "Hi"}]}
    answered = {"messages": [*only_asked["messages"], {"role": "assistant", "content": "Bye"}]}
    source = write_jsonl(tmp_path / "a.jsonl", [only_asked, answered])
    prepared = prepare(recipe_of(source, "messages"), CHAT, tmp_path / "cache")
    assert answers(prepared.train) == ["Bye<|im_end|>"]
    assert prepared.counts["train"]["untrained"] == 1
    write_jsonl(tmp_path / "a.jsonl", [only_asked, only_asked])
    assert problems_of(recipe_of(source, "messages"), tmp_path / "empty") == [
        f"{source}: none of its 2 rows is left to train on (2 without a trained token, 0 longer "
        "than batch.max_length=1024, 0 skipped by format 'messages')"
    ]


# Packing.


def test_packed_rows_hold_every_document_once_and_are_counted(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", PAIRS)
    recipe = recipe_of(source, max_length=64, packing=True)
    prepared = prepare(recipe, CHAT, tmp_path / "cache")
    single = prepare(recipe.with_batch(packing=False), CHAT, tmp_path / "cache").train
    rows, counts = prepared.train, prepared.counts["train"]
    assert sorted(rows.members.tolist()) == list(range(6))
    assert rows.lengths.tolist() == [rows.row(index)[0].size for index in range(len(rows))]
    assert int(rows.lengths.max()) <= 64
    for number in range(6):
        alone, together = single.row(number), rows.documents.document(number)
        assert all(np.array_equal(*pair) for pair in zip(alone, together, strict=True))
    assert (counts["rows"], counts["documents"], counts["samples"]) == (len(rows), 6, 6)
    assert counts["filled"] == int(rows.lengths.sum()) / (64 * len(rows))


def test_a_real_set_of_short_rows_fills_its_slots(assets: Path, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers/qwen3")
    recipe = recipe_of(str(assets / "data/gsm8k/test.jsonl"), packing=True)
    prepared = prepare(recipe, load_chat(tokenizer, None), tmp_path)
    assert prepared.counts["train"]["filled"] >= 0.98


# Several processes.


def test_many_rows_are_encoded_by_several_processes_as_by_one(tmp_path: Path):
    """The first rows are encoded here, the rest by others where there is more than one core."""
    rows = [{"question": f"Hi {n}", "answer": f"Bye {n % 7}"} for n in range(CHUNK * (ALONE + 3))]
    rows[-1] = {"question": "no answer"}
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    assert problems_of(recipe_of(source), tmp_path / "cache")[0].startswith(
        f"{source} row {len(rows)}: format 'question_answer' needs 'question' + 'answer'"
    )
    write_jsonl(tmp_path / "a.jsonl", rows[:-1])
    prepared = prepare(recipe_of(source), CHAT, tmp_path / "cache")
    assert answers(prepared.train) == [f"Bye {n % 7}<|im_end|>" for n in range(len(rows) - 1)]
    numbers = prepared.train.documents.origins[:, 1]
    assert numbers.tolist() == list(range(1, len(rows)))


# The cache.


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_same_data_is_prepared_once(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", PAIRS)
    first = prepare(recipe_of(source), CHAT, tmp_path / "cache")
    before, written = contents(first.folder), (first.folder / "counts.json").stat().st_mtime_ns
    again = prepare(recipe_of(source).with_optim(lr=1.0), CHAT, tmp_path / "cache")
    assert again.folder == first.folder
    assert (first.folder / "counts.json").stat().st_mtime_ns == written
    assert again.counts == first.counts
    elsewhere = prepare(recipe_of(source), CHAT, tmp_path / "other")
    assert contents(elsewhere.folder) == before
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.folder.name]


@pytest.mark.parametrize("name", ["documents/ids.bin", "train/members.npy", "counts.json"])
def test_a_bit_of_the_prepared_data_that_turned_is_found(tmp_path: Path, name: str):
    source = write_jsonl(tmp_path / "a.jsonl", PAIRS)
    folder = prepare(recipe_of(source), CHAT, tmp_path / "cache").folder
    path = folder / name
    content = bytearray(path.read_bytes())
    content[content.index(b"6") if name == "counts.json" else -1] ^= 1
    path.write_bytes(content)
    with pytest.raises(FinetuneError, match="the prepared data is damaged") as refused:
        prepare(recipe_of(source), CHAT, tmp_path / "cache")
    assert name in str(refused.value)
    shutil.rmtree(folder)
    assert answers(prepare(recipe_of(source), CHAT, tmp_path / "cache").train) == SAID


@pytest.mark.parametrize("counts", ["{}", "null", "[]", "5", "[" * 100_000])
def test_counts_of_another_shape_are_damage(tmp_path: Path, counts: str):
    source = write_jsonl(tmp_path / "a.jsonl", PAIRS)
    folder = prepare(recipe_of(source), CHAT, tmp_path / "cache").folder
    (folder / "counts.json").write_text(counts)
    with pytest.raises(FinetuneError, match="the prepared data is damaged"):
        prepare(recipe_of(source), CHAT, tmp_path / "cache")


@dataclass(frozen=True, config=STRICT)
class Growing(SFT):
    """Another program writes to the first source while it is read."""

    def encode(self, sample: Any, chat: Chat) -> Any:
        with open(self.data[0].source, "a", encoding="utf-8") as file:
            file.write(json.dumps(PAIRS[0]) + "\n")
        return super().encode(sample, chat)


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", PAIRS)
    recipe = Growing().with_data(Data(source, "question_answer"))
    (problem,) = problems_of(recipe, tmp_path / "cache")
    assert problem.startswith(f"data: {source}: changed while it was read")


def test_what_a_dead_process_left_in_the_cache_goes_and_a_living_ones_stays(tmp_path: Path):
    cache = tmp_path / "cache"
    cache.mkdir()
    dead, living = cache / ".of-a-dead-process.rows", cache / ".of-a-living-one.rows"
    dead.mkdir()
    (dead / "ids.bin").write_bytes(b"0")
    living.mkdir()
    held = os.open(living, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    folder = prepare(recipe_of(write_jsonl(tmp_path / "a.jsonl", PAIRS)), CHAT, cache).folder
    os.close(held)
    assert sorted(path.name for path in cache.iterdir()) == sorted([living.name, folder.name])


def test_whatever_changes_the_rows_changes_the_key(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", PAIRS)
    recipe, cache = recipe_of(source), tmp_path / "cache"
    marked = Chat(CHAT.tokenizer, f"{CHAT.template} ")
    longer = small_tokenizer()
    longer.add_tokens(["answer is"])
    renamed = small_tokenizer()
    renamed.eos_token = "<|im_end|>"
    variants = [
        prepare(recipe, CHAT, cache),
        prepare(recipe, marked, cache),
        prepare(recipe, load_chat(longer, "chatml"), cache),
        prepare(recipe, load_chat(renamed, "chatml"), cache),
        prepare(dataclasses.replace(recipe, train_on="completion"), CHAT, cache),
        prepare(recipe.with_batch(max_length=100), CHAT, cache),
        prepare(recipe.with_batch(overlong="drop"), CHAT, cache),
        prepare(recipe.with_batch(packing=True), CHAT, cache),
        prepare(dataclasses.replace(recipe, eval_rows=1), CHAT, cache),
        prepare(dataclasses.replace(recipe, eval_rows=1, seed=1), CHAT, cache),
        prepare(recipe.with_data(Data(source, "question_answer", first=3)), CHAT, cache),
        prepare(recipe.with_data(recipe.data[0], eval_data=recipe.data), CHAT, cache),
        prepare(recipe.with_data(recipe.data[0], recipe.data[0]), CHAT, cache),
    ]
    write_jsonl(tmp_path / "a.jsonl", PAIRS[:5])
    variants.append(prepare(recipe, CHAT, cache))
    assert len({each.folder for each in variants}) == len(variants)
    assert answers(variants[-1].train) == SAID[:5]


def test_the_seed_alone_prepares_nothing_anew(tmp_path: Path):
    recipe = recipe_of(write_jsonl(tmp_path / "a.jsonl", PAIRS))
    first = prepare(recipe, CHAT, tmp_path / "cache")
    second = prepare(dataclasses.replace(recipe, seed=5), CHAT, tmp_path / "cache")
    assert second.folder == first.folder


def test_a_process_that_dies_while_preparing_leaves_nothing_that_is_taken_for_data(
    tmp_path: Path,
):
    source, cache = write_jsonl(tmp_path / "a.jsonl", PAIRS), tmp_path / "cache"
    whole = prepare(recipe_of(source), CHAT, cache)
    scratch = cache / f".{whole.folder.name}.1234"
    whole.folder.rename(scratch)
    (scratch / "counts.json").unlink()
    again = prepare(recipe_of(source), CHAT, cache)
    assert answers(again.train) == SAID


@pytest.mark.parametrize("name", ["counts.json", "documents/ids.bin", "documents/lengths.npy"])
def test_prepared_data_that_is_damaged_is_refused(tmp_path: Path, name: str):
    recipe = recipe_of(write_jsonl(tmp_path / "a.jsonl", PAIRS))
    damaged = prepare(recipe, CHAT, tmp_path / "cache").folder / name
    damaged.write_bytes(damaged.read_bytes()[:5])
    with pytest.raises(FinetuneError, match=r"the prepared data is damaged .* delete that folder"):
        prepare(recipe, CHAT, tmp_path / "cache")


@pytest.mark.parametrize("files", [0, 2])
def test_documents_come_from_files_that_are_counted(tmp_path: Path, files: int):
    documents = prepare(
        recipe_of(write_jsonl(tmp_path / "a.jsonl", PAIRS)), CHAT, tmp_path / "cache"
    ).train.documents
    check_origins(documents, 1)
    elsewhere = dataclasses.replace(documents, origins=documents.origins + np.array([files - 1, 0]))
    with pytest.raises(ValueError, match=r"^origins.npy names a file that is not one of 1$"):
        check_origins(elsewhere, 1)


@pytest.mark.parametrize(("first", "second"), [("(5, 6)", "(7, 8)"), ("[0 for _ in ids]", "[]")])
def test_a_method_that_encodes_otherwise_changes_the_key(tmp_path: Path, first: str, second: str):
    source, folders = write_jsonl(tmp_path / "a.jsonl", PAIRS), set[Path]()
    for untrained in (first, second):
        code = (
            "class Own(SFT):\n"
            "    def encode(self, sample, chat):\n"
            "        (row,) = super().encode(sample, chat).sequences\n"
            "        def kept(ids):\n"
            f"            return [token not in {untrained} for token in ids]\n"
            "        said = [a and b for a, b in zip(row.trained, kept(row.ids))]\n"
            "        return Example((type(row)(row.ids, said),))\n"
        )
        names: dict[str, Any] = {"SFT": SFT, "Example": Example}
        exec(code, names)
        recipe = names["Own"]().with_data(Data(source, "question_answer"))
        folders.add(prepare(recipe, CHAT, tmp_path / "cache").folder)
    assert len(folders) == 2


def test_a_cache_under_a_file_is_refused(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", PAIRS)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(FinetuneError, match="cannot write the prepared data"):
        prepare(recipe_of(source), CHAT, tmp_path / "cache")


# What is refused.


def test_every_problem_of_the_sections_is_reported_at_once(tmp_path: Path):
    write_jsonl(tmp_path / "train.jsonl", PAIRS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.xlsx").write_text("x")
    recipe = SFT().with_data(
        Data(str(tmp_path / "trian.jsonl"), "question_answer"),
        Data(str(tmp_path / "no" / "a.jsonl"), "question_answer"),
        Data(str(tmp_path / "train.jsonl"), "mesages"),
        Data(str(tmp_path / "*.parquet"), "text"),
        Data(str(tmp_path / "*.xlsx"), "text"),
        Data(str(tmp_path / "empty"), "text"),
        Data(str(tmp_path / "a.xlsx"), "text"),
    )
    known = (
        ".jsonl, .ndjson, .json, .parquet, .arrow, .csv, .tsv, .txt (text also as .gz, .bz2, .xz, "
        ".zst)"
    )
    assert problems_of(recipe, tmp_path / "cache") == [
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


def test_a_recipe_without_data_is_refused(tmp_path: Path):
    assert problems_of(SFT(), tmp_path / "cache") == [
        "data: the recipe has no data; use with_data(Data(source, format))"
    ]


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "empty file": ("a.jsonl", b"", "{path}: the file is empty"),
    "only blank lines": ("a.jsonl", b"\n\n", "{path}: it has no rows"),
    "empty list": ("a.json", b"[]", "{path}: it has no rows"),
    "not UTF-8": (
        "a.jsonl",
        b'{"question": "a", "answer": "b"}\n{"question": "caf\xe9"}\n',
        "{path} row 2: not UTF-8 (byte 17 of the line is 0xe9); convert it from its "
        "encoding, as in iconv -f LATIN1 -t UTF-8",
    ),
    "UTF-16": (
        "a.jsonl",
        '{"question": "a", "answer": "b"}\n'.encode("utf-16"),
        "{path} row 1: not UTF-8 but UTF-16; convert it: iconv -f UTF-16 -t UTF-8",
    ),
    "UTF-16 without a mark": (
        "a.csv",
        "question,answer\na,b\n".encode("utf-16-be"),
        "{path} row 1: not UTF-8 but UTF-16BE; convert it: iconv -f UTF-16BE -t UTF-8",
    ),
    "UTF-32": (
        "a.jsonl",
        '{"question": "a", "answer": "b"}\n'.encode("utf-32"),
        "{path} row 1: not UTF-8 but UTF-32; convert it: iconv -f UTF-32 -t UTF-8",
    ),
    "UTF-32 without a mark": (
        "a.txt",
        "Hi there".encode("utf-32-le"),
        "{path} row 1: not UTF-8 but UTF-32LE; convert it: iconv -f UTF-32LE -t UTF-8",
    ),
    "gzip under another name": (
        "a.jsonl",
        gzip.compress(b'{"question": "a", "answer": "b"}\n'),
        "{path}: it is compressed with gzip; rename it to end in .gz",
    ),
    "a torn gzip file": (
        "a.jsonl.gz",
        gzip.compress(b'{"question": "a", "answer": "b"}\n')[:-9],
        "{path}: it cannot be decompressed: Compressed file ended before the end-of-stream marker "
        "was reached",
    ),
    "what is no gzip file": (
        "a.jsonl.gz",
        b"not compressed",
        "{path}: it cannot be decompressed: Not a gzipped file (b'no')",
    ),
    "a list under the name of JSON lines": (
        "a.jsonl",
        b'[{"question": "a", "answer": "b"}]',
        "{path}: it contains a JSON list, expected one row per line; rename it to end in .json",
    ),
    "a list of turns on a line": (
        "a.jsonl",
        b'[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]',
        "{path} row 1: is a list, expected an object with columns",
    ),
    "a list over lines under the name of JSON lines": (
        "a.jsonl",
        b'[\n{"question": "a", "answer": "b"}\n]',
        "{path}: it contains a JSON list, expected one row per line; rename it to end in .json",
    ),
    "rows over several lines": (
        "a.jsonl",
        b'{\n"question": "a",\n"answer": "b"\n}\n',
        "{path}: its first row spans several lines, expected one row per line; write each row on "
        "one line (jq -c . does), or a list of rows to a file that ends in .json",
    ),
    "CSV with semicolons": (
        "a.csv",
        b"question;answer\na;b\n",
        "{path}: its header is one column, 'question;answer': the delimiter is ';', expected ','; "
        "write it with commas",
    ),
    "CSV with tabs": (
        "a.csv",
        b"question\tanswer\na\tb\n",
        "{path}: its header is one column, 'question\\tanswer': the delimiter is a tab, expected "
        "','; rename it to end in .tsv",
    ),
    "broken line": (
        "a.jsonl",
        b'{"question": "a", "answer": "b"}\n\n{"question": "a", "answer"\n',
        "{path} row 3: broken JSON at column 27: Expecting ':' delimiter near "
        '\'tion": "a", "answer"\'',
    ),
    "broken file": (
        "a.json",
        b'[{"question": "a"},\n {"question": }]',
        "{path}: broken JSON at line 2 column 15: Expecting value near "
        '\'"a"}},\\n {{"question": }}]\'',
    ),
    "one object": (
        "a.json",
        b'{"a": 1}',
        "{path}: it contains one JSON value, expected a list of rows",
    ),
    "rows inside an object": (
        "a.json",
        b'{"version": 1, "data": [{"question": "a"}, {"question": "b"}]}',
        "{path}: it contains one JSON value, expected a list of rows; extract the list 'data' "
        "(jq .data)",
    ),
    "TSV with an unpaired quote": (
        "a.tsv",
        b'question\tanswer\n"a\nb"\t2\n"Hello\tworld\nHi\tthere\nBye"\tsee you\n',
        "{path} row 2: a quote at the start of a cell joins 3 lines, each of which is a row of its "
        "own by its tabs; write a quote that belongs to the text twice within quotes: "
        '"""Hello"" she said"',
    ),
    "TSV with commas": (
        "a.tsv",
        b"question,answer\na,b\n",
        "{path}: its header is one column, 'question,answer': the delimiter is ',', expected a "
        "tab; rename it to end in .csv",
    ),
    "not a row": (
        "a.jsonl",
        b"[1]\n",
        "{path} row 1: is a list, expected an object with columns",
    ),
    "too many cells": (
        "a.csv",
        b"question,answer\na,b,c\n",
        "{path} row 1: 1 more cells than the header has columns",
    ),
    "too few cells": (
        "a.csv",
        b"question,answer\na,b\na\n",
        "{path} row 2: format 'question_answer' needs 'question' + 'answer', the row has "
        "'question', 'answer' (null)",
    ),
    "a column twice": (
        "a.csv",
        b"question,answer,answer\na,b,c\n",
        "{path}: the header has the column 'answer' more than once",
    ),
    "a number too long": (
        "a.jsonl",
        b'{"question": "a", "answer": "b"}\n{"question": ' + b"1" * 5000 + b"}\n",
        "{path} row 2: broken JSON: Exceeds the limit (4300 digits) for integer string "
        "conversion: value has 5000 digits; use sys.set_int_max_str_digits() to increase the limit",
    ),
    "a number too long in a list": (
        "a.json",
        b'{"question":\n' + b"1" * 5000 + b"}",
        "{path}: broken JSON: Exceeds the limit (4300 digits) for integer string "
        "conversion: value has 5000 digits; use sys.set_int_max_str_digits() to increase the limit",
    ),
    "open quote": (
        "a.csv",
        b'question,answer\na,"b\n',
        "{path} row 1: broken CSV: unexpected end of data",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_its_row(tmp_path: Path, name: str):
    file, content, message = BROKEN[name]
    path = tmp_path / file
    path.write_bytes(content)
    problems = problems_of(recipe_of(str(path)), tmp_path / "cache")
    assert problems == [message.format(path=path)]


def test_a_torn_parquet_file_is_named(tmp_path: Path):
    path = tmp_path / "a.parquet"
    write_as(path, PAIRS)
    path.write_bytes(path.read_bytes()[:-20])
    (problem,) = problems_of(recipe_of(str(path)), tmp_path / "cache")
    assert problem.startswith(f"{path}: it is not a complete Parquet file: ")


def test_several_bad_rows_are_reported_at_once_up_to_a_limit(tmp_path: Path):
    bad = [{"question": n, "answer": "x"} for n in range(3)]
    other = {"question": "x", "answer": None}
    source = write_jsonl(tmp_path / "a.jsonl", [PAIRS[0], *bad, PAIRS[1], other])
    needs = (
        "format 'question_answer' needs 'question' + 'answer', "
        "the row has 'question', 'answer' (null)"
    )
    assert problems_of(recipe_of(source), tmp_path / "cache") == [
        f"{source} row 2 (and 2 more rows): question is a number, expected text",
        f"{source} row 6: {needs}",
    ]
    write_jsonl(tmp_path / "a.jsonl", bad * 1000)
    assert problems_of(recipe_of(source), tmp_path / "cache") == [
        f"{source} row 1 (and 1023 more rows): question is a number, expected text",
        "reading stopped here; there may be more",
    ]


def test_the_format_that_fits_is_suggested(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", PAIRS[:1])
    assert problems_of(recipe_of(source, "messages"), tmp_path / "cache") == [
        f"{source} row 1: format 'messages' needs 'messages', the row has 'question', 'answer'; "
        "format 'question_answer' would fit"
    ]


def test_conversations_without_a_template_are_reported_once(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", PAIRS[:3])
    bare = Chat(small_tokenizer(), None)
    (problem,) = problems_of(recipe_of(source), tmp_path / "cache", bare)
    assert problem == (
        f"{source} row 1 (and 2 more rows): model.chat_template: the data has conversations and "
        "the tokenizer has no chat template; set model.chat_template to a file or to one of "
        "chatml, plain"
    )


def run_python(script: str, folder: Path) -> str:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent)])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    environment["PYTHONPATH"] = paths
    command = [sys.executable, "-c", PRELUDE + script]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


PRELUDE = """
import dataclasses, resource, signal
from pathlib import Path
from test_prepare import CHAT, PAIRS, SFT, Data, recipe_of
from finetune.data.prepare import prepare
from finetune.data.hub import hub_version
from finetune.data.sources import Source
from finetune.errors import FinetuneError
"""


def test_what_is_not_here_is_asked_of_the_hub_library(tmp_path: Path):
    """That library reads a folder as it reads the hub, so this needs no network."""
    write_jsonl(tmp_path / "a.jsonl", PAIRS)
    script = f"""
data = Data({str(tmp_path)!r}, "question_answer")
rows = list(Source(data, ()).rows())
print([row.value for row in rows] == PAIRS, rows[1].place)
for recipe in (recipe_of("nobody/nothing"), SFT().with_data(dataclasses.replace(data, split="x"))):
    try:
        hub_version(recipe.data[0])
    except FinetuneError as error:
        print(error)
"""
    read, nowhere, no_split = run_python(script, tmp_path).splitlines()
    assert read == f"True {tmp_path} (train) row 2"
    hub_gave = "is not a local file or folder, and the hub reports: "
    assert nowhere.startswith(f"data.source: 'nobody/nothing' {hub_gave}")
    assert no_split.startswith(f"data.source: '{tmp_path}' {hub_gave}Unknown split")


def test_a_full_disk_leaves_what_was_there_and_nothing_half_written(tmp_path: Path):
    """A limit on the size of files stands in for the full disk: the write itself fails."""
    source = write_jsonl(tmp_path / "a.jsonl", PAIRS * 100)
    cache = tmp_path / "cache"
    small = prepare(
        recipe_of(source).with_data(Data(source, "question_answer", first=1)), CHAT, cache
    )
    before = contents(cache)
    script = f"""
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    prepare(recipe_of({source!r}), CHAT, Path("cache"))
except FinetuneError as error:
    print(error)
"""
    assert "cannot write the prepared data" in run_python(script, tmp_path)
    assert contents(cache) == before
    assert [path.name for path in cache.iterdir()] == [small.folder.name]


# Real data on real tokenizers.


def test_gsm8k_on_a_tokenizer_of_512_words(assets: Path, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers/stories260K")
    chat = load_chat(tokenizer, "plain")
    source = assets / "data/gsm8k/test.jsonl"
    recipe = recipe_of(str(source), max_length=512, overlong="drop")
    prepared = prepare(recipe, chat, tmp_path)
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    said = [row["answer"] + "</s>" for row in rows]
    kept = answers(prepared.train, chat)
    counts = prepared.counts["train"]
    assert counts["rows"] + counts["dropped"] == counts["samples"] == 1319
    assert counts["longest"] <= 512 < counts["longest_sample"]
    remaining = iter(said)
    assert all(answer in remaining for answer in kept)
    assert all(ids[0] == tokenizer.bos_token_id for ids, _ in map(prepared.train.row, range(9)))


def test_a_real_text_is_split_without_losing_a_token(assets: Path, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers/gpt2")
    source = assets / "data/tinystories/tinystories_197k.txt"
    recipe = Pretrain().with_data(Data(str(source), "text"))
    recipe = recipe.with_batch(max_length=256, overlong="split")
    prepared = prepare(recipe, load_chat(tokenizer, None), tmp_path)
    documents = prepared.train.documents
    said = [*documents.ids[:1].tolist(), *documents.ids[documents.trained].tolist()]
    whole = source.read_text(encoding="utf-8").strip("\n")
    assert tokenizer.decode(said) == whole + "<|endoftext|>"
    assert int(prepared.train.lengths.max()) == 256


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_pass_over_mapped_rows_holds_little_of_them(tmp_path: Path):
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
