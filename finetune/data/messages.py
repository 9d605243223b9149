"""Chat messages and tool schemas, brought into the one form that chat templates read.

Content is text, arguments are objects, every tool call has an id, nothing is null.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from finetune.errors import did_you_mean

Raw = Mapping[str, Any]
Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}
REASONING = ("reasoning_content", "reasoning", "thinking")


class RowProblem(ValueError):
    """A row that does not have the shape its format needs; the reader adds file and row number."""


class WrittenArguments(dict[str, Any]):
    """Arguments of a tool call that the row holds as JSON text.

    Its attribute is out of reach of templates, which read no name that begins with an underscore.
    """

    def __init__(self, values: Mapping[str, Any], written: str) -> None:
        super().__init__(values)
        self._written = written


def written_arguments(arguments: Mapping[str, Any]) -> str | None:
    """The JSON text of a call's arguments, where the row holds one."""
    return arguments._written if isinstance(arguments, WrittenArguments) else None


def messages_of(value: Any, where: str) -> tuple[Message, ...]:
    messages = list_of(value, where)
    if not messages:
        raise RowProblem(f"{where} is empty")
    return with_call_ids([_message(each, f"{where}[{i}]") for i, each in enumerate(messages)])


def _message(raw: Any, where: str) -> Message:
    """A message without its empty keys; its content is text, its arguments are objects."""
    if not isinstance(raw, Mapping):
        raise RowProblem(f"{where} is {kind_of(raw)}, expected an object with role and content")
    if "role" not in raw:
        hint = "; format 'sharegpt' reads 'from' and 'value'" if "from" in raw else ""
        raise RowProblem(f"{where} has no 'role' (it has {', '.join(raw)}){hint}")
    if raw["role"] not in ROLES:
        close = did_you_mean(str(raw["role"]), ROLES)
        raise RowProblem(f"{where} has role '{raw['role']}'{close} (known: {', '.join(ROLES)})")
    message = {key: value for key, value in raw.items() if value is not None}
    calls = message.pop("tool_calls", None)
    message["content"] = _content(message.get("content", "" if calls else None), where)
    if calls:
        if raw["role"] != "assistant":
            raise RowProblem(f"{where} has tool_calls, which only an assistant makes")
        message["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(list_of(calls, f"{where}.tool_calls"))
        ]
    reasoning = next((message[key] for key in REASONING if message.get(key)), None)
    if reasoning is not None:  # templates read either of these two names
        message["reasoning_content"] = message["thinking"] = reasoning
    return message


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
                raise RowProblem(f"{where} has a part that is not text: {kind}")
        return "".join(part["text"] for part in content)
    raise RowProblem(f"{where}.content is {kind_of(content)}, expected text")


def _tool_call(raw: Any, where: str) -> dict[str, Any]:
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowProblem(f"{where} has no function name")
    arguments = written = function.get("arguments")
    if isinstance(written, str):
        arguments = _json(written, f"{where}.arguments") if written.strip() else {}
        if isinstance(arguments, dict):
            arguments = WrittenArguments(arguments, written)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RowProblem(f"{where}.arguments is {kind_of(arguments)}, expected an object")
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    identity = raw.get("id") if isinstance(raw, Mapping) else None
    return {"id": identity, **call} if identity else call


def with_call_ids(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Give each tool call an id where it has none, and the results that follow the same ids.

    Nine letters and digits, because Mistral's templates accept nothing else.
    """
    count, waiting, result = 0, list[str](), list[Message]()
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                calls.append({"id": f"call{count:05d}", **call})
                count += 1
            waiting = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            if waiting:
                message = {"tool_call_id": waiting[0], **message}
            waiting = [call for call in waiting if call != message.get("tool_call_id")]
        result.append(message)
    return tuple(result)


def sharegpt_message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
        there = ", ".join(turn) if isinstance(turn, Mapping) else kind_of(turn)
        hint = ""
        if isinstance(turn, Mapping) and "role" in turn:
            hint = "; rename the column to 'messages' and use format 'messages'"
        raise RowProblem(f"{where} needs 'from' and 'value', it has {there}{hint}")
    speaker, value = text_of(turn, "from", where), text_of(turn, "value", where)
    if speaker == "function_call":
        calls = _json(value, where)
        calls = calls if isinstance(calls, list) else [calls]
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [_tool_call(call, where) for call in calls],
        }
    if speaker not in SHAREGPT_ROLES:
        known = (*SHAREGPT_ROLES, "function_call")
        close = did_you_mean(speaker, known)
        raise RowProblem(f"{where} is from '{speaker}'{close} (known: {', '.join(known)})")
    return {"role": SHAREGPT_ROLES[speaker], "content": value}


def tools_of(value: Any) -> tuple[dict[str, Any], ...]:
    """Function schemas from a list or its JSON text, each in the `{"type": "function"}` form."""
    if isinstance(value, str):
        value = _json(value, "tools") if value.strip() else None
    if value is None:
        return ()
    tools = []
    for index, tool in enumerate(list_of(value, "tools")):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowProblem(f"tools[{index}] has no function name")
        tools.append(
            dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}
        )
    return tuple(tools)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RowProblem(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise RowProblem(f"{where} is JSON nested too deeply") from None


def text_of(row: Raw, column: str, where: str = "") -> str:
    if not isinstance(row[column], str):
        place = f"{where}.{column}" if where else column
        raise RowProblem(f"{place} is {kind_of(row[column])}, expected text")
    return row[column]


def list_of(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise RowProblem(f"{where} is {kind_of(value)}, expected a list")
    return value


def kind_of(value: Any) -> str:
    kinds = {str: "text", dict: "an object", list: "a list", bool: "true or false"}
    kinds |= {int: "a number", float: "a number", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)
