"""Find parts of a message or a tool that are missing in a rendered chat.

White space is ignored, since templates trim and indent, and so is escaping for JSON or HTML. Each
part of the text matches only once, so a word of a tool call does not count as the answer next to
it.
"""

import heapq
import html
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import markupsafe

THOUGHT = re.compile(
    r"</?(?:think|thinking|thought|reasoning|seed:think)>|\[/?THINK\]|<\|(?:begin|end)_of_thought\|>"
    r"|◁/?think▷|<\|channel>thought|<channel\|>"
)
"""Marks that delimit thoughts inside a message's content."""
CUT = "\0"
HINTS = ("think", "THINK", "thought", "reasoning", "channel|>")
"""Texts of which every mark of `THOUGHT` contains one."""
SCHEMAS = ("parameters", "input_schema", "inputSchema")
"""Keys of a tool's parameters: those of OpenAI, Anthropic and MCP."""
SENTENCE_ENDS = ".!?\u3002\uff01\uff1f"
SHORT = 12
"""Maximum length, in characters, of a text that may occur in a chat by chance."""
BESIDE_CALLS = "the text of message {} next to its tool calls"


@dataclass(frozen=True)
class Part:
    """A part of a message that must be in the rendered chat."""

    name: str
    """Description for errors; `{}` stands for the message's number."""
    forms: tuple[str, ...]
    """Alternative texts, without white space."""
    pieces: tuple["Part", ...] = ()
    """Parts that are accepted together if none of the forms is found."""


def lost(message: Mapping[str, Any], text: str) -> list[str]:
    """Names of the parts of a message that a text does not contain."""
    plain = "tool_calls" not in message and not message.get("reasoning_content")
    if plain and message["content"].strip() in text:
        return []
    remaining = _squeezed(text)
    missing = list[str]()
    # The longest first, so that a word of an argument does not match inside a longer answer.
    waiting = [(-len(part.forms[0]), n, part) for n, part in enumerate(_parts(message))]
    heapq.heapify(waiting)
    numbers = itertools.count(len(waiting))
    while waiting:
        part = heapq.heappop(waiting)[-1]
        place, form = _find(part, remaining)
        if place >= 0:
            remaining = remaining[:place] + CUT + remaining[place + len(form) :]
        elif part.pieces:
            for piece in part.pieces:
                heapq.heappush(waiting, (-len(piece.forms[0]), next(numbers), piece))
        else:
            missing.append(part.name)
    return list(dict.fromkeys(missing))


def lost_of_tool(tool: Mapping[str, Any], text: str) -> list[str]:
    """Parts of a tool's schema missing in a text: its name, or its description and parameters."""
    function = tool["function"]
    squeezed = _squeezed(text)
    name = function.get("name", "")
    parameters = next((function[key] for key in SCHEMAS if function.get(key)), None)
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not any(form in squeezed for form in _forms(name)):
        return [name]
    wanted = list[tuple[str, tuple[str, ...]]]()
    description = function.get("description")
    if isinstance(description, str):
        wanted.append((f"the description of {name}", _forms(description)))
    if isinstance(properties, Mapping):
        wanted += [(f"the parameter {each} of {name}", _forms(str(each))) for each in properties]
    return [what for what, forms in wanted if not any(form in squeezed for form in forms)]


def leaves_out_details(tool: Mapping[str, Any], text: str) -> bool:
    """Whether a text lacks descriptions, values or nested names of a tool's parameters."""
    squeezed, function = _squeezed(text), tool["function"]
    given = (_details(function[key]) for key in SCHEMAS if function.get(key))
    details = {each for schema in given for each in schema}
    return any(not any(form in squeezed for form in _forms(each)) for each in details)


def _details(schema: Any) -> Iterator[str]:
    """Yield the texts of a JSON schema, at any depth: names, descriptions, values, patterns."""
    if isinstance(schema, list):
        for each in schema:
            yield from _details(each)
    for key, value in schema.items() if isinstance(schema, Mapping) else ():
        if key == "properties" and isinstance(value, Mapping):
            yield from value
            for each in value.values():
                yield from _details(each)
        elif key in ("enum", "const", "default", "examples"):
            given = value if isinstance(value, list) else [value]
            yield from (each for each in given if isinstance(each, str))
        elif key in ("description", "pattern") and isinstance(value, str):
            yield value
        else:
            yield from _details(value)


def has_thought(message: Mapping[str, Any]) -> bool:
    """Whether a message has thoughts, in `reasoning_content` or inside its content."""
    return bool(message.get("reasoning_content")) or bool(THOUGHT.search(message["content"]))


def divided(content: str) -> tuple[str, str]:
    """The thought that a content begins with, which may be empty, and the text behind it."""
    marks, texts = THOUGHT.findall(content)[:2], THOUGHT.split(content, 2)
    begins = not texts[0].strip() and [_closes(mark) for mark in marks] == [False, True]
    return (texts[1].strip(), texts[2].lstrip()) if begins else ("", content)


