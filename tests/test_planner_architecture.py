"""Shapes read from config.json against published totals, transformers, and PEFT."""

import json

import pytest
from architectures import FIELDS, SIZES
from conftest import slow_but
from planning import shape

import finetune as ft
from finetune.errors import FinetuneError
from finetune.planner.estimate.adapter_sizes import lora
from finetune.planner.estimate.predict import model_source
from finetune.planner.families import FAMILIES
from finetune.planner.shapes import published
from finetune.planner.shapes.read_config import read

APPROXIMATE = ("lfm2", "gpt_oss", "qwen3_5_text", "bamba", "glm4", "deepseek_v3", "opt", "cohere2")


def small(kind: str, **fields: object) -> dict[str, object]:
    config = {
        "model_type": kind, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128, "head_dim": 16,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return config | fields


def test_every_config_has_its_published_number_of_parameters(assets):
    table = (assets / "configs" / "TABLE.txt").read_text(encoding="utf-8").splitlines()
    totals = {line.split("|")[0]: int(line.split("|")[2]) for line in table if "|" in line}
    found = {
        name: read(json.loads((assets / "configs" / name / "config.json").read_text())).parameters
        for name in totals
    }
    assert found == totals
    assert len(found) >= 30


def test_rows_of_the_table_have_their_published_number_of_parameters():
    published = {
        "openai-community/gpt2": 124_439_808, "openai-community/gpt2-xl": 1_557_611_200,
        "EleutherAI/pythia-70m-deduped": 70_426_624, "EleutherAI/pythia-410m": 405_334_016,
        "EleutherAI/pythia-2.8b": 2_775_208_960, "EleutherAI/pythia-6.9b": 6_857_302_016,
        "EleutherAI/pythia-12b": 11_846_072_320, "EleutherAI/gpt-neox-20b": 20_554_567_680,
        "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704, "microsoft/phi-4": 14_659_507_200,
        "google/gemma-3-1b-it": 999_885_952, "google/gemma-3-4b-it": 3_880_263_168,
        "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
        "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
        "HuggingFaceTB/SmolLM3-3B": 3_075_098_624, "microsoft/Phi-4-mini-instruct": 3_836_021_760,
        "allenai/OLMo-2-1124-7B-Instruct": 7_298_617_344,
        "allenai/OLMo-2-0325-32B": 32_234_279_936,
        "ibm-granite/granite-3.3-8b-instruct": 8_170_864_640,
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    }  # fmt: skip
    assert {name: shape(name).parameters for name in published} == published
    assert shape("mistralai/Mixtral-8x7B-v0.1").active_parameters == 12_879_925_248


def test_a_hub_name_finds_its_row_and_a_version_is_not_lost():
    words = {
        "mistralai/Mistral-7B-Instruct-v0.3": 32768, "mistralai/Mistral-7B-v0.1": 32000,
        "meta-llama/Llama-3.1-8B-Instruct": 128256, "HuggingFaceTB/SmolLM2-135M-Instruct": 49152,
    }  # fmt: skip
    assert {name: shape(name).vocab for name in words} == words
    assert published.find("somebody/unknown-3b") is None


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *(
            (kind, {})
            for kind in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "olmo2", "granite")
        ),
        ("phi3", {"pad_token_id": 0}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    ],
)
def test_parameters_and_adapters_are_those_of_transformers_and_peft(kind, fields):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.models.model import as_trained

    config = small(kind, **fields)
    named = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **named))
        shape = read(config)
        assert shape.parameters == sum(p.numel() for p in model.parameters())
        wrapped = as_trained(model, ft.SFT(adapter=ft.LoRA(r=4)))
    trained = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert lora(shape, 4).parameters == trained


def test_an_unknown_architecture_and_every_problem_of_a_config_are_refused():
    with pytest.raises(FinetuneError) as caught:
        read(small("lama"))
    assert "did you mean 'llama'?" in str(caught.value)
    assert all(kind in str(caught.value) for kind, f in FAMILIES.items() if f.shape)
    with pytest.raises(FinetuneError) as caught:
        read(small("llama", vocab_size=0, hidden_act="relu6", num_key_value_heads=3))
    assert len(caught.value.problems) == 3
    with pytest.raises(FinetuneError, match="hidden_act"):
        read(small("llama", hidden_act=["silu"]))
    config = small("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)
    with pytest.raises(FinetuneError, match="mlp_only_layers"):
        read(config | {"mlp_only_layers": [0]})


Q = ("q_proj",)


@pytest.mark.parametrize(
    ("targets", "how", "parameters"),
    [
        # q: 64 -> 64, k and v: 64 -> 32, o: 64 -> 64, gate and up: 64 -> 96, down: 96 -> 64
        (("q_proj", "v_proj"), {}, 2 * 4 * (128 + 96)),
        (r".*\.0\.self_attn\.q_proj", {}, 4 * 128),
        (Q, {"only_layers": (1,)}, 4 * 128),
        (Q, {"rank_pattern": {"q_proj": 8}}, 2 * 8 * 128),
        (Q, {"dora": True}, 2 * (4 * 128 + 64)),
        (("q_proj", "lm_head"), {}, 2 * 4 * 128 + 4 * (64 + 128)),
        (("embed_tokens",), {}, 4 * (64 + 128)),
        (r".*lm_head", {}, 4 * (64 + 128)),
        # PEFT wraps nothing outside the layers where layers are chosen.
        (("q_proj", "lm_head"), {"only_layers": (1,)}, 4 * 128),
    ],
)
def test_adapters_are_counted_where_their_targets_choose_them(targets, how, parameters):
    assert lora(read(small("llama")), 4, targets, **how).parameters == parameters


def test_adapters_on_all_linear_modules_are_the_usual_ones_and_an_unknown_name_is_refused():
    shape = read(small("llama"))
    assert lora(shape, 4, "all-linear").parameters == lora(shape, 4).parameters
    with pytest.raises(FinetuneError, match="linear modules here: down_proj"):
        lora(shape, 4, ("query",))


@pytest.mark.parametrize(
    "text", ["[]", '"llama"', '{"model_type": ["llama"]}', '{"model_type": 3}']
)
def test_a_config_of_another_form_is_refused_with_its_path(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FinetuneError, match=r"config\.json: "):
        model_source(ft.SFT(ft.Model(str(tmp_path))))


@pytest.mark.parametrize("kind", slow_but(("lfm2", "gpt_oss"), APPROXIMATE))
def test_a_family_without_formulas_has_the_weights_that_transformers_builds(
    kind, tmp_path, monkeypatch
):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    config = {"model_type": kind, **SIZES, **FIELDS.get(kind, {})}
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    recipe = ft.SFT(ft.Model(config=config, tokenizer="t"))
    source = model_source(recipe)
    assert not source.exact
    assert source.shape.parameters == pytest.approx(made.num_parameters(), rel=0.02)
    again = model_source(recipe).shape  # from the cache
    assert again == source.shape
