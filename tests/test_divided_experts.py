"""Experts that lie on several processes: the same numbers as one process, and what is refused."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Finetune, Tiny, write_recipe
from safetensors.torch import load_file
from test_division import (
    LLAMA,
    assert_equal,
    assert_planned,
    counted_step,
    read,
    refused,
    train,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from finetune import backend as backends
from finetune.errors import FinetuneError
from finetune.methods.sft import SFT
from finetune.planner import plan
from finetune.planner.estimate import traffic
from finetune.planner.estimate.predict import model_source, workload_of
from finetune.planner.mesh import Mesh
from finetune.recipe import Data, LoRA, Model
from finetune.runs.run import Run
from finetune.verification.memory.launch import verify
from finetune.verification.memory.mesh_comparison import Stages

STEPS, MIDDLE = 4, 2
EXPERTS = 4


@pytest.fixture(scope="module")
def work(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recipes of a mixture with q/k norms, whose experts are balanced.

    Of each pair of experts, a token first chooses the one whose logit is positive.
    """
    folder = tmp_path_factory.mktemp("experts")
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=len(tokenizer),
        num_experts=EXPERTS, num_experts_per_tok=2, tie_word_embeddings=True,
        max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(7)
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
        else:
            parameter.data.normal_(std=0.08)
        if name.endswith("mlp.gate.weight"):
            parameter.data[1::2] = -parameter.data[::2]
    model.save_pretrained(folder / "moe")
    tokenizer.save_pretrained(folder / "moe")
    shared: dict[str, Any] = {
        "model": {"name": str(folder / "moe"), "router_aux_loss": "0.1"},
        "max_steps": STEPS,
        "saving": {"every": MIDDLE},
        "evaluation": {"every": MIDDLE},
    }
    write_recipe(folder / "full.json", tiny.fields(**shared))
    write_recipe(folder / "packed.json", tiny.fields(**shared, batch={"packing": True}))
    attention = {"r": 4, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    write_recipe(folder / "lora.json", tiny.fields(**shared, adapter=attention))
    more = attention | {"dropout": 0.2, "use_dora": True}
    write_recipe(folder / "dropout.json", tiny.fields(**shared, adapter=more))
    return folder


@pytest.fixture(scope="module")
def alone(work: Path, finetune: Finetune) -> Run:
    return train(finetune, work, "full", "single")


@pytest.fixture(scope="module")
def divided(work: Path) -> Run:
    """Expert parallel by plain `accelerate launch`, which knows nothing of this project."""
    run = Run(work / "full-ep_fsdp")
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file",
         str(ROOT / "accelerate_configs/ep_fsdp.yaml"), "--mixed_precision", "no",
         "--main_process_port", "0", "-m", "finetune", "train", str(work / "full.json"),
         "--output", str(run.root), "--no-plot"],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def test_divided_experts_learn_what_one_process_learns(alone, divided):
    """Uneven rows on each process, accumulation, and the load-balancing loss by document."""
    assert_equal(alone, divided)
    assert_planned(divided)
    held = [rank["parameters"] for rank in read(divided.realised)["ranks"]]
    whole = read(alone.realised)["ranks"][0]["parameters"]
    assert sum(held) == whole
    assert max(held) < 0.51 * whole
    files = (divided.checkpoint(STEPS) / "state").glob("*.safetensors")
    tensors = [item for path in files for item in load_file(path).items()]
    assert sum(value.numel() for name, value in tensors if "|weight|" in name) == whole
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits = [
            AutoModelForCausalLM.from_pretrained(each.final, dtype=torch.float32)(ids).logits
            for each in (alone, divided)
        ]
    assert (logits[0] - logits[1]).abs().max() < 1e-4


