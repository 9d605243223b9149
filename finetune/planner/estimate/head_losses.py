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
# Cut or Liger cross-entropy never materializes the logits (arXiv:2411.09009).
LINEAR = Loss("linear_cut", logits=False)
# `kernels.head=chunked` of this package.
CHUNKED = Loss("finetune_chunked", logits=False, chunked=True)
# The score head of this package, at the last token of each sequence only.
SCORES = Loss("finetune_scores", logits=False)
