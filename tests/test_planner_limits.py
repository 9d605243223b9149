"""What transformers or PEFT cannot train is refused by the plan, with what to do instead."""

import dataclasses
from typing import Any

import pytest
import transformers
from conftest import problems_of
from planning import ROWS, refused
from transformers.models.auto import modeling_auto

from finetune import backend
from finetune.checks.request import check, misnamed
from finetune.methods.dpo import DPO
from finetune.methods.grpo import GRPO
from finetune.methods.orpo import ORPO
from finetune.methods.reward import RewardModel
from finetune.methods.sft import SFT
from finetune.planner import plan
from finetune.planner.balance_loss import expert_count
from finetune.planner.families import (
    BOTH_WAYS,
    ENCODER_DECODER,
    FAMILIES,
    MASKED,
    READS_AUDIO,
    READS_IMAGES,
)
from finetune.recipe import Data, Model, Recipe

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2}


def of(kind: str, attention: Any = "eager", **fields: Any) -> Recipe:
    model = Model(config={"model_type": kind} | fields, tokenizer="t", attention=attention)
    return SFT(model).with_data(ROWS)


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        ("t5 mt5 bart pegasus marian led whisper", ENCODER_DECODER),
        ("florence2", ENCODER_DECODER),
        ("granite_speech qwen2_5_omni qwen2_audio voxtral", READS_AUDIO),
        ("paligemma", BOTH_WAYS),
        ("qwen2_vl llava", READS_IMAGES),
        ("deberta modernbert", MASKED),
    ],
)
def test_well_known_types_that_are_no_decoders_are_refused(kinds, reason):
    instead = "use a decoder such as Qwen3, Llama or Gemma"
    for kind in kinds.split():
        assert refused(of(kind), "single") == [f"model.config: {kind} {reason}; {instead}"]


def test_causal_models_and_types_that_are_not_known_pass():
    for kind in ("llama", "qwen3", "mixtral", "gpt_oss", "unheard_of"):
        assert refused(of(kind), "single") == []
    assert refused(of("bart", is_encoder_decoder=False), "single") == []
    config = {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
    model = Model(config=config, tokenizer="t", trust_remote_code=True)
    assert refused(of("vit").with_model(model), "single") == []


@pytest.mark.parametrize(
    ("fields", "field", "instead"),
    [
        ({"dropout": 0.1}, "dropout", "dropout=0"),
        ({"use_dora": True}, "use_dora", "use_dora=false"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights", "init_lora_weights=true"),
        ({"init_lora_weights": "olora"}, "init_lora_weights", "init_lora_weights=true"),
    ],
)
def test_adapters_on_experts_are_refused_what_peft_cannot_do(fields, field, instead):
    mixture = of("qwen3_moe", **EXPERTS)
    (problem,) = refused(mixture.with_lora(**fields), "single")
    assert problem.startswith(f"adapter.{field}: ")
    assert f"; use adapter.{instead}, or name modules of attention in adapter.targets" in problem
    named: dict[str, Any] = fields | {"targets": ("q_proj", "o_proj")}
    assert refused(mixture.with_lora(**named), "single") == []
    assert refused(of("qwen3").with_lora(**fields), "single") == []
    given: dict[str, Any] = named | {"target_parameters": ("experts.down_proj",)}
    assert len(refused(of("unheard_of").with_lora(**given), "single")) == 1
    # A published mixture is known without its config.
    published = SFT(Model("mistralai/Mixtral-8x7B-v0.1")).with_data(ROWS)
    (problem,) = refused(published.with_lora(**fields), "single")
    assert problem.startswith(f"adapter.{field}: ")


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"num_local_experts": 8}, 8),
        ({"n_routed_experts": 64, "n_shared_experts": 2}, 64),
        ({"text_config": {"num_experts": 128}}, 128),
        ({"ffn_config": {"moe_num_experts": 16}}, 16),
        ({"num_local_experts": 0}, 0),
        ({"num_hidden_layers": 8}, 0),
    ],
)
def test_experts_are_counted_from_every_spelling(fields, count):
    assert expert_count(fields) == count


