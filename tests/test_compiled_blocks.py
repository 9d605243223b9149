"""Blocks compiled by torch.compile compute what they did, for packs of any length."""

import dataclasses
import functools
import re
from typing import Any

import numpy as np
import pytest
import torch
from architectures import FIELDS, SIZES
from conftest import problems_of, run_command, warm_python, write_recipe
from safetensors.torch import load_file
from test_gpu_paths import refuses
from test_kernels_backends import PLAIN
from test_packing import documents, packs
from torch._dynamo import utils as dynamo
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import finetune as ft
from finetune.data.rows.collate import MicroBatch, collate
from finetune.errors import FinetuneError
from finetune.kernels import pointwise
from finetune.methods.losses import token_loss_sum
from finetune.models import packed_attention
from finetune.models.compiled_blocks import compile_blocks, compiled
from finetune.models.model import as_trained, install_kernels
from finetune.models.packed_attention import implementation
from finetune.planner import plan
from finetune.recipe import Batch, Data, LoRA, Model
from finetune.runs.run import Run

KINDS = (
    ("llama", True, False), ("qwen3", True, True), ("gemma2", False, False)
)  # fmt: skip
"""Architecture, whether there is an adapter, and whether activations are recomputed."""


def recipe_of(kind: str, adapter: bool = False, again: bool = False) -> ft.SFT:
    return ft.SFT(
        model=Model(
            config={"model_type": kind} | SIZES | FIELDS.get(kind, {}), tokenizer="none",
            activation_checkpointing=again,
        ),
        data=(Data("none", "chat"),),
        adapter=LoRA(r=8) if adapter else None,
        batch=Batch(rows=8, micro_rows=8, max_length=64, packing=True),
        kernels=ft.recipe.Kernels(**PLAIN["kernels"]),
    )  # fmt: skip


def steps(recipe: ft.SFT, backend: str | None) -> tuple[list[float], torch.Tensor, list[int]]:
    """Losses of four micro-batches of other lengths, their gradient, and graphs after each.

    Args:
        backend: Of `torch.compile`; None does not compile. `eager` runs the traced graphs as they
            are.
    """
    config = AutoConfig.for_model(**(recipe.model.config or {}))
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation(recipe, config)
    )
    trained = as_trained(network, recipe).train()
    install_kernels(network, plan(recipe, "single", 1, "fp32"))
    names = [name for name, _ in trained.named_parameters()]
    if backend is not None:
        assert compile_blocks(network, backend) == config.num_hidden_layers
        assert [name for name, _ in trained.named_parameters()] == names
    found, graphs = list[float](), list[int]()
    for batch in batches():
        loss = token_loss_sum(trained, batch)
        loss.backward()
        found.append(float(loss.detach()))
        graphs.append(dynamo.counters["stats"]["unique_graphs"])
    grads = [each.grad.flatten() for each in trained.parameters() if each.grad is not None]
    return found, torch.cat(grads), graphs


def batches() -> list[MicroBatch]:
    rows = packs(documents())
    return [collate(rows, np.array(each), 0, "cpu") for each in ([0, 1, 2], [1, 2], [2], [0, 2])]


@pytest.fixture(autouse=True)
def counted() -> None:
    """Graphs and graph breaks are those of one test."""
    torch._dynamo.reset()
    dynamo.counters.clear()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "adapter", "again"), KINDS)
def test_compiled_blocks_have_the_losses_and_gradients_of_eager_ones(kind, adapter, again):
    recipe = recipe_of(kind, adapter, again)
    plain, by_plain, _ = steps(recipe, None)
    ours, by_ours, graphs = steps(recipe, "eager")
    assert ours == plain
    # Checkpointing and autograd of graphs may add gradients in another order.
    assert torch.allclose(by_ours, by_plain, rtol=1e-5, atol=1e-5)
    # Nothing is compiled again for other lengths and numbers of documents.
    assert graphs[0] == graphs[-1] > 0
    cut = compiled()
    assert list(cut.breaks) == ["documents attend in separate calls"]
    assert cut.line().startswith(f"kernels.blocks: compiled into {graphs[0]} graphs, ")


