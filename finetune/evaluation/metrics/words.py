"""Metrics for short answers: exact match, the last number, labels, shared words."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np

from finetune.evaluation.generations import Answer
from finetune.evaluation.measures import Measure, of_scores
from finetune.evaluation.metrics.metric import Metric, Row, Settings, needs_words
from finetune.evaluation.questions import Asked

NUMERAL = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")
MOST_LABELS, LABEL_WORDS = 50, 4
OTHER = "(other)"
"""Column of the confusion matrix for answers that are not a label."""
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Text in lower case without punctuation, English articles and repeated spaces, as in SQuAD.

    Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1.
    """
    words = text.lower().translate(PUNCTUATION).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def last_number(text: str) -> float | None:
    """The last number of a text, without thousands separators; None if there is no number."""
    found = NUMERAL.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def first(answers: Sequence[Answer]) -> str:
    return answers[0].text


def _exact(rows: Sequence[Row], settings: Settings) -> list[Measure]:
    pairs = [(first(given), asked.expected) for asked, given in rows]
    return [
        of_scores("exact", [one == other for one, other in pairs], binary=True),
        of_scores(
            "exact_normalised",
            [normalised(one) == normalised(other) for one, other in pairs],
            binary=True,
        ),
    ]


def _number(rows: Sequence[Row], settings: Settings) -> list[Measure]:
    right = [last_number(first(given)) == last_number(asked.expected) for asked, given in rows]
    return [of_scores("number", right, binary=True)]


def _solutions(asked: Sequence[Asked], settings: Settings) -> bool:
    """Whether every reference ends with a number and has more than one word."""
    return all(
        re.search(r"\d[\W_]*$", each.expected) and len(each.expected.split()) > 1 for each in asked
    )


def _labels(rows: Sequence[Row], settings: Settings) -> list[Measure]:
    """Macro F1 over the labels of the references: the mean of F1 = 2 TP / (2 TP + FP + FN)."""
    wanted = [normalised(asked.expected) for asked, _ in rows]
    predicted = [normalised(first(given)) for _, given in rows]
    labels = sorted(set(wanted))
    places = {label: number for number, label in enumerate(labels)}
    sums = np.zeros((len(rows), len(labels), 3))  # TP, FP, FN of each label
    confusion = np.zeros((len(labels), len(labels) + 1), dtype=int)
    for row, (right, got) in enumerate(zip(wanted, predicted, strict=True)):
        confusion[places[right], places.get(got, len(labels))] += 1
        if got == right:
            sums[row, places[right], 0] = 1
            continue
        sums[row, places[right], 2] = 1
        if got in places:
            sums[row, places[got], 1] = 1
    table = {"labels": labels, "columns": [*labels, OTHER], "confusion": confusion.tolist()}
    scores = np.array([one == other for one, other in zip(wanted, predicted, strict=True)], float)
    flat = sums.reshape(len(rows), -1)
    value = partial(_macro_f1, labels=len(labels))
    return [Measure("macro_f1", flat, value, detail={"confusion": table}, scores=scores)]


def _macro_f1(sums: np.ndarray, labels: int) -> np.ndarray:
    each = sums.reshape(*sums.shape[:-1], labels, 3)
    right, wrong, missed = each[..., 0], each[..., 1], each[..., 2]
    with np.errstate(invalid="ignore"):
        scores = 2 * right / (2 * right + wrong + missed)  # nan if a label was not drawn
    return np.nanmean(scores, axis=-1)


def _few_labels(asked: Sequence[Asked], settings: Settings) -> bool:
    labels = {normalised(each.expected) for each in asked}
    short = all(len(label.split()) <= LABEL_WORDS for label in labels)
    return short and 2 <= len(labels) <= min(MOST_LABELS, len(asked) // 2)


def token_f1(answer: str, expected: str) -> float:
    """Harmonic mean of word precision and recall, as in SQuAD."""
    predicted, wanted = normalised(answer).split(), normalised(expected).split()
    if not predicted or not wanted:
        return float(predicted == wanted)
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    return 2 * shared / (len(predicted) + len(wanted))


def _short(asked: Sequence[Asked], settings: Settings) -> bool:
    if all(each.expected.startswith(("{", "[")) for each in asked):
        return False  # JSON
    return 2 <= sum(len(each.expected.split()) for each in asked) / len(asked) <= 20


EXACT = Metric(
    "answers equal to the reference",
    ("exact", "exact_normalised"),
    needs_words,
    lambda *_: True,
    _exact,
)
NUMBER = Metric(
    "the last number equals the reference's",
    ("number",),
    lambda row, _: "its answer has no number" if last_number(row.expected) is None else None,
    _solutions,
    _number,
)
LABELS = Metric(
    "macro F1 of labels, confusion table", ("macro_f1",), needs_words, _few_labels, _labels
)
F1 = Metric(
    "shared words", ("f1",), needs_words, _short,
    lambda rows, _: [of_scores("f1", [token_f1(first(given), a.expected) for a, given in rows])],
)  # fmt: skip
