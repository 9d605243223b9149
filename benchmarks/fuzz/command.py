"""`python -m benchmarks fuzz --cases 100000 --seed 0`: files of any content are read or rejected.

The cases of each subject run in a separate process, forked from one that has imported everything. A
crash of a library ends only that process and counts as a fault; the next case runs in a new one.
"""

import argparse
import atexit
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.fuzz.cases import Fault, Originals, Outcome, quiet_process, run_case
from benchmarks.fuzz.subjects import Subject, build, subjects
from benchmarks.record import Circumstances, Result, write

PARTS = 20
"""Number of parts, each with cases of all subjects; results are written after each part."""
BLOCK = 500
"""Maximum number of cases per process."""
IN_MEMORY = next((place for place in ("/dev/shm",) if os.access(place, os.W_OK)), None)
"""Folder in memory, or None if the machine has none."""


def main(words: Sequence[str], results: Path) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="in all, shared by the subjects")
    parser.add_argument("--seconds", type=float, help="begin no other part after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="SUBJECT", help="some of the subjects")
    parser.add_argument("--case", type=int, help="one case of one subject, with its traceback")
    parser.add_argument("--to", type=Path, default=results, help="folder of the result")
    parser.add_argument("--note", help="a sentence for the record")
    given = parser.parse_args(words)
    circumstances = Circumstances.now(
        shlex.join(["python", "-m", "benchmarks", "fuzz", *words]), given.note
    )
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(prefix="finetune-fuzz-", dir=IN_MEMORY) as folder:
        home = Path(folder)
        os.environ["FINETUNE_CACHE"] = str(home / "own-cache")
        build(home)
        every = subjects(home)
        if unknown := set(given.only or ()) - set(every):
            parser.error(f"no subject is called {', '.join(unknown)}; known: {', '.join(every)}")
        chosen = {name: each for name, each in every.items() if name in (given.only or every)}
        if given.case is not None:
            (name,) = chosen
            print(run_case(name, chosen[name], given.seed, given.case))
            return 0
        until = time.monotonic() + given.seconds if given.seconds else math.inf
        found, page = {name: Outcome() for name in chosen}, given.to
        for part in range(PARTS):
            for name, count in shares(chosen, given.cases).items():
                numbers = range(count * part // PARTS, count * (part + 1) // PARTS)
                in_processes(name, chosen[name], given.seed, numbers, found[name])
            page = write(given.to, "fuzz", result_of(found, given.seed), circumstances)
            if time.monotonic() > until:
                break
    print(page.read_text())
    for outcome in found.values():
        for fault in outcome.faults[:50]:
            print(fault)
    return int(any(outcome.faults for outcome in found.values()))


def shares(chosen: dict[str, Subject], cases: int) -> dict[str, int]:
    """Number of cases of each subject by weight; the first subject gets the remainder."""
    total = sum(each.weight for each in chosen.values())
    counts = {name: int(cases * each.weight / total) for name, each in chosen.items()}
    counts[next(iter(counts))] += cases - sum(counts.values())
    return counts


def in_processes(name: str, subject: Subject, seed: int, numbers: range, found: Outcome) -> None:
    """Run cases of a subject in forked processes, continuing after a case that crashes one."""
    left = numbers
    while left:
        outcome, done = _forked(name, subject, seed, left[:BLOCK])
        found.ends.update(outcome.ends)
        found.faults += outcome.faults
        found.seconds += outcome.seconds
        found.slowest = max(found.slowest, outcome.slowest)
        left = left[done:]
    print(f"{name}: {found.cases:,} cases, {len(found.faults)} wrong", file=sys.stderr)


def _forked(name: str, subject: Subject, seed: int, block: range) -> tuple[Outcome, int]:
    originals = Originals(subject)
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        quiet_process()
        atexit.register(
            os._exit, 1
        )  # a normal exit would wait for torch's threads, which fork drops
        with os.fdopen(writer, "w") as told:
            for number in block:
                begun = time.process_time()
                end = run_case(name, subject, seed, number, originals)
                seconds = time.process_time() - begun
                fault = vars(end) if isinstance(end, Fault) else None
                told.write(json.dumps([None if fault else end, seconds, fault]) + "\n")
                told.flush()
        os._exit(0)
    os.close(writer)
    found, done = Outcome(), 0
    with os.fdopen(reader) as told:
        for line in told:
            end, seconds, fault = json.loads(line)
            found.add(end if fault is None else Fault(**fault), seconds)
            done += 1
    _, status = os.waitpid(child, 0)
    originals.put_back()
    if done < len(block):
        found.add(Fault(name, block[done], "?", f"the process ended by {status}", ""), 0.0)
        done += 1
    return found, done


def result_of(found: dict[str, Outcome], seed: int) -> Result:
    total, wrong = (
        sum(outcome.cases for outcome in found.values()),
        sum(len(outcome.faults) for outcome in found.values()),
    )
    values = {
        "seed": seed, "cases": total, "wrong": wrong,
        "subjects": {
            name: {
                "cases": each.cases, "read": each.ends["read"], "refused": each.ends["refused"],
                "wrong": len(each.faults), "seconds": round(each.seconds, 1),
                "slowest_seconds": round(each.slowest, 2),
                "kinds": sorted({fault.kind for fault in each.faults}),
            }
            for name, each in found.items()
        },
    }  # fmt: skip
    table = [["subject", "cases", "read", "refused", "wrong", "CPU s", "slowest case, s"]]
    for name, each in values["subjects"].items():
        numbers = (f"{each[key]:,}" for key in ("cases", "read", "refused", "wrong"))
        table.append([name, *numbers, f"{each['seconds']:,}", f"{each['slowest_seconds']:.2f}"])
    return Result(
        f"{total:,} changed files: {wrong} that were neither read nor refused",
        "Each case changes one file that the toolkit reads (its values, lines or bytes) and reads "
        "it as a command does, in one process. It is wrong where that ends with another error than "
        "one that names the mistake, with a message of several lines, by a signal, after 30 "
        "seconds of processor time, or with more than 6 GiB of address space.",
        values,
        table,
        [],
    )
