"""`finetune sweep`: train a recipe with several values of its fields, and compare."""

import argparse
import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.cli import launch, options

if TYPE_CHECKING:
    from finetune.launchers.sweep import Space

SUMMARY = "train a recipe with values that are searched, and compare"
MOST_FAILED = 3
"""Trials that fail in a row before the sweep stops."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    launch.add_arguments(parser)
    table = """
    --trials N=12  maximum number of trials
    --prune-after COUNT=5  finished trials after which those worse than the median stop; 0: never
    """
    options.add(parser, table)


def run(arguments: argparse.Namespace) -> int:
    from finetune import catalog
    from finetune.errors import TrainingFailure, refuse
    from finetune.launchers.sweep import Sweep, space_of
    from finetune.runs.foreign import begin
    from finetune.runs.run import refuse_scheme

    word, overrides = arguments.recipe, arguments.overrides
    found = [(pair, space_of(word, pair)) for pair in overrides]
    fixed = [pair for pair, space in found if space is None]
    spaces = [space for _, space in found if space is not None]
    recipe = catalog.resolve(word, fixed)
    refuse(_unfit(arguments, spaces, bool(recipe.eval_data or recipe.eval_rows)))
    problems: dict[str, str] = {}
    for words in itertools.product(*([f"{s.key}={w}" for w in s.ends()] for s in spaces)):
        for problem in _against(arguments, [*fixed, *words]):
            problems.setdefault(problem, " ".join(words))
    refuse(f"{words}: {problem}" for problem, words in problems.items())
    root = refuse_scheme(Path(arguments.output or f"runs/{Path(word).stem}-sweep"))
    record = {"recipe": word, "words": overrides}
    sweep = Sweep(root, spaces, recipe.seed, recipe.evaluation.best, arguments.prune_after)
    begin(root, "sweep", record, arguments.resume is not None, "--output")
    failed = 0
    for trial, words in sweep.trials(arguments.trials):
        place = sweep.run(trial.number).root
        print(f"trial {trial.number}: {' '.join(words)}, in {place}", flush=True)
        mine = copy.copy(arguments)
        mine.overrides, mine.output, mine.resume = [*fixed, *words], place, "auto"
        problem = sweep.train(trial, lambda mine=mine: launch.train(mine))
        print(f"page         {sweep.write_page()}", flush=True)
        failed = failed + 1 if problem else 0
        if failed == MOST_FAILED:
            raise TrainingFailure(f"{root}: {failed} trials in a row failed; the last: {problem}")
    print("\n".join(sweep.words()))
    return 0


def _unfit(
    arguments: argparse.Namespace, spaces: "Sequence[Space]", evaluates: bool
) -> Iterator[str]:
    """What a sweep cannot have."""
    from finetune.launchers import QUEUES, variables
    from finetune.launchers.job import machines

    if arguments.chain or arguments.launcher in QUEUES:
        yield "--chain, --launcher: a sweep waits for the result of one recipe; leave them out"
    if machines([*variables.flags(arguments.flags), *arguments.flags]) > 1:
        yield "--num_machines: a sweep trains on one machine; leave it out"
    if not spaces:
        yield "nothing is searched; write optim.lr=1e-5..1e-3:log or adapter.r=8,16"
    if not evaluates:
        yield "a sweep compares evaluations; give eval_data or eval_rows"
    keys = [pair.partition("=")[0] for pair in arguments.overrides]
    yield from (f"{key}: given more than once" for key in {*keys} if keys.count(key) > 1)


def _against(arguments: argparse.Namespace, overrides: Sequence[str]) -> Iterator[str]:
    """What stands against a trial: the problems of its plan, or that it does not fit here."""
    from finetune import backend as backends
    from finetune.checks.request import check, read_words
    from finetune.errors import FinetuneError
    from finetune.planner.estimate import hardware, wording
    from finetune.planner.estimate.predict import predict
    from finetune.runs import limits

    try:
        recipe = read_words(arguments.recipe, overrides, arguments.backend)
        machine = backends.load(arguments.backend or recipe.backend)
        processes = None if arguments.processes == "auto" else arguments.processes
        machine, count = backends.divided(machine, processes, options.axes_of(arguments))
        machine = backends.sized(machine, count, shard_size=arguments.shard_size)
        planned = check(recipe, machine, count, arguments.precision)
    except FinetuneError as error:
        yield from error.problems
        return
    with contextlib.suppress(FinetuneError):  # memory that cannot be predicted
        count, memory = planned.processes, float(limits.memory().total)
        gpus = hardware.installed()
        here = hardware.machine(gpus[0], count, host_memory=memory) if gpus else None
        found = predict(planned, here or hardware.processor(1e12, count, memory))
        if found.status == "no":
            needed, usable = wording.size(found.totals.allocated), wording.size(found.usable)
            yield f"needs {needed} of {usable} usable per process; leave it out"
