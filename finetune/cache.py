"""Where things are kept between runs: FINETUNE_CACHE, else the user's cache folder."""

import os
from collections.abc import Callable
from pathlib import Path

COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def cache(kind: str) -> Path:
    """The folder of a kind of things: `data` for prepared rows, `compiled` for kernels."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "finetune"
    return Path(os.environ.get("FINETUNE_CACHE", default)).expanduser() / kind


def keep_compiled(usual: Callable[[], str]) -> None:
    """Let TorchInductor keep its code there, unless a person has named another folder.

    Args:
        usual: gives PyTorch's own, in the machine's temporary files, which TorchInductor names when
            it is imported; asked only where one is named, because that import takes a second.
    """
    if COMPILED not in os.environ or os.environ[COMPILED] == usual():
        os.environ[COMPILED] = str(cache("compiled"))
