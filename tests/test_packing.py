"""Documents that share a slot fill it, and train exactly as they train alone."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import FIELDS, SIZES
from documents import documents, packs
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from finetune.backend import load
from finetune.data.rows.collate import MicroBatch, collate
from finetune.data.rows.packing import pack
from finetune.data.rows.store import Rows
from finetune.errors import FinetuneError
from finetune.kernels import pointwise
from finetune.kernels.cpu.attention import DocumentAttention, serves
from finetune.kernels.head import give_loss
from finetune.methods.losses import token_loss_sum
from finetune.methods.sft import SFT
from finetune.models.model import recompute
from finetune.models.network import causal
from finetune.models.packed_attention import DOCUMENTS, attend, implementation, layout
from finetune.models.recurrence import separate_documents
from finetune.planner import rules
from finetune.planner.families import FAMILIES, family_of
from finetune.planner.kernels import SCORE_BLOCK
from finetune.planner.padding import Padding, padding
from finetune.planner.request import Request
from finetune.planner.shapes.config_files import decoder_fields, fields_of
from finetune.recipe import Model


def slots_of(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    members, bounds = pack(np.array(lengths, dtype=np.int64), capacity)
    return [part.tolist() for part in np.split(members, bounds[1:-1])]


def one_by_one(lengths: Sequence[int], capacity: int) -> list[int]:
    """Tokens of each slot after best-fit decreasing, placed one document at a time."""
    slots = list[int]()
    for length in sorted(lengths, reverse=True):
        fitting = [slot for slot in slots if slot + length <= capacity]
        if fitting:
            slots.remove(max(fitting))
        slots.append(max(fitting, default=0) + length)
    return sorted(slots)


def test_the_longest_documents_come_first_and_each_goes_where_least_room_is_left():
    assert slots_of([2, 5, 3, 6, 4], 8) == [[3, 0], [1, 2], [4]]
    assert (slots_of([4, 4, 4, 4, 4], 8), slots_of([8], 8)) == ([[0, 1], [2, 3], [4]], [[0]])
    assert pack(np.empty(0, dtype=np.int64), 8)[1].tolist() == [0]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 40))
def test_every_document_is_in_one_slot_as_best_fit_decreasing_puts_it(lengths, capacity):
    slots = slots_of(lengths, capacity)
    assert sorted(number for slot in slots for number in slot) == list(range(len(lengths)))
    filled = sorted(sum(lengths[number] for number in slot) for slot in slots)
    assert filled == one_by_one(lengths, capacity)


@pytest.mark.parametrize("capacity", [1024, 2048])
def test_short_rows_fill_their_slots(capacity):
    """Lengths like those of GSM8K: mean 162, half below 154, one in a hundred above 331."""
    lengths = np.random.default_rng(0).lognormal(np.log(154), 0.33, 20_000).astype(np.int64) + 1
    members, bounds = pack(np.minimum(lengths, capacity), capacity)
    assert len(members) == 20_000
    assert np.minimum(lengths, capacity).sum() / ((len(bounds) - 1) * capacity) >= 0.98


EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")
EXACT = [k for k, family in FAMILIES.items() if family.concatenates and not family.reads]
SLOW = pytest.mark.slow
EVERYDAY = ("llama", "gemma2", "gpt2", "mixtral", "lfm2", "qwen3_5_text", "mamba2")
"""One kind of each way to tell documents apart."""
TOLERANCE = 4e-6
"""Products of another shape are summed in another order: some units in the last place of fp32."""
NEAR = 2**-7
"""Two roundings to bf16, which keeps 8 bits."""


def tiny(kind: str, attention: str, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, **SIZES | FIELDS.get(kind, {}) | fields)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    give_loss(model, chunked=family_of(kind).logits is not None)
    if attention == DOCUMENTS:
        separate_documents(model)
    return model


def batch_of(rows: Rows) -> MicroBatch:
    return collate(rows, np.arange(len(rows)), 0, "cpu")


def gradient(model: PreTrainedModel, batches: list[MicroBatch]) -> tuple[float, torch.Tensor]:
    """Mean loss over the trained tokens of all batches, and its gradient, end to end."""
    model.zero_grad()
    terms = sum(batch.trained_tokens for batch in batches)
    total = 0.0
    for batch in batches:
        loss = token_loss_sum(model, batch) / terms
        loss.backward()
        total += loss.item()
    # A sink has no gradient where transformers does not use it.
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return total, torch.cat([grad.flatten() for grad in grads])


Found = tuple[float, torch.Tensor]


def one_by_one_of(rows: Rows) -> list[MicroBatch]:
    return [collate(rows, np.array([index]), 0, "cpu") for index in range(len(rows))]


def assert_near(found: Found, wanted: Found) -> None:
    """Losses and gradients."""
    assert abs(found[0] - wanted[0]) < TOLERANCE * abs(wanted[0])
    largest = max(1.0, wanted[1].abs().max().item())
    assert (found[1] - wanted[1]).abs().max().item() < TOLERANCE * largest


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in EVERYDAY else SLOW) for kind in EXACT]
)
def test_documents_side_by_side_have_the_loss_and_the_gradient_of_each_alone(kind):
    rows = documents()
    packed = packs(rows)
    plain = tiny(kind, "sdpa" if family_of(kind).sdpa else "eager")
    alone = gradient(plain, one_by_one_of(rows))
    assert_near(gradient(plain, [batch_of(rows)]), alone)
    for batches in ([batch_of(packed)], one_by_one_of(packed)):
        assert_near(gradient(tiny(kind, DOCUMENTS), batches), alone)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_the_eager_attention_of_transformers_keeps_the_same_documents_apart(kind):
    batch = batch_of(packs(documents()))
    assert_near(gradient(tiny(kind, "eager"), [batch]), gradient(tiny(kind, DOCUMENTS), [batch]))


@pytest.mark.parametrize(
    "kind", ["llama", "gemma2", "gemma3_text", "gpt2", "lfm2", "mamba2", *EXPERTS]
)
def test_a_changed_document_leaves_the_logits_of_the_others_as_they_are(kind):
    """An expert multiplies its tokens together, so that their number moves the last digits."""
    rows, other = packs(documents()), packs(documents())
    changed = slice(*rows.documents.offsets[3:5])
    other.documents.ids[changed] = (other.documents.ids[changed] + 7) % 96
    model = tiny(kind, DOCUMENTS).eval()
    with torch.no_grad():
        before, after = (model(**batch_of(each).inputs()).logits[0] for each in (rows, other))
    same = np.ones(len(rows.documents.ids), dtype=bool)
    same[changed] = False
    moved = (before[same] - after[same]).abs().max().item()
    assert moved <= (TOLERANCE * before.abs().max().item() if kind in EXPERTS else 0)
    assert not torch.equal(before[changed], after[changed])


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_inputs(length: int, dtype: torch.dtype) -> Inputs:
    """Query, key and value: (1, heads, length, 8)."""
    torch.manual_seed(0)
    query, (key, value) = torch.randn(1, 4, length, 8), torch.randn(2, 1, 2, length, 8)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def attended(given: Inputs, ends: list[int], **more: Any) -> torch.Tensor:
    bounds = torch.tensor(ends, dtype=torch.int32)
    longest = max(end - start for start, end in itertools.pairwise(ends))
    module = torch.nn.Module()
    return attend(module, *given, None, cu_seq_lens_q=bounds, max_length_q=longest, **more)[0]


@pytest.mark.parametrize("window", [None, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "cap"), [(torch.float32, None), (torch.float32, 1.5), (torch.bfloat16, None)]
)
def test_a_window_and_a_cap_are_those_of_a_written_out_attention(dtype, cap, window):
    given, ends = random_inputs(15, dtype), [0, 4, 15]
    mixed = attended(given, ends, scaling=0.3, sliding_window=window, softcap=cap)
    wanted = written_out(*(each.float() for each in given), ends, window, cap)
    if dtype == torch.float32:
        assert torch.allclose(mixed, wanted, atol=1e-6)
    else:
        assert (mixed.float() - wanted).norm() <= NEAR * wanted.norm()


def written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: list[int],
    window: int | None, cap: float | None,
) -> torch.Tensor:  # fmt: skip
    """Token by token: each head sees its document's tokens up to it, within the window."""
    result = torch.empty(1, query.shape[2], query.shape[1], query.shape[3])
    for start, end in itertools.pairwise(ends):
        for token in range(start, end):
            first = start if window is None else max(start, token - window + 1)
            for head in range(query.shape[1]):
                scores = key[0, head // 2, first : token + 1] @ query[0, head, token] * 0.3
                scores = scores if cap is None else cap * torch.tanh(scores / cap)
                result[0, token, head] = scores.softmax(0) @ value[0, head // 2, first : token + 1]
    return result


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=SLOW)], ids=["eager", "compiled"]
)
@pytest.mark.parametrize("length", [1, 2, 17, 160, SCORE_BLOCK, 2 * SCORE_BLOCK + 77])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_document_in_16_bits_has_the_attention_and_the_gradients_of_fp32(
    length, groups, compiled, request
):
    """Weights and their gradients are rounded to bf16, as the model's own products are."""
    pointwise.compile_chains(compiled)
    request.addfinalizer(lambda: pointwise.compile_chains(False))
    torch.manual_seed(length)
    shapes = ((1, 3 * groups, length, 16), (1, 3, length, 16), (1, 3, length, 16))
    given = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    wide = [each.detach().float().requires_grad_() for each in given]
    assert serves(given[0])
    assert not serves(wide[0])
    ours = DocumentAttention.apply(*given, [0, length], 0.3)
    exact = F.scaled_dot_product_attention(*wide, is_causal=True, scale=0.3, enable_gqa=True)
    grad = torch.randn_like(exact).bfloat16()
    found_grads = torch.autograd.grad(ours, given, grad)
    exact_grads = torch.autograd.grad(exact, wide, grad.float())
    for found, wanted in zip((ours, *found_grads), (exact, *exact_grads), strict=True):
        assert (found.float() - wanted).norm() <= NEAR * wanted.norm().clamp(min=1e-3)


