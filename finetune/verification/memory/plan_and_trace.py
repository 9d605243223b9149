"""Compare the plan's memory with a trace: tables and a verdict."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from finetune import catalog
from finetune.backend import Backend
from finetune.errors import FinetuneError
from finetune.planner.estimate import advice, communication, memory, wording
from finetune.planner.estimate.layout import Layout
from finetune.planner.estimate.workload import Workload
from finetune.planner.plan import Plan
from finetune.planner.shapes.config_files import config_of
from finetune.recipe import Recipe

TOLERANCE = 0.05
"""Maximum relative difference of a component, the same bound as for published peaks."""
NEGLIGIBLE = 0.01
"""Share of the peak below which a difference is ignored, however small the component."""

LAYERS = (2, 4, 6)
"""Numbers of layers to trace: two define the line, the third has every moment and checks it."""

FORWARD_LAST, LOSS = "forward: last layer", "forward: loss"
HEAD = ("forward: head", LOSS, "backward: loss and head")
"""Moments of head and loss."""
OF_A_ROW = "component unit predicted traced difference agrees"
RESIDENT = ("weights", "adapters", "optimizer")
UNITS, INPUTS = "units", "inputs"

Step = Mapping[str, Any]
"""A traced step, as written by the tracing process."""


def line(steps: Sequence[Step], layers: int, value: Callable[[Step], float | None]) -> float:
    """A quantity at `layers` layers, on the line through the first two steps that have it."""
    found = [(step["layers"], here) for step in steps if (here := value(step)) is not None]
    (x0, y0), (x1, y1) = found[:2]
    return y0 + (y1 - y0) / (x1 - x0) * (layers - x0)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A step of the full model, in bytes on one rank, extrapolated from a few layers."""

    parameters: int
    trained: int
    held: dict[str, float]
    gradients: float
    saved: float
    """Bytes that layers save for the backward pass."""
    moments: dict[str, dict[str, float]]
    """Bytes by label at the peak of each moment."""
    counts: dict[str, float]
    """Number of collectives of a step, by kind."""
    payload: dict[str, float]
    """Bytes of the unsharded tensors of these collectives, by kind."""
    deviation: float
    """Largest relative deviation of the third traced step from the line through the others."""

    @property
    def peak(self) -> tuple[str, float]:
        totals = {name: sum(parts.values()) for name, parts in self.moments.items()}
        name = max(totals, key=lambda each: totals[each])
        return name, totals[name]

    def total(self, moment: str) -> float:
        return sum(self.moments[moment].values())


def extrapolate(steps: Sequence[Step], layers: int, accumulation: int, offload: bool) -> Traced:
    """A step of the full model, extrapolated from steps of a few layers.

    Args:
        offload: whether weights, adapters, gradients and optimizer state are on the host, where
            they are not counted.
    """

    def at(value: Callable[[Step], float | None]) -> float:
        return line(steps, layers, value)

    host = {*RESIDENT, "gradients"} if offload else set[str]()
    names = [
        name for name in steps[-1]["peaks"] if name and sum(name in s["peaks"] for s in steps) > 1
    ]
    moments: dict[str, dict[str, float]] = {}
    for name in names:
        labels = {label for step in steps for label in step["peaks"].get(name, {})} - host
        moments[name] = {
            label: at(lambda s: s["peaks"][name].get(label, 0) if name in s["peaks"] else None)  # noqa: B023
            for label in sorted(labels)
        }
    kinds = {kind for s in steps for phase in s["collectives"].values() for kind in phase}
    repeats = {"first": 1, "middle": max(0, accumulation - 2), "last": 1, "update": 1}

    def moved(kind: str, which: int) -> float:
        return sum(
            times * at(lambda s: s["collectives"].get(phase, {}).get(kind, (0, 0))[which])  # noqa: B023
            for phase, times in repeats.items()
        )

    return Traced(
        parameters=round(at(lambda s: s["parameters"])),
        trained=round(at(lambda s: s["trained"])),
        held={
            name: 0.0 if name in host else at(lambda s: s["held"].get(name, 0))  # noqa: B023
            for name in RESIDENT
        },
        gradients=0.0 if offload else at(lambda s: s["gradients"]),
        saved=at(lambda s: s["saved"]),
        moments=moments,
        counts={kind: moved(kind, 0) for kind in sorted(kinds)},
        payload={kind: moved(kind, 1) for kind in sorted(kinds)},
        deviation=_deviation(steps, layers),
    )


def _deviation(steps: Sequence[Step], layers: int) -> float:
    """Largest relative deviation of the last step's moments from the line through the others.

    Moments that stay below the peak of `layers` layers even if they deviate as much in every
    further layer are left out.
    """
    *first, last = steps
    found: list[tuple[float, float, float]] = []
    for name, parts in last["peaks"].items():
        if all(name in step["peaks"] for step in first):

            def total(step: Step, name: str = name) -> float:
                return sum(step["peaks"][name].values())

            expected = line(first, last["layers"], total)
            apart = sum(parts.values()) - expected
            further = (layers - first[-1]["layers"]) / (last["layers"] - first[-1]["layers"])
            found.append((line(first, layers, total), apart * max(1.0, further), apart / expected))
    peak = max((planned for planned, _, _ in found), default=0.0)
    near = (abs(each) for planned, most, each in found if planned + max(0.0, most) >= peak)
    return max(near, default=0.0)


