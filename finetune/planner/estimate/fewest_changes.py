"""Find the fewest changes with which a workload fits."""

import dataclasses
from collections.abc import Iterable, Iterator

from finetune.planner.estimate import advice, memory
from finetune.planner.estimate.adapter_sizes import lora
from finetune.planner.estimate.hardware import Machine
from finetune.planner.estimate.head_losses import CHUNKED
from finetune.planner.estimate.workload import Workload


@dataclasses.dataclass(frozen=True)
class Change:
    """A change to a workload, and its effect."""

    what: str
    setting: str
    """The change as written in a recipe or on the command line."""
    workload: Workload
    gain: float
    """Bytes by which this change alone reduces the peak."""
    fits: bool


def changes(workload: Workload, machine: Machine, precision: str = "bf16") -> list[Change]:
    """Single changes that reduce the peak, those without cost first."""
    before = memory.timeline(workload).peak.total
    found: list[Change] = []
    for what, setting, changed in _candidates(workload, machine, precision):
        tried = advice.option(changed, machine)
        gain = before - tried.peak.total
        if gain > 0.01 * before:
            found.append(Change(what, setting, changed, gain, tried.status != "no"))
    return found


def _candidates(
    workload: Workload, machine: Machine, precision: str
) -> Iterator[tuple[str, str, Workload]]:
    """Possible changes, in the order in which to try them."""

    def with_(**fields: object) -> Workload:
        return dataclasses.replace(workload, **fields)  # type: ignore[arg-type]

    if (asked := workload.sampled) is not None and asked.at_once > 1:
        for rows in (asked.at_once // 2**n for n in range(1, asked.at_once.bit_length())):
            fewer = with_(sampled=dataclasses.replace(asked, at_once=rows))
            if advice.option(fewer, machine).status != "no" or rows == 1:
                yield "fewer completions at once", f"sampling_rows={rows}", fewer
                break
    if workload.attention == "eager":
        yield "fused attention", "model.attention=sdpa", with_(attention="flash")
    if workload.micro_rows > 1:
        yield (
            "one row at a time, with more accumulation",
            "batch.micro_rows=1",
            workload.with_micro_rows(1, workload.accumulation * workload.micro_rows),
        )
    if workload.checkpointing == "none":
        setting = "model.activation_checkpointing=true"
        yield "recompute activations", setting, with_(checkpointing="full")
    elif workload.checkpointing == "full" and not workload.activations_on_host:
        setting = "model.activation_checkpointing=offload"
        yield "offload kept activations to the host", setting, with_(activations_on_host=True)
    if workload.loss.logits:
        yield "a loss without all logits in memory", "kernels.head=chunked", with_(loss=CHUNKED)
    for layout in (*advice.layouts(machine), *advice.offloads(machine)):
        if layout != workload.layout and layout.share("optimizer") >= workload.layout.share(
            "optimizer"
        ):
            yield (
                f"{layout.name}",
                f"--backend {layout.name}",
                advice.on(workload, layout, precision),
            )
    if workload.adapter is None:
        if workload.update == "adamw":
            yield "8-bit moments", "optim.name=adamw_8bit", with_(update="adamw_8bit")
        adapter = lora(workload.shape, 16)
        yield "train an adapter (LoRA)", "adapter.r=16", with_(adapter=adapter)
        quantised = with_(adapter=adapter, quantization="nf4")
        yield "QLoRA", "adapter.r=16 model.quantization=nf4", quantised
    elif workload.quantization == "none":
        setting = "model.quantization=nf4"
        yield "frozen weights in 4 bits", setting, with_(quantization="nf4")
    if workload.length > 512:
        half = workload.length // 2
        yield "rows of half the length", f"batch.max_length={half}", with_(length=half)


def before_disk(
    found: Iterable[advice.Option], machine: Machine, precision: str = "bf16"
) -> list[Change]:
    """Adapters and 4-bit weights that fit without offload, if otherwise only NVMe offload fits.

    They should be tried first: a step that reads its weights from disk takes many times as long.
    """
    options = list(found)
    fitting = [each for each in options if each.status != "no"]
    if not fitting or any(each.workload.layout.device != "nvme" for each in fitting):
        return []
    on_device = [each for each in options if each.workload.layout.offload == "none"]
    least = min(on_device, key=lambda each: each.peak.total).workload
    return [
        change
        for change in changes(least, machine, precision)
        if change.fits
        and change.workload.layout == least.layout
        and (change.workload.adapter, change.workload.quantization)
        != (least.adapter, least.quantization)
    ]


def shortest(workload: Workload, machine: Machine, precision: str = "bf16") -> list[Change] | None:
    """The fewest changes with which the workload fits; None if more than three are needed."""
    if advice.option(workload, machine).status != "no":
        return []
    start: list[tuple[list[Change], Workload]] = [([], workload)]
    for _ in range(3):
        following: list[tuple[list[Change], Workload]] = []
        for made, current in start:
            for change in changes(current, machine, precision):
                path = [*made, change]
                if change.fits:
                    return path
                following.append((path, change.workload))
        following.sort(key=lambda pair: memory.timeline(pair[1]).peak.total)
        start = following[:6]
    return None
