"""Each architecture on a GPU in bf16, next to the same weights on the CPU in fp32."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpus import NEEDS_GPU
from test_packing import documents, packs

from finetune.data.rows.collate import collate
from finetune.methods.losses import token_loss_sum
from finetune.planner import plan

sys.path.insert(0, str(Path(__file__).parent / "cuda_trace"))
from test_passes import CAPPED, KINDS
from traced import Seen, built, recipe_of

pytestmark = NEEDS_GPU

BF16 = 2e-2
"""Losses of about 5 a token: bf16 keeps 8 bits, 0.4 %, of each weight and activation."""
GRADIENTS = 0.1
"""Norm of all gradients; with random weights of 0.2 the models are far from linear."""


def pass_of(trained: torch.nn.Module, batch: Any, bf16: bool) -> tuple[float, float]:
    """Loss per trained token, and the norm of all gradients."""
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        loss = token_loss_sum(trained, batch) / batch.trained_tokens
    loss.backward()
    grads = [p.grad.float().cpu() for p in trained.parameters() if p.grad is not None]
    assert all(grad.isfinite().all() for grad in grads)
    trained.zero_grad(set_to_none=True)
    return float(loss), float(torch.stack([grad.norm() for grad in grads]).norm())


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_packs_on_a_gpu_have_the_loss_and_gradient_of_a_cpu(kind, adapter):
    recipe = recipe_of(kind, adapter, "packs")
    rows = packs(documents())
    torch.manual_seed(0)
    _, alone = built(plan(recipe, "single", 1, "fp32"), "cpu")
    loss, norm = pass_of(alone, collate(rows, np.arange(len(rows)), 0, "cpu"), bf16=False)
    network, trained = built(plan(recipe, "single", 1, "bf16"))
    trained.load_state_dict(alone.state_dict())
    batch = collate(rows, np.arange(len(rows)), 0, "cuda")
    with Seen() as seen:
        found, found_norm = pass_of(trained, batch, bf16=True)
    assert found == pytest.approx(loss, rel=BF16)
    assert found_norm == pytest.approx(norm, rel=GRADIENTS)
    promised = 0 if kind in CAPPED else network.config.num_hidden_layers
    assert seen.count("_varlen_attn_backward") == promised
    assert seen.count("_varlen_attn") == 2 * promised
