"""fp16 with a scaled loss: near fp32, alike on every engine, and an overflow leaves no row out."""

import shutil
from typing import Any

import pytest
import torch
from conftest import apart, losses

from finetune import catalog
from finetune.checkpoints import checkpoint
from finetune.distributed import loss_scale
from finetune.distributed.loss_scale import FIRST, LossScale
from finetune.errors import FinetuneError
from finetune.planner import plan

FP16 = 5e-3
"""Losses of about 6 over six steps: fp16 keeps 11 bits, 0.05 %, of each activation."""
ORDER = 2e-3
"""Losses on two processes: sums of fp16 products in another order."""
LORA: dict[str, Any] = {"adapter": {"r": 8}, "optim": {"lr": 5e-3, "warmup": 0}}


def test_losses_and_norms_in_fp16_are_near_those_of_fp32(run_of, train):
    """Adam and clipping hide a scale that stays; the record of the norm does not."""
    runs = train(precision="fp16", **LORA), run_of(**LORA)
    narrow, wide = map(losses, runs)
    assert narrow != wide
    assert apart(*runs) < FP16
    narrow, wide = ([step["grad_norm"] for step in run.read_metrics("train")] for run in runs)
    assert narrow[:2] == pytest.approx(wide[:2], rel=FP16)


def test_an_overflow_takes_the_same_step_again(train, monkeypatch):
    """A scale that overflows at first ends with the bits of one that never does.

    Scales are powers of two, and these gradients are far from fp16's smallest number.
    """
    given: dict[str, Any] = {"max_steps": 3, "saving": {"every": 1, "keep": 2}, "precision": "fp16"}
    straight = train("straight", **given)
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**40)
    lowered = list[float]()
    lower = LossScale.lower

    def counted(scale: LossScale) -> bool:
        lowered.append(scale.value)
        return lower(scale)

    monkeypatch.setattr(LossScale, "lower", counted)
    overflowed = train("overflowed", **given)
    assert (lowered[0], losses(overflowed)) == (2.0**40, losses(straight))
    assert not list(overflowed.read_metrics("skipped"))
    # Steps that are taken again go on with the scale of their checkpoint: nothing overflows anew.
    count, kept = len(lowered), checkpoint.progress_of(overflowed.checkpoint(2)).scale
    assert kept == {"value": 2.0**40 / loss_scale.FALL**count, "clean": 2}
    shutil.rmtree(overflowed.checkpoint(3))
    shutil.rmtree(overflowed.final)
    resumed = train("overflowed", resume=True, **given)
    assert (len(lowered), losses(resumed)) == (count, losses(straight))


def test_the_scale_falls_at_once_and_rises_in_time():
    scale = LossScale(used=True)
    assert scale.lower()
    assert scale.value == FIRST / 4
    for _ in range(loss_scale.PATIENCE):
        scale.taken()
    assert scale.value == FIRST / 2
    while scale.lower():
        pass
    assert scale.value == 1.0
    assert not LossScale(used=False).lower()


def test_deepspeed_is_refused(tiny):
    recipe = catalog.from_fields(tiny.fields())
    with pytest.raises(FinetuneError, match="fp16 needs loss scaling, which zero2 implements"):
        plan(recipe, "zero2", 2, "fp16")
    assert plan(recipe, "fsdp_full_shard", 2, "fp16").quant_storage == "float16"


def test_gradients_of_a_large_vocabulary_do_not_vanish():
    """Shares of 1e-8 of each of 100,000 tokens, whose gradient fp16 itself would hold as 0."""
    from finetune.kernels.chunked_loss import ChunkedLoss

    torch.manual_seed(0)
    hidden = torch.randn(4, 16, dtype=torch.float16, requires_grad=True)
    weight = (torch.randn(100_000, 16) * 0.02).half()
    weight[7] += 3 * hidden[0].detach().sign()
    targets = torch.full((4,), 7)
    ChunkedLoss.apply(hidden, weight, None, targets, 1.0, None, 2, 2).backward()
    wide = hidden.detach().double().requires_grad_()
    logits = wide @ weight.double().T
    torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
    assert (hidden.grad - wide.grad).abs().max() < 2e-3 * wide.grad.abs().max()


@pytest.mark.slow
def test_several_processes_have_the_losses_of_one(run_of):
    """Each has a part of every gradient, and another one may overflow."""
    backends = ("fsdp_full_shard", "single")
    together, alone = (run_of(each, "--precision", "fp16", **LORA) for each in backends)
    assert apart(together, alone) < ORDER
