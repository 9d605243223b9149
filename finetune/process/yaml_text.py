"""Read YAML of any content in bounded time and memory, with a mistake told in one line.

An alias may stand for what it names once or a few times. What holds itself has no end, and a few
lines of aliases to aliases stand for more values than any machine has: both are refused.
"""

import yaml

MOST_CHARACTERS = 1 << 20
"""Of a text; a recipe has about a thousand."""
MOST_VALUES = 10_000
"""With every alias counted as what it stands for."""
MOST_DEPTH = 50
"""Levels of lists and maps within one another."""


PARSER = yaml.CBaseLoader if yaml.__with_libyaml__ else yaml.BaseLoader


class NotYAML(ValueError):
    """A text that is not YAML, or more of it than is read; the message is one line."""


def read_yaml(
    text: str, loader: type[yaml.BaseLoader | yaml.SafeLoader] = yaml.SafeLoader
) -> object:
    """The value of a YAML text.

    Raises:
        NotYAML: it is none, has a key twice, holds itself, or is larger than a limit above.
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
        # PyYAML 6 leaves these to whoever writes `!!timestamp x` or `!!bool x`.
        raise NotYAML(f"a value is not of the kind of its tag ({error})") from None
    except RecursionError:
        raise NotYAML("lists and maps are nested too deeply") from None


class _Open:
    """A list or map whose end has not come."""

    def __init__(self, anchor: str | None, is_map: bool) -> None:
        self.anchor = anchor
        self.size = 1
        self.keys: set[str] | None = set() if is_map else None
        self.at_key = is_map


def _measure(text: str) -> None:
    """Count what a text stands for, without making it; by libyaml, where PyYAML was built with it.

    PyYAML's own parser takes time that grows with the square of the depth.
    """
    sizes: dict[str, int] = {}
    within: list[_Open] = []
    for event in yaml.parse(text, PARSER):
        line = event.start_mark.line + 1
        anchor = getattr(event, "anchor", None)
        match event:
            case yaml.AliasEvent():
                if any(each.anchor == anchor for each in within):
                    raise NotYAML(f"line {line}: *{anchor} stands inside of what it names")
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
    """Count a value that is complete in the list or map that it stands in."""
    if size > MOST_VALUES:
        raise NotYAML(f"line {line}: its aliases stand for more than {MOST_VALUES:,} values")
    if within:
        holder = within[-1]
        holder.size += size
        holder.at_key = holder.keys is not None and not holder.at_key
        if holder.size > MOST_VALUES:
            raise NotYAML(f"line {line}: more than {MOST_VALUES:,} values, aliases counted in full")


def _refuse_second_key(within: list[_Open], event: yaml.ScalarEvent, line: int) -> None:
    """YAML allows a key once; PyYAML takes the last one and says nothing."""
    holder = within[-1] if within else None
    if holder is None or holder.keys is None or not holder.at_key:
        return
    if event.value in holder.keys and event.value != "<<":
        raise NotYAML(f"line {line}: the key '{event.value}' stands there a second time")
    holder.keys.add(event.value)
