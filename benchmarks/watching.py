"""Processor time of a board whose clients read the events of a run, against that of the run."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.job import SMALL, write_job
from benchmarks.record import ROOT, Result
from finetune.runs.run import Run

CLIENTS, STEPS = 10, 150
HOW = (
    f"`finetune board` and {CLIENTS} clients that read the events of one run on one process, from "
    "its first step to its end; then the same run alone. Processor time of the board and of the "
    "run's processes in between."
)


def measure(folder: Path) -> Result:
    """Train twice, once watched."""
    recipe = write_job(folder / "job", SMALL, STEPS)
    runs = folder / "runs"
    runs.mkdir()
    words = [sys.executable, "-m", "finetune", "board", str(runs), "--port", "0"]
    given = os.environ | {"FINETUNE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    board = subprocess.Popen(words, cwd=ROOT, env=given, stdout=subprocess.PIPE, text=True)
    assert board.stdout is not None
    address = board.stdout.readline().split(": ", 1)[1].partition("/?token=")[0]
    try:
        watched = Run(runs / "watched")
        training = _train(recipe, watched, given)
        while next(watched.read_metrics("train"), None) is None:
            time.sleep(0.2)
        for _ in range(CLIENTS):
            threading.Thread(target=_read, args=(address,), daemon=True).start()
        first = _seconds(board.pid), _seconds(training.pid)
        last = first
        while training.poll() is None:
            now = _seconds(board.pid), _seconds(training.pid)
            last = now if now[1] >= last[1] else last  # an ended process is no longer counted
            time.sleep(0.5)
        memory = psutil.Process(board.pid).memory_info().rss
    finally:
        board.terminate()
        board.wait()
    alone = Run(runs / "alone")
    _train(recipe, alone, given).wait()
    equal = _losses(watched) == _losses(alone)
    taken = {"board_seconds": last[0] - first[0], "run_seconds": last[1] - first[1]}
    share = taken["board_seconds"] / taken["run_seconds"]
    values = {**taken, "share": share, "losses_are_equal": equal, "memory_bytes": memory}
    table = [
        ["clients", "board", "run", "share", "losses of the run alone"],
        [str(CLIENTS), *(f"{each:.2f} s" for each in taken.values()), f"{share:.2%}",
         "equal to the bit" if equal else "others"],
    ]  # fmt: skip
    return Result("A board beside a run", HOW, values, table, [])


def _train(recipe: Path, run: Run, given: dict[str, str]) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "finetune", "launch", str(recipe), "--backend", "single"]
    words += ["--precision", "fp32", "--no-plot", "--output", str(run.root)]
    return subprocess.Popen(words, cwd=ROOT, env=given, stdout=subprocess.DEVNULL)


def _read(address: str) -> None:
    with httpx.stream("GET", f"{address}/events?run=watched", timeout=None) as answer:
        for _ in answer.iter_lines():
            pass


def _seconds(process: int) -> float:
    """Processor time of a process, of what it waited for, and of those below it that live."""
    root, seconds = psutil.Process(process), 0.0
    for each in (root, *root.children(recursive=True)):
        try:
            times = each.cpu_times()
        except psutil.Error:
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def _losses(run: Run) -> list[float]:
    return [row["loss"] for row in run.read_metrics("train")]
