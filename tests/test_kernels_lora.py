"""Adapters in groups give the losses and gradients of PEFT, and leave its modules what they are."""

import copy
from pathlib import Path

import pytest
import torch
from families import (
    BF16,
    FAMILIES,
    adapt,
    assert_as_near_to_fp32,
    assert_same_step,
    build,
    distance,
    in_bf16,
    inputs,
    step,
    whole_distance,
)
from peft import PeftModel
from torch import nn
from torch.profiler import profile
from transformers import AutoModelForCausalLM

from finetune.kernels import lora, pointwise
from finetune.kernels.cpu import tiled_adapters
from finetune.models.quantization import keep_unpacked, quantization_config

FP64 = 1e-12
"""Relative, of every single tensor."""
AS_EXACT = 1.2
"""Most that gradients in bf16 may be farther from fp32 than those of PEFT in bf16 are."""

WIDE = {"hidden_size": 64, "intermediate_size": 128}
"""Widths that products over tiles are for."""


def grouped(plain: PeftModel) -> PeftModel:
    given = copy.deepcopy(plain)
    lora.group_adapters(given)
    return given


def groups_of(model: nn.Module) -> list[int]:
    """Sizes of the groups of the first block."""
    found = [m.group for n, m in model.named_modules() if isinstance(m, lora.Grouped)]
    return sorted({id(g): len(g.layers) for g in found}.values())


@pytest.mark.parametrize("kind", FAMILIES)
def test_groups_give_the_loss_and_the_gradients_of_peft(kind: str) -> None:
    plain = adapt(build(kind))
    assert_same_step(grouped(plain), plain)
    if kind == "mixtral":
        return  # torch has no product of groups in fp64
    plain = plain.double()
    _, by_plain = step(copy.deepcopy(plain))
    _, by_ours = step(grouped(plain))
    assert distance(by_ours, by_plain) < FP64


@pytest.mark.parametrize("kind", FAMILIES)
def test_groups_in_bf16_are_as_near_to_fp32_as_peft(kind):
    plain = in_bf16(kind)
    assert_as_near_to_fp32(grouped(plain), plain, AS_EXACT, distance)


needs_tiles = pytest.mark.skipif(
    tiled_adapters.reason_against() is not None, reason=str(tiled_adapters.reason_against())
)


@needs_tiles
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("tokens", "width", "rank"), [(1, 32, 1), (63, 96, 4), (77, 64, 33), (128, 576, 16)]
)
def test_products_over_tiles_are_exact(tokens: int, width: int, rank: int, threads: int) -> None:
    """Sums of whole numbers are exact in fp32: what is left is one rounding of each product."""
    made = torch.Generator().manual_seed(tokens)
    shapes = (tokens, width + 5), (tokens, 2 * rank), (width, 3 * rank)
    wide, narrow, up = (torch.randint(-9, 10, s, generator=made).bfloat16() for s in shapes)
    wide, narrow, up = wide[:, :width], narrow[:, rank:], up[:, ::3]  # parts of other matrices
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        product, outer = tiled_adapters.products(wide, narrow, up)
        nothing, again = tiled_adapters.products(wide, narrow, None)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(product, (wide.double() @ up.double()).bfloat16())
    assert torch.equal(outer, (narrow.double().T @ wide.double()).bfloat16())
    assert nothing is None
    assert torch.equal(again, outer)


@needs_tiles
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_gradients_over_tiles_are_as_near_to_fp32(kind: str, compiling: None) -> None:
    plain = grouped(in_bf16(kind, **WIDE))
    _, by_exact = step(copy.deepcopy(plain).float())
    tiled = copy.deepcopy(plain)
    with profile() as seen:
        loss, by_tiles = step(tiled, autocast=True)
    assert any("adapter_gradients" in event.key for event in seen.key_averages())
    assert lora.reasons_against_tiles(tiled) == []
    pointwise.compile_chains(False)
    expected, by_products = step(plain, autocast=True)
    assert loss == pytest.approx(expected, rel=BF16)
    assert whole_distance(by_tiles, by_exact) < AS_EXACT * whole_distance(by_products, by_exact)


