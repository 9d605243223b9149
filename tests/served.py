"""A server of `finetune serve` in a process of its own, and what it is asked."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from conftest import end_tree, start

ASKED = [{"role": "user", "content": "What is kept?"}]
TOOL = {"type": "function", "function": {"name": "look"}}


@contextlib.contextmanager
def running(folder: Path, *words: str, **env: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A server on a free port, and its process."""
    process = start(["serve", *words, "--port", "0"], folder, warm=True, **env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "serving" not in line:
            raise AssertionError(line + process.communicate()[1])
        yield line.split(" at ")[1].split("/v1")[0], process
        end_tree(process.pid)
        said = process.communicate()[1]
        assert "Traceback" not in said, said
        assert "Task was destroyed" not in said, said
    finally:
        if process.poll() is None:
            end_tree(process.pid)
        process.wait()
