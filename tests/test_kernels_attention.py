"""Attention over tiles has the result and the gradients of attention in fp32, for every shape."""

import copy
import itertools
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finetune, Tiny, write_recipe
from families import adapt, build, distance, gradients, inputs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer

from finetune.kernels import chains
from finetune.kernels.cpu import tiled_attention
from finetune.kernels.cpu.attention import DocumentAttention, attention_of_documents
from finetune.kernels.cpu.compiler import compiled
from finetune.kernels.cpu.tiled_attention import TiledAttention, serves
from finetune.models.model import recompute
from finetune.models.packed_attention import DOCUMENTS, attend, attention_notes
from finetune.runs.run import Run

needs_tiles = pytest.mark.skipif(
    tiled_attention.reason_against() is not None, reason=str(tiled_attention.reason_against())
)
NEAR = 6e-3
"""Relative, of a tensor: weights and their gradients are rounded to the 8 bits of bf16."""
AS_EXACT = 1.05
"""Most that it may be farther from fp32 than products whose scores are rounded too."""
AS_EXACT_AS_FUSED = 1.15
"""The same of PyTorch's fused kernel behind a mask, which rounds no scores either."""

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def compiling() -> Iterator[None]:
    chains.compile_chains(True)
    yield
    chains.compile_chains(False)


def heads(tokens: int, query_heads: int, key_heads: int, size: int) -> Heads:
    """As projections make them.  # (1, heads, tokens, size) each"""
    torch.manual_seed(tokens + size)
    made = [
        torch.randn(1, tokens, count, size).bfloat16().transpose(1, 2).requires_grad_()
        for count in (query_heads, key_heads, key_heads)
    ]
    return made[0], made[1], made[2]


def of_each(
    given: Heads,
    ends: list[int],
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """Attention of each document by itself, in the type of what is given."""
    parts: list[torch.Tensor] = []
    for start, end in itertools.pairwise(ends):
        query, key, value = (each[:, :, start:end] for each in given)
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        scores = query @ key.transpose(2, 3) * scale
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        every = torch.ones(scores.shape[2:], dtype=torch.bool)
        unseen = every.triu(1) | every.tril(-(window or end - start))
        parts.append(scores.masked_fill(unseen, -torch.inf).softmax(-1) @ value)
    return torch.cat(parts, 2)


def with_gradients(mixed: torch.Tensor, given: Heads) -> list[torch.Tensor]:
    torch.manual_seed(1)
    grad = torch.randn(mixed.shape).bfloat16().to(mixed.dtype)
    return [mixed.detach(), *torch.autograd.grad(mixed, given, grad)]


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-2))


ENDS = ([0, 1], [0, 31, 63, 64], [0, 32, 65, 160], [0, 3, 700])
"""Documents shorter and longer than a block of 32 tokens, and than what is there at once."""


@needs_tiles
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("size", [8, 32, 40, 64, 80, 96, 256])
@pytest.mark.parametrize("groups", [1, 3])
def test_tiled_attention_has_the_result_and_gradients_of_fp32(
    ends: list[int], size: int, groups: int
) -> None:
    given = heads(ends[-1], 2 * groups, 2, size)
    query, key, value = (each.detach().double().requires_grad_() for each in given)
    exact = with_gradients(of_each((query, key, value), ends, 0.2), (query, key, value))
    ours = with_gradients(TiledAttention.apply(*given, ends, 0.2), given)
    products = with_gradients(DocumentAttention.apply(*given, ends, 0.2), given)
    for found, other, wanted in zip(ours, products, exact, strict=True):
        assert apart(found, wanted) <= NEAR
        if wanted.norm() > 1e-3:  # one token has no gradient of its scores
            assert apart(found, wanted) <= AS_EXACT * apart(other, wanted)


@needs_tiles
def test_a_document_longer_than_all_scores_that_are_there_at_once() -> None:
    given = heads(1100, 1, 1, 32)
    wide = tuple(each.detach().double().requires_grad_() for each in given)
    exact = with_gradients(of_each(wide, [0, 1100], 2.0), wide)  # weights of a few keys
    for found, wanted in zip(
        with_gradients(TiledAttention.apply(*given, [0, 1100], 2.0), given), exact, strict=True
    ):
        assert apart(found, wanted) <= NEAR


