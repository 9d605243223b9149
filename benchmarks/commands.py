"""The command line in a process of its own, as a person starts it."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.record import ROOT

SECONDS = 900
"""A command takes seconds; a machine that others use may take many times as long."""


def finetune(*words: str | Path, cache: Path, threads: int | None = None) -> str:
    """Run `finetune` to its end; prepared rows are kept in `cache`. Returns what it printed.

    With `threads` each process has so many, else as many as PyTorch or the launcher gives it.

    Raises:
        RuntimeError: it failed; with the end of its output.
    """
    done = subprocess.run(
        [sys.executable, "-m", "finetune", *map(str, words)],
        cwd=ROOT,
        env=os.environ
        | {"FINETUNE_CACHE": str(cache)}
        | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
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
