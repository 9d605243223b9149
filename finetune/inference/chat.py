"""Chat with a model in a terminal, with streamed answers."""

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
    """Streams the text of an answer, without its stop token and without incomplete characters."""

    def __init__(self, loaded: Loaded, prompt: list[int], write: Callable[[str], None]) -> None:
        self.loaded, self.write = loaded, write
        self.text = ""
        self._before, self._open = prompt[-CONTEXT:], list[int]()
        """Tokens whose text was written last, and those whose text was not."""

    def append(self, ids: list[int]) -> None:
        """Append tokens, without stop tokens."""
        self._open += ids
        text = new_text(self.loaded.tokenizer, self._before, self._open)
        if text and not text.endswith("\ufffd"):  # a character of several tokens
            self._write(text)
            self._before, self._open = self._open, []

    def end(self) -> None:
        self._write(new_text(self.loaded.tokenizer, self._before, self._open))

    def _write(self, text: str) -> None:
        self.text += text
        self.write(text)


CONTEXT = 64
"""Tokens of a prompt with which the first ones of an answer are decoded."""


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
