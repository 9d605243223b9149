"""Read what the fields of a section mean: the text below each in its source."""

import ast
import functools
import inspect
import itertools
import textwrap


@functools.cache
def meanings(kind: type) -> dict[str, str]:
    """The docstring of each field of a section or a recipe class, by name, as one line."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if "__dataclass_fields__" not in vars(base):
            continue
        (section,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(section, ast.ClassDef)
        for field, below in itertools.pairwise(section.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(name)),
                    ast.Expr(value=ast.Constant(str(text))),
                ):
                    found[name] = " ".join(text.split())
                case _:
                    pass
    return found
