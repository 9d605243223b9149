"""Start a contender of this toolkit as `finetune train` starts, with the same deferred imports.

`python -m benchmarks.peers.our_start MODULE NAME PLACE`.
"""

import importlib
import sys
from pathlib import Path

from finetune.process.imports import collecting_later, compiling_later, read_models_once
from finetune.process.quiet import growing_segments, quiet


def main(module: str, name: str, place: Path) -> None:
    """Import a module of this folder and call its `main(name, place)`."""
    quiet()
    growing_segments()
    with collecting_later(), compiling_later():
        read_models_once()
        contender = importlib.import_module(f"benchmarks.peers.{module}")
        importlib.import_module("finetune.training.worker")
    contender.main(name, place)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
