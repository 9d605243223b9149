"""pass@k of code with tests, run in a process with limits."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import comb
from typing import Any

from finetune.data.samples import Completion
from finetune.evaluation.measures import Measure, of_scores
from finetune.evaluation.metrics import sandbox
from finetune.evaluation.metrics.metric import Metric, Row, Settings
from finetune.evaluation.questions import Asked

TESTS = ("tests", "test_list", "test")
"""Columns with tests, as a text or a list of statements."""
BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
AT_ONCE = 4
"""Number of programs that run in parallel."""


def pass_at(k: int, samples: int, right: int) -> float:
    """Estimate of the probability that any of k samples is right: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021, arXiv:2107.03374, equation 1.
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def tests_of(row: Mapping[str, Any]) -> str | None:
    """The tests of a row as a program; None if it has no tests."""
    column = next((name for name in TESTS if row.get(name)), None)
    if column is None:
        return None
    tests = row[column]
    lines = tests if isinstance(tests, str) else "\n".join(map(str, tests))
    entry = row.get("entry_point")
    call = f"\ncheck({entry})\n" if entry and "def check(" in lines else ""
    return f"{row.get('test_setup_code') or ''}\n{lines}\n{call}"


def program_of(asked: Asked, answer: str) -> str:
    """The code of an answer, followed by the tests of the row.

    The code is that of the answer's Markdown code blocks, or the complete answer without blocks.
    """
    blocks = BLOCK.findall(answer)
    code = "\n".join(blocks) if blocks else answer
    if isinstance(asked.question, Completion) and "entry_point" in asked.row and not blocks:
        code = asked.question.prompt + code  # the prompt is the head of a function
    return f"{code}\n{tests_of(asked.row)}"


def _code(rows: Sequence[Row], settings: Settings) -> list[Measure]:
    drawn = [(asked, given[1:] or given) for asked, given in rows]
    programs = [program_of(asked, each.text) for asked, given in drawn for each in given]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        outcomes = list(threads.map(sandbox.run, programs))
    samples = len(drawn[0][1])
    right = [
        sum(each.passed for each in outcomes[row * samples : (row + 1) * samples])
        for row in range(len(rows))
    ]
    reasons = Counter(re.sub(r":.*", "", each.said) for each in outcomes)
    detail = {
        "samples": samples,
        "sandbox": sandbox.isolation(),
        "outcomes": dict(reasons.most_common()),
        "rows": [each.said for each in outcomes[::samples]],
    }
    found = list[Measure]()
    for k in dict.fromkeys((1, samples)):
        scores = [pass_at(k, samples, count) for count in right]
        binary = samples == 1
        found.append(of_scores(f"pass@{k}", scores, binary=binary, detail=detail if k == 1 else {}))
    return found


def _cannot_run(asked: Asked, settings: Settings) -> str | None:
    if tests_of(asked.row) is None:
        return f"it has no tests (column {', '.join(TESTS)})"
    if not settings.run_code:
        return "its tests run code that the model wrote: allow it with --run-code"
    return None


CODE = Metric("code that passes its tests", ("pass@1",), _cannot_run, lambda *_: True, _code)
