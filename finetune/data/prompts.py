"""Read prompts that the model answers during training, with the columns that rewards read."""

import dataclasses
import json
from typing import Any

from finetune.data.chat.messages import Turns, messages_of
from finetune.data.images.image_file import as_parts
from finetune.data.samples import (
    CONVERSATION,
    Completion,
    Conversation,
    Prompt,
    conversation_of,
    refuse_beside_text,
)
from finetune.data.values import Raw, RowProblem, kind_of

ANSWER = "answer"
"""The column that receives a final assistant message."""
RESERVED = ("prompts", "completions", "completion_ids")
"""Arguments that are passed to every reward function."""


def read_prompt(row: Raw) -> Prompt:
    """Read a text, messages, or a question to the assistant; all other columns are kept.

    A final assistant message is not part of the prompt: its text becomes the column `answer`.
    """
    name = next(each for each in ("prompt", "messages", "question") if row.get(each) is not None)
    columns = {
        key: value
        for key, value in row.items()
        if key not in (name, *CONVERSATION) and value is not None
    }
    reserved = sorted(columns.keys() & set(RESERVED))
    if reserved:
        raise RowProblem(
            f"column '{reserved[0]}' has the name of an argument of every reward; rename it with "
            f'columns={{"{reserved[0]}": "{reserved[0]}_of_row"}}'
        )
    if isinstance(row[name], str):
        if not row[name].strip():
            raise RowProblem(f"{name} is empty")
        if name != "question":
            instead = "write it into the prompt, give a list of messages, or name the text a "
            instead += f'question: columns={{"{name}": "question"}}'
            refuse_beside_text(row, f"{name} is bare text", instead)
            return Prompt(Completion(row[name], ""), columns)
    asked = [{"role": "user", "content": row[name]}] if name == "question" else row[name]
    turns = messages_of(asked, name)
    messages = turns.messages
    if messages[-1]["role"] == "assistant":
        answer = messages[-1]["content"]
        if columns.setdefault(ANSWER, answer) != answer:
            raise RowProblem(
                f"{name} ends with a message of the assistant, and column '{ANSWER}' has a "
                "different text; leave one of them out"
            )
        messages = messages[:-1]
    if not messages:
        raise RowProblem(f"{name} has no message that the assistant could answer")
    conversation = conversation_of(row, Turns(messages), len(messages))
    return Prompt(conversation, columns)


def context_columns(asked: Conversation | Completion) -> dict[str, Any]:
    """What a conversation's template reads beside its messages, by the names of the columns."""
    if isinstance(asked, Completion):
        return {}
    found = {"tools": list(asked.tools), "chat_template_kwargs": dict(asked.template_kwargs)}
    return {name: value for name, value in found.items() if value}


def answered(sample: Prompt) -> Conversation | Completion:
    """The prompt with its column `answer` as the reference answer.

    Raises:
        RowProblem: the row has no text or number there.
    """
    answer, asked = sample.columns.get(ANSWER), sample.asked
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise RowProblem(
            f"column '{ANSWER}' is {kind_of(answer)}, expected a text to compare with; or end the "
            "messages with one of the assistant"
        )
    if isinstance(asked, Completion):
        return Completion(asked.prompt, str(answer))
    said = {"role": "assistant", "content": str(answer)}
    return dataclasses.replace(asked, messages=(*asked.messages, said))


def columns_as_json(sample: Prompt) -> str:
    """The prompt and its columns for a reward, as one line of JSON.

    Raises:
        RowProblem: a column has a value that JSON cannot represent.
    """
    asked = sample.asked
    prompt: Any = asked.prompt if isinstance(asked, Completion) else [
        as_parts(each) if "images" in each else each for each in asked.messages
    ]  # fmt: skip
    found = {"prompt": prompt, **context_columns(asked), **sample.columns}
    wrong = next((name for name, value in found.items() if not is_json(value)), None)
    if wrong is not None:
        raise RowProblem(
            f"column '{wrong}' ({kind_of(found[wrong])}): rewards accept only JSON values; leave "
            f'it out: columns={{"{wrong}": null}}'
        )
    return json.dumps(found, ensure_ascii=False)


def is_json(value: Any) -> bool:
    """Whether a value can be serialized as JSON, which is how rewards in other processes get it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