@dataclasses.dataclass(frozen=True)
class Row:
    """A component by formula and by trace; `predicted` is None without a formula."""

    component: str
    predicted: float | None
    traced: float
    unit: str = "bytes"
    scale: float = 0.0
    """Bytes; differences below `NEGLIGIBLE` of it are ignored."""

    @property
    def difference(self) -> float | None:
        """Relative difference of the prediction from the trace; None without a prediction."""
        if self.predicted is None:
            return None
        if self.traced == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.traced - 1

    @property
    def agrees(self) -> bool:
        if self.predicted is None:
            return True
        if self.unit == "elements":
            return self.predicted == self.traced
        apart = abs(self.predicted - self.traced)
        return apart <= TOLERANCE * self.traced or apart <= NEGLIGIBLE * self.scale


@dataclasses.dataclass(frozen=True)
class Verification:
    """Every component by formula and by trace, and the verdict."""

    rows: tuple[Row, ...]
    traced: Traced
    predicted_moments: Mapping[str, float]
    how: str
    notes: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return all(row.agrees for row in self.rows) and self.traced.deviation <= NEGLIGIBLE

    @property
    def traced_peak(self) -> float:
        """Bytes on one rank."""
        return self.traced.peak[1]

    @property
    def known(self) -> bool:
        """Whether there was a prediction to verify."""
        return any(row.predicted is not None for row in self.rows)

    def summary(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        traced = {name: self.traced.total(name) for name in self.traced.moments}
        return {
            "agrees": self.agrees if self.known else None,
            "tolerance": TOLERANCE,
            "how": self.how,
            "notes": list(self.notes),
            "components": [
                {key: getattr(row, key) for key in OF_A_ROW.split()} for row in self.rows
            ],
            "moments": [
                {"name": name, "predicted": self.predicted_moments.get(name), "traced": total}
                for name, total in traced.items()
            ],
            "collectives": {
                kind: {"number": number, "bytes": self.traced.payload[kind]}
                for kind, number in self.traced.counts.items()
            },
        }

    def page(self) -> str:
        """The table and the verdict as text."""
        lines = [f"verification: {self.how}"]
        lines.append(f"  {'component':27} {'predicted':>14} {'traced':>14} {'difference':>10}")
        for row in self.rows:
            predicted = "-" if row.predicted is None else _words(row.predicted, row.unit)
            apart = "" if row.difference is None else f"{row.difference:+.2%}"
            mark = "" if row.agrees else "  <- differs"
            traced = _words(row.traced, row.unit)
            lines.append(f"  {row.component:27} {predicted:>14} {traced:>14} {apart:>10}{mark}")
        lines.append(f"  the traced peak is in '{self.traced.peak[0]}'")
        if self.traced.counts:
            payload = self.traced.payload
            counted = ", ".join(
                f"{round(number)} {kind.replace('_', '-')}s of {wording.size(payload[kind])}"
                for kind, number in self.traced.counts.items()
            )
            lines.append(f"  collectives of a step: {counted} in whole tensors")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join([*lines, self._verdict()])

    def _verdict(self) -> str:
        if not self.known:
            return "there are no formulas for this architecture: all numbers are traced"
        if self.agrees:
            return (
                f"verified: every component within {TOLERANCE:.0%} of the trace, or apart by less "
                f"than {NEGLIGIBLE:.0%} of the peak"
            )
        wrong = ", ".join(row.component for row in self.rows if not row.agrees)
        if self.traced.deviation > NEGLIGIBLE:
            wrong = f"{wrong}{', ' if wrong else ''}memory is not linear in the layers"
        return f"NOT VERIFIED beyond {TOLERANCE:.0%}: {wrong}"


def request(plan: Plan, ranks: Sequence[int], layers: Sequence[int]) -> dict[str, Any]:
    """Request for the tracing process, as plain values.

    Args:
        plan: what is traced.
        ranks: ranks of the job, which are traced one after the other.
        layers: numbers of layers; for a pipeline, of each part of a stage.
    """
    config, _ = config_of(plan.recipe)
    backend = {k: v for k, v in dataclasses.asdict(plan.backend).items() if k != "path"}
    return {
        "recipe": catalog.to_fields(plan.recipe),
        "backend": backend,
        "processes": plan.processes,
        "config": dict(config),
        "ranks": list(ranks),
        "layers": list(layers),
    }


def layers_of(recipe: Recipe) -> int:
    """Number of layers of the full model, of text if it reads images.

    Raises:
        FinetuneError: the config has no such field.
    """
    config, _ = config_of(recipe)
    if recipe.model.reads:
        transformers: Any = importlib.import_module("transformers")
        given = {name: value for name, value in config.items() if name != "model_type"}
        whole = transformers.AutoConfig.for_model(config["model_type"], **given)
        config = whole.get_text_config().to_dict()
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if isinstance(config.get(name), int):
            return config[name]
    raise FinetuneError("--verify: the config has no num_hidden_layers; nothing can be traced")


def alone(plan: Plan) -> Plan:
    """The work of one process of a plan, as a plan of one process."""
    batch = plan.recipe.batch
    recipe = plan.recipe.with_batch(rows=batch.micro_rows * plan.accumulation)
    machine = Backend("single", "single", precision=plan.backend.precision)
    return Plan(recipe, machine, 1)


def how(plan: Plan, sharded: bool) -> str:
    """Description of the trace."""
    sizes = f"{', '.join(map(str, LAYERS[:-1]))} and {LAYERS[-1]} layers"
    where = f"rank 0 of {plan.processes}" if sharded else "one device"
    return f"a step of the real model with fake tensors on {where}; {sizes}, extrapolated"


def notes(plan: Plan, sharded: bool) -> list[str]:
    """Notes on what the trace omits, or does differently from training."""
    model, backend, found = plan.recipe.model, plan.backend, list[str]()
    rest = "its sharding, its buckets and its traffic are not verified"
    if plan.traits.untraced:
        found.append(f"{plan.traits.untraced}: only the same work on one device was; {rest}")
    if sharded and backend.offload != "none":
        found.append("states in host memory are left out of both columns")
    if model.activation_checkpointing == "offload":
        found.append("activations offloaded to host memory are traced as if they stayed")
    if model.quantization == "nf4":
        found.append(
            "4-bit storage is created manually, as bitsandbytes cannot pack fake tensors; the "
            "products and their gradients are its own"
        )
    if model.attention not in ("sdpa", "eager"):
        found.append(f"{model.attention} is traced as SDPA without a mask")
    return found


def _words(value: float, unit: str) -> str:
    return f"{value:,.0f}" if unit == "elements" else wording.size(value)


def as_traced(plan: Plan, workload: Workload, sharded: bool, image_tokens: int = 0) -> Workload:
    """The traced workload: no activation offload or sampling; on one device unless `sharded`."""
    workload = dataclasses.replace(workload, activations_on_host=False, sampled=None)
    if workload.shape.tower is not None:
        pixels = workload.shape.tower.pixels
        workload = dataclasses.replace(workload, image_bytes=pixels * image_tokens)
    return workload if sharded else advice.on(workload, Layout(), plan.backend.precision)


def compare(
    traced: Traced, workload: Workload | None, group: int, how: str, notes: Sequence[str]
) -> Verification:
    """Compare formulas with a trace; without a workload the result has only the trace."""
    timeline = None if workload is None else memory.timeline(workload)
    rows = [
        Row("parameters", workload and workload.shape.parameters, traced.parameters, "elements"),
        Row("trained parameters", workload and workload.trained, traced.trained, "elements"),
    ]
    predicted = {} if timeline is None else _predicted(timeline)
    scale = traced.peak[1]
    for name, found in _components(traced).items():
        if found or predicted.get(name):
            rows.append(Row(name, predicted.get(name), found, scale=scale))
    if traced.counts:
        volume = None if workload is None else advice.volume(workload)
        share = communication.ring(group)
        gathered = traced.payload.get("all_gather", 0.0) * share
        reduced = traced.payload.get("reduce_scatter", 0.0) * share
        sent = gathered + reduced
        rows.append(Row("all-gathers, sent", volume and volume.parameters, gathered, scale=sent))
        rows.append(Row("reduce-scatters, sent", volume and volume.gradients, reduced, scale=sent))
    moments = {} if timeline is None else {m.name: m.total for m in timeline.moments}
    return Verification(tuple(rows), traced, moments, how, tuple(notes))


def _predicted(timeline: memory.Timeline) -> dict[str, float]:
    moments = {moment.name: moment for moment in timeline.moments}
    parts, forward = moments[LOSS].parts, moments[FORWARD_LAST].parts
    apart = (*RESIDENT, INPUTS, UNITS, "buckets")
    saved = parts["activations"]
    loss = max(
        moments[name].total - sum(moments[name].parts.get(label, 0.0) for label in apart)
        for name in HEAD
    )
    return {
        **{name: parts.get(name, 0.0) for name in RESIDENT},
        "gradients": moments["optimizer step"].parts["gradients"],
        "gathered units": max(moment.parts.get("units", 0.0) for moment in timeline.moments),
        "saved activations": saved,
        "loss and logits": loss - saved - forward["gradients"],
        "peak": timeline.peak.total,
    }


def _components(traced: Traced) -> dict[str, float]:
    loss = max(
        traced.total(name)
        - sum(traced.moments[name].get(label, 0.0) for label in (*RESIDENT, INPUTS, UNITS))
        for name in HEAD
    )
    earlier = traced.moments[FORWARD_LAST].get("gradients", 0.0)
    return {
        **traced.held,
        "gradients": traced.gradients,
        "gathered units": max(parts.get("units", 0.0) for parts in traced.moments.values()),
        "saved activations": traced.saved,
        "loss and logits": loss - traced.saved - earlier,
        "peak": traced.peak[1],
    }
