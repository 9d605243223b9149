"""Fine-tune language models on any backend of Accelerate: `import finetune as ft`.

Names are imported on first use, so that recipes and the command line load without torch.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from finetune.version import __version__

if TYPE_CHECKING:
    from finetune.catalog import resolve as load_recipe
    from finetune.errors import (
        FinetuneError,
        Interrupted,
        TrainingFailure,
    )
    from finetune.evaluation.exact_match import (
        Score,
        exact_match,
        references,
    )
    from finetune.exporters.export import export
    from finetune.importers.proposal import recipe_for
    from finetune.inference.generate import (
        Loaded,
        generate,
        load,
        load_base,
        open_model,
    )
    from finetune.launchers.job import launch
    from finetune.methods.classifier import Classifier
    from finetune.methods.cpo import CPO
    from finetune.methods.distill import Distill
    from finetune.methods.dpo import DPO
    from finetune.methods.grpo import GRPO
    from finetune.methods.kto import KTO
    from finetune.methods.orpo import ORPO
    from finetune.methods.pretrain import Pretrain
    from finetune.methods.reward import RewardModel
    from finetune.methods.rloo import RLOO
    from finetune.methods.sft import SFT
    from finetune.methods.simpo import SimPO
    from finetune.planner.estimate.plan_api import plan
    from finetune.planner.estimate.predict import Prediction
    from finetune.planner.plan import Plan
    from finetune.quickstart.supervised import write_data as quickstart_data
    from finetune.recipe import (
        Batch,
        Data,
        Evaluation,
        Kernels,
        LoRA,
        Model,
        Optim,
        Recipe,
        Saving,
        Teacher,
    )
    from finetune.reports.page import report
    from finetune.reports.plot import plot_loss
    from finetune.rewards import Reward
    from finetune.runs.run import Run, open_run
    from finetune.training.run_options import Options
    from finetune.training.worker import train
    from finetune.verification.model_checks.examination import doctor
    from finetune.verification.proofs.prove import prove

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and _HERE != sys.path[0] == os.getcwd():
    # `accelerate launch` runs `python -m finetune`: modules in the working directory must not
    # shadow modules of the standard library or of dependencies.
    del sys.path[0]

NAMES = {
    "methods.classifier": "Classifier",
    "methods.cpo": "CPO",
    "methods.distill": "Distill",
    "methods.dpo": "DPO",
    "methods.kto": "KTO",
    "methods.orpo": "ORPO",
    "methods.simpo": "SimPO",
    "methods.grpo": "GRPO",
    "methods.rloo": "RLOO",
    "rewards": "Reward",
    "methods.pretrain": "Pretrain",
    "methods.reward": "RewardModel",
    "methods.sft": "SFT",
    "recipe": "Recipe Model LoRA Data Batch Optim Kernels Evaluation Saving Teacher",
    "errors": "FinetuneError TrainingFailure Interrupted",
    "runs.run": "Run open_run",
    "catalog": "load_recipe",
    "importers.proposal": "recipe_for",
    "planner.estimate.plan_api": "plan",
    "planner.plan": "Plan",
    "planner.estimate.predict": "Prediction",
    "launchers.job": "launch",
    "training.worker": "train",
    "training.run_options": "Options",
    "exporters.export": "export",
    "verification.proofs.prove": "prove",
    "verification.model_checks.examination": "doctor",
    "reports.page": "report",
    "reports.plot": "plot_loss",
    "inference.generate": "load load_base open_model generate Loaded",
    "evaluation.exact_match": "exact_match references Score",
    "quickstart.supervised": "quickstart_data",
}
"""Public names of each module of this package."""

HOMES = {name: f"finetune.{module}" for module, names in NAMES.items() for name in names.split()}

INNER_NAMES = {"load_recipe": "resolve", "quickstart_data": "write_data"}
"""Public names that differ from those in their modules."""

__all__ = [  # noqa: RUF022 - in the order of their use
    "Classifier",
    "CPO",
    "Distill",
    "DPO",
    "KTO",
    "ORPO",
    "SimPO",
    "GRPO",
    "RLOO",
    "Reward",
    "Pretrain",
    "RewardModel",
    "SFT",
    "Recipe",
    "Model",
    "LoRA",
    "Data",
    "Batch",
    "Optim",
    "Kernels",
    "Evaluation",
    "Saving",
    "Teacher",
    "FinetuneError",
    "TrainingFailure",
    "Interrupted",
    "Run",
    "open_run",
    "load_recipe",
    "recipe_for",
    "plan",
    "Plan",
    "Prediction",
    "launch",
    "train",
    "Options",
    "export",
    "prove",
    "doctor",
    "report",
    "plot_loss",
    "load",
    "load_base",
    "open_model",
    "generate",
    "Loaded",
    "exact_match",
    "references",
    "Score",
    "quickstart_data",
    "__version__",
]


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """A public name, imported from the module that defines it."""
        if name not in HOMES:
            raise AttributeError(f"module 'finetune' has no attribute '{name}'")
        return getattr(importlib.import_module(HOMES[name]), INNER_NAMES.get(name, name))


def __dir__() -> list[str]:
    return sorted([*HOMES, "__version__"])
