"""Build the arguments of reward functions: prompts, completions and data columns, as lists."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.rows.store import Rows
from finetune.inference.generate import new_text
from finetune.inference.sampling import Completion


def reward_columns(
    tokenizer: PreTrainedTokenizerBase,
    names: Sequence[str],
    rows: Rows,
    prompts: np.ndarray,
    completions: Sequence[Completion],
) -> dict[str, list[Any]]:
    """Arguments of reward functions; a completion of a conversation is a list of one message.

    Args:
        tokenizer: decodes the completions.
        names: names of the columns, from `column_names`.
        rows: rows with the prompts.
        prompts: (completions,) int64, the row of each completion's prompt.
        completions: sampled completions, in the same order.
    """
    beside = [rows.documents.reward_input(int(rows.members[row])) for row in prompts]
    columns = {name: [each.get(name) for each in beside] for name in names}
    columns["prompts"] = columns.pop("prompt")
    texts = [
        _text(tokenizer, rows, int(row), each)
        for row, each in zip(prompts, completions, strict=True)
    ]
    columns["completions"] = [
        text if isinstance(asked, str) else [{"role": "assistant", "content": text}]
        for asked, text in zip(columns["prompts"], texts, strict=True)
    ]
    columns["completion_ids"] = [each.ids for each in completions]
    return columns


def _text(tokenizer: PreTrainedTokenizerBase, rows: Rows, row: int, completion: Completion) -> str:
    prompt = rows.documents.document(int(rows.members[row]))[0].tolist()
    answer_ids = completion.ids[:-1] if completion.ended else completion.ids
    return new_text(tokenizer, prompt, answer_ids, special=True)


def column_names(rows: Rows) -> list[str]:
    """Names of all columns that any row has, including its prompt."""
    documents = rows.documents
    return list(
        dict.fromkeys(key for n in range(len(documents)) for key in documents.reward_input(n))
    )
