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

from finetune.data.rows.collate import UNTRAINED, DividedDocuments, MicroBatch


def register(config: PreTrainedConfig, core: str, group: Any, tensor: int) -> str:
    """Register an attention that exchanges tokens for heads in transformers; returns its name.

    Args:
        config: Configuration of the model.
        core: Name of the attention of a single process.
        group: Process group that shares a row.
        tensor: Number of tensor-parallel processes, which also divide the heads.
    """
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as compiled

    compiled["deepspeed_shm_comm"] = False  # compiling it would take minutes
    backend = torch.distributed.get_backend()
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    text = config.get_text_config()
    heads, keys = text.num_attention_heads, text.num_key_value_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    exchanged = UlyssesSPAttentionHF(
        attn=ALL_ATTENTION_FUNCTIONS[core],
        batch_size=1,
        attn_head_count=heads // tensor,
        attn_head_size=size,
        kv_head_count=keys // tensor,
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

    name = f"ulysses_{heads}_{keys}_{size}"  # a teacher may have other heads
    AttentionInterface.register(name, attend)
    return name


def part(batch: MicroBatch, rank: int, ways: int, group: Any) -> MicroBatch:
    """One process's part of a packed row, whose number of tokens must be divisible by `ways`.

    Labels have one column more than ids: the first label of the next part. Documents belong to the
    first process, so that each counts once; `MicroBatch.divided` has the parts of every process.

    Args:
        batch: The complete row.
        rank: Index of the process among those that share the row.
        ways: Number of these processes.
        group: Their process group, in the order of the tokens.
    """
    bounds = batch.boundaries
    assert bounds is not None
    share = batch.ids.shape[1] // ways
    mine = slice(rank * share, (rank + 1) * share)
    whole = F.pad(batch.labels, (0, 1), value=UNTRAINED)
    labels = whole[:, mine.start : mine.stop + 1]
    trained = int((labels[:, 1:] != UNTRAINED).sum())
    before = int((whole[:, 1 : mine.start + 1] != UNTRAINED).sum())
    of_tokens = {n: each[before : before + trained] for n, each in batch.token_columns.items()}
    batch = dataclasses.replace(batch, divided=_documents(batch, whole[0], mine, group))
    if rank:
        none = batch.document_labels[:0]
        columns = {name: values[:0] for name, values in batch.columns.items()}
        batch = dataclasses.replace(batch, document_labels=none, last_places=none, columns=columns)
    return dataclasses.replace(
        batch,
        ids=batch.ids[:, mine].contiguous(),
        labels=labels,
        trained_tokens=trained,
        token_columns=of_tokens,
        noise=None if batch.noise is None else batch.noise.part(mine),
        boundaries=dataclasses.replace(bounds, positions=bounds.positions[:, mine].contiguous()),
    )


def _documents(
    batch: MicroBatch, labels: torch.Tensor, mine: slice, group: Any
) -> DividedDocuments:
    """The part of each document in the tokens `mine`; `labels` is (tokens + 1,), not shifted."""
    assert batch.boundaries is not None
    count = len(batch.document_labels)
    ends, device = batch.boundaries.numbers[: count + 1], labels.device
    # The label of a part's last token is the next part's first, and a document's first has none.
    cuts = torch.tensor(ends, device=device).clamp(mine.start + 1, mine.stop + 1)
    before = F.pad((labels != UNTRAINED).cumsum(0), (1, 0))  # labels before each token
    lasts = [(number, end - 1) for number, end in enumerate(ends[1:])]
    here = [(number, last) for number, last in lasts if mine.start <= last < mine.stop]
    return DividedDocuments(
        group,
        before[cuts].diff(),
        torch.tensor([number for number, _ in here], dtype=torch.int64, device=device),
        torch.tensor([last - mine.start for _, last in here], dtype=torch.int64, device=device),
    )
