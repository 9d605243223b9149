"""The page, the picture and the card say exactly what the record says."""

import contextlib
import dataclasses
import html.parser
import io
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import records as made
import yaml
from conftest import copy_of
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image
from records import RECIPE, START, ended, evaluated, many_steps, trained, whole_run, write_run

from finetune.reports.card import code, write_card
from finetune.reports.drawings import Curve, chart, smooth, thin, ticks
from finetune.reports.page import report
from finetune.reports.plot import plot_loss
from finetune.reports.tables import Table, tables
from finetune.runs.metrics import Record, read_history
from finetune.runs.run import Run, write_json
from finetune.runs.summary import base_model, hub_name, technique, title, verdict

VOID = {"meta", "br", "line", "circle", "polyline"}


class Page(html.parser.HTMLParser):
    """The text, the tags, and the tables of each section of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.rows: dict[str, list[list[str]]] = {}
        self._open: list[str] = []
        self._section = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self._open == []  # every tag is closed, in order

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
            self.rows[self._section] = []
        elif tag == "tr":
            self.rows[self._section].append([])
        elif tag in ("td", "th"):
            self.rows[self._section][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text.append(data)
        if {"td", "th"} & set(self._open):
            self.rows[self._section][-1][-1] += data

    def first(self, tag: str) -> str:
        """Text of the first element with this tag."""
        inside = self.source.split(f"<{tag}")[1].split(">", 1)[1].split(f"</{tag}>")[0]
        return html.unescape(inside)


@pytest.fixture
def page_of(tmp_path) -> Callable[..., Page]:
    """The page of these records, or of a run."""

    def page_of(records: list[Record] | Run, recipe: dict[str, Any] = RECIPE) -> Page:
        run = records if isinstance(records, Run) else write_run(tmp_path / "run", records, recipe)
        assert report(run) == run.report
        assert [path.name for path in run.root.glob(".report*")] == []
        return Page(run.report)

    return page_of


def cells(text: str) -> list[list[str]]:
    """Rows of a table, one a line: `a | b`."""
    return [[cell.strip() for cell in line.split("|")] for line in text.strip("\n").splitlines()]


def test_the_page_of_a_finished_run_holds_its_exact_numbers(page_of):
    page = page_of(whole_run())
    assert page.first("h1") == "SFT of acme/tiny-llama: QLoRA (NF4), r=16"
    assert page.first("p") == ("Finished 10 steps in 20 s. Evaluation loss 1.2500 at step 5.")
    assert page.rows["evaluations"] == cells("""
step | loss | change | perplexity | tokens | time |
5 | 1.2500 | - | 3.49 | 321 | 0.5 s | best
10 | 1.5000 | +0.2500 | 4.482 | 321 | 0.5 s |
""")
    assert page.rows["checkpoints"][1:] == cells("""
5 | 1.2500 | 4.00 KiB | 0.25 s | kept | best
10 | 1.5000 | 4.00 KiB | 0.25 s | kept | newest
""")
    assert page.rows["throughput-and-memory"] == cells("""
tokens per second | 500.0
tokens | 10,000
tokens with a loss | 7,000 (70 %)
padding | 20 %
median step | 2.0 s
slowest step | 2.0 s (step 1)
peak memory of one process | 3.00 GiB
time spent on | time | share
steps | 20 s | 100 %
evaluations | 1.0 s | 5 %
checkpoints | 0.5 s | 2.5 %
other | 0 s | 0 %
in all | 20 s | 100 %
""")
    assert page.rows["backend"][1] == ["0", "ddp", "bf16", "2", "16 = 4 x 2 x 2"]
    assert [tag for tag, _ in page.tags].count("svg") == 5
    assert "  lr: 0.0002\n" in "".join(page.text)
    # It asks for nothing from outside.
    assert {"link", "script", "img", "iframe"} & {tag for tag, _ in page.tags} == set()
    assert {"src", "href"} & {name for _, attributes in page.tags for name in attributes} == set()
    assert [each for each in ("url(", "@import", "http") if each in page.source] == []


def test_a_page_has_no_more_than_the_record_and_stays_small(page_of, tmp_path):
    page = page_of(made.unmeasured_run())
    assert set(page.rows) == {"curves", "throughput-and-memory", "backend", "recipe"}
    long = write_run(tmp_path / "long", [START, *many_steps(20_000)])
    assert len(page_of(long).source.encode()) < 150_000


def test_everything_that_was_written_is_shown(page_of, tmp_path):
    run = write_run(tmp_path / "run", whole_run())
    counts = {"samples": 5, "eaten": 1, "bad": 0, "rows": 4, "sha256": "ab"}
    sources = [{"source": "a.jsonl", "rows": 4, "bad": 0}]
    counts |= {"first": {"eaten": "a.jsonl, row 2"}, "by_source": sources, "wanted": None}
    other = {"samples": 5, "eaten": 0, "rows": 1, "sha256": "cd", "by_source": []}
    held = [{"parameters": 130_016, "optimizer": size} for size in (6_172, 6_173)]
    made_by = {"python": "3.11.7", "versions": {"torch": "2.13.0"}, "command": ["a b", "c"]}
    for path, written in {
        run.data: {"train": counts, "eval": other},
        run.realised: {"distributed_type": "FSDP", "processes": 2, "ranks": held},
        run.plan: {"processes": 2, "steps": 20, "engine": "ddp", "memory": {"peak_memory": 2**31}},
        run.environment: made_by,
        run.root / "proof.json": {"passed": True, "checks": [{"check": "resume", "equal": False}]},
    }.items():
        write_json(path, written)
    page = page_of(run)
    assert page.rows["data"] == cells("""
 | train | eval
