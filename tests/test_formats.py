"""Each format turns a row into exactly one sample, or says what the row lacks."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.data.formats import (
    FORMATS,
    Completion,
    Conversation,
    RowProblem,
    Sample,
    Text,
    find_format,
    fitting_formats,
    read_row,
)
from finetune.data.sources import READERS
from finetune.errors import FinetuneError


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def call(name: str, identity: str, **arguments: Any) -> dict[str, Any]:
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


SCHEMA = {"name": "weather", "description": "Weather", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": SCHEMA}

GOLDEN: dict[str, tuple[str, dict[str, Any], Sample | None]] = {
    "messages": (
        "messages",
        {"messages": [user("Hi"), assistant("Hello")]},
        Conversation((user("Hi"), assistant("Hello"))),
    ),
    "messages with content in parts and empty keys": (
        "messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None},
                {"role": "assistant", "content": "4", "reasoning": "2+2", "tool_calls": None},
            ],
            "tools": None,
        },
        Conversation(
            (
                user("Hi"),
                assistant("4")
                | {"reasoning": "2+2", "reasoning_content": "2+2", "thinking": "2+2"},
            )
        ),
    ),
    "messages with tools": (
        "messages",
        {
            "messages": [
                user("Oslo?"),
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
                        {"id": "abc", "name": "time", "arguments": {}},
                    ],
                },
                {"role": "tool", "content": "rain"},
                {"role": "tool", "content": "noon"},
                assistant("Rain at noon"),
            ],
            "tools": json.dumps([SCHEMA]),
        },
        Conversation(
            (
                user("Oslo?"),
                assistant("")
                | {"tool_calls": [call("weather", "call00000", city="Oslo"), call("time", "abc")]},
                {"role": "tool", "content": "rain", "tool_call_id": "call00000"},
                {"role": "tool", "content": "noon", "tool_call_id": "abc"},
                assistant("Rain at noon"),
            ),
            (TOOL,),
        ),
    ),
    "sharegpt": (
        "sharegpt",
        {
            "conversations": [
                {"from": "system", "value": "Be brief"},
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Hello"},
            ]
        },
        Conversation(({"role": "system", "content": "Be brief"}, user("Hi"), assistant("Hello"))),
    ),
    "sharegpt with tools": (
        "sharegpt",
        {
            "system": "Be brief",
            "conversations": [
                {"from": "human", "value": "Oslo?"},
                {
                    "from": "function_call",
                    "value": '{"name": "weather", "arguments": {"city": "Oslo"}}',
                },
                {"from": "observation", "value": '{"sky": "rain"}'},
                {"from": "gpt", "value": "Rain"},
            ],
            "tools": [TOOL],
        },
        Conversation(
            (
                {"role": "system", "content": "Be brief"},
                user("Oslo?"),
                assistant("") | {"tool_calls": [call("weather", "call00000", city="Oslo")]},
                {"role": "tool", "content": '{"sky": "rain"}', "tool_call_id": "call00000"},
                assistant("Rain"),
            ),
            (TOOL,),
        ),
    ),
    "alpaca": (
        "alpaca",
        {"instruction": "Add", "input": "2 2", "output": "4"},
        Conversation((user("Add\n\n2 2"), assistant("4"))),
    ),
    "alpaca without input": (
        "alpaca",
        {"instruction": "Hi", "input": "", "output": "Hello", "system": "Be brief"},
        Conversation(({"role": "system", "content": "Be brief"}, user("Hi"), assistant("Hello"))),
    ),
    "question_answer": (
        "question_answer",
        {"question": "2+2?", "answer": "#### 4"},
        Conversation((user("2+2?"), assistant("#### 4"))),
    ),
    "prompt_completion": (
        "prompt_completion",
        {"prompt": "2+2=", "completion": "4"},
        Completion("2+2=", "4"),
    ),
    "prompt_completion of messages": (
        "prompt_completion",
        {
            "prompt": [user("Hi"), assistant("Hello"), user("2+2?")],
            "completion": [assistant("4")],
        },
        Conversation((user("Hi"), assistant("Hello"), user("2+2?"), assistant("4")), given=3),
    ),
    "text": ("text", {"text": "Once upon a time"}, Text("Once upon a time")),
    "self_instruct": (
        "self_instruct",
        {"instruction": "Add", "instances": [{"input": "2 2", "output": "4"}, {"output": "5"}]},
        Conversation((user("Add\n\n2 2"), assistant("4"))),
    ),
    "self_instruct without an instance": (
        "self_instruct",
        {"instruction": "Add", "instances": []},
        None,
    ),
    "oasst": (
        "oasst",
        {
            "message_tree_id": "t",
            "prompt": {
                "role": "prompter",
                "text": "Hi",
                "replies": [
                    {"role": "assistant", "text": "unranked", "rank": None, "replies": []},
                    {"role": "assistant", "text": "worse", "rank": 1, "replies": []},
                    {"role": "assistant", "text": "gone", "rank": -1, "deleted": True},
                    {
                        "role": "assistant",
                        "text": "best",
                        "rank": 0,
                        "replies": [{"role": "prompter", "text": "Thanks", "replies": []}],
                    },
                ],
            },
        },
        Conversation((user("Hi"), assistant("best"))),
    ),
    "oasst of bare messages, nobody answered": (
        "oasst",
        {"role": "prompter", "text": "Hi", "replies": []},
        None,
    ),
    "kto wanted": (
        "kto",
        {"messages": [user("Hi"), assistant("Hello")], "label": True},
        Conversation((user("Hi"), assistant("Hello"))),
    ),
    "kto unwanted": ("kto", {"messages": [user("Hi"), assistant("Go")], "label": False}, None),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_row_becomes_exactly_this_sample(name: str):
    data_format, row, sample = GOLDEN[name]
    assert read_row(data_format, row) == sample


def test_every_format_has_a_golden_row():
    assert {data_format for data_format, _, _ in GOLDEN.values()} == set(FORMATS)


PROBLEMS: dict[str, tuple[str, Any, str]] = {
    "missing columns": (
        "messages",
        {"instruction": "Hi", "output": "Hello"},
        "format 'messages' needs 'messages', the row has 'instruction', 'output'; "
        "format 'alpaca' would fit",
    ),
    "a null column is missing": (
        "question_answer",
        {"question": "Hi", "answer": None},
        "format 'question_answer' needs 'question' + 'answer', "
        "the row has 'question', 'answer' (null)",
    ),
    "alternatives": (
        "oasst",
        {"a": 1},
        "format 'oasst' needs 'message_tree_id' + 'prompt' or 'text' + 'role' + 'replies', "
        "the row has 'a'",
    ),
    "not a row": ("text", ["Hi"], "is a list, expected an object with columns"),
    "a number": (
        "question_answer",
        {"question": "2+2?", "answer": 4},
        "answer is a number, expected text",
    ),
    "no messages": ("messages", {"messages": []}, "messages is empty"),
    "no turns": ("sharegpt", {"conversations": []}, "conversations is empty"),
    "a turn from no text": (
        "sharegpt",
        {"conversations": [{"from": ["human"], "value": "Hi"}]},
        "conversations[0].from is a list, expected text",
    ),
    "messages as text": ("messages", {"messages": "Hi"}, "messages is text, expected a list"),
    "no role": (
        "messages",
        {"messages": [{"from": "human", "value": "Hi"}]},
        "messages[0] has no 'role' (it has from, value); format 'sharegpt' reads 'from' and "
        "'value'",
    ),
    "unknown role": (
        "messages",
        {"messages": [{"role": "asistant", "content": "Hi"}]},
        "messages[0] has role 'asistant'; did you mean 'assistant'? (known: system, developer, "
        "user, assistant, tool)",
    ),
    "no content": (
        "messages",
        {"messages": [{"role": "user"}]},
        "messages[0].content is null, expected text",
    ),
    "an image": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
        "messages[0] has a part that is not text: image",
    ),
    "arguments that are no JSON": (
        "messages",
        {"messages": [assistant("") | {"tool_calls": [{"name": "f", "arguments": "{"}]}]},
        "messages[0].tool_calls[0].arguments is not JSON: Expecting property name enclosed in "
        "double quotes: line 1 column 2 (char 1)",
    ),
    "arguments nested too deeply": (
        "messages",
        {"messages": [assistant("") | {"tool_calls": [{"name": "f", "arguments": "[" * 100_000}]}]},
        "messages[0].tool_calls[0].arguments is JSON nested too deeply",
    ),
    "calls that are no list": (
        "messages",
        {"messages": [assistant("") | {"tool_calls": 5}]},
        "messages[0].tool_calls is a number, expected a list",
    ),
    "a tool whose function is text": (
        "messages",
        {"messages": [user("Hi")], "tools": [{"type": "function", "function": "f"}]},
        "tools[0] has no function name",
    ),
    "a tool without a name": (
        "messages",
        {"messages": [user("Hi")], "tools": [{"name": None}]},
        "tools[0] has no function name",
    ),
    "a user who calls": (
        "messages",
        {"messages": [user("") | {"tool_calls": [{"name": "f", "arguments": {}}]}]},
        "messages[0] has tool_calls, which only an assistant makes",
    ),
    "sharegpt with roles": (
        "sharegpt",
        {"conversations": [user("Hi")]},
        "conversations[0] needs 'from' and 'value', it has role, content; rename the column to "
        "'messages' and use format 'messages'",
    ),
    "sharegpt from a stranger": (
        "sharegpt",
        {"conversations": [{"from": "humann", "value": "Hi"}]},
        "conversations[0] is from 'humann'; did you mean 'human'? (known: human, user, gpt, "
        "assistant, system, observation, tool, function_call)",
    ),
    "tools that are no JSON": (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "Hi"}], "tools": "none"},
        "tools is not JSON: Expecting value: line 1 column 1 (char 0)",
    ),
    "prompt and completion of two kinds": (
        "prompt_completion",
        {"prompt": "Hi", "completion": [assistant("Hello")]},
        "prompt is text and completion is a list, expected two texts or two lists of messages",
    ),
    "a label of words": (
        "kto",
        {"messages": [user("Hi")], "label": "yes"},
        "label is text, expected true or false",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_row_that_does_not_fit_says_why(name: str):
    data_format, row, message = PROBLEMS[name]
    with pytest.raises(RowProblem) as error:
        read_row(data_format, row)
    assert str(error.value) == message


def test_the_most_specific_format_is_suggested_first():
    assert fitting_formats(["messages", "label"]) == ["kto", "messages"]
    assert fitting_formats(["message_tree_id", "prompt", "tree_state"]) == ["oasst"]
    assert fitting_formats(["a"]) == []


def test_an_unknown_format_names_the_nearest():
    with pytest.raises(FinetuneError) as error:
        find_format("sharegtp")
    assert str(error.value) == (
        "data.format: 'sharegtp' is not a format; did you mean 'sharegpt'? (known: alpaca, kto, "
        "messages, oasst, prompt_completion, question_answer, self_instruct, sharegpt, text)"
    )


# What real files hold: file, format, rows, samples, what the first sample begins with.
REAL = [
    ("gsm8k/train.jsonl", "question_answer", 7473, 7473, "Natalia sold clips to 48"),
    ("gpteacher/roleplay.json", "alpaca", 3146, 3146, "Imagine you are a detective"),
    ("gpteacher/toolformer-0.6.json", "alpaca", 2396, 2396, "toolformer: enabled"),
    ("llamafactory_demo/alpaca_en_demo.json", "alpaca", 999, 999, "Describe a process"),
    ("llamafactory_demo/identity.json", "alpaca", 91, 91, "hi"),
    ("llamafactory_demo/glaive_toolcall_en_demo.json", "sharegpt", 300, 300, "Hi, I have some"),
    ("llamafactory_demo/kto_en_demo.json", "kto", 300, 150, None),
    ("llamafactory_demo/kto_en_demo.json", "messages", 300, 300, "The Federal Trade"),
    ("llamafactory_demo/c4_demo.jsonl", "text", 300, 300, "Don\u2019t think you need"),
    ("seed_tasks/seed_tasks.jsonl", "self_instruct", 175, 175, "Is there anything I can eat"),
    ("seed_tasks/user_oriented_instructions.jsonl", "self_instruct", 252, 252, "The sentence"),
    ("sharegpt/dummy_conversation.json", "sharegpt", 500, 500, "Who are you?"),
    ("oasst_sample/en_100_tree.jsonl", "oasst", 100, 100, "How can I find the best 401k"),
    ("oasst_sample/en_100_message.jsonl", "oasst", 100, 100, "How can I find the best 401k"),
    ("wikitext2/valid.txt", "text", 1, 1, " \n = Homarus gammarus"),
    ("tinystories/tinystories_197k.txt", "text", 1, 1, "One day, a little girl"),
    ("tinystories/tinystories_sample_cs336.txt", "text", 5, 5, "Once upon a time"),
    ("tinyshakespeare/input.txt", "text", 1, 1, "First Citizen:\nBefore"),
]


@pytest.mark.parametrize(("name", "data_format", "rows", "samples", "beginning"), REAL)
def test_real_files_are_read_whole(
    assets: Path, name: str, data_format: str, rows: int, samples: int, beginning: str | None
):
    path = assets / "data" / name
    read = [read_row(data_format, row) for _, row in READERS[path.suffix](path)]
    kept = [sample for sample in read if sample is not None]
    assert (len(read), len(kept)) == (rows, samples)
    if beginning is not None:
        first = kept[0]
        text = first.text if isinstance(first, Text) else first.messages[0]["content"]
        assert text.startswith(beginning)


def test_tool_calls_of_a_real_file_keep_their_arguments_and_find_their_results(assets: Path):
    path = assets / "data/llamafactory_demo/glaive_toolcall_en_demo.json"
    calls = answered = 0
    for row in json.loads(path.read_text()):
        sample = read_row("sharegpt", row)
        assert isinstance(sample, Conversation)
        assert len(sample.tools) == len(json.loads(row["tools"]))
        wanted = [turn["value"] for turn in row["conversations"] if turn["from"] == "function_call"]
        made = [c for message in sample.messages for c in message.get("tool_calls", ())]
        assert [each["function"] for each in made] == [json.loads(text) for text in wanted]
        results = [message for message in sample.messages if message["role"] == "tool"]
        assert [m["tool_call_id"] for m in results] == [each["id"] for each in made]
        calls, answered = calls + len(made), answered + len(results)
    assert (calls, answered) == (211, 211)
