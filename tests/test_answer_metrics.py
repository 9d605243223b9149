"""Metrics of answers, their intervals and the sandbox, against numbers made by hand."""

import math
import sqlite3
import sys
from typing import Any

import numpy as np
import pytest

from finetune import FinetuneError
from finetune.data.samples import Completion, Conversation
from finetune.evaluation.gate import bounds, judge
from finetune.evaluation.generations import Answer
from finetune.evaluation.measures import Measure, difference, of_scores, rows_needed, wilson
from finetune.evaluation.metrics import METRICS, overlap, sandbox, sql
from finetune.evaluation.metrics.code import pass_at
from finetune.evaluation.metrics.metric import Settings, choose, find
from finetune.evaluation.questions import Asked

QUICK = sandbox.Limits(cpu=1, wall=2.0, memory=2**28)


def rows(*pairs: tuple[str, str], **columns: Any) -> list[tuple[Asked, tuple[Answer, ...]]]:
    """(answer, reference) as rows with their answers."""
    return [
        (Asked(Completion("p", wanted), row=columns), (Answer(said, False, 1),))
        for said, wanted in pairs
    ]


def measured(name: str, *pairs: tuple[str, str], **columns: Any) -> Any:
    return find(name).measure(rows(*pairs, **columns), Settings())


def totals(name: str, *pairs: tuple[str, str]) -> dict[str, float]:
    return {each.name: each.total for each in measured(name, *pairs)}


def test_intervals_are_those_of_the_literature():
    # Newcombe 1998, table I: 81 of 263 has the score interval 0.2553 to 0.3662.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(200, 200)[0] < 0.99 < wilson(rows_needed(0.99), rows_needed(0.99))[0]
    # Gains 2 and losses 1 of 10: (3 / 12 - 2 / 12) -+ 1.96 sqrt((5 / 12 - 1 / 144) / 12).
    after, before = [1, 1, 0, *[1] * 7], [0, 0, 1, *[1] * 7]
    change, interval = difference(
        *(of_scores("exact", each, binary=True) for each in (after, before))
    )
    reach = 1.959964 * math.sqrt((5 / 12 - 1 / 144) / 12)
    assert change == pytest.approx(0.1)
    assert interval == pytest.approx((1 / 12 - reach, 1 / 12 + reach))


def test_a_bootstrap_draws_pairs_and_ratios_of_sums():
    noise = np.random.default_rng(1).normal(0, 5, 400)
    before, after = (of_scores("length", noise + shift) for shift in (0, 1))
    change, interval = difference(after, before)
    assert change == pytest.approx(1.0)
    assert interval == pytest.approx((1.0, 1.0))  # what both share leaves nothing uncertain
    assert after.interval()[0] < 1 < after.interval()[1]
    # A long row counts by its tokens: (10 + 1) / (100 + 1), not the mean of 0.1 and 1.
    assert Measure("loss", np.array([[10.0, 100.0], [1.0, 1.0]])).total == pytest.approx(11 / 101)


def test_a_bound_is_held_by_the_interval_and_not_by_the_mean():
    right = {"exact": of_scores("exact", [1.0] * 9 + [0.0], binary=True)}
    passed, failed = judge(bounds("exact>=0.5, exact>=80%"), right)
    assert (passed.passed, failed.passed) == (True, False)
    assert failed.said == (
        "exact>=0.8: 0.9, 95 % interval 0.5958 to 0.9821, 10 rows; the bound is inside the "
        "interval: more rows would narrow the interval"
    )
    (few,) = judge(bounds("exact>=0.99"), {"exact": of_scores("exact", [1.0] * 10, binary=True)})
    assert "at least 381 rows, all correct" in few.said


