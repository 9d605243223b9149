"""Compare completions and rewards of online methods, and score those of plain transformers."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.inference.sampling import Completion
from finetune.methods.online import Online
from finetune.recipe import Recipe
from finetune.rewards.process import RewardProcess
from finetune.runs.run import Run, read_lines
from finetune.training.online.reward_columns import column_names, reward_columns
from finetune.training.online.sampled import mean, total
from finetune.verification.proofs.proof import Tolerance
from finetune.verification.proofs.small_recipe import Subject

NOT_COMPARED = ("sampling/", "clip_ratio/")
"""Prefixes of metrics that measure time, or jump by a whole token at the edge of a range."""
SCALE = 1.0
"""Size of an advantage; the advantages of a group sum to zero, and so does the loss."""


def scale_of(recipe: Recipe) -> float:
    """Scale for differences of a loss that is near zero by construction; 0 for other methods."""
    return SCALE if isinstance(recipe, Online) else 0.0


def differences(reference: Run, run: Run, tolerance: Tolerance) -> list[str]:
    """Completions, rewards and metrics of samplings that differ from the reference."""
    if not reference.completions.is_file():
        return []
    wrong = _compare_texts(*(list(read_lines(each.completions)) for each in (reference, run)))
    alone, here = _measures(reference), _measures(run)
    for step, wanted in alone.items():
        for name, value in wanted.items():
            found = here.get(step, {}).get(name, math.nan)
            if not abs(found - value) <= tolerance.loss * max(SCALE, abs(value)):
                wrong.append(f"step {step}: {name} {found} instead of {value}")
    return wrong[:3]


def _compare_texts(alone: list[dict[str, Any]], here: list[dict[str, Any]]) -> list[str]:
    if len(alone) != len(here):
        return [f"{len(here)} completions are kept instead of {len(alone)}"]
    return [
        f"sampling of step {first['step']}: {second[key]!r:.60} instead of {first[key]!r:.60}"
        for first, second in zip(alone, here, strict=True)
        for key in ("step", "prompt", "completion", "rewards")
        if first[key] != second[key]
    ]


def _measures(run: Run) -> dict[int, dict[str, float]]:
    """Metrics of each step, without those of `NOT_COMPARED`."""
    return {
        each["step"]: {
            name: value
            for name, value in each["metrics"].items()
            if not name.startswith(NOT_COMPARED)
        }
        for each in run.read_metrics("train")
    }


def mean_reward(
    subject: Subject, tokenizer: PreTrainedTokenizerBase, completion_ids: Sequence[list[int]]
) -> float:
    """Mean reward of one completion per held-out prompt, as in an evaluation.

    Args:
        subject: subject of an online method.
        tokenizer: tokenizer of its model.
        completion_ids: token ids of each completion, including the stop token.
    """
    recipe, rows = subject.recipe, subject.data.eval
    assert isinstance(recipe, Online)
    ended = [len(ids) < recipe.max_completion_length for ids in completion_ids]
    ended = [
        short or ids[-1] == subject.eos for short, ids in zip(ended, completion_ids, strict=True)
    ]
    completions = [
        Completion(ids, end, 0.0) for ids, end in zip(completion_ids, ended, strict=True)
    ]
    names = column_names(subject.data.train)
    columns = reward_columns(tokenizer, names, rows, np.arange(len(rows)), completions)
    rewards = recipe.eval_reward_funcs or recipe.reward_funcs
    with contextlib.closing(RewardProcess(rewards, recipe.reward_timeout)) as process:
        scores, _ = process.score(columns)
    return mean(total(np.array(scores, dtype=np.float64), rewards))
