"""Code over tiles computes the same by every instruction set: AMX's and those of AVX-512.

AMX is emulated in C (`emulated_amx.h`), so that a CPU with AVX-512 alone tests the code for both.
"""

import functools
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from families import build
from tiles import Operations, assert_near, heads

from finetune.kernels.cpu import tiled_adapters, tiled_attention
from finetune.kernels.cpu.attention import attention_of_documents
from finetune.kernels.cpu.compiler import compiled
from finetune.models.packed_attention import attention_notes

EMULATED = ("-include", str(Path(__file__).with_name("emulated_amx.h")))
IN_REGISTERS = ("-mno-amx-bf16", "-mno-amx-tile")

needs_tiles = pytest.mark.skipif(
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


@needs_tiles
@pytest.mark.parametrize(("flags", "place"), [(EMULATED, 2), (IN_REGISTERS, 1)], ids=["amx", "avx"])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("size", [64, 40])
def test_attention_has_the_result_and_the_gradients_of_fp32(built, flags, place, window, cap, size):
    assert built(tiled_attention, flags) == place
    given, ends = heads(330, 6, 2, size), [0, 1, 40, 330]
    assert_near(given, ends, 0.2, window, cap)


@needs_tiles
def test_adapters_of_emulated_tiles_are_exact(built: Built) -> None:
    """Sums of whole numbers are exact in fp32: what is left is one rounding of each product."""
    assert built(tiled_adapters, EMULATED) == tiled_adapters.IN_TILES
    draw = functools.partial(torch.randint, -9, 10, generator=torch.Generator().manual_seed(0))
    wide, narrow, up = (draw(shape).bfloat16() for shape in ((77, 96), (77, 20), (96, 20)))
    product, outer = tiled_adapters.products(wide, narrow, up)
    assert torch.equal(product, (wide.double() @ up.double()).bfloat16())
    assert torch.equal(outer, (narrow.double().T @ wide.double()).bfloat16())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tiles are of x86-64")
@pytest.mark.parametrize("module", [tiled_attention, tiled_adapters])
def test_without_tiles_it_compiles_and_reports_it(module):
    assert compiled(module.SOURCE, [*module.FLAGS, "-mno-avx512bf16"]).tiles_of_this_process() == 0


def test_where_nothing_is_compiled_it_is_not_used() -> None:
    with Operations() as operations:
        attention_of_documents(*heads(40, 2, 1, 32), [0, 40], 0.2)
    assert operations.tiled == 0


BEHIND = "model.attention: documents of more than {} tokens need a mask, because a layer has a "
BEHIND += "sliding window"
WRITTEN = "model.attention: scores are stored for each document, because they are capped"

USED = {"sliding_window": 9, "use_sliding_window": True}


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs have a kernel with windows")
@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        ("llama", {}, None),
        ("mistral", {"sliding_window": 40}, BEHIND.format(40)),
        ("gemma2", {"sliding_window": 40, "attn_logit_softcapping": None}, BEHIND.format(40)),
        ("gemma2", {"sliding_window": 40}, WRITTEN),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": False}, None),
        ("qwen2", {**USED, "max_window_layers": 2}, None),
        ("qwen2", {**USED, "max_window_layers": 1}, BEHIND.format(9)),
    ],
)
def test_unsupported_attention_is_reported(kind, fields, told):
    config = build(kind, **fields).config
    for precision in ("fp32", "bf16"):
        assert attention_notes(config, precision, 41) == ([told] if told else [])
    assert attention_notes(config, "fp32", 9) == ([told] if told == WRITTEN else [])
