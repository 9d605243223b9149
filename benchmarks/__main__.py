"""Run benchmarks on this machine, one part at a time: `python -m benchmarks [PART ...]`."""

import argparse
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import (
    answers,
    checks,
    data,
    heads,
    kernels,
    memory,
    merge,
    peaks,
    saving,
    scaling,
    serving,
    shapes,
    startup,
    training,
    watching,
)
from benchmarks.job import PIPED
from benchmarks.record import ROOT, Circumstances, Result, write

EVERYDAY = ("startup", "training")
"""Parts measured by default."""
ON_GPUS = ("kernels", "shapes", *EVERYDAY)
"""Parts measured by default on GPUs, the most important ones first."""
PARTS = (
    *EVERYDAY, "answers", "checks", "data", "heads", "kernels", "memory", "merge", "merge_8b",
    "peaks", "saving", "scaling", "serving", "shapes", "pipeline",
    "watching",
)  # fmt: skip
RESULTS = Path(__file__).parent / "results"


def main(words: Sequence[str]) -> int:
    if words and words[0] == "kills":
        from benchmarks import kills  # not at module level: it imports torch

        return kills.main(words[1:])
    if words and words[0] == "fuzz":
        from benchmarks.fuzz import command as fuzz

        return fuzz.main(words[1:], RESULTS)
    if words and words[0] == "models":
        from benchmarks import models

        with tempfile.TemporaryDirectory(prefix="finetune-models-") as folder:
            models.write(models.measure(Path(folder)))
        return 0
    if words and words[0] == "peers":
        from benchmarks.peers import command

        return command.main(words[1:], RESULTS)
    parser = build_parser()
    arguments = parser.parse_args(words)
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    command = shlex.join(["python", "-m", "benchmarks", *words])
    suffix = "_gpu" if arguments.gpu else ""
    circumstances = Circumstances.now(command, arguments.note)
    with tempfile.TemporaryDirectory(prefix="finetune-bench-") as scratch:
        until = time.monotonic() + 60 * arguments.minutes
        for part in arguments.parts or (ON_GPUS if arguments.gpu else EVERYDAY):
            left = (until - time.monotonic()) / 60
            if left <= 0:
                print(f"{part}: not begun, after {arguments.minutes:g} minutes", flush=True)
                continue

            def publish(result: Result, name: str = part + suffix) -> Path:
                return write(arguments.to, name, result, circumstances)

            page = publish(measure(part, arguments, Path(scratch), publish, left))
            print(f"\n{page.read_text()}\nwrote {page} and {page.with_suffix('.json').name}\n")
    return 0


def measure(
    part: str, arguments: argparse.Namespace, scratch: Path, publish: Callable[[Result], Path],
    left: float = math.inf,
) -> Result:  # fmt: skip
    """The result of one part; long parts publish intermediate results and stop in time.

    Args:
        part: Name of a part.
        arguments: Arguments of the command line.
        scratch: Folder for temporary files.
        publish: Writes a result, and returns the path of its page.
        left: Remaining time in minutes.
    """
    chosen: Sequence[str] | None = arguments.backends
    match part:
        case "startup":
            return startup.measure(scratch, arguments.repeats)
        case "answers":
            return answers.measure(scratch / part)
        case "checks":
            return checks.measure(scratch / part, arguments.repeats)
        case "data":
            return data.measure(scratch, arguments.rows)
        case "heads":
            return heads.measure()
        case "kernels":
            return kernels.measure(arguments.repeats, arguments.gpu, publish)
        case "memory":
            backends = chosen or memory.BACKENDS
            return memory.measure(scratch / "memory", backends, arguments.to / "memory.json")
        case "merge":
            return merge.measure(scratch / part, arguments.repeats, configurations())
        case "merge_8b":
            return merge.measure(scratch / part, arguments.repeats, None, merge.SHAPE_8B)
        case "peaks":
            earlier = arguments.to / "peaks.json"
            return peaks.measure(scratch / part, earlier, publish, minutes=left)
        case "saving":
            few = ("single", "ddp", "fsdp_full_shard", "zero3")
            return saving.measure(scratch, chosen or few, max(30, arguments.steps), arguments.gpu)
        case "serving":
            return serving.measure(scratch, arguments.repeats)
        case "shapes":
            most = min(left, shapes.MINUTES)
            return shapes.measure(scratch / part, arguments.steps, publish, minutes=most)
        case "scaling":
            backends = chosen or scaling.BACKENDS
            return scaling.measure(scratch / part, backends, arguments.steps)
        case "watching":
            return watching.measure(scratch)
        case "pipeline":
            return scaling.measure(scratch / part, ("pp",), arguments.steps, PIPED)
        case _:
            backends = chosen or training.BACKENDS
            return training.measure(
                scratch, backends, arguments.steps, arguments.gpu, publish, arguments.runs, left
            )


def configurations() -> Path | None:
    """Folder of models' configurations in the test assets, for models that are only planned."""
    folder = Path(os.environ.get("FINETUNE_ASSETS", ROOT.parent / "shared" / "assets")) / "configs"
    return folder if folder.is_dir() else None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    also = f"of {', '.join(PARTS)}; else {' and '.join(EVERYDAY)}; `fuzz`, `kills` and `peers` "
    also += "have options of their own"
    parser.add_argument("parts", nargs="*", metavar="PART", help=also)
    parser.add_argument("--gpu", action="store_true", help="a larger model in bf16, on GPUs")
    parser.add_argument("--rows", type=positive, default=data.ROWS, help="rows of data to prepare")
    parser.add_argument("--backends", nargs="+", choices=memory.BACKENDS, metavar="BACKEND")
    parser.add_argument("--repeats", type=positive, default=5, help="starts of each command")
    parser.add_argument(
        "--runs", type=positive, default=training.RUNS, help="trainings of each backend"
    )
    parser.add_argument(
        "--steps", type=positive, default=10, help=f"timed ones, after {training.WARMUP} others"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin nothing after so long"
    )
    parser.add_argument("--to", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--note", help="a sentence for the record, such as what else was running")
    return parser


def positive(word: str) -> int:
    if (number := int(word)) < 1:
        raise ValueError(f"{number} is not positive")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
