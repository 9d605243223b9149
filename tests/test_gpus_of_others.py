"""GPUs that others use, or that differ, are named by the command before the model is loaded.

PyTorch reports GPUs that are not there. The model's folder has no weights: a run that went on would
end with another message.
"""

from typing import Any

import pytest
from conftest import run_command, warm_python, write_recipe
from gpus import without_weights, write_smi

WITH_GPUS = """
import os, sys, types
import torch
import bitsandbytes  # it would look for functions of CUDA

rank, cards = int(os.environ.get("RANK", 0)), os.environ["CARDS"].split(",")
free, total = int(os.environ["FREE"]) * 2**30, 24 * 2**30
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: len(cards)
torch.cuda.current_device = lambda: rank
torch.cuda.set_device = lambda *_: None
torch.cuda.get_device_capability = lambda *_: (8, 9)
torch.cuda.get_arch_list = lambda: ["sm_89"]
torch.cuda.mem_get_info = lambda *_: (free, total)
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(
    name=cards[rank], total_memory=total, major=8, minor=9
)
begin = torch.distributed.init_process_group
torch.distributed.init_process_group = lambda *_, **given: begin("gloo", timeout=given["timeout"])
from finetune.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""Runs the command line where GPUs can be asked for, but nothing can be computed on them."""


@pytest.fixture
def words(tiny, tmp_path) -> list[str]:
    """A script with the words that train a model without weights."""
    script = tmp_path / "gpus.py"
    script.write_text(WITH_GPUS)
    made = write_recipe(tmp_path / "r.json", without_weights(tiny, tmp_path))
    return [str(script), "train", str(made), "--output", str(tmp_path / "run")]


def test_a_gpu_that_others_fill_is_refused(words, tmp_path, monkeypatch):
    write_smi(tmp_path, "echo 'GPU-1, 4711, /opt/app/server, 24000 MiB'", monkeypatch)
    cards: dict[str, Any] = {"CARDS": "NVIDIA L4", "FREE": "0"}
    said = run_command([warm_python(), "-u", *words], tmp_path, env=cards, seconds=120).refused()
    assert "only 0 B of 24.0 GiB are free on this GPU: the rest is in use" in said
    assert "by /opt/app/server (process 4711) with 24000 MiB; stop that process" in said


def test_gpus_that_differ_are_told(words, tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    cards: dict[str, Any] = {"CARDS": "NVIDIA L4,NVIDIA A10", "FREE": "24"}
    done = run_command([warm_python(), *launch, *words], tmp_path, env=cards, seconds=120)
    assert done.status != 0, done.output
    told = (
        "note: device: the GPUs of this job differ: rank 0 has NVIDIA L4 with 24.0 GiB, rank 1 has "
        "NVIDIA A10 with 24.0 GiB; every step waits for the slowest"
    )
    assert done.stdout.count(told) == 1, done.output
