"""Sequence parallelism with DeepSpeed Ulysses (arXiv:2309.14509): processes share a row's tokens.

An all-to-all around attention exchanges tokens for heads: each process has all tokens of some
heads, so packed documents keep their boundaries. Everything else is computed per token.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from finetune.data.collate import UNTRAINED, MicroBatch
from finetune.errors import FinetuneError
from finetune.version import install

ULYSSES = "ulysses"
"""Name of the attention implementation in transformers."""


def register(config: PreTrainedConfig, core: str, group: Any, tensor: int) -> str:
    """Register an attention that exchanges tokens for heads in transformers; returns its name.

    Args:
        config: Configuration of the model.
        core: Name of the attention of a single process.
        group: Process group that shares a row.
        tensor: Number of tensor-parallel processes, which also divide the heads.

    Raises:
        FinetuneError: DeepSpeed is not installed.
    """
    try:
        import deepspeed
        from deepspeed.ops import __compatible_ops__ as compiled
    except ImportError:
        raise FinetuneError(f"backend: sp needs DeepSpeed: {install('deepspeed')}") from None
    compiled["deepspeed_shm_comm"] = False  # compiling it would take minutes
    backend = torch.distributed.get_backend()
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    text = config.get_text_config()
    heads = text.num_attention_heads
    exchanged = UlyssesSPAttentionHF(
        attn=ALL_ATTENTION_FUNCTIONS[core],
        batch_size=1,
        attn_head_count=heads // tensor,
        attn_head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        kv_head_count=text.num_key_value_heads // tensor,
        num_hidden_layers=text.num_hidden_layers,
        process_group=group,
        seq_length_is_variable=True,
    )

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **named: Any,
    ) -> Any:
        return exchanged(module, query, key, value, None, *args, **named)

    AttentionInterface.register(ULYSSES, attend)
    return ULYSSES


def part(batch: MicroBatch, rank: int, ways: int) -> MicroBatch:
    """One process's part of a packed row, whose number of tokens must be divisible by `ways`.

    Labels have one column more than ids: the first label of the next part.
    """
    bounds = batch.boundaries
    assert bounds is not None
    share = batch.ids.shape[1] // ways
    mine = slice(rank * share, (rank + 1) * share)
    labels = F.pad(batch.labels, (0, 1), value=UNTRAINED)[:, mine.start : mine.stop + 1]
    return dataclasses.replace(
        batch,
        ids=batch.ids[:, mine].contiguous(),
        labels=labels,
        trained_tokens=int((labels[:, 1:] != UNTRAINED).sum()),
        boundaries=dataclasses.replace(bounds, positions=bounds.positions[:, mine].contiguous()),
    )