def test_stages_balance_their_experts_together(work, alone, finetune):
    """Each stage has a layer; how often a document visits an expert counts in both of them."""
    run = train(finetune, work, "full", "pp")
    assert_equal(alone, run)
    assert_planned(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend", "words"),
    [
        ("full", "sp_fsdp", ()),
        ("packed", "cp", ()),
        ("lora", "sp", ()),
        ("full", "pp_fsdp", ()),
        ("full", "pp", ("batch.padding_free=false",)),
    ],
)
def test_complete_experts_learn_what_one_process_learns(name, backend, words, work, finetune):
    """Processes count the visits of documents of which they have some tokens, or some layers."""
    runs = [train(finetune, work, name, each, *words) for each in ("single", backend)]
    assert_equal(*runs)
    if name != "lora" and not words:  # otherwise rows are padded to the longest of a step
        assert_planned(runs[1])


@pytest.mark.slow
def test_experts_and_tensor_parallel_go_on_from_shards(work, alone, divided, finetune):
    run = Run(work / "from-shards")
    shutil.copytree(divided.root, run.root)
    shutil.rmtree(run.checkpoint(STEPS))
    shutil.rmtree(run.final)
    words = ("--backend", "ep_tp", "--precision", "fp32", "--output", run.root, "--no-plot")
    done = finetune("launch", work / "full.json", *words, "--resume")
    assert done.status == 0, done.output
    assert_equal(alone, run)
    assert_planned(run)


@pytest.mark.slow
def test_adapters_of_attention_with_divided_experts(work, finetune):
    runs = [train(finetune, work, "lora", backend) for backend in ("single", "ep_fsdp")]
    assert_equal(*runs)
    assert_planned(runs[1])


@pytest.mark.slow
def test_dropout_and_dora_beside_divided_experts(work, finetune):
    """Each process drops elements of its own rows, as one process does of the same micro-batch."""
    runs = [train(finetune, work, "dropout", backend) for backend in ("single", "ep_fsdp")]
    assert_equal(*runs)
    for run in runs:  # of so small a model, the plan of DoRA is a little high on one process too
        assert_planned(run, within=0.08)


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 512, "head_dim": 64},
    "mixtral": {"num_local_experts": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "adapter", "experts"),
    [("qwen3_moe", None, 4), ("mixtral", LoRA(r=4, targets=("q_proj", "v_proj")), 2)],
)
def test_the_plan_of_divided_experts_is_that_of_a_trace(kind, adapter, experts, tmp_path):
    """Gathered and reduced alone, or by two processes with the same experts.

    Large enough for activations, weights and the buffers of FSDP2 to matter alike.
    """
    fields = MIXTURES[kind] | {
        "model_type": kind, "hidden_size": 512, "intermediate_size": 512, "vocab_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
        "num_experts_per_tok": 2, "tie_word_embeddings": False, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    recipe = SFT(Model(str(tmp_path)), adapter=adapter, data=(Data("none.jsonl", "messages"),))
    recipe = recipe.with_batch(rows=16, micro_rows=2, max_length=512)
    machine, count = backends.divided(backends.load("ep_fsdp"), 4, {"experts": experts})
    settled = plan(recipe, machine, count)
    traced = verify(settled, workload_of(settled, model_source(recipe).shape))
    assert isinstance(traced, Stages)
    (found,) = traced.each.values()
    for row in found.rows:
        assert row.predicted == pytest.approx(row.traced, rel=0.02), row.component
    for name in ("forward: last layer", "backward: last layer"):
        assert found.predicted_moments[name] == pytest.approx(found.traced.total(name), rel=0.02), (
            name
        )


@pytest.mark.slow
def test_the_plan_and_a_trace_count_the_bytes_of_experts(work, tmp_path):
    """Four processes, two of which hold the same experts.

    The router decides how many tokens a process receives, but all of them together receive what
    they sent: what the trace sends, as often as there are processes.
    """
    text = (ROOT / "accelerate_configs/ep_fsdp.yaml").read_text()
    text = text.replace("num_processes: 2", "num_processes: 4").replace(
        "shard_size: 2", "shard_size: 4"
    )
    config = tmp_path / "experts.yaml"
    config.write_text(text)
    counts, workload, traced = counted_step(work / "moe", config, 16, tmp_path)
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


MIXTURE = LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "fields", "sizes", "problem"),
    [
        ("ep_fsdp", {}, {"experts": 4}, "6 experts do not divide over 4 processes; use 2 or 3"),
        ("ep_tp", {}, {"experts": 3}, "multiple of the 2 tensor parallel processes that divides"),
        ("ep_fsdp", {"num_experts": 1}, {}, "qwen3_moe has no experts to divide"),
        ("ep_fsdp", {"model_type": "jamba"}, {}, "dividing the experts of jamba is not supported"),
        ("ep_tp", {"model_type": "jamba"}, {}, "tensor parallelism of jamba is not supported"),
        ("tp", {}, {}, "experts of qwen3_moe are not divided by columns and rows (tensor 2); use"),
        ("sp", {"model_type": "jamba"}, {}, "a mixture of experts of type jamba is not supported"),
        ("pp", {"model_type": "jamba"}, {}, "pipeline parallelism of jamba is not supported"),
        ("cp", {"sliding_window": 64}, {}, "sliding_window=64, but the keys of all previous"),
    ],
)
def test_experts_that_do_not_divide_are_refused(backend, fields, sizes, problem):
    assert any(problem in each for each in refused(backend, MIXTURE | fields, sizes))


