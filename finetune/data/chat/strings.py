"""Find strings of a message or a tool that are missing in a rendered chat.

One rule: every string of a message occurs once in the text that the template wrote for it. White
space is ignored, since templates trim and indent, and so is escaping for JSON or HTML.
"""

import html
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import markupsafe

from finetune.data.images.image_file import PLACE

THOUGHT = re.compile(
    r"</?(?:think|thinking|thought|reasoning|seed:think)>|\[/?THINK\]|<\|(?:begin|end)_of_thought\|>"
    r"|◁/?think▷|<\|channel>thought|<channel\|>"
)
"""Marks that delimit thoughts inside a message's content."""
CUT = "\0"
SCHEMAS = ("parameters", "input_schema", "inputSchema")
"""Keys of a tool's parameters: those of OpenAI, Anthropic and MCP."""
SENTENCE_ENDS = ".!?\u3002\uff01\uff1f"
THOUGHTS = "the thoughts of message {}"
BESIDE_CALLS = "the text of message {} next to its tool calls"


def text_name(message: Mapping[str, Any]) -> str:
    """How errors call the content of a message; `{}` stands for the message's number."""
    return BESIDE_CALLS if "tool_calls" in message else "message {}"


def lost(message: Mapping[str, Any], text: str) -> list[str]:
    """Names of the strings of a message that a text does not contain."""
    content = message["content"]
    plain = message.keys().isdisjoint(("tool_calls", "images"))
    plain = plain and not message.get("reasoning_content")
    if plain and content.strip() in text:
        return []
    *_, (_, answer) = _pieces(content)
    # A mark in prose delimits no thought: a template that divides the answer there moves text.
    if THOUGHT.search(answer) and answer.strip() not in text and "images" not in message:
        return [text_name(message)]
    remaining, missing = _squeezed(text), dict[str, None]()
    strings = [(name, _forms(value)) for name, value in _strings(message)]
    # The longest first, so that a word of an argument does not match inside a longer answer; and
    # each is cut out, so that a word of a tool call does not count as the answer next to it.
    for name, forms in sorted(strings, key=lambda each: -len(each[1][0])):
        form = next((form for form in forms if form in remaining), None)
        if form is None:
            missing[name] = None
        else:
            remaining = remaining.replace(form, CUT, 1)
    return list(missing)


def lost_of_tool(tool: Mapping[str, Any], text: str) -> tuple[list[str], bool]:
    """Names of a tool's strings that a text lacks, and whether it lacks details of parameters.

    The former are its name, or its description and the parameters; details are descriptions,
    values and nested names.
    """
    function, squeezed = tool["function"], _squeezed(text)

    def is_there(value: str) -> bool:
        return any(form in squeezed for form in _forms(value))

    name, description = function.get("name", ""), function.get("description")
    if not is_there(name):
        return [name], False
    schema = next((function[key] for key in SCHEMAS if function.get(key)), None)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    wanted = [(str(each), f"the parameter {each} of {name}") for each in properties or ()]
    if isinstance(description, str):
        wanted.insert(0, (description, f"the description of {name}"))
    missing = [what for value, what in wanted if not is_there(value)]
    return missing, not all(map(is_there, set(_details(schema))))


def _details(schema: Any) -> Iterator[str]:
    """Yield the texts of a JSON schema, at any depth: names, descriptions, values, patterns."""
    if isinstance(schema, list):
        for each in schema:
            yield from _details(each)
    for key, value in schema.items() if isinstance(schema, Mapping) else ():
        if key == "properties" and isinstance(value, Mapping):
            yield from value
            yield from _details(list(value.values()))
        elif key in ("enum", "const", "default", "examples", "description", "pattern"):
            values = value if isinstance(value, list) else [value]
            yield from (each for each in values if isinstance(each, str))
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


def _pieces(content: str) -> Iterator[tuple[bool, str]]:
    """Yield the thoughts that a content begins with, as (True, thought), then (False, answer).

    A thought whose opening mark is part of the generation prompt ends with the first closing mark,
    at the end of a line or a sentence, or without white space around it.
    """
    mark = THOUGHT.search(content)
    if mark and _closes(mark[0]) and not _is_inside_a_sentence(content, *mark.span()):
        yield True, content[: mark.start()]
        content = content[mark.end() :]
    thought, answer = divided(content)
    while answer != content:
        yield True, thought
        content = answer
        thought, answer = divided(content)
    yield False, content


def _closes(mark: str) -> bool:
    return "/" in mark or "end_" in mark or mark == "<channel|>"


def _is_inside_a_sentence(text: str, start: int, end: int) -> bool:
    before, after = text[:start].rpartition("\n")[2], text[end:].partition("\n")[0]
    if not before.strip() or not after.strip():
        return False
    touches = before[-1].isalnum() and after[0].isalnum()
    return not touches and before.rstrip()[-1] not in SENTENCE_ENDS


def _strings(message: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the strings of a message, and the other scalars of its arguments, with their names."""
    for is_thought, piece in _pieces(message["content"]):
        for text in piece.split(PLACE) if "images" in message else [piece]:
            yield THOUGHTS if is_thought else text_name(message), text
    thoughts = message.get("reasoning_content")
    if isinstance(thoughts, str):
        yield f"{THOUGHTS} (reasoning_content)", thoughts
    for call in message.get("tool_calls", ()):
        yield "the tool calls of message {}", call["function"]["name"]
        for leaf in _leaves(call["function"]["arguments"]):
            yield "arguments of the tool calls of message {}", leaf


def _leaves(value: Any) -> Iterator[Any]:
    match value:
        case Mapping():
            for key, each in value.items():
                yield str(key)
                yield from _leaves(each)
        case list() | tuple():
            for each in value:
                yield from _leaves(each)
        case _:
            yield value


def _forms(value: Any) -> tuple[str, ...]:
    """Forms in which templates write a value: as it is, escaped for JSON, escaped for HTML."""
    if not isinstance(value, str):
        return json.dumps(value), str(value)
    forms = [value]
    if not value.isascii() or any(each in value for each in "\"\\\n\r\t\b\f&<>'"):
        text = value.strip()
        forms += [json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]]
        forms += [html.escape(text), html.escape(text, quote=False), str(markupsafe.escape(text))]
        forms.append(repr(text)[1:-1])
    return tuple(dict.fromkeys(map(_squeezed, forms)))


def _squeezed(text: str) -> str:
    return "".join(text.split())
