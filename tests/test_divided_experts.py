"""Experts that lie on several processes: the same numbers as one process, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import divided
import pytest
from conftest import Tiny, cut_off

import finetune as ft
from finetune import backend as backends
from finetune.planner import plan
from finetune.planner.estimate import traffic
from finetune.planner.mesh import Mesh

ATTENTION = {"r": 4, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "packed": {"batch": {"packing": True}},
    "lora": {"adapter": ATTENTION},
    "dropout": {"adapter": ATTENTION | {"dropout": 0.2, "use_dora": True}},
}


@pytest.fixture(scope="module")
def sections(tiny: Tiny, shared: Path) -> dict[str, Any]:
    return divided.mixture(tiny, shared)


def test_divided_experts_learn_what_one_process_learns(run_of, sections):
    """Uneven rows on each process, accumulation, and the load-balancing loss by document."""
    alone, several = run_of(**sections), run_of("ep_fsdp", **sections)
    divided.assert_equal(alone, several)
    divided.assert_planned(several)
    held, (whole,) = divided.parameters_held(several), divided.parameters_held(alone)
    assert sum(held) == divided.weights_written(several) == whole
    assert max(held) < 0.51 * whole
    divided.assert_same_logits(alone, several)


def test_stages_balance_their_experts_together(run_of, sections):
    """Each stage has a layer; how often a document visits an expert counts in both of them."""
    run = run_of("pp", **sections)
    divided.assert_equal(run_of(**sections), run)
    divided.assert_planned(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend", "changes"),
    [
        ("full", "sp_fsdp", {}),
        ("packed", "cp", {}),
        ("full", "pp_fsdp", {}),
        ("full", "pp", {"batch": {"padding_free": False}}),
        # Adapters of attention beside divided experts.
        ("lora", "ep_fsdp", {}),
        # Each process drops elements of its own rows, as one process does.
        ("dropout", "ep_fsdp", {}),
    ],
)
def test_processes_with_all_or_some_experts_learn_what_one_process_learns(
    name, backend, changes, run_of, sections
):
    """They count the visits of documents of which they have some tokens, or some layers."""
    given = sections | KINDS[name] | changes
    alone, run = run_of(**given), run_of(backend, processes=divided.processes_of(backend), **given)
    divided.assert_equal(alone, run)
    if name == "dropout":  # of so small a model, the plan of DoRA is a little high, also on one
        divided.assert_planned(alone, within=0.08)
        divided.assert_planned(run, within=0.08)
    elif not changes:  # these pad to the longest of a step
        divided.assert_planned(run)


@pytest.mark.slow
def test_experts_and_tensor_parallel_go_on_from_shards(run_of, sections, tmp_path, finetune):
    alone, shards = run_of(**sections), run_of("ep_fsdp", **sections)
    run = cut_off(shards, tmp_path / "run", divided.MIDDLE)
    words = ("--precision", "fp32", "--output", run.root, "--no-plot", "--resume")
    finetune("launch", alone.recipe, "--backend", "ep_tp", *words).passed()
    divided.assert_equal(alone, run)
    divided.assert_planned(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "adapter", "experts"),
    [("qwen3_moe", None, 4), ("mixtral", ft.LoRA(r=4, targets=("q_proj", "v_proj")), 2)],
)
def test_the_plan_of_divided_experts_is_that_of_a_trace(kind, adapter, experts, tmp_path):
    """Gathered and reduced alone, or by two processes with the same experts.

    Large enough for activations, weights and the buffers of FSDP2 to matter alike.
    """
    fields = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 512, "head_dim": 64},
    "mixtral": {"num_local_experts": 8},
}[kind] | {
        "model_type": kind, "hidden_size": 512, "intermediate_size": 512, "vocab_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
        "num_experts_per_tok": 2, "tie_word_embeddings": False, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    recipe = ft.SFT(
        ft.Model(str(tmp_path)), adapter=adapter, data=(ft.Data("none.jsonl", "messages"),)
    )
    recipe = recipe.with_batch(rows=16, micro_rows=2, max_length=512)
    machine, _ = backends.divided(backends.load("ep_fsdp"), 4, {"experts": experts})
    _, traced = divided.traced_plan(recipe, machine)
    (found,) = traced.each.values()
    for row in found.rows:
        assert row.predicted == pytest.approx(row.traced, rel=0.02), row.component
    for name in ("forward: last layer", "backward: last layer"):
        assert found.predicted_moments[name] == pytest.approx(found.traced.total(name), rel=0.02), (
            name
        )


@pytest.mark.slow
def test_the_plan_and_a_trace_count_the_bytes_of_experts(sections, tmp_path):
    """Four processes, two of which hold the same experts.

    The router decides how many tokens a process receives, but all of them together receive what
    they sent: what the trace sends, as often as there are processes.
    """
    four = [(f"{name}: 2", f"{name}: 4") for name in ("num_processes", "shard_size")]
    config = divided.write_config(tmp_path / "experts.yaml", "ep_fsdp", *four)
    counts, workload, traced = divided.counted_step(sections["model"]["name"], config, 16, tmp_path)
    found = traced.each[0].traced.payload
    # Experts are divided over neighbors, and shared by those two apart.
    sent = sum(each["tensor"]["all-to-all"] for each in counts)
    assert sent == pytest.approx(4 * found["experts all_to_all"], abs=0.5)
    for kind in ("all-gather", "reduce-scatter"):
        for each in counts:
            size = each["all"][kind] + each["pipeline"][kind]
            assert size == pytest.approx(found[f"shard {kind.replace('-', '_')}"], abs=0.5)
    for axis, kinds in traffic.payloads(workload).items():
        for kind, size in kinds.items():
            traced_size = found[f"{axis} {kind.replace('-', '_')}"]
            assert size == pytest.approx(traced_size, rel=0.05), (axis, kind)


MIXTURE = divided.LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8,
}  # fmt: skip
JAMBA = {"model_type": "jamba"}


@pytest.mark.parametrize(
    ("backend", "fields", "sizes", "problem"),
    [
        *((each, {}, {}, "") for each in ("pp", "pp_fsdp", "sp", "sp_fsdp", "cp")),
        ("ep_fsdp", {}, {"experts": 4}, "6 experts do not divide over 4 processes; use 2 or 3"),
        ("ep_tp", {}, {"experts": 3}, "multiple of the 2 tensor parallel processes that divides"),
        ("ep_fsdp", {"num_experts": 1}, {}, "qwen3_moe has no experts to divide"),
        ("ep_fsdp", JAMBA, {}, "expert parallelism of jamba is not supported"),
        ("ep_tp", JAMBA, {}, "tensor parallelism of jamba is not supported"),
        ("tp", {}, {}, "experts of qwen3_moe are not divided by columns and rows (tensor 2); use"),
        ("sp", JAMBA, {}, "sequence parallelism of jamba is not supported"),
        ("pp", JAMBA, {}, "pipeline parallelism of jamba is not supported"),
        ("cp", {"sliding_window": 64}, {}, "sliding_window=64, but the keys of all previous"),
    ],
)
def test_experts_that_do_not_divide_are_refused(backend, fields, sizes, problem):
    divided.assert_named(divided.refused(backend, MIXTURE | fields, sizes), problem)


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        ({}, "adapter.targets: 'all-linear' adapts experts, which ep_fsdp divides"),
        ({"targets": ("q_proj", "up_proj")}, "adapter.targets: 'up_proj' adapts experts"),
        ({"targets": ("q_proj",)}, ""),
    ],
)
def test_adapters_of_divided_experts_are_refused(adapter, problem):
    recipe = dataclasses.replace(divided.BASE, model=ft.Model(config=MIXTURE, tokenizer="x"))
    recipe = recipe.with_lora(**adapter).with_batch(rows=8, micro_rows=1)
    divided.assert_refused(divided.reasons(recipe, "ep_fsdp", 2), problem)


def test_experts_are_divided_over_the_processes_of_a_copy():
    machine, count = backends.divided(backends.load("ep_fsdp"), None, {"experts": 4})
    assert (machine.axes.experts, count) == (4, 4)
    mesh = Mesh(replicate=2, shard=4, tensor=2, experts=4)
    assert (mesh.processes, mesh.expert_copies) == (16, 2)
    assert mesh.words() == "replicate 2 x shard 4 x tensor 2 (experts over 4)"
    assert mesh.summary()["experts"] == 4


def test_a_file_whose_experts_do_not_fit_its_processes_is_refused(tmp_path):
    path = divided.write_config(tmp_path / "mine.yaml", "ep_fsdp", ("ep_size: 2", "ep_size: 3"))
    told = r"divides the 2 processes of one copy .* got 3; use 2"
    with pytest.raises(ft.FinetuneError, match=told):
        backends.load(str(path))


def test_a_recipe_is_not_changed_by_the_processes_of_its_experts():
    machine = dataclasses.replace(backends.load("ep_fsdp"), precision="fp32")
    recipe = dataclasses.replace(divided.BASE, model=ft.Model(config=MIXTURE, tokenizer="x"))
    recipe = recipe.with_batch(rows=8, micro_rows=1)
    assert plan(recipe, machine, 2).accumulation == plan(recipe, "ddp", 2).accumulation == 4
    assert plan(recipe, "ep_tp", 2).accumulation == 8
