"""Plot the loss of a run: `loss.png`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.reports.drawings import Point, finite, loss_curves
from finetune.runs import units
from finetune.runs.metrics import History, read_history
from finetune.runs.run import Run, read_object, replacing
from finetune.runs.summary import title
from finetune.version import install

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator
except ModuleNotFoundError as error:
    raise FinetuneError(f"a picture needs matplotlib: {install('plots')}") from error

BLUE, ORANGE, GREY = "#2f6bd8", "#e0791b", "#6b7280"
LOOKS: Mapping[str, Mapping[str, Any]] = {
    "raw": {"color": BLUE, "linewidth": 0.8, "alpha": 0.35},
    "smooth": {"color": BLUE, "linewidth": 2},
    "dots": {"color": ORANGE, "marker": "o", "markersize": 5},
}
"""How matplotlib draws each look of a curve."""


def plot_loss(run: Run) -> Path | None:
    """Write `loss.png` (1440 x 880): training loss, evaluations, and the learning rate below.

    Returns its path, or None if no step is recorded.
    """
    history = read_history(run)
    if not history.trained:
        return None
    figure = Figure(figsize=(9, 5.5), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    figure.suptitle(title(read_object(run.recipe)), x=0.012, ha="left", fontsize=12, weight="bold")
    _losses(top, history)
    bottom.plot(*_columns([(r.step, r.lr) for r in history.trained]), color=GREY, linewidth=1.5)
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("step")
    bottom.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.learning_rate(value)))
    bottom.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=9, color=GREY)
    with replacing(run.loss_plot) as scratch:
        figure.savefig(scratch, format="png")
    return run.loss_plot


def _losses(axes: Axes, history: History) -> None:
    for curve in loss_curves(history):
        if points := finite(curve.points):
            marker = {"marker": "o"} if len(points) == 1 else {}
            axes.plot(*_columns(points), label=curve.name, **{**LOOKS[curve.look], **marker})
    if history.best is not None:
        axes.annotate(
            f"best {units.loss(history.best.loss)}",
            (history.best.step, history.best.loss),
            xytext=(0, 11),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=ORANGE,
            weight="bold",
        )
    axes.set_ylabel("loss")
    axes.margins(x=0.01)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9, loc="upper right")


def _columns(points: list[Point]) -> tuple[list[float], list[float]]:
    """Steps and values, without values that are not finite."""
    kept = finite(points)
    return [step for step, _ in kept], [value for _, value in kept]
