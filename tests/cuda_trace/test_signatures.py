"""Calls of the product fit what is installed, and what a CUDA build alone has is there."""

import inspect
from typing import Any

import bitsandbytes
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations import moe

from finetune.distributed import heartbeat
from finetune.kernels.expert_products import experts_forward
from finetune.models.packed_attention import varlen_words


def binds(function: Any, *given: Any, **named: Any) -> bool:
    inspect.signature(function).bind(*given, **named)
    return True


def test_calls_bind() -> None:
    assert binds(varlen_attn, *range(7), **varlen_words(varlen_attn, None, 5, shared=True))
    ours, theirs = (
        len(inspect.signature(f).parameters)
        for f in (experts_forward, moe.grouped_mm_experts_forward)
    )
    assert ours == theirs - 1  # two of theirs are handed on
    assert binds(bitsandbytes.functional.QuantState.to, None, torch.device("cuda"))


def test_both_flight_recorders_answer() -> None:
    library = torch._C._distributed_c10d
    assert all(hasattr(library, name) for name in heartbeat.RECORDERS)
    assert heartbeat.collectives_begun() == 0
