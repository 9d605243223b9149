"""An adapter adds alpha / r times its product to a weight, in training as in plain PEFT."""

import math
from typing import Any

import pytest
import torch
from families import build
from torch import nn

from finetune.methods.sft import SFT
from finetune.models.model import as_trained
from finetune.recipe import LoRA


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, 2.0),
        ({"alpha": 1}, 1 / 4),
        ({"alpha": 12, "use_rslora": True}, 12 / math.sqrt(4)),
        ({"alpha": 12, "alpha_pattern": {"q_proj": 6}}, 6 / 4),
        ({"alpha": 12, "rank_pattern": {"q_proj": 2}}, 12 / 2),
    ],
)
def test_the_product_of_an_adapter_is_scaled(fields: dict[str, Any], scale: float) -> None:
    model = build("llama")
    weight = model.model.layers[0].self_attn.q_proj.weight.detach().clone()
    trained = as_trained(model, SFT(adapter=LoRA(r=4, targets=("q_proj",), **fields)))
    layer: Any = trained.get_base_model().model.layers[0].self_attn.q_proj
    first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    nn.init.normal_(second, std=0.1)
    given = torch.randn(5, weight.shape[1])
    expected = given @ (weight + scale * second @ first).T
    # In fp32, where a product of two products is a sum in another order.
    torch.testing.assert_close(layer(given), expected, atol=1e-5, rtol=1e-5)
