"""Parse tool calls in the form that a chat template writes, detected by rendering known calls.

Three kinds of forms are supported: JSON objects with the name and the arguments (Hermes, Qwen,
Llama 3, Mistral), a name before JSON arguments (DeepSeek, newer Mistral, gpt-oss), and a name with
each argument in tags (Qwen3-Coder, GLM).
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from finetune.data.chat.render import Chat
from finetune.data.samples import Conversation
from finetune.errors import FinetuneError

NAMES = "find_alpha", "find_omega"
KEYS = "city_key", "colour_key"
VALUES = "Lisbonne", "Turquoise"
QUESTION = {"role": "user", "content": "What is there?"}
BLANK = " \n\t"


@dataclasses.dataclass(frozen=True)
class WrittenCall:
    """A tool call in a text."""

    name: str
    arguments: Any
    """Parsed JSON; an object, unless the model deviates from its format."""
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class CallForm:
    """The texts around the parts of a call; white space around them is ignored."""

    before: str
    """Text before the JSON object or the name."""
    after_name: str | None = None
    """Text between the name and the arguments; None if the name is inside the JSON object."""
    around_key: tuple[str, str] | None = None
    """Texts before and after an argument's name; None if the arguments are a JSON object."""
    after_value: str = ""
    after: str = ""
    """Text after the arguments."""

    def read(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[WrittenCall]:
        """Parse the calls of a text, in order.

        If the form has no text before a call, only calls of the `tools` count, at the start of the
        text or directly after another call.
        """
        schemas = {
            str(each["function"]["name"]): each["function"]
            for each in tools
            if isinstance(each.get("function"), Mapping) and "name" in each["function"]
        }
        found, at = list[WrittenCall](), 0
        marked = bool(self.before.strip())
        while (start := _find(text, self.before, at)) is not None:
            calls = list(self._at(text, *start, schemas))
            if not marked and any(call.name not in schemas for call in calls):
                calls = []
            if not marked and not calls:
                break
            found += calls
            at = calls[-1].end if calls else start[1]
            if not marked and at < len(text) and text[at] in ";,":
                at += 1
        return found

    def _at(
        self, text: str, start: int, at: int, schemas: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[WrittenCall]:
        """Yield the calls whose text `before` is from `start` to `at`."""
        if self.after_name is None:
            value, end = _json(text, at)
            end = _skip(text, self.after, end)
            for call in value if isinstance(value, list) else [value]:
                function = call.get("function", call) if isinstance(call, dict) else None
                if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                    continue
                arguments = function.get("arguments", function.get("parameters", {}))
                if isinstance(arguments, str):
                    arguments, _ = _json(arguments, 0)
                yield WrittenCall(function["name"], arguments, start, end)
            return
        name = re.compile(r"\s*([\w.\-]+)").match(text, at)
        if name is None:
            return
        opened = _match_piece(text, self.after_name, name.end())
        if opened is None:
            return
        if self.around_key is None:
            arguments, end = _json(text, opened)
            if not isinstance(arguments, dict):
                return
        else:
            arguments, end = self._tagged(text, opened, schemas.get(name[1], {}))
            if self.after.strip() and _match_piece(text, self.after, end) is None:
                return  # truncated
        yield WrittenCall(name[1], arguments, start, _skip(text, self.after, end))

    def _tagged(self, text: str, at: int, schema: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Parse tagged arguments, and return their end.

        A value is text if the schema says so or if it is not valid JSON.
        """
        assert self.around_key is not None
        opening, closing = self.around_key
        parameters = schema.get("parameters")
        kinds = parameters.get("properties", {}) if isinstance(parameters, Mapping) else {}
        arguments = dict[str, Any]()
        while (key_at := _match_piece(text, opening, at)) is not None:
            key_end = text.find(closing.strip(BLANK), key_at)
            value_at = _match_piece(text, closing, key_end) if key_end >= 0 else None
            if value_at is None:
                break
            end = text.find(self.after_value.strip(BLANK), value_at)
            if end < 0:
                break
            key = text[key_at:key_end].strip(BLANK)
            # If the template writes a line break on a side, it is not part of the value.
            raw = text[value_at:end]
            if closing.endswith("\n"):
                raw = raw.removeprefix("\n")
            if self.after_value.startswith("\n"):
                raw = raw.removesuffix("\n")
            kind = kinds.get(key) if isinstance(kinds, Mapping) else None
            is_text = isinstance(kind, Mapping) and kind.get("type") == "string"
            value, value_end = (raw, len(raw)) if is_text else _json(raw, 0)
            arguments[key] = value if value is not NOTHING and value_end == len(raw) else raw
            at = end + len(self.after_value.strip(BLANK))
        return arguments, at


HERMES = CallForm(before="<tool_call>", after="</tool_call>")
"""The form for templates that write no calls."""
NOTHING = object()


def call_form(chat: Chat) -> CallForm | None:
    """The form in which a template writes calls; None if it refuses them or leaves them out."""
    if chat.template is None:
        return None
    one = _written(chat, 1)
    two = _written(chat, 2)
    if one is None or NAMES[0] not in one:
        return None
    between = None
    if two is not None and NAMES[1] in two:
        between = two
    return _form(one, between)


def _written(chat: Chat, count: int) -> str | None:
    """The text that a model is trained to write for `count` known calls, without special tokens."""
    tools, calls = list[dict[str, Any]](), list[dict[str, Any]]()
    for number, name in enumerate(NAMES[:count]):
        kinds = {key: {"type": "string", "description": key} for key in KEYS}
        schema = {"type": "object", "properties": kinds, "required": list(KEYS)}
        function = {"name": name, "description": name, "parameters": schema}
        tools.append({"type": "function", "function": function})
        call = {"name": name, "arguments": dict(zip(KEYS, VALUES, strict=True))}
        calls.append({"id": f"call0000{number}", "type": "function", "function": call})
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        row = chat.render(Conversation((QUESTION, answer), tuple(tools)), "completion")
    except FinetuneError:
        return None
    ids = [id for id, is_said in zip(row.ids, row.trained, strict=True) if is_said]
    return str(chat.tokenizer.decode(ids, skip_special_tokens=True))


def _form(one: str, two: str | None) -> CallForm | None:
    """Detect the form from a text with one call and, if available, a text with two calls."""
    parts = _parts(one, 0, NAMES[0])
    if parts is None:
        return None
    start, form, end = parts
    before, after = one[:start], one[end:]
    following = _parts(two, _parts_end(two), NAMES[1]) if two is not None else None
    if two is not None and following is not None:
        between = two[_parts_end(two) : following[0]]
        if NAMES[1] not in between and between:
            before = os.path.commonprefix([before[::-1], between[::-1]])[::-1]  # noqa: RUF071
            after = os.path.commonprefix([after, between])  # noqa: RUF071
    else:
        before = before.rsplit("\n\n", 1)[-1]  # without an empty block of thought
    return dataclasses.replace(form, before=before, after=after)


def _parts_end(text: str | None) -> int:
    found = _parts(text, 0, NAMES[0]) if text is not None else None
    return found[2] if found is not None else 0


def _parts(text: str | None, at: int, name: str) -> tuple[int, CallForm, int] | None:
    """Start of the known call in a text, its form without the texts around it, and its end."""
    if text is None or (place := text.find(name, at)) < 0:
        return None
    for opening in re.compile(r"[\[{]").finditer(text, at):
        value, end = _json(text, opening.start())
        if value is NOTHING:
            continue
        if opening.start() < place and name in json.dumps(value):
            return opening.start(), CallForm(""), end
        if value == dict(zip(KEYS, VALUES, strict=True)):
            middle = text[place + len(name) : opening.start()]
            return place, CallForm("", after_name=middle), end
    places, at = list[int](), place + len(name)
    for part in (KEYS[0], VALUES[0], KEYS[1], VALUES[1]):
        at = text.find(part, at)
        if at < 0:
            return None
        places.append(at)
        at += len(part)
    head = text[place + len(name) : places[0]]
    closing = text[places[0] + len(KEYS[0]) : places[1]]
    step = text[places[1] + len(VALUES[0]) : places[2]]
    opening = os.path.commonprefix([head[::-1], step[::-1]])[::-1]  # noqa: RUF071
    tail, after_value = text[at:], step.removesuffix(opening)
    if not (opening.strip() and closing.strip() and after_value.strip()):
        return None
    form = CallForm("", head.removesuffix(opening), (opening, closing), after_value=after_value)
    ended = at + len(after_value) if tail.startswith(after_value) else at
    return place, form, ended


def _find(text: str, piece: str, at: int) -> tuple[int, int] | None:
    """Start and end of a piece's next occurrence; for a blank piece, of the next non-blank text."""
    core = piece.strip(BLANK)
    start = text.find(core, at)
    if not core:
        start = len(text) - len(text[at:].lstrip(BLANK))
        return (start, start) if start < len(text) else None
    return None if start < 0 else (start, start + len(core))


def _match_piece(text: str, piece: str, at: int) -> int | None:
    """The end of a piece that is next in the text, after white space; None if it is not next."""
    core = piece.strip(BLANK)
    start = len(text) - len(text[at:].lstrip(BLANK)) if core else at
    return start + len(core) if text.startswith(core, start) else None


def _skip(text: str, piece: str, at: int) -> int:
    end = _match_piece(text, piece, at) if piece.strip(BLANK) else None
    return at if end is None else end


def _json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a position, after white space, and its end; `NOTHING` if there is none."""
    start = len(text) - len(text[at:].lstrip(BLANK))
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return NOTHING, at
