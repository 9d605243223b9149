"""Hold a sampling of an online method: completions, rewards, advantages, and their metrics."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from finetune.data.rows.store import Documents, Rows
from finetune.data.rows.stored_images import Images
from finetune.errors import reading
from finetune.inference.sampling import Completion
from finetune.methods.online import ADVANTAGE, OLD, REFERENCE, Online, group_stds
from finetune.rewards import Reward, names
from finetune.runs.run import naming, replacing, write_whole

NO_SPREAD = 1e-12
"""Standard deviation of a group's rewards below which the group gives no learning signal."""

NO_EVALUATION = (
    "reward: no completion of the evaluation got a score, because every reward returned None, so "
    "no checkpoint is the best: check that the held-out rows have the columns that the rewards read"
)


class Scored(NamedTuple):
    """Completions of groups with their rewards, as in `Sampled`."""

    prompts: np.ndarray
    completions: list[Completion]
    scores: np.ndarray
    rewards: np.ndarray

    def spread(self, each: int) -> np.ndarray:
        """Whether the rewards of each group of `each` completions differ.  # (groups,) bool"""
        return group_stds(self.rewards.reshape(-1, each))[:, 0] >= NO_SPREAD

    def replace_flat(self, others: "Scored", each: int) -> None:
        """Put groups of `others` with spread in the places of those without, in their order."""
        flat, better = np.flatnonzero(~self.spread(each)), np.flatnonzero(others.spread(each))
        for old, new in zip(flat, better, strict=False):
            here, there = (slice(at * each, (at + 1) * each) for at in (old, new))
            self.completions[here] = others.completions[there]
            self.prompts[here], self.rewards[here] = others.prompts[there], others.rewards[there]
            self.scores[:, here] = others.scores[:, there]


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Completions of a sampling in the order of their prompts; the same on every rank."""

    prompts: np.ndarray  # (completions,) int64: number of each prompt in the data
    completions: list[Completion]
    scores: np.ndarray  # (rewards, completions) fp64, NaN for no score
    rewards: np.ndarray  # (completions,) fp64, NaN for no score
    advantages: np.ndarray  # (completions,) fp64
    kls: np.ndarray | None = None  # (completions,) fp64
    """log(policy / reference) of each completion; None unless rewards are penalized by it."""

    def rows(self, data: Rows, recipe: Online) -> Rows:
        """Training rows of prompt and completion, in the order of the completions."""
        given = [data.documents.document(int(data.members[row]))[0] for row in self.prompts]
        sampled = [np.array(each.ids, dtype=np.int32) for each in self.completions]
        counted = [each.ended or not recipe.mask_truncated_completions for each in self.completions]
        ids = np.concatenate([part for pair in zip(given, sampled, strict=True) for part in pair])
        trained = [
            np.repeat([False, is_counted], [len(a), len(b)])
            for a, b, is_counted in zip(given, sampled, counted, strict=True)
        ]
        lengths = [len(a) + len(b) for a, b in zip(given, sampled, strict=True)]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        members = data.members[self.prompts]
        images = [data.documents.images_of(int(number)) for number in members]
        documents = Documents(
            ids, np.concatenate(trained), offsets, data.documents.origins[members],
            images=Images.of_lists(images) if any(images) else None,
        )  # fmt: skip
        advantages = np.where(counted, self.advantages, 0.0).astype(np.float32)
        number = np.arange(len(sampled))
        return Rows(
            documents, number, np.arange(len(sampled) + 1), packed=False,
            padding_free=data.padding_free, share_prompts=data.share_prompts,
            prompts=self.prompts if data.share_prompts else None, columns={ADVANTAGE: advantages},
            image_inputs=data.image_inputs,
        )  # fmt: skip


def penalised(
    sampled: Sampled, recipe: Online, rows: Rows, of_tokens: Mapping[str, np.ndarray]
) -> Sampled:
    """The sampling with `recipe.penalty` x log(policy / reference) subtracted from its rewards.

    The log-probability of a completion is the sum over its tokens. A masked completion has no
    log-probabilities, so its reward is unchanged.

    Args:
        sampled: the sampling with the original rewards.
        recipe: computes advantages from rewards.
        rows: rows of the sampling.
        of_tokens: log-probabilities of the rows' tokens by the policy and by the reference.
    """
    apart = (of_tokens[OLD] - of_tokens[REFERENCE]).astype(np.float64)
    kls = np.add.reduceat(apart, rows.documents.offsets[:-1])
    rewards = sampled.rewards - recipe.penalty * kls
    groups = rewards.reshape(-1, recipe.num_generations)
    advantages = recipe.advantages(groups).ravel()
    return dataclasses.replace(sampled, rewards=rewards, advantages=advantages, kls=kls)


def sampler_logps(sampled: Sampled, rows: Rows) -> np.ndarray:
    """Log-probabilities of the completions' tokens by their sampler, 0 elsewhere.

    Args:
        sampled: the sampling, whose completions have log-probabilities.
        rows: rows of the sampling.

    Returns:
        (tokens,) fp32, for all tokens of the rows.
    """
    values = np.zeros(len(rows.documents.ids), dtype=np.float32)
    for each, end in zip(sampled.completions, rows.documents.offsets[1:], strict=True):
        values[end - len(each.ids) : end] = each.logps
    return values


def total(scores: np.ndarray, rewards: Sequence[Reward]) -> np.ndarray:
    """Weighted sum of the finite scores, NaN if there are none.  # (completions,)"""
    weights = np.array([[reward.weight] for reward in rewards])
    scored = np.isfinite(scores)
    summed = (np.where(scored, scores, 0.0) * weights).sum(axis=0)
    return np.where(scored.any(axis=0), summed, np.nan)


