"""Code over tiles computes the same by every instruction set: AMX's and those of AVX-512.

AMX is emulated in C (`emulated_amx.h`), so that a CPU with AVX-512 alone tests the code for both.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from test_kernels_attention import NEAR, apart, heads, of_each, with_gradients

from finetune.kernels.cpu import tiled_adapters, tiled_attention
from finetune.kernels.cpu.tiled_attention import TiledAttention

EMULATED = ("-include", str(Path(__file__).with_name("emulated_amx.h")))
IN_REGISTERS = ("-mno-amx-bf16", "-mno-amx-tile")

pytestmark = pytest.mark.skipif(
    tiled_attention.reason_against() is not None, reason=str(tiled_attention.reason_against())
)
Built = Callable[[ModuleType, tuple[str, ...]], int]


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What is compiled is kept by its source, which the emulation is no part of."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, own_cache: str) -> Iterator[Built]:
    """Let a module be compiled with more flags; says where it multiplies tiles then."""
    monkeypatch.setenv("FINETUNE_CACHE", own_cache)
    changed: list[ModuleType] = []

    def build(module: ModuleType, flags: tuple[str, ...]) -> int:
        monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, *flags))
        module._library.cache_clear()
        changed.append(module)
        assert module.reason_against() is None
        return module._functions().tiles_of_this_process()

    yield build
    for module in changed:
        module._library.cache_clear()


@pytest.mark.parametrize(("flags", "place"), [(EMULATED, 2), (IN_REGISTERS, 1)], ids=["amx", "avx"])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("size", [64, 40])
def test_attention_has_the_result_and_the_gradients_of_fp32(
    built: Built,
    flags: tuple[str, ...],
    place: int,
    window: int | None,
    cap: float | None,
    size: int,
) -> None:
    assert built(tiled_attention, flags) == place
    given, ends = heads(330, 6, 2, size), [0, 1, 40, 330]
    query, key, value = (each.detach().double().requires_grad_() for each in given)
    how = ends, 0.2, window, cap
    exact = with_gradients(of_each((query, key, value), *how), (query, key, value))
    found = with_gradients(TiledAttention.apply(*given, *how), given)
    for ours, wanted in zip(found, exact, strict=True):
        assert apart(ours, wanted) <= NEAR


def test_adapters_of_emulated_tiles_are_exact(built: Built) -> None:
    """Sums of whole numbers are exact in fp32: what is left is one rounding of each product."""
    assert built(tiled_adapters, EMULATED) == tiled_adapters.IN_TILES
    draw = functools.partial(torch.randint, -9, 10, generator=torch.Generator().manual_seed(0))
    wide, narrow, up = (draw(shape).bfloat16() for shape in ((77, 96), (77, 20), (96, 20)))
    product, outer = tiled_adapters.products(wide, narrow, up)
    assert product is not None
    assert torch.equal(product, (wide.double() @ up.double()).bfloat16())
    assert torch.equal(outer, (narrow.double().T @ wide.double()).bfloat16())
