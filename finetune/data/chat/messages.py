"""Normalize chat messages to the form that chat templates read.

Content is text, arguments are objects, every tool call has an id, and no value is null.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from finetune.data.chat.strings import divided
from finetune.data.chat.tools import calls_in, calls_of, keys_of_call, without_call_key
from finetune.data.images.image_file import PLACE, ImageFile, image_of
from finetune.data.values import RowProblem, is_given, kind_of, list_of, shown, text_of
from finetune.errors import did_you_mean

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
CALLING = ("function_call", "tool_call")
"""Roles of a message that consists of calls, which are part of a turn of the assistant."""
RESULTS = ("function", "tool_response")
"""Other names of the role `tool`."""
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    **{role: role for role in (*CALLING, "tool_response")},
}
REASONING = ("reasoning_content", "reasoning", "thinking")
FLAGS = ("weight", "train", "train_turn", "training", "trainable", "loss", "loss_weight")
"""Keys of a message that say whether it is trained: 0 or false makes it context only."""
NOT_TEXT = ("image", "images", "image_url", "video", "videos", "audio", "audios", "input_audio")
"""Keys of a message, or of a part of its content, for content other than text."""
IMAGES = ("image", "image_url", "input_image")
"""Types of the parts of a content that are images."""
IMAGE_KEYS = ("image", "image_url", "path", "url", "bytes")
"""Keys of such a part that name its file or have its bytes."""
PART_KEYS = frozenset(("type", "text", *IMAGE_KEYS, *NOT_TEXT, *FLAGS))
"""Keys of a part of a message's content that are read or refused."""
REFUSED = {
    **dict.fromkeys(
        NOT_TEXT,
        "write it as a part of the message's content, such as "
        '{"type": "image", "path": "..."}; video and audio are not trained',
    ),
    "refusal": "write what the assistant says into content",
    "train_detail": "a turn is trained as a whole or not at all; use weight: 0 or 1",
    "training_detail": "a turn is trained as a whole or not at all; use weight: 0 or 1",
    "loss_mask": "use weight: 0 (context only) or 1 (trained)",
    "mask": "use weight: 0 (context only) or 1 (trained)",
}
"""Keys of a message that are not supported, with what to do instead."""
VERDICTS = ("label", "kto_tag")
"""Keys of a message that say whether its answer is wanted, as in rows of format 'kto'."""
LOST = {
    "tools": "write the functions into the row's column 'tools'",
    "functions": "write the functions into the row's column 'tools'",
    "reasoning_details": "write the reasoning into reasoning_content",
}
"""Keys of a message that only some templates read, with what to do for the other templates."""
KNOWN = frozenset(("role", "content", "images", "tool_calls", "tool_call_id", *REASONING))
"""Keys of a message that are normalized; all other keys are passed to the template unchanged."""

OF_CALLS = "tool_calls[]."
"""Prefix of the names of keys in the tool calls of a message."""


class Turns(NamedTuple):
    """Messages with their training flags."""

    messages: tuple[Message, ...]
    untrained: frozenset[int] = frozenset()
    """Indices of assistant messages that are flagged as context only."""


def messages_of(value: Any, where: str) -> Turns:
    return _turns(list_of(value, where), where, _message)


def sharegpt_turns(value: Any, where: str) -> Turns:
    return _turns(list_of(value, where), where, _sharegpt_message)


def _turns(values: list[Any], where: str, read: Any) -> Turns:
    if not values:
        raise RowProblem(f"{where} is empty")
    messages, places = list[Message](), list[str]()
    for index, raw in enumerate(values):
        place = f"{where}[{index}]"
        message = read(raw, place)
        calls = raw.get("role") in CALLING or raw.get("from") in CALLING
        if calls and messages and messages[-1]["role"] == "assistant":
            messages[-1] = _joined(messages[-1], message, place)
        else:
            messages.append(message)
            places.append(place)
    flags = list(map(_is_trained, messages, places))
    untrained = frozenset(n for n, trained in enumerate(flags) if trained is False)
    return Turns(with_call_ids(messages), untrained)


def _joined(before: Message, calls: Message, where: str) -> Message:
    """A turn of the assistant with calls that follow as a message of their own."""
    both = [*before.get("tool_calls", ()), *calls["tool_calls"]]
    given = {key: value for key, value in calls.items() if value} | {"tool_calls": both}
    for key in {*before, *FLAGS} - {"tool_calls"}:
        if before.get(key) != calls.get(key) and (key in FLAGS or (before[key] and key in given)):
            raise RowProblem(
                f"{where} is in one turn with the message before it, but its {key} differs"
            )
    return before | given


