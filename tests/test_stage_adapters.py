"""Adapters in a pipeline: a stage knows the names of all stages, and may have no adapter."""

from pathlib import Path
from typing import Any

import divided
import pytest
import torch
from conftest import Tiny, Train, cut_off, launch, once, problems_of, read
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

import finetune as ft
from finetune.backend.axes import Axes
from finetune.checkpoints.pretrained import adapter_keys
from finetune.distributed import layers
from finetune.models import adapters, resume_adapter
from finetune.training import optim

FIRST = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")
"""Modules of the first stage, as PEFT lists them."""
NO_EVALUATION: dict[str, Any] = {"eval_data": [], "evaluation": {"every": None}}


@pytest.fixture(scope="module")
def model(tiny: Tiny, shared: Path) -> Path:
    make = lambda place: tiny.other(place, "llama", num_hidden_layers=4)  # noqa: E731
    return once(shared / "four_layers", make)


class Line:
    """A line of the mesh along its pipeline."""

    def __init__(self, stage: int) -> None:
        self.stage = stage

    def get_local_rank(self) -> int:
        return self.stage


def of_stages(model: Path, adapter: ft.LoRA) -> list[nn.Module]:
    """A model with its adapter on one process, and on the stages of a pipeline."""
    axes, line, found = Axes(pipeline=2), map(Line, range(2)), []
    for along in (None, *line):
        base: Any = AutoModelForCausalLM.from_pretrained(model)
        base = base if along is None else layers._stages(base, along, axes)
        found.append(adapters.attach(base, adapter, None, range(0), None))
    return found


@pytest.mark.parametrize(
    "chosen",
    [
        {"targets": FIRST},
        {"targets": ("q_proj", "up_proj"), "layers_to_transform": (0,)},
        {"targets": "all-linear"},
    ],
)
def test_stages_together_have_the_adapter_of_one_process(model, chosen):
    alone, *stages = of_stages(model, ft.LoRA(r=4, **chosen))
    trained = [[n for n, p in each.named_parameters() if p.requires_grad] for each in stages]
    keys = adapter_keys(alone, [n for n, p in alone.named_parameters() if p.requires_grad])
    assert sorted([*trained[0], *trained[1]]) == sorted(keys.values())
    assert all(adapter_keys(each, [*keys.values()]) == keys for each in stages)
    configs = [layers.complete(each).peft_config["default"].to_dict() for each in (alone, *stages)]
    assert configs[0] == configs[1] == configs[2]
    rules = [optim.build(each, ft.Optim(), 1e-3) for each in stages]
    assert [bool(each) for each in rules] == [bool(names) for names in trained]


def test_a_name_of_no_stage_is_refused_as_on_one_process(model):
    wrong = ft.LoRA(r=4, targets=(*FIRST, "model.layers.4.self_attn.q_proj"))
    base: Any = AutoModelForCausalLM.from_pretrained(model)
    problems = [problems_of(adapters.attach, base, wrong, None, range(0), None)]
    for stage in map(Line, range(2)):
        base = AutoModelForCausalLM.from_pretrained(model)
        base = layers._stages(base, stage, Axes(pipeline=2))  # type: ignore[arg-type]
        problems.append(problems_of(adapters.attach, base, wrong, None, range(0), None))
    assert problems[0] == problems[1] == problems[2]
    assert len(problems[0]) == 1


@pytest.fixture(scope="module")
def sections(model: Path, run_of: Train) -> dict[str, Any]:
    """Sections of a run that goes on with an adapter of layers 0 and 3."""
    base = divided.SHORT | NO_EVALUATION | {"model": {"name": str(model)}}
    adapter = {"r": 4, "targets": ["q_proj", "up_proj"], "layers_to_transform": [0, 3]}
    first = run_of(**base, adapter=adapter)
    return base | {"model": base["model"] | {"adapter": str(first.root)}}


def test_stages_take_their_tensors_of_an_adapter_and_refuse_a_stray_one_alike(model, tmp_path):
    chosen = ft.LoRA(r=4, targets=("q_proj", "up_proj"), layers_to_transform=(0, 3))
    networks = of_stages(model, chosen)
    names = [name for name, p in networks[0].named_parameters() if p.requires_grad]
    keys = adapter_keys(networks[0], names)
    tensors = {key: torch.rand(networks[0].get_parameter(keys[key]).shape) for key in keys}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    layers.complete(networks[0]).peft_config["default"].save_pretrained(tmp_path)
    recipe = ft.SFT(ft.Model(str(model), adapter=str(tmp_path)), adapter=chosen)
    for network in networks:
        resume_adapter.load_adapter(network, recipe)
        here = dict(network.named_parameters())
        found = [torch.equal(here[keys[key]], tensors[key]) for key in keys if keys[key] in here]
        assert found == [True] * (len(keys) if network is networks[0] else len(keys) // 2)
    key = next(iter(tensors))
    tensors[key.replace("layers.0", "layers.7")] = tensors[key].clone()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    problems = [problems_of(resume_adapter.load_adapter, network, recipe) for network in networks]
    assert problems[0] == problems[1] == problems[2]
    assert "belongs to no module of the base" in problems[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("pp", ()),
        ("pp", ("--schedule", "ZBVZeroBubble")),
        ("pp_fsdp", ()),
        ("pp_tp_fsdp", ()),
    ],
)
def test_an_adapter_goes_on_in_a_pipeline(backend, words, sections, run_of, finetune, tmp_path):
    alone = run_of(**sections)
    run = run_of(backend, *words, processes=divided.processes_of(backend), **sections)
    divided.assert_learned(alone, run)
    again = cut_off(run, tmp_path / "again", divided.MIDDLE)
    launch(finetune, run.recipe, "single", again.root, "--resume")
    divided.assert_learned(alone, again)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "words", "layer"),
    [
        ("pp", (), 0),
        ("pp", ("--schedule", "ZBVZeroBubble"), 3),
        ("pp_fsdp", (), 3),
        ("pp_tp", (), 0),
    ],
)
def test_a_stage_without_an_adapter_takes_part(backend, words, layer, model, run_of):
    sections = divided.SHORT | NO_EVALUATION | {"model": {"name": str(model)}}
    names = [f"model.layers.{layer}.self_attn.{each}_proj" for each in "qkvo"]
    sections |= {"adapter": {"r": 4, "targets": names}}
    alone = run_of(**sections)
    run = run_of(backend, *words, processes=divided.processes_of(backend), **sections)
    divided.assert_learned(alone, run)
    assert set(read(run.final / "adapter_config.json")["target_modules"]) == set(names)
