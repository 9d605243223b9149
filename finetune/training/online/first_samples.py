"""Sample and score completions of an online method's initial model, without a run."""

import contextlib
import dataclasses
from typing import Any

import numpy as np

from finetune.cache import cache
from finetune.checkpoints.stop_tokens import all_ends, set_stop_tokens
from finetune.data.chat.render import Chat
from finetune.data.prepare import prepare
from finetune.data.rows.order import permutation
from finetune.data.rows.store import Rows
from finetune.errors import FinetuneError, refuse
from finetune.inference.decoder import Row
from finetune.inference.load import attach, base_model
from finetune.inference.sampling import sample
from finetune.methods.online import Online
from finetune.models import starting_adapter
from finetune.models.image_parts import image_inputs
from finetune.models.model import load_chat_of, load_tokenizer
from finetune.recipe import Recipe
from finetune.reports.inspection import Inspection, Scored, inspect_rows
from finetune.rewards.builtin import text_of
from finetune.rewards.functions import check_columns
from finetune.rewards.functions import problems as reward_problems
from finetune.rewards.process import RewardProcess
from finetune.training.online import sampled as records
from finetune.training.online.reward_columns import column_names, reward_columns


def inspect_samples(recipe: Recipe, rows: int, each: int) -> Inspection:
    """The first training prompts of a recipe, with completions and their rewards.

    In fp32 these equal the first completions of the first step, because they use the noise of step
    0. A reward function that fails becomes a note and gives no score.

    Args:
        recipe: recipe of an online method, after `starting_adapter.set_stop_tokens`.
        rows: number of prompts, in training order.
        each: completions per prompt.

    Raises:
        FinetuneError: the method does not sample, or its model, data or rewards cannot be used.
    """
    check_samples(recipe)
    assert isinstance(recipe, Online)
    tokenizer = load_tokenizer(recipe)
    chat = load_chat_of(recipe, tokenizer)
    data = prepare(recipe, chat, cache("data"))
    check_columns(recipe.reward_funcs, column_names(data.train))
    inspection = inspect_rows(recipe, data, tokenizer, rows)
    sampled, failed = _first_samples(recipe, chat, data.train, rows, each)
    return dataclasses.replace(inspection, completions=sampled, notes=[*inspection.notes, *failed])


def _first_samples(
    recipe: Online, chat: Chat, train: Rows, rows: int, each: int
) -> tuple[list[list[Scored]], list[str]]:
    """Completions of the first prompts, and notes on reward functions that failed."""
    names = column_names(train)
    model = base_model(recipe)
    if recipe.model.adapter is not None:
        model = attach(model, starting_adapter.find(recipe.model.adapter))
    tokenizer = set_stop_tokens(model, chat, train)
    assert model.generation_config is not None
    stops = all_ends(model.generation_config.eos_token_id, tokenizer.eos_token_id)
    prompts = np.repeat(permutation(len(train), recipe.seed, 0)[:rows], each)
    asked = [train.documents.document(int(train.members[row]))[0].tolist() for row in prompts]
    chooses: dict[str, Any] = recipe.chooses
    wanted = [
        Row(
            ids,
            recipe.max_completion_length,
            stops,
            recipe.temperature,
            name=(int(row), at % each),
            images=train.documents.images_of(int(train.members[row])),
            **chooses,
        )
        for at, (ids, row) in enumerate(zip(asked, prompts, strict=True))
    ]
    pad = tokenizer.pad_token_id or 0
    inputs = image_inputs(recipe.model, chat.images, alone=True)
    found = sample(model, wanted, pad, recipe.sampling_rows, recipe.seed, 0, inputs)
    columns = reward_columns(tokenizer, names, train, prompts, found)
    given = recipe.reward_funcs, recipe.reward_timeout
    with contextlib.closing(RewardProcess(*given)) as process:
        scores, failed = process.score(columns, skip=True)
    totals = records.total(np.array(scores, dtype=np.float64), recipe.reward_funcs)
    shown = [
        Scored(
            text_of(text), len(one.ids), one.ended, records.finite(float(reward)),
            dict(zip(records.names(recipe.reward_funcs), given, strict=True)),
        )
        for text, one, reward, given in zip(
            columns["completions"], found, totals, zip(*scores, strict=True), strict=True
        )
    ]  # fmt: skip
    return [shown[at : at + each] for at in range(0, len(shown), each)], failed


def check_samples(recipe: Recipe) -> None:
    """Refuse recipes that cannot be sampled from, before anything is loaded.

    Raises:
        FinetuneError: with every problem.
    """
    if not isinstance(recipe, Online):
        raise FinetuneError(
            f"--completions: method {recipe.method} samples no completions; only grpo and rloo do"
        )
    issues = [*recipe.problems(), *reward_problems(recipe.reward_funcs)]
    if recipe.model.add_tokens:
        issues.append("--completions: the starting model has no rows for model.add_tokens")
    refuse(issues)
