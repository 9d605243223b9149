"""Measure this machine: how long the command line takes to start, and what each backend does."""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import memory, startup, training
from benchmarks.record import Circumstances, write

EVERYDAY = ("startup", "training")
"""What is measured when nothing is named."""
PARTS = (*EVERYDAY, "memory")
RESULTS = Path(__file__).parent / "results"


def main(words: Sequence[str]) -> int:
    parser = build_parser()
    arguments = parser.parse_args(words)
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    command = shlex.join(["python", "-m", "benchmarks", *words])
    suffix = "_gpu" if arguments.gpu else ""
    with tempfile.TemporaryDirectory(prefix="finetune-bench-") as scratch:
        for part in arguments.parts or EVERYDAY:
            circumstances = Circumstances.now(command, arguments.note)
            if part == "startup":
                result = startup.measure(Path(scratch), arguments.repeats)
            elif part == "memory":
                chosen = arguments.backends or training.BACKENDS
                result = memory.measure(Path(scratch) / "memory", chosen)
            else:
                chosen, steps = arguments.backends or training.BACKENDS, arguments.steps
                result = training.measure(Path(scratch), chosen, steps, arguments.gpu)
            page = write(arguments.to, part + suffix, result, circumstances)
            print(f"\n{page.read_text()}\nwrote {page} and {page.with_suffix('.json').name}\n")
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    also = f"of {', '.join(PARTS)}; else {' and '.join(EVERYDAY)}"
    parser.add_argument("parts", nargs="*", metavar="PART", help=also)
    parser.add_argument("--gpu", action="store_true", help="a larger model in bf16, on GPUs")
    parser.add_argument("--backends", nargs="+", choices=training.BACKENDS, metavar="BACKEND")
    parser.add_argument("--repeats", type=positive, default=5, help="starts of each command")
    parser.add_argument(
        "--steps", type=positive, default=10, help=f"timed ones, after {training.WARMUP} others"
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
