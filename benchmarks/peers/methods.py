"""`python -m benchmarks peers --method NAME`: compare a method with TRL's trainer for it."""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import environments, method_job
from benchmarks.peers.method_job import MethodJob, as_row, documents_of_step
from benchmarks.peers.race import race
from benchmarks.peers.report import Race, medians, times
from benchmarks.peers.turns import digest
from benchmarks.record import ROOT, Circumstances, Result, write

WARMUP = 1
"""Number of untimed first steps."""
OURS, THEIRS, KEPT = "ours", "trl", "trl_kept"
TITLES = {
    OURS: "**finetune**",
    THEIRS: "TRL, defaults",
    KEPT: "TRL, activations kept",
}
ROWS = {"dpo": 4, "kto": 8, "orpo": 4, "reward": 4, "grpo": 32, "images": 4}
TITLE_OF = {"images": "SFT with images"}
TOLERANCE = 1e-3
"""Relative tolerance of log-probabilities and losses in the first step; all compute in fp32."""
WHAT = {
    "dpo": "pairs of answers, each a term of DPO's loss; the reference's pass over a step's pairs "
    "is in its time, for all of them",
    "kto": "answers that are wanted or not, and as many mismatched ones for the KL; the "
    "reference's passes over both are in a step's time, for all of them",
    "orpo": "pairs of answers",
    "reward": "pairs of answers, scored at their last token",
    "images": "rows of SFT with a question about one picture of 224 to 448 pixels a side (64 to "
    "256 tokens), through a tower of 8 blocks that is frozen",
    "grpo": f"completions of up to {method_job.COMPLETION_TOKENS} tokens, "
    f"{method_job.GENERATIONS} of each prompt of {method_job.PROMPT_TOKENS}, sampled, scored by "
    "the same function and trained on",
}


def main(words: Sequence[str], results: Path) -> int:
    arguments = build_parser(results).parse_args(words)
    circumstances = Circumstances.now(
        shlex.join(["python", "-m", "benchmarks", "peers", *words]), arguments.note
    )
    wrong = False
    for method in arguments.method:
        rows = arguments.rows or ROWS[method]
        job = MethodJob(method, rows, WARMUP + arguments.steps, arguments.shape, arguments.seed)
        place = arguments.work / f"{method}_{job.shape}"
        method_job.write(place, job)
        found, lost = race(
            commands(place, arguments.work), arguments.work, 1, False,
            range(WARMUP + 1, job.steps), arguments.minutes,
        )  # fmt: skip
        page = write(arguments.to, page_name(job), result(found, lost, job), circumstances)
        print(f"\n{page.read_text()}\nwrote {page} and {page.with_suffix('.json').name}\n")
        wrong |= bool(lost) or any(problems(found, job).values())
    return int(wrong)


