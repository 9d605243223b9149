"""Completions that a run of an online method passes over: without a score, or cut off."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, Tiny
from preference import completions, sampled_fields, train

from finetune import catalog
from finetune.errors import FinetuneError
from finetune.methods.grpo import GRPO
from finetune.reports.inspection import visible
from finetune.runs.run import Run
from finetune.training.online.first_samples import inspect_samples


def one_step(tiny: Tiny, prompts: Path, place: Path, *rewards: str, **sections: Any) -> Run:
    """A step of two prompts, whose completions are all kept in the record."""
    return train(place, sampled_fields(tiny.model, prompts, reward_funcs=rewards, **sections))


def test_completions_whose_reward_fails_are_left_out_and_named(tiny, prompts, tmp_path):
    run = one_step(tiny, prompts, tmp_path / "run", "lengths:even", on_reward_error="skip")
    found = completions(run)
    lengths = [len(each["completion"]) for each in found]
    rewards = [None if length % 2 else float(length) for length in lengths]
    assert 2 <= rewards.count(None) <= 5
    assert [each["reward"] for each in found] == rewards
    known = np.array(rewards, dtype=float)
    advantages = GRPO(num_generations=4).advantages(known.reshape(2, 4)).ravel()
    assert [each["advantage"] for each in found] == pytest.approx(advantages.tolist())
    assert not advantages[np.isnan(known)].any()
    (step,) = run.read_metrics("train")
    assert step["metrics"]["reward"] == pytest.approx(np.nanmean(known))
    assert step["grad_norm"] > 0
    told = [each["told"] for each in run.read_metrics("warning")]
    (warning,) = [each for each in told if "lengths" in each]
    first = next(each for each in found if each["reward"] is None)
    assert warning.startswith("reward 'lengths:even' raises ValueError: an odd length")
    assert repr(first["prompt"]) in warning
    assert repr(first["completion"]) in warning


def test_a_run_trains_no_token_of_a_completion_that_was_cut_off(tiny, prompts, tmp_path):
    """The completions are the same, whether the loss counts those that ran into the limit."""
    counted, masked = (
        one_step(
            tiny, prompts, tmp_path / str(masks), "lengths:length", max_completion_length=60,
            batch={"rows": 16, "max_length": 100}, num_generations=8,
            mask_truncated_completions=masks,
        )
        for masks in (False, True)
    )  # fmt: skip
    found = completions(masked)
    assert found == completions(counted)
    cut = [each["tokens"] for each in found if not each["ended"]]
    ended = [each["tokens"] for each in found if each["ended"]]
    assert set(cut) == {60}
    assert ended
    (every,), (some,) = (list(run.read_metrics("train")) for run in (counted, masked))
    assert every["trained_tokens"] == sum(cut) + sum(ended)
    assert some["trained_tokens"] == sum(ended)
    assert 0 < some["grad_norm"] != every["grad_norm"]


def test_the_completions_of_a_prompt_share_it_in_as_few_micro_batches_as_possible(
    tiny, prompts, tmp_path
):
    """Two groups of four in four micro-batches of two, so half of the prompts are repeated."""
    texts = ("a cat sees the dog", "the dog sees a cat", "some birds sing")
    prompts.write_text("".join(f'{{"prompt": "{text * 3}"}}\n' for text in texts))
    shared, repeated = (
        one_step(
            tiny, prompts, tmp_path / str(share), "lengths:length", beta=0.1, max_steps=2,
            batch={"micro_rows": 2, "share_prompts": share},
        )
        for share in ("auto", False)
    )  # fmt: skip
    assert completions(shared) == completions(repeated)
    for once, again in zip(*(run.read_metrics("train") for run in (shared, repeated)), strict=True):
        assert once["real_tokens"] == again["real_tokens"] == again["slots"]
        assert once["slots"] == again["slots"] - (again["slots"] - again["trained_tokens"]) // 2
        assert once["loss"] == pytest.approx(again["loss"], abs=1e-6)
        assert once["grad_norm"] == pytest.approx(again["grad_norm"], rel=1e-4)
        assert once["grad_norm"] > 0


def test_a_run_warns_where_nothing_is_learned_and_where_completions_are_cut_off(
    tiny, prompts, tmp_path
):
    """No completion is JSON, so all groups are flat; most do not end within ten tokens."""
    run = one_step(tiny, prompts, tmp_path / "run", "json_valid", max_steps=6)
    assert all(each["grad_norm"] == 0 for each in run.read_metrics("train"))
    told = [(each["step"], each["told"].split(":")[0]) for each in run.read_metrics("warning")]
    assert told == [(1, "completions/clipped_ratio"), (5, "nothing is learned")]


def test_a_run_warns_where_its_entropy_is_gone(tiny, prompts, tmp_path):
    optim = {"lr": 1.0, "schedule": "constant", "warmup": 0}
    run = one_step(tiny, prompts, tmp_path / "run", "lengths:length", optim=optim, max_steps=4)
    entropies = [each["metrics"]["entropy"] for each in run.read_metrics("train")]
    gone = next(n for n, value in enumerate(entropies) if value < 0.1 * entropies[0])
    told = [each for each in run.read_metrics("warning") if each["told"].startswith("entropy")]
    assert [each["step"] for each in told] == [gone + 1]


def test_inspect_samples_what_the_first_step_samples(tiny, prompts, finetune, tmp_path):
    run = one_step(tiny, prompts, tmp_path / "run", "lengths:length", "json_valid")
    shown = inspect_samples(catalog.load(run.recipe), rows=2, each=3).completions
    assert [
        (one.text, one.reward, one.rewards, one.tokens, one.ended) for row in shown for one in row
    ] == [
        tuple(each[name] for name in ("completion", "reward", "rewards", "tokens", "ended"))
        for number, each in enumerate(completions(run))
        if number % 4 < 3
    ]
    done = finetune("inspect", run.recipe, "--rows", 1, "--completions", 1,
                    env={"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}).passed()  # fmt: skip
    first = shown[0][0]
    assert f"completion  {first.counted}" in done.stdout
    assert visible(first.text) in done.stdout


def test_only_online_methods_are_sampled_from(tiny: Tiny) -> None:
    with pytest.raises(FinetuneError, match="--completions: method sft samples no completions"):
        inspect_samples(catalog.from_fields(tiny.fields()), rows=1, each=1)


def test_tokens_sampled_from_few_are_weighted_by_their_probability_in_training(
    tiny, prompts, tmp_path
):
    """Without tokens that are left out, those that stay are likelier: a weight is at most 1."""
    every, some = (
        one_step(tiny, prompts, tmp_path / str(count), "lengths:length", top_k=count)
        for count in (0, 3)
    )
    ratio = "sampling/importance_sampling_ratio"
    (plain,), (few,) = (list(run.read_metrics("train")) for run in (every, some))
    assert f"{ratio}/mean" not in plain["metrics"]
    assert 0 < few["metrics"][f"{ratio}/mean"] < few["metrics"][f"{ratio}/max"] <= 1 + 1e-5
