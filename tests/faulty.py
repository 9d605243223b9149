"""Commands that are interrupted and killed: their words, their processes, and how far they came."""

import contextlib
import subprocess
from pathlib import Path

import psutil
from conftest import Tiny, start, write_recipe

from finetune import Run
from finetune.process import warm
from finetune.verification.proofs.runs import family_of

Process = subprocess.Popen[str]


def words_of(
    tiny: Tiny, place: Path, backend: str = "single", precision: str = "fp32", **sections: object
) -> list[str]:
    """The command that trains in a place; on two processes unless the backend is `single`."""
    recipe = write_recipe(place.with_suffix(".json"), tiny.fields(**sections))
    common = ["--precision", precision, "--output", str(place)]
    if backend == "single":
        return ["train", str(recipe), *common]
    return ["launch", str(recipe), "--backend", backend, "--processes", "2", *common]


def begin(
    tiny: Tiny, run: Run, backend: str = "single", *words: str, **sections: object
) -> Process:
    """Start this command, forked with its imports done."""
    given = words_of(tiny, run.root, backend, **sections)
    return start([*given, "--no-plot", *words], run.root.parent, warm=True)


def steps_made(run: Run) -> int:
    return sum(1 for _ in run.read_metrics("train"))


def started(process: Process) -> list[psutil.Process]:
    """Processes of a command that were started to train, as those that started them know them.

    One that asked the warm interpreter for a fork counts once it has it.
    """
    found = list[psutil.Process]()
    for each in family_of(process.pid):
        with contextlib.suppress(psutil.Error):  # a process that ends meanwhile
            words = each.cmdline()
            known = itself(each) is not each or not any(warm.PREFIX in word for word in words)
            if known and "train" in words and "finetune.process.loopback" not in words:
                found.append(each)
    return found


def ranks(process: Process) -> dict[int, psutil.Process]:
    """The workers of a launch by their rank, as those that started them know them."""
    found = {}
    for each in started(process):
        with contextlib.suppress(psutil.Error):
            variables = each.environ()
            if "RANK" in variables:
                found[int(variables["RANK"])] = each
    return found


def itself(worker: psutil.Process) -> psutil.Process:
    """The process that trains: a fork of the warm interpreter, if that was asked for one."""
    asked = warm.asked_by(worker.cmdline(), worker.pid)
    return worker if asked is None else psutil.Process(asked)
