"""Read untrusted YAML in bounded time and memory, with one-line errors.

Aliases are allowed, but a value that contains itself is infinite, and a few lines of aliases to
aliases can expand to more values than fit into memory: both are refused.
"""

import yaml

MOST_CHARACTERS = 1 << 20
"""Maximum characters of a text; a recipe has about a thousand."""
MOST_VALUES = 10_000
"""Maximum number of values, with aliases expanded."""
MOST_DEPTH = 50
"""Maximum nesting depth of lists and maps."""


PARSER = yaml.CBaseLoader if yaml.__with_libyaml__ else yaml.BaseLoader


class NotYAML(ValueError):
    """A text is not valid YAML or exceeds a limit; the message is one line."""


def read_yaml(
    text: str, loader: type[yaml.BaseLoader | yaml.SafeLoader] = yaml.SafeLoader
) -> object:
    """The value of a YAML text.

    Raises:
        NotYAML: the text is not valid, repeats a key, contains itself, or exceeds a limit above.
    """
    if len(text) > MOST_CHARACTERS:
        raise NotYAML(f"{len(text):,} characters, expected at most {MOST_CHARACTERS:,}")
    try:
        _measure(text)
        return yaml.load(text, loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1} column {mark.column + 1}: " if mark else ""
        raise NotYAML(f"{place}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise NotYAML(" ".join(str(error).split())) from None
    except (AttributeError, LookupError, TypeError, OverflowError) as error:
        # PyYAML 6 raises these for `!!timestamp x` or `!!bool x`.
        raise NotYAML(f"a value is not of the kind of its tag ({error})") from None
    except RecursionError:
        raise NotYAML("lists and maps are nested too deeply") from None


class _Open:
    """A list or map that is still open."""

    def __init__(self, anchor: str | None, is_map: bool) -> None:
        self.anchor = anchor
        self.size = 1
        self.keys: set[str] | None = set() if is_map else None
        self.at_key = is_map


def _measure(text: str) -> None:
    """Check the limits without constructing values, with libyaml if PyYAML was built with it.

    The time of PyYAML's own parser grows with the square of the depth.
    """
    sizes: dict[str, int] = {}
    within: list[_Open] = []
    for event in yaml.parse(text, PARSER):
        line = event.start_mark.line + 1
        anchor = getattr(event, "anchor", None)
        match event:
            case yaml.AliasEvent():
                if any(each.anchor == anchor for each in within):
                    raise NotYAML(f"line {line}: *{anchor} is inside the value that it refers to")
                _add(within, sizes.get(str(anchor), 1), line)
            case yaml.ScalarEvent():
                _refuse_second_key(within, event, line)
                _add(within, 1, line)
                sizes[str(anchor)] = 1
            case yaml.CollectionStartEvent():
                within.append(_Open(anchor, isinstance(event, yaml.MappingStartEvent)))
                if len(within) > MOST_DEPTH:
                    raise NotYAML(f"line {line}: more than {MOST_DEPTH} levels of lists and maps")
            case yaml.CollectionEndEvent():
                closed = within.pop()
                sizes[str(closed.anchor)] = closed.size
                _add(within, closed.size, line)
            case _:
                pass


def _add(within: list[_Open], size: int, line: int) -> None:
    """Add the size of a complete value to the list or map that contains it."""
    if size > MOST_VALUES:
        raise NotYAML(f"line {line}: its aliases expand to more than {MOST_VALUES:,} values")
    if within:
        holder = within[-1]
        holder.size += size
        holder.at_key = holder.keys is not None and not holder.at_key
        if holder.size > MOST_VALUES:
            raise NotYAML(f"line {line}: more than {MOST_VALUES:,} values, with aliases expanded")


def _refuse_second_key(within: list[_Open], event: yaml.ScalarEvent, line: int) -> None:
    """Refuse a repeated key, which YAML forbids; PyYAML would silently use the last one."""
    holder = within[-1] if within else None
    if holder is None or holder.keys is None or not holder.at_key:
        return
    if event.value in holder.keys and event.value != "<<":
        raise NotYAML(f"line {line}: the key '{event.value}' occurs a second time")
    holder.keys.add(event.value)
