"""Evaluate a model, and compare it with another model on the same rows."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from finetune.data.samples import Preference
from finetune.errors import FinetuneError
from finetune.evaluation import gate, rewards
from finetune.evaluation.contamination import Overlap, overlap
from finetune.evaluation.generations import Answer, Answers, Asking, ask
from finetune.evaluation.held_out_loss import UNBOUNDED, RowLosses, row_losses
from finetune.evaluation.judge import Judge, win_rate
from finetune.evaluation.measures import Measure, mean, of_scores
from finetune.evaluation.metrics.metric import Metric, Row, Settings, choose
from finetune.evaluation.open_model import (
    BASE,
    Subject,
    base_of,
    can_switch_off,
    find_subject,
    open_subject,
    release,
)
from finetune.evaluation.questions import Asked, general_text, of_run, of_source, spread
from finetune.evaluation.tasks import Tasks, task_measures
from finetune.inference.endpoint import Endpoint, is_url
from finetune.inference.generate import Loaded
from finetune.inference.load import Step
from finetune.methods.dpo import DPO
from finetune.methods.sft import SFT
from finetune.recipe import Batch, Data, Recipe
from finetune.rewards import Reward
from finetune.runs.run import Run, open_run

ANSWERED = 200
"""Default number of rows that are answered; without `limit`, the loss is measured on all rows."""
SAMPLING = 0.8
"""Temperature of sampled answers for pass@k (Chen et al. 2021, section 3.3)."""
NO_COMPARISON = "none"


@dataclasses.dataclass(frozen=True)
class Request:
    """Arguments of an evaluation."""

    subject: str
    against: str | None = None
    """`base`, another subject, or `none`; by default the base of an adapter."""
    rows_of: str | None = None
    data: Data | None = None
    limit: int | None = None
    step: Step | None = None
    metrics: tuple[str, ...] = ()
    settings: Settings = dataclasses.field(default_factory=Settings)
    asking: Asking = dataclasses.field(default_factory=Asking)
    code_samples: int = 1
    """Number of answers per row of code; above 1, answers are sampled."""
    served: str | None = None
    """Name of the model on a server."""
    against_served: str | None = None
    """Name of the `against` model on its server; None for the same name as `served`."""
    key: str | None = None
    general_text: Path | None = None
    judge: Judge | None = None
    rewards: tuple[Reward, ...] = ()
    """Reward functions and reward models that score the answers."""
    tasks: Tasks | None = None
    """Tasks of lm-evaluation-harness; with tasks, rows are optional."""
    require: tuple[gate.Bound, ...] = ()

    @property
    def measures_forgetting(self) -> bool:
        """Whether to read general text: if it is given, or forgetting has a bound."""
        return self.general_text is not None or any(b.name == "forgetting" for b in self.require)


@dataclasses.dataclass(frozen=True)
class Side:
    """The results of one model."""

    subject: Subject
    answers: tuple[Answer, ...]
    """The first answer to each row, greedy by default."""
    drawn: tuple[tuple[Answer, ...], ...]
    """Additional sampled answers to each row, for pass@k."""
    tokens_per_second: float
    losses: RowLosses | None
    """None for a model at a URL."""
    general: RowLosses | None
    of_tasks: tuple[Measure, ...] = ()
    notes: tuple[str, ...] = ()

    def rows(self, asked: Sequence[Asked]) -> list[Row]:
        """Rows with their answers, in the format of metrics."""
        return [
            (each, (answer, *more))
            for each, answer, more in zip(asked, self.answers, self.drawn, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results of one model, or of two on the same rows."""

    request: Request
    asked: list[Asked]
    """Rows that were answered; empty for texts."""
    total: int
    """Number of all rows."""
    after: Side
    before: Side | None
    measures: dict[str, Measure]
    """Measures of the subject, and measures that compare both models."""
    before_measures: dict[str, Measure]
    primary: str | None
    """Name of the measure that decides which answers are better."""
    overlap: Overlap | None
    verdicts: list[gate.Verdict]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class _Job:
    """The rows on which every model is measured."""

    request: Request
    scored: list[Asked]
    """Rows whose loss is measured."""
    asked: list[Asked]
    general: list[Asked]
    bounded: bool
    """Whether rows are truncated as in training, because training evaluated the same rows."""

    def side(self, subject: Subject, model: Loaded | Endpoint) -> Side:
        """Measure one model."""
        of_tasks, notes = list[Measure](), list[str]()
        if isinstance(model, Loaded) and self.request.tasks is not None:
            of_tasks, notes = task_measures(model, self.request.tasks)
        questions = [each.question for each in self.asked]
        given = Answers((), 0.0)
        if questions:
            given = ask(model, questions, self.request.asking)
        drawn = self._drawn(model) if questions else []
        losses = general = None
        if isinstance(model, Loaded) and self.scored:
            losses = self._losses(model, subject.recipe, self.scored, self.bounded)
        if isinstance(model, Loaded) and self.general:
            fits = Batch(max_length=model.context or UNBOUNDED.max_length, overlong="split")
            general = self._losses(model, SFT(batch=fits), self.general, True)
        return Side(
            subject, given.given, tuple(zip(*drawn, strict=True)) or ((),) * len(questions),
            given.tokens_per_second, losses, general, tuple(of_tasks), tuple(notes),
        )  # fmt: skip

    def _drawn(self, model: Loaded | Endpoint) -> list[tuple[Answer, ...]]:
        if self.request.code_samples == 1:
            return []
        asking = dataclasses.replace(self.request.asking, temperature=SAMPLING)
        questions = [each.question for each in self.asked]
        found: list[tuple[Answer, ...]] = []
        for number in range(self.request.code_samples):
            torch.manual_seed(number)
            found.append(ask(model, questions, asking).given)
        return found

    def _losses(
        self, model: Loaded, recipe: Recipe | None, rows: list[Asked], bounded: bool
    ) -> RowLosses:
        samples = [each.sample for each in rows]
        pairs = any(isinstance(each, Preference) for each in samples)
        takes = "pairs" if pairs else "text"
        if recipe is None or recipe.takes != takes:
            recipe, bounded = DPO() if pairs else SFT(), False
        return row_losses(
            model, recipe, model.chat(), samples, self.request.asking.batch_rows, bounded
        )