def stray_marks(content: str) -> list[tuple[int, int]]:
    """Spans of the marks in a content that delimit no thought, but are part of its prose.

    A mark that opens a thought needs one that closes it, and the other way round. A thought whose
    opening is part of the generation prompt ends with the first closing mark, at the end of a line
    or a sentence, or without white space around it.
    """
    if not any(hint in content for hint in HINTS):
        return []
    stray, opened, closed = list[tuple[int, int]](), list[tuple[int, int]](), False
    for mark in THOUGHT.finditer(content):
        if not _closes(mark[0]):
            stray += opened
            opened = [mark.span()]
        elif opened or (not closed and not _is_inside_a_sentence(content, *mark.span())):
            opened, closed = [], True
        else:
            stray.append(mark.span())
    return stray + opened


def _closes(mark: str) -> bool:
    return "/" in mark or "end_" in mark or mark == "<channel|>"


def _is_inside_a_sentence(text: str, start: int, end: int) -> bool:
    before, after = text[:start].rpartition("\n")[2], text[end:].partition("\n")[0]
    if not before.strip() or not after.strip():
        return False
    touches = before[-1].isalnum() and after[0].isalnum()
    return not touches and before.rstrip()[-1] not in SENTENCE_ENDS


def _find(part: Part, text: str) -> tuple[int, str]:
    """Position of the first form of a part that is in a text, or -1, and the form."""
    for form in part.forms:
        if (place := text.find(form)) >= 0:
            return place, form
    return -1, ""


def _parts(message: Mapping[str, Any]) -> Iterator[Part]:
    calls = message.get("tool_calls", ())
    content = message["content"]
    what = BESIDE_CALLS if calls else "message {}"
    pieces = tuple(_pieces(content, what)) if THOUGHT.search(content) else ()
    yield Part(what, _forms(content), pieces)
    thoughts = message.get("reasoning_content")
    if isinstance(thoughts, str):
        yield Part("the thoughts of message {} (reasoning_content)", _forms(thoughts))
    for call in calls:
        function = call["function"]
        yield Part("the tool calls of message {}", _forms(function["name"]))
        arguments = function["arguments"]
        if arguments:
            name = "arguments of the tool calls of message {}"
            yield Part(name, _json_forms(arguments), tuple(_leaves(arguments, name)))


def _pieces(content: str, what: str) -> Iterator[Part]:
    """Yield the thoughts in a content and the texts around them."""
    last, opened = 0, False
    for mark in THOUGHT.finditer(content):
        closes = _closes(mark[0])
        # Text before a closing mark is a thought, with or without an opening mark.
        name = "the thoughts of message {}" if closes else what
        yield Part(name, _forms(content[last : mark.start()]))
        last, opened = mark.end(), not closes
    yield Part("the thoughts of message {}" if opened else what, _forms(content[last:]))


def _leaves(value: Any, name: str) -> Iterator[Part]:
    match value:
        case Mapping():
            for key, each in value.items():
                yield Part(name, _forms(str(key)))
                yield from _leaves(each, name)
        case list() | tuple():
            for each in value:
                yield from _leaves(each, name)
        case str():
            yield Part(name, _forms(value))
        case _:
            yield Part(name, (*_json_forms(value), str(value)))


def _json_forms(value: Any) -> tuple[str, ...]:
    written = value if isinstance(value, str) else None
    texts = [written] if written is not None else []
    if written is None:
        texts += [json.dumps(value, ensure_ascii=ascii_only) for ascii_only in (False, True)]
    return tuple(dict.fromkeys(_squeezed(text) for text in texts))


def _forms(text: str) -> tuple[str, ...]:
    """Forms in which templates write a text: unchanged, escaped for JSON, escaped for HTML."""
    plain = _squeezed(text)
    forms = [plain]
    if not plain.isascii() or any(each in text for each in "\"\\\n\r\t\b\f&<>'"):
        text = text.strip()
        forms += [json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]]
        forms += [html.escape(text), html.escape(text, quote=False), str(markupsafe.escape(text))]
        forms.append(repr(text)[1:-1])
    return tuple(dict.fromkeys(map(_squeezed, forms)))


def _squeezed(text: str) -> str:
    return "".join(text.split())


def holds_some(content: str, text: str) -> bool:
    """Whether a text contains the beginning or the end of a content."""
    content = content.strip()
    return len(content) > SHORT and (content[:SHORT] in text or content[-SHORT:] in text)


def without_space(text: str, start: int, end: int) -> int:
    """The end of a span without trailing white space."""
    return start + len(text[start:end].rstrip())


def excerpt(text: str) -> str:
    """The repr of a text, shortened in the middle to 160 characters for error messages."""
    shown = repr(text)
    return shown if len(shown) <= 160 else f"{shown[:80]} ... {shown[-80:]}"