def test_documents_of_a_pack_in_16_bits_are_attended_to_as_each_alone():
    given = random_inputs(500, torch.bfloat16)
    ends = [0, 1, 40, 500]  # the last one has two blocks
    mixed = attended(given, ends)
    for start, end in itertools.pairwise(ends):
        alone = [each[:, :, start:end].float() for each in given]
        wanted = F.scaled_dot_product_attention(*alone, is_causal=True, enable_gqa=True)
        assert (mixed[:, start:end].transpose(1, 2).float() - wanted).norm() <= NEAR * wanted.norm()


def test_concatenated_documents_have_the_gradients_of_each_alone():
    torch.manual_seed(1)
    given = [torch.randn(1, heads, 60, 8).bfloat16().requires_grad_() for heads in (6, 2, 2)]
    ends = [0, 1, 18, 60]
    mixed = DocumentAttention.apply(*given, ends, 0.4)
    grad = torch.randn_like(mixed)
    together = torch.autograd.grad(mixed, given, grad)
    for start, end in itertools.pairwise(ends):
        part = slice(start, end)
        cut = [each[:, :, part] for each in given]
        alone = DocumentAttention.apply(*cut, [0, end - start], 0.4)
        assert torch.equal(mixed[:, :, part], alone)
        each_alone = torch.autograd.grad(alone, given, grad[:, :, part])
        for all_of_it, of_part in zip(together, each_alone, strict=True):
            assert torch.equal(all_of_it[:, :, part], of_part[:, :, part])


