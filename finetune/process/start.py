"""A quicker start: imports that leave garbage and compilers for later."""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Import without looking for garbage: what is imported stays, and is not looked at again.

    Python (3.11) walks through everything that is there whenever enough was added, which is most of
    the time while a thousand modules are read: a sixth of the processor time of importing them.
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
    """Let transformers list the models that it has once, and not again as PEFT is imported.

    For its list transformers (5.23) reads each of its three thousand files, and it keeps what it
    found in the last 128 of its 450 folders: asked for the whole list under another name, it reads
    them all again. A tenth of the processor time of importing.
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
    """Let `torch.compile`, where libraries call it while they are imported, wait for the first use.

    bitsandbytes (0.50) decorates functions with it that few runs call, and `torch.compile` loads
    TorchInductor at once: two of the thirteen seconds of processor time of a run of a few steps
    (Intel Xeon; `finetune train` of a tiny model, in turns with and without this).
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

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = compile_now