@pytest.mark.parametrize("backend", ["pp", "pp_fsdp", "sp", "sp_fsdp", "cp"])
def test_complete_experts_are_planned(backend):
    assert refused(backend, MIXTURE, {}) == []


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        ({}, "adapter.targets: 'all-linear' adapts experts, which ep_fsdp divides"),
        ({"targets": ("q_proj", "up_proj")}, "adapter.targets: 'up_proj' adapts experts"),
        ({"targets": ("q_proj",)}, ""),
    ],
)
def test_adapters_of_divided_experts_are_refused(adapter, problem):
    model = Model(config=MIXTURE, tokenizer="x")
    recipe = SFT(model).with_data(Data("rows.jsonl", "messages")).with_lora(**adapter)
    found: list[str] = []
    try:
        plan(recipe.with_batch(rows=8, micro_rows=1), "ep_fsdp", 2)
    except FinetuneError as error:
        found = list(error.problems)
    assert [each.startswith(problem) for each in found] == ([True] if problem else [])


def test_experts_are_divided_over_the_processes_of_a_copy():
    machine, count = backends.divided(backends.load("ep_fsdp"), None, {"experts": 4})
    assert (machine.axes.experts, count) == (4, 4)
    mesh = Mesh(replicate=2, shard=4, tensor=2, experts=4)
    assert (mesh.processes, mesh.expert_copies) == (16, 2)
    assert mesh.words() == "replicate 2 x shard 4 x tensor 2 (experts over 4)"
    assert mesh.summary()["experts"] == 4


def test_a_file_whose_experts_do_not_fit_its_processes_is_refused(tmp_path):
    text = (ROOT / "accelerate_configs/ep_fsdp.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("ep_size: 2", "ep_size: 3"))
    with pytest.raises(FinetuneError, match=r"divides the 2 processes of one copy .* got 3; use 2"):
        backends.load(str(path))


def test_shards_without_their_engine_are_refused(monkeypatch):
    """Experts whose size was lost on the way would train as data parallel."""
    given = {
        "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "WORLD_SIZE": "2", "RANK": "0",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FinetuneError, match="2 processes should share one copy of the model"):
        backends.launched()


def test_a_recipe_is_not_changed_by_the_processes_of_its_experts():
    machine = dataclasses.replace(backends.load("ep_fsdp"), precision="fp32")
    recipe = SFT(Model(config=MIXTURE, tokenizer="x")).with_data(Data("rows.jsonl", "messages"))
    recipe = recipe.with_batch(rows=8, micro_rows=1)
    assert plan(recipe, machine, 2).accumulation == plan(recipe, "ddp", 2).accumulation == 4
    assert plan(recipe, "ep_tp", 2).accumulation == 8
