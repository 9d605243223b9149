"""Memory of implementations of the loss, per token and vocabulary entry."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Loss:
    """Memory of a loss implementation, in bytes per token and vocabulary entry."""

    name: str
    exact: bool = False
    """Traced operation by operation (the profile of transformers >= 4.45 and of this package)."""
    forward: float = 0.0
    """Peak of the loss's forward pass, in addition to the logits."""
    saved: float = 0.0
    """Bytes saved for the backward pass."""
    backward: float = 0.0
    """Peak of its backward pass, including the gradient of the logits."""
    retained: float = 0.0
    """Bytes that a reference to the output keeps alive during the complete backward pass."""
    picked: bool = False
    """Logits of labelled rows are copied before the cast to fp32, and the full logits stay."""
    selected: bool = False
    """Only hidden states of labelled rows enter the head."""
    logits: bool = True
    """Whether all logits are in memory at once."""
    chunked: bool = False
    """Computed by `kernels.head=chunked`, which is traced operation by operation."""


# Logits in bf16 (2) become fp32 (4), log-probabilities (4), and two gradients of 4 each.
HF = Loss("hf", exact=True)
# `kernels.head=whole` of this package: the same operations on labelled rows.
OURS = Loss("finetune", exact=True, picked=True)
# `kernels.head=labelled`: only hidden states of labelled tokens go through the head.
LABELLED = Loss("finetune_labelled", exact=True, selected=True)
# The model's output keeps a reference to the bf16 logits during the backward pass.
HF_OUTPUT_KEPT = Loss("hf_output_kept", exact=True, retained=2)
# Accelerate's autocast returns fp32 logits, which the output keeps alive: 4 more bytes, 16 in all.
HF_AUTOCAST = Loss("hf_autocast", exact=True, retained=4)
# transformers < 4.45: fp32 logits returned, shifted copy, log-probabilities, two gradients: 20.
HF_BEFORE_4_45 = Loss("hf_pre_4.45", forward=12, saved=8, backward=16, retained=4)
# Cross-entropy in 8 chunks over bf16 logits: an eager chunk holds 12 bytes, a compiled one 4.
CHUNKED_8 = Loss("chunked8", forward=12 / 8, saved=2, backward=2 + 12 / 8)
CHUNKED_8_COMPILED = Loss("chunked8_compiled", forward=4 / 8, saved=2, backward=2 + 4 / 8)
# litgpt computes fp32 cross-entropy in chunks of 128 rows and keeps log-probabilities: 10 at most.
LITGPT = Loss("litgpt_chunked", forward=8, saved=6, backward=10)
# Cut or Liger cross-entropy never materializes the logits (arXiv:2411.09009).
LINEAR = Loss("linear_cut", logits=False)
# `kernels.head=chunked` of this package.
CHUNKED = Loss("finetune_chunked", logits=False, chunked=True)
# The score head of this package, at the last token of each sequence only.
SCORES = Loss("finetune_scores", logits=False)
LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        HF, OURS, HF_OUTPUT_KEPT, HF_AUTOCAST, HF_BEFORE_4_45, CHUNKED_8, CHUNKED_8_COMPILED,
        LITGPT, LINEAR, CHUNKED, LABELLED, SCORES,
    )
}  # fmt: skip
