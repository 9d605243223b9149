"""Change the class of a module that transformers, PEFT or a user has built."""

from typing import Any

from torch import nn


def mix_in(module: nn.Module, mixin: type, **own: Any) -> None:
    """Let a module's class inherit from `mixin` first; `own` are further attributes of the class.

    The class is replaced by a subclass of the same name, as `torch.distributed.fsdp.fully_shard`
    does: parameter names and saved files do not change. It keeps the module of the class, where
    transformers looks for a model's custom code.
    """
    kind = type(module)
    fields = {"__module__": kind.__module__} | own
    module.__class__ = type(kind.__name__, (mixin, kind), fields)
