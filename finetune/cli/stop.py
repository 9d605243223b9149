"""`finetune stop`: let a run save and end, or cancel its queued job."""

import argparse
import os
import re
import signal
import socket
import time

SUMMARY = "let a run save and end, or cancel its queued job"
SECONDS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory")


def run(arguments: argparse.Namespace) -> int:
    from finetune.errors import FinetuneError
    from finetune.launchers.submission import queue_of
    from finetune.runs.progress import Watch
    from finetune.runs.run import read_object
    from finetune.runs.standing import holder, run_at

    run = run_at(arguments.run)
    record = read_object(run.job)
    if record and (queue := queue_of(record)).status(record).state != "ended":
        print(queue.cancel(record, run))
        return 0
    held = holder(run)
    if held is None:
        raise FinetuneError(f"{run.root}: nothing trains in it; it is {Watch(run).read().state}")
    found = re.fullmatch(r"process (\d+) on (\S+)", held)
    if found is None or found[2] != socket.gethostname():
        raise FinetuneError(f"{run.root}: in use by {held}; run finetune stop on that host")
    os.kill(int(found[1]), signal.SIGTERM)
    print(f"{run.root}: {held} saves and ends", flush=True)
    while holder(run) == held:
        time.sleep(SECONDS)
    now = Watch(run).read()
    print(f"{run.root}: {now.state} at step {now.step}")
    return 0
