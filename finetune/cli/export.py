"""`finetune export`: write a run's result as a model for other libraries."""

import argparse
import json
import os
from typing import TYPE_CHECKING

from finetune.cli import options
from finetune.errors import FinetuneError, TrainingFailure
from finetune.exporters import EXPORTERS

if TYPE_CHECKING:
    from finetune.exporters.export import Gate
    from finetune.runs.run import Run

SUMMARY = "export a run's result for other libraries"
EVALUATION = "export"
"""Name of the evaluation written for `--require`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("LLAMA_CPP_DIR")
    about = "checkout of llama.cpp, for gguf and ollama; by default LLAMA_CPP_DIR"
    table = f"""
    run RUN  run directory
    --to PATH  folder to write
    --format NAME  {", ".join(EXPORTERS)}, or module:function of your own exporter
    --merge  the same as --format merged
    --check-rows COUNT=8  rows of the run for the check, or 0
    --gguf-type NAME=q8_0  f32, f16, bf16, q8_0, q4_k_m, ...
    --shard-size SIZE=5GB  maximum size of a weight file
    --step N  checkpoint, instead of the best or last one
    --require BOUNDS  export only if these bounds hold on held-out rows, such as 'exact>=0.8'
    --push OWNER/NAME  hub repository to upload to
    --public  with --push: make it public
    --base NAME  name with which others find the base of an adapter, instead of its path
    --bundle PATH  the run's record as one file, without weights
    """
    options.add(parser, table)
    into = "merge into the base as quantized for training"
    parser.add_argument("--merge-into", choices=("nf4",), help=into)
    parser.add_argument("--llama-cpp", type=options.local_path, default=default, help=about)


def run(arguments: argparse.Namespace) -> int:
    from finetune.checkpoints.copies import bring
    from finetune.runs.run import open_run

    if arguments.merge and arguments.format not in (None, "merged"):
        raise FinetuneError(f"--merge: conflicts with --format {arguments.format}; omit one")
    if arguments.to is None and (arguments.bundle is None or arguments.push is not None):
        raise FinetuneError("--to: name the folder to write, or a --bundle")
    if arguments.public and arguments.push is None:
        raise FinetuneError("--public: only applies to --push; omit it")
    if arguments.require is not None and arguments.to is None:
        raise FinetuneError("--require: only applies to an export; name the folder with --to")
    run = open_run(arguments.run)
    if arguments.step is not None:
        bring(run, arguments.step)
    from finetune.exporters.share import bundle, check_name, push

    if arguments.push is not None:
        check_name(arguments.push)
    if arguments.bundle is not None:
        print(f"wrote {bundle(run, arguments.bundle)}")
    if arguments.to is None:
        return 0
    from finetune.exporters.check import check_lines
    from finetune.exporters.export import MARKER, export

    options.without_bars()
    folder = export(
        run,
        arguments.to,
        arguments.merge,
        arguments.step,
        shard_size=arguments.shard_size,
        format=arguments.format,
        check_rows=arguments.check_rows,
        merge_into=arguments.merge_into,
        llama_cpp=arguments.llama_cpp,
        gguf_type=arguments.gguf_type,
        base=arguments.base,
        gate=None if arguments.require is None else _gate(run, arguments.require),
    )
    written = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    print(*check_lines(written["check"]), sep="\n")
    how = "; serve it there with" if written["serve"] else ""
    print(f"exported to {folder}{how}", *written["serve"], sep="\n  ")
    if arguments.push is not None:
        print(f"uploaded to {push(folder, arguments.push, private=not arguments.public)}")
    return 0


def _gate(run: "Run", text: str) -> "Gate":
    """A function that evaluates a checkpoint on the held-out rows, and raises if it falls short."""
    from finetune.evaluation import gate, results
    from finetune.evaluation.evaluation import NO_COMPARISON, Request, evaluate

    required = tuple(gate.bounds(text))
    compares = any(bound.name == "forgetting" for bound in required)

    def measure(step: int) -> None:
        found = evaluate(
            Request(
                subject=str(run.root),
                against=None if compares else NO_COMPARISON,
                step=step,
                require=required,
            )
        )
        folder = results.folder_of(found, EVALUATION)
        verdicts = results.write(found, folder)["gate"]
        for each in verdicts:
            print(f"{'passed' if each['passed'] else 'FAILED'}     {each['said']}")
        if not all(each["passed"] for each in verdicts):
            raise TrainingFailure(
                f"--require {text}: step {step} falls short, and nothing was exported; "
                f"{folder / results.PAGE} shows its answers"
            )

    return measure
