"""Online training: the same however it is cut, spread over processes or interrupted."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, Tiny, copy_of, once, slow_but, write_recipe
from documents import documents_of
from preference import WORDS, completions, logp, merged, other_model, sampled_fields, train, written
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune import catalog
from finetune.data.rows.order import rows_of_step
from finetune.data.rows.store import single_rows
from finetune.errors import FinetuneError, TrainingFailure
from finetune.inference.sampling import Completion
from finetune.methods.grpo import GRPO
from finetune.methods.online import ADVANTAGE
from finetune.planner import plan
from finetune.runs.run import Run
from finetune.training.online.sampled import NO_EVALUATION, Sampled, Watch, read
from finetune.verification.proofs import online_runs as of_proofs
from finetune.verification.proofs.matrix import FP32

STEPS = 3
EXACT = 2e-5
"""Relative, in fp32: sums of tens of log-probabilities in another order."""


@pytest.fixture(scope="session")
def data(shared) -> Path:
    rng = random.Random(3)
    rows = [
        {
            "prompt": [{"role": "user", "content": " ".join(rng.choices(WORDS, k=1 + n % 7))}],
            "scale": 0.5,
        }
        for n in range(14)
    ]
    return once(shared / "methods/prompts.jsonl", lambda path: written(path, rows))


def fields(tiny: Tiny, data: Path, **sections: Any) -> dict[str, Any]:
    """Sixteen completions are sampled for two steps, and some are evaluated."""
    base = {
        "eval_rows": 4, "batch": {"rows": 16, "micro_rows": 4, "max_length": 80},
        "saving": {"every": 1, "keep": 9}, "evaluation": {"every": 2},
        "reward_funcs": ["own_rewards:vowels", {"function": "json_valid", "weight": 2.0}],
        "eval_reward_funcs": ["json_valid"], "num_iterations": 2, "max_steps": STEPS,
    }  # fmt: skip
    return merged(sampled_fields(tiny.model, data, **base), sections)


def unevaluated(given: dict[str, Any]) -> dict[str, Any]:
    left_out = ("evaluation", "eval_rows", "eval_reward_funcs")
    return {name: value for name, value in given.items() if name not in left_out}


@pytest.fixture(scope="module")
def alone(tiny, data, tmp_path_factory) -> Run:
    """On one process, with two updates of each sampling."""
    return train(tmp_path_factory.mktemp("alone") / "run", fields(tiny, data))


def records(run: Run, kind: str) -> list[dict[str, float]]:
    """Numbers of each record, without those of the clock."""
    return [
        {
            "loss": each["loss"],
            "grad_norm": each.get("grad_norm", 0.0),
            **{n: v for n, v in each["metrics"].items() if not n.startswith("sampling/")},
        }
        for each in run.read_metrics(kind)
    ]


def assert_same(run: Run, other: Run, tolerance: float = EXACT) -> None:
    for kind in ("train", "eval"):
        mine, theirs = records(run, kind), records(other, kind)
        assert len(mine) == len(theirs) > 0
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert a.keys() == b.keys()
            for name, value in b.items():
                near = pytest.approx(value, rel=tolerance, abs=tolerance)
                assert a[name] == near, (kind, step, name)
    for a, b in zip(completions(run), completions(other), strict=True):
        assert (a["completion"], a["rewards"]) == (b["completion"], b["rewards"])


@pytest.mark.parametrize("times", [0, 3])
def test_prompts_without_a_signal_are_replaced_by_others(tiny, tmp_path, times):
    """By the first ones with a signal of another shuffle, at most so many times as are asked."""
    rows = [
        {"prompt": [{"role": "user", "content": WORDS[n]}], "scale": float(n % 3 == 0)}
        for n in range(10)
    ]
    given = fields(
        tiny, written(tmp_path / "rows.jsonl", rows), reward_funcs=["own_rewards:scaled"]
    )
    given = unevaluated(given) | {"max_steps": 1, "max_resample_times": times}
    run = train(tmp_path / "run", given)
    wanted = rows_of_step(0, 10, 4, 0).tolist()
    for turn in range(times):
        others = [n for n in rows_of_step(turn, 10, 4, 2**32).tolist() if n % 3 == 0]
        flat = [at for at, row in enumerate(wanted) if row % 3]
        for at, row in zip(flat, others, strict=False):
            wanted[at] = row
    sampled, _ = read(run.rollouts / "step-00000000.npz")
    assert sampled.prompts.reshape(-1, 4)[:, 0].tolist() == wanted
    texts = [tuple(each.ids) for each in sampled.completions]
    spread = np.ptp(sampled.rewards.reshape(-1, 4), axis=1) > 0
    assert spread.tolist() == [row % 3 == 0 for row in wanted]
    assert len(set(texts)) > 12  # a prompt that is asked again gets other completions


def test_a_run_learns_from_its_groups_and_says_how(alone: Run) -> None:
    trained = records(alone, "train")
    first, again, second = trained[0], trained[1], trained[2]
    assert first["reward"] == again["reward"] != second["reward"]
    assert first["rewards/vowels/mean"] + 2 * first["rewards/json_valid/mean"] == pytest.approx(
        first["reward"]
    )
    assert first["loss"] == pytest.approx(0, abs=1e-4)  # advantages of a group add up to zero
    assert first["clip_ratio/region_mean"] == 0
    assert again["grad_norm"] != first["grad_norm"] > 0
    assert {"kl", "sampling/tokens_per_second"} & first.keys() == set()
    assert first["completions/min_length"] <= first["completions/mean_length"] <= 10
    evaluated = records(alone, "eval")
    assert [set(each) for each in evaluated] == [
        {
            "loss", "grad_norm", "reward", "rewards/json_valid/mean", "completions/mean_length",
            "completions/min_length", "completions/max_length", "completions/clipped_ratio",
        } | ({"completions/mean_terminated_length"} & set(each))
        for each in evaluated
    ]  # fmt: skip
    recipe = catalog.load(alone.recipe)
    for name in evaluated[0].keys() - {"grad_norm"}:  # each can choose the best checkpoint
        assert plan(recipe.with_evaluation(best=name), "single").recipe.evaluation.best == name
    shown = completions(alone)
    assert [each["step"] for each in shown] == [0] * 8 + [2] * 8
    group = [each["reward"] for each in shown[:4]]
    mean = sum(group) / 4
    std = (sum((each - mean) ** 2 for each in group) / 3) ** 0.5
    wanted = [(each - mean) / (std + 1e-4) for each in group]
    assert [each["advantage"] for each in shown[:4]] == pytest.approx(wanted, abs=1e-9)


CUTS: dict[str, dict[str, Any]] = {
    "one at a time, padded": {"batch": {"micro_rows": 1, "padding_free": False}},
    "by tokens, few sampled at once": {"batch": {"micro_tokens": 200}, "sampling_rows": 3},
}


@pytest.mark.parametrize("name", CUTS)
def test_a_step_does_not_depend_on_the_micro_batches_of_completions(
    tiny, data, tmp_path, alone, name
):
    assert_same(train(tmp_path / "run", fields(tiny, data, **CUTS[name])), alone)


def test_a_run_that_was_killed_in_a_sampling_goes_on_to_the_same_numbers(
    tiny, data, tmp_path, alone
):
    resumed = copy_of(alone, tmp_path / "resumed")
    for step in range(2, STEPS + 1):
        shutil.rmtree(resumed.checkpoint(step))
    train(resumed.root, fields(tiny, data), resume=True)
    assert_same(resumed, alone, tolerance=0)
    for step in range(2, STEPS + 1):
        shutil.rmtree(resumed.checkpoint(step))
    (resumed.rollouts / "step-00000000.npz").write_bytes(b"torn")
    with pytest.raises(FinetuneError, match="unfinished sampling cannot be read"):
        train(resumed.root, fields(tiny, data), resume=True)


def test_each_update_of_a_sampling_and_its_penalty_are_their_definitions(tiny, data, tmp_path):
    """RLOO held to another model, on one sequence at a time: two updates of one sampling."""
    other = other_model(tiny, tmp_path / "other")
    given = unevaluated(fields(
        tiny, data, method="rloo", beta=0.1, reference=str(other), max_steps=2,
        optim={"max_grad_norm": None}, reward_funcs=["own_rewards:vowels"],
    ))  # fmt: skip
    run = train(tmp_path / "run", given)
    sampled, _ = read(run.rollouts / "step-00000000.npz")
    policy = AutoModelForCausalLM.from_pretrained(tiny.model)
    reference = AutoModelForCausalLM.from_pretrained(other)
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    texts = (
        tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        for row in (rows[number] for number in sampled.prompts)
    )
    asked = [tokenizer(text)["input_ids"] for text in texts]
    pairs = [(a + c.ids, len(a)) for a, c in zip(asked, sampled.completions, strict=True)]
    with torch.no_grad():
        old = torch.stack([logp(policy, *pair) for pair in pairs])
        held = torch.stack([logp(reference, *pair) for pair in pairs])
    kls = (old - held).numpy()
    assert abs(kls).max() > 0.1
    assert sampled.kls == pytest.approx(kls, abs=1e-4)
    rewards = sampled.scores[0] - 0.1 * kls
    assert sampled.rewards == pytest.approx(rewards, abs=1e-5)
    groups = rewards.reshape(-1, 4)
    less = (groups - (groups.sum(1, keepdims=True) - groups) / 3).ravel()
    assert sampled.advantages == pytest.approx(less, abs=1e-5)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0)
    found = list(run.read_metrics("train"))
    assert found[0]["metrics"]["kl"] == pytest.approx(kls.mean(), abs=1e-4)
    for step in found:
        terms = []
        for pair, before, advantage in zip(pairs, old, less, strict=True):
            ratio = (logp(policy, *pair) - before).exp()
            clipped = ratio.clamp(0.8, 1.2)
            terms.append(-torch.minimum(ratio * advantage, clipped * advantage))
        loss = torch.stack(terms).mean()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters()]).item()
        assert step["loss"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-4)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-3)
        optimizer.step()
        optimizer.zero_grad()
    assert abs(found[1]["loss"]) > 1e-3  # the policy has moved
    shutil.rmtree(run.checkpoint(2))
    train(run.root, given, resume=True)
    again = records(run, "train")[1]
    assert again == {"loss": found[1]["loss"], "grad_norm": found[1]["grad_norm"]} | {
        name: value for name, value in found[1]["metrics"].items() if "sampling/" not in name
    }


def test_constant_rewards_and_endless_completions_are_warned_of_once() -> None:
    watch = Watch()
    usual = {"frac_reward_zero_std": 0.0, "entropy": 3.0, "completions/clipped_ratio": 0.1}
    usual["reward"] = 1.0
    flat = usual | {"frac_reward_zero_std": 1.0}
    assert watch.warnings(usual) == []
    assert [watch.warnings(flat) for _ in range(4)] == [[]] * 4
    assert watch.warnings(usual) == []  # in a row
    assert [len(watch.warnings(flat)) for _ in range(6)] == [0, 0, 0, 0, 1, 0]
    (told,) = watch.warnings(usual | {"completions/clipped_ratio": 1.0})
    assert told.startswith("completions/clipped_ratio: more than 50% of the completions reached")
    (told,) = watch.warnings(usual | {"entropy": 0.29})
    assert told.startswith("entropy: it fell below 10% of its first value")
    assert watch.warnings(usual | {"completions/clipped_ratio": 1.0, "entropy": 0.2}) == []
    del usual["reward"]
    (told,) = watch.warnings(usual)
    assert told.startswith("reward: no completion of a sampling got a score")


def test_an_evaluation_without_a_score_is_warned_of_once(tiny, data, tmp_path):
    """The held-out rows lack the column that the reward reads; it is the last step that tells."""
    held_out = written(tmp_path / "held_out.jsonl", [{"prompt": "the cat"}])
    rows = [{"prompt": f"the dog {n}", "answer": "red"} for n in range(4)]
    with_answer = written(tmp_path / "with_answer.jsonl", rows)
    given = fields(
        tiny, with_answer, eval_data=[{"source": str(held_out), "format": "prompts"}],
        eval_reward_funcs=["exact_match"], reward_funcs=["json_valid"], max_steps=2, eval_rows=None,
        num_iterations=1, evaluation={"every": 1},
    )  # fmt: skip
    run = train(tmp_path / "run", given)
    assert [each["best"] for each in run.read_metrics("eval")] == [False, False]
    told = [(each["step"], each["told"]) for each in run.read_metrics("warning")]
    assert [each for each in told if "evaluation" in each[1]] == [(1, NO_EVALUATION)]


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_completions_that_ran_into_the_limit_are_masked(loss: Any) -> None:
    """No token of them is trained, none counts, and their reward still is that of their group."""
    nothing = np.zeros(2, dtype=bool)
    data = single_rows(documents_of([(np.arange(2), nothing), (np.arange(2), nothing)]))
    said = [
        Completion([7, 8], True, 0.0), Completion([7, 8, 9], False, 0.0),
        Completion([6], True, 0.0), Completion([6, 6, 6], False, 0.0),
    ]  # fmt: skip
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    shared: dict[str, Any] = {"num_generations": 2, "loss_type": loss, "scale_rewards": "none"}
    for masks in (False, True):
        recipe = GRPO(mask_truncated_completions=masks, **shared)
        advantages = recipe.advantages(rewards.reshape(2, 2)).ravel()
        prompts = np.array([0, 0, 1, 1])
        rows = Sampled(prompts, said, rewards[None], rewards, advantages).rows(data, recipe)
        assert rows.labelled.tolist() == ([2, 0, 1, 0] if masks else [2, 3, 1, 3])
        wanted = [0.5, 0, -0.5, 0] if masks else [0.5, -0.5, -0.5, 0.5]
        assert rows.columns[ADVANTAGE].tolist() == wanted
        assert recipe.terms(rows, np.arange(4)) == ((3 if masks else 9) if loss == "dapo" else 4)


def test_a_proof_finds_another_completion_and_another_reward(alone: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "other")
    other.root.mkdir()
    texts, numbers = alone.completions.read_text(), alone.metrics.read_text()
    other.completions.write_text(texts)
    other.metrics.write_text(numbers)
    assert of_proofs.differences(alone, other, FP32) == []
    said = completions(alone)[3]["completion"]
    lines = texts.splitlines()
    lines[3] = lines[3].replace(json.dumps(said, ensure_ascii=False), '"other"')
    other.completions.write_text("\n".join(lines))
    (told,) = of_proofs.differences(alone, other, FP32)
    assert told == f"sampling of step 0: 'other' instead of {said!r:.60}"
    other.completions.write_text(texts)
    other.metrics.write_text(re.sub(r'"reward": (\S+),', r'"reward": 9\1,', numbers, count=1))
    (told,) = of_proofs.differences(alone, other, FP32)
    assert told.startswith("step 1: reward 9")
    (tmp_path / "few").mkdir()
    Run(tmp_path / "few").completions.write_text(lines[0])
    Run(tmp_path / "few").metrics.write_text(numbers)
    assert of_proofs.differences(alone, Run(tmp_path / "few"), FP32) == [
        "1 completions are kept instead of 16"
    ]


def reward_that_breaks(folder: Path, calls: int) -> dict[str, Any]:
    """The reward `own_rewards:breaks`, as after some calls."""
    counter = folder / "calls"
    counter.write_text(str(calls))
    return {"function": "own_rewards:breaks", "arguments": {"counter": str(counter)}}


@pytest.mark.parametrize(
    ("calls", "saved", "told"),
    [
        (0, [2], "; then continue with --resume: step 2 is saved"),
        (2, [], "; then start again: no step is finished, and nothing is saved"),
    ],
)
def test_a_reward_that_fails_ends_the_run_with_what_was_trained(
    tiny, data, tmp_path, calls, saved, told
):
    """In the third step, or in the first one."""
    broken = {"reward_funcs": [reward_that_breaks(tmp_path, calls)]}
    every = {"num_iterations": 1, "saving": {"every": 100}}
    given = unevaluated(fields(tiny, data, **broken, **every))
    with pytest.raises(TrainingFailure, match="raises ValueError: out of order") as caught:
        train(tmp_path / "run", given)
    assert "completion" in caught.value.problems[0]
    assert caught.value.problems[0].endswith(told)
    run = Run(tmp_path / "run")
    assert run.steps() == saved
    if saved:
        assert len(records(train(run.root, given, resume=True), "train")) == STEPS


def test_an_evaluation_whose_reward_fails_is_made_up_for(tiny, data, tmp_path):
    """The evaluation of the last step fails: the step is saved, and evaluated on resuming."""
    broken = reward_that_breaks(tmp_path, 1)
    given = fields(
        tiny, data, eval_reward_funcs=[broken], num_iterations=1, evaluation={"every": 1},
        saving={"every": 100}, max_steps=2,
    )  # fmt: skip
    with pytest.raises(TrainingFailure, match="raises ValueError: out of order"):
        train(tmp_path / "run", given)
    run = Run(tmp_path / "run")
    assert 2 in run.steps()
    assert [each["step"] for each in run.read_metrics("eval")] == [1]
    train(run.root, {**given, "on_reward_error": "skip", "reward_timeout": 9.0}, resume=True)
    assert [each["step"] for each in run.read_metrics("eval")] == [1, 2]
    losses = [each["loss"] for each in run.read_metrics("eval")]
    best = json.loads(run.best.read_text())
    assert best == {"step": 1 + losses.index(min(losses)), "loss": min(losses)}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"reward_funcs": []}, "reward_funcs: none; name what scores completions"),
        ({"reward_funcs": ["own_rewards:vowel"]}, "did you mean 'vowels'?"),
        ({"batch": {"rows": 18, "micro_rows": 1}}, "use batch.rows=16 or 20"),
        ({"max_completion_length": 80}, "it must exceed max_completion_length=80"),
        ({"batch": {"overlong": "truncate"}}, "part of a prompt is a different request"),
        ({"batch": {"packing": True}}, "batch.packing: true, but completions are sampled"),
        ({"adapter": {"dropout": 0.1}}, "adapter.dropout: completions are sampled without it"),
        ({"reward_funcs": ["exact_match"]}, "needs 'answer', which is neither a column"),
        ({"max_completion_length": 40, "batch": {"max_length": 50}}, "minus 40 for the completion"),
        (
            {"max_completion_length": 300, "batch": {"max_length": 400}},
            "max_completion_length: 300 tokens leave none of the model's context of 256",
        ),
        ({"format": "messages"}, r"learns from prompts without an answer \(formats: prompts\)"),
    ],
)
def test_what_cannot_work_is_refused(tiny, data, tmp_path, changes, told):
    given = fields(tiny, data, **{n: v for n, v in changes.items() if n != "format"})
    if "format" in changes:
        given["data"] = [{"source": str(tiny.data), "format": "messages"}]
    with pytest.raises(FinetuneError, match=told):
        train(tmp_path / "run", given)


KL = {"adapter": {"r": 4}, "beta": 0.1, "steps_per_generation": 2, "num_iterations": 1}


@pytest.mark.parametrize(
    "backend", slow_but(("ddp",), ("ddp", "zero2", "fsdp_full_shard", "zero3"))
)
def test_processes_sample_the_same_and_take_the_same_steps(
    tiny, data, finetune, tmp_path, alone, backend
):
    """On ZeRO-2 with a penalty for the distance of an adapter to its base."""
    given = fields(tiny, data, **(KL if backend == "zero2" else {}))
    reference = train(tmp_path / "alone", given) if backend == "zero2" else alone
    finetune(
        "launch", write_recipe(tmp_path / "r.json", given), "--processes", "2",
        "--backend", backend, "--precision", "fp32", "--output", tmp_path / backend,
        env={"PYTHONPATH": f"{ROOT}:{ROOT}/tests"},
    ).passed()  # fmt: skip
    assert_same(Run(tmp_path / backend), reference)
