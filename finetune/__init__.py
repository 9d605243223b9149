"""Fine-tune language models on any backend of Accelerate: `import finetune as ft`.

Names load on first use, so that recipes and the command line need no torch to be read.
"""

import importlib
from typing import Any

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
    "Run": "finetune.run",
    "plan": "finetune.planner.answers",
    "launch": "finetune.launcher",
    "train": "finetune.worker",
    "export": "finetune.result.exporter",
    "prove": "finetune.prover.command",
    "doctor": "finetune.diagnosis.command",
    "report": "finetune.record.reporter",
    "plot_loss": "finetune.record.plot",
    "load": "finetune.result.inference",
    "generate": "finetune.result.inference",
}

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'finetune' has no attribute '{name}'")
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(HOMES)
