"""Compare planned rates with published and measured ones.

    python benchmarks/plan_rates.py

`published_rates.json` has a run per line: source, shape, machine and tokens per second and GPU;
`held` marks runs for which no number was chosen.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune import backend as backends
from finetune.planner.estimate import advice, hardware, timing
from finetune.planner.estimate.adapter_sizes import lora
from finetune.planner.estimate.head_losses import CHUNKED, HF
from finetune.planner.estimate.layout import of_backend
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes import published
from finetune.planner.shapes.read_config import read

CASES = Path(__file__).with_name("published_rates.json")
WITHIN = 0.25


@dataclasses.dataclass(frozen=True)
class Rate:
    """A published rate next to the planned one, in tokens per second and GPU."""

    case: Mapping[str, Any]
    planned: float

    @property
    def ratio(self) -> float:
        return self.planned / self.case["tokens_per_second_per_gpu"]


def workload_of(case: Mapping[str, Any]) -> Workload:
    """The workload of a published run."""
    config = case["model"] if isinstance(case["model"], dict) else published.find(case["model"])
    assert config is not None, case["model"]
    shape = read(config)
    found = backends.load(case["backend"])
    if case.get("axes"):
        found, _ = backends.divided(found, case["gpus"], case["axes"])
    layout = of_backend(found, case["gpus"])
    adapted, precision = case["mode"] != "full", "bf16"
    targets = case.get("targets", "all-linear")
    adapter, ours = None, case["source"].startswith("docs/")
    if adapted:
        adapter = lora(shape, case["r"], targets if targets == "all-linear" else targets.split(","))
    return Workload(
        shape, case["micro_rows"], case["length"], advice.scheme_of(layout, precision), layout,
        adapter=adapter, quantization="nf4" if case["mode"] == "qlora" else "none",
        checkpointing=case["recompute"], accumulation=case["accumulation"],
        loss=CHUNKED if ours else HF, compiled=case.get("compiled", False), root_unit=True,
        fused_norms=ours, fused_activations=ours, fused_rotations=ours, grouped_adapters=ours,
    )  # fmt: skip


def compare(case: Mapping[str, Any]) -> Rate:
    """The planned rate of a published run."""
    machine = hardware.machine(
        case["gpu"], case["gpus"], case["nodes"], network=case.get("network")
    )
    if "bandwidth" in case:
        card = dataclasses.replace(machine.gpu, bandwidth=case["bandwidth"])
        machine = dataclasses.replace(machine, gpu=card)
    workload = workload_of(case)
    moved = advice.volume(workload)
    times = timing.times(workload, machine, moved, length=case.get("documents"))
    return Rate(case, times.tokens_per_second / case["gpus"])


def rates() -> list[Rate]:
    """Every run of `published_rates.json`, planned."""
    return [compare(case) for case in json.loads(CASES.read_text(encoding="utf-8"))]


def table(found: list[Rate]) -> str:
    """The comparison as a table in Markdown, and its summary."""
    lines = [
        "| run | GPUs | tokens/s and GPU | planned | ratio | source |",
        "|---|---|---:|---:|---:|---|",
    ]
    for each in found:
        case = each.case
        words = [case["name"], case["mode"] if case["mode"] != "full" else "all weights"]
        words += [f"{case['micro_rows']} x {case['length']:,}"]
        words += ["recomputed"] if case["recompute"] == "full" else []
        words += [case["recompute"] + " recomputed"] if case["recompute"] == "selective" else []
        words += ["compiled"] if case.get("compiled") else []
        words += ["held out"] if case.get("held") else []
        words += [] if case["gpus"] == 1 else [case["backend"]]
        lines.append(
            f"| {', '.join(words)} | {case['gpus']} x {case['gpu']} | "
            f"{case['tokens_per_second_per_gpu']:,.0f} | {each.planned:,.0f} | {each.ratio:.2f} | "
            f"{case['source']}, {case['year']} |"
        )
    fitted = [each for each in found if not each.case.get("held")]
    for name, some in (
        ("before 2025", [each for each in fitted if each.case["year"] < 2025]),
        ("from 2025 on", [each for each in fitted if each.case["year"] >= 2025]),
        ("held out", [each for each in found if each.case.get("held")]),
    ):
        near = sum(1 / (1 + WITHIN) <= each.ratio <= 1 + WITHIN for each in some)
        spread = math.exp(sum(abs(math.log(each.ratio)) for each in some) / len(some))
        lines.append(
            f"\n{name}: {near} of {len(some)} within {WITHIN:.0%}, apart by a factor of "
            f"{spread:.2f} on average"
        )
    return "\n".join(lines)


TITLE = """# Planned rates

Published and measured rates of training next to those of the plan, by `python
benchmarks/plan_rates.py`. Four numbers for cards (the share of the peak rate that large products
reach: A100, H100, H200, MI300X) and six for operations (`finetune/planner/estimate/timing.py`) were
chosen for all runs together that are not marked as held out, none for a single run. Runs that are
held out judge them: they were collected later, and no number was chosen for them. The range that a
plan prints is what most runs are within. MPT is planned as GPT-NeoX of the same width, Qwen as
Llama. Kernels of others (Transformer Engine, fused routing of experts) count as compiled.
"""

if __name__ == "__main__":
    print(f"{TITLE}\n{table(rates())}")
