"""Write the records of `metrics.jsonl`, and pass them to listeners.

    metrics = Metrics(run, speaks=accelerator.is_main_process, listeners=(display.show,))
    metrics.resume_at(step)                 # only when a run goes on
    metrics.write(Trained(step=1, loss=...))

A line is strict JSON: a number that is not finite is written as null and read back as nan.
"""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TextIO

from finetune.errors import FinetuneError, TrainingFailure
from finetune.runs.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """Something that happened at a step."""

    kind: ClassVar[str] = ""
    """The word for it in `metrics.jsonl`."""

    step: int
    """Optimizer steps made when it happened."""
    time: float = dataclasses.field(default_factory=time.time)
    """Unix time in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start(Record):
    """Training begins, or goes on: `step` is 0 or that of the checkpoint."""

    kind: ClassVar[str] = "start"

    processes: int
    backend: str
    precision: str
    micro_rows: int
    """Rows per forward pass on one process."""
    accumulation: int
    """Forward passes per optimizer step on one process."""
    rows_per_step: int
    """Rows per optimizer step over all processes."""
    steps: int
    """Optimizer steps of the whole run."""
    trainable_parameters: int
    parameters: int
    train_rows: int
    eval_rows: int
    """Held-out rows; 0 where nothing is evaluated."""
    trained_tokens: int
    """Tokens with a loss in one pass over the training rows."""
    packing: bool = False
    """Rows are packs of whole documents."""
    padding: str = ""
    """How rows are laid out in a micro-batch, and why; empty in records that do not say."""
    micro_tokens: int | None = None
    """Token slots per forward pass on one process, where rows were not counted instead."""
    unit: str = "tokens"
    """What the terms of the loss are: `tokens`, or `pairs`."""
    rows_per_sample: int = 1
    """Rows of steps that come from one row of the data in a pass over it."""
    resumed_from: int | None = None
    """Step of the checkpoint that training goes on from."""
    groups: int | None = None
    """Groups of processes that train on the same rows; None where each reads its own."""

    @property
    def shares(self) -> str:
        """How a step's rows are cut, in a few words."""
        if self.micro_tokens is None:
            return f"{self.micro_rows} micro x {self.accumulation} accumulation"
        return f"micro of {self.micro_tokens:,} tokens x at most {self.accumulation}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained(Record):
    """One optimizer step. Tokens, slots and rates are those of all processes together."""

    kind: ClassVar[str] = "train"

    loss: float
    """Mean over the terms of the step: its trained tokens, or its pairs."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    lr: float
    trained_tokens: int
    """Tokens with a loss in this step."""
    real_tokens: int
    """Tokens that are not padding."""
    slots: int
    """Tokens with the padding: what was computed."""
    seconds: float
    """Wall time of the step."""
    tokens_per_second: float
    """`real_tokens` per second."""
    memory: int
    """Peak so far in bytes, of the process that holds most."""
    epoch: float
    """Passes over the training rows so far."""
    data_seconds: float = 0.0
    """Of `seconds`: waited for rows, on the process that speaks."""
    mfu: float = math.nan
    """Share of what matrix products alone reach here; nan where the model's shape is not known."""
    router_aux_loss: float = math.nan
    """Of `loss`: the load-balancing loss of experts times its factor; nan where there is none."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    """What the method measures besides: means over the step, by their names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(Record):
    """The memory of a step was counted, to be held against the plan."""

    kind: ClassVar[str] = "memory"

    length: int
    """Tokens of a row of the micro-batch that was counted, padding included; of packs, the mean."""
    peak: int
    """Bytes that training allocated at its largest moment, of the process that held most."""
    predicted: int | None
    """What the plan's formulas give for rows of this length; None for an unknown model."""
    peaks: list[int] = dataclasses.field(default_factory=list[int])
    """`peak` of every process, by rank."""
    planned: list[int] = dataclasses.field(default_factory=list[int])
    """What the formulas give for each of them; empty for an unknown model."""
    parts: list[dict[str, float]] = dataclasses.field(default_factory=list[dict[str, float]])
    """Bytes of what makes up the planned peak of each stage, by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skipped(Record):
    """A step was not taken, because its loss or gradient was not finite; the run goes on."""

    kind: ClassVar[str] = "skip"

    loss: float
    grad_norm: float
    rows: list[str]
    """What the step trained on, as far as it can be told."""
    told: str
    """For a person."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warned(Record):
    """Something about how the training goes that the user should look at."""

    kind: ClassVar[str] = "warning"

    told: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated(Record):
    """The held-out rows were measured."""

    kind: ClassVar[str] = "eval"

    loss: float
    """Mean over `tokens`."""
    tokens: int
    """Terms of the loss: trained tokens, or pairs."""
    best: bool
    """No earlier evaluation of the run had a lower loss."""
    seconds: float
    metrics: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    """What the method measures besides: means over all rows, by their names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved(Record):
    """A checkpoint is complete."""

    kind: ClassVar[str] = "save"

    seconds: float
    """How long training stood still for it."""
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended(Record):
    """Training stopped in an orderly way. A run that was killed has no such record."""

    kind: ClassVar[str] = "end"

    seconds: float
    """Wall time since the `start` before it."""
    reason: Literal["finished", "early stop", "interrupted"]
    peak_memory: int
    """Bytes, of the process that held most."""
    tokens_per_second: float
    """Mean over the steps since the `start` before it."""


KINDS: dict[str, type[Record]] = {
    kind.kind: kind for kind in (Start, Trained, Measured, Skipped, Warned, Evaluated, Saved, Ended)
}

COUNTED = ("step", "memory", "peak_memory")
"""Never below 0, in whichever records have them."""

SHOWN = 2
"""What a method measures that has a place in a line of progress."""

Listener = Callable[[Record], None]
"""Hears of a record after it was written."""


class Metrics:
    """Appends records to `metrics.jsonl` and tells the listeners, on the process that speaks.

    Every process makes one and calls the same methods; on those that do not speak they do nothing.
    """

    def __init__(self, run: Run, *, speaks: bool, listeners: Sequence[Listener] = ()) -> None:
        self._path = run.metrics
        self._speaks = speaks
        self._listeners = tuple(listeners)
        self._file: TextIO | None = None

    def resume_at(self, step: int) -> None:
        """Drop the records after `step`, which will be made again, and a torn last line.

        The file is replaced whole. Raises TrainingFailure where it cannot be written.
        """
        if not self._speaks or not self._path.exists():
            return
        self.close()
        scratch = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            lines = self._path.read_bytes().splitlines(keepends=True)
            with scratch.open("wb") as file:
                file.writelines(line for line in lines if _happened_by(step, line))
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(self._path)
        except OSError as error:
            raise unwritable(self._path, error) from error

    def write(self, record: Record) -> None:
        """Append one line; it has reached the operating system when this returns.

        Raises TrainingFailure where the disk is full or the file cannot be written.
        """
        if not self._speaks:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a")
            self._file.write(_line(record))
            self._file.flush()
        except OSError as error:
            raise unwritable(self._path, error) from error
        for listener in self._listeners:
            listener(record)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what could not be written has been told
                self._file.close()
            self._file = None


def _line(record: Record) -> str:
    fields = {"kind": record.kind, **dataclasses.asdict(record)}
    if not fields.get("metrics", True):  # a method without any writes what it wrote before
        del fields["metrics"]
    return json.dumps(_finite(fields), allow_nan=False) + "\n"


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    """Null in place of numbers that are not finite."""
    return {
        name: _finite(value)
        if isinstance(value, dict)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in fields.items()
    }


def _happened_by(step: int, line: bytes) -> bool:
    """Whether a line is a whole record of at most this step."""
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, TypeError, KeyError, RecursionError):  # torn by a kill or a full disk
        return False


def unwritable(path: os.PathLike[str], error: OSError) -> TrainingFailure:
    """What a record that could not be written is told as."""
    return TrainingFailure(
        f"{path}: cannot be written ({error.strerror}); make room or allow writing, and resume "
        "from the newest checkpoint"
    )


def shown_metrics(metrics: Mapping[str, float]) -> list[str]:
    """The first two of what a method measures, in a few letters: `margins 0.12`."""
    first = list(metrics.items())[:SHOWN]
    return [f"{name.rsplit('/', 1)[-1]} {value:.4g}" for name, value in first]


@dataclasses.dataclass(frozen=True)
class History:
    """The records of a run, each kind oldest first."""

    starts: tuple[Start, ...] = ()
    trained: tuple[Trained, ...] = ()
    measured: tuple[Measured, ...] = ()
    evaluated: tuple[Evaluated, ...] = ()
    saved: tuple[Saved, ...] = ()
    ends: tuple[Ended, ...] = ()
    records: tuple[Record, ...] = ()
    """Of all kinds, in the order in which they were written."""

    @property
    def step(self) -> int:
        """Optimizer steps made."""
        return self.trained[-1].step if self.trained else 0

    @property
    def best(self) -> Evaluated | None:
        """The evaluation with the lowest loss, the first of equals."""
        finite = [record for record in self.evaluated if math.isfinite(record.loss)]
        return min(finite, key=lambda record: record.loss, default=None)

    @property
    def peak_memory(self) -> int:
        """Bytes, of the process that held most; 0 where nothing is recorded."""
        steps = [record.memory for record in self.trained]
        return max([*steps, *(end.peak_memory for end in self.ends)], default=0)

    @property
    def seconds(self) -> float:
        """Wall time from each start to the last record before the next one, added up."""
        total, begun = 0.0, None
        for record in self.records:
            if isinstance(record, Start):
                begun = record.time
            elif begun is not None:
                total, begun = total + record.time - begun, record.time
        return total

    @property
    def end(self) -> Ended | None:
        """How training stopped; None while it runs, and after it was killed."""
        last = self.records[-1] if self.records else None
        return last if isinstance(last, Ended) else None


def read_history(run: Run) -> History:
    """Every whole record of a run; raises FinetuneError where one is not of a known shape."""
    records = [_parse(run, fields) for fields in run.read_metrics()]
    return History(
        starts=tuple(record for record in records if isinstance(record, Start)),
        trained=tuple(record for record in records if isinstance(record, Trained)),
        measured=tuple(record for record in records if isinstance(record, Measured)),
        evaluated=tuple(record for record in records if isinstance(record, Evaluated)),
        saved=tuple(record for record in records if isinstance(record, Saved)),
        ends=tuple(record for record in records if isinstance(record, Ended)),
        records=tuple(records),
    )


def _parse(run: Run, fields: Mapping[str, Any]) -> Record:
    kind = KINDS.get(str(fields.get("kind", "")))
    if kind is None:
        raise FinetuneError(
            f"{run.metrics}: a record of kind {fields.get('kind')!r}; known are {', '.join(KINDS)}"
        )
    known = {field.name: field for field in dataclasses.fields(kind)}
    got = {name: value for name, value in fields.items() if name != "kind"}
    needed = {
        name
        for name, field in known.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    unequal = (got.keys() - known.keys()) | (needed - {"time"} - got.keys())
    if unequal:
        raise FinetuneError(
            f"{run.metrics}: a {kind.kind!r} record of step {fields.get('step')} that lacks or "
            f"should not have: {', '.join(sorted(unequal))}"
        )
    wrong = [name for name, value in got.items() if not _fits(known[name].type, value)]
    if wrong:
        raise FinetuneError(
            f"{run.metrics}: a {kind.kind!r} record of step {fields.get('step')} with another kind "
            f"of value in {', '.join(wrong)}"
        )
    below = [name for name in COUNTED if got.get(name, 0) < 0]
    if below:
        raise FinetuneError(
            f"{run.metrics}: a {kind.kind!r} record of step {fields.get('step')} with a count "
            f"below 0 in {', '.join(below)}"
        )
    numbers: dict[str, Any] = {
        name: _measured(value)
        if known[name].type == dict[str, float]
        else math.nan
        if value is None and known[name].type is float
        else value
        for name, value in got.items()
    }
    return kind(**numbers)


def _measured(values: dict[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in values.items()}


def _fits(annotation: Any, value: Any) -> bool:
    """Whether a value read from JSON is of a field's type: null stands for nan."""
    if annotation is float:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    if annotation is int:
        return type(value) is int
    if annotation == int | None:
        return value is None or type(value) is int
    if annotation is bool:
        return isinstance(value, bool)
    if annotation == dict[str, float]:
        return isinstance(value, dict) and all(_fits(float, each) for each in value.values())
    if annotation == list[dict[str, float]]:
        return isinstance(value, list) and all(_fits(dict[str, float], each) for each in value)
    for item in (str, int):
        if annotation == list[item]:
            return isinstance(value, list) and all(type(each) is item for each in value)
    return isinstance(value, str)