@needs_tiles
@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 64, 100, 511, 513, 699, 700])
@pytest.mark.parametrize("size", [24, 64])
def test_a_token_sees_its_window_alone(window: int, size: int) -> None:
    given, ends = heads(800, 6, 2, size), [0, 20, 100, 800]
    query, key, value = (each.detach().double().requires_grad_() for each in given)
    exact = with_gradients(of_each((query, key, value), ends, 0.2, window), (query, key, value))
    ours = with_gradients(TiledAttention.apply(*given, ends, 0.2, window), given)
    for found, wanted in zip(ours, exact, strict=True):
        assert apart(found, wanted) <= NEAR
    with torch.no_grad():
        for each in given[1:]:
            each[:, :, 100] = 1e4  # seen by itself and those after it, as far as the window
    before, after = ours[0], TiledAttention.apply(*given, ends, 0.2, window)
    assert torch.equal(before[:, :, 100 + window :], after[:, :, 100 + window :])
    assert not torch.equal(before[:, :, 99 + window], after[:, :, 99 + window])


@needs_tiles
@pytest.mark.parametrize("cap", [0.5, 3.0, 50.0])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_scores_are_capped(ends: list[int], window: int | None, cap: float) -> None:
    given = heads(ends[-1], 6, 2, 64)
    query, key, value = (each.detach().double().requires_grad_() for each in given)
    how = ends, 0.2, window, cap
    exact = with_gradients(of_each((query, key, value), *how), (query, key, value))
    for found, wanted in zip(
        with_gradients(TiledAttention.apply(*given, *how), given), exact, strict=True
    ):
        assert apart(found, wanted) <= NEAR


@needs_tiles
def test_a_score_beyond_every_number_is_the_cap() -> None:
    given = heads(70, 2, 1, 32)
    with torch.no_grad():
        given[0][:] = 1e30
        given[1][:] = torch.where(torch.rand(1, 1, 70, 1) < 0.5, 1e30, -1e30)
    query, key, value = (each.detach().float().requires_grad_() for each in given)
    exact = of_each((query, key.clamp(-10, 10), value), [0, 70], 1.0, None, 2.0)
    found = with_gradients(TiledAttention.apply(*given, [0, 70], 1.0, None, 2.0), given)
    assert apart(found[0], exact.double()) <= NEAR


@needs_tiles
def test_a_window_longer_than_a_document_is_ignored() -> None:
    given, ends = heads(300, 6, 2, 64), [0, 1, 40, 300]
    every = with_gradients(TiledAttention.apply(*given, ends, 0.4), given)
    windowed = with_gradients(TiledAttention.apply(*given, ends, 0.4, 260), given)
    assert all(map(torch.equal, every, windowed))


@needs_tiles
def test_concatenated_documents_have_the_bits_of_each_alone() -> None:
    given, ends = heads(300, 6, 2, 64), [0, 1, 40, 300]
    together = with_gradients(TiledAttention.apply(*given, ends, 0.4), given)
    torch.manual_seed(1)
    grad = torch.randn(together[0].shape).bfloat16()
    for start, end in itertools.pairwise(ends):
        alone = tuple(each[:, :, start:end].detach().requires_grad_() for each in given)
        mixed = TiledAttention.apply(*alone, [0, end - start], 0.4)
        found = [mixed, *torch.autograd.grad(mixed, alone, grad[:, :, start:end])]
        for all_of_it, of_part in zip(together, found, strict=True):
            assert torch.equal(all_of_it[:, :, start:end], of_part)


@needs_tiles
def test_a_later_token_changes_nothing_before_it() -> None:
    given = heads(100, 2, 1, 32)
    before = TiledAttention.apply(*given, [0, 100], 0.2)
    with torch.no_grad():
        for each in given:
            each[:, :, 50:] = 1e4
    after = TiledAttention.apply(*given, [0, 100], 0.2)
    assert torch.equal(before[:, :, :50], after[:, :, :50])
    assert not torch.equal(before[:, :, 50:], after[:, :, 50:])


@needs_tiles
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nan_inputs_stay_nan(wrong: float) -> None:
    given = heads(70, 2, 1, 32)
    with torch.no_grad():
        given[0][0, 1, 40, 3] = wrong
    found = with_gradients(TiledAttention.apply(*given, [0, 70], 0.2), given)
    assert found[0][0, 1, 40].isnan().all()
    assert found[0][0, 0].isfinite().all()
    assert found[1][0, 1, 40].isnan().any()


