"""Sequence parallel by DeepSpeed's Ulysses (arXiv:2309.14509): processes share the tokens of a row.

Around attention the processes exchange tokens for heads: each then has all tokens of some heads, so
that documents side by side keep their boundaries. Everything else is computed token by token.
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
"""Name of the attention for transformers."""


def register(config: PreTrainedConfig, core: str, group: Any, tensor: int) -> str:
    """Let transformers exchange tokens for heads around an attention; returns its name.

    Args:
        config: of the model's text part.
        core: name of the attention of one process.
        group: of the processes that share a row.
        tensor: processes that share the heads besides.

    Raises:
        FinetuneError: DeepSpeed is not installed.
    """
    try:
        import deepspeed
        from deepspeed.ops import __compatible_ops__ as compiled
    except ImportError:
        raise FinetuneError(f"backend: sp needs DeepSpeed: {install('deepspeed')}") from None
    compiled["deepspeed_shm_comm"] = False  # it would compile for minutes
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
    """One process's tokens of documents side by side, whose number `ways` divides.

    The label of the last token is the first of the next part: labels have one column more than ids.
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
