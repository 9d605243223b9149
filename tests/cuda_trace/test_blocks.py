"""Compiled blocks under CUDA's autocast become Triton code that calls the one kernel.

Only the forward pass: PyTorch derives a backward pass only for a GPU that is there.
"""

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch
from test_chains import gpu as generation
from torch._dynamo import utils as dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from traced import autocast, built, fake_batch, gpu, recipe_of

from finetune.methods.losses import token_loss_sum
from finetune.models import model
from finetune.models.compiled_blocks import Compiled, compiled
from finetune.planner import plan
from finetune.recipe import Kernels

__all__ = ["generation"]


class Captured:
    """A backend of `torch.compile` that runs each graph as it was traced."""

    def __init__(self) -> None:
        self.code: list[str] = []
        """What TorchInductor makes of each graph."""

    def __call__(self, graph: torch.fx.GraphModule, given: list[Any]) -> Any:
        decompositions = select_decomp_table()
        return aot_autograd(fw_compiler=self.keep, decompositions=decompositions)(graph, given)

    def keep(self, graph: torch.fx.GraphModule, given: list[Any]) -> Any:
        mode = detect_fake_mode(given)
        lowering = GraphLowering(graph, given, shape_env=mode.shape_env, is_inference=True)
        debug, handler = V.set_debug_handler(DebugContext()), V.set_graph_handler(lowering)
        with debug, handler, V.set_fake_mode(mode):
            lowering.run(*given)
            code = lowering.codegen()[0]
        self.code.append(getattr(code, "value", str(code)))
        return graph.forward


@pytest.mark.parametrize(("adapter", "most"), [(False, 10), (True, 13)], ids=["full", "lora"])
@pytest.mark.parametrize(("kind", "graphs"), [("llama", 1), ("phi3", 1), ("qwen3", 2)])
def test_compiled_blocks_share_a_graph_that_calls_the_one_kernel(
    kind, graphs, adapter, most, generation, monkeypatch
):
    """The layers of Qwen3 with a window, of which there is one here, are another graph."""
    torch._dynamo.reset()
    dynamo.counters.clear()
    captured = Captured()
    monkeypatch.setattr(
        model, "compile_blocks", functools.partial(model.compile_blocks, backend=captured)
    )
    recipe = recipe_of(kind, adapter, "packs")
    recipe = dataclasses.replace(recipe, kernels=Kernels(blocks="compiled"))
    settled = plan(recipe, "single", 1, "bf16")
    with gpu(torch.cuda.get_device_capability()):
        batch = fake_batch("packs")
        _, trained = built(settled)
        with autocast(True), torch.no_grad():
            token_loss_sum(trained, batch)
    assert compiled() == Compiled(graphs, {})
    assert len(captured.code) == graphs
    for code in captured.code:
        assert len(re.findall(r"torch\.ops\.\w+\._varlen_attn\.default\(", code)) == 1
        assert 1 <= len(re.findall(r"def triton_\w+\(", code)) <= most
