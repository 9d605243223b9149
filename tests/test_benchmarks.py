"""The benchmarks run, and their record says what was measured, where, and by which command."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import pytest
import torch
from conftest import ROOT, gpus_are_here, run_command, warm_python

from benchmarks import kernels, scaling, shapes
from benchmarks.job import SMALL
from benchmarks.kernels import Case, distance, tabulate, timed
from benchmarks.peers import command, report, workload
from benchmarks.peers.ours import packs, singles
from benchmarks.peers.race import race
from benchmarks.peers.turns import digest, documents
from benchmarks.record import Result
from benchmarks.startup import COMMANDS
from benchmarks.training import BACKENDS, add_ratios
from finetune.data.rows.order import rows_of_step

MACHINE = {"devices", "processor", "cores", "memory_bytes", "load_average", "platform"}
MADE_BY = {"command", "commit", "versions", "python", "started", "note"}
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a benchmark starts has its imports done: its numbers are not the subject."""
    if not gpus_are_here():
        monkeypatch.setattr(sys, "executable", warm_python())


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_quick_benchmark_writes_its_record(tmp_path):
    words = "startup training data --rows 300 --repeats 1 --steps 2 --backends single --runs 1"
    line = [sys.executable, "-m", "benchmarks", *words.split(), "--note", "Only a test."]
    run_command([*line, "--to", str(tmp_path)], tmp_path / "cache", cwd=ROOT).passed()
    found: dict[str, Any] = {}
    for name in ("startup", "training", "data"):
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert record.keys() == MACHINE | MADE_BY | {"results"}
        assert record["command"].startswith("python -m benchmarks startup training data ")
        found[name] = record["results"]
    assert found["startup"].keys() == {*COMMANDS, "first step"}
    for value in found["startup"].values():
        assert value["starts"] == 1
        assert 0 < value["best_seconds"] == value["median_seconds"]
    single, prepared = found["training"]["backends"]["single"], found["data"]
    assert single["processes"] == 1
    assert single["tokens_per_second_of_single"] == single["peak_memory_bytes_of_single"] == 1
    assert single["tokens_per_second_of_ddp"] is None
    # Every row is cut to 128 tokens, so that a step is 16 x 128 tokens whatever the backend; with
    # two steps the median is their mean, and the rates are 1/x.
    assert single["tokens_per_second"] >= 0.999 * 16 * 128 / single["step_seconds"]
    assert prepared["rows"] == 300
    assert prepared["rows_per_second"] == 300 / prepared["seconds"]
    assert prepared["tokens"] == round(300 * prepared["mean_tokens"])
    for name in ("startup", "training"):
        page = (tmp_path / f"{name}.md").read_text()
        assert "- Only a test." in page
        assert "| `" in page


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_shape_is_measured_with_its_plan_and_kept_when_the_next_fails(tmp_path):
    tiny = shapes.llama(64, 128, 2, 8, 2_000)
    wrong = {**tiny, "vocab_size": 8}  # less than its tokenizer has
    cases = (
        shapes.Case("tiny, LoRA", tiny, True, tokens=256, profiled=True, expected="none"),
        shapes.Case("wrong", wrong, True, tokens=256),
    )
    published: list[Result] = []
    found = shapes.measure(tmp_path, 2, published.append, cases)
    assert list(found.values["cases"]) == ["tiny, LoRA"]
    tiny_found = found.values["cases"]["tiny, LoRA"]
    assert tiny_found["tokens_per_second"] > 0
    assert tiny_found["planned_step_seconds"] > 0
    assert len(published) == 2
    assert published[0].table == found.table
    named = [remark.partition(":")[0] for remark in found.remarks]
    assert named == ["wrong", "tiny, LoRA, one step by kind of work"]
    assert sum(tiny_found["profile_seconds"].values()) > 0
    late = shapes.measure(tmp_path, 2, published.append, cases, minutes=-1)
    assert late.remarks == [f"{case.name}: not begun, after -1 minutes" for case in cases]


