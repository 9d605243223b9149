"""Run the command line: find the command's module in this folder, parse its arguments and run it.

A command's module has `SUMMARY`, `add_arguments(parser)` and `run(arguments)`, which returns the
exit status. Slow imports are inside `run`, so that `list`, `show` and `plan` are fast.
"""

import argparse
import atexit
import contextlib
import importlib
import io
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from finetune.cache import with_home
from finetune.errors import FinetuneError, TrainingFailure, did_you_mean, of_a_file
from finetune.process.quiet import quiet, threads_within_quota
from finetune.process.streams import outlast_readers
from finetune.version import __version__

VERBS = {
    "init": "init", "import": "import_file", "list": "list", "show": "show", "plan": "plan",
    "inspect": "inspect", "teach": "teach", "train": "train", "launch": "launch", "sweep": "sweep",
    "runs": "runs", "watch": "watch", "stop": "stop", "board": "board",
    "export": "export", "chat": "chat", "serve": "serve", "eval": "eval", "compare": "compare",
    "prove": "prove", "doctor": "doctor", "report": "report", "quickstart": "quickstart",
}  # fmt: skip
"""Modules of this folder by command, in the order of `finetune --help`."""
OUTLAST_READERS = ("train", "launch", "sweep", "prove", "export", "quickstart")
"""Commands that continue when their output is closed."""
READER_GONE = 141
"""Exit status if the output is closed before its end, the status of SIGPIPE in shells."""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status.

    This is 0, 1 (training failed), 2 (a user's mistake), 75 (interrupted, progress saved) or 141
    (output closed by its reader).
    """
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(_spell_out_resume(words))
    _assign_words(arguments, unknown)
    quiet()
    threads_within_quota()
    if arguments.verb in OUTLAST_READERS:
        outlast_readers()
    if isinstance(sys.stdout, io.TextIOWrapper):  # names and texts may have unpaired surrogates
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with_home()
        return importlib.import_module(f"finetune.cli.{VERBS[arguments.verb]}").run(arguments)
    except FinetuneError as error:
        return _report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return READER_GONE
    except OSError as error:
        problem = of_a_file(error)
        if problem is None:
            raise
        return _report((FinetuneError if error.filename else TrainingFailure)(problem))


def _report(error: FinetuneError) -> int:
    from finetune.process import error_report

    return error_report.report(error)


def run() -> NoReturn:
    """Run `main` and exit the process without finalizing the interpreter.

    While Python 3.11 finalizes, a thread that returns from a library and requests the GIL is
    unwound; C++ frames below it then abort the process ("terminate called without an active
    exception"), and a rank whose work is done and saved would count as failed. torch's store and
    gloo, for example, have such threads.
    """
    status = main()
    threading._shutdown()  # ends thread pools and waits for non-daemon threads
    atexit._run_exitfuncs()
    with contextlib.suppress(ValueError):  # the stream is closed
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            status = status or READER_GONE
        except OSError as error:
            status = status or 1
            with contextlib.suppress(OSError):
                print(f"error: standard output: {error.strerror}", file=sys.stderr)
    with contextlib.suppress(OSError, ValueError):  # its reader is gone, or it is closed
        sys.stderr.flush()
    os._exit(status)


def _spell_out_resume(words: Sequence[str] | None) -> list[str]:
    """Write `--resume auto` as one word and `--resume` with a value, as a recipe may follow it."""
    given = list(sys.argv[1:] if words is None else words)
    spelt: list[str] = []
    for word in given:
        if spelt and spelt[-1] == "--resume=yes" and word == "auto":
            spelt[-1] = "--resume=auto"
        else:
            spelt.append("--resume=yes" if word == "--resume" else word)
    return spelt


def _assign_words(arguments: argparse.Namespace, unknown: list[str]) -> None:
    """Assign `key=value` words after options to the recipe, and unknown flags to `launch`."""
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
    if arguments.flags and arguments.verb not in ("launch", "sweep"):
        known = [option for option in arguments.words.format_usage().split() if "--" in option]
        hint = did_you_mean(arguments.flags[0], [option.strip("[]|") for option in known])
        arguments.words.error(f"unrecognized arguments: {' '.join(arguments.flags)}{hint}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="finetune", description="Fine-tune language models: name a recipe, choose a backend."
    )
    parser.add_argument("--version", action="version", version=f"finetune {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, file in VERBS.items():
        module = importlib.import_module(f"finetune.cli.{file}")
        summary = module.SUMMARY
        added = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(added)
        added.set_defaults(verb=name, words=added)
    return parser
