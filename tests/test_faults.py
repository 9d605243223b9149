"""What a rank does to the others: NaN, death, silence. All end in time, with the reason."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import ROOT, Finetune, Tiny, conversations, start, wait_for, write_recipe
from test_backends import FP32, largest, losses
from test_interruption import steps_made, words_of

from finetune.errors import FinetuneError, Interrupted, TrainingFailure
from finetune.launchers.accelerate import lost_worker
from finetune.process import error_report
from finetune.runs.run import Run

BF16 = 2e-2
"""Each engine rounds to 8 bits at other places."""
BAD = 29
"""The row, from 0, with the letter for which the model below has no number."""
LONG = {"max_steps": 4000, "saving": {"every": 5}, "evaluation": {"every": 4000}}


@pytest.fixture(scope="session")
def poisoned(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny model of finite weights whose loss is NaN where there is a Z, and one row with a Z.

    The embedding of Z is so large that the mean that a LayerNorm takes of it is infinite.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("poisoned")
    shutil.copytree(tiny.model, folder / "model")
    llama = AutoConfig.from_pretrained(tiny.model).to_dict()
    sizes = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "vocab_size", "max_position_embeddings", "eos_token_id",
        "pad_token_id", "bos_token_id",
    )  # fmt: skip
    config = AutoConfig.for_model("stablelm", **{name: llama[name] for name in sizes})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    (token,) = AutoTokenizer.from_pretrained(tiny.model).encode("Z")
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = 3e38
    model.save_pretrained(folder / "model")
    rows = conversations(48)
    rows[BAD][0]["content"] = "Z"
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return Tiny(folder / "model", data, tiny.eval_data)


def recipe_of(poisoned: Tiny, **optim: object) -> dict[str, object]:
    return poisoned.fields(
        adapter={"r": 8}, batch={"micro_rows": 1}, saving={"every": 50}, eval_data=[],
        evaluation={"every": None},
        optim={"lr": 5e-3} | optim,
    )  # fmt: skip


def test_a_nan_loss_stops_the_run_and_names_its_row(
    poisoned: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "r.json", recipe_of(poisoned))
    done = finetune("train", recipe, "--precision", "fp32", "--output", tmp_path / "run")
    assert done.status == 1
    step = len(losses(Run(tmp_path / "run"))) + 1
    assert done.stderr == (
        f"error: step {step}: loss nan, gradient norm nan: the step was skipped; it trained on "
        f"{poisoned.data} row {BAD + 1}. Lower optim.lr, fix these rows, or set "
        "optim.on_nonfinite=skip to skip up to optim.max_skipped=10 such steps, and resume\n"
    )


Skipping = Callable[[str, str], Run]


@pytest.fixture(scope="module")
def skipping(
    poisoned: Tiny, finetune: Finetune, tmp_path_factory: pytest.TempPathFactory
) -> Skipping:
    """The run of a backend in a precision that leaves the step of the bad row out."""
    root = tmp_path_factory.mktemp("skipping")

    def run(backend: str, precision: str) -> Run:
        place = root / f"{backend}-{precision}"
        if not place.exists():
            fields = recipe_of(poisoned, on_nonfinite="skip")
            assert finetune(*words_of(poisoned, place, backend, precision, **fields)).status == 0
        return Run(place)

    return run


def slow(*given: str) -> Any:
    return pytest.param(*given, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("backend", "precision"),
    [
        ("ddp", "fp32"),
        slow("fsdp_full_shard", "fp32"),
        slow("zero2_offload", "fp32"),
        slow("zero1", "bf16"),  # DeepSpeed's optimizer of this pair is a class of its own
        slow("zero3", "bf16"),
    ],
)
def test_every_backend_leaves_the_same_step_out(
    poisoned: Tiny, skipping: Skipping, backend: str, precision: str
) -> None:
    alone, together = skipping("single", precision), skipping(backend, precision)
    (skipped,) = alone.read_metrics("skip")
    assert skipped["rows"] == [f"{poisoned.data} row {BAD + 1}"]
    (also,) = together.read_metrics("skip")
    assert (also["step"], also["rows"]) == (skipped["step"], skipped["rows"])
    assert len(losses(alone)) == 5
    apart = FP32 if precision == "fp32" else BF16
    assert largest(losses(alone), losses(together)) < apart


def test_a_nan_evaluation_is_never_the_best(
    poisoned: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    """The rows to be evaluated have the letter; those that are trained do not."""
    fields = recipe_of(poisoned) | {
        "data": [{"source": str(poisoned.eval_data), "format": "messages"}],
        "eval_data": [{"source": str(poisoned.data), "format": "messages"}],
        "evaluation": {"every": 1},
        "max_steps": 3,
    }
    recipe = write_recipe(tmp_path / "r.json", fields)
    done = finetune("train", recipe, "--precision", "fp32", "--output", tmp_path / "run")
    assert done.status == 0, done.output
    run = Run(tmp_path / "run")
    evaluated = [(each["loss"], each["best"]) for each in run.read_metrics("eval")]
    assert evaluated == [(None, False)] * 3
    assert not run.best.exists()
    progress = json.loads((run.checkpoint(3) / "manifest.json").read_text())["progress"]
    assert (progress["best_loss"], progress["best_step"], progress["stale"]) == (None, None, 3)


def test_more_steps_than_allowed_stop_the_run(
    poisoned: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    fields = recipe_of(poisoned, on_nonfinite="skip", max_skipped=1) | {"max_steps": 30}
    recipe = write_recipe(tmp_path / "r.json", fields)
    done = finetune("train", recipe, "--precision", "fp32", "--output", tmp_path / "run")
    assert done.status == 1
    assert "That makes 2 such steps, and optim.max_skipped is 1" in done.stderr
    assert len(list(Run(tmp_path / "run").read_metrics("skip"))) == 1


def ranks(process: "subprocess.Popen[str]") -> dict[int, psutil.Process]:
    """The workers of a launch by their rank."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # a process that ends meanwhile
            environment = child.environ()
            if "RANK" in environment and "train" in child.cmdline():
                found[int(environment["RANK"])] = child
    return found


