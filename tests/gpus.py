"""Stand-ins for what a machine with GPUs has."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU"),
]


def write_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an `nvidia-smi` of ours before the machine's own."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def without_weights(tiny: Any, folder: Path) -> dict[str, Any]:
    """A recipe's fields with a model whose weights are no file: loading it ends with an error."""
    shutil.copytree(tiny.model, folder / "model")
    (folder / "model/model.safetensors").write_bytes(b"")
    return tiny.fields(model={"name": str(folder / "model")})


def refuses(*_: Any) -> Any:
    """A compiler as Triton's is where Python's headers are missing."""
    raise OSError("Python.h: no such file")
