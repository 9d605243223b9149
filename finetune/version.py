"""The name and version of the distribution, and what installs its optional parts."""

__version__ = "0.2.0"
DISTRIBUTION = "accelerate-finetune"
"""Name on the package index, where `finetune` is another project."""


def install(extra: str) -> str:
    """The command that installs an optional part: bitsandbytes, deepspeed, eval, plots, ..."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def missing(package: str) -> str:
    """Says that an optional package is not installed, and how to install it."""
    return f"{package}, which is not installed: {install(package.lower())}"


BITSANDBYTES = missing("bitsandbytes")
