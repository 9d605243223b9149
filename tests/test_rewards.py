"""Rewards: what the built-in ones give, and what becomes of one that fails."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import problems_of

from finetune.errors import FinetuneError
from finetune.rewards import Reward, functions
from finetune.rewards.builtin import exact_match, json_fields, json_valid, length, regex
from finetune.rewards.process import RewardFailure, RewardProcess

BAD = """
import asyncio, ctypes, os, subprocess, sys, time

def throw(error):
    raise error

def always(result):
    return lambda completions, **_: result

def hangs(completions, **_):
    if "boom" in completions:
        time.sleep(600)
    return [1] * len(completions)

few, number, nothing, raises = map(always, ([1.0, 1.0], 3, None, None))

def ends(completions, **_):
    os._exit(7)

def long(completions, **_):
    throw(ValueError("z" * 5000))

def gives(completions, act, **_):
    return [eval(way) if text == "boom" else 1 for text, way in zip(completions, act)]

def slow(completions, calls, **_):
    with open(calls, "a") as file:
        file.write("x")
    time.sleep(0.4 * len(completions))
    return [1] * len(completions)

async def later(completions):
    return [1] * len(completions)

def yields(completions):
    yield 1

def by_place(completions, /):
    return [1]

def unnamed(*completions):
    return [1]

class Scorer:
    pass

def runs_on(completions, file):
    program = subprocess.Popen(["sleep", "60"])
    with open(file, "a") as found:
        print(program.pid, file=found)
    program.wait()

def forks(completions, completion_ids):
    if os.fork() == 0:
        return [7.0 for _ in completions]
    os.wait()
    return [float(len(ids)) for ids in completion_ids]

def prints(completions, n, scale=1.0):
    print("a line of its own")
    return [None if each is None else scale * each for each in n]
