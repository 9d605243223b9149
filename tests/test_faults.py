"""What a rank does to the others: NaN, death, silence. All end in time, with the reason."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
import torch
from conftest import (
    FP32,
    ROOT,
    Tiny,
    conversations,
    largest,
    losses,
    slow,
    start,
    wait_for,
    write_recipe,
)
from faulty import begin, itself, ranks, started, steps_made, words_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune import Interrupted, Run, TrainingFailure
from finetune.launchers.accelerate import lost_worker
from finetune.process import error_report

BF16 = 2e-2
"""Each engine rounds to 8 bits at other places."""
BAD = 29
"""The row, from 0, with the letter for which the model below has no number."""
LONG = {"max_steps": 4000, "saving": {"every": 5}, "evaluation": {"every": 4000}}
HOST = os.uname().nodename


@pytest.fixture(scope="session")
def poisoned(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny model of finite weights whose loss is NaN where there is a Z, and one row with a Z.

    The embedding of Z is so large that the mean that a LayerNorm takes of it is infinite.
    """
    folder = tmp_path_factory.mktemp("poisoned")
    shutil.copytree(tiny.model, folder / "model")
    llama = AutoConfig.from_pretrained(tiny.model).to_dict()
    sizes = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "vocab_size max_position_embeddings eos_token_id pad_token_id bos_token_id"
    )
    config = AutoConfig.for_model("stablelm", **{name: llama[name] for name in sizes.split()})
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


def test_a_nan_loss_stops_the_run_and_names_its_row(poisoned, finetune, tmp_path):
    recipe = write_recipe(tmp_path / "r.json", recipe_of(poisoned))
    done = finetune("train", recipe, "--precision", "fp32", "--output", tmp_path / "run")
    assert done.status == 1
    step = len(losses(Run(tmp_path / "run"))) + 1
    assert done.stderr == (
        f"error: step {step}: loss nan, gradient norm nan: the step was skipped; it trained on "
        f"{poisoned.data} row {BAD + 1}. Lower optim.lr, fix these rows, or set "
        "optim.on_nonfinite=skip to skip up to optim.max_skipped=10 such steps, and resume\n"
    )


@pytest.mark.parametrize(
    ("backend", "precision"),
    [
        ("ddp", "fp32"),
        slow("fsdp_full_shard", "fp32"),
        slow("zero1", "bf16"),  # DeepSpeed's optimizer of this pair is a class of its own
        slow("zero3", "bf16"),
    ],
)
def test_every_backend_leaves_the_same_step_out(poisoned, run_of, backend, precision):
    alone, together = (
        run_of(each, "--precision", precision, fields=recipe_of(poisoned, on_nonfinite="skip"))
        for each in ("single", backend)
    )
    (skipped,) = alone.read_metrics("skip")
    assert skipped["rows"] == [f"{poisoned.data} row {BAD + 1}"]
    (also,) = together.read_metrics("skip")
    assert (also["step"], also["rows"]) == (skipped["step"], skipped["rows"])
    assert len(losses(alone)) == 5
    apart = FP32 if precision == "fp32" else BF16
    assert largest(losses(alone), losses(together)) < apart


def test_a_nan_evaluation_is_never_the_best(poisoned, train):
    """The rows to be evaluated have the letter; those that are trained do not."""
    fields = recipe_of(poisoned) | {
        "data": [{"source": str(poisoned.eval_data), "format": "messages"}],
        "eval_data": [{"source": str(poisoned.data), "format": "messages"}],
        "evaluation": {"every": 1},
        "max_steps": 3,
    }
    run = train(fields=fields)
    evaluated = [(each["loss"], each["best"]) for each in run.read_metrics("eval")]
    assert evaluated == [(None, False)] * 3
    assert not run.best.exists()
    progress = json.loads((run.checkpoint(3) / "manifest.json").read_text())["progress"]
    assert (progress["best_loss"], progress["best_step"], progress["stale"]) == (None, None, 3)


def test_more_steps_than_allowed_stop_the_run(poisoned, train, tmp_path):
    fields = recipe_of(poisoned, on_nonfinite="skip", max_skipped=1) | {"max_steps": 30}
    told = r"That makes 2 such steps, and optim\.max_skipped is 1"
    with pytest.raises(TrainingFailure, match=told):
        train(fields=fields)
    assert len(list(Run(tmp_path / "run").read_metrics("skip"))) == 1


def test_a_rank_that_dies_ends_the_others_and_is_named(tiny, tmp_path):
    run = Run(tmp_path / "run")
    process = begin(tiny, run, "ddp", **LONG)
    wait_for(lambda: (run.newest() or 0) >= 5, process)
    workers = [itself(each) for _, each in sorted(ranks(process).items())]
    workers[1].send_signal(signal.SIGKILL)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 1, told
    (at,) = re.findall(
        rf"rank 1 \(process {workers[1].pid} on {HOST}\) ended without an error message; "
        r"the last complete checkpoint is that of step (\d+): continue",
        told,
    )
    assert int(at) in run.steps()[-2:]  # one that rank 0 was writing may be complete a moment later
    assert "Traceback" not in told
    assert not any(worker.is_running() for worker in workers)


def test_the_launcher_names_a_lost_rank_where_no_other_can(tiny, tmp_path):
    """Rank 0 aborts, as in a library whose peer is gone, and leaves no word."""
    process = begin(tiny, Run(tmp_path / "run"), "ddp", **LONG)
    wait_for(lambda: len(ranks(process)) == 2, process)
    workers = ranks(process)
    for rank, number in ((1, signal.SIGKILL), (0, signal.SIGABRT)):  # before the first is missed
        os.kill(workers[rank].pid, number)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 1
    assert told.splitlines()[-1] == (
        f"error: rank 1 (process {workers[1].pid} on {HOST}) was killed by SIGKILL; "
        "there is no complete checkpoint yet"
    )
    assert "Traceback" not in told


