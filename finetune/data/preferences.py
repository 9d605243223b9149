"""Read preference pairs (chosen and rejected answers) in the formats of published data sets."""

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

from finetune.data.chat.messages import (
    Message,
    Turns,
    history_of,
    messages_of,
    sharegpt_turns,
    with_call_ids,
)
from finetune.data.samples import (
    Completion,
    Conversation,
    Preference,
    Several,
    answers,
    conversation_of,
    instruction_of,
    refuse_beside_text,
)
from finetune.data.values import (
    Raw,
    RowProblem,
    kind_of,
    list_of,
    number_in,
    text_if_given,
    text_of,
)

SPEAKERS = {"Human": "user", "Assistant": "assistant"}
TURN = re.compile(r"\n\n(Human|Assistant):")


def read_preference(row: Raw) -> Preference:
    """Read three texts, three lists of messages, or two lists that begin with the same prompt.

    A single message counts as a list of one. In OpenAI's form the prompt is in `input`.
    """
    if row.get("preferred_output") is not None:
        given = row["input"] if isinstance(row["input"], Mapping) else {"messages": row["input"]}
        answers = {"chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}
        row = {**row, **given, **answers, "prompt": given.get("messages")}
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    texts = [isinstance(each, str) for each in (chosen, rejected)]
    if any(texts) and not all(texts):
        raise RowProblem(
            f"chosen is {kind_of(chosen)} and rejected is {kind_of(rejected)}, expected two texts "
            "or two lists of messages"
        )
    if all(texts):
        return _of_texts(row)
    answers = _alternatives(row, messages_of)
    if isinstance(prompt, list):
        return _joined(row, messages_of(prompt, "prompt"), answers)
    shared = _shared(answers)
    if isinstance(prompt, str) and not any(each["content"] == prompt for each in shared):
        raise RowProblem(
            "prompt is text, but not one of the messages that both chosen and rejected begin with; "
            'give it as a list of messages, or leave the column out: columns={"prompt": null}'
        )
    if prompt is not None and not isinstance(prompt, str):
        raise RowProblem(f"prompt is {kind_of(prompt)}, expected text or a list of messages")
    return _joined(row, Turns(shared), answers)


def read_sharegpt_preference(row: Raw) -> Preference:
    """Read a ShareGPT conversation with two alternative next turns, or lists of turns."""
    given = sharegpt_turns(row["conversations"], "conversations")
    return _joined(row, given, _alternatives(row, sharegpt_turns))


def _alternatives(row: Raw, read: Callable[[Any, str], Turns]) -> dict[str, Turns]:
    """The messages of both answers; a single message counts as a list of one."""
    return {
        name: read([row[name]] if isinstance(row[name], Mapping) else row[name], name)
        for name in ("chosen", "rejected")
    }


def read_alpaca_preference(row: Raw) -> Preference:
    """Read an instruction with two alternative outputs; earlier turns are in `history`."""
    given = text_if_given(row, "input")
    history = history_of(row)
    question = instruction_of(text_of(row, "instruction"), given)
    prompt = Turns((*history, {"role": "user", "content": question}))
    answers = {
        name: Turns(({"role": "assistant", "content": text_of(row, name)},))
        for name in ("chosen", "rejected")
    }
    return _joined(row, prompt, answers)


def read_hh(row: Raw) -> Preference | None:
    """Read two dialogues as text; a blank line and `Human:` or `Assistant:` precede each turn.

    None (the row is skipped) if a turn is empty, or if more than the last turn differs.
    """
    answers = {name: _dialogue(text_of(row, name), name) for name in ("chosen", "rejected")}
    if not all(each["content"] for turns in answers.values() for each in turns.messages):
        return None
    chosen, rejected = (turns.messages for turns in answers.values())
    shared = chosen[:-1]
    if rejected[:-1] != shared or not shared or chosen[-1]["role"] != rejected[-1]["role"]:
        return None
    if chosen[-1]["role"] == "user":
        raise RowProblem("chosen and rejected end with a turn of the Human, expected an answer")
    return _joined(row, Turns(shared), answers)


def read_ranked(row: Raw) -> Preference | None:
    """Read the best and the worst of several answers, by `ranks` (0 is the best) or `scores`.

    None (the row is skipped) if all answers are ranked equally.
    """
    answers = _best_first(row)
    if not answers or answers[0][0] == answers[-1][0]:
        return None
    return _pair(row, answers[0][1], answers[-1][1])


def read_ranked_best(row: Raw) -> Several | None:
    """Read pairs of the best of several answers and each that is worse; None without any."""
    answers = _best_first(row)
    return _pairs(row, [(answers[0][1], each[1]) for each in answers if each[0] > answers[0][0]])


def read_ranked_all(row: Raw) -> Several | None:
    """Read pairs of each of several answers and each that is worse; None without any."""
    ranked = itertools.combinations(_best_first(row), 2)
    return _pairs(row, [(first[1], second[1]) for first, second in ranked if second[0] > first[0]])


def _best_first(row: Raw) -> list[tuple[float, Any]]:
    """The place of each answer with the answer, best first; equal ones in the order of the row."""
    answers = list_of(row["responses"], "responses")
    name = "scores" if row.get("ranks") is None else "ranks"
    values = list_of(row[name], name)
    if len(values) != len(answers):
        raise RowProblem(f"{name} has {len(values)} entries for {len(answers)} responses")
    sign = 1 if name == "ranks" else -1
    places = [sign * number_in(value, f"{name}[{n}]") for n, value in enumerate(values)]
    return sorted(zip(places, answers, strict=True), key=lambda each: each[0])


def _pair(row: Raw, chosen: Any, rejected: Any) -> Preference:
    return read_preference({**row, "chosen": chosen, "rejected": rejected})


def _pairs(row: Raw, answers: list[tuple[Any, Any]]) -> Several | None:
    return Several(tuple(_pair(row, *each) for each in answers)) if answers else None


def _dialogue(text: str, where: str) -> Turns:
    before, *parts = TURN.split(text)
    if before.strip() or not parts:
        raise RowProblem(f"{where} does not begin with an empty line and 'Human:'")
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return Turns(tuple({"role": SPEAKERS[who], "content": said.strip()} for who, said in pairs))


def _of_texts(row: Raw) -> Preference:
    if row.get("prompt") is None:
        raise RowProblem(
            "chosen and rejected are texts without a prompt, so it is unknown where the prompt "
            "ends; give it in a column 'prompt', or use format 'hh' for dialogues as text"
        )
    instead = 'use format \'alpaca_preference\' with columns={"prompt": "instruction"}'
    instead += ", or give lists of messages"
    refuse_beside_text(row, "prompt, chosen and rejected are bare text", instead)
    prompt = text_of(row, "prompt")
    _refuse_empty_or_equal({name: row[name].strip() for name in ("chosen", "rejected")}, bool)
    chosen, rejected = (Completion(prompt, row[name]) for name in ("chosen", "rejected"))
    return Preference(chosen, rejected, _margin(row))


def _joined(row: Raw, given: Turns, answers: Mapping[str, Turns]) -> Preference:
    """Append each answer to the prompt; both answers may themselves begin with the prompt."""
    prompt, number = given.messages, len(given.messages)
    repeated = [_bare(each.messages[:number]) == _bare(prompt) for each in answers.values()]
    skipped = number if all(repeated) else 0
    ends: dict[str, tuple[Message, ...]] = {}
    for name, turns in answers.items():
        ends[name] = turns.messages[skipped:]
        _refuse_wrong_roles(prompt, ends[name], name, skipped)
    _refuse_empty_or_equal({name: _bare(each) for name, each in ends.items()}, _has_answer)
    chosen, rejected = (
        _conversation(row, given, ends[name], answers[name], skipped) for name in answers
    )
    return Preference(chosen, rejected, _margin(row))


def _margin(row: Raw) -> float:
    """The value of the column `margin`; 0 if it is null or missing."""
    margin = row.get("margin")
    return 0.0 if margin is None else number_in(margin, "margin")


def _conversation(
    row: Raw, given: Turns, end: tuple[Message, ...], answer: Turns, skipped: int
) -> Conversation:
    number = len(given.messages)
    untrained = frozenset(each - skipped + number for each in answer.untrained if each >= skipped)
    messages = with_call_ids([*given.messages, *end])
    return conversation_of(row, Turns(messages, untrained), number)


def _shared(answers: Mapping[str, Turns]) -> tuple[Message, ...]:
    """The messages that both lists begin with, up to the first assistant turn that differs."""
    chosen, rejected = (turns.messages for turns in answers.values())
    number = 0
    for mine, theirs in zip(chosen, rejected, strict=False):
        if mine != theirs:
            break
        number += 1
    if not number:
        raise RowProblem("there is no prompt: chosen and rejected begin with different messages")
    if number == len(chosen) == len(rejected):
        raise RowProblem(EQUAL)
    speaker = (chosen[number:] or rejected[number:])[0]["role"]
    if speaker != "assistant":
        raise RowProblem(
            f"chosen and rejected first differ in message {number}, which is from '{speaker}', not "
            "from the assistant"
        )
    return chosen[:number]


EQUAL = "chosen and rejected are equal, so neither is preferred; remove the row"


def _refuse_wrong_roles(
    prompt: tuple[Message, ...], end: tuple[Message, ...], name: str, skipped: int
) -> None:
    """Refuse a prompt that ends with an assistant turn, or an answer that begins with another."""
    if prompt[-1]["role"] == "assistant":
        raise RowProblem(
            "the prompt ends with a message of the assistant; put it into chosen and rejected"
        )
    if not end:
        raise RowProblem(f"{name} is empty: no message follows the prompt")
    if end[0]["role"] != "assistant":
        raise RowProblem(
            f"{name}[{skipped}] is from '{end[0]['role']}', expected the assistant: the prompt is "
            "not the beginning of both chosen and rejected"
        )


def _refuse_empty_or_equal(answers: Mapping[str, Any], says: Callable[[Any], bool]) -> None:
    for name, answer in answers.items():
        if not says(answer):
            raise RowProblem(f"{name} is empty: there is no answer to compare")
    if answers["chosen"] == answers["rejected"]:
        raise RowProblem(EQUAL)


def _has_answer(end: list[Message]) -> bool:
    return any(answers(Conversation(tuple(end))))


def _bare(messages: tuple[Message, ...]) -> list[Message]:
    """Messages without tool call ids, which were assigned to each list separately."""
    return [
        {
            key: [{**call, "id": None} for call in value] if key == "tool_calls" else value
            for key, value in message.items()
            if key != "tool_call_id"
        }
        for message in messages
    ]
