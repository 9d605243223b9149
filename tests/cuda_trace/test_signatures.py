"""Calls of the product fit what is installed, and what a CUDA build alone has is there."""

import importlib
import inspect
import pkgutil
from typing import Any

import bitsandbytes
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations import moe

import finetune
from finetune.distributed import heartbeat
from finetune.kernels.expert_products import experts_forward
from finetune.models.packed_attention import varlen_words


def binds(function: Any, *given: Any, **named: Any) -> bool:
    inspect.signature(function).bind(*given, **named)
    return True


def test_calls_bind():
    assert binds(varlen_attn, *range(7), **varlen_words(varlen_attn, None, 5, shared=True))
    ours, theirs = (
        len(inspect.signature(f).parameters)
        for f in (experts_forward, moe.grouped_mm_experts_forward)
    )
    assert ours == theirs - 1  # two of theirs are handed on
    assert binds(bitsandbytes.functional.QuantState.to, None, torch.device("cuda"))


def test_both_flight_recorders_answer():
    library = torch._C._distributed_c10d
    assert all(hasattr(library, name) for name in heartbeat.RECORDERS)
    assert heartbeat.collectives_begun() == 0


def test_every_module_can_be_imported():
    """With each PyTorch that is traced; some modules need packages of extras."""
    extras = ("finetune.serving.", "finetune.reports.plot", "finetune.__main__")
    for each in pkgutil.walk_packages(finetune.__path__, "finetune."):
        if not each.name.startswith(extras):
            importlib.import_module(each.name)