@needs_tiles
def test_several_threads_compute_the_same_bits() -> None:
    given, threads = heads(260, 6, 3, 64), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = with_gradients(TiledAttention.apply(*given, [0, 100, 260], 0.2), given)
        torch.set_num_threads(2)
        both = with_gradients(TiledAttention.apply(*given, [0, 100, 260], 0.2), given)
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, alone, both))


@needs_tiles
def test_heads_may_have_any_strides() -> None:
    """Parts of one projection, heads before tokens, and a gradient that is one number."""
    whole = torch.randn(1, 50, 3, 2, 32).bfloat16()
    query, key, value = (whole[:, :, place].transpose(1, 2) for place in range(3))
    ours = TiledAttention.apply(query, key, value, [0, 50], 0.2)
    moved = tuple(each.contiguous().requires_grad_() for each in (query, key, value))
    again = TiledAttention.apply(*moved, [0, 50], 0.2)
    assert torch.equal(ours, again)
    by_ones = torch.autograd.grad(again.sum(), moved)
    again = TiledAttention.apply(*moved, [0, 50], 0.2)
    wanted = torch.autograd.grad(again, moved, torch.ones_like(again))
    assert all(map(torch.equal, by_ones, wanted))


@needs_tiles
def test_products_of_torch_between_have_their_own_tiles() -> None:
    """Its library and this one say in turn how large the tiles of a thread are."""
    first, second = torch.randn(2, 40, 72).bfloat16()
    given, wanted = heads(64, 2, 1, 32), first @ second.T
    before = TiledAttention.apply(*given, [0, 64], 0.2)
    for _ in range(3):
        assert torch.equal(first @ second.T, wanted)
        assert torch.equal(TiledAttention.apply(*given, [0, 64], 0.2), before)


# Where it is used.


@needs_tiles
@pytest.mark.parametrize(
    ("size", "dtype", "served"),
    [(64, torch.bfloat16, True), (48, torch.bfloat16, True), (64, torch.float16, False)],
)
def test_heads_in_bf16_are_served(size: int, dtype: torch.dtype, served: bool) -> None:
    assert serves(torch.zeros(1, 2, 5, size, dtype=dtype)) is served