def _message(raw: Any, where: str) -> Message:
    """Normalize a message: content as text, arguments as objects, without null values."""
    if _is_plain(raw):
        return dict(raw)
    if not isinstance(raw, Mapping):
        raise RowProblem(f"{where} is {kind_of(raw)}, expected an object with role and content")
    if "role" not in raw:
        raise RowProblem(f"{where} has no 'role' (it has {', '.join(raw)})")
    message = {key: value for key, value in raw.items() if value is not None}
    role = raw["role"]
    if role in (*RESULTS, *CALLING):
        role = message["role"] = "tool" if role in RESULTS else "assistant"
    if role not in ROLES:
        close = did_you_mean(str(role), ROLES[:-1])
        raise RowProblem(f"{where} has role '{role}'{close} (known: {', '.join(ROLES)})")
    calling = next((key for key in ("tool_calls", "function_call") if message.get(key)), None)
    calls = calls_of(message, where)
    if raw["role"] in CALLING and not calls:
        calls, message["content"] = calls_in(message.get("content"), where), ""
    if calls and role != "assistant":
        raise RowProblem(f"{where} has {calling}, which only an assistant makes")
    images = list[ImageFile | None]()
    content = message.get("content", "" if calls else None)
    message["content"] = _content(content, where, role, images)
    if calls:
        message["tool_calls"] = calls
    _check_keys(message, where)
    if images:
        message["images"] = tuple(images)  # in the order of their places in the text
    return _with_reasoning(message, where)


def _is_plain(raw: Any) -> bool:
    """Whether a message consists of a role and a text only, as most do."""
    return (
        type(raw) is dict
        and len(raw) == 2
        and type(raw.get("content")) is str
        and raw.get("role") in ROLES
    )


def further_keys(message: Message) -> list[str]:
    """Names of the keys with a value that only some templates read, those of tool calls too."""
    found = [key for key in message.keys() - KNOWN if is_given(message[key])]
    calls = message.get("tool_calls", ())
    return found + [f"{OF_CALLS}{key}" for call in calls for key in keys_of_call(call)]


def without_key(message: Message, key: str, text: str) -> Message:
    """A message without one of its `further_keys`; another `text` replaces a text."""
    if key.startswith(OF_CALLS):
        calls = message["tool_calls"]
        inside = key.removeprefix(OF_CALLS)
        return {**message, "tool_calls": [without_call_key(call, inside) for call in calls]}
    other = {name: value for name, value in message.items() if name != key}
    return other | ({key: text} if isinstance(message[key], str) else {})


def _check_keys(message: Message, where: str) -> None:
    """Refuse unsupported keys; remove them if they are empty."""
    for key in message.keys() & REFUSED.keys():
        if message.pop(key) not in ("", [], {}, False):
            raise RowProblem(f"{where} has '{key}', which is not read: {REFUSED[key]}")
    for key in message.keys() & VERDICTS:
        if message[key] in (False, 0) or str(message[key]).strip().lower() in ("false", "0"):
            raise RowProblem(
                f"{where} has {key} {message[key]!r}, and an unwanted answer would be trained; use "
                "weight: 0 (context only), or format 'kto', which reads a label of each row"
            )


def _with_reasoning(message: Message, where: str) -> Message:
    """Store a thought under both names that templates read, and only there."""
    given = {key: message[key] for key in REASONING if message.get(key)}
    if not given:
        return message
    key, thought = next(iter(given.items()))
    if not isinstance(thought, str):
        raise RowProblem(f"{where}.{key} is {kind_of(thought)}, expected text")
    if message["role"] != "assistant":
        raise RowProblem(f"{where} has {key}, which only an assistant has")
    inside, message["content"] = divided(message["content"])
    given["a thought in content"] = thought if inside in ("", thought.strip()) else inside
    for other, text in given.items():
        if text != thought:
            raise RowProblem(f"{where} has {key} and {other} with different texts; keep one")
    message["reasoning_content"] = message["thinking"] = thought
    return message


def _is_trained(message: Message, where: str) -> bool | None:
    """Remove the training flags of a message; returns their value, or None without flags."""
    if message.keys().isdisjoint(FLAGS):
        return None
    given = {key: message.pop(key) for key in FLAGS if key in message}
    wanted = {key: _flag(value, f"{where}.{key}") for key, value in given.items()}
    if len(set(wanted.values())) > 1:
        shown = " and ".join(f"{key} {given[key]!r}" for key in given)
        raise RowProblem(f"{where} has {shown}, which contradict each other; keep one of them")
    key, trained = next(iter(wanted.items()))
    if message["role"] == "assistant":
        return trained
    if trained:
        raise RowProblem(
            f"{where} ({message['role']}) has {key} {given[key]!r}, but only turns of the "
            "assistant are trained; leave the key out"
        )
    return None


def _flag(value: Any, where: str) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    shown = repr(value) if isinstance(value, int | float | str) else kind_of(value)
    raise RowProblem(
        f"{where} is {shown}, expected 0 or false (context only), or 1 or true (trained)"
    )


