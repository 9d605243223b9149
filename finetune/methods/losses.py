"""Losses as sums over terms: the loop divides once, by the terms of the whole global batch."""

import torch

from finetune.data.collate import UNTRAINED, MicroBatch


def token_loss_sum(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Sum of the cross-entropy over the trained tokens of a micro-batch, a scalar in fp32.

    In training with a load-balancing loss it is (2,), as `finetune.kernels.balance.parts` reads it.

    `model` is one that `finetune.kernels.head.give_loss` was applied to, however it is wrapped.
    """
    places, targets = labelled(batch)
    return model(
        **batch.inputs(),
        use_cache=False,
        places=places,
        targets=targets,
        real_tokens=batch.real_tokens,
    )


def labelled(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat places (trained_tokens,) of the rows that a loss is computed from, and their targets.

    `batch.labels` (micro_rows, longest) is aligned with `batch.ids`; the token at t is predicted
    from the place t - 1, so the first label of a row is never used. Where documents lie side by
    side, the first label of each is none, so that no document is predicted from another.
    """
    length = batch.labels.shape[1]
    trained = batch.labels[:, 1:] != UNTRAINED  # (micro_rows, longest - 1)
    # The number is known, so that no accelerator has to be asked for it.
    row, column = torch.nonzero_static(trained, size=batch.trained_tokens).unbind(1)
    return row * length + column, batch.labels[row, column + 1]
