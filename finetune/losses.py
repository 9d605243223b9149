"""Losses as sums over terms: the loop divides once, by the terms of the whole global batch."""

import torch
import torch.nn.functional as F

from finetune.data.batch import MicroBatch


def token_loss_sum(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Sum of the cross-entropy over the trained tokens of a micro-batch, a scalar in fp32.

    `batch.labels` (micro_rows, longest) is aligned with `batch.ids`; the token at t is predicted
    from the logits at t - 1, so the first label of a row is never used. Where documents lie side by
    side, the first label of each is none, so that no document is predicted from another.
    """
    outputs = model(**batch.inputs(), use_cache=False)
    logits = outputs.logits[:, :-1].float()  # (micro_rows, longest - 1, vocabulary)
    targets = batch.labels[:, 1:]  # (micro_rows, longest - 1)
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets.reshape(-1),
        ignore_index=-100,
        reduction="sum",
    )
