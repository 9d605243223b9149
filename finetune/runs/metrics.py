"""Write the records of `metrics.jsonl`, and pass them to listeners.

    metrics = Metrics(run, is_main=accelerator.is_main_process, listeners=(display.show,))
    metrics.resume_at(step)                 # only when a run is resumed
    metrics.write(Trained(step=1, loss=...))

Lines are strict JSON: numbers that are not finite are written as null and read back as NaN.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TextIO

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from finetune.errors import FinetuneError, TrainingFailure
from finetune.runs.run import Run, replacing

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number that need not be finite, which is null in the file."""
Count = Annotated[int, Field(ge=0)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """An event at a step."""

    kind: ClassVar[str] = ""
    """Value of `kind` in `metrics.jsonl`."""
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    step: Count
    """Optimizer steps taken so far."""
    time: float = dataclasses.field(default_factory=time.time)
    """Unix time in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start(Record):
    """Training starts or resumes: `step` is 0 or the checkpoint's."""

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
    """Total optimizer steps of the run."""
    trainable_parameters: int
    parameters: int
    train_rows: int
    """0 for a stream, whose length is not known."""
    eval_rows: int
    """Held-out rows; 0 without evaluation."""
    trained_tokens: int
    """Tokens with a loss in one pass over the training rows."""
    packing: bool = False
    """Whether each row packs several complete documents."""
    padding: str = ""
    """How rows are laid out in a micro-batch, and why; empty in older records."""
    micro_tokens: int | None = None
    """Token slots per forward pass on one process; None if the batch is counted in rows."""
    unit: str = "tokens"
    """Unit of the loss terms, such as `tokens` or `pairs`."""
    rows_per_sample: int = 1
    """Training rows made from one row of the data in one epoch."""
    resumed_from: int | None = None
    """Step of the checkpoint that training was resumed from."""
    groups: int | None = None
    """Groups of processes that share the same rows; None if each process reads its own."""

    @property
    def shares(self) -> str:
        """How a step is split into micro-batches, as a short text."""
        if self.micro_tokens is None:
            return f"{self.micro_rows} micro x {self.accumulation} accumulation"
        return f"micro of {self.micro_tokens:,} tokens x at most {self.accumulation}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained(Record):
    """One optimizer step. Tokens, slots and rates are totals over all processes."""

    kind: ClassVar[str] = "train"

    loss: Number
    """Mean over the loss terms of the step, such as its trained tokens or pairs."""
    grad_norm: Number
    """Norm of the gradient before clipping."""
    lr: Number
    trained_tokens: int
    """Tokens with a loss in this step."""
    real_tokens: int
    """Tokens that are not padding; a prompt that documents share counts for each of them."""
    slots: int
    """Token slots computed, including padding; a shared prompt counts once."""
    seconds: Number
    """Wall time of the step."""
    tokens_per_second: Number
    """`real_tokens` per second."""
    memory: Count
    """Peak bytes so far, maximum over processes."""
    epoch: Number
    """Passes over the training rows so far."""
    data_seconds: Number = 0.0
    """Part of `seconds` that rank 0 waited for rows."""
    mfu: Number = math.nan
    """Share of the matrix-product rate measured here; NaN if the model's shape is not known."""
    router_aux_loss: Number = math.nan
    """The load-balancing loss of experts times its factor, part of `loss`; NaN without one."""
    metrics: dict[str, Number] = dataclasses.field(default_factory=dict[str, float])
    """Other metrics of the method by name: means over the step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(Record):
    """Measured memory of a step, next to the plan's prediction."""

    kind: ClassVar[str] = "memory"

    length: int
    """Token slots per row of the measured micro-batch, including padding; a mean with packing."""
    peak: int
    """Peak bytes allocated by training, maximum over processes."""
    predicted: int | None
    """Peak bytes by the plan's formulas for rows of this length; None for an unknown model."""
    peaks: list[int] = dataclasses.field(default_factory=list[int])
    """`peak` of every process, by rank."""
    planned: list[int] = dataclasses.field(default_factory=list[int])
    """Predicted peak bytes of every process, by rank; empty for an unknown model."""
    parts: list[dict[str, float]] = dataclasses.field(default_factory=list[dict[str, float]])
    """Bytes of the components of each stage's planned peak, by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skipped(Record):
    """A step was skipped because its loss or gradient was not finite; the run continues."""

    kind: ClassVar[str] = "skip"

    loss: Number
    grad_norm: Number
    rows: list[str]
    """Source files and rows that may have caused it."""
    told: str
    """The warning for the user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warned(Record):
    """A warning about the progress of the training."""

    kind: ClassVar[str] = "warning"

    told: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated(Record):
    """The held-out rows were evaluated."""

    kind: ClassVar[str] = "eval"

    loss: Number
    """Mean over `tokens`."""
    tokens: int
    """Loss terms, such as trained tokens or pairs."""
    best: bool
    """Whether this is the best evaluation of the run so far."""
    seconds: Number
    metrics: dict[str, Number] = dataclasses.field(default_factory=dict[str, float])
    """Other metrics by name: means over all rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved(Record):
    """A checkpoint is complete."""

    kind: ClassVar[str] = "save"

    seconds: Number
    """Seconds that training was blocked."""
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended(Record):
    """Training ended in an orderly way. A killed run has no such record."""

    kind: ClassVar[str] = "end"

    seconds: Number
    """Wall time since the last `start`."""
    reason: Literal["finished", "early stop", "interrupted"]
    peak_memory: Count
    """Bytes, maximum over processes."""
    tokens_per_second: Number
    """Mean over the steps since the last `start`."""


KINDS: dict[str, type[Record]] = {
    kind.kind: kind for kind in (Start, Trained, Measured, Skipped, Warned, Evaluated, Saved, Ended)
}

SHOWN = 2
"""Number of the method's metrics shown in a progress line."""

Listener = Callable[[Record], None]
"""Called with each record after it was written."""


class Metrics:
    """Appends records to `metrics.jsonl` and passes them to the listeners, on rank 0.

    Every process creates one and makes the same calls; on other ranks they do nothing.
    """

    def __init__(self, run: Run, *, is_main: bool, listeners: Sequence[Listener] = ()) -> None:
        self._path = run.metrics
        self._is_main = is_main
        self._listeners = tuple(listeners)
        self._file: TextIO | None = None

    def resume_at(self, step: int) -> None:
        """Delete the records after `step`, which will be written again, and incomplete lines.

        The file is replaced atomically. Raises TrainingFailure if it cannot be written.
        """
        if not self._is_main or not self._path.exists():
            return
        self.close()
        try:
            lines = self._path.read_bytes().splitlines(keepends=True)
            with replacing(self._path) as scratch, scratch.open("wb") as file:
                file.writelines(line for line in lines if _is_until(step, line))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(self._path, error) from error

    def write(self, record: Record) -> None:
        """Append one line; it has reached the operating system when this returns.

        Raises TrainingFailure if the disk is full or the file cannot be written.
        """
        if not self._is_main:
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
            with contextlib.suppress(OSError):  # `write` has already reported the error
                self._file.close()
            self._file = None


def _line(record: Record) -> str:
    fields = {"kind": record.kind, **dataclasses.asdict(record)}
    if not fields.get("metrics", True):  # leave out an empty `metrics`
        del fields["metrics"]
    finite = from_json(to_json(fields, inf_nan_mode="null"))
    return json.dumps(finite) + "\n"


def _is_until(step: int, line: bytes) -> bool:
    """Whether a line is a complete record with at most this step."""
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, TypeError, KeyError, RecursionError):  # cut off by a kill or a full disk
        return False


