"""What is wrong with the GPUs of a machine ends a run before its model is loaded.

Each run is given a folder without weights: a run that went on would end with another message.
"""

from typing import Any

import pytest
import torch
from gpus import without_weights, write_smi

import finetune as ft
from finetune import catalog
from finetune.errors import FinetuneError


@pytest.fixture
def recipe(tiny, tmp_path, monkeypatch) -> Any:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    write_smi(tmp_path, "echo 'NVIDIA L4, 23034'; echo 'NVIDIA L4, 23034'", monkeypatch)
    return catalog.from_fields(without_weights(tiny, tmp_path))


def have(monkeypatch: pytest.MonkeyPatch, count: int, capability: tuple[int, int]) -> None:
    """Let PyTorch find GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90"])


@pytest.mark.parametrize(
    ("visible", "told"),
    [
        (None, f"device: PyTorch {torch.__version__} cannot use this machine's 2 x NVIDIA L4: "),
        ("7", "CUDA_VISIBLE_DEVICES=7: names no GPU of this machine, which has 2 x NVIDIA L4"),
    ],
)
def test_gpus_that_cannot_be_used_are_refused(recipe, tmp_path, monkeypatch, visible, told):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(FinetuneError) as caught:
        ft.train(recipe, output=tmp_path / "run")
    assert caught.value.problems[0].startswith(told)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("capability", "told"),
    [
        ((7, 5), "precision: bf16 is emulated, slowly, on the GPU of rank 0 here"),
        ((7, 0), f"device: PyTorch {torch.__version__} does not support the GPU of rank 0 here"),
    ],
)
def test_a_gpu_that_is_too_old_is_refused(recipe, tmp_path, monkeypatch, capability, told):
    have(monkeypatch, 2, capability)
    with pytest.raises(FinetuneError) as caught:
        ft.train(recipe, precision="bf16", output=tmp_path / "run")
    assert caught.value.problems[0].startswith(told)
    assert not (tmp_path / "run").exists()


def test_fewer_gpus_than_processes_are_refused(recipe, tmp_path, monkeypatch):
    """In each process of a launch, before it waits for the others."""
    have(monkeypatch, 2, (9, 0))
    launched = {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "RANK": 3, "LOCAL_RANK": 3}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "none"}
    for name, value in (launched | meeting).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(FinetuneError) as caught:
        ft.train(recipe, "ddp", precision="bf16", output=tmp_path / "run")
    told = "processes: 4 on this machine, where PyTorch can use 2 GPUs; use --processes 2"
    assert caught.value.problems[0].startswith(told)
