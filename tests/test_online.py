"""Online methods: published values, the same completions on any number of processes, rewards."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import slow_but
from documents import documents_of
from oracles import MODEL, stored
from peft import PeftModel
from transformers import AutoModelForCausalLM

from finetune.data.rows.collate import collate
from finetune.data.rows.store import Rows, TokenColumn, single_rows
from finetune.kernels.head import give_loss
from finetune.methods.grpo import GRPO
from finetune.methods.losses import labelled
from finetune.methods.online import ADVANTAGE, OLD, REFERENCE, Online
from finetune.methods.rloo import RLOO
from finetune.recipe import Batch

# Published values: TRL 1.16 and a computation on single sequences, on a model of 260,000 weights.

EVERY_DAY = ("grpo/lora", "grpo_kl_times_ratio/lora", "dapo/full", "gspo/lora", "rloo/lora")
RUNS = (
    *EVERY_DAY, "grpo/full", "grpo_kl_times_ratio/full", "grpo_no_kl/full", "grpo_no_kl/lora",
    "dapo/lora", "dr_grpo/full", "dr_grpo/lora", "gspo/full", "gspo_wide/full", "gspo_wide/lora",
    "cispo/full", "cispo/lora",
)  # fmt: skip


def base(assets: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(assets / MODEL, dtype=torch.float32)
    give_loss(model, chunked=True)
    return model


def method_of(name: str, config: dict[str, Any], longest: int) -> Online:
    """The recipe of a published run."""
    shared: dict[str, Any] = {
        "num_generations": 4, "max_completion_length": longest,
        "batch": Batch(rows=16, max_length=1024),
    }  # fmt: skip
    if name.startswith("rloo"):
        return RLOO(epsilon=config["epsilon"], **shared)
    loss = "gspo" if config["level"] == "sequence" else config["loss_type"]
    if config.get("kl_times_ratio", False):  # TRL 1.16 multiplies the KL by default
        shared["use_bias_correction_kl"] = True
    return GRPO(
        loss_type=loss, epsilon=config["low"], epsilon_high=config["high"], beta=config["beta"],
        scale_rewards=config["scale"], **shared,
    )  # fmt: skip


def rows_of(found: dict[str, Any], run: dict[str, Any], recipe: Online, free: bool) -> Rows:
    """The published completions as rows, with the columns that the loss reads."""
    samples = found["samples"]
    pairs = [(each["prompt_ids"], each["completion_ids"]) for each in samples]
    documents = documents_of(
        (np.array(a + b, dtype=np.int32), np.repeat([False, True], [len(a), len(b)]))
        for a, b in pairs
    )
    rewards = np.array([each["reward"] for each in samples]).reshape(4, 4)
    advantages = recipe.advantages(rewards).ravel()
    assert advantages == pytest.approx(run["own"]["advantages"], abs=1e-6)
    logps = {OLD: np.concatenate([each["old_logps"] for each in samples])}
    if recipe.needs_reference:
        logps[REFERENCE] = np.concatenate([each["reference_logps"] for each in samples])
    if "old_logps_of_completions" in run:  # only the sum over a completion is used
        sums = run["old_logps_of_completions"]
        shares = [np.full(len(b), s / len(b)) for (_, b), s in zip(pairs, sums, strict=True)]
        logps[OLD] = np.concatenate(shares)
    columns: dict[str, TokenColumn] = {}
    for name, known in logps.items():
        values = np.zeros(len(documents.ids), dtype=np.float32)
        values[documents.trained] = known
        columns[name] = TokenColumn.at_labels(documents, values)
    return dataclasses.replace(
        single_rows(documents), padding_free=free, token_columns=columns,
        columns={ADVANTAGE: advantages.astype(np.float32)},
    )  # fmt: skip


@pytest.mark.parametrize("name", slow_but(EVERY_DAY, RUNS))
def test_losses_and_gradients_are_the_published_ones(assets: Path, name: str) -> None:
    """However the completions are cut, below one another or side by side."""
    found = stored(assets, "grpo_rloo")
    run = found["runs"][name]
    recipe = method_of(name, run["config"], found["longest_completion"])
    trained, adapter = base(assets), assets / "oracles" / "adapter"
    if run["policy"] == "lora":
        trained = PeftModel.from_pretrained(trained, adapter, is_trainable=True)
    weights = [each for each in trained.parameters() if each.requires_grad]
    for each_time in (3, 16):
        rows = rows_of(found, run, recipe, free=False)
        terms = recipe.terms(rows, np.arange(16))
        total, sums = 0.0, dict[str, tuple[float, int]]()
        for start in range(0, 16, each_time):
            some = np.arange(start, min(16, start + each_time))
            loss = recipe.loss(trained, collate(rows, some, 0, "cpu"))
            (loss.sum / terms).backward()
            total += loss.sum.item() / terms
            for metric, (value, count) in loss.metrics.items():
                before = sums.get(metric, (0.0, 0))
                sums[metric] = before[0] + float(value), before[1] + count
        norm = torch.nn.utils.get_total_norm([each.grad for each in weights]).item()
        # Sums of 1,000 nats have a resolution of 1e-4: so has the ratio of whole completions.
        near = 2e-5 if isinstance(recipe, RLOO) else 1e-6
        assert total == pytest.approx(run["own"]["loss"], rel=1e-4, abs=near), each_time
        assert norm == pytest.approx(run["own"]["grad_norm"], rel=1e-3), each_time
        for metric, (value, count) in sums.items():
            # The published share of CISPO is of another range than the one that clips.
            if metric in run["own"] and not name.startswith("cispo"):
                assert value / count == pytest.approx(run["own"][metric], rel=1e-4, abs=1e-5)
        trained.zero_grad()


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "gspo"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_the_mean_gradient_of_the_entropy_term_is_that_of_the_entropy(loss: Any, on_policy: bool):
    """The mean over all tokens of a small vocabulary, each as often as it is sampled."""
    recipe = GRPO(loss_type=loss, entropy_coef=0.3, max_completion_length=1)
    generator = torch.Generator().manual_seed(3)
    logits, other = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    logits.requires_grad_(True)
    logps = logits.log_softmax(-1)
    entropy = -(logps.exp() * logps).sum()
    (wanted,) = torch.autograd.grad(-0.3 * entropy, logits, retain_graph=True)
    old = logps.detach() if on_policy else other.log_softmax(-1)
    ones, none = torch.ones(7, dtype=torch.int64), torch.zeros(7, dtype=torch.float64)
    terms, _ = recipe.completion_losses(
        logps, old, none, ones, entropies=entropy.detach().expand(7)
    )
    assert torch.allclose(terms, -0.3 * entropy)
    (found,) = torch.autograd.grad((old.exp() * terms).sum(), logits)
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-14)


def test_the_entropy_term_of_a_model_is_that_of_its_logits(assets: Path) -> None:
    found = stored(assets, "grpo_rloo")
    run = found["runs"]["dapo/full"]
    recipe = method_of("dapo/full", run["config"], found["longest_completion"])
    model, some = base(assets), np.arange(3)
    batch = collate(rows_of(found, run, recipe, free=False), some, 0, "cpu")
    less = recipe.loss(model, batch).sum
    more = dataclasses.replace(recipe, entropy_coef=0.3).loss(model, batch).sum
    places, _ = labelled(batch)
    logits = model(**batch.inputs(), use_cache=False).logits.flatten(0, 1)[places]
    logps = logits.double().log_softmax(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    assert (more - less).item() == pytest.approx(-0.3 * entropies.sum().item(), rel=1e-5)
