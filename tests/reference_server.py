"""A small HTTP server with the routes of `vllm serve` that training uses, on plain PEFT.

It samples with a generator of each request's seed, one token after another, and returns token ids
with their log-probabilities.
"""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


class Served:
    """A base with the adapters that were loaded; counts what it was asked."""

    def __init__(self, base: Path, version: str = "0.32.0", context: int = 256) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self.base, self.version, self.context = base, version, context
        self.loaded: list[str] = []
        self.seeds: list[int] = []
        self.fails_after: int | None = None
        """Number of completions after which requests get status 500."""
        self._lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            match path:
                case "/version":
                    return 200, {"version": self.version}
                case "/v1/models":
                    return 200, {"data": [{"id": "base", "max_model_len": self.context}]}
                case "/v1/load_lora_adapter":
                    return self._load(body["lora_name"], body["lora_path"])
                case "/v1/unload_lora_adapter":
                    self.model.delete_adapter(body["lora_name"])
                    self.loaded.remove(body["lora_name"])
                    return 200, "Success"
                case "/v1/completions":
                    return self._complete(body)
                case _:
                    return 404, {"detail": "Not Found"}

    def _load(self, name: str, path: str) -> tuple[int, Any]:
        if isinstance(self.model, PeftModel):
            self.model.load_adapter(path, name)
        else:
            self.model = PeftModel.from_pretrained(self.model, path, name).eval()
        self.loaded.append(name)
        return 200, "Success"

    @torch.no_grad()
    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.seeds.append(body["seed"])
        if self.fails_after is not None and len(self.seeds) > self.fails_after:
            return 500, {"error": {"message": "out of memory"}}
        self.model.set_adapter(body["model"])
        chance = torch.Generator().manual_seed(body["seed"])
        prompt, said, logps = body["prompt"], list[int](), list[float]()
        while len(said) < body["max_tokens"]:
            logits = self.model(input_ids=torch.tensor([prompt + said])).logits[0, -1]
            shares = (logits / (body["temperature"] or 1.0)).log_softmax(-1)
            greedy = not body["temperature"]
            token = shares.argmax() if greedy else shares.exp().multinomial(1, generator=chance)
            said.append(int(token))
            logps.append(float(shares[said[-1]]))
            if said[-1] in body["stop_token_ids"]:
                break
        ended = said[-1] in body["stop_token_ids"]
        choice = {
            "token_ids": said, "logprobs": {"token_logprobs": logps}, "prompt_token_ids": prompt,
            "finish_reason": "stop" if ended else "length",
        }  # fmt: skip
        return 200, {"choices": [choice]}


@contextlib.contextmanager
def serving(served: Served) -> Iterator[str]:
    """Serve in a thread; yields the URL."""

    class Answering(Handler):
        def do_GET(self) -> None:
            self.reply(*served.answer(self.path, {})[::-1])

        def do_POST(self) -> None:
            self.reply(*served.answer(self.path, json.loads(self.body()))[::-1])

    with listening(Answering) as url:
        yield url


class Handler(BaseHTTPRequestHandler):
    """Replies with JSON, and writes no log."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(self, answer: Any, status: int = 200) -> None:
        body = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@contextlib.contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Answer requests in a thread; yields the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
