"""Run the command line in a separate process, as a user does."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.record import ROOT

SECONDS = 900
"""Time limit in seconds: a command takes a few, but much longer on a shared machine."""


def finetune(*words: str | Path, cache: Path, python: str = sys.executable) -> str:
    """Run `finetune` to its end, with `cache` for prepared rows; returns its standard output.

    Args:
        python: the interpreter, such as a warm one.

    Raises:
        RuntimeError: the command failed; the message has the end of its output.
    """
    done = subprocess.run(
        [python, "-m", "finetune", *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"FINETUNE_CACHE": str(cache)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        told = (done.stdout + done.stderr)[-2_000:]
        raise RuntimeError(
            f"finetune {' '.join(map(str, words))}: status {done.returncode}\n{told}"
        )
    return done.stdout


def start(words: list[str], log: Path, cache: Path, threads: int) -> "subprocess.Popen[bytes]":
    """Start a module of this repository in the background, with its output appended to `log`.

    Args:
        words: Name of the module and its arguments.
        log: File for the output.
        cache: Folder for prepared rows.
        threads: OpenMP threads.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=os.environ | {"FINETUNE_CACHE": str(cache), "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
