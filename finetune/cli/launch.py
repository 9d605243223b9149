"""`finetune launch`: train in processes started by `accelerate launch`, here or on a cluster."""

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.cli import options
from finetune.launchers import LAUNCHERS, QUEUES

if TYPE_CHECKING:
    from finetune.launchers.submission import Queue
    from finetune.recipe import Recipe

OF_SUBMITTING = {"recipe", "overrides", "launcher", "cluster", "name", "dry_run"}
"""Arguments that are not those of the job itself."""
SUMMARY = "train through `accelerate launch`, here or on a cluster"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.recipe_words(parser)
    options.backend_words(parser, elastic=True)
    options.run_words(parser)
    known = ", ".join([*LAUNCHERS, *QUEUES])
    table = f"""
    --max-restarts COUNT=0  maximum number of restarts after a failure
    --max-attempts N  starts in a row that may end without a new checkpoint, but for preemptions
    --join-timeout MINUTES=5  minutes that a machine waits for the others to start
    --min-machines N  with --processes auto: start on fewer machines, but at least on N
    --launcher NAME=accelerate  {known}, or module:attribute of your own launcher
    --cluster NAME  name or YAML of the cluster to submit to
    --name NAME  name of the job; by default that of the run directory
    --dry-run  print what would be submitted to the cluster
    --chain NAME  train several recipes one after another, each from the result of the last
    """
    options.add(parser, table)
    parser.epilog = "Other --flags are passed to `accelerate launch`."


def run(arguments: argparse.Namespace) -> int:
    if arguments.chain is not None:
        from finetune.launchers import chain

        return chain.run(arguments, train)
    return train(arguments)


def train(arguments: argparse.Namespace) -> int:
    """Train one recipe, or submit it to a cluster; returns the exit status."""
    from finetune import extensions
    from finetune.checks.request import read_words
    from finetune.errors import FinetuneError
    from finetune.launchers.cluster import split
    from finetune.launchers.submission import Queue

    arguments.overrides, settings = split(arguments.overrides)
    recipe = read_words(arguments.recipe, arguments.overrides, arguments.backend)
    if arguments.launcher not in LAUNCHERS:
        launcher = extensions.find("--launcher", arguments.launcher, {**LAUNCHERS, **QUEUES})
        if isinstance(launcher, Queue):
            return _submit(arguments, recipe, launcher, settings)
    for name in ("cluster", "name", "dry_run"):
        if (given := getattr(arguments, name)) or settings:
            word = f"--{name.replace('_', '-')} {given}" if given else f"cluster.{settings[0]}"
            raise FinetuneError(f"{word}: of a cluster; use --launcher {' or '.join(QUEUES)}")
    return _launch(arguments, recipe)


def _launch(arguments: argparse.Namespace, recipe: "Recipe") -> int:
    from finetune.errors import FinetuneError
    from finetune.launchers import elastic, variables
    from finetune.launchers.job import launch, number_of
    from finetune.runs.attempts import attempt
    from finetune.runs.run import Run

    flags = [*variables.flags(arguments.flags), *arguments.flags]
    output, backend, processes = options.output_of(arguments), arguments.backend, None
    if arguments.processes == "auto":
        fitting = elastic.fit(
            recipe, backend or recipe.backend, flags, arguments.precision, arguments.min_machines
        )
        if fitting is None:
            return 0
        backend, processes, flags = fitting
    elif arguments.min_machines is not None:
        raise FinetuneError("--min-machines: needs --processes auto")
    of_training = ("timeout", "nvme_path", "end_by", "profile", "no_plot")
    given = {name: getattr(arguments, name) for name in of_training}
    words = options.spelt(arguments.words, given, without=())
    counted = arguments.max_attempts is not None and not number_of(flags, "machine_rank")
    limit, end = arguments.max_attempts, arguments.end_by
    with attempt(Run(output), limit, end) if counted else contextlib.nullcontext():
        launch(
            recipe, backend, processes or arguments.processes, output,
            options.resume_of(arguments), arguments.precision, arguments=words, flags=flags,
            max_restarts=arguments.max_restarts, join_minutes=arguments.join_timeout,
            launcher=arguments.launcher, shard_size=arguments.shard_size,
            axes=options.axes_of(arguments),
        )  # fmt: skip
    return 0


def _submit(
    arguments: argparse.Namespace, recipe: "Recipe", queue: "Queue[Any]", settings: list[str]
) -> int:
    from finetune import backend as backends
    from finetune import catalog
    from finetune.checkpoints.resume import claim, finished
    from finetune.checks.request import check
    from finetune.errors import FinetuneError
    from finetune.launchers import cluster as clusters
    from finetune.launchers.submission import Submission, submit
    from finetune.runs.run import Run, refuse_scheme

    file = None
    if arguments.cluster is not None:
        file = clusters.find(arguments.cluster, catalog.find(arguments.recipe))
    cluster = clusters.load(queue.settings, file, settings)
    machine = backends.load(arguments.backend or recipe.backend)
    elastic = arguments.processes == "auto"
    every = cluster.nodes * max(1, cluster.gpus)
    asked = every if elastic or every > 1 else None
    axes = options.axes_of(arguments)
    machine, count = backends.divided(
        machine, asked if elastic else arguments.processes or asked, axes
    )
    if count % cluster.nodes:
        raise FinetuneError(
            f"--processes {count}: not the same number on each of cluster.nodes={cluster.nodes}"
        )
    machine = backends.sized(machine, count, cluster.nodes, arguments.shard_size)
    plan = check(recipe, machine, count, arguments.precision, files=queue.shares_disk)
    output, resume = Path(options.output_of(arguments)), options.resume_of(arguments)
    run = Run(refuse_scheme(output).absolute())  # where the record of the job is, and its log
    if resume and finished(run, plan):
        print(f"{run.root}: complete, nothing to resume")
        return 0
    if resume is False:
        claim(run, plan, resume)
    name = arguments.name or run.root.name
    there = run.root if queue.shares_disk else f"{cluster.runs}/{name}"
    given = vars(arguments) | {
        "processes": "auto" if elastic else count, "output": there, "resume": "auto",
        "max_attempts": cluster.attempts,
    }  # fmt: skip
    words = [*options.spelt(arguments.words, given, OF_SUBMITTING), *arguments.flags]
    job = Submission(name, plan, run, cluster, tuple(words), arguments.min_machines)
    submit(arguments.launcher, queue, job, arguments.dry_run)
    return 0