@pytest.mark.slow
def test_two_processes_are_compared_with_one(tmp_path):
    tiny = dataclasses.replace(SMALL, hidden_size=64, layers=2, rows=8, length=64)
    found = scaling.measure(tmp_path, ["ddp"], turns=1, shape=tiny, burst=1)
    turns, measured = found.values["turns"], found.values["backends"]
    single, ddp = measured["single"], measured["ddp"]
    assert (single["processes"], single["speedup_of_turns"]) == (1, [1])
    assert (ddp["processes"], ddp["parameters"]) == (2, single["parameters"])
    assert ddp["speedup_of_turns"] == [turn["single"] / turn["ddp"] for turn in turns]
    assert 0.1 < measured["matrix products"]["speedup"] < 4  # of two on one core, or on two
    assert ddp["loss"] == pytest.approx(single["loss"], rel=5e-3)  # bf16
    assert [row[:2] for row in found.table[1:]] == [
        ["`single`", "1"], ["`ddp`", "2"], ["matrix products", "2"],
    ]  # fmt: skip
    lines = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(tmp_path) in " ".join(line)]  # all are ended


def test_ratios_are_to_the_references_of_the_same_session():
    rates = {"single": (100.0, 40), "ddp": (150.0, 50), "zero2": (75.0, 30)}
    measured: dict[str, Any] = {
        name: {"tokens_per_second": rate, "peak_memory_bytes": peak}
        for name, (rate, peak) in rates.items()
    }
    add_ratios(measured)
    assert measured["zero2"]["tokens_per_second_of_single"] == 0.75
    assert measured["zero2"]["tokens_per_second_of_ddp"] == 0.5
    assert measured["zero2"]["peak_memory_bytes_of_ddp"] == 0.6


