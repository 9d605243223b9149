"""The name and version of the distribution, and what installs its optional parts."""

import re

__version__ = "0.2.0"
DISTRIBUTION = "accelerate-finetune"
"""Name on the package index, where `finetune` is another project."""


def install(extra: str) -> str:
    """The command that installs an optional part: bitsandbytes, deepspeed, eval, plots, ...

    It names the libraries themselves, so that it does not depend on where the toolkit came from.
    """
    from importlib import metadata  # not needed by commands that miss nothing

    try:
        listed = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # a checkout on the path, not installed
        return f"pip install '.[{extra}]' in the checkout"
    marked = re.compile(rf"""(.+?) *; *extra *== *["']{re.escape(extra)}["']""")
    found = [match[1].strip() for line in listed if (match := marked.fullmatch(line))]
    return " ".join(["pip install", *(f"'{each}'" for each in found)])


def missing(package: str) -> str:
    """Says that an optional package is not installed, and how to install it."""
    return f"{package}, which is not installed: {install(package.lower())}"
