"""Fine-tune language models on any backend of Accelerate: `import finetune as ft`.

Names load on first use, so that recipes and the command line need no torch to be read.
"""

import importlib
import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and HERE != sys.path[0] == os.getcwd():
    # `python -m finetune`, as `accelerate launch` starts it: a module that a user keeps in the
    # working folder must not be taken for one of the standard library or of a dependency.
    del sys.path[0]

HOMES = {
    "SFT": "finetune.methods",
    "Pretrain": "finetune.methods",
    "Recipe": "finetune.recipe",
    "Model": "finetune.recipe",
    "LoRA": "finetune.recipe",
    "Data": "finetune.recipe",
    "Batch": "finetune.recipe",
    "Optim": "finetune.recipe",
    "Kernels": "finetune.recipe",
    "Evaluation": "finetune.recipe",
    "Saving": "finetune.recipe",
    "FinetuneError": "finetune.errors",
    "Run": "finetune.runs.run",
    "plan": "finetune.planner.estimate.answers",
    "launch": "finetune.launchers.accelerate",
    "train": "finetune.training.worker",
    "export": "finetune.exporters.huggingface",
    "prove": "finetune.cli.prove",
    "doctor": "finetune.cli.doctor",
    "report": "finetune.reports.page",
    "plot_loss": "finetune.reports.plot",
    "load": "finetune.inference.generate",
    "generate": "finetune.inference.generate",
}

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'finetune' has no attribute '{name}'")
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(HOMES)