def committed(name: str) -> dict[str, Any]:
    """A record whose page names its commit."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    assert record["commit"] in (RESULTS / f"{name}.md").read_text()
    return record["results"]


def test_the_committed_results_cover_every_backend_and_hold():
    assert committed("training")["backends"].keys() == set(BACKENDS)
    results = committed("memory")
    assert {case["backend"] for case in results.values()} == {*BACKENDS, "zero3_nvme"}
    assert {case["method"] for case in results.values()} == {"full", "lora", "qlora"}
    assert {name for name, case in results.items() if abs(case["error"]) > 0.1} == set()
    results = committed("kills")
    assert results["kills"] >= 200
    assert results["wrong"] == []
    assert all(each["right"] == each["runs"] for each in results["backends"].values())
    for name, case in committed("kernels")["cases"].items():
        for_memory = "gated unit" in name or "activation" in name
        assert case["gain"] > (0.7 if for_memory else 1), name
        assert case["difference"] < 2e-2, name  # bf16 keeps 8 bits, through six layers


def test_a_kernel_is_timed_in_turns_and_compared():
    calls: list[str] = []

    def work(name: str, values: list[float]) -> Callable[[], dict[str, torch.Tensor]]:
        def run() -> dict[str, torch.Tensor]:
            calls.append(name)
            return {"input": torch.tensor(values)}

        return run

    found = timed(Case("x", work("plain", [3.0, 4.0]), work("ours", [3.0, 4.5])), repeats=2)
    assert calls == ["plain", "ours"] * 5  # two of warmup, two timed, one compared
    assert found["difference"] == pytest.approx(0.1)
    assert found["gain"] == found["plain_seconds"] / found["ours_seconds"]
    assert distance({"a": torch.ones(2)}, {"a": torch.ones(2)}) == 0
    # A third kernel takes its turn and has its column.
    calls.clear()
    ticks = iter(range(100))
    third = Case("y", work("plain", [1.0]), work("ours", [1.0]), work("liger", [1.0]))
    three = timed(third, repeats=2, clock=lambda: next(ticks))
    assert calls == ["plain", "ours", "liger"] * 4 + ["plain", "ours", "plain", "liger"]
    assert (three["liger_seconds"], three["liger_difference"]) == (1, 0)
    both = tabulate({"x": found, "y": three})
    assert both[0][-2:] == ["Liger ms", "its difference"]
    assert (both[1][-2:], both[2][-2:]) == (["", ""], ["1000.0", "0.0e+00"])
    assert "Liger ms" not in tabulate({"x": found})[0]


def test_kernels_are_published_one_by_one(monkeypatch):
    """What was measured is kept when the benchmark is interrupted."""

    def cases(_: kernels.Setting) -> Iterator[Case]:
        for name in ("first", "second"):
            yield Case(name, *[lambda: {"input": torch.ones(2)}] * 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "cases", cases)
    published: list[Result] = []
    with pytest.raises(KeyboardInterrupt):
        kernels.measure(1, False, published.append)
    assert [list(each.values["cases"]) for each in published] == [["first"], ["first", "second"]]
    assert [len(each.table) for each in published] == [2, 3]


# The peers: what is given, what is compared, what is told.


def test_rows_are_as_long_and_as_labelled_as_those_of_gsm8k():
    sizes = sorted(workload.lengths(workload.Job(1000, 1)))
    assert (sizes[499], sizes[500], round(sum(sizes) / 1000)) == (154, 154, 163)
    assert 325 < sizes[989] <= 331 <= sizes[990]
    job = workload.Job(8, 8)
    rows = workload.make_rows(job)
    assert rows == workload.make_rows(job)
    assert [len(ids) for ids, _ in rows] == workload.lengths(job)
    labelled = sum(label != -100 for _, labels in rows for label in labels)
    assert (labelled, sum(len(ids) for ids, _ in rows)) == (6442, 10389)  # 62 %
    other = workload.make_rows(workload.Job(8, 8, seed=1))
    assert sorted(len(ids) for ids, _ in other) == sorted(len(ids) for ids, _ in rows)
    assert not {tuple(ids) for ids, _ in other} & {tuple(ids) for ids, _ in rows}
    for ids, labels in rows:
        assert labels[0] == -100
        assert all(label in (-100, one) for one, label in zip(ids, labels, strict=True))
        assert 3 <= min(ids) <= max(ids) < 49152


def test_a_workload_has_the_lengths_that_it_names():
    tail = sorted(workload.lengths(workload.Job(1000, 1, name="tail")))
    assert (tail[424], tail[425]) == (154, 154)  # the median of the 85 %
    assert (sum(size > 331 for size in tail), tail[-1]) == (158, 2978)
    by_step = workload.lengths(workload.Job(4, 5, name="tail"))
    steps = [by_step[start : start + 4] for start in range(0, 20, 4)]
    assert steps == [sorted(step) for step in steps]  # micro-batches of about one length
    assert sorted(steps) != steps
    long = workload.lengths(workload.Job(100, 1, name="long"))
    assert 1700 < min(long) < 1750
    assert 6500 < max(long) < 6600
    alpaca = sorted(workload.lengths(workload.Job(1000, 1, name="alpaca")))
    assert (alpaca[0], alpaca[500], alpaca[900], alpaca[-1]) == (18, 142, 405, 749)
    prompts = workload.make_rows(workload.Job(8, 8, name="prompt_heavy"))
    labelled = sum(label != -100 for _, labels in prompts for label in labels)
    assert labelled / sum(len(ids) for ids, _ in prompts) == pytest.approx(0.05, abs=0.002)


def test_documents_are_read_back_from_padded_and_from_packed_inputs():
    expected = sorted(digest(*row) for row in [([5, 6, 7], [-100, 6, 7]), ([8, 9], [-100, 9])])
    padded = documents(
        torch.tensor([[5, 6, 7], [8, 9, 0]]),
        torch.tensor([[-100, 6, 7], [-100, 9, -100]]),
        mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
    )
    packed = documents(
        torch.tensor([[8, 9, 5, 6, 7]]),
        torch.tensor([[8, 9, -100, 6, 7]]),  # the first label of a document is never used
        positions=torch.tensor([[0, 1, 0, 1, 2]]),
    )
    assert sorted(digest(*each) for each in padded) == expected
    assert sorted(digest(*each) for each in packed) == expected


def test_ours_takes_the_documents_of_each_step_in_one_pack_and_as_shipped_its_rows():
    rows = workload.make_rows(workload.Job(3, 4))
    made, shipped = packs(rows, size=3, seed=0), singles(rows, seed=0)
    for step in range(4):
        expected = rows[3 * step :][:3]
        (index,) = rows_of_step(step, 4, 1, seed=0)
        taken = [made.documents.document(int(number)) for number in made.numbers(int(index))]
        assert [ids.tolist() for ids, _ in taken] == [ids for ids, _ in expected]
        for (_, trained), (_, labels) in zip(taken, expected, strict=True):
            assert trained.tolist() == [label != -100 for label in labels]
        alone = [shipped.row(int(number))[0] for number in rows_of_step(step, 12, 3, seed=0)]
        assert [ids.tolist() for ids in alone] == [ids for ids, _ in expected]


def answer(seconds: float, loss: float | None, given: list[workload.Row]) -> dict[str, Any]:
    named = sorted(digest(*row) for row in given)
    return {
        "seconds": seconds, "cpu_seconds": 2 * seconds, "cpu_seconds_since_start": 10 * seconds,
        "seconds_since_start": 5 * seconds,
        "peak_bytes": round(seconds * 2**20), "loss": loss, "documents": named,
    }  # fmt: skip


Steps = list[list[workload.Row]]


def raced(seconds: Sequence[float], loss: float | None, steps: Steps) -> list[dict[str, Any]]:
    """The answers of a contender, one a step."""
    return [answer(each, loss, given) for each, given in zip(seconds, steps, strict=True)]


def four_steps(name: str = "short") -> tuple[workload.Job, list[workload.Row], Steps]:
    """A job of four steps of two rows, its rows, and those of each step."""
    job = workload.Job(rows=2, steps=4, name=name)
    rows = workload.make_rows(job)
    return job, rows, [workload.of_step(rows, step, 2) for step in range(4)]


def test_a_race_compares_the_same_rows_step_by_step():
    job, rows, taken = four_steps()
    race = {
        "trainer": raced((9, 9, 4, 8), 10.0, taken),
        "ours": raced((9, 9, 2, 2), 10.01, taken),
        "products": raced((1, 1, 1, 1), None, [[]] * 4),
        "ours_lora": raced((9, 9, 9, 9), 9.0, taken),  # of a base that is not rounded
        "trl": raced((8, 8, 8, 8), 10.03, [rows[1:3]] * 4),
    }
    found = report.result([race], rows, job, threads=1, remarks=["LLaMA-Factory was not there"])
    ours, trl = (found.values["contenders"][name] for name in ("ours", "trl"))
    assert (ours["of_trainer"], ours["of_products"]) == (3.0, 0.5)  # of 2 and 4; of 1/2 and 1/2
    assert (trl["of_trainer"], trl["ours_of_it"]) == (0.75, 4.0)
    counts = [sum(len(ids) for ids, _ in each) for each in taken]
    assert ours["tokens_per_second"] == (counts[2] + counts[3]) / 8  # the mean of two rounds
    missing = ((1, 1), (2, 1), (3, 2), (4, 2))
    others = [f"step {step}: {n} documents missing, {n} others instead" for step, n in missing]
    assert found.values["differences"] == {
        "trainer": [], "ours": [], "ours_lora": [],
        "trl": [*others, "first loss 10.0300, not 10.0000"],
    }  # fmt: skip
    last = {row[0]: row[1:] for row in found.table}
    assert last["**finetune**, packed"][1:5] == ["3.00x", "", "", "0.50"]
    assert last["**finetune**, packed"][-4:] == ["45.0", "90.0", "10.0100", "yes"]
    assert last["TRL SFTTrainer, defaults"][-1] == "no"
    assert found.remarks[0] == "LLaMA-Factory was not there"


def test_steps_of_which_some_have_long_rows_are_compared_together():
    job, rows, taken = four_steps("tail")
    seconds = {"trainer": (9, 9, 4, 9), "ours": (9, 9, 1, 3)}
    race = {name: raced(spent, 10.0, taken) for name, spent in seconds.items()}
    found = report.result([race], rows, job, threads=1, remarks=[])
    ours = found.values["contenders"]["ours"]
    assert ours["of_trainer"] == 13 / 4  # the median of the steps is 3.5
    assert ours["tokens_per_second"] == sum(len(ids) for ids, _ in taken[2] + taken[3]) / 8
    assert "rates are of 2 steps together after 2 others" in found.how


def test_steps_of_other_rows_are_compared_by_the_tokens_of_a_whole_epoch():
    job, rows, taken = four_steps()
    by_length = sorted(rows, key=lambda row: -len(row[0]))
    grouped = [by_length[start : start + 2] for start in range(0, 8, 2)]
    race = {
        "trainer_grouped": raced((9, 9, 6, 2), 9.0, grouped),
        "ours_shipped": raced((9, 9, 1, 3), 10.0, taken),
    }
    found = report.result([race], rows, job, threads=1, remarks=[])
    assert found.values["differences"] == {"trainer_grouped": [], "ours_shipped": []}
    counts = [sum(len(ids) for ids, _ in each[2] + each[3]) for each in (grouped, taken)]
    rates = counts[0] / 16, counts[1] / 8
    contenders = found.values["contenders"]
    assert contenders["trainer_grouped"]["tokens_per_second"] == rates[0]
    assert contenders["trainer_grouped"]["shipped_of_it"] == rates[1] / rates[0]
    race["trainer_grouped"][3]["documents"] = race["trainer_grouped"][2]["documents"]
    found = report.result([race], rows, job, threads=1, remarks=[])
    assert found.values["differences"]["trainer_grouped"] == ["2 documents missing, 2 too many"]


def test_rows_of_a_file_are_raced(tmp_path):
    job = workload.Job(2, 2)
    path = tmp_path / "mine.jsonl"
    lines: list[dict[str, Any]] = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}]
    lines += [{"input_ids": [8, 9]}] * 4
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = ([8, 9], [8, 9])
    assert workload.rows_of(path, job) == [([5, 6, 7], [-100, 6, 7]), whole, whole, whole]
    with pytest.raises(ValueError, match="5 rows, expected 6 for 2 steps of 3"):
        workload.rows_of(path, workload.Job(3, 2))
    for broken, told in (
        ('{"text": "hello"}', "line 1: no row of `input_ids`"),
        ('{"input_ids": [5, 6], "labels": [5]}', "line 1: 1 labels of 2 ids"),
        ('{"input_ids": [5, 49152]}', "line 1: id 49152, expected 3 to 49151"),
        ('{"input_ids": [5]}', "line 1: 1 tokens, expected at least 2"),
    ):
        path.write_text(broken)
        with pytest.raises(ValueError, match=told):
            workload.rows_of(path, job)


def test_a_failed_contender_is_reported_and_the_others_continue(tmp_path):
    ready = "print('{\"ready\": true}', flush=True); "
    answer = {"seconds": 1, "cpu_seconds": 1}
    told = json.dumps(answer)
    codes = {
        "steady": f"{ready}import sys; [print('{told}', flush=True) for _ in sys.stdin]",
        "broken": f"{ready}input(); raise ValueError('no such layer')",
        "absent": "raise ImportError('no module')",
    }
    commands = {name: [sys.executable, "-c", code] for name, code in codes.items()}
    answers, lost = race(commands, tmp_path, threads=1, gpu=False, rounds=range(2, 3))
    assert answers == {"steady": [answer] * 3}
    steady = {"steady": commands["steady"]}
    short, _ = race(steady, tmp_path, 1, gpu=False, rounds=range(2, 9), minutes=0)
    assert len(short["steady"]) == 2  # as few as are asked for, where the time is over
    assert lost == {"broken": "ValueError: no such layer", "absent": "ImportError: no module"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--peers axolotl", "no peer is called axolotl; known: ours_shipped, "),
        ("--gpu --peers ours_malloc", "no peer is called ours_malloc; known: ours_sh"),
        ("--workload short,tiny", "no workload is called tiny; known: short, tail, long, "),
        ("--workload all --rows 3", "--rows: micro-batches of tail do not divide them"),
        ("--steps 0", "rows, steps and threads are at least 1"),
        ("--seed -1", "--seed is at least 0"),
        ("--rows-file nothing.jsonl", "--rows-file: "),
    ],
)
def test_an_impossible_race_is_refused(words, told, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(words.split(), tmp_path)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


LATER = ("unsloth", "ours_lora", "ours_malloc", "ours_eager", "ours_shipped", "trainer_grouped")
OTHERS = ("trainer", "trl", "trl_packing", "llamafactory", "ours_eager", "ours_lora", "products")


def test_the_committed_races_were_on_the_same_rows_and_are_in_the_document():
    shown = (ROOT / "docs/performance.md").read_text()
    record = json.loads((RESULTS / "peers.json").read_text())
    assert record["results"]["contenders"].keys() >= set(report.TITLES) - set(LATER)
    assert record["command"] in shown
    for figures in record["results"]["contenders"].values():
        assert f"| {figures['tokens_per_second']:,.0f} | {figures['of_trainer']:.2f}x |" in shown
    for page in RESULTS.rglob("peers*.json"):
        found = json.loads(page.read_text())["results"]
        assert not any(found["differences"].values()), page
        raced = found["contenders"]
        ratios = [report.times(raced.get(name, {}).get("ours_of_it")) for name in OTHERS]
        memory = raced["ours"]["peak_bytes"] / raced["trainer"]["peak_bytes"]
        cells = " | ".join([*ratios, f"{memory:.2f}"])
        place = page.with_suffix(".md").relative_to(ROOT)
        assert f"](../{place}) | {cells} |" in shown, page