def unwritable(path: os.PathLike[str], error: OSError) -> TrainingFailure:
    """The error for a record that could not be written."""
    return TrainingFailure(
        f"{path}: cannot be written ({error.strerror}); free disk space or allow writing, and "
        "resume from the newest checkpoint"
    )


def shown_metrics(metrics: Mapping[str, float]) -> list[str]:
    """The first two metrics of a method, abbreviated: `margins 0.12`."""
    first = list(metrics.items())[:SHOWN]
    return [f"{name.rsplit('/', 1)[-1]} {value:.4g}" for name, value in first]


def judged_by(best: str, loss: float, metrics: Mapping[str, float]) -> float:
    """The value that `evaluation.best` names, negated if larger is better; NaN if missing."""
    name, sign = best.removeprefix("-"), 1 if best.startswith("-") else -1
    return loss if best == "loss" else sign * metrics.get(name, math.nan)


@dataclasses.dataclass(frozen=True)
class History:
    """The records of a run by kind, oldest first."""

    starts: tuple[Start, ...] = ()
    trained: tuple[Trained, ...] = ()
    measured: tuple[Measured, ...] = ()
    evaluated: tuple[Evaluated, ...] = ()
    saved: tuple[Saved, ...] = ()
    ends: tuple[Ended, ...] = ()
    records: tuple[Record, ...] = ()
    """Records of all kinds, in the order of the file."""

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.trained[-1].step if self.trained else 0

    @property
    def best(self) -> Evaluated | None:
        """The evaluation with the lowest loss, the first one on ties."""
        finite = [record for record in self.evaluated if math.isfinite(record.loss)]
        return min(finite, key=lambda record: record.loss, default=None)

    @property
    def peak_memory(self) -> int:
        """Bytes, maximum over processes; 0 if nothing is recorded."""
        steps = [record.memory for record in self.trained]
        return max([*steps, *(end.peak_memory for end in self.ends)], default=0)

    @property
    def seconds(self) -> float:
        """Total wall time, summed from each start to the last record before the next start."""
        total, started = 0.0, None
        for record in self.records:
            if isinstance(record, Start):
                started = record.time
            elif started is not None:
                total, started = total + record.time - started, record.time
        return total

    @property
    def end(self) -> Ended | None:
        """The final record; None while training runs, and after it was killed."""
        last = self.records[-1] if self.records else None
        return last if isinstance(last, Ended) else None


