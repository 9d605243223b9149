"""Pairs of answers stay together from the file to the micro-batch, and bad ones are named."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import problems_of
from preference import written
from rich.console import Console
from small_tokenizer import small_tokenizer

from finetune.data.chat.render import load_chat
from finetune.data.prepare import Prepared, prepare
from finetune.data.rows.collate import collate
from finetune.data.rows.order import rows_of_step, split_rows
from finetune.errors import FinetuneError
from finetune.methods.dpo import DPO
from finetune.methods.kto import KTO
from finetune.methods.reward import RewardModel
from finetune.methods.sft import SFT
from finetune.planner import plan
from finetune.recipe import Data, Model, Recipe
from finetune.reports.inspection import inspect_rows, show

CHAT = load_chat(small_tokenizer(), "chatml")


def row(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


ROWS = [row(f"Say {n}", f"The answer is {n}" * (1 + n % 3), f"No {n}") for n in range(12)]


def recipe_of(source: Path, **batch: Any) -> Recipe:
    return DPO().with_data(Data(str(source), "preference")).with_batch(**batch)


def prepared(
    folder: Path, rows: list[Any] = ROWS, recipe: Recipe | None = None, kind: str = "preference",
    **batch: Any,
) -> Prepared:  # fmt: skip
    data = Data(str(written(folder / "pairs.jsonl", rows)), kind)
    return prepare((recipe or DPO()).with_data(data).with_batch(**batch), CHAT, folder / "cache")


def problems(tmp_path: Path, rows: list[dict[str, Any]], **batch: Any) -> list[str]:
    return list(problems_of(prepared, tmp_path, rows, **batch))


def texts(found: Prepared, numbers: np.ndarray) -> list[str]:
    documents = (found.train.documents.document(int(number)) for number in numbers)
    return [str(CHAT.tokenizer.decode(ids[trained])) for ids, trained in documents]


def test_a_row_is_both_answers_chosen_first(tmp_path: Path) -> None:
    found = prepared(tmp_path)
    assert len(found.train) == 12
    for index in range(12):
        numbers = found.train.numbers(index)
        chosen, rejected = (ROWS[index][name][0]["content"] for name in ("chosen", "rejected"))
        assert texts(found, numbers) == [f"{chosen}<|im_end|>", f"{rejected}<|im_end|>"]
        assert {found.place(int(number)) for number in numbers} == {
            f"{tmp_path / 'pairs.jsonl'} row {index + 1}"
        }


def test_what_a_template_writes_behind_the_end_of_an_answer_is_not_trained(tmp_path: Path) -> None:
    """TRL 1.16 trains the newline behind `<|im_end|>`, one token of every answer."""
    found = prepared(tmp_path, [row("Say it", "yes", "no")])
    tokenizer = CHAT.tokenizer
    for number, answer in enumerate(("yes", "no")):
        ids, trained = found.train.documents.document(number)
        wanted = tokenizer(f"{answer}<|im_end|>\n", add_special_tokens=False)["input_ids"]
        assert ids[-len(wanted) :].tolist() == wanted
        before, said = len(ids) - len(wanted), len(wanted) - 1
        assert trained.tolist() == [False] * before + [True] * said + [False]


RANKED = [
    {
        "prompt": [{"role": "user", "content": f"Say {n}"}],
        "responses": [[{"role": "assistant", "content": f"{n} {word}"}] for word in "abc"],
        "scores": [2, 1, 3],
    }
    for n in range(8)
]


def test_all_pairs_of_a_row_are_trained_or_held_out_together(tmp_path: Path) -> None:
    found = prepared(tmp_path, RANKED, DPO(eval_rows=4), "ranked_all")
    assert (len(found.train), len(found.eval)) == (6 * 3, 2 * 3)  # whole rows: two more than asked
    rows = [
        {int(found.train.documents.origins[int(number)][1]) for number in part.members}
        for part in (found.train, found.eval)
    ]
    assert not rows[0] & rows[1]
    first = [found.train.numbers(index) for index in range(3)]
    number = int(found.train.documents.origins[first[0][0]][1]) - 1
    ends = [[f"{number} {word}<|im_end|>" for word in words] for words in ("ca", "cb", "ab")]
    assert [texts(found, numbers) for numbers in first] == ends


def test_several_pairs_of_a_row_are_not_judged_alone(tmp_path: Path) -> None:
    told = problems_of(prepared, tmp_path, RANKED, KTO(), "ranked_best")
    source = tmp_path / "pairs.jsonl"
    assert told[0] == (
        f"{source} row 1 (and 7 more rows): its answers are compared with each other, and the "
        "method needs each to be wanted or not; use format 'ranked', which takes the best and the "
        "worst"
    )


@pytest.mark.parametrize("packing", [False, True])
def test_every_micro_batch_holds_whole_pairs(tmp_path: Path, packing: bool) -> None:
    found = prepared(tmp_path, packing=packing, max_length=48)
    rows = dataclasses.replace(found.train, padding_free=packing)
    held = list[int]()
    for indices in split_rows(np.arange(len(rows)), rows.slots, 2):
        batch = collate(rows, indices, 0, "cpu")
        numbers = np.concatenate([rows.numbers(int(index)) for index in indices])
        assert np.array_equal(numbers[1::2], numbers[::2] + 1)
        assert not (numbers[::2] % 2).any()
        labels = [int(rows.documents.document(int(n))[1].sum()) for n in numbers]
        assert (batch.document_labels.tolist(), DPO().count(batch)) == (labels, len(numbers) // 2)
        held += numbers.tolist()
    assert (sorted(held), DPO().terms(rows, np.arange(len(rows)))) == (list(range(24)), 12)
    if packing:
        assert len(rows) < 12
        assert rows.lengths.max() <= 96


def test_token_slots_of_padded_pairs_are_those_of_their_longest_answer(tmp_path: Path) -> None:
    """Two rows of equal sums: one needs more slots, because its answers differ more."""
    found = prepared(tmp_path, [row("a", "b " * 20, "c"), row("a", "b " * 10, "c " * 10)])
    for limit in (60, 90, 200):
        for indices in split_rows(np.arange(2), found.train.slots, 1, limit):
            batch = collate(found.train, indices, 0, "cpu")
            assert batch.ids.numel() == found.train.slots[indices].max() * len(indices)


def test_rows_are_held_out_and_repeated_as_pairs(tmp_path: Path) -> None:
    source = written(tmp_path / "pairs.jsonl", ROWS)
    recipe = DPO(eval_rows=3).with_data(Data(str(source), "preference", repeat=2))
    found = prepare(recipe, CHAT, tmp_path / "cache")
    assert (len(found.train), len(found.eval)) == (18, 3)
    assert np.array_equal(found.eval.members[1::2], found.eval.members[::2] + 1)
    assert set(found.train.members).isdisjoint(found.eval.members)
    assert found.counts["eval"]["also_trained"] == 0


def test_equal_pairs_are_counted_once_each(tmp_path: Path) -> None:
    """Two rows of one prompt and chosen answer with other rejected ones are no duplicates."""
    rows = [*ROWS, ROWS[3], row("Say 3", ROWS[3]["chosen"][0]["content"], "Never")]
    assert prepared(tmp_path, rows).counts["train"]["duplicates"] == 1


LONG = row("Say it", "yes " * 40, "no")


@pytest.mark.parametrize(
    ("overlong", "more", "left", "counted"),
    [
        ("drop", LONG, 12, {"dropped": 1}),
        ("truncate", LONG, 13, {"truncated": 1, "unended": 1}),
        # A pair that is cut to equal answers, and a prompt without room for answers.
        ("truncate", row("Say it", "yes " * 40 + "a", "yes " * 40 + "b"), 12, {"tied": 1}),
        ("truncate", row("Say it " * 40, "yes", "no"), 12, {"untrained": 1, "eaten": 1}),
    ],
)
def test_pairs_that_are_too_long_are_left_out_or_cut_and_counted(
    tmp_path, overlong, more, left, counted
):
    rows = [*ROWS * 9, more] if "tied" in counted else [*ROWS, more]
    found = prepared(tmp_path, rows, max_length=40, overlong=overlong)
    assert len(found.train) == (108 if "tied" in counted else left)
    assert {name: found.counts["train"][name] for name in counted} == counted
    if "unended" in counted:  # each answer is cut at its end
        said = texts(found, found.train.numbers(12))
        assert said[0].startswith("yes yes")
        assert said[1] == "no<|im_end|>"


def test_an_overlong_answer_is_an_error_by_default(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, [*ROWS, LONG], max_length=40)
    assert "1 of 13 rows are longer than batch.max_length=40" in problem
    assert problem.endswith("or batch.overlong to drop or truncate")


def test_pieces_of_answers_are_not_compared() -> None:
    recipe = DPO(Model("m")).with_data(Data("a.jsonl", "preference")).with_batch(overlong="split")
    refused = r"batch\.overlong: split, but dpo compares the documents of a row"
    with pytest.raises(FinetuneError, match=refused):
        plan(recipe, "single")


DIALOGUE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
OTHER = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no chosen": ({"prompt": "a", "rejected": "b"}, "needs 'prompt' + 'chosen' + 'rejected'"),
    "equal": (row("a", "b", "b"), "chosen and rejected are equal"),
    "empty": (row("a", "b", " "), "rejected is empty"),
    "no prefix": ({"chosen": DIALOGUE, "rejected": OTHER}, "there is no prompt"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_with_its_file_and_number(tmp_path: Path, name: str) -> None:
    bad, what = BAD[name]
    (problem,) = problems(tmp_path, [*ROWS, bad])
    assert problem.startswith(f"{tmp_path / 'pairs.jsonl'} row 13: ")
    assert what in problem


def test_a_file_whose_rows_are_all_skipped_is_told_why(tmp_path: Path) -> None:
    dialogue = "\n\nHuman: {}\n\nAssistant: {}"
    rows = [{"chosen": dialogue.format("a", "b"), "rejected": dialogue.format("c", "d")}] * 3
    with pytest.raises(FinetuneError, match="3 skipped by format 'hh': a turn is empty, or more"):
        prepared(tmp_path, rows, kind="hh")


@pytest.mark.parametrize(
    ("recipe", "data_format", "expected"),
    [
        (
            DPO(), "messages",
            "data.format: 'messages' gives texts and conversations, but method 'dpo' learns from "
            "pairs of a chosen and a rejected answer (formats: alpaca_preference, hh, preference, "
            "ranked, ranked_all, ranked_best, sharegpt_preference)",
        ),
        (
            SFT(), "preference",
            "data.format: 'preference' gives pairs of a chosen and a rejected answer, but method "
            "'sft' learns from texts and conversations (formats: alpaca, kto, messages, oasst, "
            "prompt_completion, question_answer, self_instruct, sharegpt, text)",
        ),
    ],
)  # fmt: skip
def test_a_format_that_a_method_cannot_use_is_refused_with_those_it_can(
    tmp_path, recipe, data_format, expected
):
    data = Data(str(written(tmp_path / "pairs.jsonl", ROWS)), data_format)
    both = [expected.replace("data.", f"data.{number}.", 1) for number in (0, 1)]
    for given, problems in (([data], [expected]), ([data, data], both)):
        recipe = recipe.with_data(*given)
        assert list(problems_of(prepare, recipe, CHAT, tmp_path / "cache")) == problems


@pytest.mark.parametrize("method", [DPO, RewardModel])
def test_the_share_of_longer_chosen_answers_does_not_depend_on_the_method(tmp_path, method):
    rows = [row("Why?", "a long answer", "short"), *(row(f"{n}?", "no", "not") for n in range(3))]
    assert prepared(tmp_path, rows, method()).counts["train"]["longer_chosen"] == 0.25


def test_inspection_shows_both_answers_and_which_is_longer(tmp_path: Path) -> None:
    recipe = recipe_of(written(tmp_path / "pairs.jsonl", ROWS))
    found = inspect_rows(recipe, prepare(recipe, CHAT, tmp_path / "cache"), CHAT.tokenizer, 2)
    assert [[each.name for each in shown] for shown in found.rows] == [["chosen", "rejected"]] * 2
    first = int(rows_of_step(0, 12, 1, recipe.seed)[0])
    trained = ["".join(p.text for p in d.pieces if p.trained) for d in found.rows[0]]
    chosen, rejected = ROWS[first]["chosen"], ROWS[first]["rejected"]
    assert trained == [f"{chosen[0]['content']}<|im_end|>", f"{rejected[0]['content']}<|im_end|>"]
    console = Console(file=io.StringIO(), width=200)
    show(found, console)
    told = console.file.getvalue()
    assert "12 pairs; " in told
    assert "the chosen answer is the longer one in 100% of the pairs; the model may mostly" in told


def test_training_options_do_not_change_prepared_rows(tmp_path: Path) -> None:
    source = written(tmp_path / "pairs.jsonl", ROWS)
    first = prepare(recipe_of(source), CHAT, tmp_path / "cache").folder
    other = dataclasses.replace(recipe_of(source), beta=0.5, loss_type="ipo")
    assert prepare(other, CHAT, tmp_path / "cache").folder == first


def test_a_plan_warns_of_risks_for_preferences() -> None:
    recipe = DPO(Model("m")).with_data(Data("a.jsonl", "preference")).with_lora(8, dropout=0.1)
    notes = plan(recipe.with_optim(lr=2e-4), "single").notes()
    assert any(note.startswith("optim.lr: 0.0002 is high for preferences") for note in notes)
    assert any(note.startswith("adapter.dropout: ") for note in notes)
    assert not plan(recipe.with_lora(8), "single").recipe.advice()


@pytest.mark.parametrize("loss", ["hinge", "ipo", "sigmoid_norm"])
def test_label_smoothing_belongs_to_two_losses(loss: str) -> None:
    with pytest.raises(FinetuneError, match="`label_smoothing` belongs to"):
        DPO(loss_type=loss, label_smoothing=0.1)  # type: ignore[arg-type]
