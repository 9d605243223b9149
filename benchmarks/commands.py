"""The command line in a process of its own, as a person starts it."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.record import ROOT

SECONDS = 900
"""A command takes seconds; a machine that others use may take many times as long."""


def finetune(*words: str | Path, cache: Path) -> str:
    """Run `finetune` to its end; prepared rows are kept in `cache`. Returns what it printed.

    Raises:
        RuntimeError: it failed; with the end of its output.
    """
    done = subprocess.run(
        [sys.executable, "-m", "finetune", *map(str, words)],
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
    """Start a module of this repository with its words, and go on; it writes to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=os.environ | {"FINETUNE_CACHE": str(cache), "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