def test_widths_that_tiles_do_not_divide_are_reported(compiling: None) -> None:
    given = grouped(adapt(build("llama", torch.bfloat16, hidden_size=48, intermediate_size=96)))
    told = lora.reasons_against_tiles(given)
    if tiled_adapters.reason_against() is None:
        assert told == [f"the width {each} is not a multiple of 32" for each in (24, 48)]
    loss, _ = step(given, autocast=True)
    assert loss > 0


def test_the_projections_of_one_input_are_one_group() -> None:
    given = grouped(adapt(build("llama")))
    assert groups_of(given) == sorted([3, 1, 2, 1] * 2)  # q|k|v, o, gate|up, down of two blocks
    assert lora.left_alone(given) == {}


def test_a_base_with_biases_and_other_ranks_gives_the_gradients_of_peft() -> None:
    plain = adapt(build("qwen2"), rank_pattern={"k_proj": 2}, alpha_pattern={"v_proj": 3})
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    assert_same_step(grouped(plain), plain)


def test_checkpoints_of_blocks_give_the_same_gradients() -> None:
    plain = adapt(build("llama"))
    given = grouped(plain)
    given.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    given.enable_input_require_grads()
    given.train()
    assert_same_step(given, plain)


def in_nf4(folder: Path, storage: torch.dtype = torch.uint8) -> PeftModel:
    build("llama").save_pretrained(folder)
    config = quantization_config("nf4", torch.float32, storage)
    return adapt(AutoModelForCausalLM.from_pretrained(folder, quantization_config=config))


@pytest.mark.parametrize("storage", [torch.uint8, torch.float32])
def test_a_base_in_nf4_gives_the_gradients_of_peft(tmp_path, storage):
    plain, given = (in_nf4(tmp_path, storage) for _ in range(2))
    for model in (plain, given):
        keep_unpacked(model)
    lora.group_adapters(given)
    assert groups_of(given) == sorted([3, 1, 2, 1] * 2)
    assert_same_step(given, plain)


def test_a_base_in_nf4_is_dequantised_once_in_each_pass(tmp_path, monkeypatch):
    model = in_nf4(tmp_path)
    lora.group_adapters(model)
    seen: list[int] = []
    original = lora.dequantize_4bit

    def counting(packed: torch.Tensor, state: lora.QuantState) -> torch.Tensor:
        seen.append(packed.data_ptr())
        return original(packed, state)

    monkeypatch.setattr(lora, "dequantize_4bit", counting)
    step(model)
    of_layer = {pointer: seen.count(pointer) for pointer in seen}
    assert len(of_layer) == 14
    # The first block's q, k and v read the frozen embedding, which needs no gradient.
    assert sorted(of_layer.values()) == [1] * 3 + [2] * 11


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"lora_dropout": 0.1}, "dropout"), ({"use_dora": True}, "a variant of LoRA"),
        ({"lora_bias": True}, "a variant of LoRA"),
    ],
)  # fmt: skip
def test_what_peft_computes_otherwise_is_left_to_it(fields, reason):
    given = adapt(build("llama"), **fields)
    lora.group_adapters(given)
    assert lora.left_alone(given) == {reason: 14}


def test_hooks_and_second_adapters_are_left_to_peft() -> None:
    given = adapt(build("llama"))
    attention = given.get_base_model().model.layers[0].self_attn
    attention.q_proj.base_layer.register_forward_hook(lambda *_: None)
    lora.group_adapters(given)
    assert lora.left_alone(given) == {"hooks": 1}
    twice = adapt(build("llama"))
    twice.add_adapter("other", twice.peft_config["default"])
    lora.group_adapters(twice)
    assert lora.left_alone(twice) == {"several adapters": 14}


def test_saved_files_and_disabled_adapters_are_those_of_peft(tmp_path: Path) -> None:
    plain = adapt(build("llama")).eval()
    given = grouped(plain)
    assert given.state_dict().keys() == plain.state_dict().keys()
    given.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(build("llama"), tmp_path).eval()
    ids = inputs()["input_ids"]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, plain(ids).logits)
        with given.disable_adapter(), plain.disable_adapter():
            assert torch.equal(given(ids).logits, plain(ids).logits)
    assert torch.allclose(given.merge_and_unload()(ids).logits, plain(ids).logits, atol=1e-4)