def evaluate(request: Request) -> Evaluation:
    """Evaluate a model, and compare it with another model.

    Raises:
        FinetuneError: a model does not exist, there are no rows, a metric does not fit the rows, a
            server does not answer, or a row cannot be used as a question.
    """
    rows_of = open_run(request.rows_of) if request.rows_of is not None else None
    subject = find_subject(request.subject, rows_of, request.step, request.served, request.key)
    against = _against(request, subject, rows_of)
    source = rows_of or subject.run
    everything = _rows(request, source)
    texts = all(each.is_text for each in everything)  # or there are none
    if not texts and any(each.is_text for each in everything):
        raise FinetuneError("the rows are texts and questions; evaluate them separately")
    asked = [] if texts else spread(everything, request.limit or ANSWERED)
    metrics = choose(request.metrics, asked, request.settings) if asked else {}
    if request.code_samples > 1 and "code" not in metrics:
        raise FinetuneError(
            f"--code-samples {request.code_samples}: several answers are only for pass@k of code, "
            "and the metrics here are " + (", ".join(metrics) or "none")
        )
    pairs = any(isinstance(each.sample, Preference) for each in everything)
    _check_gate(request, metrics, against, texts, pairs)
    if request.tasks is not None and any(each and is_url(each.name) for each in (subject, against)):
        raise FinetuneError("--tasks: a model behind a URL cannot be loaded; name a run or folder")
    if request.judge is not None:
        request.judge.check(against is not None, bool(asked))
    rewards.check(request.rewards, asked)
    job = _Job(
        request=request,
        scored=everything if request.limit is None else spread(everything, request.limit),
        asked=asked,
        general=general_text(request.general_text) if request.measures_forgetting else [],
        bounded=request.data is None and source is not None,
    )
    after, before = _sides(job, subject, against)
    notes = _notes(after, before)
    measures = _measures(after, asked, metrics, request.settings)
    earlier = _measures(before, asked, metrics, request.settings) if before is not None else {}
    sides = [after.answers] if before is None else [after.answers, before.answers]
    for found, more in zip(
        (measures, earlier), rewards.measure(request.rewards, asked, sides), strict=False
    ):
        found |= more
    measures |= _loss_measures(after, before, pairs)
    if request.judge is not None and before is not None:
        compared = [(each.prompt, a.text, b.text) for each, a, b in zip(
            asked, after.answers, before.answers, strict=True
        )]  # fmt: skip
        measures["win_rate"] = win_rate(request.judge, compared)
    return Evaluation(
        request=request,
        asked=asked,
        total=len(everything),
        after=after,
        before=before,
        measures=measures,
        before_measures=earlier,
        primary=_primary(metrics, pairs),
        overlap=None if source is None or not everything else overlap(source, everything),
        verdicts=gate.judge(request.require, measures),
        notes=notes,
    )


def _against(request: Request, subject: Subject, rows_of: Run | None) -> Subject | None:
    name = request.against
    if name is None:
        recipe = subject.recipe
        adapts = subject.run is not None and recipe is not None and recipe.adapter is not None
        return base_of(subject) if adapts or subject.adapter is not None else None
    if name == NO_COMPARISON:
        return None
    if name == BASE:
        return base_of(subject)
    served = request.against_served or request.served
    return find_subject(name, rows_of or subject.run, None, served, request.key)


def _rows(request: Request, source: Run | None) -> list[Asked]:
    if request.data is not None:
        return of_source(request.data)
    if source is None and request.tasks is not None:
        return []
    if source is None:
        raise FinetuneError(
            f"{request.subject}: not a run directory, so its held-out rows are unknown; give "
            "--rows-of RUN, or --data FILE and --format"
        )
    return of_run(source)


