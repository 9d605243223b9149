"""Read YAML without repeated keys and endless aliases, with one-line errors.

A value that contains itself is infinite, and a few lines of aliases to aliases can expand to more
values than fit into memory.
"""

import yaml

MOST_VALUES = 10_000
"""Maximum number of values, with aliases expanded."""


class NotYAML(ValueError):
    """A text is not YAML that can be read; the message is one line."""


def read_yaml(
    text: str, loader: type[yaml.BaseLoader | yaml.SafeLoader] = yaml.SafeLoader
) -> object:
    """The value of a YAML text.

    Raises:
        NotYAML: the text is not valid, repeats a key, contains itself, or has too many values.
    """
    try:
        reader = loader(text)
        root = reader.get_single_node()
        if root is None:
            return None
        _count(root, {})
        return reader.construct_document(root)
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


def _count(node: yaml.Node, counts: dict[yaml.Node, int]) -> int:
    """Number of values in a node with its aliases expanded; 0 in `counts` while it is counted.

    Repeated keys are refused, which YAML forbids; PyYAML would silently use the last one.
    """
    line = node.start_mark.line + 1
    if node not in counts:
        counts[node] = 0
        inner: list[yaml.Node] = []
        keys = set[str]()
        for each in node.value if isinstance(node, yaml.CollectionNode) else ():
            inner += each if isinstance(each, tuple) else [each]
            if isinstance(each, tuple) and isinstance(each[0], yaml.ScalarNode):
                key = each[0].value
                if key in keys and key != "<<":
                    at = each[0].start_mark.line + 1
                    raise NotYAML(f"line {at}: the key '{key}' occurs a second time")
                keys.add(key)
        counts[node] = 1 + sum(_count(each, counts) for each in inner)
    elif not counts[node]:
        raise NotYAML(f"line {line}: the value contains itself")
    if counts[node] > MOST_VALUES:
        raise NotYAML(f"line {line}: more than {MOST_VALUES:,} values, with aliases expanded")
    return counts[node]
