"""Normalize tool calls and function schemas to the form that chat templates read."""

from collections.abc import Mapping
from typing import Any

from finetune.data.values import (
    RowProblem,
    is_given,
    json_of,
    kind_of,
    list_of,
)

ARGUMENTS = ("arguments", "args", "parameters", "params", "kwargs", "input", "inputs")
"""Keys of the arguments of a call: ours, and those of other APIs."""
CALL_KEYS = frozenset(("id", "type", "index", "function"))
"""Keys of a tool call that are normalized."""
FUNCTION_KEYS = frozenset(("name", "arguments"))
"""Keys of a called function that are normalized."""
PLAIN = (str, bool, int, float, type(None))


class WrittenArguments(dict[str, Any]):
    """Arguments of a tool call that were JSON text in the row.

    Templates cannot access the text, because the sandbox blocks names that begin with an
    underscore.
    """

    def __init__(self, values: Mapping[str, Any], written: str) -> None:
        super().__init__(values)
        self._written = written


def written_arguments(arguments: Mapping[str, Any]) -> str | None:
    """The original JSON text of a call's arguments; None if they were an object."""
    return arguments._written if isinstance(arguments, WrittenArguments) else None


def calls_of(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Pop the calls of a message: `tool_calls`, or the older `function_call`."""
    calls, call = message.pop("tool_calls", None), message.pop("function_call", None)
    if calls and call:
        raise RowProblem(f"{where} has both tool_calls and function_call; keep one of them")
    if call:
        return [tool_call(call, f"{where}.function_call")]
    if isinstance(calls, str) and calls.lstrip().startswith("["):
        calls = json_of(calls, f"{where}.tool_calls")
    if not calls:
        return []
    return [
        tool_call(each, f"{where}.tool_calls[{number}]")
        for number, each in enumerate(list_of(calls, f"{where}.tool_calls"))
    ]


def tool_call(raw: Any, where: str) -> dict[str, Any]:
    """Normalize a call."""
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowProblem(f"{where} has no function name")
    key, written = _arguments(raw, function)
    arguments = written
    if isinstance(written, str):
        arguments = json_of(written, f"{where}.arguments") if written.strip() else {}
        if isinstance(arguments, dict):
            arguments = WrittenArguments(arguments, written)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RowProblem(f"{where}.arguments is {kind_of(arguments)}, expected an object")
    check_plain(arguments, f"{where}.arguments")
    own = CALL_KEYS if function is raw else frozenset[str]()
    called = _others(function, FUNCTION_KEYS | own | {key})
    around = {} if function is raw else _others(raw, CALL_KEYS | {key})
    named = {"name": function["name"], "arguments": arguments, **called}
    call = {"type": "function", "function": named, **around}
    return {"id": raw["id"], **call} if raw.get("id") else call


def _arguments(raw: Mapping[str, Any], function: Mapping[str, Any]) -> tuple[str, Any]:
    """The arguments of a call with their key, which may be that of another API."""
    for each in (function, raw):
        for key in ARGUMENTS:
            if is_given(each.get(key)):
                return key, each[key]
    return "arguments", function.get("arguments")


def _others(value: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Further keys, which only some templates read, without null values."""
    return {key: each for key, each in value.items() if key not in known and each is not None}


def keys_of_call(call: Mapping[str, Any]) -> list[str]:
    """Keys of a normalized call that only some templates read, such as `function.result`."""
    around, inside = call.keys() - CALL_KEYS, call["function"].keys() - FUNCTION_KEYS
    found = [key for key in around if is_given(call[key])]
    return found + [f"function.{key}" for key in inside if is_given(call["function"][key])]


def without_call_key(call: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A call without one of its `keys_of_call`."""
    function = {name: each for name, each in call["function"].items() if key != f"function.{name}"}
    return {n: function if n == "function" else each for n, each in call.items() if n != key}


def tools_of(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Function schemas of a row, from `tools` or the older `functions`, as lists or JSON text.

    Each is converted to the `{"type": "function"}` form.
    """
    if is_given(row.get("tools")) and is_given(row.get("functions")):
        raise RowProblem("the row has both 'tools' and 'functions'; keep one of them")
    column = "functions" if is_given(row.get("functions")) else "tools"
    value = row.get(column)
    if isinstance(value, str):
        value = json_of(value, column) if value.strip() else None
    if value is None:
        return ()
    return tuple(
        _schema(tool, f"{column}[{index}]") for index, tool in enumerate(list_of(value, column))
    )


def _schema(tool: Any, where: str) -> dict[str, Any]:
    if isinstance(tool, str):
        tool = json_of(tool, where)
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowProblem(f"{where} has no function name")
    check_plain(tool, where)
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}


def check_plain(value: Any, where: str) -> None:
    """Refuse values without a JSON form: dates, bytes and decimals of typed columns."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            check_plain(inner, f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            check_plain(inner, f"{where}[{index}]")
    elif not isinstance(value, PLAIN):
        raise RowProblem(f"{where} is {kind_of(value)}, which has no JSON form; store it as text")


def calls_in(content: Any, where: str) -> list[dict[str, Any]]:
    """Calls that are the content of a message: one or a list, mostly as JSON text."""
    value = json_of(content, where) if isinstance(content, str) else content
    calls = value if isinstance(value, list) else [value]
    return [tool_call(each, where) for each in calls]


def template_kwargs_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Chat template variables of a row, from an object or JSON text."""
    value = row.get("chat_template_kwargs")
    if isinstance(value, str) and value.strip():
        value = json_of(value, "chat_template_kwargs")
    if value is None or value in ("", [], {}):
        return {}
    if not isinstance(value, Mapping):
        raise RowProblem(f"chat_template_kwargs is {kind_of(value)}, expected an object")
    check_plain(value, "chat_template_kwargs")
    return dict(value)
