"""What an adapter reaches in mixtures of experts, and what is left out by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import problems_of, write_recipe
from families import SIZES, VOCABULARY, build
from peft import PeftModel
from test_experts import MOE
from transformers import AutoModelForCausalLM
from transformers.integrations import replace_with_bnb_linear

from finetune import catalog
from finetune.cli.main import main
from finetune.errors import FinetuneError
from finetune.methods.sft import SFT
from finetune.models import composition, targets
from finetune.models.adapters import draw_adapter
from finetune.models.model import as_trained
from finetune.models.quantization import quantised_notes, quantization_config
from finetune.planner import plan
from finetune.planner.estimate.predict import workload_of
from finetune.planner.shapes.read_config import read
from finetune.recipe import Data, LoRA, Model

ROWS = Data("rows.jsonl", "messages")
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = MOE | {
    "deepseek_v3": LATENT
    | {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "head_dim": 8,
    },
    "llama4_text": {
        "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16,
        "intermediate_size_mlp": 96,
    },
}  # fmt: skip
LEFT = {
    "granitemoe": ("block_sparse_moe.router",),
    "llama4_text": ("feed_forward.router",),
    "gpt_oss": ("mlp.router",),
    "phimoe": ("mlp.router",),
    "qwen3_next": ("mlp.gate", "linear_attn.conv1d"),
}
"""Routers, and convolutions, which are no products."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def adapted(kind: str, base: Any = None, **fields: Any) -> PeftModel:
    model = build(kind, **KINDS[kind]) if base is None else base
    trained = as_trained(model, SFT(adapter=LoRA(r=4, **fields)))
    assert isinstance(trained, PeftModel)
    with torch.no_grad():
        torch.manual_seed(5)
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return trained