def test_words_are_compared_as_squad_and_gsm8k_do():
    assert totals("exact", ("Yes", "Yes"), ("the  cat.", "Cat"), ("no", "yes")) == {
        "exact": pytest.approx(1 / 3), "exact_normalised": pytest.approx(2 / 3),
    }  # fmt: skip
    assert totals("number", ("so 1,234.", "#### 1234"), ("2 or 3", "2"), ("none", "1")) == {
        "number": pytest.approx(1 / 3)
    }
    # Shared words 1 of 2 and 1 of 3, without the article: 2 x 1 / (2 + 3).
    assert totals("f1", ("a red house", "the red little door")) == {"f1": pytest.approx(0.4)}


def test_macro_f1_is_the_mean_over_labels_with_its_confusion_table():
    pairs = [("up", "up"), ("up", "down"), ("sideways", "down"), ("down", "down")]
    (measure,) = measured("labels", *pairs)
    # up: 2 / (2 + 1 + 0); down: 2 / (2 + 0 + 2).
    assert measure.total == pytest.approx((2 / 3 + 1 / 2) / 2)
    columns, table = ["down", "up", "(other)"], [[1, 1, 1], [0, 1, 0]]
    confusion = {"labels": ["down", "up"], "columns": columns, "confusion": table}
    assert (measure.detail["confusion"], measure.of_rows.tolist()) == (confusion, [1, 0, 0, 1])


def test_a_library_without_one_that_it_needs_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "rouge_score.rouge_scorer", raising=False)
    monkeypatch.setitem(sys.modules, "nltk", None)
    overlap._reason_against.cache_clear()
    with pytest.raises(FinetuneError, match=r"needs 'rouge-score' \(.*nltk.*\): .*'rouge-score>="):
        overlap._need("rouge_score", "rouge")
    overlap._reason_against.cache_clear()


def test_rouge_bleu_and_chrf_are_those_of_their_libraries():
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    pairs = [
        ("the cat sat on a mat today", "the cat sat on the mat"),
        ("dogs bark very loudly at night", "all dogs bark loudly at night"),
    ]
    said, wanted = ([pair[side] for pair in pairs] for side in (0, 1))
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    mean = sum(scorer.score(w, s)["rougeL"].fmeasure for s, w in pairs) / 2
    assert totals("rouge", *pairs)["rougeL"] == pytest.approx(mean)
    for name, library in (("bleu", BLEU()), ("chrf", CHRF())):
        (measure,) = measured(name, *pairs)
        assert measure.total == pytest.approx(library.corpus_score(said, [wanted]).score)
        assert measure.detail["signature"].endswith("version:2.6.0")
        low, high = measure.interval()
        assert low <= measure.total <= high


def test_json_is_parsed_checked_and_scored_by_field():
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    wanted = '{"a": 1, "b": {"c": [true, "x"]}}'
    pairs = [
        (wanted, wanted),
        ('```json\n{"a": 2, "b": {"c": [1, "x"]}}\n```', wanted),
        ('{"a": "1"}', wanted),
        ("sorry", wanted),
    ]
    valid, fields = measured("json", *pairs, schema=schema)
    assert valid.of_rows.tolist() == [1, 1, 0, 0]
    assert fields.of_rows.tolist() == pytest.approx([1, 1 / 3, 0, 0])
    assert fields.detail["fields"] == {"a": 0.25, "b.c[0]": 0.25, "b.c[1]": 0.5}


def test_tool_calls_need_the_function_and_equal_arguments():
    call = {"function": {"name": "add", "arguments": {"x": 1, "y": 2}}}
    tools = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
    user = {"role": "user", "content": "1 + 2"}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    asked = Asked(Conversation((user, reply), tools))
    silent = Asked(Conversation((user, {"role": "assistant", "content": "3"}), tools))
    written = '{"name": "add", "arguments": {"y": 2, "x": 1}}'
    taken = {"name": "add", "arguments": '{"x":1,"y":2}'}
    given = [
        (asked, Answer(f"<tool_call>\n{written}</tool_call>", False, 1)),
        (asked, Answer('[{"name": "add", "parameters": {"x": 1, "y": 3}}]', False, 1)),
        (asked, Answer("3", False, 1)),
        (asked, Answer("", False, 1, ({"function": taken},))),
        (silent, Answer("It is 3.", False, 1)),
    ]
    calls, names = find("tools").measure([(a, (b,)) for a, b in given], Settings())
    assert (calls.of_rows.tolist(), names.of_rows.tolist()) == ([1, 0, 0, 1, 1], [1, 1, 0, 1, 1])


