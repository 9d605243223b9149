"""`finetune launch`: train in processes started by `accelerate launch`."""

import argparse

from finetune.cli import options
from finetune.launchers import LAUNCHERS

SUMMARY = "train through `accelerate launch`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.recipe_words(parser)
    options.backend_words(parser)
    options.run_words(parser)
    parser.add_argument(
        "--max-restarts",
        type=options.count,
        default=0,
        help="maximum number of restarts after a failure",
    )
    parser.add_argument(
        "--join-timeout",
        type=options.minutes,
        default=5.0,
        help="minutes that a machine waits for the others to start",
    )
    parser.add_argument(
        "--launcher",
        default="accelerate",
        help=f"{', '.join(LAUNCHERS)}, or module:function of your own launcher",
    )
    parser.add_argument(
        "--chain",
        metavar="NAME",
        help="train several recipes one after another, each from the result of the last",
    )
    parser.epilog = "Other --flags are passed to `accelerate launch`."


def run(arguments: argparse.Namespace) -> int:
    if arguments.chain is not None:
        from finetune.launchers import chain

        return chain.run(arguments, _launch)
    return _launch(arguments)


def _launch(arguments: argparse.Namespace) -> int:
    from finetune.checks.request import read_words
    from finetune.launchers import srun
    from finetune.launchers.job import launch

    recipe = read_words(arguments.recipe, arguments.overrides, arguments.backend)
    words = ["--timeout", str(arguments.timeout)]
    words += ["--nvme-path", str(arguments.nvme_path)] if arguments.nvme_path else []
    words += ["--profile"] if arguments.profile else []
    words += ["--no-plot"] if arguments.no_plot else []
    launch(
        recipe,
        arguments.backend,
        arguments.processes,
        options.output_of(arguments),
        options.resume_of(arguments),
        arguments.precision,
        arguments=words,
        flags=[*srun.flags(arguments.flags), *arguments.flags],
        max_restarts=arguments.max_restarts,
        join_minutes=arguments.join_timeout,
        launcher=arguments.launcher,
        shard_size=arguments.shard_size,
        axes=options.axes_of(arguments),
    )
    return 0
