"""Response bodies of OpenAI's API: complete or streamed answers, and errors."""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from finetune.data.chat.written_calls import WrittenCall
from finetune.serving.models import Served
from finetune.serving.reply import Answer, Token
from finetune.serving.requests import ChatRequest, TextRequest


class Body:
    """Base of both kinds of answers."""

    kind: str
    chunk_kind: str
    prefix: str
    asked: ChatRequest | TextRequest
    at_once = False
    """Whether the text is sent in one piece, because a tool call is only known at its end."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def response(self, answer: Answer) -> dict[str, Any]:
        """The complete answer."""
        body = self._body(self.kind, self._choice(answer))
        return {**body, **self._prompt(answer), "usage": _usage(answer)}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Events before the first text."""
        yield from ()

    def piece(self, text: str) -> dict[str, Any]:
        """An event with text."""
        return self._body(self.chunk_kind, self._part(text))

    def closing(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """Events after the last text."""
        yield {**self._body(self.chunk_kind, self._last(answer)), **self._prompt(answer)}
        options = self.asked.stream_options
        if options is not None and options.include_usage:
            yield {**self._body(self.chunk_kind), "usage": _usage(answer)}

    def _choice(self, answer: Answer) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _last(self, answer: Answer) -> dict[str, Any]:
        raise NotImplementedError

    def _body(self, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.served.name}
        return {**head, "choices": list(choices)}

    def _prompt(self, answer: Answer) -> dict[str, list[int]]:
        return {"prompt_token_ids": answer.prompt_ids} if self.asked.return_token_ids else {}

    def _word(self, id: int) -> str:
        return str(self.served.loaded.tokenizer.decode([id]))


class Chat(Body):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, served: Served, asked: ChatRequest) -> None:
        super().__init__(served)
        self.asked: ChatRequest = asked
        self.at_once = bool(asked.tools)

    def opening(self) -> Iterator[dict[str, Any]]:
        yield self._body(self.chunk_kind, _delta({"role": "assistant", "content": ""}))

    def _choice(self, answer: Answer) -> dict[str, Any]:
        text, calls = self._parts(answer)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        reason = "tool_calls" if calls else answer.finish_reason
        logprobs = self._logprobs(answer.tokens)
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _part(self, text: str) -> dict[str, Any]:
        return _delta({"content": text})

    def _last(self, answer: Answer) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        text, calls = self._parts(answer) if self.at_once else (None, [])
        if text:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        reason = "tool_calls" if calls else answer.finish_reason
        return _delta(delta, reason, self._logprobs(answer.tokens))

    def _parts(self, answer: Answer) -> tuple[str | None, list[dict[str, Any]]]:
        """Text and tool calls of an answer; invalid calls stay in the text."""
        if not self.asked.tools:
            return answer.text, []
        found = self.served.call_form.read(answer.text, self.asked.tools)
        kept, at = "", 0
        for call in found:
            kept += answer.text[at : max(at, call.start)]
            at = call.end
        text = kept + answer.text[at:]
        return (text.strip() or None, list(map(_call, found))) if found else (text, [])

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self.asked.likelihoods is None:
            return None
        content = [
            {
                **self._likely(token.id, token.logprob),
                "top_logprobs": [self._likely(*pair) for pair in token.likeliest],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _likely(self, id: int, logprob: float) -> dict[str, Any]:
        word = self._word(id)
        return {"token": word, "logprob": logprob, "bytes": list(word.encode())}


def _delta(delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> Any:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _call(call: WrittenCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}


class Completion(Body):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, served: Served, asked: TextRequest) -> None:
        super().__init__(served)
        self.asked: TextRequest = asked

    def _choice(self, answer: Answer) -> dict[str, Any]:
        return {**self._last(answer), "text": answer.text}

    def _part(self, text: str) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": None}

    def _last(self, answer: Answer) -> dict[str, Any]:
        logprobs = self._logprobs(answer.tokens)
        return {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": answer.finish_reason}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self.asked.likelihoods is None:
            return None
        words = [self._word(token.id) for token in tokens]
        return {
            "tokens": words,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {self._word(id): logprob for id, logprob in token.likeliest} for token in tokens
            ],
            "text_offset": [sum(map(len, words[:place])) for place in range(len(words))],
        }


def _usage(answer: Answer) -> dict[str, int]:
    asked, new = len(answer.prompt_ids), answer.new_tokens
    return {"prompt_tokens": asked, "completion_tokens": new, "total_tokens": asked + new}
