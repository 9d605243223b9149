"""Run reward functions for `finetune.rewards.process`, in the process that it starts."""

import json
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from finetune.errors import FinetuneError
from finetune.process.quiet import quiet
from finetune.rewards import Reward
from finetune.rewards.functions import arguments_of, function_of, prepare

SHOWN = 300
"""Maximum characters of a user's exception in a message."""


def serve() -> None:
    """Score completions from standard input until it ends.

    Reward functions get an empty standard input, and write to standard error.
    """
    quiet()
    answers, requests = os.fdopen(os.dup(1), "w", encoding="utf-8"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    this = os.getpid()

    def answer(request: dict[str, Any], **fields: Any) -> None:
        if os.getpid() != this:  # a fork of a function, which ends where its function does
            os._exit(0)
        answers.write(json.dumps({"number": request["number"], **fields}) + "\n")
        answers.flush()

    lines = iter(requests.readline, b"")
    first = json.loads(next(lines, b"{}"))
    threading.Thread(target=_end_with, args=(first.get("parent"),), daemon=True).start()
    try:
        rewards = [Reward(**fields) for fields in first.get("rewards", ())]
        functions = [function_of(reward) for reward in rewards]
        for reward in rewards:
            prepare(reward)
    except FinetuneError as error:
        answer(first, problem="; ".join(error.problems))
        return
    answer(first, scores=[])
    for line in lines:
        request = json.loads(line)
        number = request["reward"]
        try:
            answer(request, scores=_scores(rewards[number], functions[number], request["columns"]))
        except FinetuneError as error:
            answer(request, problem="fails: " + "; ".join(error.problems))
        except BaseException as error:  # by a user's function, such as CancelledError
            place = traceback.extract_tb(error.__traceback__)[-1]
            cause = ": ".join(filter(None, (type(error).__name__, str(error)[:SHOWN])))
            at = f"{os.path.basename(place.filename)}:{place.lineno}"
            answer(request, problem=f"raises {cause} ({at})")
    os.killpg(0, signal.SIGKILL)  # with programs that functions started


def _scores(reward: Reward, function: Callable[..., Any], columns: dict[str, Any]) -> Any:
    """Call a reward function, and convert its result to JSON values."""
    wanted = arguments_of(reward, function, columns)
    given = {name: values for name, values in columns.items() if name in wanted}
    found = function(**{**given, **reward.arguments})
    if hasattr(found, "tolist"):  # arrays and tensors
        found = found.tolist()
    if not isinstance(found, list | tuple):
        return repr(found)[:60]
    return [_number(each) for each in found]


def _number(value: Any) -> float | str | None:
    if value is None:
        return None
    try:
        number = None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None:
        return repr(value)[:60]
    return number if math.isfinite(number) else str(number)


def _end_with(parent: int | None) -> None:
    """When the parent process is gone, end this one and the programs that its functions started."""
    while parent is not None and os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)