def metrics(sampled: Sampled, rewards: Sequence[Reward], each: int) -> dict[str, float]:
    """Metrics of a sampling under TRL's names, without those that are not finite.

    Args:
        sampled: the sampling.
        rewards: the reward functions, in the order of the scores.
        each: completions per prompt.
    """
    stds = group_stds(sampled.rewards.reshape(-1, each))[:, 0]
    found = {
        "reward": mean(sampled.rewards),
        "reward_std": _std(sampled.rewards),
        "frac_reward_zero_std": float((stds < NO_SPREAD).mean()),
        **lengths(sampled.completions),
    }
    for name, scores in zip(names(rewards), sampled.scores, strict=True):
        found[f"rewards/{name}/mean"] = mean(scores)
        found[f"rewards/{name}/std"] = _std(scores)
    if sampled.kls is not None:
        found["kl"] = float(sampled.kls.mean())
    return {name: value for name, value in found.items() if np.isfinite(value)}


def lengths(completions: Sequence[Completion]) -> dict[str, float]:
    """Lengths in tokens, the share cut off at the limit, and the mean entropy per token in nats."""
    numbers = np.array([len(each.ids) for each in completions])
    ended = numbers[[each.ended for each in completions]]
    return {
        "completions/mean_length": float(numbers.mean()),
        "completions/min_length": float(numbers.min()),
        "completions/max_length": float(numbers.max()),
        "completions/clipped_ratio": 1 - len(ended) / len(numbers),
        "completions/mean_terminated_length": float(ended.mean()) if len(ended) else np.nan,
        "entropy": sum(each.entropy for each in completions) / max(1, int(numbers.sum())),
    }


def _std(values: np.ndarray) -> float:
    """Sample standard deviation of the values that are there, NaN for fewer than two."""
    return float(np.nanstd(values, ddof=1)) if _some(values) else np.nan


def _some(scores: np.ndarray) -> bool:
    return int(np.isfinite(scores).sum()) > 1


def finite(value: float) -> float | None:
    """A number as JSON holds it; None for NaN."""
    return value if np.isfinite(value) else None


def mean(scores: np.ndarray) -> float:
    """Mean of the scores, ignoring NaN; NaN if there are none."""
    return float(np.nanmean(scores)) if np.isfinite(scores).any() else np.nan