def build_parser(results: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument(
        "--method", type=_methods, required=True,
        help=f"of {', '.join(method_job.METHODS)}, with commas, or all",
    )  # fmt: skip
    parser.add_argument("--shape", choices=method_job.SHAPES, default="16m", help="of the model")
    parser.add_argument("--rows", type=int, help="of an optimizer step; else the method's")
    parser.add_argument("--steps", type=int, default=5, help="timed ones, of each contender")
    parser.add_argument("--seed", type=int, default=0, help="of the rows")
    parser.add_argument("--minutes", type=float, default=60, help="of a race; then fewer steps")
    parser.add_argument("--work", type=Path, default=ROOT / ".bench", help="environments, models")
    parser.add_argument("--to", type=Path, default=results, help="folder of the results")
    parser.add_argument("--note", help="a sentence for the record, such as what else was running")
    return parser


def _methods(words: str) -> list[str]:
    chosen = list(method_job.METHODS) if words == "all" else words.split(",")
    if unknown := set(chosen) - set(method_job.METHODS):
        raise argparse.ArgumentTypeError(
            f"no method of a race is called {', '.join(sorted(unknown))}; known: "
            f"{', '.join(method_job.METHODS)}, or all"
        )
    return chosen


def page_name(job: MethodJob) -> str:
    """`method_NAME`, followed by settings that differ from the defaults."""
    shape = [] if job.shape == "16m" else [job.shape]
    seed = [f"seed_{job.seed}"] if job.seed else []
    return "_".join(["method", job.method, *shape, *seed])


def commands(place: Path, work: Path) -> dict[str, list[str]]:
    trl = str(environments.python_of("trl", work))
    return {
        OURS: [sys.executable, "-m", "benchmarks.peers.our_start", "method_ours", OURS, str(place)],
        **{
            name: [trl, "-m", "benchmarks.peers.method_trl", name, str(place)]
            for name in (THEIRS, KEPT)
        },
    }


def problems(found: Race, job: MethodJob) -> dict[str, list[str]]:
    """Deviations of each contender from the job; empty if it can be compared."""
    return {name: list(_problems(found, name, job)) for name in found}


def _problems(found: Race, name: str, job: MethodJob) -> list[str]:
    told: list[str] = []
    if job.method != "grpo":
        for step, answer in enumerate(found[name]):
            expected = {digest(*as_row(ids)) for ids in documents_of_step(job, step)}
            if missing := expected - set(answer["documents"]):
                told.append(f"step {step + 1}: {len(missing)} documents missing")
    if OURS not in found:
        return told
    mine, theirs = found[name][0], found[OURS][0]
    for key, value in compared(mine, job).items():
        known = compared(theirs, job)[key]
        if abs(value - known) > TOLERANCE * abs(known):
            told.append(f"{key} of the first step is {value:.6g}, not {known:.6g}")
    return told


def compared(answer: dict[str, Any], job: MethodJob) -> dict[str, float]:
    """Values by name that must be equal for all contenders in the first step.

    For DPO, KTO and ORPO these are log-probabilities, not losses: TRL uses other mismatched answers
    in KTO and another cross-entropy in ORPO.
    """
    metrics = answer["metrics"]
    if job.method == "grpo":
        return {"num_tokens": metrics["num_tokens"]}
    if job.method in ("reward", "images"):
        return {"loss": answer["loss"]}
    return {name: metrics[name] for name in ("logps/chosen", "logps/rejected")}


def tokens_of_step(job: MethodJob, step: int, found: Race) -> int:
    """Tokens without padding of the rows of a step, in prompts and answers."""
    if job.method == "grpo":
        return round(found[OURS][step]["metrics"]["num_tokens"])
    return sum(len(ids) for ids in documents_of_step(job, step))


def result(found: Race, lost: dict[str, str], job: MethodJob) -> Result:
    """The result of a race."""
    steps = min((len(each) for each in found.values()), default=0)
    counts = [tokens_of_step(job, step, found) for step in range(steps)] if OURS in found else []
    summary: dict[str, Any] = {}
    for name, answers in found.items():
        rates = [
            (count, each["cpu_seconds"]) for count, each in zip(counts, answers, strict=False)
        ][WARMUP:]
        summary[name] = {
            "tokens_per_cpu_second": medians(rates) if rates else None,
            "peak_bytes": answers[-1]["peak_bytes"],
            "first_loss": answers[0]["loss"],
        }
        if name != OURS and OURS in found:
            speeds = [
                (theirs["cpu_seconds"], mine["cpu_seconds"])
                for theirs, mine in zip(answers, found[OURS], strict=False)
            ][WARMUP:]
            summary[name] |= {
                "ours_of_it": medians(speeds),
                "our_memory_of_its": found[OURS][-1]["peak_bytes"] / answers[-1]["peak_bytes"],
            }
    wrong = problems(found, job)
    config = method_job.SHAPES[job.shape]
    how = (
        f"{job.rows} {WHAT[job.method]}. LoRA r={job.r} on every linear layer of a Llama with "
        f"random weights, hidden {config['hidden_size']}, {config['num_hidden_layers']} layers, "
        f"vocabulary {config['vocab_size']:,}, in fp32; one thread. Each contender is a process "
        f"of its own and takes one optimizer step in turn; medians of {max(0, steps - WARMUP)} "
        f"steps after {WARMUP} other, ratios step by step on the same rows. What each model is "
        "given is read at its input, and log-probabilities (of rewards the loss, of an online "
        f"method the number of tokens) of the first step agree to {TOLERANCE:g}. CPU time counts "
        "processes that a contender starts."
    )
    values = {
        "job": dataclasses.asdict(job),
        "contenders": summary,
        "differences": wrong,
        "lost": lost,
        "race": {
            name: [{k: v for k, v in each.items() if k != "documents"} for each in answers]
            for name, answers in found.items()
        },
    }
    remarks = [f"{TITLES[name]} stopped: {why}" for name, why in lost.items()]
    remarks += [f"{TITLES[name]}: {'; '.join(told)}" for name, told in wrong.items() if told]
    title = f"{TITLE_OF.get(job.method, job.method.upper())} next to TRL"
    return Result(title, how, values, tabulate(summary, wrong), remarks)


def tabulate(summary: dict[str, Any], wrong: dict[str, list[str]]) -> list[list[str]]:
    head = [
        "", "real tokens per CPU-second", "finetune is", "peak memory", "finetune's of it",
        "first loss", "same rows",
    ]  # fmt: skip
    rows = [
        [
            TITLES[name],
            f"{each['tokens_per_cpu_second']:,.0f}",
            times(each.get("ours_of_it")),
            f"{each['peak_bytes'] / 2**20:,.0f} MiB",
            times(each.get("our_memory_of_its"), ""),
            f"{each['first_loss']:.4f}",
            "no" if wrong[name] else "yes",
        ]
        for name, each in sorted(summary.items(), key=lambda item: item[1]["tokens_per_cpu_second"])
    ]
    return [head, *rows]
