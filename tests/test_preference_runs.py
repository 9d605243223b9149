"""Runs on preferences: what they warn of, and which checkpoint is the best."""

import pytest
import torch
from preference import fields_of, pairs_file, train
from safetensors.torch import load_file

from finetune import DPO, GRPO, KTO, SFT, backend
from finetune.errors import FinetuneError
from finetune.planner.plan import plan
from finetune.runs.run import Run

BEST = "rewards/margins"


@pytest.fixture(scope="module")
def given(tiny, shared):
    return fields_of("dpo", tiny.model, pairs_file(shared), "preference", beta=0.3)


@pytest.fixture(scope="module")
def broken(given, tmp_path_factory) -> Run:
    """A run with a learning rate at which answers break."""
    evaluation = {"every": 2, "best": BEST}
    sections = {"max_steps": 20, "eval_rows": 6, "saving": {"keep": 1}, "evaluation": evaluation}
    fields = given | sections | {"optim": given["optim"] | {"lr": 3e-2}}
    return train(tmp_path_factory.mktemp("broken") / "run", fields)


def told(run: Run) -> list[tuple[int, str]]:
    return [(each["step"], each["told"]) for each in run.read_metrics("warning")]


def test_a_margin_that_grows_while_the_chosen_answers_get_unlikely_is_warned_of_once(broken):
    ((step, words),) = told(broken)
    seen = [each["metrics"] for each in broken.read_metrics("train")][:step]
    before, newest = seen[-10:-5], seen[-5:]

    def mean(part: list[dict[str, float]], name: str) -> float:
        return sum(each[f"rewards/{name}"] for each in part) / 5

    assert mean(newest, "margins") > mean(before, "margins") > 0
    assert mean(newest, "chosen") < min(0, mean(before, "chosen"))
    assert words.startswith(
        f"rewards/chosen: it falls ({mean(before, 'chosen'):.3g} to {mean(newest, 'chosen'):.3g} in"
    )
    assert "lower optim.lr, raise beta, or add sft_weight" in words


def test_a_margin_that_grows_with_the_chosen_answers_is_not_warned_of(given, tmp_path):
    run = train(tmp_path / "run", given | {"max_steps": 12, "optim": given["optim"] | {"lr": 1e-4}})
    last = list(run.read_metrics("train"))[-1]["metrics"]
    assert last["rewards/margins"] > last["rewards/chosen"] > 0
    assert told(run) == []


def test_the_best_checkpoint_is_the_one_with_the_best_metric(broken: Run) -> None:
    found = list(broken.read_metrics("eval"))
    best = max(found, key=lambda each: each["metrics"][BEST])
    assert best["step"] not in (min(found, key=lambda each: each["loss"])["step"], found[0]["step"])
    assert broken.best_step() == best["step"]
    running = [-each["metrics"][BEST] for each in found]
    assert [each["best"] for each in found] == [
        running[n] < min(running[:n], default=torch.inf) for n in range(len(running))
    ]
    kept, final = (
        load_file(place / "model.safetensors")
        for place in (broken.checkpoint(best["step"]) / "model", broken.final)
    )
    assert kept.keys() == final.keys()
    assert all(kept[name].equal(final[name]) for name in kept)


REWARDED = GRPO(eval_rows=2, eval_reward_funcs=("json_valid",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recipe", "best", "expected"),
    [
        (DPO(eval_rows=2), "rewards/accuracies", ""),
        (KTO(eval_rows=2), "rewards/margins", ""),
        (REWARDED, "rewards/json_valid/mean", ""),
        (
            REWARDED,
            "rewards/json/mean",
            "rewards/json/mean is not measured by method grpo; available are loss, reward, "
            "rewards/json_valid/mean, completions/mean_length",
        ),
        (SFT(eval_rows=2).with_evaluation(metrics=("labels",)), "macro_f1", ""),
        (DPO(), "rewards/accuracies", "rewards/accuracies, but nothing is evaluated; give"),
        (DPO(eval_rows=2), "accuracy", "accuracy is not measured by method dpo; available are"),
        (SFT(eval_rows=2), "-kl", "-kl is not measured by method sft; available are loss"),
    ],
)
def test_a_best_by_what_is_not_measured_is_refused(recipe, best, expected):
    try:
        plan(recipe.with_evaluation(best=best), backend.load("single"), 1, "fp32")
    except FinetuneError as error:
        problems = [each for each in error.problems if each.startswith("evaluation.best")]
    else:
        problems = []
    assert [expected in each for each in problems] == ([True] if expected else [])
