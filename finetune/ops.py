"""DeepSpeed's compiled operators: there, or built once, with a word while it takes minutes."""

import fcntl
from collections.abc import Callable
from pathlib import Path

from finetune.errors import FinetuneError


def require_async_io(say: Callable[[str], None]) -> None:
    """Make sure that DeepSpeed can read and write a disk asynchronously (NVMe offload).

    A build that was killed leaves torch's lock file behind, and the next one waits on it for ever.
    All of our processes build under a lock that dies with them, so that a file found then is stale.

    Raises:
        FinetuneError: libaio is missing, or the operator cannot be built.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import _get_build_directory

    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise FinetuneError(
            "offload to NVMe needs libaio with its headers: apt-get install libaio-dev "
            "(Red Hat: dnf install libaio-devel)"
        )
    folder = Path(_get_build_directory(builder.name, verbose=False))
    with (folder.parent / "finetune.lock").open("w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        if not (folder / f"{builder.name}.so").exists():
            (folder / "lock").unlink(missing_ok=True)
            say("building DeepSpeed's async_io, once: some minutes")
        try:
            builder.load(verbose=False)
        except RuntimeError as error:
            first = str(error).strip().split("\n")[0]
            raise FinetuneError(f"DeepSpeed's async_io could not be built: {first}") from None
