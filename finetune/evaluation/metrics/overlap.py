"""ROUGE, BLEU and chrF for longer answers, computed by `rouge-score` and `sacrebleu`."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from finetune.errors import FinetuneError
from finetune.evaluation.measures import Measure, of_scores
from finetune.evaluation.metrics.metric import Metric, Row, Settings, needs_words
from finetune.evaluation.metrics.words import first
from finetune.evaluation.questions import Asked
from finetune.version import install

KINDS = ("rouge1", "rouge2", "rougeL")
MODULES = {"rouge_score": "rouge_score.rouge_scorer", "sacrebleu": "sacrebleu"}
"""The module of each library whose import shows that it can be used."""
LONG = 12
"""Minimum mean number of words of the references for automatic selection."""


def _rouge(rows: Sequence[Row], settings: Settings) -> list[Measure]:
    _need("rouge_score", "rouge")
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(KINDS), use_stemmer=True)
    found = [scorer.score(asked.expected, first(given)) for asked, given in rows]
    return [of_scores(kind, [each[kind].fmeasure for each in found]) for kind in KINDS]


def _bleu(rows: Sequence[Row], settings: Settings) -> list[Measure]:
    _need("sacrebleu", "bleu")
    from sacrebleu.metrics.bleu import BLEU as SacreBLEU

    return [_corpus_score("bleu", SacreBLEU(), SacreBLEU(effective_order=True), rows)]


def _chrf(rows: Sequence[Row], settings: Settings) -> list[Measure]:
    _need("sacrebleu", "chrf")
    from sacrebleu.metrics.chrf import CHRF as SacreCHRF

    return [_corpus_score("chrf", SacreCHRF(), SacreCHRF(), rows)]


def _corpus_score(name: str, metric: Any, of_rows: Any, rows: Sequence[Row]) -> Measure:
    """The score of a corpus from the statistics of its rows, which the bootstrap resamples.

    sacrebleu 2.6 has no public API for them: both methods are the ones that subclasses of its
    `Metric` implement and that its bootstrap calls.
    """
    predicted = [first(given) for _, given in rows]
    wanted = [asked.expected for asked, _ in rows]
    sums = np.array(metric._extract_corpus_statistics(predicted, [wanted]), dtype=np.float64)
    scores = [of_rows.sentence_score(one, [other]).score for one, other in zip(predicted, wanted)]  # noqa: B905

    def value(summed: np.ndarray) -> np.ndarray:
        flat = summed.reshape(-1, summed.shape[-1])
        found = [metric._aggregate_and_compute([each.tolist()]).score for each in flat]
        return np.array(found).reshape(summed.shape[:-1])

    detail = {"signature": _signature(metric, predicted, wanted)}
    return Measure(name, sums, value, unit="points", detail=detail, scores=np.array(scores))


def _signature(metric: Any, predicted: list[str], wanted: list[str]) -> str:
    metric.corpus_score(predicted[:1], [wanted[:1]])  # sets the number of references
    return str(metric.get_signature())


def _need(library: str, name: str) -> None:
    if (reason := _reason_against(library)) is not None:
        raise FinetuneError(
            f"--metrics {name}: needs '{library.replace('_', '-')}' ({reason}): {install('eval')}"
        )


@functools.cache
def _reason_against(library: str) -> str | None:
    """Why a library cannot be used: it, or one that it needs, is missing; None if it can be."""
    try:
        importlib.import_module(MODULES[library])
    except ImportError as error:
        return str(error)
    return None


def _long_here(library: str) -> Any:
    """A function that tests whether references are long and the library is installed."""

    def suits(asked: Sequence[Asked], settings: Settings) -> bool:
        words = sum(len(each.expected.split()) for each in asked)
        return words >= LONG * len(asked) and _reason_against(library) is None

    return suits


ROUGE = Metric("shared words and sequences", KINDS, needs_words, _long_here("rouge_score"), _rouge)
BLEU = Metric("translations", ("bleu",), needs_words, lambda *_: False, _bleu)
CHRF = Metric("shared characters", ("chrf",), needs_words, _long_here("sacrebleu"), _chrf)