def _content(content: Any, where: str, role: str, images: list[ImageFile | None]) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "".join(_part(part, where, role, images) for part in content)
    raise RowProblem(f"{where}.content is {kind_of(content)}, expected text")


def _part(part: Any, where: str, role: str, images: list[ImageFile | None]) -> str:
    """The text of a content part: of an image its place, which is added to `images`.

    It is added as None if a column of the row has the image. Refuses all other parts.
    """
    if not isinstance(part, Mapping):
        raise RowProblem(
            f"{where}.content holds {kind_of(part)} among its parts, expected objects such as "
            '{"type": "text", "text": "..."}'
        )
    own = (None, role == "assistant")
    flag = next((key for key in FLAGS if part.get(key) not in own), None)
    if flag is not None:
        raise RowProblem(
            f"{where} ({role}) has a part with {flag} {part[flag]!r}; a turn of the assistant is "
            "trained as a whole or not at all: set weight: 0 or 1 on the message"
        )
    kind = part.get("type", "text")
    if kind in IMAGES:
        named = [part[key] for key in IMAGE_KEYS if part.get(key) is not None]
        if len(named) == 2 and part.get("bytes") and part.get("path"):  # an image of `datasets`
            named = [part["bytes"]]
        if len(named) > 1:
            raise RowProblem(f"{where} has a part that names {len(named)} images; keep one")
        images.append(image_of(named[0], f"{where}.content") if named else None)
        return PLACE
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        kind = next((key for key in NOT_TEXT if part.get(key)), None)
        if kind is None:
            return part["text"]
    raise RowProblem(f"{where} has a part that is neither text nor an image: {kind}")


def unread_part_keys(turns: list[Any]) -> Iterator[str]:
    """Yield names of the keys of content parts that are not read, such as `cache_control`."""
    for turn in turns:
        content = turn.get("content") if isinstance(turn, Mapping) else None
        for part in content if isinstance(content, list) else ():
            for key in part.keys() - PART_KEYS if isinstance(part, Mapping) else ():
                if is_given(part[key]):
                    yield f"messages[].content[].{key}"


def with_call_ids(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Assign ids to tool calls without one, and put the results that follow in their order.

    Ids are nine letters and digits, because Mistral's templates accept no others.
    Raises RowProblem for a result with the id of none of these calls.
    """
    count, named, result = 0, True, list[Message]()
    ids, waiting = list[Any](), list[Any]()
    for message in messages:
        at = len(result)
        if "tool_calls" in message:
            calls = message["tool_calls"]
            named = all("id" in call for call in calls)
            calls = [{"id": f"call{n:05d}", **call} for n, call in enumerate(calls, count)]
            message = {**message, "tool_calls": calls}
            count += len(calls)
            ids = waiting = [call["id"] for call in calls]
        elif message["role"] == "tool" and ids:
            own = message.get("tool_call_id")
            if waiting and (not own or not (named or own in ids)):
                own = waiting[0]
                message = {**message, "tool_call_id": own}
            if named and own and own not in ids:
                told = f"message {at} (tool) has tool_call_id {shown(own)}, which names no call of"
                raise RowProblem(f"{told} the turn before it ({', '.join(map(str, ids))})")
            waiting = [call for call in waiting if call != own]
            later = ids[ids.index(own) + 1 :] if own in ids else []
            while later and result[at - 1].get("tool_call_id") in later:
                at -= 1
        result.insert(at, message)
    return tuple(result)


def _sharegpt_message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
        there = ", ".join(turn) if isinstance(turn, Mapping) else kind_of(turn)
        raise RowProblem(f"{where} needs 'from' and 'value', it has {there}")
    speaker = text_of(turn, "from", where)
    others = {k: v for k, v in turn.items() if k not in ("from", "value") and v is not None}
    if speaker not in SHAREGPT_ROLES:
        close = did_you_mean(speaker, list(SHAREGPT_ROLES)[:5])
        raise RowProblem(f"{where} is from '{speaker}'{close} (known: {', '.join(SHAREGPT_ROLES)})")
    message = {"role": SHAREGPT_ROLES[speaker], "content": text_of(turn, "value", where)}
    return _message({**others, **message}, where)


def history_of(row: Mapping[str, Any]) -> list[Message]:
    """Messages of the row's `history`: pairs of a user text and an assistant text, or nothing."""
    messages = list[Message]()
    earlier = row["history"] if is_given(row.get("history")) else []
    for index, pair in enumerate(list_of(earlier, "history")):
        if not isinstance(pair, list | tuple) or [type(each) for each in pair] != [str, str]:
            raise RowProblem(f"history[{index}] is not a pair of texts: a question, an answer")
        for role, content in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": content})
    return messages