class Operations(TorchDispatchMode):
    """Counts attentions over tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.tiled = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.tiled += "document_attention" in str(func)
        return func(*args, **(kwargs or {}))


@needs_tiles
def test_a_pack_is_one_operation(compiling: None) -> None:
    with Operations() as operations:
        attend(
            nn.Module(), *heads(40, 2, 1, 32), None, max_length_q=40,
            cu_seq_lens_q=torch.tensor([0, 10, 40], dtype=torch.int32),
        )  # fmt: skip
    assert operations.tiled == 1


@needs_tiles
def test_a_pack_of_layers_with_windows_is_one_operation(compiling: None) -> None:
    given, ends = heads(90, 2, 1, 32), [0, 10, 90]
    with Operations() as operations:
        mixed, _ = attend(
            nn.Module(), *given, None, max_length_q=80, scaling=0.2, sliding_window=40,
            cu_seq_lens_q=torch.tensor(ends, dtype=torch.int32),
        )  # fmt: skip
    assert operations.tiled == 1
    assert torch.equal(mixed.transpose(1, 2), TiledAttention.apply(*given, ends, 0.2, 40))


def test_where_nothing_is_compiled_it_is_not_used() -> None:
    with Operations() as operations:
        attention_of_documents(*heads(40, 2, 1, 32), [0, 40], 0.2)
    assert operations.tiled == 0


WIDER = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def packed_inputs() -> dict[str, torch.Tensor | int]:
    """Three documents in one row."""
    given = inputs()
    ids = given["input_ids"].flatten()[None]
    ends, length = [0, 3, 9, ids.shape[1]], ids.shape[1]
    places = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(ends)])
    ends_there = torch.tensor(ends, dtype=torch.int32)
    return {
        "input_ids": ids, "labels": ids, "position_ids": places[None],
        "cu_seq_lens_q": ends_there, "cu_seq_lens_k": ends_there,
        "max_length_q": length, "max_length_k": length,
    }  # fmt: skip


def packed_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model(**packed_inputs()).loss.backward()
    return gradients(model)


@needs_tiles
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("mistral", {}),
        ("mistral", {"sliding_window": 20}),
        ("gemma2", {"sliding_window": 20, "attn_logit_softcapping": 2.0}),
    ],
)
@pytest.mark.parametrize("keep", [None, "attention", True], ids=str)
def test_a_model_trains_as_near_to_fp32_as_by_products(
    kind: str, fields: dict[str, int], keep: str | bool | None
) -> None:
    products = adapt(build(kind, **WIDER, **fields)).bfloat16()
    products.get_base_model().set_attn_implementation(DOCUMENTS)
    tiled, exact = copy.deepcopy(products), packed_gradients(copy.deepcopy(products).float())
    theirs = packed_gradients(products)
    if keep is not None:
        recompute(tiled.get_base_model(), keep)
        tiled.train()
    chains.compile_chains(True)
    try:
        with Operations() as operations:
            ours = packed_gradients(tiled)
    finally:
        chains.compile_chains(False)
    assert operations.tiled == (2 if keep is True else 1) * 2  # layers
    farther = AS_EXACT_AS_FUSED if fields else AS_EXACT
    assert distance(ours, exact) <= farther * distance(theirs, exact)


@needs_tiles
@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        ("llama", WIDER, ""),
        ("llama", {}, ""),
        ("gemma2", WIDER, ""),
        ("llama", WIDER | {"attention_dropout": 0.1}, "it does not drop weights"),
        ("qwen3", WIDER | {"head_dim": 48}, ""),
        ("mistral", WIDER | {"sliding_window": 40}, ""),
    ],
)
def test_the_fallback_reason_is_reported(
    compiling: None, kind: str, fields: dict[str, int], told: str
) -> None:
    config = build(kind, **fields).config
    products = "PyTorch's matrix products for each document"
    instead = f"model.attention: {products}, not one pass over tiles"
    assert attention_notes(config, "bf16", 41) == ([f"{instead}: {told}"] if told else [])


BEHIND = "model.attention: documents of more than {} tokens need a mask, because a layer has a "
BEHIND += "sliding window"
WRITTEN = "model.attention: scores are stored for each document, because they are capped"


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs have a kernel with windows")
@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        ("llama", {}, None),
        ("mistral", {"sliding_window": 40}, BEHIND.format(40)),
        ("gemma2", {"sliding_window": 40, "attn_logit_softcapping": None}, BEHIND.format(40)),
        ("gemma2", {"sliding_window": 40}, WRITTEN),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}, None),
        (
            "qwen2",
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
            BEHIND.format(9),
        ),
    ],
)
def test_unsupported_attention_is_reported(
    kind: str, fields: dict[str, Any], told: str | None
) -> None:
    config = build(kind, **fields).config
    for precision in ("fp32", "bf16"):
        assert attention_notes(config, precision, 41) == ([told] if told else [])
    assert attention_notes(config, "fp32", 9) == ([told] if told == WRITTEN else [])


@needs_tiles
@pytest.mark.slow
def test_packs_train_equally_on_every_backend(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    """A pack has the same bits wherever it is; only sums over packs are in another order."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    build("llama", **WIDER, vocab_size=len(tokenizer), max_position_embeddings=256).save_pretrained(
        tmp_path / "model"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    fields = tiny.fields(
        model={"name": str(tmp_path / "model")}, adapter={"r": 4},
        batch={"rows": 4, "micro_rows": 1, "packing": True},
    )  # fmt: skip
    losses: dict[str, list[float]] = {}
    for backend, how in (
        ("single", "eager"), ("single", "compiled"), ("ddp", "compiled"),
        ("fsdp_full_shard", "compiled"),
    ):  # fmt: skip
        recipe = write_recipe(tmp_path / "r.json", fields | {"kernels": {"pointwise": how}})
        place = tmp_path / f"{backend}-{how}"
        done = finetune(
            "launch", recipe, "--backend", backend, "--precision", "bf16",
            "--processes", "1" if backend == "single" else "2", "--output", place,
        )  # fmt: skip
        assert done.status == 0, done.output
        assert ("kernels.pointwise: compiled" in done.output) == (how == "compiled")
        assert "model.attention:" not in done.output
        losses[place.name] = [step["loss"] for step in Run(place).read_metrics("train")]
    first, *others = losses.values()
    assert all(each[0] != first[0] for each in others)  # scores are rounded in another place
    for found in others:
        assert found == pytest.approx(others[0], rel=1e-4)
        assert found == pytest.approx(first, rel=1e-2)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tiles are of x86-64")
def test_without_tiles_it_compiles_and_reports_it() -> None:
    without = compiled(tiled_attention.SOURCE, [*tiled_attention.FLAGS, "-mno-avx512bf16"])
    assert without.tiles_of_this_process() == 0
