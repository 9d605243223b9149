"""Vary the form of tool calls for chat templates: arguments as objects or text, other ids."""

import dataclasses
import json
import re
from collections.abc import Iterator

from finetune.data.chat.messages import Message
from finetune.data.chat.tools import written_arguments
from finetune.data.samples import Conversation

CALL_ID = re.compile("[a-zA-Z0-9]{9}")
"""Tool call ids that every template accepts; Mistral's templates accept no others."""


def forms(sample: Conversation) -> Iterator[tuple[Conversation, set[str]]]:
    """Yield forms of a conversation, each with notes on what was changed.

    Unchanged, with arguments as text, and both with ids that every template accepts.
    """
    yield sample, set()
    if not any("tool_calls" in message for message in sample.messages):
        return
    joined = dataclasses.replace(sample, messages=tuple(map(_with_text, sample.messages)))
    yield joined, set()
    for each in (sample, joined):
        renamed = _with_fitting_ids(each)
        if renamed is not None:
            yield renamed, {"call_ids"}


def _with_text(message: Message) -> Message:
    """A message whose tool calls have their arguments as JSON text, as written in the row."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        written = written_arguments(function["arguments"])
        text = json.dumps(function["arguments"], ensure_ascii=False) if written is None else written
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls}


def writes_as_python(sample: Conversation, text: str) -> bool:
    """Whether a template writes arguments that the row has as JSON text as a Python dict."""
    for message in sample.messages:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if arguments and written_arguments(arguments) is not None and str(arguments) in text:
                return str(arguments) != json.dumps(arguments, ensure_ascii=False)
    return False


def _with_fitting_ids(sample: Conversation) -> Conversation | None:
    """Replace ids that are not nine letters and digits; None if there are none."""
    calls = [call for message in sample.messages for call in message.get("tool_calls", ())]
    ids = [*(each["id"] for each in calls), *(each.get("tool_call_id") for each in sample.messages)]
    there = dict.fromkeys(each for each in ids if isinstance(each, str))
    free = (f"call{number:05d}" for number in range(100_000))
    free = (each for each in free if each not in there)
    new = {each: each if CALL_ID.fullmatch(each) else next(free) for each in there}
    if all(old == each for old, each in new.items()):
        return None
    messages = [dict(message) for message in sample.messages]
    for message in messages:
        if message.get("tool_call_id") in new:
            message["tool_call_id"] = new[message["tool_call_id"]]
        if "tool_calls" in message:
            made = message["tool_calls"]
            message["tool_calls"] = [{**c, "id": new.get(c["id"], c["id"])} for c in made]
    return dataclasses.replace(sample, messages=tuple(messages))
