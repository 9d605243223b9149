"""The server answers as the model that was trained does, to OpenAI's own client."""

import base64
import functools
import hashlib
import http.client
import json
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import torch
from browsers import Tab, browsing
from served import ASKED, TOOL, running
from tiny_run import (
    CHATML,
    Trained,
    lora_run,
    save_base,
    save_checkpoint,
    start_run,
    tiny_llama,
    trained_adapter,
)

from finetune import LoRA, Run, catalog, export, generate, load, load_base
from finetune.cli import main as cli
from finetune.data.chat.render import load_chat
from finetune.data.formats import read_row
from finetune.errors import FinetuneError
from finetune.inference.generate import Loaded, load_folder
from finetune.serving.serve import listening

IS_JSON = {"content-type": "application/json"}
NINES = b"9" * 5000
"""More digits than Python converts."""


@dataclass(frozen=True)
class Server:
    trained: Trained
    url: str
    client: openai.OpenAI

    @functools.cached_property
    def loaded(self) -> Loaded:
        """The same model in this process."""
        return load(self.trained.run)

    def chat(self, model: str, messages: Any = ASKED, most: int = 24, **fields: Any) -> Any:
        return self.client.chat.completions.create(
            model=model, messages=messages, max_tokens=most, **fields
        )

    def complete(self, prompt: Any, most: int = 24, **fields: Any) -> Any:
        return self.client.completions.create(
            model="tuned", prompt=prompt, max_tokens=most, **fields
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    trained = lora_run(folder)
    with running(
        folder, str(trained.run.root), "--name", "tuned", "--rows", "4", "--queue", "2"
    ) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        yield Server(trained, url, client)


def post(server: Server, body: Any, path: str = "chat/completions") -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=120, verify=False)


def sent(
    server: Server, body: bytes | str, headers: dict[str, str] | None = None
) -> httpx.Response:
    url, headers = f"{server.url}/v1/chat/completions", IS_JSON | (headers or {})
    return httpx.post(url, content=body, headers=headers, timeout=60, verify=False)


def message_of(reply: httpx.Response) -> str:
    (error,) = reply.json().values()
    assert (set(error), error["type"]) == (
        {"message", "type", "param", "code"}, "invalid_request_error",
    )  # fmt: skip
    return error["message"]


def wanted(server: Server, base: bool = False, most: int = 24) -> str:
    """The answer of the product's own generation."""
    loaded = server.loaded
    if base:
        loaded = load_base(catalog.load(server.trained.run.recipe), loaded.tokenizer)
    return generate(loaded, [ASKED], max_new_tokens=most)[0]


def test_answers_are_those_of_the_trained_model_and_of_its_base(server):
    for name in ("tuned", "tuned-base"):
        reply = server.chat(name)
        expected = wanted(server, base=name.endswith("base"))
        assert reply.choices[0].message.content == expected
        chunks = list(server.chat(name, stream=True, stream_options={"include_usage": True}))
        text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
        assert text == expected
        assert chunks[-1].usage == reply.usage
        assert chunks[-2].choices[0].finish_reason == reply.choices[0].finish_reason
    assert [model.id for model in server.client.models.list()] == ["tuned", "tuned-base"]


def test_the_ids_of_a_request_are_those_of_training(server):
    row = {"messages": [*ASKED, {"role": "assistant", "content": "x"}]}
    chat = load_chat(server.loaded.tokenizer, None)
    rendered = chat.render(read_row("messages", row), "assistant")
    prompt = rendered.ids[: rendered.trained.index(True)]
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is kept?"}]}]
    for messages in (ASKED, parts):
        asked = {"extra_body": {"return_token_ids": True}}
        assert server.chat("tuned", messages, 3, **asked).prompt_token_ids == prompt
        *_, last = server.chat("tuned", messages, 3, stream=True, **asked)
        assert last.prompt_token_ids == prompt
        assert server.chat("tuned", messages, 3).usage.prompt_tokens == len(prompt)
    assert server.complete(prompt).choices[0].text == wanted(server)


