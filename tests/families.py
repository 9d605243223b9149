"""Tiny models with random weights, one of each family that the kernels are held against."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

FP32 = 2e-6
"""Relative, of a loss and of the whole gradient: sums in another order move the seventh digit."""
BF16 = 4e-3
"""Relative, of a loss: bf16 keeps 8 bits, 0.4 %."""
VOCABULARY = 320
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
    "mistral": {"tie_word_embeddings": False, "sliding_window": None},
    "gemma2": {"head_dim": 16, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
}


def build(kind: str, dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    """A model whose logits are spread: transformers' own initial weights leave them near zero."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **(SIZES | FAMILIES.get(kind, {}) | fields))
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return model.to(dtype)


def in_bf16(kind: str, **fields: Any) -> PeftModel:
    """An adapted model with every expert chosen: a rounded score would choose others."""
    every = {"num_experts_per_tok": 4} if kind == "mixtral" else {}
    return adapt(build(kind, torch.bfloat16, **every, **fields))


def adapt(model: PreTrainedModel, **fields: Any) -> PeftModel:
    """LoRA with a B that is not zero, so that every gradient is there."""
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | fields
    torch.manual_seed(5)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


def inputs(rows: int = 3, length: int = 23) -> dict[str, torch.Tensor]:
    """Padded rows (rows, length) with labels on about half of the real tokens."""
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, length - 4 * row :] = 0
    chosen = torch.rand(ids.shape, generator=generator) < 0.5
    labels = torch.where(chosen & (mask == 1), ids, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def step(model: nn.Module, autocast: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of `inputs` and its gradients."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**inputs()).loss
    loss.backward()
    return loss.item(), gradients(model)


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Largest difference of a tensor, relative to that tensor's norm."""
    assert first.keys() == second.keys() != set()
    return max(float((first[n] - second[n]).norm() / second[n].norm()) for n in second)


def whole_distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Difference of all gradients together, relative to the norm of all."""
    assert first.keys() == second.keys() != set()
    apart, size = (
        sum(float(tensor.square().sum()) for tensor in tensors)
        for tensors in ([first[n] - second[n] for n in second], second.values())
    )
    return (apart / size) ** 0.5


def assert_same_step(ours: nn.Module, plain: nn.Module) -> None:
    """In fp32, the loss and the whole gradient are equal."""
    (loss, by_ours), (expected, by_plain) = step(ours), step(plain)
    assert loss == pytest.approx(expected, rel=FP32)
    assert whole_distance(by_ours, by_plain) < FP32


def assert_as_near_to_fp32(
    ours: nn.Module, plain: nn.Module, most: float, measure: Callable[..., float]
) -> None:
    """In bf16, gradients are at most this many times as far from fp32 as those of plain modules."""
    exact, by_exact = step(copy.deepcopy(plain).float())
    (loss, by_ours), (_, by_plain) = step(ours, autocast=True), step(plain, autocast=True)
    assert loss == pytest.approx(exact, rel=BF16)
    assert measure(by_ours, by_exact) < most * measure(by_plain, by_exact)
