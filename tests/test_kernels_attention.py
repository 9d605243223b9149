"""Attention over tiles has the result and the gradients of attention in fp32, for every shape."""

import copy
import itertools

import pytest
import tiles
import torch
from conftest import write_recipe
from families import adapt, build, distance, gradients, inputs
from torch import nn
from transformers import AutoTokenizer

from finetune.kernels.cpu import tiled_attention
from finetune.kernels.cpu.attention import DocumentAttention
from finetune.kernels.cpu.tiled_attention import TiledAttention, serves
from finetune.models.model import recompute
from finetune.models.packed_attention import DOCUMENTS, attend, attention_notes
from finetune.runs.run import Run

pytestmark = pytest.mark.skipif(
    tiled_attention.reason_against() is not None, reason=str(tiled_attention.reason_against())
)
AS_EXACT = 1.05
"""Most that it may be farther from fp32 than products whose scores are rounded too."""
AS_EXACT_AS_FUSED = 1.15
"""The same of PyTorch's fused kernel behind a mask, which rounds no scores either."""

ENDS = ([0, 1], [0, 31, 63, 64], [0, 32, 65, 160], [0, 3, 700])
"""Documents shorter and longer than a block of 32 tokens, and than what is there at once."""


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("size", [8, 32, 40, 96, 256])
@pytest.mark.parametrize("groups", [1, 3])
def test_tiled_attention_has_the_result_and_gradients_of_fp32(ends, size, groups):
    given = tiles.heads(ends[-1], 2 * groups, 2, size)
    ours, exact = tiles.assert_near(given, ends, 0.2), tiles.exactly(given, ends, 0.2)
    products = tiles.with_gradients(DocumentAttention.apply(*given, ends, 0.2), given)
    for found, other, wanted in zip(ours, products, exact, strict=True):
        if wanted.norm() > 1e-3:  # one token has no gradient of its scores
            assert tiles.apart(found, wanted) <= AS_EXACT * tiles.apart(other, wanted)


def test_a_document_longer_than_all_scores_that_are_there_at_once():
    tiles.assert_near(tiles.heads(1100, 1, 1, 32), [0, 1100], 2.0)  # weights of a few keys


@pytest.mark.parametrize("window", [1, 31, 32, 33, 100, 513, 700])
@pytest.mark.parametrize("size", [24, 64])
def test_a_token_sees_its_window_alone(window, size):
    given, ends = tiles.heads(800, 6, 2, size), [0, 20, 100, 800]
    before = tiles.assert_near(given, ends, 0.2, window)[0]
    with torch.no_grad():
        for each in given[1:]:
            each[:, :, 100] = 1e4  # seen by itself and those after it, as far as the window
    after = TiledAttention.apply(*given, ends, 0.2, window)
    assert torch.equal(before[:, :, 100 + window :], after[:, :, 100 + window :])
    assert not torch.equal(before[:, :, 99 + window], after[:, :, 99 + window])


@pytest.mark.parametrize("cap", [0.5, 50.0])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_scores_are_capped(ends, window, cap):
    tiles.assert_near(tiles.heads(ends[-1], 6, 2, 64), ends, 0.2, window, cap)


def test_a_score_beyond_every_number_is_the_cap():
    given = tiles.heads(70, 2, 1, 32)
    with torch.no_grad():
        given[0][:] = 1e30
        given[1][:] = torch.where(torch.rand(1, 1, 70, 1) < 0.5, 1e30, -1e30)
    query, key, value = (each.detach().float().requires_grad_() for each in given)
    exact = tiles.of_each((query, key.clamp(-10, 10), value), [0, 70], 1.0, None, 2.0)
    assert tiles.apart(tiles.tiled(given, [0, 70], 1.0, None, 2.0)[0], exact.double()) <= tiles.NEAR


def test_documents_have_the_bits_of_each_alone_and_ignore_a_longer_window():
    given, ends = tiles.heads(300, 6, 2, 64), [0, 1, 40, 300]
    together = tiles.tiled(given, ends, 0.4)
    assert all(map(torch.equal, together, tiles.tiled(given, ends, 0.4, 260)))
    torch.manual_seed(1)
    grad = torch.randn(together[0].shape).bfloat16()
    for start, end in itertools.pairwise(ends):
        alone = tuple(each[:, :, start:end].detach().requires_grad_() for each in given)
        mixed = TiledAttention.apply(*alone, [0, end - start], 0.4)
        found = [mixed, *torch.autograd.grad(mixed, alone, grad[:, :, start:end])]
        for all_of_it, of_part in zip(together, found, strict=True):
            assert torch.equal(all_of_it[:, :, start:end], of_part)


def test_a_later_token_changes_nothing_before_it():
    given = tiles.heads(100, 2, 1, 32)
    before = TiledAttention.apply(*given, [0, 100], 0.2)
    with torch.no_grad():
        for each in given:
            each[:, :, 50:] = 1e4
    after = TiledAttention.apply(*given, [0, 100], 0.2)
    assert torch.equal(before[:, :, :50], after[:, :, :50])
    assert not torch.equal(before[:, :, 50:], after[:, :, 50:])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nan_inputs_stay_nan(wrong):
    given = tiles.heads(70, 2, 1, 32)
    with torch.no_grad():
        given[0][0, 1, 40, 3] = wrong
    found = tiles.tiled(given, [0, 70], 0.2)
    assert found[0][0, 1, 40].isnan().all()
    assert found[0][0, 0].isfinite().all()
    assert found[1][0, 1, 40].isnan().any()