@pytest.mark.parametrize("backend", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_rank_that_dies_ends_the_others_and_is_named(
    tiny: Tiny, tmp_path: Path, backend: str
) -> None:
    run = Run(tmp_path / "run")
    process = start(words_of(tiny, run.root, backend, **LONG), tmp_path)
    wait_for(lambda: (run.newest() or 0) >= 5, process)
    workers = ranks(process)
    workers[1].send_signal(signal.SIGKILL)
    begun = time.monotonic()
    _, told = process.communicate(timeout=60)
    assert time.monotonic() - begun < 20
    assert process.returncode == 1
    newest = run.newest()
    assert (
        f"rank 1 (process {workers[1].pid} on {os.uname().nodename}) ended without an error message"
        in told
    )
    assert f"the last complete checkpoint is that of step {newest}: continue" in told
    assert "Traceback" not in told
    assert not any(worker.is_running() for worker in workers.values())


def test_the_launcher_names_a_lost_rank_where_no_other_can(tiny: Tiny, tmp_path: Path) -> None:
    """Rank 0 aborts, as in a library whose peer is gone, and leaves no word."""
    run = Run(tmp_path / "run")
    process = start(words_of(tiny, run.root, "ddp", **LONG), tmp_path)
    wait_for(lambda: len(ranks(process)) == 2, process)
    workers = ranks(process)
    for rank, number in ((1, signal.SIGKILL), (0, signal.SIGABRT)):
        workers[rank].send_signal(number)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 1
    assert told.splitlines()[-1] == (
        f"error: rank 1 (process {workers[1].pid} on {os.uname().nodename}) was killed by SIGKILL; "
        "there is no complete checkpoint yet"
    )
    assert "Traceback" not in told


def test_the_only_process_is_named_by_its_signal(tiny: Tiny, tmp_path: Path) -> None:
    words = ["launch", *words_of(tiny, tmp_path / "run")[1:], "--backend", "single"]
    process = start(words, tmp_path)
    found: list[psutil.Process] = []

    def there() -> bool:
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # a process that ends meanwhile
                words = child.cmdline()
                if "train" in words and "finetune.process.loopback" not in words:
                    found.append(child)
        return bool(found)

    wait_for(there, process)
    found[0].kill()
    _, told = process.communicate(timeout=120)
    assert process.returncode == 1
    assert told.splitlines()[-1] == (
        "error: the training process was killed by SIGKILL; there is no complete checkpoint yet"
    )
    assert "Traceback" not in told


def agent_report(*workers: tuple[int, int, int]) -> str:
    """What torch's agent writes of failed workers: rank, exit code and process of each."""
    return "Traceback (most recent call last):\n" + "".join(
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {pid})\n"
        for rank, code, pid in workers
    )


