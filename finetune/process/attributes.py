"""Change attributes of an object, a class or a module for the time of a context."""

import contextlib
from collections.abc import Generator
from typing import Any


@contextlib.contextmanager
def changed(owner: Any, **values: Any) -> Generator[None]:
    """Context in which attributes of `owner`, which exist, have other values."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
