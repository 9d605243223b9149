"""Cache folders, under FINETUNE_CACHE or the user's cache folder."""

import os
from collections.abc import Callable
from pathlib import Path

from finetune.errors import FinetuneError

COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def cache(kind: str) -> Path:
    """The cache folder for a kind of files: `data` for prepared rows, `compiled` for kernels.

    Raises:
        FinetuneError: the user has no home folder, and FINETUNE_CACHE is not set.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "finetune"
    try:
        return Path(os.environ.get("FINETUNE_CACHE", default)).expanduser() / kind
    except RuntimeError:  # in a container whose user has no passwd entry
        raise FinetuneError(
            "there is no place for the cache: this user has no home folder; set FINETUNE_CACHE to "
            "a folder that it may write to"
        ) from None


def keep_compiled(usual: Callable[[], str]) -> None:
    """Make TorchInductor use `cache("compiled")`, unless the user has set another folder.

    Args:
        usual: returns PyTorch's default folder, in temporary files, which TorchInductor sets when
            it is imported. Called only if a folder is set, because the import takes a second.
    """
    if COMPILED not in os.environ or os.environ[COMPILED] == usual():
        os.environ[COMPILED] = str(cache("compiled"))


def hub_cache() -> Path:
    """The folder of downloads from the Hugging Face hub."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
