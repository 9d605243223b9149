"""Score answers with reward functions or reward models, called as in online training."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from finetune.data.prompts import ANSWER, RESERVED, context_columns, is_json
from finetune.data.samples import CONVERSATION, Completion
from finetune.errors import FinetuneError, refuse
from finetune.evaluation.generations import Answer
from finetune.evaluation.measures import Measure
from finetune.evaluation.questions import Asked
from finetune.rewards import Reward
from finetune.rewards.functions import problems
from finetune.rewards.process import RewardProcess

TIMEOUT = 600.0
"""Maximum seconds of one reward for all answers of a model."""
PROMPTS = ("prompt", "messages", "question", "completion")
"""Columns with the prompt and its reference."""


def name_of(reward: Reward) -> str:
    """Name of the measure of a reward."""
    return f"reward/{reward.name}"


def check(rewards: Sequence[Reward], asked: Sequence[Asked]) -> None:
    """Reject rewards that cannot score these rows, before a model is loaded.

    Raises:
        FinetuneError: the rows have no answers, a function or reward model does not exist, or a
            required column is missing; the message lists all problems.
    """
    if rewards and not asked:
        raise FinetuneError("--rewards: scores answers, and the rows are texts")
    found = problems(rewards, columns_of(asked))
    refuse(each.replace("reward_funcs", "--rewards", 1) for each in found)


def measure(
    rewards: Sequence[Reward], asked: Sequence[Asked], sides: Sequence[Sequence[Answer]]
) -> list[dict[str, Measure]]:
    """The mean of each reward over the answers that it scores, for each model.

    Raises:
        FinetuneError: a reward fails or times out; the message has the prompt and the answer.
    """
    if not rewards:
        return [{} for _ in sides]
    with contextlib.closing(RewardProcess(rewards, TIMEOUT)) as process:
        return [_rewards_of_side(process, asked, answers) for answers in sides]


def _rewards_of_side(
    process: RewardProcess, asked: Sequence[Asked], answers: Sequence[Answer]
) -> dict[str, Measure]:
    columns: dict[str, list[Any]] = {"prompts": [], "completions": []}
    for row, answer in zip(asked, answers, strict=True):
        question = row.question
        is_text = isinstance(question, Completion)
        turns = [{"role": "assistant", "content": answer.text}]
        columns["prompts"].append(question.prompt if is_text else list(question.messages[:-1]))
        columns["completions"].append(answer.text if is_text else turns)
    columns |= columns_of(asked)
    scores, failed = process.score(columns, skip=True)
    refuse(f"--rewards: {each}" for each in failed)
    named = zip(map(name_of, process.rewards), scores, strict=True)
    return {name: _mean_score(name, each) for name, each in named}


def columns_of(asked: Sequence[Asked]) -> dict[str, list[Any]]:
    """Columns passed to a reward: the reference, and all columns that are not the prompt."""
    named = {name: None for each in asked for name in each.row}
    kept = [name for name in named if name not in (*PROMPTS, *CONVERSATION, *RESERVED)]
    found = {name: [each.row.get(name) for each in asked] for name in kept}
    found = {name: values for name, values in found.items() if is_json(values)}
    context = [context_columns(each.question) for each in asked]
    for name in dict.fromkeys(name for each in context for name in each):
        found[name] = [each.get(name) for each in context]
    return {ANSWER: [each.expected for each in asked], **found}


def _mean_score(name: str, scores: Sequence[float | None]) -> Measure:
    """The mean of the scores; rows without a score are not counted."""
    sums = np.array([[each or 0.0, each is not None] for each in scores], dtype=np.float64)
    binary = all(each in (0, 1) for each in scores)
    return Measure(name, sums, unit="", binary=binary)
