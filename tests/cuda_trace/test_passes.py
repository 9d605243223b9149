"""Forward passes under CUDA's autocast: no value is waited for, and the one kernel is called."""

import pytest
import torch
from torch import nn
from traced import PADDED, Seen, forward, gpu

from finetune.kernels.head import LabelledHead
from finetune.planner.families import FAMILIES, family_of

KNOWN = [kind for kind, family in FAMILIES.items() if family.logits]
KINDS = (*KNOWN, "glm4", "ernie4_5", "exaone4", "seed_oss")
"""Sixteen architectures whose every part is known here, and some others."""
CAPPED = ("gemma2",)
"""Types whose scores the one kernel does not cap, as their plan says."""


@pytest.mark.parametrize("way", ["rows", "equal rows", "side by side", "packs"])
@pytest.mark.parametrize("trained", ["full", "lora", "nf4"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_pass_stays_on_the_gpu_and_calls_the_kernel_that_is_promised(kind, trained, way):
    if way in PADDED and not family_of(kind).sdpa:
        pytest.skip(f"transformers has no sdpa for padded rows of {kind}")
    found = forward(kind, trained != "full", way, nf4=trained == "nf4")
    assert (found.loss.device.type, found.loss.dtype) == ("cuda", torch.float32)
    assert (found.elsewhere, found.seen.left) == ([], [])
    promised = found.layers if way not in PADDED and kind not in CAPPED else 0
    assert found.seen.count("_varlen_attn") == promised
    # A layer in NF4 is dequantized once per pass.
    assert found.seen.count("dequantize_4bit") == found.packed
    assert (found.packed > 0) == (trained == "nf4")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "deepseek_v3"])
def test_shared_prompts_are_repeated_on_the_gpu_for_the_one_kernel(kind):
    found = forward(kind, adapter=True, way="shared prompts")
    assert found.seen.left == []
    assert found.seen.count("_varlen_attn") == (0 if kind == "deepseek_v3" else found.layers)
    assert found.seen.count("index_select") == 4 * found.layers  # query, key, value and result


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3"])
def test_before_ampere_each_document_is_computed_without_waiting_for_the_gpu(kind):
    found = forward(kind, way="packs", capability=(7, 5))
    assert found.seen.count("_varlen_attn") == 0
    assert found.seen.left == []


def test_experts_multiply_in_the_type_of_autocast():
    """The stand-in of the grouped product refuses fp32, which a GPU would compute slowly."""
    found = forward("qwen3_moe", way="packs")
    assert found.seen.count("_grouped_mm") == 2 * found.layers


def test_the_head_of_8_192_tokens_takes_eight_chunks():
    """That of Llama 3.1 8B, frozen: a product for the logits of each, and one for the gradient."""
    tokens, hidden, words = 8_192, 4_096, 128_256
    with gpu(), torch.device("cuda"):
        head = nn.Linear(hidden, words, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        head.__class__ = LabelledHead
        head.scale, head.cap = 1.0, None
        states = torch.empty(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        with Seen() as seen:
            head(states, torch.empty(tokens, dtype=torch.int64))
    assert seen.left == []
    assert seen.count("aten.mm.") == 2 * 8


@pytest.mark.parametrize(("adapter", "norms"), [(False, 5), (True, 5)], ids=["full", "lora"])
def test_norms_are_one_kernel_each_where_nothing_is_compiled(adapter, norms):
    """Two in each of two layers, and the last."""
    assert forward("llama", adapter, "packs").seen.count("_fused_rms_norm") == norms
