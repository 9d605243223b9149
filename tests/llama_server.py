"""llama.cpp's own server in this process, for GGUF files.

The server is that of the package `xllamacpp`, whose wheel holds llama.cpp built (2026.10.11549 was
run). The converter is that of a checkout, named in LLAMA_CPP_DIR.
"""

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx


def missing() -> str | None:
    """Why llama.cpp cannot be run here; None where it can."""
    if checkout() is None:
        return "LLAMA_CPP_DIR names no checkout of llama.cpp"
    if importlib.util.find_spec("xllamacpp") is None:
        return "xllamacpp is not installed"
    return None


def checkout() -> str | None:
    """The checkout of llama.cpp that has the converter."""
    return os.environ.get("LLAMA_CPP_DIR")


def has_quantiser() -> bool:
    return shutil.which("llama-quantize") is not None


class Client:
    """Asks llama.cpp's server at a URL, greedily."""

    def __init__(self, url: str) -> None:
        self._url = url

    def template(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt that the server makes of messages."""
        return self._ask("apply-template", messages=list(messages))["prompt"]

    def ids(self, text: str) -> list[int]:
        """Ids of a rendered prompt, as the server reads it."""
        return self._ask("tokenize", content=text, add_special=True, parse_special=True)["tokens"]

    def answer(self, ids: Sequence[int], most: int) -> tuple[list[int], bool]:
        """Ids of the greedy answer with the stop token, and whether that ended it."""
        fields = {"n_predict": most, "temperature": 0.0, "top_k": 1, "return_tokens": True}
        done = self._ask("completion", prompt=list(ids), **fields)
        return done["tokens"], done["stop_type"] == "eos"

    def chat(self, messages: Sequence[dict[str, Any]], most: int) -> tuple[str, str]:
        """Text of the greedy answer to messages, and why it ended."""
        done = self._ask(
            "v1/chat/completions", messages=list(messages), max_tokens=most, temperature=0.0
        )
        (choice,) = done["choices"]
        return choice["message"]["content"], choice["finish_reason"]

    def _ask(self, what: str, **fields: Any) -> dict[str, Any]:
        answer = httpx.post(f"{self._url}/{what}", json=fields, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.json()


class Server(Client):
    """A GGUF file served by llama.cpp in this process, by one thread."""

    def __init__(self, path: Path, context: int) -> None:
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(path)
        settings.n_ctx, settings.n_parallel, settings.use_jinja = context, 1, True
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
        settings.warmup, settings.verbosity = False, -1
        self._server = xllamacpp.Server(settings)
        super().__init__(str(self._server.listening_address))