def test_the_only_process_is_named_by_its_signal(tiny, tmp_path):
    words = ["launch", *words_of(tiny, tmp_path / "run", **LONG)[1:], "--backend", "single"]
    process = start(words, tmp_path, warm=True)
    wait_for(lambda: bool(started(process)), process)
    started(process)[0].kill()
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
        ([(0, -15, 7), (1, -9, 8)], f"rank 1 (process 8 on {HOST}) was killed by SIGKILL"),
        ([(0, -6, 7), (1, -11, 8)], f"rank 1 (process 8 on {HOST}) was killed by SIGSEGV"),
        ([(0, -6, 7), (1, -15, 8)], f"rank 0 (process 7 on {HOST}) was killed by SIGABRT"),
        ([(0, -6, 7), (1, 1, 8)], None),
        ([(0, 75, 7), (1, -15, 8)], None),
    ],
)
def test_the_cause_is_the_worker_that_a_signal_ended(workers, lost):
    assert lost_worker(agent_report(*workers)) == lost


def test_files_of_a_failed_start_do_not_block_the_next_start(train, tmp_path):
    run = Run(tmp_path / "run")
    run.flight_records.mkdir(parents=True)
    (run.flight_records / "rank-00000.json").write_text("{}")
    run.starting_adapter.write_text("{}")
    train(resume="auto", max_steps=1)
    assert steps_made(run) == 1


@pytest.mark.slow
def test_data_may_take_longer_to_prepare_than_ranks_wait_for_each_other(tiny, tmp_path):
    (tmp_path / "slow_format.py").write_text(
        "import time\n"
        "from finetune.data.formats import Completion, Format\n"
        "def read(row):\n"
        "    time.sleep(0.4)\n"
        "    return Completion(row['ask'], row['say'])\n"
        "SLOW = Format((('ask', 'say'),), read)\n"
    )
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"ask": str(n), "say": "x"}) + "\n" for n in range(20)))
    source = [{"source": str(data), "format": "slow_format:SLOW"}]
    run = Run(tmp_path / "run")
    sections = {"data": source, "eval_data": [], "max_steps": 1, "evaluation": {"every": None}}
    words = [*words_of(tiny, run.root, "ddp", **sections), "--timeout", "0.1"]
    process = start(words, tmp_path, warm=True, PYTHONPATH=f"{tmp_path}:{ROOT}")
    told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    assert steps_made(run) == 1


@pytest.mark.slow
def test_a_rank_that_hangs_ends_with_the_others_and_its_collectives_are_kept(tiny, tmp_path):
    run = Run(tmp_path / "run")
    process = begin(tiny, run, "ddp", "--timeout", "0.1", **LONG)
    wait_for(lambda: steps_made(run) >= 5, process)
    workers = [itself(each) for _, each in sorted(ranks(process).items())]
    workers[1].send_signal(signal.SIGSTOP)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"rank 1 (process {workers[1].pid} on {HOST}) no longer responds" in told
    assert "Traceback" not in told
    assert not any(worker.is_running() for worker in workers)
    record = json.loads((run.flight_records / "rank-00000.json").read_text())
    assert record["entries"][-1]["profiling_name"].startswith("gloo:")


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


@pytest.mark.slow
def test_every_collective_error_after_a_lost_rank_is_recognized(tmp_path):
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


def test_a_run_whose_rank_dies_starts_again_by_itself(tiny, tmp_path):
    run = Run(tmp_path / "run")
    short = {"max_steps": 25, "saving": {"every": 5}, "evaluation": {"every": 25}}
    process = begin(tiny, run, "ddp", "--max-restarts", "2", **short)
    wait_for(lambda: (run.newest() or 0) >= 5, process)
    itself(ranks(process)[1]).send_signal(signal.SIGKILL)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    assert [record["step"] for record in run.read_metrics("train")] == list(range(1, 26))
    assert len(list(run.read_metrics("start"))) == 2


def test_the_first_error_of_an_attempt_is_reported_and_forgotten_by_the_next(tmp_path, monkeypatch):
    status = tmp_path / "status.json"
    monkeypatch.setenv(error_report.STATUS_FILE, str(status))
    error_report.forget_earlier_attempts()  # nothing was left
    for error, told in [
        (Interrupted("by the agent"), "by the agent"),
        (TrainingFailure("the disk is full"), "the disk is full"),
        (TrainingFailure("another rank is lost"), "the disk is full"),
        (Interrupted("by the agent"), "the disk is full"),
    ]:
        assert error_report.write_for_launcher(error)
        assert json.loads(status.read_text())["problems"] == [told]
    error_report.forget_earlier_attempts()
    assert json.loads(status.read_text())["problems"] == ["the disk is full"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    error_report.forget_earlier_attempts()
    assert not status.exists()


@pytest.mark.slow
def test_workers_do_not_outlive_their_launcher(tiny, tmp_path):
    run = Run(tmp_path / "run")
    process = start(words_of(tiny, run.root, "ddp", **LONG), tmp_path)
    wait_for(lambda: steps_made(run) >= 5, process)
    workers = list(ranks(process).values())
    process.kill()
    gone, alive = psutil.wait_procs(workers, timeout=60)
    assert (len(gone), alive) == (2, [])
    assert run.newest() == steps_made(run)