def test_sql_has_the_same_result_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sql, "SECONDS", 0.5)
    path = tmp_path / "town.db"
    connection = sqlite3.connect(path)
    connection.executescript("create table t(a, b); insert into t values (1, 'x'), (2, 'y')")
    connection.close()
    before = path.read_bytes()
    wanted = "select a from t order by a desc"
    pairs = [
        (wanted, wanted),
        ("select a from t", "select a from t"),
        ("SELECT a FROM t ORDER BY a", wanted),
        ("select a from t order by b", "select a from t"),
        ("delete from t", wanted),
        ("select missing from t", wanted),
        ("with recursive c(n) as (select 1 union all select n + 1 from c) select count(*) from c",
         wanted),
    ]  # fmt: skip
    (measure,) = measured("sql", *pairs, database=str(path))
    assert measure.of_rows.tolist() == [1, 1, 0, 1, 0, 0, 0]
    assert "no such column: missing" in measure.detail["errors"]
    assert "takes longer than 0.5 s" in measure.detail["errors"]
    assert path.read_bytes() == before
    problem = find("sql").refuse(rows(("", "select 1"))[0][0], Settings())
    assert problem == "it names no SQLite file (column database); give --database FILE"


def test_metrics_are_chosen_by_the_rows():
    def chosen(*wanted: str, **columns: Any) -> list[str]:
        asked = [Asked(Completion("p", each), row=columns) for each in wanted]
        return list(choose((), asked, Settings(run_code="tests" in columns)))

    assert chosen("yes", "no", "yes", "no") == ["exact", "labels"]
    assert chosen("it is so: 7", "and so it is 8") == ["exact", "number", "f1"]
    assert chosen('{"a": 1}', "[2]") == ["exact", "json"]
    assert "rouge" in chosen(" ".join(["word"] * 40))
    assert "code" in chosen("x = 1", tests="assert x == 1")
    with pytest.raises(FinetuneError) as caught:
        choose(("json", "exakt"), [Asked(Completion("p", "no"), place="f row 1")], Settings())
    assert len(caught.value.problems) == 2
    assert all(find(name).measures for name in METRICS)


def test_pass_at_k_is_the_unbiased_estimate():
    # 1 - C(3, 2) / C(5, 2)
    assert pass_at(2, 5, 2) == pytest.approx(0.7)
    assert (pass_at(1, 4, 1), pass_at(4, 4, 1), pass_at(3, 4, 0)) == (0.25, 1.0, 0.0)