def reached(model: PeftModel) -> set[str]:
    """Names of the base's parameters that have an adapter."""
    base = model.get_base_model()
    ids = {id(parameter) for parameter in targets.reached_by(model)}
    return {
        name.replace(".base_layer", "")
        for name, parameter in base.named_parameters()
        if id(parameter) in ids
    }


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(3, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("kind", KINDS)
def test_all_linear_reaches_every_matrix_but_routers(kind: str, tmp_path: Path) -> None:
    base = build(kind, **KINDS[kind])
    base.save_pretrained(tmp_path / "base")
    model = adapted(kind, base)
    found = targets.reach(model, base)
    assert found.left == LEFT.get(kind, ("mlp.gate",))
    assert 0.97 < found.share < 1
    wanted, names = logits(model), reached(model)
    # Plain PEFT, on the base that transformers loads, reaches the same and computes the same.
    model.save_pretrained(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert reached(loaded) == names
    assert torch.allclose(logits(loaded), wanted, atol=1e-5)
    merged = loaded.merge_and_unload()
    assert torch.allclose(logits(merged), wanted, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(again), wanted, rtol=1e-4, atol=1e-4)
    untrained = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert not torch.allclose(logits(untrained), wanted, atol=1e-2)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_gate_and_up_in_one_tensor_have_twice_the_rank_and_the_same_scale(kind: str) -> None:
    for rslora in (False, True):
        model = adapted(kind, use_rslora=rslora)
        scales = {
            (layer.r["default"], round(layer.scaling["default"], 6))
            for layer in model.modules()
            if isinstance(layer, targets.LoraLayer)
        }
        scale = round(8 / 4**0.5, 6) if rslora else 2.0
        assert scales == {(4, scale), (8, scale)}


MLP = ("gate_proj", "up_proj", "down_proj")
DENSE, SHARED, OF_ATTENTION = (
    " ".join(f"{layer}.{part}" for part in parts)
    for layer, parts in (("mlp", MLP), ("mlp.shared_experts", MLP), ("self_attn", ATTENTION))
)
DOWN = "mlp.experts.down_proj"
EXPERTS = f"mlp.experts.gate_up_proj {DOWN}"
ONE = {"targets": ATTENTION, "target_parameters": ("experts.down_proj",)}


@pytest.mark.parametrize(
    ("kind", "fields", "layers", "wanted"),
    [
        # PEFT takes gate_proj, up_proj and down_proj for those of the experts alone.
        ("deepseek_v3", {"targets": MLP}, "01", f"{DENSE} {SHARED} {EXPERTS}"),
        ("qwen3_moe", {"targets": MLP}, "01", EXPERTS),  # their older names
        # PEFT would look at the last names that an expression matches, in every layer.
        ("qwen3_moe", {"targets": r".*\.1\.self_attn\.[qv]_proj"}, "1",
         "self_attn.q_proj self_attn.v_proj"),
        ("qwen3_moe", ONE, "01", f"{OF_ATTENTION} {DOWN}"),
        ("qwen3_moe", ONE | {"target_parameters": ("down_proj",)}, "01", f"{OF_ATTENTION} {DOWN}"),
        ("qwen3_moe", ONE | {"target_parameters": (DOWN,)}, "01", f"{OF_ATTENTION} {DOWN}"),
        ("qwen3_moe", ONE | {"layers_to_transform": (1,)}, "1", f"{OF_ATTENTION} {DOWN}"),
        ("qwen3_moe", {"exclude_modules": ("experts",)}, "01", OF_ATTENTION),
        (
            "llama", {"targets": ("q_proj",), "target_parameters": ("k_proj.weight",)}, "01",
            "self_attn.q_proj self_attn.k_proj",
        ),
    ],
)  # fmt: skip
def test_an_adapter_reaches_what_is_named_and_no_more(kind, fields, layers, wanted):
    names = reached(adapted(kind, build("llama") if kind == "llama" else None, **fields))
    places = [name.removesuffix(".weight").split(".", 3) for name in names]
    assert {place[2] for place in places} == set(layers)
    assert {place[3] for place in places} == set(wanted.split())


def test_half_of_a_tensor_is_refused():
    with pytest.raises(FinetuneError, match="gate_proj and up_proj of the experts are one tensor"):
        adapted("qwen3_moe", targets=("gate_proj", "down_proj"))


def test_a_router_is_adapted_where_it_is_named():
    model = adapted("qwen2_moe", target_parameters=("mlp.gate.weight",))
    assert {"model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"} <= reached(model)


def test_adapters_that_peft_would_lose_when_it_loads_them_are_refused(tmp_path: Path) -> None:
    """A rule of transformers 5.23 for Laguna's checkpoints also matches its new names."""
    fields = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16,
        "shared_expert_intermediate_size": 24,
    }  # fmt: skip
    base = build("laguna", **fields)
    base.save_pretrained(tmp_path / "base")
    (problem,) = problems_of(adapted, "laguna", base)
    assert problem.startswith(
        "adapter.targets: PEFT would not load adapters on "
        "model.layers.1.mlp.shared_experts.gate_proj and 2 more modules"
    )
    names = tuple(problem.rsplit("[", 1)[1].rstrip("]").split(","))
    base = build("laguna", **fields)
    model = adapted("laguna", base, exclude_modules=names)
    model.save_pretrained(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert reached(loaded) == reached(model)
    assert torch.allclose(logits(loaded), logits(model), atol=1e-5)


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("experts.gate_proj", "no parameter is named 'experts.gate_proj'"),
        ("layernorm.weight", "no parameter is named 'layernorm.weight'"),
        ("input_layernorm.weight", "'input_layernorm.weight' names model.layers.0.input_layernorm"),
    ],
)
def test_names_that_cannot_be_adapted_are_refused_with_those_that_can(wanted, problem):
    first, second = problems_of(adapted, "qwen3_moe", target_parameters=(wanted, "experts.nothing"))
    assert first.startswith("adapter.target_parameters: ")
    assert problem in first
    assert second.startswith("adapter.target_parameters: no parameter is named 'experts.nothing'")
    for told in (first, second):
        assert "; expert tensors here: experts.down_proj, experts.gate_up_proj" in told


def test_a_model_unknown_to_the_plan_is_refused_when_loaded() -> None:
    with pytest.raises(FinetuneError, match=r"adapter\.dropout: 0\.1 cannot be applied inside"):
        adapted("qwen3_moe", dropout=0.1)