def test_the_inputs_of_attention_are_kept_and_a_number_for_each_query():
    given = [torch.randn(1, 4, 32, 8).bfloat16().requires_grad_() for _ in range(3)]
    kept: list[int] = []

    def pack_one(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_one, lambda tensor: tensor):
        DocumentAttention.apply(*given, [0, 20, 32], 1.0)
    assert kept == [4 * 32 * 8 * 2] * 3 + [4 * 32 * 4]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "nemotron_h", "mamba"])
def test_a_state_that_leaks_into_the_next_document_is_kept_apart(kind):
    """Plain transformers, whose positions count from 0 in each document, runs on."""
    rows = documents()
    batch = batch_of(packs(rows))
    plain = tiny(kind, "sdpa" if family_of(kind).sdpa else "eager").eval()
    apart = tiny(kind, DOCUMENTS).eval()
    with torch.no_grad():
        wanted = torch.cat([plain(**each.inputs()).logits[0] for each in one_by_one_of(rows)])
        together = plain(input_ids=batch.ids, position_ids=batch.boundaries.positions).logits[0]
        kept = apart(**batch.inputs()).logits[0]
    size = wanted.abs().max().item()
    assert (together - wanted).abs().max().item() > 0.1 * size
    assert (kept - wanted).abs().max().item() < 2 * TOLERANCE * size


def test_recomputed_states_are_those_of_their_own_micro_batch():
    batches = one_by_one_of(packs(documents()))
    again = tiny("qwen3_5_text", DOCUMENTS)
    recompute(again, True)
    kept = gradient(tiny("qwen3_5_text", DOCUMENTS), batches)
    assert_near(gradient(again, batches), kept)