@pytest.mark.parametrize(
    ("workers", "lost"),
    [
        (
            [(0, -15, 7), (1, -9, 8)],
            "rank 1 (process 8 on {host}) was killed by SIGKILL",
        ),
        (
            [(0, -6, 7), (1, -11, 8)],
            "rank 1 (process 8 on {host}) was killed by SIGSEGV",
        ),
        (
            [(0, -6, 7), (1, -15, 8)],
            "rank 0 (process 7 on {host}) was killed by SIGABRT",
        ),
        ([(0, -6, 7), (1, 1, 8)], None),
        ([(0, 75, 7), (1, -15, 8)], None),
    ],
)
def test_the_cause_is_the_worker_that_a_signal_ended(
    workers: list[tuple[int, int, int]], lost: str | None
) -> None:
    expected = lost and lost.format(host=os.uname().nodename)
    assert lost_worker(agent_report(*workers)) == expected


def test_files_of_a_failed_start_do_not_block_the_next_start(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    run.flight_records.mkdir(parents=True)
    (run.flight_records / "rank-00000.json").write_text("{}")
    run.starting_adapter.write_text("{}")
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=1))
    words = ("train", recipe, "--precision", "fp32", "--output", run.root)
    assert finetune(*words, "--resume", "auto").status == 0


