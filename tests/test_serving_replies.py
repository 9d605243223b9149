"""Replies of the server: stop texts in a growing answer, and tool calls of the API."""

from types import SimpleNamespace

from openai.types.chat import ChatCompletion
from test_serving import ASKED, TOOL

from finetune.data.chat.written_calls import HERMES
from finetune.serving.answer import Answer, UntilStop
from finetune.serving.bodies import Chat
from finetune.serving.requests import ChatRequest


def test_what_may_begin_a_stop_text_is_held_back():
    passed: list[str] = []
    cut = UntilStop(["END", "ND!"], passed.append)
    for piece in ("a", "E", "N", "x", "E", "ND", "b"):
        cut.feed(piece)
    assert (passed, cut.text, cut.found) == (["a", "ENx"], "aENx", True)
    long = UntilStop(["y" * 5_000_000], passed.append)  # in time that does not grow with it
    for _ in range(500):
        long.feed("x")
    assert long.text == "x" * 500
    open_end = UntilStop(["END"], passed.append)
    open_end.feed("xEN")
    open_end.flush()
    assert open_end.text == "xEN"


def test_a_written_call_becomes_one_of_the_api():
    asked = ChatRequest(messages=ASKED, tools=[TOOL])
    text = 'Wait.<tool_call>\n{"name": "look", "arguments": {"at": [1]}}\n</tool_call>'
    reply = Chat(SimpleNamespace(name="m", call_form=HERMES), asked).response(
        Answer(text, [], 3, 4, "stop")
    )
    (choice,) = ChatCompletion.model_validate(reply).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Wait.")
    assert (call.function.name, call.function.arguments) == ("look", '{"at": [1]}')
    broken = "<tool_call>{not json}</tool_call>"
    reply = Chat(SimpleNamespace(name="m", call_form=HERMES), asked).response(
        Answer(broken, [], 3, 4, "stop")
    )
    assert reply["choices"][0]["message"]["content"] == broken
    assert reply["choices"][0]["finish_reason"] == "stop"
