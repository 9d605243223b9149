"""Folders that are kept between runs, below FINETUNE_CACHE, else the user's cache folder."""

import os
from collections.abc import Callable
from pathlib import Path

from finetune.errors import FinetuneError

COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def cache(kind: str) -> Path:
    """The folder of a kind of things: `data` for prepared rows, `compiled` for kernels.

    Raises FinetuneError for a user without a home folder where no other one is named.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "finetune"
    try:
        return Path(os.environ.get("FINETUNE_CACHE", default)).expanduser() / kind
    except RuntimeError:  # a container that runs as a user without an entry
        raise FinetuneError(
            "there is no place for the cache: this user has no home folder; set FINETUNE_CACHE to "
            "a folder that it may write to"
        ) from None


def keep_compiled(usual: Callable[[], str]) -> None:
    """Let TorchInductor keep its code there, unless a person has named another folder.

    Args:
        usual: gives PyTorch's own, in the machine's temporary files, which TorchInductor names when
            it is imported; asked only where one is named, because that import takes a second.
    """
    if COMPILED not in os.environ or os.environ[COMPILED] == usual():
        os.environ[COMPILED] = str(cache("compiled"))


def hub_cache() -> Path:
    """Where the Hugging Face hub keeps what was downloaded."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
