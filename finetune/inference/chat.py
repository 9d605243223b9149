"""Talk to a model in a terminal, its answers appearing while they grow."""

import os
import sys
from collections.abc import Callable

import torch
from transformers.generation.streamers import BaseStreamer

from finetune.errors import FinetuneError
from finetune.inference.generate import (
    Conversation,
    Loaded,
    Message,
    continue_rows,
    new_text,
    prompt_ids,
    room_for,
)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class TextStream(BaseStreamer):
    """Writes an answer while it grows, without its stop token and without half a character.

    What a token adds is written with the token after it: a decoder may still change the end of a
    text, as one that joins words does.
    """

    def __init__(self, loaded: Loaded, prompt: list[int], write: Callable[[str], None]) -> None:
        self.loaded, self.prompt, self.write = loaded, prompt, write
        self.ids: list[int] | None = None
        self.text = self.decoded = ""

    def put(self, value: torch.Tensor) -> None:
        if self.ids is None:  # the first call brings the prompt
            self.ids = []
            return
        self.ids += [id for id in value.flatten().tolist() if id not in self.loaded.stops]
        text = new_text(self.loaded.tokenizer, self.prompt, self.ids)
        same = os.path.commonprefix([self.decoded, text])  # noqa: RUF071, of characters
        self._show(same.rstrip("\ufffd"))
        self.decoded = text

    def end(self) -> None:
        self._show(new_text(self.loaded.tokenizer, self.prompt, self.ids or []))

    def _show(self, text: str) -> None:
        if len(text) > len(self.text):
            self.write(text[len(self.text) :])
            self.text = text


def stream(
    loaded: Loaded,
    asked: str | Conversation,
    write: Callable[[str], None] = _write,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
) -> str:
    """Answer one prompt, writing the text token by token; returns all of it."""
    ids = prompt_ids(loaded, asked)
    room = room_for(loaded, len(ids), max_new_tokens)
    if room < 1:
        raise FinetuneError(f"{len(ids)} tokens leave no room in a context of {loaded.context}")
    streamer = TextStream(loaded, ids, write)
    continue_rows(loaded, [ids], room, temperature, 1.0, streamer)
    return streamer.text


def answer(loaded: Loaded, prompt: str, max_new_tokens: int = 512) -> str:
    """Answer one message of a user, writing the text while it grows; returns it.

    A model without a chat template continues the prompt.
    """
    message = [{"role": "user", "content": prompt}]
    asked = prompt if loaded.tokenizer.chat_template is None else message
    text = stream(loaded, asked, max_new_tokens=max_new_tokens)
    _write("\n")
    return text


def chat(
    loaded: Loaded,
    read: Callable[[str], str] = input,
    write: Callable[[str], None] = _write,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    typed: bool = True,
) -> None:
    """Talk until /exit, Ctrl-D or Ctrl-C; /reset forgets what was said.

    A model without a chat template continues each line by itself. Lines that are not `typed` but
    come from a file or a pipe get answers alone: no introduction, no prompt.
    """
    history: list[Message] = []
    if typed:
        write("/reset forgets the conversation, /exit ends it\n")
    while True:
        try:
            line = read("> " if typed else "").strip()
            if line == "/exit":
                return
            if line == "/reset":
                history = []
            elif line:
                history = _exchange(loaded, history, line, write, max_new_tokens, temperature)
        except (EOFError, KeyboardInterrupt):
            write("\n" if typed else "")
            return


def _exchange(
    loaded: Loaded,
    history: list[Message],
    line: str,
    write: Callable[[str], None],
    max_new_tokens: int,
    temperature: float,
) -> list[Message]:
    """One question and its answer: the history that follows from it."""
    templated = loaded.tokenizer.chat_template is not None
    asked = [*history, {"role": "user", "content": line}]
    try:
        answer = stream(loaded, asked if templated else line, write, max_new_tokens, temperature)
    except FinetuneError as error:
        write(f"{error}; /reset starts anew\n")
        return history
    write("\n")
    return [*asked, {"role": "assistant", "content": answer}]
