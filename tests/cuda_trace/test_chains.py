"""Every chain of cheap operations becomes Triton code for each generation of GPUs."""

import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from finetune.kernels import activation, chunked_loss, norm, rotary

TOKENS, HIDDEN, WIDTH, VOCABULARY = 8192, 4096, 14336, 128_256


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def wide(count: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: tuple(empty(TOKENS, WIDTH) for _ in range(count))


def hidden() -> tuple[torch.Tensor, ...]:
    return empty(TOKENS, HIDDEN), empty(HIDDEN)


def tile() -> tuple[torch.Tensor, ...]:
    return empty(256, VOCABULARY), empty(256, dtype=torch.int64)


def of_kind(of: str, gemma: bool) -> dict[str, Any]:
    """Chains that Gemma has with other numbers."""
    gradients = activation.gated_gradients
    return {
        f"norm{of}": (lambda x, w: norm.normed.eager(x, w, 1e-6, gemma), hidden, 1),
        f"gate{of}": (lambda g, u: activation.gated.eager(g, u, gemma), wide(2), 1),
        f"gate's gradient{of}": (lambda g, u, by: gradients.eager(g, u, by, gemma), wide(3), 1),
    }


LOSS = chunked_loss.tile_loss.eager
CHAINS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]], int]] = {
    **of_kind("", gemma=False),
    **of_kind(" of Gemma", gemma=True),
    "norm's gradient": (
        lambda x, g, i, w: norm.norm_gradients.eager(x, g, i, w, False, True, False),
        lambda: (
            empty(TOKENS, HIDDEN), empty(TOKENS, HIDDEN), empty(TOKENS, 1, dtype=torch.float32),
            empty(HIDDEN),
        ), 1,
    ),
    "rotation": (
        rotary.rotated.eager,
        lambda: (
            empty(TOKENS, 32, 128), empty(TOKENS, 8, 128), empty(TOKENS, 1, 128),
            empty(TOKENS, 1, 128),
        ), 2,
    ),
    "head": (lambda *given: LOSS(*given, None, 1.0, None, True), tile, 6),
    "head with soft caps, a scale and a bias": (
        lambda *given: LOSS(*given, 0.5, 30.0, True), lambda: (*tile(), empty(VOCABULARY)), 7,
    ),
    "head of log-probabilities with entropies": (
        lambda *given: LOSS(*given, None, 1.0, None, True, True), tile, 7,
    ),
    "head of log-probabilities": (lambda *given: LOSS(*given, None, 1.0, None, False), tile, 5),
}  # fmt: skip
"""Each with its tensors, and the kernels that it may take at most."""


class Driver:
    """Triton's driver of a GPU that is not there."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def is_active(self) -> bool:
        return True

    def get_benchmarker(self) -> None:
        return None


@pytest.fixture(params=[(8, 0), (9, 0), (10, 0)], ids=["8.0", "9.0", "10.0"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch and Triton are told of a GPU of a generation."""
    major, minor = request.param
    about = types.SimpleNamespace(
        name="GPU", major=major, minor=minor, multi_processor_count=132, warp_size=32,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        max_threads_per_block=1024, total_memory=80 << 30, L2_cache_size=50 << 20,
        shared_memory_per_multiprocessor=233472, shared_memory_per_block_optin=166912,
        gcnArchName="",
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_, **__: about)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, **__: (major, minor))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    capability = staticmethod(lambda *_, **__: major * 10 + minor)
    monkeypatch.setattr(CudaInterface, "get_compute_capability", capability)
    properties = staticmethod(lambda *_, **__: about)
    for interface in (CudaInterface, CudaInterface.Worker):
        monkeypatch.setattr(interface, "get_device_properties", properties)
    monkeypatch.setattr(
        CudaInterface, "raise_if_triton_unavailable", staticmethod(lambda *_, **__: None),
        raising=False,
    )  # fmt: skip
    monkeypatch.setattr(scheduler, "has_triton", lambda *_: True)
    driver.set_active(Driver((major, minor)))
    DeviceProperties.create.cache_clear()
    with config.patch(compile_threads=1):
        yield


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_becomes_a_few_kernels(name, gpu, monkeypatch):
    monkeypatch.setattr(chunked_loss, "is_traced", lambda: True)
    function, make, most = CHAINS[name]
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    with mode, torch.no_grad():
        given = make()
        functional = torch.func.functionalize(function, remove="mutations_and_views")
        traced = make_fx(functional, select_decomp_table(), "fake")(*given)
        graph = GraphLowering(traced, list(given), shape_env=shapes, is_inference=True)
        debug, lowering = V.set_debug_handler(DebugContext()), V.set_graph_handler(graph)
        with debug, lowering, V.set_fake_mode(mode):
            graph.run(*given)
            code = graph.codegen()[0]
    assert 1 <= len(re.findall(r"def (triton_\w+)\(", getattr(code, "value", str(code)))) <= most
