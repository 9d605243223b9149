"""Online methods: published values, the same completions on any number of processes, rewards."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from finetune.data.collate import collate
from finetune.data.store import Documents, Rows, TokenColumn
from finetune.kernels.head import give_loss
from finetune.methods.grpo import GRPO
from finetune.methods.online import ADVANTAGE, OLD, REFERENCE, Online
from finetune.methods.rloo import RLOO
from finetune.recipe import Batch

# Published values: TRL 1.16 and a computation on single sequences, on a model of 260,000 weights.

EVERY_DAY = ("grpo_kl_times_ratio/lora", "dapo/full", "gspo/lora", "cispo/full", "rloo/lora")
OTHERS = (
    "grpo/full", "grpo/lora", "grpo_kl_times_ratio/full", "grpo_no_kl/full", "grpo_no_kl/lora",
    "dapo/lora", "dr_grpo/full", "dr_grpo/lora", "gspo/full", "gspo_wide/full", "gspo_wide/lora",
    "cispo/lora",
)  # fmt: skip


def published(assets: Path) -> dict[str, Any]:
    path = assets / "oracles" / "grpo_rloo.json"
    if not path.is_file():
        pytest.skip("no published values among the assets")
    return json.loads(path.read_text())


def method_of(name: str, config: dict[str, Any], longest: int) -> Online:
    """The recipe of a published run."""
    shared: dict[str, Any] = {
        "num_generations": 4, "max_completion_length": longest,
        "batch": Batch(rows=16, max_length=1024),
    }  # fmt: skip
    if name.startswith("rloo"):
        return RLOO(epsilon=config["epsilon"], **shared)
    loss = "gspo" if config["level"] == "sequence" else config["loss_type"]
    return GRPO(
        loss_type=loss, epsilon=config["low"], epsilon_high=config["high"], beta=config["beta"],
        scale_rewards=config["scale"], use_bias_correction_kl=config.get("kl_times_ratio", False),
        **shared,
    )  # fmt: skip


def rows_of(found: dict[str, Any], run: dict[str, Any], recipe: Online, free: bool) -> Rows:
    """The published completions as rows, with the columns that the loss reads."""
    samples = found["samples"]
    pairs = [(each["prompt_ids"], each["completion_ids"]) for each in samples]
    lengths = [len(a) + len(b) for a, b in pairs]
    ids = np.concatenate([a + b for a, b in pairs]).astype(np.int32)
    trained = np.concatenate([np.repeat([False, True], [len(a), len(b)]) for a, b in pairs])
    rewards = np.array([each["reward"] for each in samples]).reshape(4, 4)
    advantages = recipe.advantages(rewards).ravel()
    assert advantages == pytest.approx(run["own"]["advantages"], abs=1e-6)
    columns = {ADVANTAGE: advantages.astype(np.float32)}
    tokens: dict[str, np.ndarray] = {}
    for name, key in ((OLD, "old_logps"), (REFERENCE, "reference_logps")):
        values = np.zeros(len(ids), dtype=np.float32)
        values[trained] = np.concatenate([each[key] for each in samples])
        tokens[name] = values
    if "old_logps_of_completions" in run:  # only the sum over a completion is used
        sums = run["old_logps_of_completions"]
        shares = [np.full(len(b), s / len(b)) for (_, b), s in zip(pairs, sums, strict=True)]
        tokens[OLD][trained] = np.concatenate(shares)
    if not recipe.needs_reference:
        del tokens[REFERENCE]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    documents = Documents(ids, trained, offsets, np.zeros((16, 2), dtype=np.int64))
    return Rows(
        documents, np.arange(16), np.arange(17), packed=False, padding_free=free, columns=columns,
        token_columns={n: TokenColumn.at_labels(documents, v) for n, v in tokens.items()},
    )  # fmt: skip


def test_the_kl_is_multiplied_by_the_ratio_only_on_request(assets: Path) -> None:
    """TRL 1.16 multiplies it by default."""
    found = published(assets)
    runs = {name: found["runs"][name]["own"] for name in ("grpo/lora", "grpo_kl_times_ratio/lora")}
    plain, multiplied = (each["loss"] for each in runs.values())
    assert multiplied != pytest.approx(plain, rel=1e-4)
    samples = found["samples"]
    model: Any = AutoModelForCausalLM.from_pretrained(
        assets / "models/stories260K", dtype=torch.float32
    )
    give_loss(model, chunked=True)
    trained = PeftModel.from_pretrained(model, assets / "oracles" / "adapter")
    for settings, name in (({}, "grpo/lora"), ({"use_bias_correction_kl": True}, [*runs][1])):
        run = found["runs"][name]
        recipe = GRPO(
            loss_type="grpo", beta=run["config"]["beta"], num_generations=4,
            batch=Batch(rows=16, max_length=1024), max_completion_length=512, **settings,
        )  # fmt: skip
        rows = rows_of(found, run, recipe, free=False)
        with torch.no_grad():
            loss = recipe.loss(trained, collate(rows, np.arange(len(samples)), 0, "cpu"))
        assert loss.sum.item() / 16 == pytest.approx(runs[name]["loss"], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    "name", [*EVERY_DAY, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_losses_and_gradients_are_the_published_ones(assets: Path, name: str) -> None:
    """However the completions are cut, below one another or side by side."""
    found = published(assets)
    run = found["runs"][name]
    recipe = method_of(name, run["config"], found["longest_completion"])
    model: Any = AutoModelForCausalLM.from_pretrained(
        assets / "models/stories260K", dtype=torch.float32
    )
    give_loss(model, chunked=True)
    trained = model
    if run["policy"] == "lora":
        trained = PeftModel.from_pretrained(
            model, assets / "oracles" / "adapter", is_trainable=True
        )
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
