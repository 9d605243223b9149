"""Tool calls are read in the form in which each chat template writes them."""

import json
from typing import Any

import pytest
from chats import MARKS, NO_TOOLS, real_chat
from conftest import slow_but
from tiny_run import byte_tokenizer

from finetune.data.chat.render import Chat, load_chat
from finetune.data.chat.written_calls import CallForm, call_form
from finetune.data.samples import Conversation
from finetune.errors import FinetuneError

TURN = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
TURN += "<|{{ m.role }}|>{{ m.content }}CALLS<|end|>{% endfor %}"
HEADER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
LOOP = "{% for c in m.tool_calls or [] %}{% set f = c.function %}ONE{% endfor %}"
EACH = "{% for k, v in f.arguments.items() %}ONE{% endfor %}"
TEXT = "{{ v if v is string else v | tojson }}"
FORMS = {
    "deepseek": "function<sep>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```<stop>",
    "mistral": "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
    "gpt-oss": "<|channel|>commentary to=functions.{{ f.name }} <|json|>"
    "{{ f.arguments | tojson }}<|call|>",
    "qwen3-coder": "<tool_call>\n<function={{ f.name }}>\n"
    + EACH.replace("ONE", f"<parameter={{{{ k }}}}>\n{TEXT}\n</parameter>\n")
    + "</function>\n</tool_call>\n",
    "glm": "<tool_call>{{ f.name }}\n"
    + EACH.replace("ONE", f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{TEXT}</arg_value>\n")
    + "</tool_call>\n",
    "hermes": "<tool_call>\n{{ f | tojson }}\n</tool_call>\n",
}
FIELDS = {"where": {"type": "string"}, "days": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": FIELDS}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("get_weather", "find-way.to")
)
CALLS = [
    ("get_weather", {"where": 'São "P" <b>\n{x}', "days": 3, "more": {"a": [1, None]}}),
    ("find-way.to", {"where": "7", "days": 0}),
]


def written(chat: Any, calls: list[tuple[str, dict[str, Any]]], words: str = "") -> str:
    """What the template writes, as a model that learned it answers."""
    listed = [
        {"id": f"abcdef00{n}", "type": "function", "function": {"name": a, "arguments": b}}
        for n, (a, b) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": words, "tool_calls": listed}
    row = chat.render(Conversation(({"role": "user", "content": "?"}, answer), TOOLS), "completion")
    ids = [id for id, said in zip(row.ids, row.trained, strict=True) if said]
    return chat.tokenizer.decode(ids, skip_special_tokens=True)


def chat_of(calls: str) -> Chat:
    """A chat whose template writes each call in this form."""
    made = byte_tokenizer(TURN.replace("CALLS", LOOP.replace("ONE", calls)) + HEADER)
    special = ["<|user|>", "<|assistant|>", "<stop>", "<sep>", "<|channel|>"]
    made.add_tokens(special, special_tokens=True)
    return load_chat(made, None)


def read(form: CallForm | None, text: str) -> list[tuple[str, Any]]:
    assert form is not None
    return [(call.name, call.arguments) for call in form.read(text, TOOLS)]


@pytest.mark.parametrize("name", FORMS)
def test_calls_are_read_as_the_template_writes_them(name):
    chat = chat_of(FORMS[name])
    form = call_form(chat)
    assert read(form, written(chat, CALLS[:1])) == CALLS[:1]
    assert read(form, written(chat, CALLS)) == CALLS
    said = "Wait: {1} [2]."
    text = f"{said}\n{written(chat, CALLS)}"
    assert read(form, text) == CALLS
    assert form is not None
    assert text[: form.read(text, TOOLS)[0].start].strip() == said
    half = written(chat, CALLS[:1]).partition("S")[0]
    for broken in (said, "", half):
        assert read(form, broken) == []


EVERYDAY = ("qwen3", "meta-llama-Llama-3.1-8B-Instruct", "mistralai-Mistral-Nemo-Instruct-2407")


@pytest.mark.parametrize("name", slow_but(EVERYDAY, sorted(set(MARKS) - NO_TOOLS)))
def test_calls_of_real_templates_are_read(assets, name):
    chat = real_chat(assets, name)
    form = call_form(chat)
    assert read(form, written(chat, CALLS[:1])) == CALLS[:1]
    if "Llama" not in name:  # whose template takes one call at most
        assert read(form, written(chat, CALLS)) == CALLS
    assert read(form, json.dumps({"days": 3})) == []


@pytest.mark.parametrize("name", sorted(NO_TOOLS))
def test_a_template_without_calls_has_no_form(assets, name):
    assert call_form(real_chat(assets, name)) is None


WORDS = ["Let me see where it rains for 3 days.", "3", "where", "name", 'Schau "nach" <b>\nin São']
BESIDE = {
    "one call": CALLS[:1],
    "two calls": CALLS,
    "alike": [("get_weather", {"where": "where"}), ("get_weather", {"where": "where"})],
    "numbers": [("get_weather", {"days": 3, "more": [1.5, True, None]})],
    "nested": [("get_weather", {"more": {"where": {"days": ["3", 3, {}]}}})],
    "empty text": [("get_weather", {"where": ""})],
    "nothing": [("get_weather", {})],
}


@pytest.mark.parametrize("calls", BESIDE)
@pytest.mark.parametrize("name", FORMS)
def test_text_next_to_calls_is_trained_with_them(name, calls):
    chat = chat_of(FORMS[name])
    alone = written(chat, BESIDE[calls])
    for words in WORDS:
        assert written(chat, BESIDE[calls], words) == words + alone


@pytest.mark.parametrize("words", WORDS)
def test_text_that_a_template_leaves_out_next_to_calls_is_refused(words):
    chat = chat_of(FORMS["glm"])
    assert chat.template is not None
    chat.tokenizer.chat_template = chat.template.replace(
        "{{ m.content }}", "{{ m.content if not m.tool_calls }}"
    )
    with pytest.raises(
        FinetuneError, match="leaves out the text of message 1 next to its tool calls"
    ):
        written(load_chat(chat.tokenizer, None), CALLS, words)


def test_arguments_that_a_template_leaves_out_are_refused():
    some = FORMS["qwen3-coder"].replace("f.arguments.items()", "f.arguments.items() if v is string")
    with pytest.raises(FinetuneError, match="leaves out arguments of the tool calls of message 1"):
        written(chat_of(some), CALLS, "Let me see where it rains for 3 days.")
