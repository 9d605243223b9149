"""Memory of the language model head with its loss: all logits at once, or in chunks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.record import Result
from finetune.kernels.chunked_loss import ChunkedLogProbs, ChunkedLoss
from finetune.planner.kernels import CHUNK_ENTRIES, TILE_ENTRIES
from finetune.runs import units
from finetune.training.memory_meter import counting

VOCABULARY, HIDDEN = 32_000, 576
LABELS = (512, 1024, 2048, 4096)
CHUNK, TILE = CHUNK_ENTRIES // VOCABULARY, TILE_ENTRIES // VOCABULARY

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def measure() -> Result:
    """Peak bytes of new tensors in forward and backward, by head and number of labels."""
    works: dict[str, Compute] = {"whole": whole, "logps": logps, "loss": loss}
    values: dict[str, dict[str, Any]] = {}
    for trained in (False, True):
        for labels in LABELS:
            kind = "trained" if trained else "frozen"
            peaks = {name: peak(work, labels, trained) for name, work in works.items()}
            values[f"{kind}, {labels}"] = {"head": kind, "labels": labels, **peaks}
            print(f"{kind}, {labels}: {peaks['logps'] / peaks['whole']:.3f}", flush=True)
    how = (
        f"A head of {VOCABULARY:,} tokens by {HIDDEN} in fp32, on a CPU. Bytes of the tensors that "
        "PyTorch allocates for the loss and its gradients, at their peak over a forward and a "
        "backward pass; what is given (hidden states, weight, labels) is not counted. Whole "
        "logits: `cross_entropy` of `linear`, for each label. A trained head has the gradient of "
        f"its weight, {units.size(4 * VOCABULARY * HIDDEN)}, in every case."
    )
    return Result("Memory of the head", how, values, tabulate(values), [])


def tabulate(values: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = [
        ["head", "labels", "whole logits", "log-probabilities", "of it", "summed loss", "of it"]
    ]
    for found in values.values():
        row = [found["head"], f"{found['labels']:,}", units.size(found["whole"])]
        for name in ("logps", "loss"):
            row += [units.size(found[name]), f"{found[name] / found['whole']:.3f}"]
        rows.append(row)
    return rows


def peak(compute: Compute, labels: int, trained: bool) -> int:
    """Peak bytes of new tensors."""
    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN).mul_(0.02).requires_grad_(trained)
    hidden = torch.randn(labels, HIDDEN, requires_grad=True)
    targets = torch.randint(VOCABULARY, (labels,))
    with counting(torch.device("cpu")) as counted:
        found = compute(hidden, weight, targets)
        found.backward(torch.ones_like(found))
    return counted[0]


def whole(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -F.cross_entropy(F.linear(hidden, weight), targets, reduction="none")


def logps(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    given = hidden, weight, None, targets, 1.0, None, CHUNK, TILE
    return ChunkedLogProbs.apply(*given)  # type: ignore[no-any-return]


def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    given = hidden, weight, None, targets, 1.0, None, CHUNK, TILE
    return ChunkedLoss.apply(*given)  # type: ignore[no-any-return]
