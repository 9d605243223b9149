"""Speed up imports: defer garbage collection and compilers."""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.process.attributes import changed


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Disable garbage collection while importing, and freeze the imported objects afterwards.

    Python (3.11) traverses all objects whenever enough were added, which happens often while a
    thousand modules are imported: a sixth of the processor time of these imports.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def read_models_once() -> None:
    """Let transformers list its models once, and not a second time when PEFT is imported.

    For this list transformers (5.23) reads each of its three thousand files, and it caches only the
    last 128 of its 450 folders: a request for the same list under another path reads all files
    again. This takes a tenth of the processor time of the imports.
    """
    from transformers.utils import import_utils

    read: Any = getattr(import_utils, "create_import_structure_from_path", None)
    if read is None:
        return
    models = Path(import_utils.__file__).parent.parent / "models"

    def read_once(path: Any) -> Any:
        return read(models if Path(path) == models / "__init__.py" else path)

    import_utils.create_import_structure_from_path = read_once


@contextlib.contextmanager
def compiling_later() -> Iterator[None]:
    """Defer each `torch.compile` that a library calls on import to the first call of the function.

    bitsandbytes (0.50) decorates functions with it that few runs call, and `torch.compile` loads
    TorchInductor immediately: two of the thirteen seconds of processor time of a run of a few steps
    (Intel Xeon; `finetune train` of a tiny model, alternating with and without this).
    """
    import torch

    compile_now = torch.compile

    def compile_later(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(compile_later, **options)

        @functools.cache
        def compiled() -> Callable[..., Any]:
            return compile_now(function, **options)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    with changed(torch, compile=compile_later):
        yield
