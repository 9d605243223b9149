"""Look up code by name: built-in names, or `module:attribute` outside this package."""

import importlib
from collections.abc import Mapping
from typing import Any

from finetune.errors import FinetuneError, did_you_mean


def find(field: str, name: str, known: Mapping[str, Any]) -> Any:
    """Look up a name.

    Args:
        field: name of the setting in error messages, such as `method` or `--format`.
        name: one of `known`, or `module:attribute`; the module must be installed or be in a
            folder on PYTHONPATH.
        known: values by name; a string `module:attribute` is imported on lookup.

    Raises:
        FinetuneError: the name is unknown, or its module or attribute cannot be imported.
    """
    if name in known:
        value = known[name]
        return _load(field, value) if isinstance(value, str) else value
    if ":" in name:
        return _load(field, name)
    raise FinetuneError(
        f"{field}: got '{name}', expected one of {', '.join(known)}, or module:attribute of your "
        f"own{did_you_mean(name, known)}"
    )


def _load(field: str, word: str) -> Any:
    module, _, attribute = word.partition(":")
    if not module or not attribute:
        raise FinetuneError(f"{field}: got '{word}', expected module:attribute")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise FinetuneError(
                f"{field}: '{word}': {module} imports '{error.name}', which is not installed; "
                "install it, or put its folder on PYTHONPATH"
            ) from None
        raise FinetuneError(
            f"{field}: '{word}': there is no module '{error.name}'; install it, or put its folder "
            "on PYTHONPATH" + (" and leave out '.py'" if module.endswith(".py") else "")
        ) from None
    except SystemExit as error:
        raise FinetuneError(
            f"{field}: '{word}': importing {module} exits with SystemExit: {error}; move the code "
            "that does so into a function"
        ) from error
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise FinetuneError(f"{field}: '{word}': {module} cannot be imported: {why}") from error
    for part in attribute.split("."):
        if not part or not hasattr(found, part):
            near = did_you_mean(part, [name for name in dir(found) if not name.startswith("_")])
            raise FinetuneError(f"{field}: '{word}': {module} has no '{attribute}'{near}")
        found = getattr(found, part)
    return found


def name_of(kind: type) -> str:
    """`module:attribute` of a class."""
    return f"{kind.__module__}:{kind.__qualname__}"
