"""`python -m benchmarks peers`: install other toolkits, race them, and write the results."""

import argparse
import dataclasses
import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import environments, methods, report, workload
from benchmarks.peers.race import race
from benchmarks.peers.workload import Job
from benchmarks.record import ROOT, Circumstances, write
from finetune.runs.run import write_json

PEERS = {
    "ours_shipped": None, "trainer_grouped": None,
    "trl": "trl", "trl_packing": "trl", "llamafactory": "llamafactory", "ours_malloc": None,
    "ours_eager": None, "ours_lora": None,
}  # fmt: skip
"""Peers other than Trainer + PEFT, with their environments; None is that of the toolkit."""
GPU_PEERS = {name: PEERS[name] for name in PEERS if name != "ours_malloc"} | {"unsloth": "unsloth"}
"""Peers on GPUs, where PyTorch always pools memory."""


def main(words: Sequence[str], results: Path) -> int:
    if any(word.partition("=")[0] == "--method" for word in words):
        return methods.main(words, results)
    parser = build_parser(results)
    arguments = parser.parse_args(words)
    known = GPU_PEERS if arguments.gpu else PEERS
    asked = None if arguments.peers is None else arguments.peers.split(",")
    if unknown := set(asked or []) - set(known):
        parser.error(f"no peer is called {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    everything = list(workload.WORKLOADS)
    chosen = everything if arguments.workload == ["all"] else arguments.workload
    if unknown := set(chosen) - set(everything):
        parser.error(
            f"no workload is called {', '.join(sorted(unknown))}; "
            f"known: {', '.join(everything)}, or all"
        )
    if min(arguments.rows or 1, arguments.steps, arguments.threads) < 1:
        parser.error("rows, steps and threads are at least 1")
    if arguments.seed < 0:
        parser.error("--seed is at least 0")
    for name in chosen:
        if (arguments.rows or 0) % (workload.WORKLOADS[name].micro_rows or 1):
            parser.error(f"--rows: micro-batches of {name} do not divide them")
    if arguments.rows_file is not None:
        try:
            for name in chosen:
                workload.rows_of(arguments.rows_file, _job(name, arguments))
        except (OSError, ValueError) as error:
            parser.error(f"--rows-file: {error}")
    circumstances = Circumstances.now(
        shlex.join(["python", "-m", "benchmarks", "peers", *words]), arguments.note
    )
    found = [measure(name, arguments, asked, known, circumstances) for name in chosen]
    return int(any(found))


def build_parser(results: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument(
        "--workload", type=lambda words: words.split(","), default=["short"],
        help=f"of {', '.join(workload.WORKLOADS)}, with commas, or all: rows, what is trained",
    )  # fmt: skip
    parser.add_argument(
        "--method", metavar="NAME", help="race a method against TRL instead: see --method all -h"
    )
    parser.add_argument("--rows", type=int, help="of an optimizer step; else the workload's")
    parser.add_argument(
        "--rows-file", type=Path, help="JSONL of your own rows: input_ids, and labels or none"
    )
    parser.add_argument("--steps", type=int, default=8, help="timed ones, of each contender")
    parser.add_argument("--seed", type=int, default=0, help="of the rows")
    parser.add_argument("--threads", type=int, default=1, help="more than one: seconds, not CPU's")
    parser.add_argument("--minutes", type=float, default=60, help="of a race; then fewer steps")
    parser.add_argument("--peers", help=f"of {', '.join(PEERS | GPU_PEERS)}, with commas")
    parser.add_argument("--gpu", action="store_true", help="on a GPU, Unsloth included")
    parser.add_argument("--work", type=Path, default=ROOT / ".bench", help="environments, models")
    parser.add_argument("--to", type=Path, default=results, help="folder of the results")
    parser.add_argument("--note", help="a sentence for the record, such as what else was running")
    return parser


def measure(
    name: str,
    arguments: argparse.Namespace,
    asked: Sequence[str] | None,
    known: dict[str, str | None],
    circumstances: Circumstances,
) -> bool:
    """Run the races of one workload and write their page; returns whether any rows differed."""
    special = workload.WORKLOADS[name]
    usual = [*special.peers, *["unsloth"] * arguments.gpu]
    usual = [peer for peer in usual if peer in known]
    job = _job(name, arguments)
    place = arguments.work / "job"
    workload.write(place, job)
    peers = usual if asked is None else asked
    races, remarks = run(job, arguments, peers, known, circumstances.values["commit"])
    found = report.result(races, workload.read_rows(place), job, arguments.threads, remarks)
    page = write(arguments.to, page_name(job, arguments.threads), found, circumstances)
    print(f"\n{page.read_text()}\nwrote {page} and {page.with_suffix('.json').name}\n")
    return any(found.values["differences"].values())


def _job(name: str, arguments: argparse.Namespace) -> Job:
    file = arguments.rows_file
    return Job(
        arguments.rows or workload.WORKLOADS[name].rows,
        report.WARMUP + arguments.steps,
        arguments.gpu,
        name,
        arguments.seed,
        None if file is None else str(file.resolve()),
    )


def page_name(job: Job, threads: int) -> str:
    """`peers`, followed by settings that differ from the defaults."""
    parts = ["peers"]
    if job.name != "short":
        parts.append(job.name)
    if job.rows_file is not None:
        parts.append(Path(job.rows_file).stem)
    if job.seed:
        parts.append(f"seed_{job.seed}")
    if job.gpu:
        parts.append("gpu")
    elif threads > 1:
        parts.append(f"{threads}_threads")
    return "_".join(parts)


def run(
    job: Job,
    arguments: argparse.Namespace,
    chosen: Sequence[str],
    known: dict[str, str | None],
    commit: str | None,
) -> tuple[list[report.Race], list[str]]:
    """Race each peer separately against the contenders that are in all races, to limit memory.

    Stored races of the same commit and job are reused, to continue after an interruption.
    """
    work: Path = arguments.work
    races: list[report.Race] = []
    remarks: list[str] = []
    base = {
        name: [sys.executable, "-m", *words, name, str(work / "job")]
        for name, words in (
            (report.REFERENCE, ["benchmarks.peers.trainers"]),
            (report.OURS, ["benchmarks.peers.our_start", "ours"]),
            (report.FLOOR, ["benchmarks.peers.our_start", "ours"]),
        )
    }
    for peer in chosen or [None]:
        commands = dict(base)
        place = None if peer is None else known[peer]
        if peer == report.GROUPED:  # it has other rows per step: raced against `ours_shipped` only
            trainer, product, _ = base.values()
            commands = {
                report.GROUPED: [*trainer[:-2], report.GROUPED, str(work / "job")],
                report.SHIPPED: [*product[:-2], report.SHIPPED, str(work / "job")],
                report.FLOOR: base[report.FLOOR],
            }
        elif peer is not None and place is None:
            commands[peer] = [*base[report.OURS][:-2], peer, str(work / "job")]
        elif place is not None:
            try:
                python = environments.python_of(place, work)
            except environments.CannotInstall as error:
                remarks.append(f"{report.TITLES[peer]} could not be installed: {error}")
                continue
            trainers = [str(python), "-m", "benchmarks.peers.trainers", peer, str(work / "job")]
            commands[peer] = trainers
            if job.workload.large and not job.gpu:
                del commands[report.REFERENCE]
        path = work / f"race_{job.name}_{job.seed}_{peer}.json"
        answers, lost = kept(path, job, arguments, commands, commit)
        remarks += [f"{report.TITLES[name]} stopped: {why}" for name, why in lost.items()]
        races.append(answers)
    return races, remarks


def kept(
    path: Path,
    job: Job,
    arguments: argparse.Namespace,
    commands: dict[str, list[str]],
    commit: str | None,
) -> tuple[report.Race, dict[str, str]]:
    """Run a race, or read the answers of the same race from a file."""
    threads: int = arguments.threads
    key: dict[str, Any] = dataclasses.asdict(job) | {"threads": threads, "commit": commit}
    if job.rows_file is not None:
        key["rows"] = hashlib.sha256(Path(job.rows_file).read_bytes()).hexdigest()
    if path.exists():
        found = json.loads(path.read_text())
        changed = str(key["commit"]).endswith("-dirty")  # uncommitted code may differ
        if found["key"] == key and not found["lost"] and not changed:
            print(f"kept: {path}", flush=True)
            return found["answers"], {}
    whole = report.GROUPED in commands  # it is compared over one epoch
    rounds = range(job.steps if whole else report.WARMUP + 1, job.steps)
    answers, lost = race(commands, path.parent, threads, job.gpu, rounds, arguments.minutes)
    write_json(path, {"key": key, "answers": answers, "lost": lost})
    return answers, lost
