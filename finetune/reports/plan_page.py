"""Write the page of a plan: the mesh, memory by stage, traffic on each link, the schedule.

The page is self-contained: no scripts, fonts or requests.
"""

from pathlib import Path

from finetune.planner.estimate import wording as words
from finetune.planner.estimate.predict import Prediction
from finetune.reports.drawings import Drawings
from finetune.reports.tables import Cell, Table, rendered
from finetune.runs.run import write_whole

WORDS = {"safe": "fits", "tight": "fits, but tightly: a longer row may not", "no": "does not fit"}


def write(prediction: Prediction, path: Path) -> None:
    """Write the page of a plan on a machine.

    Raises:
        FinetuneError: the file cannot be written.
    """
    write_whole(path, _text(prediction))


def _text(prediction: Prediction) -> str:
    plan, machine = prediction.plan, prediction.machine
    drawings = Drawings(
        plan.backend.axes,
        plan.mesh,
        prediction.source.shape.layers,
        {link.axis: link.sent for link in prediction.links},
        plan.accumulation,
        machine.per_node,
        [stage.peak for stage in prediction.stages],
        usable=prediction.usable,
    )
    return rendered(
        "plan.html.jinja",
        title=f"{prediction.workload.layout.name} on {words.machine_words(machine)}",
        state=WORDS[prediction.status].split(",")[0],
        status=prediction.status,
        verdict=plan.mesh.words(),
        model=plan.recipe.model.name or "from scratch",
        tiles=_tiles(prediction),
        drawings=drawings,
        waits=plan.pipeline_words(),
        links=_links(prediction),
        text=f"{prediction.page()}\n\n{plan.explain('cuda')}",
    )


def _tiles(prediction: Prediction) -> list[tuple[str, str, str]]:
    times, plan = prediction.times, prediction.plan
    peak = prediction.totals.allocated
    tiles = [
        ("memory", words.size(peak), f"of {words.size(prediction.usable)} usable"),
        ("a step", words.duration(times.step), f"bound by {times.bound}"),
        ("speed", f"{times.tokens_per_second:,.0f}", "tokens a second"),
        ("sent", words.size(prediction.volume.total), "by a process in a step"),
    ]
    if plan.mesh.pipeline > 1:
        tiles.append(("bubble", f"{plan.bubble:.1%}", f"{plan.accumulation} micro-batches"))
    return tiles


def _links(prediction: Prediction) -> Table:
    step = prediction.times.step
    rows: list[tuple[Cell, ...]] = [
        (
            link.axis,
            words.size(link.sent),
            "between nodes" if link.crosses else "inside a node",
            words.duration(link.seconds),
            f"{link.seconds / step:.1%}",
        )
        for link in prediction.links
    ]
    return Table(rows, ("axis", "sent in a step", "over links", "takes", "share of the step"))