class Watch:
    """Warns if a training gets no learning signal, loses its entropy, or truncates completions."""

    FLAT, FLAT_STEPS = 0.9, 5
    """Share of groups with equal rewards, and samplings in a row above it, for a warning."""
    GONE = 0.1
    """Share of the first sampling's entropy below which to warn."""
    CUT = 0.5
    """Share of truncated completions above which to warn."""

    def __init__(self) -> None:
        self._flat, self._entropy = 0, 0.0
        self._reported: set[str] = set()

    def warnings(self, found: dict[str, float]) -> list[str]:
        """New warnings after a sampling; each kind is returned once."""
        self._flat = self._flat + 1 if found["frac_reward_zero_std"] > self.FLAT else 0
        self._entropy = self._entropy or found["entropy"]
        seen = {
            "reward: no completion of a sampling got a score, because every reward returned None: "
            "check that the rewards find what they look for": "reward" not in found,
            f"nothing is learned: in {self._flat} samplings in a row more than {self.FLAT:.0%} of "
            "the prompts got completions of equal reward; use prompts that the model sometimes "
            "answers correctly, a finer reward, or a larger num_generations": self._flat
            >= self.FLAT_STEPS,
            f"entropy: it fell below {self.GONE:.0%} of its first value, so completions of a "
            "prompt hardly differ; lower optim.lr, or stop here": found["entropy"]
            < self.GONE * self._entropy,
            f"completions/clipped_ratio: more than {self.CUT:.0%} of the completions reached "
            "max_completion_length before they ended; raise it, or set "
            "mask_truncated_completions=true": found["completions/clipped_ratio"] > self.CUT,
        }
        by_kind = {text.split(":")[0]: text for text, is_so in seen.items() if is_so}
        new = [by_kind[kind] for kind in by_kind if kind not in self._reported]
        self._reported |= by_kind.keys()
        return new

    def warnings_of_evaluation(self, reward: float) -> list[str]:
        """The warning after the first evaluation whose mean reward is NaN: nothing is scored."""
        if np.isfinite(reward) or NO_EVALUATION in self._reported:
            return []
        self._reported.add(NO_EVALUATION)
        return [NO_EVALUATION]


# --- files of the run ----------------------------------------------------------------------------


def write(path: Path, sampled: Sampled, of_tokens: dict[str, np.ndarray]) -> None:
    """Write a sampling that several steps train on, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    completions = sampled.completions
    with replacing(path) as scratch, scratch.open("wb") as file:
        np.savez(
            file,
            prompts=sampled.prompts,
            ids=np.concatenate([np.array(each.ids, dtype=np.int32) for each in completions]),
            lengths=np.array([len(each.ids) for each in completions]),
            ended=np.array([each.ended for each in completions]),
            entropies=np.array([each.entropy for each in completions]),
            scores=sampled.scores,
            rewards=sampled.rewards,
            advantages=sampled.advantages,
            **({} if sampled.kls is None else {"kls": sampled.kls}),
            **{f"token_{name}": values for name, values in of_tokens.items()},
        )


def read(path: Path) -> tuple[Sampled, dict[str, np.ndarray]]:
    """Read a file of `write`: the sampling, and log-probabilities of tokens by name.

    Raises:
        FinetuneError: the file cannot be read.
    """
    with reading(
        f"{path}: the completions of an unfinished sampling cannot be read",
        "restore the file from a copy, or resume from an older checkpoint",
    ):
        with np.load(path) as file:
            found = {name: file[name] for name in file.files}
        parts = np.split(found["ids"], np.cumsum(found["lengths"])[:-1])
        completions = [
            Completion(ids.tolist(), bool(ended), float(entropy))
            for ids, ended, entropy in zip(parts, found["ended"], found["entropies"], strict=True)
        ]
        kept = (found[name] for name in ("scores", "rewards", "advantages"))
        sampled = Sampled(found["prompts"], completions, *kept, found.get("kls"))
    return sampled, {
        name.removeprefix("token_"): values
        for name, values in found.items()
        if name.startswith("token_")
    }


def forget_after(path: Path, step: int) -> None:
    """Delete logged completions from `step` on, which will be sampled again."""
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    write_whole(path, "".join(f"{line}\n" for line in lines if _step_of(line) < step))


def log(path: Path, step: int, shown: list[dict[str, Any]]) -> None:
    """Append completions of the sampling that starts at `step`."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.writelines(
            json.dumps({"step": step, **each}, ensure_ascii=False) + "\n" for each in shown
        )


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):  # a line left incomplete by a kill
        return 2**62
