"""A list of parameters is trained, the rest stays as it was, on every backend."""

from typing import Any

import pytest
import torch
from conftest import Tiny, assert_same_losses, cut_off, launch, problems_of, slow
from families import build
from safetensors.torch import load_file
from test_experts import MOE

import finetune as ft
from finetune import catalog
from finetune.models.model import as_trained
from finetune.models.sizes import counts
from finetune.planner.estimate.trained_share import share
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes.read_config import read
from finetune.recipe import Model

CHOSEN = [r"model\.layers\.1\.(self_attn|mlp\.down)", "model.norm", "lm_head"]
PLAIN: dict[str, Any] = {
    "optim": {"name": "sgd", "lr": 0.1, "warmup": 0, "weight_decay": 0.0, "max_grad_norm": None},
    "max_steps": 1,
}


def weights(run: ft.Run) -> dict[str, torch.Tensor]:
    return load_file(run.final / "model.safetensors")


def test_named_weights_move_as_in_a_training_of_all_and_the_rest_stays(tiny: Tiny, train):
    """A step of SGD is a gradient: freezing one weight does not change that of another."""
    base = load_file(tiny.model / "model.safetensors")
    every = weights(train("every", **PLAIN))
    some = weights(train("some", model={"trainable": CHOSEN}, **PLAIN))
    tables = {"lm_head.weight", "model.norm.weight"}
    named = {n for n in base if n in tables or ".1.self_attn" in n or ".1.mlp.down" in n}
    assert {name for name in base if not torch.equal(some[name], base[name])} == named
    assert all(torch.equal(some[name], every[name]) for name in named)


def test_the_head_alone_is_trained_over_recomputed_blocks(tiny: Tiny, train):
    model = {"trainable": ["lm_head"], "activation_checkpointing": True}
    base, run = load_file(tiny.model / "model.safetensors"), train(model=model, max_steps=2)
    found = weights(run)
    assert [n for n in base if not torch.equal(found[n], base[n])] == ["lm_head.weight"]
    assert next(run.read_metrics("start"))["trainable_parameters"] == base["lm_head.weight"].numel()


@pytest.mark.parametrize("backend", ["fsdp_full_shard", *map(slow, ("zero3", "tp", "pp"))])
def test_backends_train_the_named_weights_and_resume_each_other(
    tiny: Tiny, run_of, finetune, tmp_path, backend
):
    sections: dict[str, Any] = {"model": {"trainable": CHOSEN}}
    alone, divided = run_of(**sections), run_of(backend, **sections)
    assert_same_losses(alone, divided)
    before, after, base = (
        weights(alone),
        weights(divided),
        load_file(tiny.model / "model.safetensors"),
    )
    for name, values in base.items():
        assert torch.equal(after[name], values) == torch.equal(before[name], values)
        assert torch.allclose(after[name], before[name], atol=1e-5)
    resumed = cut_off(divided, tmp_path / "resumed", step=3)
    launch(finetune, divided.recipe, "single", resumed.root, "--resume")
    assert_same_losses(alone, resumed)


def test_patterns_that_select_nothing_are_refused_with_a_near_name(tiny: Tiny, train):
    (problem,) = problems_of(train, model={"trainable": ["model.layer.1", "lm_head"]})
    assert "'model.layer.1' matches no parameter of the model; did you mean 'model.l" in problem
    (problem,) = problems_of(catalog.from_fields, tiny.fields(model={"trainable": ["layers.(1"]}))
    assert "'layers.(1' is not a valid regular expression" in problem
    fields = tiny.fields(model={"trainable": ["lm_head"]}, adapter={"r": 4})
    (problem,) = problems_of(ft.plan, catalog.from_fields(fields), "single")
    assert "adapter=null" in problem
    model = {"trainable": ["lm_head"], "add_tokens": ["<new>"]}
    (problem,) = problems_of(train, "added", model=model)
    assert problem.endswith("add 'model.embed_tokens.weight'")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("llama", {}), ("qwen3", {}), ("gemma2", {}), ("qwen3_moe", MOE["qwen3_moe"])],
)
@pytest.mark.parametrize(
    "patterns", [["model.layers.1"], ["model.embed", "model.norm"], [r".*_proj"]]
)
def test_the_plan_counts_what_is_trained(kind: str, fields: dict[str, Any], patterns: list[str]):
    model = build(kind, **fields)
    recipe = ft.SFT(Model(config=model.config.to_dict(), trainable=tuple(patterns)))
    as_trained(model, recipe)
    found = read(model.config.to_dict())
    workload = Workload(found, 1, 64, share=share(found, recipe.model.trainable))
    assert workload.trained == counts(model)[0]
    assert workload.trained + workload.frozen_bytes / 4 == found.parameters
