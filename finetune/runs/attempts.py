"""Count the starts of a run by a scheduler, and what they cost.

`attempts.jsonl` has a line per submission, and two per start: one when it begins, with the step of
the newest checkpoint and the last recorded step, and one when it ends, with its exit status. A
killed one has no end.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import signal
import time
from collections.abc import Generator
from types import FrameType
from typing import Any

from finetune.errors import FinetuneError, Interrupted
from finetune.runs.run import Run, read_lines, read_object


@contextlib.contextmanager
def attempt(run: Run, most: int, end_by: float | None = None) -> Generator[None]:
    """Record a start of a run and its end.

    Args:
        most: starts in a row without a new checkpoint. A scheduler may take the machines of a run
            any number of times: an interrupted start does not count, unless it had most of the time
            until its limit.
        end_by: the limit, in seconds since 1970.

    Raises:
        FinetuneError: this would be one more.
    """
    newest, begun = run.newest() or 0, time.time()
    if _in_vain([*read_lines(run.attempts)], newest) >= most:
        raise FinetuneError(
            f"{run.root}: started {most} times from step {newest} without reaching another "
            "checkpoint; see its log, and submit it again when it can"
        )
    step = max((each.get("step", 0) for each in run.read_metrics("train")), default=0)
    _append(run, {"event": "start", "checkpoint": newest, "step": step})

    def end(status: int) -> None:
        late = end_by is not None and time.time() - begun > (end_by - begun) / 2
        _append(run, {"event": "end", "status": status, "late": late})

    before = signal.getsignal(signal.SIGTERM)

    def ends_at_once(number: int, frame: FrameType | None) -> None:
        end(Interrupted.exit_status)
        assert callable(before)
        before(number, frame)

    status = 1
    if callable(before):  # the command's own, while libraries load: it does not return
        signal.signal(signal.SIGTERM, ends_at_once)
    try:
        yield
        status = 0
    except FinetuneError as error:
        status = error.exit_status
        raise
    finally:
        if callable(before):
            signal.signal(signal.SIGTERM, before)
        end(status)


def _in_vain(events: list[dict[str, Any]], newest: int) -> int:
    """Starts in a row from the newest checkpoint that count against the run."""
    count, end = 0, dict[str, Any]()
    for each in reversed(events):
        if each["event"] == "end":
            end = each
        elif each.get("checkpoint") != newest:
            break
        else:
            count += end.get("status") != Interrupted.exit_status or end.get("late", False)
            end = {}
    return count


def submitted(run: Run) -> None:
    """Record that a run was submitted, from when on its starts are counted."""
    _append(run, {"event": "submit"})


def _append(run: Run, fields: dict[str, Any]) -> None:
    run.root.mkdir(parents=True, exist_ok=True)
    with run.attempts.open("a") as file:
        file.write(json.dumps(fields | {"time": time.time()}) + "\n")


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the starts of a run cost. Times are in seconds on the clock."""

    attempts: int
    waiting: float
    """Submitted, requeued or not started, until the last start."""
    allocated: float
    """From each start to its end."""
    stepping: float
    """Share of `allocated` in optimizer steps that count."""
    lost_steps: int
    """Steps after the checkpoint that the next start continued from."""
    price: float
    """Of all devices for the allocated time; NaN if no price per device is known."""


def cost(run: Run) -> Cost | None:
    """What a run that was started by a scheduler cost; None for others."""
    events, job = list(read_lines(run.attempts)), read_object(run.job)
    starts = [each for each in events if each["event"] == "start"]
    if not starts:
        return None
    records = [record for record in run.read_metrics() if "time" in record]
    allocated = waiting = 0.0
    before: float | None = None  # the end of what was before
    for event, after in itertools.pairwise([*events, {"event": "now", "time": math.inf}]):
        if event["event"] == "start":
            waiting += event["time"] - (event["time"] if before is None else before)
            # Of a killed start, the last record is the end.
            known = [r["time"] for r in records if event["time"] < r["time"] < after["time"]]
            killed = max(known, default=event["time"])
            before = after["time"] if after["event"] == "end" else killed
            allocated += before - event["time"]
        elif event["event"] == "submit":
            before = event["time"]
    stepping = sum(record["seconds"] or 0 for record in records if record.get("kind") == "train")
    price = job.get("price")
    return Cost(
        attempts=len(starts),
        waiting=waiting,
        allocated=allocated,
        stepping=min(1.0, stepping / allocated) if allocated else 0.0,
        lost_steps=sum(max(0, each["step"] - each["checkpoint"]) for each in starts),
        price=math.nan if price is None else price * job["devices"] * allocated / 3600,
    )
