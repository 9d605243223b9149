"""`finetune plan`: plan for the machine given by the arguments, and print the result."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune import backend as backends
from finetune.cli.options import axes_of
from finetune.cli.plan_here import Measure, Verify, calibrated, plain, status
from finetune.errors import FinetuneError, refuse
from finetune.planner.estimate import advice, choice, fewest_changes, hardware, wording
from finetune.planner.estimate.mesh_sizes import slow_links
from finetune.planner.estimate.plan_api import described, whole_numbers, without_machine
from finetune.planner.estimate.predict import Prediction, model_source, predict
from finetune.planner.estimate.row_counts import local_rows
from finetune.planner.plan import Plan, plan
from finetune.recipe import Recipe
from finetune.runs import limits

SHOWN = 8
"""Number of printed rows of the ranking."""


def machine_of(arguments: argparse.Namespace, count: int) -> hardware.Machine | None:
    """The machine described by the arguments; None if they do not describe one.

    Raises:
        FinetuneError: a name is not known, or a number is missing or not positive.
    """
    return described(
        arguments.gpu, count, arguments.nodes, arguments.link, arguments.network,
        arguments.host_ram, arguments.gpu_memory, arguments.tflops, arguments.bandwidth,
        arguments.price,
    )  # fmt: skip


def run(
    arguments: argparse.Namespace,
    recipe: Recipe,
    verify: Verify | None = None,
    measure: Measure | None = None,
) -> int:
    """Print the plan of a recipe, and its memory and time on a machine if one is given.

    Args:
        verify: compares the formulas with a trace; None to skip this.
        measure: measures the matrix-product rate of this machine's CPU.

    Returns the exit status: 1 if `verify` disagrees with the plan's numbers.
    """
    whole_numbers(
        gpus=arguments.gpus, nodes=arguments.nodes, rows=arguments.rows,
        row_tokens=arguments.row_tokens,
    )  # fmt: skip
    machine = machine_of(arguments, arguments.gpus or arguments.processes or 1)
    if machine is None and (present := hardware.installed()):
        count = arguments.gpus or arguments.processes or len(present)
        given: float | None = arguments.host_ram
        host = float(limits.memory().total) if given is None else given * 1e9
        machine = hardware.machine(
            present[0], count, arguments.nodes, arguments.link, arguments.network, host,
            arguments.price,
        )  # fmt: skip
    if machine is None:
        without_machine(
            nodes=None if verify else arguments.nodes,  # traced ranks may be on any node
            link=arguments.link, network=arguments.network, host_ram=arguments.host_ram,
            price=arguments.price,
        )  # fmt: skip
    if arguments.html is not None and (machine is None or arguments.backend is None):
        raise FinetuneError(
            "--html: the page is of one backend on a machine; give both, such as --backend "
            "pp_tp_fsdp --gpu H100-80 --gpus 64 --nodes 8"
        )
    if arguments.backend is None:  # sizes of axes name the backend that has them
        given = {"pp": arguments.pipeline, "tp": arguments.tensor}
        axes = [name for name, size in given.items() if size is not None]
        arguments.backend = "_".join([*axes, "fsdp"]) if axes else None
    divided = machine is not None and arguments.backend is not None
    divided = divided and backends.load(arguments.backend).axes.any
    if machine is None:
        return plain(arguments, recipe, verify, measure)
    # A trace is of one backend; without a name it is the recipe's.
    named = arguments.backend or (recipe.backend if verify else None)
    if named is None:
        return _advise(arguments, recipe, machine)
    if divided:
        backend, _ = backends.divided(backends.load(named), machine.count, axes_of(arguments))
    else:
        backend = choice.on(machine, named, arguments.shard_size)
    planned = plan(recipe, backend, machine.count, arguments.precision)
    prediction = _predicted(arguments, planned, machine)
    refuse(slow_links(backend.axes.tensor, machine.per_node, machine.fast))
    return _show(arguments, planned, prediction, verify)


def _predicted(
    arguments: argparse.Namespace, planned: Plan, machine: hardware.Machine
) -> Prediction:
    """The prediction on a machine, for the given number of rows or those counted in local files."""
    rows = arguments.rows or local_rows(planned.recipe)
    return predict(planned, machine, rows, arguments.row_tokens)


def _show(
    arguments: argparse.Namespace, planned: Plan, prediction: Prediction, verify: Verify | None
) -> int:
    workload, machine = prediction.workload, prediction.machine
    precision = planned.backend.precision
    wanted = prediction.status != "safe" or arguments.fit
    found = fewest_changes.changes(workload, machine, precision) if wanted else []
    record = {**planned.summary(), "prediction": prediction.summary()}
    record["changes"] = [_change(change) for change in found]
    fit = _fit(prediction, precision) if arguments.fit else None
    if arguments.html is not None:
        from finetune.reports import plan_page  # imports jinja, a quarter of a second

        plan_page.write(prediction, Path(arguments.html))
    traced = verify(planned, workload if prediction.source.exact else None) if verify else None
    kept = calibrated(arguments, machine)
    if arguments.json:
        record |= {} if kept is None else {"calibration": dataclasses.asdict(kept)}
        record |= {} if fit is None else {"fit": fit}
        record |= {} if traced is None else {"verification": traced.summary()}
        print(json.dumps(record, indent=2))
        return status(traced)
    print(wording.page(prediction, found))
    print()
    print(planned.explain("cuda"))
    if kept is not None:
        print(kept.line(prediction.times.step, prediction.totals.allocated))
    if fit is not None:
        print()
        print(f"largest micro-batch that fits: {fit['largest_micro_rows']} rows")
        print(_shortest_words(fit["shortest"]))
    if traced is not None:
        print(f"\n{traced.page()}")
    return status(traced)


def _change(change: fewest_changes.Change) -> dict[str, Any]:
    return {
        "what": change.what, "setting": change.setting, "bytes": change.gain, "fits": change.fits
    }  # fmt: skip


def _fit(prediction: Prediction, precision: str) -> dict[str, Any]:
    workload, machine = prediction.workload, prediction.machine
    listed = _listed(fewest_changes.shortest(workload, machine, precision))
    return {"largest_micro_rows": advice.largest_rows(workload, machine), "shortest": listed}


def _shortest_words(path: list[dict[str, Any]] | None) -> str:
    if path is None:
        return "no three changes make it fit: it needs more or larger GPUs"
    if not path:
        return "it fits as it is"
    return "fewest changes that make it fit: " + ", then ".join(step["setting"] for step in path)


def _advise(arguments: argparse.Namespace, recipe: Recipe, machine: hardware.Machine) -> int:
    """Without a backend: print a ranking of all backends."""
    usual: backends.Precision = "bf16" if machine.gpu.bf16 else "fp16"
    precision: backends.Precision = arguments.precision or usual
    source = model_source(recipe)
    found = choice.candidates(recipe, machine, precision, row_tokens=arguments.row_tokens)
    whole = advice.rank(found)
    best = whole[0] if whole else None
    ranked = choice.allowed(recipe, whole, precision)
    first = fewest_changes.before_disk(found, machine, precision)
    kept = calibrated(arguments, machine)
    if arguments.json:
        listed = {"source": source.where, "changes": [_change(change) for change in first]}
        listed |= {} if kept is None else {"calibration": dataclasses.asdict(kept)}
        print(json.dumps(_ranking(ranked, found, machine) | listed, indent=2))
        return 0
    if not ranked:
        least = min(found, key=_missing)
        host = ""
        if machine.host_memory is not None and not least.host_fits:
            host = (
                f", and {wording.size(least.host)} of host memory in a node of "
                f"{wording.size(machine.host_memory)}, of which nine tenths are assumed to be free"
            )
        print(
            f"nothing fits on {wording.machine_words(machine)}: the smallest is {least.name} with "
            f"{wording.size(least.peak.total)} of {wording.size(least.usable)}{host}"
        )
        print()
        print(wording.what_to_change(fewest_changes.changes(least.workload, machine, precision)))
        print(_shortest_words(_listed(fewest_changes.shortest(least.workload, machine, precision))))
        print(f"\nshapes from {source.where}")
        return 0
    print(wording.ranking(ranked, advice.reason(ranked[0], found), SHOWN))
    for hint in (advice.faster(ranked[0], ranked), advice.division(ranked[0], ranked)):
        print(f"\n{hint}" if hint else "", end="\n" if hint else "")
    if first:
        heading = "before offloading to disk, try these changes, which fit without offload"
        print(f"\n{wording.what_to_change(first, heading)}")
    for note in wording.machine_notes(machine, precision == "bf16"):
        print(f"\nnote: {note}")
    if machine.nodes > 1:
        print(f"\nnetwork: {wording.network_words(machine)}")
    if best and best.name not in backends.names():
        print(
            f"\n{best.name} would be the fastest, with {wording.size(best.peak.total)} and "
            f"{best.times.tokens_per_second:,.0f} tokens/s at {best.workload.micro_rows} rows: "
            f"this toolkit has no such backend; its table: --backend {best.name}"
        )
    chosen, words = choice.chosen(recipe, ranked[0])
    backend = choice.backend_of(ranked[0], machine, precision)
    planned = plan(chosen, backend, machine.count, precision)
    prediction = _predicted(arguments, planned, machine)
    print(f"\nshapes from {source.where}")
    print(wording.whole_run(prediction))
    if kept is not None:
        print(kept.line(prediction.times.step, prediction.totals.allocated))
    words += [f"--precision {usual}"] * (arguments.precision is None and usual != "bf16")
    print(f"in full: --backend {ranked[0].name} {' '.join(words)}")
    return 0


def _missing(option: advice.Option) -> tuple[float, float]:
    """What an option lacks, for sorting: bytes missing on the GPU, then bytes used on the host."""
    return max(0.0, option.peak.total - option.usable), option.host


def _listed(path: Sequence[fewest_changes.Change] | None) -> list[dict[str, Any]] | None:
    return None if path is None else [_change(change) for change in path]


def _ranking(
    ranked: list[advice.Option], found: list[advice.Option], machine: hardware.Machine
) -> dict[str, Any]:
    rows = [
        {
            "backend": each.name,
            "axes": each.workload.layout.axes.sizes,
            "micro_rows": each.workload.micro_rows,
            "accumulation": each.workload.accumulation,
            "checkpointing": each.recompute,
            "status": each.status,
            "bytes": each.peak.total,
            "usable": each.usable,
            "host_per_node": each.host,
            "bytes_sent": each.moved.total,
            **dataclasses.asdict(each.times),
        }
        for each in ranked
    ]
    reason = advice.reason(ranked[0], found) if ranked else "nothing fits"
    return {
        "gpu": machine.gpu.name, "gpus": machine.count, "reason": reason, "options": rows,
    }  # fmt: skip