def _check_gate(
    request: Request,
    metrics: Mapping[str, Metric],
    against: Subject | None,
    texts: bool,
    pairs: bool,
) -> None:
    """Reject bounds on measures that will not be measured, before anything is loaded."""
    known = ["loss", "perplexity"]
    known += [each.name for each in request.require if request.tasks and "/" in each.name]
    known += [] if texts else ["stopped", "length"]
    known += [name for metric in metrics.values() for name in metric.measures]
    known += [f"pass@{request.code_samples}"] if "code" in metrics else []
    known += ["preference"] if pairs else []
    known += [] if texts else [rewards.name_of(each) for each in request.rewards]
    known += ["general_loss"] if request.measures_forgetting else []
    if against is not None:
        known += ["forgetting"] + (["reward_accuracy", "reward_margin"] if pairs else [])
        known += ["win_rate"] if request.judge is not None else []
    gate.check(request.require, known)
    if request.general_text is not None and against is None:
        raise FinetuneError(
            "--general-text: forgetting is measured against another model; give --against"
        )


def _sides(job: _Job, subject: Subject, against: Subject | None) -> tuple[Side, Side | None]:
    """Results of both models, loaded once if the other is the same model without its adapter."""
    model = open_subject(subject)
    after = job.side(subject, model)
    if against is None:
        return after, None
    if against.is_base and isinstance(model, Loaded) and can_switch_off(model):
        with model.model.disable_adapter():  # type: ignore[union-attr]
            return after, job.side(against, model)
    del model
    release()
    return after, job.side(against, open_subject(against))


def _measures(
    side: Side, asked: list[Asked], metrics: Mapping[str, Metric], settings: Settings
) -> dict[str, Measure]:
    found = list[Measure]()
    for metric in metrics.values():
        found += metric.measure(side.rows(asked), settings)
    found += side.of_tasks
    losses = side.losses
    if losses is not None:
        if losses.nll.shape[1] == 2:
            preferred = losses.nll[:, 0] < losses.nll[:, 1]
            found.append(of_scores("preference", preferred, binary=True))
        sums = losses.sums()
        found.append(Measure("loss", sums, better="lower", unit="nats"))
        exp = Measure("perplexity", sums, lambda each: np.exp(mean(each)), better="lower", unit="")
        found.append(exp)
    if side.general is not None:
        found.append(Measure("general_loss", side.general.sums(), better="lower", unit="nats"))
    if asked:
        stopped = [not each.cut for each in side.answers]
        found.append(of_scores("stopped", stopped, binary=True))
        lengths = [each.tokens for each in side.answers]
        found.append(of_scores("length", lengths, better="", unit="tokens"))
    return {each.name: each for each in found}


def _loss_measures(after: Side, before: Side | None, pairs: bool) -> dict[str, Measure]:
    """Measures computed from the losses of both models."""
    found = dict[str, Measure]()
    if before is None or after.losses is None or before.losses is None:
        return found
    if pairs:  # implicit rewards over beta: Rafailov et al. 2023, arXiv:2305.18290, eq. 5
        gains = before.losses.nll - after.losses.nll  # (rows, 2)
        margins = gains[:, 0] - gains[:, 1]
        found["reward_accuracy"] = of_scores("reward_accuracy", margins > 0, binary=True)
        found["reward_margin"] = of_scores("reward_margin", margins, unit="")
    if after.general is not None and before.general is not None:
        found["forgetting"] = _forgetting(after.general, before.general)
    return found


def _forgetting(after: RowLosses, before: RowLosses) -> Measure:
    """Increase in loss per token on general text over the other model."""
    if not np.array_equal(after.tokens, before.tokens):
        raise FinetuneError(
            "forgetting: the tokenizers of both models split general text into different tokens, "
            "so their losses cannot be compared"
        )
    change = np.stack([after.nll[:, 0] - before.nll[:, 0], after.tokens[:, 0]], axis=1)
    return Measure("forgetting", change, better="lower", unit="nats")


def _primary(metrics: Mapping[str, Metric], pairs: bool) -> str | None:
    if metrics:
        return next(iter(metrics.values())).measures[0]
    return "preference" if pairs else None


def comparable(after: Measure, before: Measure) -> bool:
    """Whether both are measured on the same rows and, if per token, on the same tokens."""
    if after.sums.shape != before.sums.shape:
        return False
    by_token = after.unit == "nats" or after.name == "perplexity"
    return not by_token or np.array_equal(after.sums[:, 1], before.sums[:, 1])


def _notes(after: Side, before: Side | None) -> list[str]:
    notes = list[str]()
    for side in (after, before):
        notes += side.notes if side is not None else ()
        if side is not None and is_url(side.subject.name):
            notes.append(
                f"{side.subject.name}: a server cannot give the loss of a reference answer"
            )
        elif side and side.losses is not None and not side.losses.tokens.all(axis=None):
            dropped = int((~side.losses.tokens.all(axis=1)).sum())
            notes.append(f"{dropped} rows have no trained token, or are dropped as in training")
    losses = [side.losses.tokens for side in (after, before) if side and side.losses is not None]
    if len(losses) == 2 and not np.array_equal(*losses):
        notes.append("loss: the tokenizers split the rows into different tokens; not compared")
    return list(dict.fromkeys(notes))