@pytest.mark.slow
def test_data_may_take_longer_to_prepare_than_ranks_wait_for_each_other(
    tiny: Tiny, tmp_path: Path
) -> None:
    (tmp_path / "slow_format.py").write_text(
        "import time\n"
        "from finetune.data.formats import Completion, Format\n"
        "def read(row):\n"
        "    time.sleep(0.4)\n"
        "    return Completion(row['ask'], row['say'])\n"
        "SLOW = Format((('ask', 'say'),), read)\n"
    )
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"ask": str(n), "say": "x"}) + "\n" for n in range(32)))
    source = [{"source": str(data), "format": "slow_format:SLOW"}]
    run = Run(tmp_path / "run")
    words = words_of(tiny, run.root, "ddp", data=source, eval_data=[], max_steps=1,
                     evaluation={"every": None})  # fmt: skip
    process = start([*words, "--timeout", "0.1"], tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    assert steps_made(run) == 1


@pytest.mark.slow
def test_a_rank_that_hangs_ends_with_the_others_and_its_collectives_are_kept(
    tiny: Tiny, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    words = [*words_of(tiny, run.root, "ddp", **LONG), "--timeout", "0.2"]
    process = start(words, tmp_path)
    wait_for(lambda: steps_made(run) >= 5, process)
    workers = ranks(process)
    workers[1].send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    _, told = process.communicate(timeout=120)
    assert time.monotonic() - begun < 12 + 30  # the timeout, and the time to find out and to end
    assert process.returncode == 1
    assert f"rank 1 (process {workers[1].pid} on {os.uname().nodename}) no longer responds" in told
    assert "Traceback" not in told
    assert not any(worker.is_running() for worker in workers.values())
    record = json.loads((run.flight_records / "rank-00000.json").read_text())
    assert record["entries"][-1]["profiling_name"].startswith("gloo:")


@pytest.mark.slow
def test_a_rank_that_hangs_in_python_ends_with_the_others_and_its_line_is_named(
    tiny: Tiny, tmp_path: Path
) -> None:
    """A signal makes its main thread sleep for ever; its heartbeat goes on."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, time\n"
        "if 'RANK' in os.environ:\n"
        "    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1e9))\n"
    )
    run = Run(tmp_path / "run")
    words = [*words_of(tiny, run.root, "ddp", **LONG), "--timeout", "0.2"]
    process = start(words, tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    wait_for(lambda: steps_made(run) >= 5, process)
    workers = ranks(process)
    workers[1].send_signal(signal.SIGUSR1)
    begun = time.monotonic()
    _, told = process.communicate(timeout=120)
    assert time.monotonic() - begun < 12 + 30
    assert process.returncode == 1
    late = (
        rf"rank 1 \(process {workers[1].pid} on \S+\) did not join the collective; it was last at "
        r"\w+\.py:\d+ in "
    )
    assert re.search(late, told), told
    assert "Traceback" not in told
    assert not any(worker.is_running() for worker in workers.values())


WAITING = """
import datetime, sys, time, torch
from torch import distributed
from finetune.distributed.heartbeat import is_transport

rank, meeting = int(sys.argv[1]), "file://" + sys.argv[2]
limit = datetime.timedelta(seconds=3)
distributed.init_process_group("gloo", meeting, limit, rank=rank, world_size=2)
distributed.all_reduce(torch.ones(8))
if rank == 1:
    time.sleep(60)  # ended from outside
first = distributed.all_reduce(torch.ones(8), async_op=True)
time.sleep(1)
second = distributed.all_reduce(torch.ones(8), async_op=True)
for work in (second, first):
    try:
        work.wait()
        print("it came")
    except Exception as error:
        print(is_transport(error), error, flush=True)
"""


def test_every_collective_error_after_a_lost_rank_is_recognized(tmp_path: Path) -> None:
    """The second of two that wait together is told less than the first: see `TRANSPORTS`."""
    lost, left = (
        subprocess.Popen(
            [sys.executable, "-c", WAITING, str(rank), str(tmp_path / "meeting")],
            cwd=ROOT, text=True, stdout=subprocess.PIPE,
        )
        for rank in (1, 0)
    )  # fmt: skip
    try:
        told, _ = left.communicate(timeout=60)
    finally:
        lost.kill()
        left.kill()
        lost.communicate()
    second, first = told.splitlines()
    assert second == "True Application timeout caused pair closure"
    assert re.fullmatch(r"True .*Timed out waiting 3000ms for (recv|send) .*", first)


def test_a_run_whose_rank_dies_starts_again_by_itself(tiny: Tiny, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    short = {"max_steps": 60, "saving": {"every": 5}, "evaluation": {"every": 60}}
    words = [*words_of(tiny, run.root, "ddp", **short), "--max-restarts", "2"]
    process = start(words, tmp_path)
    wait_for(lambda: (run.newest() or 0) >= 5, process)
    ranks(process)[1].send_signal(signal.SIGKILL)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    assert [record["step"] for record in run.read_metrics("train")] == list(range(1, 61))
    assert len(list(run.read_metrics("start"))) == 2


def test_an_error_of_an_earlier_attempt_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status.json"
    monkeypatch.setenv(error_report.STATUS_FILE, str(status))
    error_report.forget_earlier_attempts()  # nothing was left
    error_report.write_for_launcher(FinetuneError("first"))
    error_report.forget_earlier_attempts()
    assert json.loads(status.read_text())["problems"] == ["first"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    error_report.forget_earlier_attempts()
    assert not status.exists()


@pytest.mark.slow
def test_workers_do_not_outlive_their_launcher(tiny: Tiny, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    process = start(words_of(tiny, run.root, "ddp", **LONG), tmp_path)
    wait_for(lambda: steps_made(run) >= 5, process)
    workers = list(ranks(process).values())
    process.kill()
    gone, alive = psutil.wait_procs(workers, timeout=60)
    assert (len(gone), alive) == (2, [])
    assert run.newest() == steps_made(run)


def test_the_first_error_of_an_attempt_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status.json"
    monkeypatch.setenv(error_report.STATUS_FILE, str(status))
    for error, told in [
        (Interrupted("by the agent"), "by the agent"),
        (TrainingFailure("the disk is full"), "the disk is full"),
        (TrainingFailure("another rank is lost"), "the disk is full"),
        (Interrupted("by the agent"), "the disk is full"),
    ]:
        assert error_report.write_for_launcher(error)
        assert json.loads(status.read_text())["problems"] == [told]