@pytest.mark.parametrize("targets", ["all-linear", r".*\.q_proj"])
def test_layers_need_modules_that_are_named(targets):
    recipe = of("llama").with_lora(layers_to_transform=(0,), targets=targets)
    (problem,) = refused(recipe, "single")
    assert problem.startswith("adapter.layers_to_transform: ")
    assert f"adapter.targets is '{targets}'; name them" in problem
    assert refused(recipe.with_lora(layers_to_transform=(0,), targets=("q_proj",)), "single") == []


SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 99,
}  # fmt: skip
LINEAR = (
    "linear modules here: down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
)


@pytest.mark.parametrize(
    ("field", "name", "told"),
    [
        ("targets", "k_prj", f"; did you mean 'k_proj'?; {LINEAR}"),
        ("targets", "zz", f"; {LINEAR}"),
        ("targets", "self_attn.q_prj", f"; did you mean 'q_proj'?; {LINEAR}"),
        ("exclude_modules", "o_prj", "; did you mean 'o_proj'?"),
        ("modules_to_save", "embed_token", "; did you mean 'embed_tokens'?"),
        ("modules_to_save", "lm_heads", "; did you mean 'lm_head'?"),
    ],
)
def test_a_misspelt_module_is_refused_before_the_model_is_loaded(field, name, told):
    """PEFT 0.21 ignores it if another name matches."""
    given: Any = {field: ("q_proj", name) if field == "targets" else (name,)}
    problem = f"adapter.{field}: no module is named '{name}'{told}"
    assert list(misnamed(of("llama", **SMALL).with_lora(**given))) == [problem]


def test_names_that_match_no_module_are_refused_with_the_plan_and_those_of_any_module_pass():
    """For a model type without formulas, together with the problems that the plan finds."""
    recipe = of("exaone4", **SMALL).with_batch(rows=3, micro_rows=2)
    names = {"targets": ("q_proj", "v_porj"), "rank_pattern": {"q_pro": 4, r"layers\.0\..*": 2}}
    told = problems_of(check, recipe.with_lora(**names), backend.load("single"), 1, files=False)
    rows, targets, pattern = told
    assert rows.startswith("batch.rows: 3 does not divide")
    assert targets.startswith("adapter.targets: no module is named 'v_porj'; did you mean 'v_proj'")
    assert pattern == "adapter.rank_pattern: no module matches 'q_pro'; did you mean 'q_proj'?"
    names = {"targets": ("q_proj", "lm_head", "1.self_attn.v_proj"), "modules_to_save": ("norm",)}
    assert list(misnamed(of("llama", **SMALL).with_lora(**names))) == []
    gate = {"targets": ("q_proj", "gate"), "rank_pattern": {r"layers\.1\..*q_proj": 2}}
    assert list(misnamed(of("mixtral", **SMALL | EXPERTS).with_lora(**gate))) == []
    reward = RewardModel(of("llama", **SMALL).model).with_data(ROWS)
    assert list(misnamed(reward.with_lora(modules_to_save=("score",)))) == []


@pytest.mark.parametrize("field", ["targets", "exclude_modules"])
def test_a_regular_expression_that_matches_no_path_is_refused(field):
    """PEFT matches it with the complete path of a module."""
    recipe = of("llama", **SMALL)
    assert list(misnamed(recipe.with_lora(**{field: "[qv]_proj"}))) == [
        f"adapter.{field}: the regular expression '[qv]_proj' matches no module; it must match a "
        "complete path such as model.layers.0.self_attn.q_proj, or give names: "
        f"adapter.{field}=[q_proj,v_proj]"
    ]
    assert list(misnamed(recipe.with_lora(**{field: r".*\.[qv]_proj"}))) == []


