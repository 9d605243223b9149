"""Memory of the tower of a model that reads images, beside that of its language model."""

import dataclasses
from collections.abc import Iterable, Iterator

from finetune.planner.estimate.adapter_sizes import NO_ADAPTER, lora
from finetune.planner.estimate.autograd.traces import traces
from finetune.planner.estimate.moments import OUTSIDE, Moment
from finetune.planner.estimate.workload import Workload

AFTER = ("backward: tower", "gradients reduced", "optimizer step")
"""Moments after its backward pass."""


def with_tower(workload: Workload, moments: Iterable[Moment]) -> Iterator[Moment]:
    """The moments of a step with the tower's memory, and those of its own two passes.

    Patches are the tokens of a workload of their own, whose head is left out. The connector keeps
    the hidden states that enter it, and those of its own layers.
    """
    tower, found = workload.shape.tower, list(moments)
    if tower is None:
        yield from found
        return
    layout, adapter, opened = workload.layout, workload.adapter, tower.opened
    if adapter is not None and opened:
        adapter = lora(tower.shape, max(adapter.ranks.values(), default=0))
    here = dataclasses.replace(
        workload, shape=tower.shape, rows=1, length=max(1, workload.image_tokens * tower.patches),
        adapter=adapter if opened else NO_ADAPTER, share=None, quantization="none",
        checkpointing=workload.checkpointing if opened else "none", attention="flash",
        fused_norms=False, fused_activations=False, fused_rotations=False, chained=False,
        apart=tower.windows, repeated=1.0, scored=0,
    )  # fmt: skip
    run, layers = traces(here), tower.shape.layers
    trained = tower.trained
    width = 4 if workload.scheme == "fsdp" else workload.trained_width
    if adapter is not None:
        trained, width = here.trained * opened, workload.compute
    weights = (tower.inside + tower.embedding + tower.connector) * width
    gradients = trained * workload.gradient_width / layout.share("grads")
    pixels, stream = tower.pixels * workload.image_tokens, here.tokens * float(here.residual)
    stream *= tower.shape.hidden
    joins = (4 if tower.windows else 2) * stream * (trained > 0)
    features = workload.image_tokens * workload.shape.hidden * float(workload.compute)
    kept = features + joins + opened * (run.kept_by(layers) + pixels * (not tower.windows))
    # Without an accelerator the pixels of two steps are held, by numpy unless they are joined.
    held = 2 * workload.accumulation * tower.windows if workload.cpu else 1
    moments_of = workload.moments * trained / layout.share("optimizer")
    away = "none" if workload.cpu else layout.offload
    base = {
        "weights": 0.0 if away == "all" else weights / layout.share("params"),
        "inputs": held * pixels, "optimizer": moments_of if away == "none" else 0.0,
    }  # fmt: skip
    if adapter is not None and away != "all":
        base["adapters"] = trained * workload.trained_width / layout.share("params")
    step = next(each for each in found if each.name == "optimizer step")
    state = {name: size for name, size in step.parts.items() if name not in ("gradients", "update")}
    of_language, several = step.parts.get("gradients", 0.0), workload.accumulation > 1

    def moment(name: str, parts: dict[str, float], **more: float) -> Moment:
        added = base | more
        return Moment(name, parts | {each: parts.get(each, 0.0) + added[each] for each in added})

    gathers = layout.traits.shards_all and layout.group > 1
    root = gathers * (tower.embedding + tower.connector) * float(workload.compute)
    ahead = gathers * min(2, layers) * tower.shape.layer_parameters * float(workload.compute)
    passing = run.layer.forward if opened and not here.recomputes else run.layer.passing
    passing += opened * run.kept_by(layers - 1) + stream + pixels * (not tower.windows)
    earlier = several * gradients
    yield moment(
        "forward: tower", state, activations=passing, gradients=earlier + several * of_language,
        units=root + ahead,
    )  # fmt: skip
    for each in found:
        within = {"activations": kept, "gradients": earlier, "units": root}
        more = {} if each.name in OUTSIDE else within
        if each.name in AFTER:
            more = {"gradients": gradients}
        yield moment(each.name, dict(each.parts), **more)
    if opened:
        below = run.kept_by(layers - (not here.recomputes))
        inner = max(run.layer.backward, (run.layer.forward + stream) * here.recomputes)
        yield moment(
            "backward: tower", state, activations=below + inner + features,
            gradients=of_language + gradients, units=root + ahead,
        )  # fmt: skip
