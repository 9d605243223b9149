"""Cache folders, under FINETUNE_CACHE or the user's cache folder."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from finetune.errors import FinetuneError, reading

COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def with_home() -> None:
    """Give a user without a home folder one in temporary files, for the caches of all libraries.

    Raises:
        FinetuneError: another user has a folder of that name.
    """
    try:
        Path.home()
    except RuntimeError:  # in a container whose user has no passwd entry
        home = Path(tempfile.gettempdir()) / f"finetune-{os.getuid()}"
        home.mkdir(0o700, exist_ok=True)
        if home.lstat().st_uid != os.getuid():
            raise FinetuneError(f"{home}: belongs to another user; set HOME to a folder") from None
        os.environ["HOME"] = str(home)


def cache(kind: str) -> Path:
    """The cache folder for a kind of files: `data` for prepared rows, `compiled` for kernels.

    Raises:
        FinetuneError: FINETUNE_CACHE or XDG_CACHE_HOME names the home folder of an unknown user.
    """
    with_home()
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "finetune"
    with reading("there is no place for the cache", "set FINETUNE_CACHE to a folder"):
        return Path(os.environ.get("FINETUNE_CACHE", default)).expanduser() / kind


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
    with_home()
    home = os.environ.get("HF_HOME", f"{os.environ.get('XDG_CACHE_HOME', '~/.cache')}/huggingface")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE", f"{home}/hub")))
