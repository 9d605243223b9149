"""End turns with the mark of the next role where that is an end token of the model, as in GLM.

After an answer such a template writes nothing but `<|user|>`, the beginning of the next question,
and the model learned to stop there. The last turn of a row gets the mark that would follow it.
"""

import contextlib
import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.chat.template_spans import Span
from finetune.data.chat.turns import PROBE, QUESTION, Rendered, Turns
from finetune.errors import FinetuneError
from finetune.runs.run import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RESULT = {"role": "tool", "content": PROBE, "name": PROBE, "tool_call_id": "call00000"}


@functools.lru_cache
def own_ends(tokenizer: "PreTrainedTokenizerFast") -> tuple[str, ...]:
    """Added tokens that end an answer of the model in the tokenizer's folder, if it has several."""
    from transformers.utils.hub import cached_file

    found: list[Any] = [tokenizer.eos_token_id]
    for name in ("config.json", "generation_config.json"):
        with contextlib.suppress(OSError):  # there is no such file
            path = Path(str(cached_file(tokenizer.name_or_path, name, local_files_only=True)))
            given = read_object(path).get("eos_token_id")
            found += given if isinstance(given, list) else [given]
    added = tokenizer.added_tokens_decoder.items()
    ends = tuple(token.content for id, token in added if id in found)
    return ends if ends[1:] else ()


def with_last_end(turns: Turns, rendered: Rendered) -> Rendered:
    """The conversation with the mark behind its last turn, if it ends a turn of this template."""
    messages, ends = rendered.sample.messages, own_ends(turns.tokenizer)
    text, last = rendered.marked.text, messages[-1]
    if not ends or last["role"] != "assistant" or text.rstrip().endswith(ends):
        return rendered
    further = (*messages, RESULT if "tool_calls" in last else QUESTION)
    behind = ""
    with contextlib.suppress(FinetuneError):
        marked = turns.mark(replace(rendered.sample, messages=further))
        behind = marked.written(len(messages)).lstrip()
    mark = next(filter(behind.startswith, ends), "")
    return replace(rendered, marked=replace(rendered.marked, text=text + mark))


def ended_spans(turns: Turns, rendered: Rendered, number: int) -> list[Span]:
    """`Turns.spans`, the last one with the mark behind it if that ends the turn."""
    *others, (start, end) = turns.spans(rendered, number)
    text, ends = rendered.marked.text, own_ends(turns.tokenizer)
    behind = text[end:].lstrip()
    mark = next(filter(behind.startswith, ends), "")
    if not text.endswith(ends, start, end):
        end = len(text) - len(behind) + len(mark) if mark else end
    return [*others, (start, end)]
