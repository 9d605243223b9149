"""Chat with a model in a terminal, with streamed answers."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from finetune.data.images.image_file import ImageFile
from finetune.data.images.image_file import decode as decode_image
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError
from finetune.inference.decoder import decode
from finetune.inference.generate import (
    Conversation,
    Loaded,
    Message,
    new_text,
    pad_of,
    prompt_of,
    random_key,
    row_of,
)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class TextStream:
    """Streams the text of an answer, without its stop token and without incomplete characters.

    If the decoder may still change the end of the text, for example because it joins words, the
    text of a token is written with the next token. Single-byte tokens are written when all of them
    have arrived, because an invalid byte changes how the bytes before it are decoded.
    """

    def __init__(self, loaded: Loaded, prompt: list[int], write: Callable[[str], None]) -> None:
        self.loaded, self.write = loaded, write
        self.text = ""
        self._appends = only_appends(loaded.tokenizer)
        self._before = _tail(loaded.tokenizer, prompt) if self._appends else prompt
        """Tokens with text that precede the tokens in `_open`."""
        self._unsettled = unsettled_ids(loaded.tokenizer) if self._appends else frozenset[int]()
        self._open: list[int] = []
        self._settled = self._decoded = ""

    def append(self, ids: list[int]) -> None:
        """Append tokens, without stop tokens."""
        self._open += ids
        text = new_text(self.loaded.tokenizer, self._before, self._open)
        if not self._appends:
            same = os.path.commonprefix([self._decoded, text])  # noqa: RUF071, of characters
            self._show(same.rstrip("\ufffd"))
        elif self._open and self._open[-1] in self._unsettled:
            pass
        elif text.strip() and not text.endswith("\ufffd"):
            self._settled += text
            self._before, self._open = self._open, []
            self._show(self._settled)
        else:
            self._show(self._settled + text.rstrip("\ufffd"))
        self._decoded = text

    def end(self) -> None:
        self._show(self._settled + new_text(self.loaded.tokenizer, self._before, self._open))

    def _show(self, text: str) -> None:
        if len(text) > len(self.text):
            self.write(text[len(self.text) :])
            self.text = text


APPENDING = {"ByteLevel", "Metaspace", "ByteFallback", "Fuse"}
"""Decoders of `tokenizers` that do not change the text of earlier tokens, except invalid bytes."""


def only_appends(tokenizer: Any) -> bool:
    """Whether a new token never changes the decoded text before it, except incomplete characters.

    False if unknown: for a decoder in Python, or one that joins words or removes spaces.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None or tokenizer.clean_up_tokenization_spaces:
        return False
    return all(map(_only_appends, _decoders(backend)))


def _decoders(backend: Any) -> list[dict[str, Any]]:
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _only_appends(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "  ")) == 1
    if step["type"] == "Strip":
        return step["stop"] == 0
    return step["type"] in APPENDING


def unsettled_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens after which the preceding text may still change, for a decoder that joins bytes.

    These are single-byte tokens, and special tokens, which are skipped between two bytes.
    """
    if all(step["type"] != "ByteFallback" for step in _decoders(tokenizer.backend_tokenizer)):
        return frozenset()
    known = tokenizer.get_vocab()
    found = {known[word] for byte in range(256) if (word := f"<0x{byte:02X}>") in known}
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(found | {id for id, token in added if token.special})


def _tail(tokenizer: Any, prompt: list[int]) -> list[int]:
    """The last tokens of a prompt, enough to contain text that is not blank."""
    length = 8
    while length < len(prompt):
        tail = prompt[-length:]
        if str(tokenizer.decode(tail, skip_special_tokens=True)).strip(" \n\ufffd"):
            return tail
        length *= 2
    return prompt


def stream(
    loaded: Loaded,
    asked: str | Conversation,
    write: Callable[[str], None] = _write,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
) -> str:
    """Answer one prompt, streaming the text; returns the complete text."""
    prompt = prompt_of(loaded, asked)
    ids, row = prompt.ids, row_of(loaded, prompt, max_new_tokens, temperature)
    if row.limit < 1:
        raise FinetuneError(f"{len(ids)} tokens leave no room in a context of {loaded.context}")
    streamed, given = TextStream(loaded, ids, write), 0

    def report(ended: int) -> None:
        nonlocal given
        streamed.append(row.text_ids[given:])
        given = len(row.text_ids)

    with torch.inference_mode():
        decode(
            loaded.model, [row], pad_of(loaded), 1, random_key(), inputs=loaded.images,
            report=report,
        )  # fmt: skip
    streamed.end()
    return streamed.text


def answer(
    loaded: Loaded, prompt: str, max_new_tokens: int = 512, images: Sequence[str] = ()
) -> str:
    """Answer one user message, streaming the text; returns the complete text.

    A model without a chat template continues the prompt. `images` are files before the text.
    """
    message = [{"role": "user", "content": _content(prompt, images)}]
    asked = prompt if loaded.tokenizer.chat_template is None else message
    text = stream(loaded, asked, max_new_tokens=max_new_tokens)
    _write("\n")
    return text


def _content(text: str, images: Sequence[str]) -> Any:
    """The content of a message: a text, or images in front of it."""
    parts = [{"type": "image", "path": path} for path in images]
    return [*parts, {"type": "text", "text": text}] if images else text


def chat(
    loaded: Loaded,
    read: Callable[[str], str] = input,
    write: Callable[[str], None] = _write,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    typed: bool = True,
) -> None:
    """Chat until /exit, Ctrl-D or Ctrl-C; /reset clears the conversation.

    `/image FILE` puts an image before the text of the next message.

    A model without a chat template continues each line separately. If lines are not `typed` but
    come from a file or a pipe, only the answers are written, without introduction and prompt.
    """
    history, images = list[Message](), list[str]()
    if typed:
        sees = "/image FILE shows it with the next message, " if loaded.images is not None else ""
        write(f"{sees}/reset clears the conversation, /exit ends it\n")
    while True:
        try:
            line = read("> " if typed else "").strip()
            if line == "/exit":
                return
            if line == "/reset":
                history, images = [], []
            elif line.startswith("/image "):
                images += _checked(loaded, line.removeprefix("/image ").strip(), write)
            elif line:
                content, images = _content(line, images), []
                history = _exchange(loaded, history, content, write, max_new_tokens, temperature)
        except (EOFError, KeyboardInterrupt):
            write("\n" if typed else "")
            return


def _checked(loaded: Loaded, path: str, write: Callable[[str], None]) -> list[str]:
    """The path of an image that can be shown, or nothing if it cannot; then it is written why."""
    try:
        if loaded.images is None:
            raise RowProblem("this model reads text only")
        decode_image(ImageFile(path).read(), f"image '{path}'")
    except (RowProblem, FinetuneError) as problem:
        write(f"{problem}\n")
        return []
    return [path]


def _exchange(
    loaded: Loaded,
    history: list[Message],
    line: Any,
    write: Callable[[str], None],
    max_new_tokens: int,
    temperature: float,
) -> list[Message]:
    """Answer one question; returns the new history."""
    templated = loaded.tokenizer.chat_template is not None
    asked = [*history, {"role": "user", "content": line}]
    try:
        answer = stream(loaded, asked if templated else line, write, max_new_tokens, temperature)
    except FinetuneError as error:
        write(f"{error}; /reset starts over\n")
        return history
    write("\n")
    return [*asked, {"role": "assistant", "content": answer}]