def test_log_probabilities_do_not_depend_on_the_temperature(server):
    greedy, warm = (
        server.chat("tuned", most=6, logprobs=True, top_logprobs=3, **fields)
        for fields in ({}, {"temperature": 3.0, "seed": 1})
    )
    loaded = server.loaded
    ids = load_chat(loaded.tokenizer, None).prompt(read_row("messages", {"messages": ASKED}))
    with torch.inference_mode():
        logits = loaded.model(input_ids=torch.tensor([ids])).logits[0, -1]
    best = logits.float().log_softmax(-1).topk(3).values.tolist()
    for reply in (greedy, warm):
        first = reply.choices[0].logprobs.content[0]
        assert [each.logprob for each in first.top_logprobs] == pytest.approx(best, abs=1e-4)
    old = server.complete(ids, 6, logprobs=3)
    assert old.choices[0].logprobs.token_logprobs == pytest.approx(
        [each.logprob for each in greedy.choices[0].logprobs.content], abs=1e-4
    )


def test_a_seed_repeats_an_answer_and_another_gives_another(server):
    first, second, other = (
        server.complete("Once", temperature=2.0, seed=seed).choices[0].text for seed in (1, 1, 2)
    )
    assert first == second != other


def test_answers_do_not_depend_on_what_else_is_answered(server):
    """Greedy and seeded, of the adapter and of its base, of several lengths, ending at several."""
    asked = [
        {"prompt": "Once upon a time"[: 3 + 2 * n], "max_tokens": 8 + 5 * n, "seed": n,
         "temperature": 1.5 * (n % 2), "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1,
         "model": ("tuned", "tuned-base")[n % 3 // 2]}
        for n in range(6)
    ]  # fmt: skip

    def said(body: dict[str, Any]) -> str:
        return post(server, body, "completions").json()["choices"][0]["text"]

    alone = [said(body) for body in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(said, asked)) == alone
        assert list(pool.map(said, reversed(asked))) == alone[::-1]
    assert len(set(alone)) == len(alone)
    greedy = generate(server.loaded, [asked[0]["prompt"]], max_new_tokens=8, repetition_penalty=1.1)
    assert alone[0] == greedy[0]


def test_an_answer_ends_before_a_stop_text(server):
    whole = wanted(server)
    stop = whole[len(whole) // 2 :][:2]
    for stream in (False, True):
        reply = post(
            server, {"messages": ASKED, "max_tokens": 24, "stop": [stop], "stream": stream}
        )
        if stream:
            lines = [line.removeprefix("data: ") for line in reply.text.splitlines()]
            events = [json.loads(line) for line in lines if line.startswith("{")]
            choices = [event["choices"][0] for event in events]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
            reason = choices[-1]["finish_reason"]
        else:
            choice = reply.json()["choices"][0]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        assert (text, reason) == (whole[: whole.index(stop)], "stop")


def said_by(role: str, content: Any = "x") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


BAD = {
    "an unknown field": ({"typical_p": 0.1}, "typical_p: this server has no such field"),
    "two answers": ({"n": 2}, "n: "),
    "a grammar": ({"response_format": {"type": "json_object"}}, "response_format"),
    "an empty message": ({"messages": [{}]}, "messages[0] has no 'role'"),
    "no message": ({"messages": []}, "messages: "),
    "an unknown role": (said_by("asistant"), "did you mean"),
    "the assistant last": (said_by("assistant"), "the last one is"),
    "an image": (said_by("user", [{"type": "image_url", "image_url": {"url": "x"}}]), "data: URLs"),
    "a long prompt": (said_by("user", "x" * 500), "leave no room"),
    "a variable": ({"chat_template_kwargs": ["x"]}, "chat_template_kwargs"),
    "a temperature": ({"temperature": "hot"}, "temperature: "),
    "a misspelt variable": (
        {"chat_template_kwargs": {"thinking": 1}},
        "chat_template_kwargs: the chat template does not read 'thinking'",
    ),
    "a variable of the data": ({"chat_template_kwargs": {"tools": []}}, "is set by the data"),
    "a yes for a number": ({"max_tokens": True}, "max_tokens: Input should be a valid integer"),
    "many stop texts": ({"stop": ["x"] * 10_000}, "stop: List should have at most 16 items"),
    "an empty stop text": ({"stop": ""}, 'stop.0: String should have at least 1 character, got ""'),
    "half a character": (said_by("user", "\ud83d"), "surrogate"),
    "a nested body": (said_by("user", [[[]]]), "messages[0]"),
}


@pytest.mark.parametrize(("fields", "told"), BAD.values(), ids=BAD.keys())
def test_a_request_that_cannot_be_honoured_is_refused_by_name(server, fields, told):
    reply = sent(server, json.dumps({"messages": ASKED, **fields}))
    assert reply.status_code == 400
    assert told in message_of(reply)


def test_errors_have_the_shape_of_the_api_and_the_server_outlives_bodies_that_are_no_requests(
    server,
):
    for method, path, status in (
        ("PUT", "chat/completions", 405), ("POST", "models", 405), ("GET", "embeddings", 404),
    ):  # fmt: skip
        reply = httpx.request(method, f"{server.url}/v1/{path}", headers=IS_JSON, content=b"{}"[:0])
        assert (reply.status_code, message_of(reply)) == (
            status, f"{method} /v1/{path}: this route does not exist",
        )  # fmt: skip
    bodies = (b'{"messages": [', b"\xff\xfe", b"null", b"[" * 100_000, b"", b'{"seed": %s}' % NINES)
    for body in bodies:
        reply = sent(server, body)
        assert reply.status_code == 400
        assert "the body" in message_of(reply), body[:20]
    assert "got NaN" in message_of(sent(server, b'{"messages": [{}], "temperature": NaN}'))
    assert sent(server, b"x" * 100_000_000).status_code == 413
    assert sent(server, b"{}", {"content-type": "text/plain"}).status_code == 415
    assert "host: got" in message_of(sent(server, b"{}", {"host": "evil.example"}))
    assert "'\ud83d'" in message_of(sent(server, b'{"messages": [{}], "model": "\\ud83d"}'))
    assert post(server, {"messages": ASKED, "model": "tunde"}).status_code == 404
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "requests": 0}


def test_a_full_queue_refuses_and_clients_that_hang_up_free_it(server):
    slow = {"prompt": "Once", "max_tokens": 100, "temperature": 2.0, "seed": 3}
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(post, server, slow, "completions") for _ in range(12)]
        replies = [each.result() for each in asked]
    assert {reply.status_code for reply in replies} == {200, 429}
    assert len({reply.json()["choices"][0]["text"] for reply in replies if reply.is_success}) == 1
    host = server.url.removeprefix("http://")
    body = json.dumps({**slow, "stream": True})
    for length in (len(body), len(body), len(body) + 1):  # the last one sends no complete body
        connection = http.client.HTTPConnection(host)
        headers = IS_JSON | {"content-length": str(length)}
        connection.request("POST", "/v1/completions", body, headers)
        connection.close()
    deadline = time.monotonic() + 30
    while httpx.get(f"{server.url}/health").json()["requests"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert post(server, {"messages": ASKED, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_long_request_is_refused_from_its_length(server, path):
    text = "a " * 3_900_000
    chat = [{"role": "user", "content": text}]
    asked = {"prompt": text} if path == "completions" else {"messages": chat}
    reply = post(server, asked | {"max_tokens": 1}, path)
    assert reply.status_code == 400
    loaded = server.loaded
    longest = max(map(len, loaded.tokenizer.get_vocab()))
    least = int(len(text) * (1 / (4 * longest)))
    told = f"at least {least} tokens leave no room in a context of {loaded.context}"
    assert message_of(reply) == told


def test_a_port_is_taken_while_the_model_is_loaded():
    with listening("127.0.0.1", 0) as taken, pytest.raises(FinetuneError, match="cannot be used"):
        listening("127.0.0.1", taken.getsockname()[1])


def test_the_page_may_run_its_own_script_only(server):
    reply = httpx.get(server.url)
    (script,) = re.findall("<script>(.*?)</script>", reply.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = reply.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "connect-src 'self'", f"script-src 'sha256-{digest}'"} <= {*rules}
    assert not re.search(r"<[^>]+ (on\w+|style|src|href)=", reply.text)


def test_a_port_in_use_and_an_open_host_are_refused_before_loading(server, capsys):
    run = str(server.trained.run.root)
    port = server.url.rpartition(":")[2]
    assert cli.main(["serve", run, "--port", port]) == 2
    told = f"127.0.0.1:{port} cannot be used: Address already in use"
    assert told in capsys.readouterr().err
    assert cli.main(["serve", run, "--host", "0.0.0.0"]) == 2
    assert "set a key in FINETUNE_API_KEY" in capsys.readouterr().err


TOOLS = CHATML.replace(
    "{% for message", "{% if tools %}{{ tools | tojson }}{% endif %}{% for message", 1
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str], Run]]:
    """A server with a key, for a run with tools in its template, and one more adapter."""
    folder = tmp_path_factory.mktemp("guarded")
    base = save_base(tiny_llama(), folder / "base", TOOLS)
    run = start_run(folder / "run", base, LoRA(r=4))
    adapter = trained_adapter(tiny_llama())
    adapter.peft_config["default"].base_model_name_or_path = str(base)
    save_checkpoint(run, 10, adapter, TOOLS)
    other = export(lora_run(folder / "other", use_rslora=True).run, folder / "second")
    config = json.loads((other / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(base)
    (other / "adapter_config.json").write_text(json.dumps(config))
    words = [str(run.root), "--adapter", f"default={other}", "--adapter", f"v1.0={other}"]
    with running(folder, *words, FINETUNE_API_KEY="secret") as (url, _):
        yield url, {"authorization": "Bearer secret"}, run


def test_a_key_is_asked_for(guarded):
    url, key, _ = guarded
    for headers in ({}, {"authorization": "Bearer other"}):
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 401
    names = [each["id"] for each in httpx.get(f"{url}/v1/models", headers=key).json()["data"]]
    assert names == ["run", "default", "v1.0", "run-base"]


def test_every_adapter_of_one_base_answers_for_itself_in_turn_and_at_once(guarded):
    """Two adapters and their base, each with the answers of a process that holds it alone."""
    url, _, run = guarded
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
    asked = [[{"role": "user", "content": text}] for text in ("What?", "What is kept?", "x" * 60)]
    tuned = load(run)
    alone = {
        "run": tuned,
        "default": load_folder(run.root.parent / "second"),
        "run-base": load_base(catalog.load(run.recipe), tuned.tokenizer),
    }
    wanted = {
        (name, place): generate(loaded, [messages], max_new_tokens=6 + 5 * place)[0]
        for name, loaded in alone.items()
        for place, messages in enumerate(asked)
    }
    assert len(set(wanted.values())) == len(wanted)

    def said(key: tuple[str, int]) -> str:
        name, place = key
        reply = client.chat.completions.create(
            model=name, messages=asked[place], max_tokens=6 + 5 * place, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in reply)

    assert {key: said(key) for key in wanted} == wanted
    mixed = sorted(wanted, key=lambda key: key[1])  # neighbours are of different models
    with ThreadPoolExecutor(len(mixed)) as pool:
        for order in (mixed, mixed[::-1]):
            assert dict(zip(order, pool.map(said, order), strict=True)) == wanted


def test_tools_are_rendered_as_in_training(guarded):
    url, key, run = guarded
    row = {"messages": ASKED, "tools": [TOOL]}
    prompt = load_chat(load(run).tokenizer, None).prompt(read_row("messages", row))
    for choice, length in (("auto", len(prompt)), ("none", len(prompt) - len(json.dumps([TOOL])))):
        body = {**row, "max_tokens": 2, "tool_choice": choice}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers=key, timeout=60)
        assert reply.json()["usage"]["prompt_tokens"] == length


@pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium is installed")
def test_the_page_compares_base_and_tuned_answers(server, tmp_path):
    texts = "[...document.querySelectorAll('%s')].map((each) => each.textContent.trim())"
    fill = "Object.entries(%s).forEach(([name, value]) => $(name).value = value)"
    with browsing(tmp_path / "browser") as browser:
        tab = Tab(browser)
        tab.look(1200)
        tab.open(server.url)
        tab.until("document.querySelectorAll('section').length === 2")
        tab.value(fill % json.dumps({"max_tokens": 24, "prompt": ASKED[0]["content"]}))
        tab.value("$('send').click()")
        tab.until("document.querySelectorAll('.note').length === 2")
        shown = tab.value(texts % ".assistant")
        tab.value(
            fill % json.dumps({"temperature": 99, "prompt": "again"}) + "; $('prompt').focus()"
        )
        tab.press("Enter")
        tab.until("document.querySelectorAll('.error').length === 2")
        assert "temperature" in tab.value(texts % ".error")[0]
        for width in (1200, 390):
            tab.look(width)
            for side in ("Width", "Height"):
                inside = f"document.documentElement.scroll{side} <= inner{side}"
                assert tab.value(inside), (width, side)
        assert [each for each in tab.problems if "400" not in each] == []
    assert shown == [wanted(server, base).strip() for base in (True, False)]
