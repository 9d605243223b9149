"""Traces of what runs on a GPU, by a CUDA build of PyTorch on a machine without a GPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

collect_ignore_glob = [] if torch.version.cuda else ["test_*.py"]


@pytest.fixture(autouse=True)
def without_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("these traces stand for a GPU where there is none; there is one: make test-gpu")
