"""A quicker start: imports that leave garbage and compilers for later."""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
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
