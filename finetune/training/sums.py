"""Sums of losses and metrics over the micro-batches of one rank, and over all ranks, by name."""

import math
from collections.abc import Mapping

import torch

from finetune.kernels.balance import parts
from finetune.methods.losses import Loss, Sum
from finetune.recipe import Recipe

LOSS, BALANCE = "loss", "router_aux_loss"


class Sums:
    """Adds up on the device, without a synchronization, what `on_host` copies once.

    Each metric is a sum and a count: `NAME sum`, `NAME count`.
    """

    def __init__(self, recipe: Recipe, batches: int, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self.losses = torch.zeros(2, batches, device=device)
        """Loss of each micro-batch with the load-balancing loss, and that part of it."""
        self.metrics = torch.zeros(2, len(recipe.metrics), device=device)
        """Sums, and counts that are known on the device only."""
        self.counts = [0] * len(recipe.metrics)
        """Counts that are known on the host."""
        self.largest = torch.full((len(recipe.extremes),), -math.inf, device=device)
        """Running maxima; a minimum is stored negated."""

    def add(self, index: int, found: Loss, tokens_per_term: float = 1.0) -> torch.Tensor:
        """Add the loss and the metrics of micro-batch `index`; returns its loss with balance."""
        loss, balance = parts(found.sum, found.balance, tokens_per_term)
        self.losses[:, index] = torch.stack([loss.detach(), balance.detach()])
        if found.extremes:
            named = [(name, found.extremes[name].detach()) for name in self.recipe.extremes]
            given = torch.stack([-e if name.startswith("min_") else e for name, e in named])
            self.largest = torch.maximum(self.largest, given.float())
        self.add_metrics(found.metrics)
        return loss

    def add_metrics(self, found: Mapping[str, Sum]) -> None:
        """Add sums and counts by the names in the method's `metrics`."""
        unknown = found.keys() - set(self.recipe.metrics)
        assert not unknown, f"not in the method's `metrics`: {unknown}"
        if not found:
            return
        zero = torch.zeros((), device=self.device)
        pairs = [found.get(name, (zero, 0)) for name in self.recipe.metrics]
        on_host = [0 if isinstance(count, torch.Tensor) else count for _, count in pairs]
        self.counts = [a + b for a, b in zip(self.counts, on_host, strict=True)]
        self.metrics[0] += torch.stack([total.detach().float() for total, _ in pairs])
        if any(isinstance(count, torch.Tensor) for _, count in pairs):
            self.metrics[1] += torch.stack(
                [c.float() if isinstance(c, torch.Tensor) else zero for _, c in pairs]
            )

    def on_host(self) -> tuple[dict[str, float], dict[str, float], torch.Tensor]:
        """Sums and maxima of this rank by name, and the losses of its micro-batches.

        Converted on the host, because not every device has fp64.
        """
        every = torch.cat([self.losses.flatten(), self.metrics.flatten(), self.largest])
        sizes = [self.losses.numel(), self.metrics.numel(), len(self.largest)]
        losses, metrics, largest = every.cpu().double().split(sizes)
        of_batches, balances = losses.view(self.losses.shape)
        sums = {LOSS: of_batches.sum().item(), BALANCE: balances.sum().item()}
        totals, counts = metrics.view(self.metrics.shape).tolist()
        for name, total, count, known in zip(
            self.recipe.metrics, totals, counts, self.counts, strict=True
        ):
            sums |= {f"{name} sum": total, f"{name} count": count + known}
        return sums, dict(zip(self.recipe.extremes, largest.tolist(), strict=True)), of_batches


def means(
    recipe: Recipe, sums: Mapping[str, float], maxima: Mapping[str, float]
) -> dict[str, float]:
    """Metrics over all ranks, without those that have a count of 0.

    Args:
        recipe: names the metrics.
        sums: sums over ranks of what `Sums.on_host` returns.
        maxima: maxima over ranks.
    """
    found = {
        name: sums[f"{name} sum"] / sums[f"{name} count"]
        for name in recipe.metrics
        if sums[f"{name} count"]
    }
    extremes = {
        name: -maxima[name] if name.startswith("min_") else maxima[name]
        for name in recipe.extremes
        if math.isfinite(maxima[name])
    }
    return recipe.derived(found) | found | extremes
