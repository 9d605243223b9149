"""The command line: each verb parses its words, calls the function of its name, and prints.

Verbs that need torch import it inside, so that `list`, `show` and `plan` answer at once.
"""

import argparse
import atexit
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from finetune.cli import options
from finetune.errors import FinetuneError, TrainingFailure, did_you_mean, of_a_file
from finetune.process.quiet import quiet
from finetune.process.streams import outlast_readers

if TYPE_CHECKING:
    from finetune.checkpoints.resume import Resume

READER_GONE = 141
"""Exit status where the reader of an answer has gone before its end, as shells tell of SIGPIPE."""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status.

    That is 0, 1 (training failed), 2 (a person's mistake), 75 (interrupted, and saved) or 141 (the
    reader of an answer has gone).
    """
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(_spell_out_resume(words))
    _sort_out(arguments, unknown)
    quiet()
    if arguments.verb in (train_recipe, launch_recipe, prove_recipe, export_run, run_quickstart):
        outlast_readers()
    try:
        return arguments.verb(arguments)
    except FinetuneError as error:
        return _tell(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return READER_GONE
    except OSError as error:
        problem = of_a_file(error)
        if problem is None:
            raise
        return _tell((FinetuneError if error.filename else TrainingFailure)(problem))


def _tell(error: FinetuneError) -> int:
    from finetune.process import error_report as last_words

    return last_words.tell(error)


def run() -> NoReturn:
    """`main` as a process of its own, which ends without taking the interpreter down.

    While Python 3.11 is taken down, a thread that comes back from a library and asks for Python's
    lock is unwound; C++ below it then aborts the process ("terminate called without an active
    exception"), and a rank whose work is done and saved would count as failed. torch's store,
    gloo and their like have such threads.
    """
    status = main()
    threading._shutdown()  # ends pools of threads, and waits for threads that are not daemons
    atexit._run_exitfuncs()
    with contextlib.suppress(ValueError):  # it is closed
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            status = status or READER_GONE
        except OSError as error:
            status = status or 1
            with contextlib.suppress(OSError):
                print(f"error: standard output: {error.strerror}", file=sys.stderr)
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
        sys.stderr.flush()
    os._exit(status)


def _spell_out_resume(words: Sequence[str] | None) -> list[str]:
    """`--resume auto` as one word, and `--resume` with its value: a recipe may stand behind it."""
    given = list(sys.argv[1:] if words is None else words)
    spelt: list[str] = []
    for word in given:
        if spelt and spelt[-1] == "--resume=yes" and word == "auto":
            spelt[-1] = "--resume=auto"
        else:
            spelt.append("--resume=yes" if word == "--resume" else word)
    return spelt


def _sort_out(arguments: argparse.Namespace, unknown: list[str]) -> None:
    """Give `key=value` words that stand behind options to the recipe, other flags to `launch`."""
    after_flag = [False, *(word.startswith("--") and "=" not in word for word in unknown)]
    pairs = [
        word
        for word, value in zip(unknown, after_flag, strict=False)
        if "=" in word and not word.startswith("-") and not value
    ]
    arguments.flags = [word for word in unknown if word not in pairs]
    if "overrides" in arguments:
        arguments.overrides += pairs
    elif pairs:
        arguments.flags += pairs
    if arguments.flags and arguments.verb is not launch_recipe:
        known = [option for option in arguments.words.format_usage().split() if "--" in option]
        hint = did_you_mean(arguments.flags[0], [option.strip("[]|") for option in known])
        arguments.words.error(f"unrecognized arguments: {' '.join(arguments.flags)}{hint}")


def build_parser() -> argparse.ArgumentParser:
    from finetune.cli.plan_arguments import add_arguments

    parser = argparse.ArgumentParser(
        prog="finetune", description="Fine-tune language models: name a recipe, choose a backend."
    )
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def verb(name: str, run: Callable[[Any], int], summary: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        added.set_defaults(verb=run, words=added)
        return added

    listing = verb("list", list_recipes, "recipes and backends that can be named")
    listing.add_argument("--json", action="store_true", help="print JSON")

    show = verb("show", show_recipe, "a recipe with every field")
    options.recipe_words(show)
    show.add_argument("--json", action="store_true", help="print JSON")

    planning = verb("plan", plan_recipe, "what a recipe means on a backend, or why it cannot run")
    options.recipe_words(planning)
    options.backend_words(planning)
    planning.add_argument("--json", action="store_true", help="print JSON")
    add_arguments(planning)

    inspecting = verb("inspect", inspect_recipe, "rows as the model sees them, and what is trained")
    options.recipe_words(inspecting)
    inspecting.add_argument("--rows", type=options.count, default=3, help="rows to show")
    inspecting.add_argument("--html", type=Path, help="page to write, instead of printing rows")
    inspecting.add_argument("--json", action="store_true", help="print JSON")

    training = verb("train", train_recipe, "train in this process (or under `accelerate launch`)")
    options.recipe_words(training)
    training.add_argument("--backend", help="backend of a run that Accelerate did not launch")
    training.add_argument("--precision", choices=("bf16", "fp32"), help="instead of the backend's")
    options.run_words(training)

    launching = verb("launch", launch_recipe, "train through `accelerate launch`")
    options.recipe_words(launching)
    options.backend_words(launching)
    options.run_words(launching)
    launching.add_argument(
        "--max-restarts",
        type=options.count,
        default=0,
        help="start anew after a failure so many times",
    )
    launching.epilog = "Other --flags are passed to `accelerate launch`."

    exporting = verb("export", export_run, "write a run's result as a model that loads everywhere")
    exporting.add_argument("run", help="run directory")
    exporting.add_argument("--to", required=True, type=Path, help="folder to write")
    exporting.add_argument("--merge", action="store_true", help="merge the adapter into the base")
    exporting.add_argument(
        "--step", type=options.count, help="checkpoint, instead of the best or last one"
    )

    chatting = verb("chat", chat_with_run, "talk to a run's model")
    chatting.add_argument("run", help="run directory, or a folder with a model")
    chatting.add_argument("--prompt", help="answer this once, instead of a conversation")
    chatting.add_argument("--max-new-tokens", type=options.count, default=512)

    evaluating = verb("eval", evaluate_model, "exact match of a model's greedy answers")
    evaluating.add_argument("model", help="run directory, folder with a model, or hub name")
    evaluating.add_argument("--rows-of", help="run whose held-out rows are asked")
    evaluating.add_argument("--data", help="data file, instead of held-out rows of a run")
    evaluating.add_argument("--format", default="messages", help="format of --data")
    evaluating.add_argument("--limit", type=options.count, default=200, help="rows, evenly spaced")
    evaluating.add_argument("--max-new-tokens", type=options.count, default=256)
    evaluating.add_argument("--samples", type=Path, help="JSONL file to write with every answer")
    evaluating.add_argument("--json", action="store_true", help="print JSON")

    proving = verb("prove", prove_recipe, "show that backends change nothing of a recipe")
    options.recipe_words(proving)
    options.proof_words(proving)

    examining = verb("doctor", run_doctor, "check a model or a recipe in seconds, before a GPU")
    examining.add_argument("subject", nargs="?", help="model folder or hub id, or a recipe")
    examining.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="such as adapter.r=8"
    )
    examining.add_argument("--json", action="store_true", help="print JSON")

    reporting = verb("report", report_run, "write a run's report as one HTML page")
    reporting.add_argument("run", help="run directory")
    reporting.add_argument("--proof", type=Path, help="folder of a proof of the run's recipe")

    quickstart = verb("quickstart", run_quickstart, "the main job, offline, in minutes on a CPU")
    quickstart.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    return parser


def _output(arguments: argparse.Namespace) -> Path:
    return arguments.output or Path("runs") / Path(arguments.recipe).stem


def _resume(arguments: argparse.Namespace) -> "Resume":
    return "auto" if arguments.resume == "auto" else arguments.resume is not None


def list_recipes(arguments: argparse.Namespace) -> int:
    from finetune import backend, catalog

    recipes = {name: catalog.describe(path) for name, path in catalog.names().items()}
    backends = {name: backend.describe(name) for name in backend.names()}
    if arguments.json:
        print(json.dumps({"recipes": recipes, "backends": backends}, indent=2))
        return 0
    for title, rows in (("recipes", recipes), ("backends", backends)):
        print(title)
        width = max((len(name) for name in rows), default=0)
        for name, summary in rows.items():
            print(f"  {name:<{width}}  {summary}")
    return 0


def show_recipe(arguments: argparse.Namespace) -> int:
    import yaml

    from finetune import catalog

    fields = catalog.to_fields(catalog.resolve(arguments.recipe, arguments.overrides))
    if arguments.json:
        print(json.dumps(fields, indent=2))
    else:
        print(yaml.safe_dump(fields, sort_keys=False), end="")
    return 0


def plan_recipe(arguments: argparse.Namespace) -> int:
    from finetune import backend
    from finetune.cli import plan as command
    from finetune.launchers.accelerate import rate_of_products, verify
    from finetune.planner.estimate import hybrid
    from finetune.training.preflight import below_a_plan, check, read_words

    copied = arguments.backend in hybrid.SHARDS  # copies of shards, which no backend here runs
    named = None if copied else arguments.backend
    recipe = read_words(arguments.recipe, arguments.overrides, named)
    if not (arguments.gpu or arguments.gpus or copied):
        machine = backend.load(arguments.backend or recipe.backend)
        check(recipe, machine, arguments.processes, arguments.precision, files=False)
    asked = verify if arguments.verify else None
    status = command.run(arguments, recipe, asked, verify, rate_of_products)
    if not arguments.json:
        for line in below_a_plan(recipe):
            print(line)
    return status


def inspect_recipe(arguments: argparse.Namespace) -> int:
    from finetune import catalog
    from finetune.training.preflight import check_files

    recipe = catalog.resolve(arguments.recipe, arguments.overrides)
    check_files(recipe)
    from finetune.reports import inspection

    found = inspection.inspect(recipe, arguments.rows)
    if arguments.json:
        print(json.dumps(inspection.to_json(found), indent=2, ensure_ascii=False))
    elif arguments.html is not None:
        inspection.write_page(found, Path(arguments.recipe).stem, arguments.html)
        print(f"wrote {arguments.html}")
    else:
        inspection.show(found, inspection.Console())
    return 0


def train_recipe(arguments: argparse.Namespace) -> int:
    from finetune.process import error_report as last_words
    from finetune.process.start import collecting_later, compiling_later, read_models_once
    from finetune.training.preflight import check_here, read_words

    last_words.forget_earlier_attempts()
    recipe = read_words(arguments.recipe, arguments.overrides, arguments.backend)
    check_here(recipe, arguments.backend, arguments.precision)  # before torch, which takes seconds
    with collecting_later(), compiling_later():
        read_models_once()
        from finetune.training.worker import Options, train

    options = Options(
        _output(arguments),
        _resume(arguments),
        arguments.nvme_path,
        arguments.timeout,
        arguments.profile,
        not arguments.no_plot,
    )
    train(recipe, arguments.backend, arguments.precision, options=options)
    return 0


def launch_recipe(arguments: argparse.Namespace) -> int:
    from finetune.launchers.accelerate import launch
    from finetune.training.preflight import read_words

    recipe = read_words(arguments.recipe, arguments.overrides, arguments.backend)
    words = ["--timeout", str(arguments.timeout)]
    words += ["--nvme-path", str(arguments.nvme_path)] if arguments.nvme_path else []
    words += ["--profile"] if arguments.profile else []
    words += ["--no-plot"] if arguments.no_plot else []
    launch(
        recipe,
        arguments.backend,
        arguments.processes,
        _output(arguments),
        _resume(arguments),
        arguments.precision,
        arguments=words,
        flags=arguments.flags,
        max_restarts=arguments.max_restarts,
    )
    return 0


def _without_bars() -> None:
    """Keep transformers' own progress bars out of an answer."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def export_run(arguments: argparse.Namespace) -> int:
    from finetune.runs.run import open_run

    run = open_run(arguments.run)
    from finetune.exporters.huggingface import export

    _without_bars()
    folder = export(run, arguments.to, arguments.merge, arguments.step)
    print(f"exported to {folder}")
    return 0


def chat_with_run(arguments: argparse.Namespace) -> int:
    if not Path(arguments.run).is_dir():
        raise FinetuneError(
            f"{arguments.run}: no such folder; name a run, or a folder with a model"
        )
    from finetune.inference.chat import answer, chat
    from finetune.inference.generate import open_model

    _without_bars()
    loaded = open_model(arguments.run)
    if arguments.prompt is not None:
        answer(loaded, arguments.prompt, arguments.max_new_tokens)
    else:
        chat(loaded, max_new_tokens=arguments.max_new_tokens, typed=sys.stdin.isatty())
    return 0


def report_run(arguments: argparse.Namespace) -> int:
    from finetune.reports.page import report
    from finetune.runs.run import open_run

    run = open_run(arguments.run)
    if arguments.proof is not None:
        from finetune.reports.proof_page import take_proof

        take_proof(run, arguments.proof)
    print(f"wrote {report(run)}")
    return 0


def prove_recipe(arguments: argparse.Namespace) -> int:
    from finetune import catalog

    recipe = catalog.resolve(arguments.recipe, arguments.overrides)
    from finetune.cli import prove as command

    return command.run(arguments, recipe, arguments.recipe)


def run_doctor(arguments: argparse.Namespace) -> int:
    from finetune.cli import doctor as command

    return command.run(arguments.subject, arguments.overrides, arguments.json)


def evaluate_model(arguments: argparse.Namespace) -> int:
    from finetune.runs.run import open_run

    if arguments.rows_of is not None:
        open_run(arguments.rows_of)
    elif arguments.data is None and not (Path(arguments.model) / "recipe.json").is_file():
        raise FinetuneError(
            f"{arguments.model}: not a run directory (it has no recipe.json); for another model "
            "give --rows-of RUN, or --data FILE and --format"
        )
    from finetune.evaluation import evaluation

    _without_bars()
    evaluation.run(arguments)
    return 0


def run_quickstart(arguments: argparse.Namespace) -> int:
    from finetune.quickstart.job import quickstart

    quickstart(arguments.output)
    return 0