def test_a_normal_start_has_the_deviation_of_its_rank() -> None:
    """PEFT: a deviation of 1 / r, whatever the number of experts."""
    model = adapted("mixtral", init_lora_weights="gaussian", **ONE)
    draw_adapter(model, LoRA(r=4, init_lora_weights="gaussian"), seed=3)
    spread = {
        name: parameter.std().item()
        for name, parameter in model.named_parameters()
        if "experts" in name and "lora_A" in name
    }
    assert len(spread) == 2
    assert all(value == pytest.approx(1 / 4, rel=0.1) for value in spread.values())


def test_names_are_as_short_as_they_may_be() -> None:
    every = ["a.0.q", "a.1.q", "a.0.mlp.down", "a.1.mlp.down", "a.1.shared.down", "head"]
    assert targets.shortest(["a.0.q", "a.1.q", "head"], every) == {"q", "head"}
    assert targets.shortest(["a.0.mlp.down", "a.1.mlp.down"], every) == {"mlp.down"}
    assert targets.shortest(["a.1.q"], every) == {"1.q"}
    assert targets.shortest(["a.0.q", "a.1.q"], every, words=2) == {"0.q", "1.q"}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"targets": ATTENTION}, ONE,
        {"targets": ATTENTION, "target_parameters": ("gate_up_proj", "down_proj")},
        ONE | {"target_parameters": ("experts.gate_up_proj",), "layers_to_transform": (1,)},
    ],
)  # fmt: skip
def test_the_plan_counts_the_adapters_of_experts(kind: str, fields: dict[str, Any]) -> None:
    config = SIZES | KINDS[kind] | {"model_type": kind, "num_experts": 4}
    scratch = Model(config=config, tokenizer="t")
    recipe = SFT(scratch, adapter=LoRA(r=4, **fields)).with_data(ROWS).with_batch(rows=4)
    counted = workload_of(plan(recipe, "single"), read(config)).trained
    model = adapted(kind, **fields)
    assert counted == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_the_plan_reports_adapted_and_quantized_shares_of_a_mixture(capsys, tmp_path):
    build("mixtral", **KINDS["mixtral"]).config.save_pretrained(tmp_path / "m")
    fields: dict[str, Any] = {
        "method": "sft", "model": {"name": str(tmp_path / "m"), "quantization": "nf4"},
        "data": [{"source": "rows.jsonl", "format": "messages"}], "adapter": {"r": 4},
    }  # fmt: skip
    assert main(["plan", str(write_recipe(tmp_path / "r.json", fields))]) == 0
    lines = [each for each in capsys.readouterr().out.splitlines() if each.startswith("note ")]
    latent = SIZES | KINDS["deepseek_v3"] | {"model_type": "deepseek_v3"}
    for notes in (lines, composition.planned(catalog.from_fields(fields), latent)):
        (adapter,) = [each for each in notes if "adapter.targets" in each]
        assert "all-linear reaches" in adapter
        (packed,) = [each for each in notes if "model.quantization" in each]
        assert "of the base's weights are in nf4; not quantised: " in packed
        assert "mlp.experts.gate_up_proj" in packed
    # Packed in four bits they are no parameters that PEFT can add to.
    assert "mlp.shared_experts.gate_proj" in adapter


def test_the_share_in_four_bits_is_that_of_linear_layers() -> None:
    """Llama 3.1 8B: 32 layers of 218,103,808 weights in linear layers, of 8,030,261,248."""
    recipe = SFT(Model("meta-llama/Llama-3.1-8B", quantization="nf4"), adapter=LoRA())
    told = plan(recipe.with_data(ROWS).with_batch(rows=4), "single").explain()
    assert f"{32 * 218_103_808 / 8_030_261_248:.1%} of the base in nf4" in told
    assert "86.9% of the base in nf4 (linear layers, without the head)" in told


def test_a_loaded_base_reports_what_is_not_in_four_bits() -> None:
    base = build("mixtral", **KINDS["mixtral"])
    base = replace_with_bnb_linear(base, ["lm_head"], quantization_config("nf4", torch.bfloat16))
    total = sum(p.numel() for p in base.parameters())
    attention = 2 * (2 * 64 * 64 + 2 * 64 * 32)
    (note,) = quantised_notes(base, "nf4")
    assert note.startswith(
        f"model.quantization: {attention / total:.1%} of the base's weights are in nf4; "
        "not quantised: mlp.experts.gate_up_proj ("
    )
    assert "embed_tokens (" in note
    assert "lm_head (" in note
