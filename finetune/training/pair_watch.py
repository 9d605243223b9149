"""Warn of a training on preferences whose margin grows while the wanted answers get unlikely."""

from collections.abc import Mapping

STEPS = 5
"""Steps whose means are compared: what one of a few pairs shows is mostly noise."""
MARGIN, CHOSEN = "rewards/margins", "rewards/chosen"


class PairWatch:
    """Compares the rewards of the newest steps with those of the steps before; warns once."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        self._told = False

    def warnings(self, metrics: Mapping[str, float], has_reference: bool) -> list[str]:
        """What the metrics of a step show for the first time.

        Chosen answers are less likely than at the start where their reward, which is relative to
        the reference, is below 0; without a reference, where it is below that of the first steps.

        Args:
            metrics: of a step, by name; one without both rewards is passed over.
            has_reference: whether rewards are relative to one.
        """
        if MARGIN not in metrics or CHOSEN not in metrics or self._told:
            return []
        self._seen.append((metrics[MARGIN], metrics[CHOSEN]))
        if len(self._seen) < 2 * STEPS:
            return []
        first, before, newest = (
            [sum(column) / STEPS for column in zip(*part, strict=True)]
            for part in (self._seen[:STEPS], self._seen[-2 * STEPS : -STEPS], self._seen[-STEPS:])
        )
        grows, falls = newest[0] > max(before[0], 0.0), newest[1] < before[1]
        if not (grows and falls and newest[1] < (0.0 if has_reference else first[1])):
            return []
        self._told = True
        return [
            f"{CHOSEN}: it falls ({before[1]:.3g} to {newest[1]:.3g} in the last {STEPS} steps) "
            f"while {MARGIN} grows ({before[0]:.3g} to {newest[0]:.3g}): the wanted answers get "
            "less likely too, and what the model writes may break; look at its answers, lower "
            "optim.lr, raise beta, or add sft_weight where the method has it"
        ]