def test_code_of_answers_is_run_with_its_tests():
    asked = Asked(Completion("Write f.", "x"), row={"test_list": ["assert f(1) == 2"]})
    head = {"test": "def check(g):\n    assert g(1) == 2", "entry_point": "f"}
    completed = Asked(Completion("def f(x):\n", "    return x + 1"), row=head)
    fenced, wrong, rest = (
        Answer(text, False, 1)
        for text in (
            "Here:\n```python\ndef f(x):\n    return x + 1\n```\nDone.",
            "def f(x):\n    return x",
            "    return x + 1",
        )
    )
    given = [(asked, (fenced,)), (asked, (wrong,)), (completed, (rest,))]
    (measure,) = find("code").measure(given, Settings(run_code=True))
    assert measure.of_rows.tolist() == [1, 0, 1]
    assert measure.detail["outcomes"] == {"passed": 2, "AssertionError": 1}
    drawn = [(asked, (wrong, fenced, wrong, wrong))]
    first, all_three = find("code").measure(drawn, Settings(run_code=True))
    assert (first.total, all_three.name, all_three.total) == (pytest.approx(1 / 3), "pass@3", 1.0)
    assert "allow it with --run-code" in str(find("code").refuse(asked, Settings()))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import math, json, random, re, collections", "passed"),
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("while True: pass", "1 s"),
        ("import time; time.sleep(60)", "runs longer than 2 s"),
        ("import os\nwhile True: os.fork()", "starts a process"),
        ("import subprocess; subprocess.run(['ls'])", "starts a process"),
        ("x = bytearray(2**31)", "fills its memory"),
        ("import urllib.request as u; u.urlopen('http://127.0.0.1:9')", "opens the network"),
        ("open('f', 'w').write('x' * 2**21)", "File too large"),
        ("import os; os._exit(0)", "ends before its tests"),
        ("raise SystemExit", "ends before its tests"),
        ("import os; os.kill(os.getppid(), 0)", "sends a signal"),
        ("import os; os.killpg(0, 0)", "sends a signal"),
        ("open('../escaped', 'w')", "writes outside its folder"),
        ("import os; os.chdir('/'); os.mkdir('tmp/escaped')", "writes outside its folder"),
        ("import os; os.symlink('/tmp', 'l')", "writes outside its folder"),
        ("import shutil; shutil.rmtree('/proc/self/fd')", "writes outside its folder"),
        ("import tempfile as t; t.NamedTemporaryFile(); open('/dev/null', 'w')", "passed"),
        ("import asyncio; asyncio.run(asyncio.sleep(0))", "passed"),
        ("import os\nwhile True: os.write(1, b'x' * 2**16)", "1 s"),
        ("import os\nwhile True: os.mkdir('d'); os.chdir('d')", "writes too many files"),
        ("n = 0\nwhile True: n += 1; open(str(n), 'w')", "writes too many files"),
        (
            "import os; assert set(os.environ) <= {'LC_CTYPE', 'TMPDIR'} and not os.listdir()",
            "passed",
        ),
        (
            "import os\nfor n in range(3, 16): os.write(n, b'[true, \"passed\", 0, true]')",
            "OSError",
        ),
        ("import sys; sys._getframe(1).f_locals['word']", "call stack is not deep enough"),
        ("import gc; gc.get_objects()", "inspects the interpreter"),
        ("class P(str): pass\nopen(P('f'), 'w')", "writes outside its folder"),
        ("input()", "EOFError"),
        ("def f(", "SyntaxError"),
    ],
)
def test_code_that_goes_wrong_is_stopped_and_named(code, said):
    outcome = sandbox.run(code, QUICK)
    assert said in outcome.said or (said == "1 s" and "2 s" in outcome.said)
    assert outcome.passed == (said == "passed")


BELOW_PYTHON = """
import ctypes, os
libc, outside = ctypes.CDLL(None), os.fsencode(os.path.dirname(os.getcwd()) + "/escaped")
kept = libc.creat(outside, 0o600) < 0
libc.unlink(outside)
raise SystemError("files kept" if kept else "files open")
"""


@pytest.mark.parametrize("missing", [(), ("bwrap",), ("bwrap", "unshare")])
def test_the_level_of_isolation_is_what_a_program_meets(missing, monkeypatch):
    """Also below Python, where no audit hook looks."""
    for name in missing:
        monkeypatch.setitem(sandbox._WORDS, name, ("no-such-program",))
    for each in (sandbox._works, sandbox.isolation):
        each.cache_clear()
    told = sandbox.isolation()
    assert told.count("refused in Python only") == 2 or len(missing) < 2
    outcome = sandbox.run(BELOW_PYTHON, QUICK)
    assert outcome.said.endswith("files kept" if "read-only" in told else "files open")
    for each in (sandbox._works, sandbox.isolation):
        each.cache_clear()
