"""The script of docs/clusters.md on two Ray nodes of one machine: `make test-engines`."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv" / "bin"
RECIPE = """
import pathlib, sys
sys.path[:0] = [".", ".."]
from conftest import build_tiny, write_recipe
place = pathlib.Path(sys.argv[1])
fields = {"max_steps": 400, "saving": {"every": 20}, "evaluation": {"every": 400}}
write_recipe(place / "recipe.json", build_tiny(place / "tiny").fields(**fields))
"""
"""By the toolkit's own environment, which has its libraries."""


def test_a_run_on_ray_goes_on_after_it_lost_a_node(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    # Tasks have the environment of their node.
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    subprocess.run([BIN / "python", "-c", RECIPE, tmp_path], cwd=ROOT / "tests", check=True)
    (script,) = re.findall(
        r"```python\n(# on_ray.py.*?)```", (ROOT / "docs/clusters.md").read_text(), re.DOTALL
    )
    (tmp_path / "on_ray.py").write_text(script)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    run = tmp_path / "run"
    words = [
        "2",
        "0",
        str(tmp_path / "recipe.json"),
        "--backend",
        "ddp",
        "--precision",
        "fp32",
        "--no-plot",
    ]
    try:
        other = cluster.add_node(num_cpus=1, num_gpus=0)
        process = subprocess.Popen(
            [sys.executable, "on_ray.py", *words, "--no-plot", "--output", str(run)], cwd=tmp_path,
            env=os.environ | {"RAY_ADDRESS": cluster.address},
        )  # fmt: skip
        until = time.monotonic() + 300
        while not any((run / "checkpoints").glob("step-*")):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        raylet = other.all_processes["raylet"][0].process.pid
        cluster.remove_node(other, allow_graceful=False)
        end_tasks(raylet)
        cluster.add_node(num_cpus=1, num_gpus=0)
        assert process.wait(600) == 0
    finally:
        cluster.shutdown()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kinds = [each["kind"] for each in records]
    assert (kinds.count("start"), kinds.count("train")) == (2, 400)
    assert (run / "final").is_dir()


def end_tasks(raylet: int) -> None:
    """End what the tasks of a lost node started, as the end of a machine does."""
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            variables = (place / "environ").read_bytes().split(b"\0")
            if f"RAY_RAYLET_PID={raylet}".encode() in variables:
                os.kill(int(place.name), signal.SIGKILL)