def test_padded_rows_of_a_recurrent_model_are_left_to_transformers():
    rows = documents()
    loss, grads = gradient(tiny("lfm2", "sdpa"), [batch_of(rows)])
    model = tiny("lfm2", "sdpa")
    separate_documents(model)
    other, others = gradient(model, [batch_of(rows)])
    assert loss == other
    assert torch.equal(grads, others)


def test_longrope_takes_the_factors_of_each_document():
    """Documents of more than 16 tokens have other frequencies than shorter ones."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 8.0,
    }  # fmt: skip
    rows = documents()
    fields: dict[str, Any] = {"rope_parameters": rope, "original_max_position_embeddings": 16}
    plain = tiny("phi3", "sdpa", **fields)
    alone = gradient(plain, one_by_one_of(rows))
    padded, _ = gradient(plain, [batch_of(rows)])
    assert abs(padded - alone[0]) > 1e-3  # the longest row of a batch decides for all
    assert_near(gradient(tiny("phi3", DOCUMENTS, **fields), [batch_of(packs(rows))]), alone)


def layout_problems(recipe: SFT, config: PreTrainedConfig) -> list[str]:
    return list(rules.layout(Request(recipe, load("single"), 1, config.to_dict())))


def test_an_architecture_that_was_not_shown_to_keep_documents_apart_is_refused():
    packed, free = (SFT().with_batch(**{field: True}) for field in ("packing", "padding_free"))
    bloom = AutoConfig.for_model("bloom")
    told = "concatenated documents have not been shown to be exact for 'bloom' models"
    for recipe, problem in (
        (packed, f"batch.packing: {told}; set batch.packing=false"),
        (free, f"batch.padding_free: {told}; use batch.padding_free=auto, which then pads"),
    ):
        assert layout_problems(recipe, bloom) == [problem]
    assert layout_problems(SFT(), bloom) == []
    assert layout(SFT(), bloom) == Padding(False, told)
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    beyond = AutoConfig.for_model("llama", **SIZES, rope_parameters=scaled)
    hybrid = AutoConfig.for_model("qwen3", **SIZES)
    hybrid.layer_types = ["full_attention", "linear_attention"]
    for config, told in (
        (beyond, "'dynamic' positions depend on the longest document"),
        (hybrid, "layers of linear_attention may see other documents"),
    ):
        (problem,) = layout_problems(packed.with_batch(max_length=129), config)
        assert told in problem
    assert layout_problems(packed.with_batch(max_length=128), beyond) == []


def test_a_model_that_does_not_say_where_documents_end_is_refused():
    batch = batch_of(packs(documents()))
    with pytest.raises(FinetuneError, match="LlamaAttention does not pass on where"):
        tiny("llama", DOCUMENTS)(input_ids=batch.ids)


def test_rows_side_by_side_with_sdpa_are_attended_to_by_document():
    llama, bloom = (AutoConfig.for_model(kind) for kind in ("llama", "bloom"))
    recipe = SFT()
    assert (implementation(recipe, llama), implementation(recipe, bloom)) == (DOCUMENTS, "sdpa")
    assert implementation(recipe.with_batch(padding_free=False), llama) == "sdpa"
    packed = recipe.with_batch(packing=True)
    assert implementation(packed, llama) == DOCUMENTS
    for attention in ("eager", "flash_attention_2", "flex_attention"):
        model = dataclasses.replace(recipe.model, attention=attention)
        assert implementation(packed.with_model(model), llama) == attention
        free = layout(recipe.with_model(model), llama)
        assert free.free == (attention == "flash_attention_2")
        assert free.free or free.reason == (
            f"model.attention={attention} computes scores of all token pairs of a micro-batch"
        )


def test_the_text_of_a_model_with_images_decides_where_that_alone_is_loaded():
    whole = AutoConfig.for_model("qwen3_5", text_config=SIZES | FIELDS["qwen3_5_text"])
    assert causal(whole).model_type == "qwen3_5_text"
    assert implementation(SFT(), causal(whole)) == DOCUMENTS
    scratch = Model(config=whole.to_dict(), tokenizer="models/small")
    assert decoder_fields(fields_of(SFT(scratch)))["model_type"] == "qwen3_5_text"
    assert padding(SFT(scratch), decoder_fields(fields_of(SFT(scratch)))) == Padding(True)
    images = AutoConfig.for_model("gemma3")
    assert causal(images) is images
    assert implementation(SFT(), images) == "sdpa"


def test_a_saved_model_does_not_name_this_attention(tmp_path):
    tiny("llama", DOCUMENTS).save_pretrained(tmp_path)
    assert DOCUMENTS not in (tmp_path / "config.json").read_text()
