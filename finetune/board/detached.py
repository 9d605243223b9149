"""Run a command in a session of its own, and record its end: `python -m ...detached FOLDER`.

FOLDER/
  task.json      the task: its words, its log
  given.json     the devices that it may use
  lock           locked while this process runs
  started.json   {"pid": ..., "time": ...}
  ended.json     {"status": ..., "time": ...}, written last
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from finetune.process import interpreter
from finetune.runs.run import write_json


def main(folder: Path) -> None:
    """Run the task, if it has neither begun nor ended."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a second board was as fast
            return
        if (folder / "started.json").exists() or (folder / "ended.json").exists():
            return
        task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
        given = json.loads((folder / "given.json").read_text(encoding="utf-8"))["on"]
        gpus = ",".join(str(each["number"]) for each in given if each["kind"] == "cuda")
        variables = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        status = 1
        log = Path(task["log"])
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                child = subprocess.Popen(
                    interpreter.python("-m", "finetune", *task["words"]),
                    env=interpreter.environment(os.environ | variables),
                    cwd=task["place"],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, lambda number, _: child.send_signal(number))
                write_json(folder / "started.json", {"pid": os.getpid(), "time": time.time()})
                status = child.wait()
        finally:
            write_json(folder / "ended.json", {"status": status, "time": time.time()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