def read_history(run: Run) -> History:
    """Every complete record of a run; raises FinetuneError if one has an unknown structure."""
    return history_of([parse(run, fields) for fields in run.read_metrics()])


def history_of(records: Sequence[Record]) -> History:
    """The history of some records, in their order."""
    kinds: tuple[type[Any], ...] = (Start, Trained, Measured, Evaluated, Saved, Ended)
    by_kind = (tuple(each for each in records if isinstance(each, kind)) for kind in kinds)
    return History(*by_kind, records=tuple(records))


def parse(run: Run, fields: Mapping[str, Any]) -> Record:
    """A record of `metrics.jsonl`; raises FinetuneError if it has an unknown structure."""
    kind = KINDS.get(str(fields.get("kind", "")))
    if kind is None:
        raise FinetuneError(
            f"{run.metrics}: a record of kind {fields.get('kind')!r}; known are {', '.join(KINDS)}"
        )
    got = {name: value for name, value in fields.items() if name != "kind"}
    try:
        return _reader(kind).validate_json(json.dumps(got))  # strict, as the file is
    except ValidationError as error:
        wrong = sorted({f"{'.'.join(map(str, e['loc']))} ({e['msg']})" for e in error.errors()})
        raise FinetuneError(
            f"{run.metrics}: a {kind.kind!r} record of step {fields.get('step')} with missing, "
            f"unexpected or wrong fields: {', '.join(wrong)}"
        ) from None


@functools.cache
def _reader(kind: type[Record]) -> TypeAdapter[Record]:
    """Checks the fields of a record; built once, when the first record of its kind is read."""
    return TypeAdapter(kind)
