"""Compile the forward pass of each decoder block with TorchInductor (regional compilation).

All blocks of a class share their code, compiled once for any number of rows and tokens. Hooks of an
engine and activation checkpointing stay outside: they call the compiled forward pass like the plain
one. The class of a block is replaced by a subclass of the same name, as in
`finetune.kernels.head.give_loss`, so names of parameters and saved files do not change.

Attention to concatenated documents is part of the graph where one variable-length kernel computes
it. Elsewhere a block is cut into graphs before and after it, because a trace of separate calls
would hold for one set of document lengths.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from finetune.models import packed_attention


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What `torch.compile` made in this process so far."""

    graphs: int
    breaks: dict[str, int]
    """Number of graph breaks by reason."""

    def line(self) -> str:
        """A line for the log."""
        cut = "; ".join(f"{count} graph breaks: {reason}" for reason, count in self.breaks.items())
        return f"kernels.blocks: compiled into {self.graphs} graphs, {cut or 'no graph breaks'}"


class CompiledBlock:
    """Mixin for a block of transformers that runs compiled in training, and otherwise as it was."""

    by_inductor: ClassVar[Callable[..., Any]]
    """The compiled forward pass, a function of the block and its inputs."""
    training: bool

    def forward(self, *args: Any, document_ends: Sequence[int] | None = None, **inputs: Any) -> Any:
        if document_ends is not None:
            # As a tensor its values are not part of the code, unlike those of a list.
            given = torch.tensor(document_ends) if self.training else document_ends
            inputs["document_ends"] = given
        if not self.training:
            return super().forward(*args, **inputs)  # type: ignore[misc]
        return type(self).by_inductor(self, *args, **inputs)


def compile_blocks(model: PreTrainedModel, backend: str = "inductor") -> int:
    """Let the decoder blocks of a model run compiled in training; returns their number.

    Args:
        model: Its classes in `_no_split_modules` are its blocks, as for FSDP.
        backend: Backend of `torch.compile`.
    """
    # Gradients of compiled blocks are reduced as those of others: blocks are smaller than buckets.
    torch._dynamo.config.optimize_ddp = False
    packed_attention.leave_untraced()
    names = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    kinds: dict[type, type] = {}
    for block in found:
        kind = type(block)
        if kind not in kinds:
            compiled = torch.compile(kind.forward, dynamic=True, backend=backend)
            fields = {"by_inductor": staticmethod(compiled), "__module__": kind.__module__}
            kinds[kind] = type(kind.__name__, (CompiledBlock, kind), fields)
        block.__class__ = kinds[kind]
    return len(found)


def compiled() -> Compiled:
    """Count the graphs of this process and its graph breaks."""
    from torch._dynamo.utils import counters

    breaks: dict[str, int] = {}
    for told, count in counters["graph_break"].items():
        named = re.search(r"\(reason: (.+)\)", told)
        short = named[1] if named else told.strip().splitlines()[0]
        breaks[short] = breaks.get(short, 0) + count
    return Compiled(counters["stats"]["unique_graphs"], breaks)