def test_several_threads_compute_the_same_bits():
    given, threads = tiles.heads(260, 6, 3, 64), torch.get_num_threads()
    try:
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(tiles.tiled(given, [0, 100, 260], 0.2))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))


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
    assert all(map(torch.equal, by_ones, torch.autograd.grad(again, moved, torch.ones_like(again))))


def test_products_of_torch_between_have_their_own_tiles() -> None:
    """Its library and this one say in turn how large the tiles of a thread are."""
    first, second = torch.randn(2, 40, 72).bfloat16()
    given, wanted = tiles.heads(64, 2, 1, 32), first @ second.T
    before = TiledAttention.apply(*given, [0, 64], 0.2)
    for _ in range(3):
        assert torch.equal(first @ second.T, wanted)
        assert torch.equal(TiledAttention.apply(*given, [0, 64], 0.2), before)


@pytest.mark.parametrize(
    ("size", "dtype", "served"),
    [(64, torch.bfloat16, True), (48, torch.bfloat16, True), (64, torch.float16, False)],
)
def test_heads_in_bf16_are_served(size: int, dtype: torch.dtype, served: bool) -> None:
    assert serves(torch.zeros(1, 2, 5, size, dtype=dtype)) is served


@pytest.mark.parametrize("window", [None, 40])
def test_a_pack_is_one_operation(compiling, window):
    given, ends = tiles.heads(90, 2, 1, 32), [0, 10, 90]
    with tiles.Operations() as operations:
        mixed, _ = attend(
            nn.Module(), *given, None, max_length_q=80, scaling=0.2, sliding_window=window,
            cu_seq_lens_q=torch.tensor(ends, dtype=torch.int32),
        )  # fmt: skip
    assert operations.tiled == 1
    assert torch.equal(mixed.transpose(1, 2), TiledAttention.apply(*given, ends, 0.2, window))


WIDER = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def packed_inputs() -> dict[str, torch.Tensor | int]:
    """Three documents in one row."""
    ids = inputs()["input_ids"].flatten()[None]
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


WINDOW = {"sliding_window": 20}
TRAINED = [
    ("llama", {}), ("qwen3", {}), ("mistral", {}), ("mistral", WINDOW),
    ("gemma2", WINDOW | {"attn_logit_softcapping": 2.0}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields"), TRAINED)
@pytest.mark.parametrize("keep", [None, "attention", True], ids=str)
def test_a_model_trains_as_near_to_fp32_as_by_products(request, kind, fields, keep):
    products = adapt(build(kind, **WIDER, **fields)).bfloat16()
    products.get_base_model().set_attn_implementation(DOCUMENTS)
    tiled, exact = copy.deepcopy(products), packed_gradients(copy.deepcopy(products).float())
    theirs = packed_gradients(products)
    if keep is not None:
        recompute(tiled.get_base_model(), keep)
        tiled.train()
    request.getfixturevalue("compiling")
    with tiles.Operations() as operations:
        ours = packed_gradients(tiled)
    assert operations.tiled == (2 if keep is True else 1) * 2  # layers
    farther = AS_EXACT_AS_FUSED if fields else AS_EXACT
    assert distance(ours, exact) <= farther * distance(theirs, exact)


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        ("llama", WIDER, ""), ("llama", {}, ""), ("gemma2", WIDER, ""),
        ("qwen3", WIDER | {"head_dim": 48}, ""), ("mistral", WIDER | {"sliding_window": 40}, ""),
        ("llama", WIDER | {"attention_dropout": 0.1}, "it does not drop weights"),
    ],
)  # fmt: skip
def test_the_fallback_reason_is_reported(compiling, kind, fields, told):
    config = build(kind, **fields).config
    products = "PyTorch's matrix products for each document"
    instead = f"model.attention: {products}, not one pass over tiles"
    assert attention_notes(config, "bf16", 41) == ([f"{instead}: {told}"] if told else [])


@pytest.mark.slow
def test_packs_train_equally_on_one_process_and_in_shards(tiny, finetune, tmp_path):
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
    losses: list[list[float]] = []
    for backend, how in (
        ("single", "eager"), ("single", "compiled"), ("fsdp_full_shard", "compiled"),
    ):  # fmt: skip
        recipe = write_recipe(tmp_path / "r.json", fields | {"kernels": {"pointwise": how}})
        done = finetune(
            "launch", recipe, "--backend", backend, "--precision", "bf16", "--output",
            tmp_path / f"{backend}-{how}", "--processes", 1 if backend == "single" else 2,
        ).passed()  # fmt: skip
        assert ("kernels.pointwise: compiled" in done.output) == (how == "compiled")
        assert "model.attention:" not in done.output
        run = Run(tmp_path / f"{backend}-{how}")
        losses.append([step["loss"] for step in run.read_metrics("train")])
    first, *others = losses
    assert all(each[0] != first[0] for each in others)  # scores are rounded in another place
    for found in others:
        assert found == pytest.approx(others[0], rel=1e-4)
        assert found == pytest.approx(first, rel=1e-2)