def test_a_block_with_one_kernel_for_all_documents_is_one_graph(monkeypatch):
    """As on a GPU: the kernel's place is taken by attention with a mask of the documents."""

    def kernel(query: Any, key: Any, value: Any, ends: Any, longest: int, *_: Any) -> torch.Tensor:
        assert longest > 0
        places = torch.arange(query.shape[2])
        document = torch.bucketize(places, ends[1:], right=True)
        seen = (document[:, None] == document) & (places[:, None] >= places)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
        return mixed[0].transpose(0, 1)

    plain, _, _ = steps(recipe_of("llama"), None)
    # Only a build of PyTorch with CUDA has the kernel.
    monkeypatch.setattr(packed_attention, "_varlen", kernel)
    monkeypatch.setattr(packed_attention, "_has_varlen", lambda _: True)
    monkeypatch.setattr(packed_attention, "_is_faster_alone", lambda _: False)
    ours, _, graphs = steps(recipe_of("llama"), "eager")
    assert ours == pytest.approx(plain, rel=1e-5)
    assert graphs == [1, 1, 1, 1]
    assert compiled().line() == "kernels.blocks: compiled into 1 graphs, no graph breaks"


def test_compiled_blocks_replace_the_other_kernels_of_a_block() -> None:
    recipe = recipe_of("llama", adapter=True)
    recipe = dataclasses.replace(recipe, kernels=ft.recipe.Kernels(blocks="compiled"))
    settled = plan(recipe.with_batch(micro_rows=4), "fsdp_full_shard", 2)
    assert {each.option: each.value for each in settled.kernels} == {
        "head": "chunked", "lora": "separate", "norm": "plain", "activation": "plain",
        "rotary": "plain", "blocks": "compiled", "pointwise": "auto", "allocator": "auto",
    }  # fmt: skip
    reason = "because kernels.blocks=compiled fuses it with the rest of a block"
    assert f"kernels.norm: plain, {reason}" in settled.notes()


@pytest.mark.parametrize(
    ("kind", "backend", "fields", "reason"),
    [
        ("llama", "zero3", {}, "zero3 gathers weights in hooks inside of a block"),
        ("llama", "tp", {}, "tp divides the products of a block"),
        ("qwen3_moe", "ddp", {}, "blocks of qwen3_moe are not known to compile"),
        (
            "llama", "ddp", {"activation_checkpointing": "attention"},
            "model.activation_checkpointing=attention selects operations of eager blocks",
        ),
    ],
)  # fmt: skip
def test_blocks_that_cannot_be_compiled_are_refused(kind, backend, fields, reason):
    recipe = recipe_of(kind)
    model = dataclasses.replace(recipe.model, **fields)
    recipe = dataclasses.replace(recipe, model=model).with_kernels(blocks="compiled")
    told = problems_of(plan, recipe, backend, 2)
    assert f"kernels.blocks: compiled, but {reason}; use kernels.blocks=eager" in told


def test_a_missing_compiler_is_found_before_the_model_is_built(tmp_path, train, monkeypatch):
    pointwise.failure.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=refuses))
    with pytest.raises(FinetuneError, match=r"^kernels\.blocks: TorchInductor cannot compile for"):
        train(kernels={"blocks": "compiled"})
    pointwise.failure.cache_clear()
    assert not list(Run(tmp_path / "run").read_metrics("train"))


TRACED = """
import sys
import torch

compile_by = torch.compile
torch.compile = lambda *given, **named: compile_by(*given, **named | {"backend": "eager"})
from finetune.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""The command line, where compiled functions run as they were traced: TorchInductor needs minutes
for its C++."""


@pytest.mark.slow
def test_sharded_blocks_train_and_are_saved_as_eager_ones_are(tiny, tmp_path, train):
    sections = {"max_steps": 2, "evaluation": {"every": None}}
    alone = train("alone", **sections)
    recipe = write_recipe(
        tmp_path / "r.json", tiny.fields(**sections, kernels={"blocks": "compiled"})
    )
    run, script = Run(tmp_path / "run"), tmp_path / "traced.py"
    script.write_text(TRACED)
    command = [
        warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(script), "train", str(recipe), "--backend", "fsdp_full_shard", "--precision", "fp32",
        "--no-plot", "--output", str(run.root),
    ]  # fmt: skip
    done = run_command(command, tmp_path).passed()
    (cut,) = re.findall(r"kernels.blocks: compiled into (\d+) graphs, (.*)", done.output)
    assert int(cut[0]) > 0
    assert re.fullmatch(r"\d+ graph breaks: documents attend in separate calls", cut[1])
    losses = [[each["loss"] for each in r.read_metrics("train")] for r in (alone, run)]
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=2e-6)  # the order of a sum over ranks
    files = [load_file(each.final / "model.safetensors") for each in (alone, run)]
    assert files[0].keys() == files[1].keys()