samples | 5 | 5
samples without an answer after truncation | 1 | 0
rows | 4 | 1
train | ab
eval | cd
samples without an answer after truncation | a.jsonl, row 2
source | rows
a.jsonl | 4
""")
    assert page.rows["backend"][2:] == cells("""
distributed type | FSDP
processes | 2
rank | parameters | optimizer
0 | 130,016 | 6,172
1 | 130,016 | 6,173
""")
    assert page.rows["plan"] == cells("""
 | predicted | measured | measured / predicted
processes | 2 | 2 | 1.00
steps | 20 | 10 | 0.50
peak memory | 2.00 GiB | 3.00 GiB | 1.50
engine | ddp
peak memory | 2.00 GiB
""")
    assert page.rows["proofs"] == [["passed", "yes"], ["check", "equal"], ["resume", "no"]]
    assert page.rows["environment"] == [["python", "3.11.7"], ["torch", "2.13.0"]]
    assert "'a b' c" in page.text


def test_an_online_run_is_drawn_by_its_reward(page_of):
    """The loss of its evaluation is a negative reward, and is not beside that of training."""
    start = dataclasses.replace(START, unit="completions")
    steps = [dataclasses.replace(trained(n), metrics={"reward": n / 4}) for n in (1, 2)]
    measured = dataclasses.replace(evaluated(2, -0.5, best=True), metrics={"reward": 0.5})
    page = page_of([start, *steps, measured])
    names = [attrs["aria-label"] for tag, attrs in page.tags if tag == "svg"]
    assert (names[:2], names.count("reward")) == (["reward", "loss"], 1)
    assert "evaluation loss at step" not in page.text


def test_html_in_the_data_stays_text(page_of, tmp_path):
    evil = "</pre><script>alert('1')</script><img src=x onerror=alert(2)>"
    records = [dataclasses.replace(START, backend=evil), trained(1)]
    run = write_run(tmp_path / "run", records, RECIPE | {"model": {"name": evil}, evil: evil})
    sample = {"prompt": evil, "before": evil, "after": "7", "expected": "7 "}
    write_json(run.root / "samples.json", [sample])
    for path in (run.data, run.realised, run.plan, run.root / "proof.json"):
        write_json(path, {evil: evil, "list": [{evil: evil}], "part": {evil: {evil: evil}}})
    write_json(run.environment, {"versions": {evil: evil}, "command": [evil]})
    page = page_of(run)
    assert {"script", "img"} & {tag for tag, _ in page.tags} == set()
    assert page.text.count(evil) >= 20
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_samples_are_shown_with_what_was_exact(page_of, tmp_path):
    run = write_run(tmp_path / "run", made.unmeasured_run())
    right = {"prompt": "2 + 2", "before": "5", "after": " 4\n", "expected": "4"}
    wrong = {"prompt": "2 + 3", "before": "5", "after": "6", "expected": "5"}
    open_ended = {"prompt": "Sing", "before": None, "after": "La"}
    write_json(run.root / "samples.json", [right, wrong, open_ended] + [wrong] * 60)
    page = page_of(run)
    assert "Answers exactly as expected: 61 of 62 before, 1 after." in page.text
    assert "13 more in samples.json." in page.text
    assert page.text.count("exact") == 49  # 48 wrong ones that were right before, and one after
    # Invalid unicode does not stop the page.
    (run.root / "samples.json").write_text('[{"prompt": "lone \\ud800", "after": "\\u2028"}]')
    assert "lone ?" in page_of(run).text


RUNNING = "no end is recorded: it is running or was killed (last record 1 min"
NOTHING = "nothing was evaluated on held-out rows."


@pytest.mark.parametrize(
    ("records", "state", "expected"),
    [
        ([], "not started", "Training has not started."),
        ([START], "no end recorded", f"Step 0 of 10 after 0 s; {RUNNING} 30 s old)."),
        (
            [START, trained(1), trained(2)],
            "no end recorded",
            f"Step 2 of 10 after 4.0 s; {RUNNING} 26 s old). Training loss 4.0000 at step 1, "
            f"2.0000 at step 2; {NOTHING}",
        ),
        (
            [START, trained(1), ended(1, reason="interrupted")],
            "interrupted",
            "Interrupted at step 1 of 10 after 2.0 s; it can be resumed. Training loss 4.0000 at "
            f"step 1; {NOTHING}",
        ),
        (
            [START, evaluated(0, 5.0, best=True), trained(1), evaluated(1, 3.0, best=True),
             ended(1, reason="early stop")],
            "early stop",
            "Stopped early at step 1 of 10 after 2.0 s. Evaluation loss 5.0000 at step 0, best "
            "3.0000 at step 1.",
        ),
        (
            [START, trained(1), trained(2, loss=math.nan), trained(3, loss=math.inf), ended(3)],
            "not finite",
            "Finished 3 steps in 6.0 s. The training loss has not been finite since step 2.",
        ),
    ],
)  # fmt: skip
def test_every_kind_of_run_has_a_page(tmp_path, page_of, records, state, expected):
    run = write_run(tmp_path / "a run", records)
    assert verdict(read_history(run), now=START.time + 90) == expected
    page = page_of(run)
    assert (page.text.count(state), page.rows["recipe"]) == (1, [])


def test_the_time_of_a_run_is_that_of_its_parts(page_of, tmp_path):
    again = dataclasses.replace(START, step=1, resumed_from=1, time=START.time + 1_000)
    run = write_run(tmp_path, [START, trained(1), again, trained(2, time=START.time + 1_005)])
    assert read_history(run).seconds == 2 + 5
    parts = [[part, "ddp", "bf16", "2", "16 = 4 x 2 x 2"] for part in "01"]
    assert page_of(run).rows["backend"][1:] == parts


def test_a_checkpoint_that_was_pruned_is_listed_as_removed(page_of, tmp_path):
    run = write_run(tmp_path, whole_run())
    (run.checkpoint(5) / "manifest.json").unlink()
    listed = [row[4:] for row in page_of(run).rows["checkpoints"][1:]]
    assert listed == [["removed", ""], ["kept", "newest"]]


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(3, 12))
def test_ticks_are_few_round_and_inside(low, span, most):
    high = low + span
    marks = ticks(low, high, most)
    slack = 1e-8 * max(abs(low), abs(high), span)
    assert len(marks) <= most
    assert all(low - slack <= mark <= high + slack for mark in marks)
    for before, after in itertools.pairwise(marks):
        apart = f"{after - before:.3e}" if span > 1e-6 * abs(low) else "1.000e"
        assert apart.startswith(("1.000e", "2.000e", "5.000e"))


def test_ticks_of_usual_ranges():
    assert (ticks(0, 10, 6), ticks(0.9, 3.4, 6)) == ([0, 2, 4, 6, 8, 10], [1, 1.5, 2, 2.5, 3])
    assert ticks(1, 300, 5) == [100, 200, 300]


def test_thinning_keeps_every_spike_and_smoothing_is_the_mean_of_a_window():
    points = [(float(step), math.sin(step)) for step in range(10_000)]
    points[1_234] = (1_234.0, 99.0)
    points[5_678] = (5_678.0, -99.0)
    thinned = thin(points, buckets=100)
    assert len(thinned) == 200
    assert {(1_234.0, 99.0), (5_678.0, -99.0)} <= set(thinned)
    assert thinned == sorted(thinned)
    assert thin(points[:200], buckets=100) == points[:200]
    points = [(float(step), float(step % 2)) for step in range(80)]
    smoothed = smooth([*points, (80.0, math.nan)])
    assert len(smoothed) == 80
    assert smoothed[10] == (10.0, 2 / 5)  # steps 8 to 12: 0 1 0 1 0
    assert smoothed[0] == (0.0, 1 / 3)
    assert smoothed[79] == (79.0, 2 / 3)


def test_a_curve_is_drawn_from_corner_to_corner_and_not_without_values():
    curve = Curve("c", [(0, 0.0), (10, math.nan), (20, 1.0)], "smooth")
    drawing = chart("<l>", [curve], show=str).drawing
    assert 'aria-label="&lt;l&gt;"' in drawing
    # From (58, 180 - pad) to (460 - 24, 12 + pad): the pad is 5 % of the values at each end.
    pad = 168 * 0.05 / 1.1
    assert f'points="58.0,{180 - pad:.1f} 436.0,{12 + pad:.1f}"' in drawing
    assert chart("c", [Curve("c", [(0, math.nan)], "smooth")]).drawing == ""


@pytest.mark.parametrize(
    ("records", "dots"),
    [
        (whole_run(), True),
        ([START, trained(1)], False),
        ([START, *many_steps(50)], False),
        ([START, trained(1), trained(2, loss=math.nan)], False),
        ([START, trained(1, loss=math.nan)], False),
    ],
)
def test_the_picture_is_a_png_of_the_stated_size_with_dots_of_evaluations(tmp_path, records, dots):
    run = write_run(tmp_path, records)
    assert plot_loss(run) == run.loss_plot
    assert run.loss_plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = (image.imread(run.loss_plot)[:, :, :3] * 255).round().astype(int)
    assert pixels.shape == (880, 1440, 3)
    found = (pixels == (224, 121, 27)).all(axis=2).sum()
    assert found > 500 if dots else found == 0


def test_a_run_without_a_step_has_no_picture(tmp_path):
    run = write_run(tmp_path, [START])
    assert plot_loss(run) is None
    assert not run.loss_plot.exists()


def front_of(card: Path) -> dict[str, Any]:
    return yaml.safe_load(card.read_text().split("---\n")[1])


def test_the_card_describes_the_run(tmp_path):
    run = write_run(tmp_path / "run", whole_run())
    counts = {"train": {"rows": 80, "tokens": 9_000, "dropped": 2}, "eval": {"rows": 8}}
    write_json(run.data, counts)
    write_json(run.environment, {"python": "3.11.7", "versions": {"torch": "2.13.0"}})
    card = write_card(run, run.final)
    assert card == run.final / "README.md"
    front = front_of(card)
    (measured,) = front.pop("model-index")[0]["results"]
    assert [metric["value"] for metric in measured["metrics"]] == [1.25]
    assert front == {
        "base_model": "acme/tiny-llama",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["finetune", "sft", "qlora"],
        "datasets": ["acme/questions"],
    }
    lines = {
        "# SFT of acme/tiny-llama: QLoRA (NF4), r=16",
        "The weights are those of step 5, which had the best evaluation.",
        "| Trained parameters | 12,345 of 260,032 (4.7 %) |",
        "| Optimizer steps | 10 of 10 |",
        "| optim.lr | `0.0002` |",
        "| `acme/questions` | `messages` | training |",
        "| rows | 80 | 8 |",
        "| dropped | 2 | - |",
        "| training, last step | 10 | 0.4000 |",
        "| held-out rows, best | 5 | 1.2500 |",
        "| torch | `2.13.0` |",
    }
    assert lines - set(card.read_text().splitlines()) == set()
    assert "Nothing was evaluated" not in card.read_text()


def test_a_card_states_that_nothing_was_evaluated_and_names_the_kind_of_an_export(tmp_path):
    run = write_run(tmp_path / "run", made.unmeasured_run())
    text = write_card(run, run.final).read_text()
    assert "**Nothing was evaluated.**" in text
    assert "The weights are those of step 10.\n" in text
    assert "held-out rows, " not in text
    assert "- No generated answers were compared with references.\n" in text
    run = write_run(tmp_path / "whole", whole_run())
    card = write_card(run, tmp_path / "out", kind="merged", step=10)
    assert front_of(card)["library_name"] == "transformers"
    assert "The weights are those of step 10.\n" in card.read_text()
    assert "merged into the unquantized base" in card.read_text()
    assert "PeftModel" not in card.read_text()


def test_what_is_not_on_the_hub_is_not_in_the_cards_metadata(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    data = [
        {"source": str(source), "format": "text"} for source in (tmp_path / "a.jsonl", "b.jsonl")
    ]
    recipe = RECIPE | {"model": {"name": str(folder)}, "data": data}
    card = write_card(write_run(tmp_path / "run", whole_run(), recipe), tmp_path / "out")
    assert {"base_model", "datasets"} & front_of(card).keys() == set()
    assert "for `base`; the base model itself" in card.read_text()


def test_markdown_in_the_record_stays_text(tmp_path):
    evil = "a`b|c](http://x) <b>\n# d"
    recipe = RECIPE | {"model": {"name": evil}, "data": [{"source": evil, "format": evil}]}
    run = write_run(tmp_path / "run", whole_run(), recipe)
    text = write_card(run, tmp_path / "out").read_text()
    assert "| ``a`b\\|c](http://x) <b> # d`` | ``a`b\\|c](http://x) <b> # d`` | training |" in text
    assert "\n# d" not in text
    assert code("`") == "`` ` ``"


def test_pages_name_no_folders_of_the_machine_and_no_secrets(tmp_path):
    token = "hf_" + "a" * 30
    model = {
        "name": str(tmp_path / "home/base"),
        "adapter": str(tmp_path / "home/older"),
        "chat_template": "~/templates/mine.jinja",
        "chat_template_kwargs": {"enable_thinking": False, "key": token, "style": "<b>|`"},
    }
    sources = ["/mnt/secret/a.jsonl", "../private/b.jsonl", f"https://me:{token}@host/c.jsonl",
               "C:\\private\\d.jsonl"]  # fmt: skip
    data = [{"source": source, "format": "text"} for source in sources]
    adapter = RECIPE["adapter"] | {"targets": f"/mnt/{token}"}
    recipe = RECIPE | {"model": model, "data": data, "adapter": adapter}
    run = write_run(tmp_path / "run", whole_run(), recipe)
    card = write_card(run, tmp_path / "out").read_text()
    page = report(run).read_text()
    for text in (card, page):
        for hidden in (str(tmp_path), "/mnt", "private", "templates/", token):
            assert hidden not in text
        for shown in ("a.jsonl", "b.jsonl", "host/c.jsonl", "d.jsonl", "older", "enable_thinking"):
            assert shown in text
    lines = {
        "| Chat template | `enable_thinking=false` |",
        "| Chat template | `key=***` |",
        "| Chat template | `` style=<b>\\|` `` |",
        "| Trained further from | `older` |",
    }
    assert lines - set(card.splitlines()) == set()
    assert "<b>|" not in page


@pytest.mark.parametrize("sections", [{"adapter": {"r": 8}}, {}], ids=["adapter", "model"])
def test_the_code_in_the_card_loads_the_exported_files(sections, run_of, tmp_path, monkeypatch):
    run = copy_of(run_of(**sections), tmp_path / "run")
    card = write_card(run, run.final)
    program = card.read_text().split("```python\n")[1].split("```")[0]
    program += "print('made', output.shape[0])\n"
    monkeypatch.chdir(run.final)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, str(card), "exec"), {})
    assert printed.getvalue().endswith("made 1\n")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "SFT of acme/tiny-llama: QLoRA (NF4), r=16"),
        ({"model": {"name": "gpt2"}}, "SFT of gpt2: LoRA, r=16"),
        (
            {"adapter": {"r": 4, "use_dora": True}, "model": {"name": "a/b"}},
            "SFT of a/b: DoRA, r=4",
        ),
        (
            {"method": "pretrain", "adapter": None, "model": {"config": {"model_type": "llama"}}},
            "Pretrain of llama from scratch: full weights",
        ),
        ({"model": {"name": "/models/big one/"}, "adapter": None}, "SFT of big one: full weights"),
        (
            {"method": "grpo", "model": {"name": "runs/first/final"}, "adapter": None},
            "GRPO of first: full weights",
        ),
    ],
)
def test_a_run_is_named_after_its_recipe(changes, expected):
    assert title(RECIPE | changes) == expected


def test_a_record_that_is_missing_has_a_name_too():
    assert title({}) == "Training of a model: full weights"
    assert (base_model({"model": None}), technique({"adapter": {}})) == ("a model", "full weights")


def test_hub_names_are_distinguished_from_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a/b").mkdir(parents=True)
    assert hub_name("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    names = ["a/b", "data.jsonl", "./x", "/x/y", "a/b/c", "*.json", "", None]
    assert [hub_name(name) for name in names] == [None] * len(names)


def test_json_of_any_shape_becomes_tables():
    assert list(tables({})) == []
    odd = Table([(1,), (json.dumps([2, {"a": 3}]),)], heading="h")
    assert list(tables([1, [2, {"a": 3}]], "h")) == [odd]
    record = {"a": [1, "x"], "b": {"c": {"d_e": 1.5}}, "size_bytes": 2_048, "f": {"g": None}}
    assert list(tables(record)) == [
        Table([("a", "1, x"), ("size bytes", "2.00 KiB")]),
        Table([("d e", 1.5)], heading="b, c"),
        Table([("g", None)], heading="f"),
    ]