"""
COLUMNS = {
    "prompts": ["one", "two", "three"],
    "completions": ["a", "boom", "c"],
    "completion_ids": [[1], [2, 3], [4, 5, 6]],
    "n": [1, None, 3],
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_rewards.py").write_text(BAD)
    monkeypatch.syspath_prepend(str(tmp_path))


@contextlib.contextmanager
def process_of(name: str, timeout: float = 60.0, **arguments: Any) -> Iterator[RewardProcess]:
    process = RewardProcess([Reward(f"bad_rewards:{name}", arguments=arguments)], timeout)
    try:
        yield process
    finally:
        process.close()


def scored(name: str, **given: Any) -> Any:
    with process_of(name, **given) as process:
        return process.score(COLUMNS)


NO_NUMBER = "expected a finite number or None"
FAILURES = {
    "'much'": f"returns 'much', {NO_NUMBER}",
    "float('nan')": f"returns nan, {NO_NUMBER}",
    "'1.0'": f"returns '1.0', {NO_NUMBER}",
    "10 ** 400": f"returns 1{59 * '0'}, {NO_NUMBER}",
    "1 / 0": "raises ZeroDivisionError: division by zero (<string>:1)",
    "throw(KeyboardInterrupt())": "raises KeyboardInterrupt (bad_rewards.py:5)",
    "input()": "raises EOFError: EOF when reading a line (<string>:1)",
    "sys.exit('no service')": "raises SystemExit: no service (<string>:1)",
    "throw(asyncio.CancelledError())": "raises CancelledError (bad_rewards.py:5)",
    "ctypes.string_at(0)": "had its process killed by SIGSEGV",
    "os.kill(os.getpid(), 9)": "had its process killed by SIGKILL, as when memory runs out",
}
"""What a reward does for one completion, and how that is reported."""


@pytest.mark.usefixtures("module")
def test_failing_rewards_are_reported_with_their_completion():
    with process_of("gives") as process:
        for act, told in FAILURES.items():
            columns = COLUMNS | {"act": [act] * 3}
            (problem,) = problems_of(process.score, columns)
            assert problem == (
                f"reward 'bad_rewards:gives' {told} (prompt 'two', completion 'boom'); fix the "
                "function, or set on_reward_error=skip to leave completions without a score"
            )
            scores, notes = process.score(columns, skip=True)
            assert scores == [[1, None, 1]]
            assert told in notes[0]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("few", "returns 2 numbers for 3 completions"),
        ("number", "returns 3, expected a list of 3 numbers"),
        ("nothing", "returns None, expected a list of 3 numbers"),
        ("long", "raises ValueError: z{300} "),
        ("ends", "ended its process with status 7"),
    ],
)
def test_a_reward_without_a_number_for_each_completion_is_reported(name: str, told: str) -> None:
    with pytest.raises(RewardFailure, match=told):
        scored(name)


@pytest.mark.usefixtures("module")
def test_a_reward_that_hangs_is_ended_and_the_completion_named() -> None:
    with pytest.raises(RewardFailure) as caught:
        scored("hangs", timeout=0.5)
    (problem,) = caught.value.problems
    assert "takes more than reward_timeout=0.5 s" in problem
    assert "completion 'boom'" in problem


@pytest.mark.usefixtures("module")
def test_programs_that_a_reward_started_end_with_it(tmp_path: Path) -> None:
    file = tmp_path / "programs"
    with pytest.raises(RewardFailure, match=r"takes more than reward_timeout=0\.3 s"):
        scored("runs_on", timeout=0.3, file=str(file))
    for program in map(int, file.read_text().split()):
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(program).wait(5)


@pytest.mark.usefixtures("module")
def test_a_reward_that_forks_is_answered_once() -> None:
    with process_of("forks") as process:
        for _ in range(3):
            assert process.score(COLUMNS) == ([[1, 2, 3]], [])


@pytest.mark.usefixtures("module")
def test_the_search_for_a_slow_completion_is_limited(tmp_path: Path) -> None:
    """Three completions take longer than the limit together, and each of them alone does not."""
    calls = tmp_path / "calls"
    with pytest.raises(RewardFailure, match="all together, the first: prompt 'one', completion"):
        scored("slow", timeout=0.7, calls=str(calls))
    assert len(calls.read_text()) < 4  # all, and those alone that begin within 0.7 s


@pytest.mark.usefixtures("module")
def test_a_function_is_given_columns_and_arguments_by_their_names() -> None:
    assert scored("prints", scale=2.0) == ([[2.0, None, 6.0]], [])


UNNAMED = " takes no named argument, such as completions; use a function that does"
UNCALLABLE: list[tuple[str, dict[str, Any], str]] = [
    ("no_such_module:reward", {}, ": there is no module 'no_such_module'; install it, or put its "
     "folder on PYTHONPATH"),
    ("bad_rewards:rises", {}, ": bad_rewards has no 'rises'; did you mean 'raises'?"),
    ("bad_rewards:prints", {"scal": 2}, " takes no argument 'scal' (it takes completions, n, "
     "scale)"),
    ("bad_rewards:raises", {"prompts": []}, ": its `arguments` have 'prompts', which is passed to "
     "every reward; leave it out"),
    ("bad_rewards:later", {}, " is an async function, which returns no scores; use asyncio.run "
     "inside a plain one"),
    ("bad_rewards:yields", {}, " is a generator, because it contains yield; return a list"),
    ("bad_rewards:by_place", {}, UNNAMED), ("bad_rewards:unnamed", {}, UNNAMED),
    ("bad_rewards:Scorer", {}, " is a class; name a function, or an instance with __call__"),
    ("builtins:max", {}, UNNAMED),
    ("bad_rewards.py:raises", {}, ": there is no module 'bad_rewards.py'; install it, or put its "
     "folder on PYTHONPATH and leave out '.py'"),
    ("regex", {"pattern": "("}, ": `arguments`: pattern '(' is not a regular expression: missing "
     "), unterminated subpattern at position 0"),
    ("exact_match", {"pattern": 3}, ": `arguments`: pattern is 3, expected a regular expression"),
    ("length", {"target": 0}, ": `arguments`: target is 0, expected a number of tokens, 1 or more"),
]  # fmt: skip


@pytest.mark.usefixtures("module")
def test_an_uncallable_reward_is_reported_before_anything_is_loaded():
    rewards = [Reward(name, arguments=given) for name, given, _ in UNCALLABLE]
    told = [f"reward_funcs: '{name}'{said}" for name, _, said in UNCALLABLE]
    assert functions.problems(rewards) == told
    assert functions.problems([Reward("exact"), Reward("bad_rewards:")]) == [
        "reward_funcs: got 'exact', expected one of exact_match, json_valid, json_fields, regex, "
        "length, or module:attribute of your own; did you mean 'exact_match'?",
        "reward_funcs: got 'bad_rewards:', expected module:attribute",
    ]
    with pytest.raises(FinetuneError, match="needs 'answer', which is neither a column"):
        functions.arguments_of(Reward("exact_match"), exact_match, ["solution", "prompt"])


MODULES = {
    "def reward(:": "cannot be imported: SyntaxError: invalid syntax (own_broken.py, line 1)",
    "import sys; sys.exit(3)": (
        "importing own_broken exits with SystemExit: 3; move the code that does so into a function"
    ),
    "import no_such_dependency": "is not installed; install it, or put its folder on PYTHONPATH",
}


@pytest.mark.parametrize("text", MODULES)
def test_a_module_that_cannot_be_imported_is_reported_as_an_error(tmp_path, monkeypatch, text):
    (tmp_path / "own_broken.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    (told,) = functions.problems([Reward("own_broken:reward")])
    assert told.startswith("reward_funcs: 'own_broken:reward': ")
    assert told.endswith(MODULES[text])


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_built_in_rewards() -> None:
    texts = ['{"a": 1, "b": 2}', said('{"a": 1, "c": 3} '), "no record", "[1]"]
    answers = ['{"a": 1, "b": 2}'] * 3 + [None]
    assert exact_match(texts, answers) == [1, 0, 0, None]
    assert exact_match(["is 7, so 8", "8 or 9"], ["#### 8"] * 2, pattern=r"\d+") == [1, 0]
    assert json_valid(texts) == [1, 1, 0, 1]
    assert json_fields(texts, answers) == [1, pytest.approx(1 / 3), 0, None]
    assert regex(texts, r"\{.*\}") == [1, 1, 0, 0]
    ids = [[0] * n for n in (5, 10, 15, 30)]
    assert length(texts, ids, target=10) == [1, 1, 0.5, 0]
    with pytest.raises(FinetuneError, match="is not a regular expression"):
        regex(texts, "(")
    with pytest.raises(FinetuneError, match=r"column 'answer' is '\[1\]', expected a JSON object"):
        json_fields(texts, ["[1]"] * 4)


def test_the_process_of_rewards_ends_with_the_one_that_asks() -> None:
    process = RewardProcess([Reward("json_valid")], 60.0)
    assert process.score(COLUMNS) == ([[0, 0, 0]], [])
    child = process._process
    assert child is not None
    assert os.getsid(child.pid) == child.pid  # out of reach of Ctrl-C in a terminal
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
