"""Calls of the product fit what is installed, and what a CUDA build alone has is there."""

import inspect
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations import moe

from finetune.distributed import device, heartbeat
from finetune.kernels.expert_products import experts_forward
from finetune.models.packed_attention import varlen_words


def binds(function: Any, *given: Any, **named: Any) -> bool:
    inspect.signature(function).bind(*given, **named)
    return True


def test_calls_bind() -> None:
    assert binds(varlen_attn, *range(7), **varlen_words(varlen_attn, None, 5, shared=True))
    ours, theirs = (
        len(inspect.signature(f).parameters)
        for f in (experts_forward, moe.grouped_mm_experts_forward)
    )
    assert ours == theirs - 1  # two of theirs are handed on
    assert binds(bitsandbytes.functional.QuantState.to, None, torch.device("cuda"))


def test_both_flight_recorders_answer() -> None:
    library = torch._C._distributed_c10d
    assert all(hasattr(library, name) for name in heartbeat.RECORDERS)
    assert heartbeat.collectives_begun() == 0


def test_a_gpu_that_this_build_cannot_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that lists a GPU, and a CUDA build that finds none."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (problem,) = device.problems(device.inspect_gpus(0), "bf16", 0, 1)
    start = f"device: PyTorch {torch.__version__} cannot use this machine's 1 x NVIDIA H100"
    assert problem.startswith(start)
    assert "install a build of PyTorch for it, or set CUDA_VISIBLE_DEVICES= " in problem
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    (problem,) = device.problems(device.inspect_gpus(0), "bf16", 0, 1)
    assert problem.startswith("CUDA_VISIBLE_DEVICES=3: names no GPU of this machine")
