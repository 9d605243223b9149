"""Norms in one operation give the losses and gradients of transformers."""

import copy

import pytest
import torch
from families import FAMILIES, adapt, build, distance, gradients, inputs, whole_distance
from torch import nn

from finetune.kernels.norm import NORMS, FusedNorm, fuse_norms

FP32 = 2e-6
"""Relative, of a loss and of the whole gradient: sums in another order move the seventh digit."""
BF16 = 4e-3
"""Relative, of a loss: bf16 keeps 8 bits, 0.4 %."""
AS_EXACT = 1.2
"""Most that gradients in bf16 may be farther from fp32 than those of transformers in bf16 are."""


def step(model: nn.Module, autocast: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**inputs()).loss
    loss.backward()
    return loss.item(), gradients(model)


def fused(plain: nn.Module) -> nn.Module:
    given = copy.deepcopy(plain)
    fuse_norms(given)
    assert any(isinstance(module, FusedNorm) for module in given.modules())
    return given


@pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "adapter"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_norms_give_the_loss_and_the_gradients_of_transformers(kind: str, adapted: bool) -> None:
    plain = adapt(build(kind)) if adapted else build(kind)
    expected, by_plain = step(copy.deepcopy(plain))
    loss, by_ours = step(fused(plain))
    assert loss == pytest.approx(expected, rel=FP32)
    assert whole_distance(by_ours, by_plain) < FP32


@pytest.mark.parametrize("kind", FAMILIES)
def test_norms_in_bf16_are_as_near_to_fp32_as_those_of_transformers(kind: str) -> None:
    # Every expert: a rounded score would choose others.
    every = {"num_experts_per_tok": 4} if kind == "mixtral" else {}
    plain = adapt(build(kind, torch.bfloat16, **every))
    exact, by_exact = step(copy.deepcopy(plain).float())
    loss, by_ours = step(fused(plain), autocast=True)
    _, by_plain = step(plain, autocast=True)
    assert loss == pytest.approx(exact, rel=BF16)
    assert distance(by_ours, by_exact) < AS_EXACT * distance(by_plain, by_exact)


def test_a_norm_keeps_its_input_and_a_number_a_row() -> None:
    norm = build("llama").model.norm
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    given = torch.randn(2, 5, 64, requires_grad=True)
    fuse_norms(nn.ModuleList([norm]))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(given)
    assert kept == [2 * 5 * 64, 2 * 5, 64]


@pytest.mark.parametrize("kind", ["qwen2", "granite", "gemma", "smollm3", "phi3"])
def test_other_known_norms_are_the_formula(kind: str) -> None:
    plain = build(kind)
    loss = step(copy.deepcopy(plain))[0]
    assert step(fused(plain))[0] == pytest.approx(loss, rel=FP32)
    assert {type(m).__name__ for m in plain.modules() if "Norm" in type(m).__name__} <= NORMS.keys()