def test_initialisations_and_layers_that_do_not_fit_a_model_are_refused():
    given: dict[str, Any] = {"init_lora_weights": "orthogonal", "rank_pattern": {"q_proj": 5}}
    assert refused(of("llama").with_lora(r=3, **given), "single") == [
        "adapter.r: orthogonal needs an even rank, got 3; use 4",
        "adapter.rank_pattern.q_proj: orthogonal needs an even rank, got 5; use 6",
    ]
    assert refused(of("gpt2").with_lora(init_lora_weights="olora"), "single") == [
        "adapter.init_lora_weights: PEFT's olora does not support the transposed matrices of "
        "gpt2; use true, pissa or orthogonal"
    ]
    assert refused(of("gpt2").with_lora(init_lora_weights="pissa"), "single") == []
    recipe = of("llama", num_hidden_layers=2)
    adapted = recipe.with_lora(layers_to_transform=(1, 2, 7), targets=("q_proj",))
    assert refused(adapted, "single") == [
        "adapter.layers_to_transform: got 2, 7, expected layers 0 to 1"
    ]


@pytest.mark.parametrize("kind", [kind for kind, f in FAMILIES.items() if f.targets])
def test_what_kernels_of_mamba_read_directly_is_refused(kind):
    (problem,) = refused(of(kind).with_lora(), "single")
    assert problem.startswith(f"adapter.targets: PEFT refuses out_proj of {kind}, because kernels")
    named = problem.rsplit("[", 1)[1].rstrip("]").split(",")
    assert refused(of(kind).with_lora(targets=tuple(named)), "single") == []
    (problem,) = refused(of(kind).with_lora(targets=("in_proj", "mixer.out_proj")), "single")
    assert "PEFT refuses mixer.out_proj" in problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "fact"),
    [("_supports_sdpa", "sdpa"), ("supports_gradient_checkpointing", "recomputes")],
)
def test_types_that_lack_a_feature_are_those_of_transformers(field, fact):
    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    first = {kind: name if isinstance(name, str) else name[0] for kind, name in names.items()}
    found = {
        kind for kind, name in first.items() if not getattr(getattr(transformers, name), field)
    }
    assert found == {kind for kind, family in FAMILIES.items() if not getattr(family, fact)}


@pytest.mark.parametrize("kind", ["xglm", "bloom", "gptj"])
def test_types_without_sdpa_are_refused(kind):
    assert refused(of(kind, "sdpa"), "single") == [
        f"model.attention: transformers has no sdpa for {kind}; use model.attention=eager"
    ]


@pytest.mark.parametrize("how", [True, "attention", "offload"])
def test_types_without_checkpointing_are_refused(how):
    recipe = of("ctrl", "sdpa")
    assert refused(recipe, "single") == []
    model = dataclasses.replace(recipe.model, activation_checkpointing=how)
    assert refused(recipe.with_model(model), "single") == [
        "model.activation_checkpointing: transformers cannot recompute activations of ctrl; "
        "use false"
    ]


def test_dropout_of_a_model_is_refused_or_noted_where_two_passes_are_compared():
    rates = {"attention_dropout": 0.1, "classifier_dropout": 0.1, "resid_pdrop": 0.0}
    model = Model(config={"model_type": "llama", **rates}, tokenizer="t")
    pairs, prompts = Data("d.jsonl", "preference"), Data("d.jsonl", "prompts")
    compared, alone = (plan(each(model).with_data(pairs), "single") for each in (DPO, ORPO))
    (note,) = [each for each in compared.notes() if "dropout" in each]
    assert note.startswith("model.name: its config has attention_dropout=0.1, and the log-prob")
    assert not any("dropout" in each for each in alone.notes())
    sampled = GRPO(model, reward_funcs=("json_valid",)).with_data(prompts)  # type: ignore[arg-type]
    assert [each for each in refused(sampled, "single") if "dropout" in each] == [
        "model.config: its config has attention_dropout=0.1, and completions are sampled without "
        "dropout, so that ratios of policies would be noise; set it to 0 in a copy of the model"
    ]
