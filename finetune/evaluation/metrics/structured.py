"""Metrics for structured answers: JSON and tool calls."""

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from finetune.data.chat.tools import written_arguments
from finetune.errors import FinetuneError, reading
from finetune.evaluation.generations import Answer
from finetune.evaluation.measures import Measure, of_scores
from finetune.evaluation.metrics.metric import Metric, Row, Settings
from finetune.evaluation.metrics.words import first
from finetune.evaluation.questions import Asked
from finetune.version import install

FENCED = re.compile(r"^```(?:json)?\s*\n(.*?)\n?```$", re.DOTALL)
NOTHING = object()
"""Value of a text that is not JSON."""


def parsed(text: str) -> Any:
    """The JSON value of a text or of a Markdown code block; `NOTHING` if it is not JSON."""
    fenced = FENCED.match(text.strip())
    try:
        return json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return NOTHING


def fields_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All leaves of a JSON value with their paths; empty objects and lists are leaves."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from fields_of(inner, f"{path}.{name}")
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from fields_of(inner, f"{path}[{number}]")
    else:
        yield path, value


def _json(rows: Sequence[Row], settings: Settings) -> list[Measure]:
    """The share of answers that parse and follow the schema, and of correct reference fields."""
    valid, shares, right = list[bool](), list[float](), dict[str, list[bool]]()
    for asked, given in rows:
        predicted, wanted = parsed(first(given)), parsed(asked.expected)
        schema = schema_of(asked, settings)
        valid.append(predicted is not NOTHING and (schema is None or follows(predicted, schema)))
        got = dict(fields_of(predicted)) if predicted is not NOTHING else {}
        same = {path: path in got and same_value(got[path], v) for path, v in fields_of(wanted)}
        for path, equal in same.items():
            right.setdefault(path.removeprefix("."), []).append(equal)
        shares.append(sum(same.values()) / len(same))
    fields = {path: sum(each) / len(each) for path, each in right.items()}
    return [
        of_scores("json", valid, binary=True),
        of_scores("json_fields", shares, detail={"fields": fields}),
    ]


def same_value(one: Any, other: Any) -> bool:
    """Equality of JSON values; true does not equal 1."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def schema_of(asked: Asked, settings: Settings) -> Any:
    """The JSON schema in column `schema` of a row, or of `--schema`; None without a schema."""
    found = asked.row.get("schema") if isinstance(asked.row, Mapping) else None
    if found is None and settings.schema is not None:
        found = settings.schema.read_text(encoding="utf-8")
    return parsed(found) if isinstance(found, str) else found


def follows(value: Any, schema: Any) -> bool:
    """Whether a value follows a JSON schema.

    Raises:
        FinetuneError: the schema is not one, or `jsonschema` is not installed.
    """
    if importlib.util.find_spec("jsonschema") is None:
        raise FinetuneError(
            f"--metrics json: rows with a schema need 'jsonschema': {install('eval')}"
        )
    import jsonschema

    kind = jsonschema.validators.validator_for(schema)
    with reading("--metrics json: not a JSON schema"):
        kind.check_schema(schema)
    return bool(kind(schema).is_valid(value))


# Tool calls.


def calls_in(answer: Answer) -> list[tuple[str, Any]]:
    """Names and arguments of the tool calls of an answer.

    Calls are those that a server returned, otherwise every JSON object in the text with a name and
    arguments, regardless of the text that a template writes around it.
    """
    if answer.calls is not None:
        found = [call.get("function", call) for call in answer.calls]
    else:
        found = [call for value in _values(answer.text) for call in _called(value)]
    return [_call(each) for each in found if isinstance(each.get("name"), str)]


def _values(text: str) -> Iterator[Any]:
    """JSON objects and lists of a text, in order."""
    decoder, at = json.JSONDecoder(), 0
    while (start := re.compile(r"[\[{]").search(text, at)) is not None:
        try:
            value, at = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            at = start.end()
            continue
        yield value


def _called(value: Any) -> Iterator[dict[str, Any]]:
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict):
            inner = each.get("function")
            call = inner if isinstance(inner, dict) else each
            if "arguments" in call or "parameters" in call:
                yield call


def _call(function: Mapping[str, Any]) -> tuple[str, Any]:
    arguments = function.get("arguments", function.get("parameters"))
    return str(function["name"]), parsed(arguments) if isinstance(arguments, str) else arguments


def _reference(asked: Asked) -> list[tuple[str, Any]]:
    found = list[tuple[str, Any]]()
    for call in asked.calls:
        written = written_arguments(call["arguments"])
        found.append(
            (call["name"], dict(call["arguments"]) if written is None else parsed(written))
        )
    return found


def _tools(rows: Sequence[Row], settings: Settings) -> list[Measure]:
    """Compare function names and arguments with the reference.

    A row whose reference has no calls is right if the answer has none.
    """
    names, arguments = list[bool](), list[bool]()
    for asked, given in rows:
        predicted, wanted = calls_in(given[0]), _reference(asked)
        names.append([name for name, _ in predicted] == [name for name, _ in wanted])
        arguments.append(predicted == wanted)
    return [of_scores("tools", arguments, binary=True), of_scores("tool_names", names, binary=True)]


def _no_tools(asked: Asked, settings: Settings) -> str | None:
    tools = getattr(asked.question, "tools", ())
    return None if tools or asked.calls else "it has no tools"


JSON = Metric(
    "valid JSON, follows the schema, accuracy by field",
    ("json", "json_fields"),
    lambda row, _: "its answer is not JSON" if parsed(row.expected) is NOTHING else None,
    lambda rows, _: all(isinstance(parsed(each.expected), dict | list) for each in rows),
    _json,
)
TOOLS = Metric(
    "the right functions, with equal arguments",
    ("tools", "tool_names"),
    _no_tools,
    lambda rows, _: any(each.calls for each in rows),
    _tools,
)
