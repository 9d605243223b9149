"""Each format turns a row into exactly one sample, or says what the row lacks."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from finetune.data.chat.messages import Message
from finetune.data.formats import (
    FORMATS,
    Completion,
    Conversation,
    RowProblem,
    Sample,
    Text,
    advice,
    read_row,
)
from finetune.data.read.files import READERS
from finetune.data.samples import Judged, Labelled, Preference, Prompt, Several


def speaker(role: str) -> Callable[..., dict[str, Any]]:
    return lambda content, **more: {"role": role, "content": content, **more}


user, assistant, system = map(speaker, ("user", "assistant", "system"))


def result(content: str, identity: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": identity}


def call(name: str, identity: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def turn(speaker: Any, value: Any) -> dict[str, Any]:
    return {"from": speaker, "value": value}


def messages(*said: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": list(said), **columns}


def turns(*said: Any, **columns: Any) -> dict[str, Any]:
    return {"conversations": list(said), **columns}


def talk(*said: Message, **more: Any) -> Conversation:
    return Conversation(said, **more)


def pair(prompt: tuple[Message, ...], chosen: str, rejected: str) -> Preference:
    both = (talk(*prompt, assistant(said), given=len(prompt)) for said in (chosen, rejected))
    return Preference(*both)


def pairs_of(*answers: tuple[str, str]) -> Several:
    each = ((Completion("2+2=", chosen), Completion("2+2=", worse)) for chosen, worse in answers)
    return Several(tuple(Preference(*two) for two in each))


PART = {"type": "text", "text": "Hi"}
SCHEMA = {"name": "weather", "description": "Weather", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": SCHEMA}
HELLO = (user("Hi"), assistant("Hello"))
BRIEF = system("Be brief")

GOLDEN: dict[str, tuple[str, dict[str, Any], Sample | None]] = {
    "messages": ("messages", messages(*HELLO), talk(*HELLO)),
    "messages with content in parts and empty keys": ("messages",
        messages(user([{"type": "text", "text": "Hi"}], name=None),
            assistant("4", reasoning="2+2", tool_calls=None), tools=None),
        talk(user("Hi"), assistant("4", reasoning="2+2", reasoning_content="2+2", thinking="2+2"))),
    "messages with tools": ("messages",
        messages(user("Oslo?"),
            assistant(None,
                tool_calls=[
                    {"index": 0, "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
                    {"index": 1, "id": "abc", "name": "time", "arguments": {}}]),
            {"role": "tool", "content": "rain"}, {"role": "tool", "content": "noon"},
            assistant("Rain at noon"), tools=json.dumps([SCHEMA])),
        talk(user("Oslo?"),
            assistant("",
                tool_calls=[call("weather", "call00000", city="Oslo"), call("time", "abc")]),
            result("rain", "call00000"), result("noon", "abc"), assistant("Rain at noon"),
            tools=(TOOL,))),
    "sharegpt": ("sharegpt",
        turns(turn("system", "Be brief"), turn("human", "Hi"), turn("gpt", "Hello")),
        talk(BRIEF, *HELLO)),
    "calls in a row": ("sharegpt",
        turns(turn("human", "When?"), turn("gpt", "Both:"),
            turn("function_call", '{"name": "time", "parameters": {"city": "Oslo"}}'),
            turn("tool_call", '[{"name": "time", "arguments": {}}]'), turn("observation", "ten"),
            turn("tool_response", "eleven"), turn("gpt", "Now")),
        talk(user("When?"),
            assistant("Both:",
                tool_calls=[call("time", "call00000", city="Oslo"), call("time", "call00001")]),
            result("ten", "call00000"), result("eleven", "call00001"), assistant("Now"))),
    "calls and results by role, results in another order": ("messages",
        messages(user("When?"), assistant("", tool_calls=[call("time", "a")]),
            {"role": "tool_call", "content": json.dumps(call("time", "b"))},
            {"role": "tool_response", "content": "eleven", "tool_call_id": "b"},
            {"role": "tool_response", "content": "ten", "tool_call_id": "a"},
            assistant("Now", weight=0)),
        talk(user("When?"), assistant("", tool_calls=[call("time", "a"), call("time", "b")]),
            result("ten", "a"), result("eleven", "b"), assistant("Now"),
            untrained=frozenset({4}))),
    "results whose ids are those of calls without": ("messages",
        messages(user("Oslo?"), assistant("", tool_calls=[{"name": "time", "arguments": {}}]),
            result("ten", "x"), assistant("Ten")),
        talk(user("Oslo?"), assistant("", tool_calls=[call("time", "call00000")]),
            result("ten", "call00000"), assistant("Ten"))),
    "a thought that is there twice": ("messages",
        messages(user("2+2?"), assistant("<think>\n2+2\n</think>\n\n4", reasoning_content="2+2")),
        talk(user("2+2?"), assistant("4", reasoning_content="2+2", thinking="2+2"))),
    "a preference of OpenAI": ("preference",
        {"input": messages(user("Hi"), tools=[]), "preferred_output": [assistant("Hello")],
            "non_preferred_output": [assistant("Go")]}, pair((user("Hi"),), "Hello", "Go")),
    "sharegpt with tools": ("sharegpt",
        turns(turn("human", "Oslo?"),
            turn("function_call", '{"name": "weather", "arguments": {"city": "Oslo"}}'),
            turn("observation", '{"sky": "rain"}'), turn("gpt", "Rain"), system="Be brief",
            tools=[TOOL]),
        talk(BRIEF, user("Oslo?"),
            assistant("", tool_calls=[call("weather", "call00000", city="Oslo")]),
            result('{"sky": "rain"}', "call00000"), assistant("Rain"), tools=(TOOL,))),
    "alpaca": ("alpaca", {"instruction": "Add", "input": "2 2", "output": "4"},
        talk(user("Add\n\n2 2"), assistant("4"))),
    "alpaca without input": ("alpaca",
        {"instruction": "Hi", "input": "", "output": "Hello", "system": "Be brief"},
        talk(BRIEF, *HELLO)),
    "question_answer": ("question_answer", {"question": "2+2?", "answer": "#### 4"},
        talk(user("2+2?"), assistant("#### 4"))),
    "prompt_completion":
        ("prompt_completion", {"prompt": "2+2=", "completion": "4"}, Completion("2+2=", "4")),
    "prompt_completion of messages": ("prompt_completion",
        {"prompt": [*HELLO, user("2+2?")], "completion": [assistant("4")]},
        talk(*HELLO, user("2+2?"), assistant("4"), given=3)),
    "text": ("text", {"text": "Once upon a time"}, Text("Once upon a time")),
    "self_instruct": ("self_instruct",
        {"instruction": "Add", "instances": [{"input": "2 2", "output": "4"}]},
        talk(user("Add\n\n2 2"), assistant("4"))),
    "self_instruct with two instances": ("self_instruct",
        {"instruction": "Add", "instances": [{"input": "2 2", "output": "4"}, {"output": "5"}],
            "system": "Be brief"},
        Several((talk(BRIEF, user("Add\n\n2 2"), assistant("4")),
            talk(BRIEF, user("Add"), assistant("5"))))),
    "self_instruct without an instance":
        ("self_instruct", {"instruction": "Add", "instances": []}, None),
    "oasst": ("oasst",
        {"message_tree_id": "t",
            "prompt": {"role": "prompter", "text": "Hi",
                "replies": [{"role": "assistant", "text": "unranked", "rank": None, "replies": []},
                    {"role": "assistant", "text": "worse", "rank": 1, "replies": []},
                    {"role": "assistant", "text": "gone", "rank": -1, "deleted": True},
                    {"role": "assistant", "text": "best", "rank": 0,
                        "replies": [{"role": "prompter", "text": "Thanks", "replies": []}]}]}},
        talk(user("Hi"), assistant("best"))),
    "oasst of bare messages, nobody answered":
        ("oasst", {"role": "prompter", "text": "Hi", "replies": []}, None),
    "a prompt with what a reward reads": ("prompts", {"prompt": "2+2=", "answer": "4"},
        Prompt(Completion("2+2=", ""), {"answer": "4"})),
    "a text with a class":
        ("labelled", {"text": "fine", "label": "glad"}, Labelled(Text("fine"), "glad")),
    "a conversation with a number":
        ("labelled", messages(*HELLO, label=0.5), Labelled(talk(*HELLO), 0.5)),
    "a completion with classes": ("labelled",
        {"prompt": "a", "completion": "b", "label": ["x", "y"]},
        Labelled(Completion("a", "b"), ["x", "y"])),
    "the best and the worst by scores": ("ranked",
        {"prompt": "2+2=", "responses": ["5", "4", "22"], "scores": [0.5, 1.0, -1.0]},
        Preference(Completion("2+2=", "4"), Completion("2+2=", "22"))),
    "the best and the worst by ranks": ("ranked",
        {"prompt": "2+2=", "responses": ["5", "4"], "ranks": [1, 0]},
        Preference(Completion("2+2=", "4"), Completion("2+2=", "5"))),
    "the best and each that is worse": ("ranked_best",
        {"prompt": "2+2=", "responses": ["5", "4", "22", "four"], "scores": [0.5, 1, -1, 1]},
        pairs_of(("4", "5"), ("4", "22"))),
    "each and each that is worse": ("ranked_all",
        {"prompt": "2+2=", "responses": ["5", "4", "22", "6"], "ranks": [1, 0, 2, 1]},
        pairs_of(("4", "5"), ("4", "6"), ("4", "22"), ("5", "22"), ("6", "22"))),
    "all answers alike":
        ("ranked_all", {"prompt": "2+2=", "responses": ["5", "4"], "ranks": [1, 1]}, None),
    "answers ranked alike":
        ("ranked", {"prompt": "2+2=", "responses": ["5", "4"], "ranks": [1, 1]}, None),
    "a margin": ("preference", {"prompt": "2+2=", "chosen": "4", "rejected": "5", "margin": 2},
        Preference(Completion("2+2=", "4"), Completion("2+2=", "5"), 2.0)),
    "kto wanted": ("kto", messages(*HELLO, label=True), Judged(talk(*HELLO), True)),
    "kto of completions": ("kto", {"prompt": "2+2=", "completion": "4", "label": True},
        Judged(Completion("2+2=", "4"), True)),
    "kto of a column of text": ("kto", {"prompt": "2+2=", "completion": "5", "label": "False"},
        Judged(Completion("2+2=", "5"), False)),
    "kto by its tag": ("kto",
        {"instruction": "Add", "input": "2 2", "output": "4", "kto_tag": True},
        Judged(talk(user("Add\n\n2 2"), assistant("4")), True)),
    "messages of which some are context": ("messages",
        messages(user("Hi", weight=0), assistant("Go", weight=0, train=False), user("Hi"),
            assistant("Hello", weight=1), user("Bye"), assistant("Bye", loss=False)),
        talk(user("Hi"), assistant("Go"), *HELLO, user("Bye"), assistant("Bye"),
            untrained=frozenset({1, 5}))),
    "sharegpt of which some are context, behind a system column": ("sharegpt",
        turns(turn("human", "Hi"), {"from": "gpt", "value": "Go", "weight": 0}, system="Be brief"),
        talk(BRIEF, user("Hi"), assistant("Go"), untrained=frozenset({2}))),
    "a prompt of messages with a system column and an answer that is context":
        ("prompt_completion",
            {"prompt": [user("Hi")], "completion": [assistant("Go", train=False), *HELLO],
                "system": "Be brief"},
            talk(BRIEF, user("Hi"), assistant("Go"), *HELLO, given=2, untrained=frozenset({2}))),
    "the older calls of functions": ("messages",
        messages(user("Oslo?"),
            assistant(None, function_call={"name": "weather", "arguments": '{"city": "Oslo"}'}),
            {"role": "function", "name": "weather", "content": "rain"}, assistant("Rain"),
            functions=[SCHEMA]),
        talk(user("Oslo?"), assistant("", tool_calls=[call("weather", "call00000", city="Oslo")]),
            {"role": "tool", "name": "weather", "content": "rain", "tool_call_id": "call00000"},
            assistant("Rain"), tools=(TOOL,))),
    "messages and calls as JSON text": ("messages",
        {"messages": json.dumps([user("Oslo?"),
            assistant("", tool_calls=json.dumps([{"name": "weather", "arguments": "{}"}]))]),
            "tools": [json.dumps(TOOL)]},
        talk(user("Oslo?"), assistant("", tool_calls=[call("weather", "call00000")]),
            tools=(TOOL,))),
    "a system column that is a message too":
        ("messages", messages(system("A"), user("Hi"), system="A"), talk(system("A"), user("Hi"))),
    "variables of the template": ("messages",
        messages(user("Hi"), chat_template_kwargs='{"enable_thinking": false}'),
        talk(user("Hi"), template_kwargs={"enable_thinking": False})),
    "alpaca with history": ("alpaca",
        {"instruction": "And 3+3?", "input": "", "output": "6", "system": "Add",
            "history": [["2+2?", "4"]], "tools": [SCHEMA]},
        talk(system("Add"), user("2+2?"), assistant("4"), user("And 3+3?"), assistant("6"),
            tools=(TOOL,))),
    "a preference of messages": ("preference",
        {"prompt": [user("Hi")], "chosen": [assistant("Hello")], "rejected": [assistant("Go")]},
        pair((user("Hi"),), "Hello", "Go")),
    "a preference whose answers repeat the prompt": ("preference",
        {"prompt": [user("Hi")], "chosen": [*HELLO], "rejected": [user("Hi"), assistant("Go")]},
        pair((user("Hi"),), "Hello", "Go")),
    "a preference with an implicit prompt, which may be there as text too":
        ("preference",
            {"prompt": "Bye", "chosen": [*HELLO, user("Bye"), assistant("See you")],
                "rejected": [*HELLO, user("Bye"), assistant("Go")]},
            pair((*HELLO, user("Bye")), "See you", "Go")),
    "a preference with a system column": ("preference",
        {"system": "Be brief", "chosen": [*HELLO], "rejected": [user("Hi"), assistant("Go")]},
        pair((BRIEF, user("Hi")), "Hello", "Go")),
    "a preference of ShareGPT": ("sharegpt_preference",
        {"conversations": [turn("human", "Hi")], "chosen": turn("gpt", "Hello"),
            "rejected": [turn("gpt", "Go")]}, pair((user("Hi"),), "Hello", "Go")),
    "a preference of Alpaca": ("alpaca_preference",
        {"instruction": "Sum up", "input": "A, B", "chosen": "B", "rejected": "A",
            "history": [["Hi", "Hello"]]}, pair((*HELLO, user("Sum up\n\nA, B")), "B", "A")),
    "two dialogues": ("hh",
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Bye\n\nAssistant: See you",
            "rejected": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Bye\n\nAssistant: Go"},
        pair((*HELLO, user("Bye")), "See you", "Go")),
    "two dialogues that differ before the last turn": ("hh",
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello",
            "rejected": "\n\nHuman: Hey\n\nAssistant: Go"}, None),
    "two dialogues with an empty turn": ("hh",
        {"chosen": "\n\nHuman: Hi\n\nAssistant:", "rejected": "\n\nHuman: Hi\n\nAssistant: Go"},
        None),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_a_row_becomes_exactly_this_sample(name):
    data_format, row, sample = GOLDEN[name]
    assert read_row(data_format, row) == sample


def test_every_format_has_a_golden_row():
    assert {data_format for data_format, _, _ in GOLDEN.values()} == set(FORMATS)


PROBLEMS: list[tuple[str, Any, str]] = [
    ("messages", {"instruction": "Hi", "output": "Hello"},
        "format 'messages' needs 'messages', the row has 'instruction', 'output'; format "
        "'alpaca' would fit"),
    ("question_answer", {"question": "Hi", "answer": None},
        "format 'question_answer' needs 'question' + 'answer', the row has 'question', 'answer' "
        "(null)"),
    ("oasst", {"a": 1},
        "format 'oasst' needs 'message_tree_id' + 'prompt' or 'text' + 'role' + 'replies', the "
        "row has 'a'"),
    ("text", ["Hi"], "is a list, expected an object with columns"),
    ("question_answer", {"question": "2+2?", "answer": 4}, "answer is a number, expected text"),
    ("messages", {"messages": []}, "messages is empty"),
    ("sharegpt", turns({"from": ["human"], "value": "Hi"}),
        "conversations[0].from is a list, expected text"),
    ("messages", {"messages": "Hi"}, "messages is text, expected a list"),
    ("messages", messages(turn("human", "Hi")),
        "messages[0] has no 'role' (it has from, value)"),
    ("messages", messages({"role": "asistant", "content": "Hi"}),
        "messages[0] has role 'asistant'; did you mean 'assistant'? (known: system, developer, "
        "user, assistant, tool)"),
    ("messages", messages({"role": "user"}), "messages[0].content is null, expected text"),
    ("messages", messages(user([{"type": "video", "url": "x"}])),
        "messages[0] has a part that is neither text nor an image: video"),
    ("messages", messages(assistant("", tool_calls=[{"name": "f", "arguments": "{"}])),
        "messages[0].tool_calls[0].arguments is not JSON: Expecting property name enclosed in "
        "double quotes: line 1 column 2 (char 1)"),
    ("messages", messages(assistant("", tool_calls=[{"name": "f", "arguments": "[" * 100_000}])),
        "messages[0].tool_calls[0].arguments is JSON nested too deeply"),
    ("messages", messages(assistant("", tool_calls=5)),
        "messages[0].tool_calls is a number, expected a list"),
    ("messages", messages(user("Hi"), tools=[{"type": "function", "function": "f"}]),
        "tools[0] has no function name"),
    ("messages", messages(user("", tool_calls=[{"name": "f", "arguments": {}}])),
        "messages[0] has tool_calls, which only an assistant makes"),
    ("sharegpt", turns(*HELLO),
        "conversations[0] needs 'from' and 'value', it has role, content; format 'messages' would "
        "fit with columns={\"conversations\": \"messages\"}"),
    ("messages", messages(turn("human", "Hi"), turn("gpt", "Hello")),
        "messages[0] has no 'role' (it has from, value); format 'sharegpt' would fit with "
        "columns={\"messages\": \"conversations\"}"),
    ("kto", messages(*HELLO, label=None),
        "format 'kto' needs 'label' (or 'kto_tag') and the columns of messages, sharegpt, "
        "prompt_completion, alpaca, question_answer, the row has 'messages', 'label' (null)"),
    ("messages", {"input": messages(user("Hi")), "preferred_output": [assistant("Hello")]},
        "format 'messages' needs 'messages', the row has 'input', 'preferred_output'"),
    ("messages", messages({"role": "tool_calls", "content": "[]"}),
        "messages[0] has role 'tool_calls' (known: system, developer, user, assistant, tool)"),
    ("messages", messages(assistant("<think>\ntwo\n</think>\n4", reasoning_content="one")),
        "messages[0] has reasoning_content and a thought in content with different texts; keep "
        "one"),
    ("messages", messages(assistant("", tool_calls=[call("time", "a")]), result("ten", "b")),
        "message 1 (tool) has tool_call_id 'b', which names no call of the turn before it (a)"),
    ("sharegpt", turns({"from": "gpt", "value": "Now", "weight": 0},
            turn("function_call", '{"name": "time"}')),
        "conversations[1] is in one turn with the message before it, but its weight differs"),
    ("sharegpt", turns(turn("humann", "Hi")),
        "conversations[0] is from 'humann'; did you mean 'human'? (known: human, user, gpt, "
        "assistant, system, observation, tool, function_call, tool_call, tool_response)"),
    ("sharegpt", turns(turn("human", "Hi"), tools="none"),
        "tools is not JSON: Expecting value: line 1 column 1 (char 0)"),
    ("prompt_completion", {"prompt": "Hi", "completion": [assistant("Hello")]},
        "prompt is text and completion is a list, expected two texts or two lists of messages"),
    ("messages", messages(assistant("Hi", weight=0.5)),
        "messages[0].weight is 0.5, expected 0 or false (context only), or 1 or true (trained)"),
    ("sharegpt", turns({"from": "human", "value": "Hi", "train": True}),
        "conversations[0] (user) has train True, but only turns of the assistant are trained; "
        "leave the key out"),
    ("messages", messages(assistant("Hi", weight=1, train=False)),
        "messages[0] has weight 1 and train False, which contradict each other; keep one of them"),
    ("messages", messages(assistant("Hi", train_detail=[{"begin_offset": 0}])),
        "messages[0] has 'train_detail', which is not read: a turn is trained as a whole or not "
        "at all; use weight: 0 or 1"),
    ("messages", messages(assistant("Hi", label=False)),
        "messages[0] has label False, and an unwanted answer would be trained; use weight: 0 "
        "(context only), or format 'kto', which reads a label of each row"),
    ("messages", messages(user(["Hi"])),
        'messages[0].content holds text among its parts, expected objects such as {"type": '
        '"text", "text": "..."}'),
    ("messages", messages(user([{"text": "a", "image": "x"}])),
        "messages[0] has a part that is neither text nor an image: image"),
    ("messages", messages(user("<image>", images=["a.png"])),
        "messages[0] has 'images', which is not read: write it as a part of the message's content, "
        'such as {"type": "image", "path": "..."}; video and audio are not trained'),
    ("messages", messages(assistant("No", refusal="I cannot")),
        "messages[0] has 'refusal', which is not read: write what the assistant says into content"),
    ("messages", messages(assistant("4", reasoning="a", thinking="b")),
        "messages[0] has reasoning and thinking with different texts; keep one"),
    ("messages", messages(user("4", reasoning="a")),
        "messages[0] has reasoning, which only an assistant has"),
    ("messages", messages(assistant("4", reasoning_content=["a"])),
        "messages[0].reasoning_content is a list, expected text"),
    ("messages", messages(assistant("", tool_calls=[{"name": "f"}], function_call={"name": "f"})),
        "messages[0] has both tool_calls and function_call; keep one of them"),
    ("messages", messages(user("", function_call={"name": "f", "arguments": "{}"})),
        "messages[0] has function_call, which only an assistant makes"),
    ("messages", messages(user("Hi"), tools=[SCHEMA], functions=[SCHEMA]),
        "the row has both 'tools' and 'functions'; keep one of them"),
    ("sharegpt", turns(turn("system", "A"), system="B"),
        "the row has a column 'system' and a system message with a different text; keep one of "
        "them, or leave the column out: columns={\"system\": null}"),
    ("question_answer", {"question": "Hi", "answer": "Hello", "system_prompt": "Be brief"},
        "column 'system_prompt' is not read by format 'question_answer': use "
        "columns={\"system_prompt\": \"system\"}; to leave it out: columns={\"system_prompt\": "
        "null}"),
    ("prompt_completion", {"prompt": "Hi", "completion": "Hello", "system": "Be brief"},
        "column 'system' belongs to a conversation, but prompt and completion are bare text; "
        "write it into the prompt, or give two lists of messages"),
    ("alpaca", {"instruction": "Hi", "output": "Hello", "history": [["Hi", "Hello", "Bye"]]},
        "history[0] is not a pair of texts: a question, an answer"),
    ("messages", messages(user("Hi"), history=[["Hi", "Hello"]]),
        "column 'history' is not read by format 'messages': earlier turns would be lost; to "
        "leave it out: columns={\"history\": null}"),
    ("sharegpt", turns(turn("human", "<audio>"), audios=["a.wav"]),
        "column 'audios' is not read by format 'sharegpt': only text is trained, and images of "
        "conversations with model.reads; to leave it out: columns={\"audios\": null}"),
    ("alpaca", {"instruction": "Hi", "output": "Go", "label": "False"},
        "column 'label' is not read by format 'alpaca': unwanted answers would be trained too; to "
        "leave it out: columns={\"label\": null}; format 'kto' would fit"),
    ("messages", messages(user("Hi"), chosen=[assistant("Hello")], rejected=None),
        "column 'chosen' is not read by format 'messages': it belongs to a pair of answers, "
        "which methods such as 'dpo' learn from; to leave it out: columns={\"chosen\": null}"),
    ("question_answer", {"question": "Hi", "answer": "Hello", "weight": 0},
        "column 'weight' is not read by format 'question_answer': every row has the same weight; "
        "a source has `repeat` and `weight`; to leave it out: columns={\"weight\": null}"),
    ("messages", {"task_id": 1, "text": "Write a function", "code": "def f(): ..."},
        "format 'messages' needs 'messages', the row has 'task_id', 'text', 'code'; format "
        "'question_answer' would fit with columns={\"text\": \"question\", \"code\": \"answer\"}"),
    ("messages", {"dialog": [*HELLO]},
        "format 'messages' needs 'messages', the row has 'dialog'; format 'messages' would fit "
        "with columns={\"dialog\": \"messages\"}"),
    ("prompt_completion", {"prompt": "2+2=", "response": "4"},
        "format 'prompt_completion' needs 'prompt' + 'completion', the row has 'prompt', "
        "'response'; format 'prompt_completion' would fit with columns={\"response\": "
        "\"completion\"}"),
    ("messages", {"problem": "2+2?", "solution": "2+2=4", "answer": "4"},
        "format 'messages' needs 'messages', the row has 'problem', 'solution', 'answer'; format "
        "'question_answer' would fit with columns={\"problem\": \"question\", \"solution\": "
        "\"answer\", \"answer\": null}"),
    ("alpaca", {"instruction": None, "problem": "2+2?", "output": "4"},
        "format 'alpaca' needs 'instruction' + 'output', the row has 'instruction' (null), "
        "'problem', 'output'; format 'alpaca' would fit with columns={\"problem\": "
        "\"instruction\", \"instruction\": null}"),
    ("messages", {"instruction": "What is this?", "output": "A cat", "images": ["a.png"]},
        "format 'messages' needs 'messages', the row has 'instruction', 'output', 'images'"),
    ("alpaca", {"instruction": "Sum up", "context": "A, B", "response": "B"},
        "format 'alpaca' needs 'instruction' + 'output', the row has 'instruction', 'context', "
        "'response'; format 'alpaca' would fit with columns={\"response\": \"output\", "
        "\"context\": \"input\"}"),
    ("preference", {"prompt": "Hi", "chosen": None, "rejected": "Go"},
        "format 'preference' needs 'prompt' + 'chosen' + 'rejected' or 'chosen' + 'rejected' or "
        "'input' + 'preferred_output' + 'non_preferred_output', the row has "
        "'prompt', 'chosen' (null), 'rejected'"),
    ("preference", {"prompt": "Hi", "chosen": "Hello", "rejected": [assistant("Go")]},
        "chosen is text and rejected is a list, expected two texts or two lists of messages"),
    ("preference", {"chosen": "Hi Hello", "rejected": "Hi Go"},
        "chosen and rejected are texts without a prompt, so it is unknown where the prompt ends; "
        "give it in a column 'prompt', or use format 'hh' for dialogues as text"),
    ("preference", {"prompt": "Hi", "chosen": "Hello", "rejected": "Go", "system": "Be brief"},
        "column 'system' belongs to a conversation, but prompt, chosen and rejected are bare "
        "text; use format 'alpaca_preference' with columns={\"prompt\": \"instruction\"}, or "
        "give lists of messages"),
    ("preference", {"prompt": "Hi", "chosen": "Go", "rejected": "Go "},
        "chosen and rejected are equal, so neither is preferred; remove the row"),
    ("preference", {"prompt": "Hi", "chosen": " ", "rejected": "Go"},
        "chosen is empty: there is no answer to compare"),
    ("preference", {"chosen": [user("Hi")], "rejected": [user("Hi"), assistant("Go")]},
        "chosen is empty: no message follows the prompt"),
    ("preference",
        {"prompt": [user("Hi")], "chosen": [*HELLO], "rejected": [user("Hey"), assistant("Go")]},
        "chosen[0] is from 'user', expected the assistant: the prompt is not the beginning of "
        "both chosen and rejected"),
    ("preference", {"prompt": "Hey", "chosen": [*HELLO], "rejected": [user("Hi"), assistant("Go")]},
        'prompt is text, but not one of the messages that both chosen and rejected begin with; '
        'give it as a list of messages, or leave the column out: columns={"prompt": null}'),
    ("preference", {"chosen": [*HELLO], "rejected": [user("Hey"), assistant("Go")]},
        "there is no prompt: chosen and rejected begin with different messages"),
    ("preference",
        {"chosen": [*HELLO, user("Bye"), assistant("See you")],
            "rejected": [*HELLO, user("So?"), assistant("Go")]},
        "chosen and rejected first differ in message 2, which is from 'user', not from the "
        "assistant"),
    ("sharegpt_preference",
        {"conversations": [turn("human", "Hi"), turn("gpt", "Hello")],
            "chosen": turn("gpt", "Hello"), "rejected": turn("gpt", "Go")},
        "the prompt ends with a message of the assistant; put it into chosen and rejected"),
    ("hh", {"chosen": "Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: Go"},
        "chosen does not begin with an empty line and 'Human:'"),
    ("prompts", {"prompt": "2+2=", "tools": [{"name": "add"}]},
        "column 'tools' belongs to a conversation, but prompt is bare text; write it into the "
        "prompt, give a list of messages, or name the text a question: columns={\"prompt\": "
        "\"question\"}"),
    ("hh",
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Go\n\nHuman: Thanks",
            "rejected": "\n\nHuman: Hi\n\nAssistant: Go\n\nHuman: No"},
        "chosen and rejected end with a turn of the Human, expected an answer"),
    ("ranked", {"prompt": "2+2=", "responses": ["5", "4"], "ranks": [1]},
        "ranks has 1 entries for 2 responses"),
    ("preference", {"prompt": "2+2=", "chosen": "4", "rejected": "5", "margin": "much"},
        "margin is 'much', expected a finite number"),
    ("self_instruct", {"instruction": "Add", "instances": [{"output": "4"}, {"input": "2 3"}]},
        "instances[1] has no 'output'"),
    ("messages", messages(assistant([PART | {"train": False}, PART])),
        "messages[0] (assistant) has a part with train False; a turn of the assistant is trained "
        "as a whole or not at all: set weight: 0 or 1 on the message"),
    ("alpaca", {"instruction": "Is it even?", "input": 0, "output": "yes"},
        "input is a number, expected text"),
    ("messages", messages(user("Hi"), assistant("Bye"), system=False),
        "system is true or false, expected text"),
    ("kto", messages(user("Hi"), label="yes"), "label is 'yes', expected true or false"),
]  # fmt: skip


@pytest.mark.parametrize(("data_format", "row", "told"), PROBLEMS)
def test_a_row_that_does_not_fit_is_refused_with_the_reason(data_format, row, told):
    with pytest.raises(RowProblem) as error:
        read_row(data_format, row)
    assert str(error.value) == told


def test_the_most_specific_format_is_advised_and_none_that_ignores_what_a_row_means():
    fits = "; format '{}' would fit".format
    tree = GOLDEN["oasst"][1] | {"tree_state": "ready"}
    assert advice("messages", tree) == fits("oasst")
    assert advice("messages", {"instruction": "a", "output": "b", "text": "ab"}) == fits("alpaca")
    assert advice("messages", {"a": 1}) == advice("messages", {"messages": [], "label": True}) == ""
    assert advice("alpaca", messages(*HELLO, label=True)) == fits("kto")
    assert advice("text", {"prompt": "a", "completion": "b", "label": False}) == fits("kto")
    assert advice("messages", {"question": "a", "answer": "b", "images": ["c.png"]}) == ""
    assert advice("preference", {"text": "a"}) == ""
    assert advice("messages", {"text": "a", "label": 1}) == fits("text")


REAL = r"""
gsm8k/train.jsonl question_answer 7473 "Natalia sold clips to 48"
llamafactory_demo/alpaca_en_demo.json alpaca 999 "Describe a process"
llamafactory_demo/glaive_toolcall_en_demo.json sharegpt 300 "Hi, I have some"
llamafactory_demo/kto_en_demo.json kto 300 null
llamafactory_demo/c4_demo.jsonl text 300 "Don\u2019t think you need"
seed_tasks/seed_tasks.jsonl self_instruct 175 "Is there anything I can eat"
oasst_sample/en_100_tree.jsonl oasst 100 "How can I find the best 401k"
wikitext2/valid.txt text 1 " \n = Homarus gammarus"
tinystories/tinystories_sample_cs336.txt text 5 "Once upon a time"
"""
"""What real files hold: file, format, rows, each a sample, and what the first begins with."""


@pytest.mark.parametrize("line", REAL.split("\n")[1:-1])
def test_real_files_are_read_whole(assets, line):
    name, data_format, rows, beginning = line.split(" ", 3)
    path = assets / "data" / name
    read = [read_row(data_format, row) for _, row in READERS[path.suffix](path)]
    kept = [sample for sample in read if sample is not None]
    assert len(read) == len(kept) == int(rows)
    if (text := json.loads(beginning)) is not None:
        first = kept[0]
        said = first.text if isinstance(first, Text) else first.messages[0]["content"]
        assert said.startswith(text)
