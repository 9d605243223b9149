"""Warn when a preference training grows its margin while chosen answers get less likely."""

from collections.abc import Mapping

STEPS = 5
"""Steps per mean that is compared; a single step of a few pairs is mostly noise."""
MARGIN, CHOSEN = "rewards/margins", "rewards/chosen"


class PairWatch:
    """Compares the mean rewards of the newest steps with the steps before them; warns once."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        self._reported = False

    def warnings(self, metrics: Mapping[str, float], has_reference: bool) -> list[str]:
        """New warnings after a step.

        Chosen answers are less likely than at the start if their reward, which is relative to the
        reference, is below 0; without a reference, if it is below that of the first steps.

        Args:
            metrics: metrics of the step by name; a step without both rewards is ignored.
            has_reference: whether rewards are relative to a reference.
        """
        if MARGIN not in metrics or CHOSEN not in metrics or self._reported:
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
        self._reported = True
        return [
            f"{CHOSEN}: it falls ({before[1]:.3g} to {newest[1]:.3g} in the last {STEPS} steps) "
            f"while {MARGIN} grows ({before[0]:.3g} to {newest[0]:.3g}): the chosen answers get "
            "less likely too, and the model's output may degrade; look at its answers, lower "
            "optim.lr, raise beta, or add sft_weight if the method has it"
        ]
