"""Replies of the server: stop texts in a growing answer, and tool calls of the API."""

import json
from types import SimpleNamespace

import httpx
import torch
from fastapi.testclient import TestClient
from openai.types.chat import ChatCompletion
from served import ASKED, TOOL, running
from tiny_run import save_base, tiny_llama

from finetune.data.chat.written_calls import HERMES
from finetune.serving.app import build_app
from finetune.serving.bodies import Chat
from finetune.serving.models import open_models
from finetune.serving.reply import Answer, UntilStop
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
        Answer(text, [], [1, 2, 3], 4, "stop")
    )
    (choice,) = ChatCompletion.model_validate(reply).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Wait.")
    assert (call.function.name, call.function.arguments) == ("look", '{"at": [1]}')
    broken = "<tool_call>{not json}</tool_call>"
    reply = Chat(SimpleNamespace(name="m", call_form=HERMES), asked).response(
        Answer(broken, [], [1, 2, 3], 4, "stop")
    )
    assert reply["choices"][0]["message"]["content"] == broken
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_streams_end_with_an_error_when_the_server_is_ended(tmp_path):
    base = save_base(tiny_llama(), tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"max_position_embeddings": 10**6}
    (base / "config.json").write_text(json.dumps(config))
    body = {"messages": ASKED, "max_tokens": 10**5, "temperature": 0, "stream": True}
    with (
        running(tmp_path, str(base)) as (url, process),
        httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as reply,
    ):
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        process.terminate()
        *_, error, end = lines
    told = json.loads(error.removeprefix("data: "))["error"]["message"]
    assert told == "the server is shutting down"
    assert end == "data: [DONE]"


def test_a_model_that_computes_nan_is_named_and_the_server_goes_on(tmp_path):
    broken = tiny_llama()
    with torch.no_grad():
        broken.get_output_embeddings().weight[3] = torch.nan
    models = {
        name: open_models(save_base(model, tmp_path / name), name)[name]
        for name, model in (("broken", broken), ("sound", tiny_llama()))
    }
    told = "model broken: the largest logit of token 1 is nan, expected a number"
    with TestClient(build_app(models), base_url="http://localhost") as client:
        for fields in ({}, {"logprobs": True}, {"temperature": 1.0}):
            body = {"messages": ASKED, "max_tokens": 4, **fields}
            reply = client.post("/v1/chat/completions", json=body)
            error = reply.json()["error"]
            assert (reply.status_code, error["type"]) == (500, "server_error")
            assert error["message"].startswith(told)
        streamed = client.post("/v1/chat/completions", json={**body, "stream": True})
        assert told in streamed.text
        reply = client.post(
            "/v1/chat/completions", json={**body, "model": "sound", "temperature": 0}
        )
        assert reply.json()["usage"]["completion_tokens"] == 4
        assert client.get("/health").json() == {"status": "ok", "requests": 0}
