"""Client for OpenAI-compatible servers, such as vLLM, llama.cpp, Ollama or `finetune serve`."""

import contextlib
import dataclasses
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, cast

from finetune.data.images.image_file import as_parts, data_url
from finetune.errors import FinetuneError, reading
from finetune.runs.environment import hide

LONGEST = 16 * 2**20
"""Maximum bytes read from a reply."""


class Refused(FinetuneError):
    """A server answered with an HTTP status that is an error."""

    def __init__(self, *problems: str, status: int = 0, said: str = "") -> None:
        super().__init__(*problems)
        self.status = status
        self.said = said
        """The body of the answer."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """A completion returned by a server."""

    text: str
    cut: bool
    """Whether it ended at the token limit (`finish_reason` is `length`)."""
    tokens: int
    """Completion tokens from `usage`; 0 if the server does not report them."""
    calls: tuple[dict[str, Any], ...] | None


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A model at a URL."""

    url: str
    """Base URL without `/chat/completions`, such as http://localhost:8000/v1."""
    model: str
    key: str | None = None
    timeout: float = 600.0
    """Timeout of a request in seconds."""

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Reply:
        """The next message of a conversation.

        Raises:
            FinetuneError: the server does not answer, or the answer is not a chat completion.
        """
        body = {"model": self.model, "messages": list(map(_sendable, messages)), **fields}
        return self._reply("/chat/completions", body)

    def complete(self, prompt: str, **fields: Any) -> Reply:
        """The completion of a text.

        Raises:
            FinetuneError: the server does not answer, or the answer is not a completion.
        """
        return self._reply("/completions", {"model": self.model, "prompt": prompt, **fields})

    def _reply(self, path: str, body: dict[str, Any]) -> Reply:
        answer = exchange(self.url + path, self.key, self.timeout, body)
        try:
            choice = answer["choices"][0]
            message = choice.get("message", {"content": choice.get("text")})
            calls = message.get("tool_calls")
            return Reply(
                text=_text_of(message.get("content")),
                cut=choice.get("finish_reason") == "length",
                tokens=int((answer.get("usage") or {}).get("completion_tokens") or 0),
                calls=tuple(calls) if calls else None,
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise FinetuneError(
                f"{self.url}{path}: the reply is not a completion ({type(error).__name__}: "
                f"{error}): {json.dumps(answer)[:200]}"
            ) from None


def open_endpoint(url: str, model: str | None = None, key: str | None = None) -> Endpoint:
    """An endpoint for a model of a server, by default the first model that it lists.

    Raises:
        FinetuneError: not a URL; without `model`: the server does not answer, or lists no model.
    """
    if not _has_host(url):
        raise FinetuneError(f"got '{hide(url)}', expected a URL such as http://localhost:8000/v1")
    root = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
    root = root if root.rsplit("/", 1)[-1].startswith("v") else f"{root}/v1"
    if model is not None:
        return Endpoint(root, model, key)
    listed = exchange(f"{root}/models", key, 60.0)
    try:
        return Endpoint(root, str(listed["data"][0]["id"]), key)
    except (LookupError, TypeError):
        raise FinetuneError(
            f"{root}/models: lists no model ({json.dumps(listed)[:200]}); name one with --model"
        ) from None


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _has_host(url: str) -> bool:
    try:
        return is_url(url) and bool(urllib.parse.urlsplit(url).hostname)
    except ValueError:
        return False


def _text_of(content: Any) -> str:
    """The text of a message, in which unpaired surrogates are replaced: no file can hold them."""
    if not isinstance(content, str | None):
        raise TypeError(f"content is {type(content).__name__}, expected text")
    return (content or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _sendable(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the format of the API: tool calls have ids and arguments as JSON text, images
    are `data:` URLs."""
    if "images" in message:
        urls = iter(message["images"])
        message = as_parts(message)
        message["content"] = [
            {"type": "image_url", "image_url": {"url": data_url(next(urls))}}
            if part["type"] == "image"
            else part
            for part in message["content"]
        ]
    if not message.get("tool_calls"):
        return dict(message)
    calls = [
        {
            "id": f"call{number:05d}",
            "type": "function",
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for number, call in enumerate(message["tool_calls"])
    ]
    return {**message, "tool_calls": calls}


def exchange(
    url: str, key: str | None, timeout: float, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Send a POST request with JSON, or a GET request without a body; returns the JSON object.

    Raises:
        FinetuneError: no answer, or one that is not a JSON object; `Refused` for an error status.
    """
    with reading(f"{hide(url)}: the answer is not JSON"):
        read = json.loads(send(url, key, timeout, body))
    if not isinstance(read, dict):
        raise FinetuneError(f"{hide(url)}: the answer is {type(read).__name__}, expected an object")
    return cast(dict[str, Any], read)


def send(url: str, key: str | None, timeout: float, body: dict[str, Any] | None = None) -> bytes:
    """Send a POST request with JSON, or a GET request without a body; returns the answer's body.

    Raises:
        FinetuneError: no answer; `Refused` for an error status.
    """
    shown = hide(url)
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        if key is not None:  # not sent to where the server redirects
            request.add_unredirected_header("Authorization", f"Bearer {key.strip()}")
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.read(LONGEST)
    except urllib.error.HTTPError as error:
        said = ""
        with contextlib.suppress(OSError, http.client.HTTPException):
            said = error.read(LONGEST).decode("utf-8", "replace").strip()
        problem = f"{shown}: status {error.code} {error.reason}: {said[:400]}"
        raise Refused(problem, status=error.code, said=said) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise FinetuneError(f"{shown}: no answer ({reason}); is the server running?") from None
