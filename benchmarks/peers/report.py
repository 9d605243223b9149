"""Compute the table of a race from its answers: equality of rows, rates, ratios."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers.race import Answer
from benchmarks.peers.turns import digest
from benchmarks.peers.workload import Job, Row, of_step
from benchmarks.record import Result

WARMUP = 2
"""Number of untimed first rounds."""
LOSS_TOLERANCE = 2e-3
"""Maximum relative difference of first losses: bf16 has 8 bits, and the mean is over 800 tokens."""
REFERENCE, OURS, FLOOR = "trainer", "ours", "products"
SHIPPED, GROUPED = "ours_shipped", "trainer_grouped"
OTHER_BASE = "ours_lora"
"""A contender with another base (bf16 instead of NF4), whose losses therefore differ."""
TITLES = {
    REFERENCE: "transformers Trainer + PEFT, padded",
    GROUPED: "transformers Trainer + PEFT, group_by_length",
    "trl": "TRL SFTTrainer, defaults",
    "trl_packing": "TRL SFTTrainer, packing",
    "llamafactory": "LLaMA-Factory",
    "unsloth": "Unsloth",
    "ours_lora": "**finetune**, LoRA in bf16",
    SHIPPED: "**finetune** as shipped",
    OURS: "**finetune**, packed",
    "ours_malloc": "**finetune**, packed, memory from malloc",
    "ours_eager": "**finetune**, packed, nothing compiled",
    FLOOR: "matrix products alone",
}

Race = dict[str, list[Answer]]
"""Answers of contenders that took turns, by round."""


def differences(answers: Sequence[Answer], rows: list[Row], job: Job) -> list[str]:
    """Differences between the inputs of a contender's model and the job's rows, by step."""
    found: list[str] = []
    for step, answer in enumerate(answers):
        expected = sorted(digest(ids, labels) for ids, labels in of_step(rows, step, job.rows))
        if answer["documents"] != expected:
            extra = len(set(answer["documents"]) - set(expected))
            missing = len(set(expected) - set(answer["documents"]))
            found.append(f"step {step + 1}: {missing} documents missing, {extra} others instead")
    return found


def repeated(answers: Sequence[Answer], rows: list[Row]) -> list[str]:
    """Deviations from one pass over all rows, for a contender that chooses its own steps."""
    known = Counter(digest(ids, labels) for ids, labels in rows)
    given = Counter(name for answer in answers for name in answer["documents"])
    more, missing = (given - known).total(), (known - given).total()
    return [f"{missing} documents missing, {more} too many"] if more or missing else []


def own_tokens(answers: Sequence[Answer], rows: list[Row]) -> list[int]:
    """Tokens without padding of each step, for a contender that chooses the rows of its steps."""
    lengths = {digest(ids, labels): len(ids) for ids, labels in rows}
    return [sum(lengths.get(name, 0) for name in answer["documents"]) for answer in answers]


def first_loss_differs(loss: float, reference: float) -> bool:
    return abs(loss - reference) > LOSS_TOLERANCE * abs(reference)


Parts = Sequence[tuple[float, float]]
"""Numerator and denominator of each timed round."""


def medians(parts: Parts) -> float:
    """The median of the ratios of rounds."""
    return statistics.median(above / below for above, below in parts)


def totals(parts: Parts) -> float:
    """The ratio of the sums, for rounds that differ too much for a median of a few."""
    return sum(above for above, _ in parts) / sum(below for _, below in parts)


def speed(race: Race, name: str, tokens: Sequence[int], clock: str) -> Parts:
    """Tokens without padding and seconds of a contender, by timed round."""
    return [(count, each[clock]) for each, count in zip(race[name], tokens, strict=False)][WARMUP:]


def ratio(race: Race, name: str, other: str, clock: str) -> Parts:
    """Seconds of another contender and of this one: on the same rows, their ratio is a speedup."""
    both = zip(race[name], race[other], strict=True)
    return [(theirs[clock], mine[clock]) for mine, theirs in both][WARMUP:]


def summarise(
    races: Sequence[Race],
    rows: list[Row],
    tokens: Sequence[int],
    clock: str,
    settled: Callable[[Parts], float] = medians,
) -> dict[str, Any]:
    """Results of every contender; the median for a contender that ran in several races."""
    names = [name for name in TITLES if any(name in race for race in races)]
    summary: dict[str, Any] = {}
    for name in names:
        ran = [race for race in races if name in race]

        def rate(race: Race, name: str) -> float:
            if name != GROUPED:
                return settled(speed(race, name, tokens, clock))
            return totals(speed(race, name, own_tokens(race[name], rows), clock))

        def faster(race: Race, name: str, other: str) -> float:
            """Speedup over another contender, step by step if both have the same steps."""
            if GROUPED not in (name, other):
                return settled(ratio(race, name, other, clock))
            mine, theirs = (
                totals(
                    speed(
                        race, each, own_tokens(race[each], rows) if each == GROUPED else tokens,
                        clock,
                    )
                )
                for each in (name, other)
            )  # fmt: skip
            return mine / theirs

        found: dict[str, Any] = {
            "tokens_per_second": _median(rate(race, name) for race in ran),
            "peak_bytes": max(race[name][-1]["peak_bytes"] for race in ran),
            "cpu_seconds_to_first_step": _median(
                race[name][0]["cpu_seconds_since_start"] for race in ran
            ),
            "seconds_to_first_step": _median(
                race[name][0].get("seconds_since_start", math.nan) for race in ran
            ),
            "first_loss": ran[0][name][0]["loss"],
        }
        for other, key in ((REFERENCE, "of_trainer"), (FLOOR, "of_products")):
            each = [faster(race, name, other) for race in ran if other in race]
            found[key] = _median(each) if each else None
        shipped = [faster(race, SHIPPED, name) for race in ran if SHIPPED in race]
        found["shipped_of_it"] = _median(shipped) if shipped else None
        each = [faster(race, OURS, name) for race in ran if OURS in race]
        found["ours_of_it"] = _median(each) if each else None
        found["ours_of_it_by_race"] = each
        summary[name] = found
    return summary


def _median(values: Any) -> float:
    return statistics.median(values)


def gate(races: Sequence[Race], rows: list[Row], job: Job) -> dict[str, list[str]]:
    """Deviations of each contender from the job; empty if it can be compared."""
    found: dict[str, list[str]] = {}
    for race in races:
        for name in (name for name in race if name != FLOOR):
            problems = found.setdefault(name, [])
            if name == GROUPED:
                problems += repeated(race[name], rows)
                continue
            problems += differences(race[name], rows, job)
            known = next(each for each in (REFERENCE, OURS, name) if each in race)
            loss, reference = race[name][0]["loss"], race[known][0]["loss"]
            if name != OTHER_BASE and first_loss_differs(loss, reference):
                problems.append(f"first loss {loss:.4f}, not {reference:.4f}")
    return {name: list(dict.fromkeys(problems)) for name, problems in found.items()}


def tabulate(
    summary: dict[str, Any], failed: dict[str, list[str]], clock: str, gpu: bool
) -> list[list[str]]:
    per = "CPU-second" if clock == "cpu_seconds" else "second"
    head = [
        "", f"real tokens per {per}", "/ Trainer + PEFT", "as shipped is", "packed is",
        "of the products", "peak GPU memory" if gpu else "peak memory", "s to the first step",
        "CPU s to the first step", "first loss",
        "same rows and labels",
    ]  # fmt: skip
    table = [head]
    base = summary.get(REFERENCE, {}).get("peak_bytes")
    for name, found in sorted(summary.items(), key=lambda each: each[1]["tokens_per_second"]):
        share = f" ({found['peak_bytes'] / base:.2f})" if base and name != FLOOR else ""
        table.append(
            [
                TITLES[name],
                f"{found['tokens_per_second']:,.1f}",
                times(found["of_trainer"]),
                "" if name == SHIPPED else times(found["shipped_of_it"]),
                "" if name == OURS else times(found["ours_of_it"]),
                times(found["of_products"], ""),
                f"{found['peak_bytes'] / 2**20:,.0f} MiB{share}",
                "" if name == FLOOR else f"{found['seconds_to_first_step']:.1f}",
                "" if name == FLOOR else f"{found['cpu_seconds_to_first_step']:.1f}",
                "" if found["first_loss"] is None else f"{found['first_loss']:.4f}",
                "" if name == FLOOR else "no" if failed[name] else "yes",
            ]
        )
    return table


def times(value: float | None, unit: str = "x") -> str:
    return "" if value is None else f"{value:.2f}{unit}"


def result(
    races: Sequence[Race], rows: list[Row], job: Job, threads: int, remarks: Sequence[str]
) -> Result:
    """The result of the races of one workload."""
    counts = [
        sum(len(ids) for ids, _ in of_step(rows, step, job.rows)) for step in range(job.steps)
    ]
    clock = "cpu_seconds" if threads == 1 and not job.gpu else "seconds"
    settled = totals if job.workload.uneven else medians
    summary, failed = summarise(races, rows, counts, clock, settled), gate(races, rows, job)
    told = [f"{TITLES[name]}: {'; '.join(each)}" for name, each in failed.items() if each]
    timed = sorted({len(answers) - WARMUP for race in races for answers in race.values()})
    said = " to ".join(str(number) for number in dict.fromkeys((timed or [0])[:1] + timed[-1:]))
    labelled = sum(sum(label != -100 for label in labels) for _, labels in rows)
    adapted = f"LoRA r={job.r} on every linear layer of a Llama of SmolLM2-135M's shape with "
    what = {
        "lora": f"{adapted}random weights, bf16",
        "qlora": f"{adapted}random weights in NF4, bf16",
        "full": "All weights of a Llama of SmolLM2-135M's shape, random, in fp32, and computed in "
        "bf16",
    }[job.workload.method]
    rates = (
        f"rates are of {{}} steps together after {WARMUP} others, of which some have long rows"
        if job.workload.uneven
        else f"medians of {{}} steps after {WARMUP} others, ratios step by step on the same rows"
    ).format(said)
    without = " (other toolkits without Trainer + PEFT, for want of memory)" * (
        job.workload.large and not job.gpu
    )
    about = job.workload.about if job.rows_file is None else "of a file"
    how = (
        f"{what}, {job.rows} rows a step {about}: {sum(counts) / len(rows):.0f} "
        f"tokens in the mean, {labelled / sum(counts):.0%} labelled; seed: {job.seed}; threads: "
        f"{threads}. Each contender is a process of its own and takes one optimizer step in turn "
        f"with Trainer + PEFT, **finetune** and the products alone{without}; {rates}. CPU time "
        "counts processes that a contender starts, and `to the first step` everything from its "
        "start. Ids and labels are read at each model's input; first losses agree to "
        f"{LOSS_TOLERANCE}"
        + (", but for LoRA in bf16, whose base is not rounded." if OTHER_BASE in summary else ".")
    )
    values = {
        "job": {
            "rows": job.rows,
            "steps": job.steps,
            "threads": threads,
            "gpu": job.gpu,
            "workload": job.name,
            "seed": job.seed,
            "rows_file": job.rows_file,
        },
        "timed_steps": timed,
        "tokens_of_steps": counts,
        "contenders": summary,
        "differences": failed,
        "races": [
            {
                name: [{k: v for k, v in answer.items() if k != "documents"} for answer in each]
                for name, each in race.items()
            }
            for race in races
        ],
    }
    table = tabulate(summary, failed, clock, job.gpu)
    return Result("Peers", how, values, table, [*remarks, *told])
