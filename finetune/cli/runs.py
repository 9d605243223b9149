"""`finetune runs`: list runs with their state, step, loss and time left."""

import argparse
import json
import math

from finetune.cli import options

SUMMARY = "list runs: state, step, loss, time left"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    table = """
    folder PATH=runs  folder of run directories; by default runs
    --json  print JSON
    """
    options.add(parser, table)


def run(arguments: argparse.Namespace) -> int:
    from finetune.errors import FinetuneError
    from finetune.launchers.submission import state_of
    from finetune.runs import units
    from finetune.runs.progress import find_runs
    from finetune.runs.run import read_object

    if not arguments.folder.is_dir():
        raise FinetuneError(f"{arguments.folder}: no such folder; name the folder of the runs")
    found = [(run, *state_of(run)) for run in find_runs(arguments.folder)]
    listed = [
        {
            "run": str(run.root), "state": state, "step": now.step, "steps": now.steps,
            "loss": now.loss if math.isfinite(now.loss) else None,
            "seconds_left": round(now.seconds_left) if math.isfinite(now.seconds_left) else None,
            "job": read_object(run.job).get("id"),
        }
        for run, now, state in found
    ]  # fmt: skip
    if arguments.json:
        print(json.dumps(listed, indent=2))
        return 0
    rows = [("run", "state", "step", "loss", "left", "job")] + [
        (
            str(each["run"]), str(each["state"]), f"{each['step']}/{each['steps'] or '?'}",
            "" if each["loss"] is None else units.loss(each["loss"]),
            "" if each["seconds_left"] is None else units.duration(each["seconds_left"]),
            str(each["job"] or ""),
        )
        for each in listed
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True)).rstrip()
        )
    return 0
