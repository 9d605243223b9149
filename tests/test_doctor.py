"""The doctor finds what is wrong with a model in seconds, and says yes where nothing is."""

import json
from pathlib import Path
from typing import Any

import pictured
import pytest
import torch
from conftest import Finetune, Tiny, write_recipe
from families import SIZES
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.methods.sft import SFT
from finetune.recipe import Model
from finetune.verification.model_checks.target import described, small
from finetune.verification.proofs.fixtures import write_tokenizer
from finetune.verification.proofs.shrink import fill_zeros, shrink

QUESTIONS = [
    "plan", "two layers of it", "loss", "gradients", "images", "causal", "adapted", "quantised",
    "experts", "documents side by side", "activation checkpointing", "two steps",
    "saved, reloaded, merged", "stop tokens",
]  # fmt: skip


def examined(finetune: Finetune, *words: str | Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status, and findings by name."""
    done = finetune("doctor", *words, "--json")
    assert done.status in (0, 1), done.output
    return done.status, {each["name"]: each for each in json.loads(done.stdout)["findings"]}


def of_kind(kind: str, folder: Path, tiny: Tiny, **fields: Any) -> Path:
    """Folder of a model's configuration with the tests' tokenizer."""
    AutoConfig.for_model(kind, **(SIZES | fields)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.model).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "aside", "tensors"),
    [
        pytest.param({"adapter": {"r": 4}}, set(), 28, id="lora"),
        pytest.param({}, {"adapted"}, 21, id="full"),
    ],
)
def test_a_sound_recipe_gets_yes_everywhere(tiny, finetune, tmp_path, sections, aside, tensors):
    status, found = examined(finetune, write_recipe(tmp_path / "r.json", tiny.fields(**sections)))
    assert status == 0, found
    assert list(found) == QUESTIONS
    answers = {name: each["passed"] for name, each in found.items()}
    aside = aside | {"quantised", "experts", "images"}
    assert answers == dict.fromkeys(QUESTIONS, True) | dict.fromkeys(aside)
    assert found["gradients"]["why"].startswith(f"{tensors} tensors")


@pytest.mark.slow
def test_a_model_alone_is_examined_with_lora(tiny, finetune):
    done = finetune("doctor", tiny.model, 'adapter.targets=["q_proj"]', "adapter.r=2").passed()
    lines = done.stdout.splitlines()
    answers = [line[:4].strip() for line in lines[: len(QUESTIONS)]]
    assert answers == [
        "-" if name in ("quantised", "experts", "images") else "yes" for name in QUESTIONS
    ]
    assert "gradients                  4 tensors" in done.stdout  # A and B of two layers
    assert "note no data is named: rows are generated" in lines


@pytest.mark.slow
def test_adapters_that_no_gradient_reaches_are_named_and_all_others_stay(tiny, finetune, tmp_path):
    """Choosing tokens has no gradient; adapters on parameters are attached a second time."""
    folder = of_kind(
        "deepseek_v32", tmp_path, tiny, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, moe_intermediate_size=24, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, head_dim=4,
        num_key_value_heads=4, index_n_heads=2, index_head_dim=8,
    )  # fmt: skip
    status, found = examined(finetune, folder)
    assert status == 0, found
    assert (
        "no gradient of a text reaches it: model.layers.N.self_attn.indexer (2): 6 adapters"
        in (found["adapted"]["why"])
    )
    # A and B: five of attention in two layers, three dense ones, three shared, two of experts.
    assert found["gradients"]["why"].startswith(f"{2 * (2 * 5 + 3 + 3 + 2)} tensors")


@pytest.mark.slow
def test_a_model_that_cannot_recompute_is_no_failure_unless_asked(tiny, finetune, tmp_path):
    folder = of_kind("ctrl", tmp_path, tiny, n_embd=32, n_layer=2, n_head=4, dff=48)
    status, found = examined(finetune, folder)
    assert status == 0, found
    answer = found["activation checkpointing"]
    assert answer["passed"] is None
    assert answer["why"] == "transformers cannot recompute activations of ctrl"


@pytest.mark.parametrize("kind", ["modernbert-decoder", "gemma4_unified"])
def test_a_type_that_needs_a_pad_token_is_shrunk_with_one(kind, tmp_path):
    """Its place is the config, or the part of it for texts; the tokenizer here has no pad token."""
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    (tmp_path / "shrunk").mkdir()
    subject = small(SFT(Model(str(tmp_path))).with_lora(), tmp_path / "shrunk", tmp_path / "cache")
    config = AutoConfig.from_pretrained(subject.recipe.model.name).get_text_config(decoder=True)
    assert config.pad_token_id == tokenizer.eos_token_id


@pytest.mark.slow
def test_a_refused_plan_is_a_no_and_the_rest_is_still_examined(tiny, finetune, tmp_path):
    fields = tiny.fields(adapter={"r": 4}, backend="zero3", optim={"name": "adafactor"})
    status, found = examined(finetune, write_recipe(tmp_path / "r.json", fields))
    assert status == 1
    assert found["plan"]["passed"] is False
    assert "adafactor has moments of complete rows and columns" in found["plan"]["why"]
    assert found["loss"]["passed"] is True


def test_rows_that_never_end_are_a_no(tiny, finetune, tmp_path):
    template = tmp_path / "endless.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    fields = tiny.fields(model={"chat_template": str(template)})
    status, found = examined(finetune, write_recipe(tmp_path / "r.json", fields))
    assert status == 1
    last = list(found.values())[-1]
    assert last["passed"] is False
    assert "could not learn to stop" in last["why"]


def test_the_machine_is_described_for_a_bug_report(finetune):
    done = finetune("doctor").passed()
    assert f"torch {torch.__version__}" in done.stdout
    for title in ("versions", "devices", "works here", "missing"):
        assert f"{title}\n" in done.stdout
    (listed,) = (line for line in done.stdout.splitlines() if line.startswith("  backends: "))
    named = listed.removeprefix("  backends: ").split(", ")
    assert named == sorted(named)
    assert {"single", "ddp", "fsdp_full_shard", "zero3", "tp", "pp"} <= set(named)


def test_a_word_that_names_nothing_is_refused(finetune, tmp_path):
    for word, told in (
        ("qwen3_0_6b_lorra", "did you mean 'qwen3_0_6b_lora'"),
        (tmp_path, "the folder has no config.json"),
    ):
        assert told in finetune("doctor", word).refused()


def shrunk(kind: str) -> dict[str, Any]:
    fields = shrink(AutoConfig.for_model(kind).to_dict(), 300, 128)
    return fields | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    "kind",
    [
        "llama", "gpt2", "gptj", "opt", "bloom", "mamba", "mamba2", "jamba", "deepseek_v3",
        "qwen3_next", "qwen3_5", "gemma3", "gemma4", "gpt_oss", "llama4_text", "nemotron_h", "lfm2",
        "glm4_moe", "minimax", "whisper", "gemma3n_text", "recurrent_gemma",
    ],
)  # fmt: skip
def test_an_architecture_shrinks_to_two_layers_of_its_own(kind):
    small = AutoConfig.for_model(**shrunk(kind))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    assert small.model_type == kind
    layers = max(len(each) for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    assert layers <= 4  # of layers, or of experts


def test_a_pattern_of_layers_shrinks_to_one_of_each_kind():
    """Otherwise no layer would have the attention without which the model cannot answer."""
    config = AutoConfig.for_model("recurrent_gemma").to_dict()
    assert config["block_types"] == ["recurrent", "recurrent", "attention"]
    small = AutoConfig.for_model(**shrunk("recurrent_gemma"))
    assert small.layers_block_type == ["linear_attention", "sliding_attention"]


def test_scales_of_a_random_model_are_not_zero():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shrunk("gemma3n_text")))
    scale = model.model.layers[0].altup.correct_output_scale
    assert not scale.any()
    fill_zeros(model)
    assert scale.all()


@pytest.mark.parametrize("kind", ["gpt_neo", "mpt", "gpt2", "gemma3"])
def test_the_shrunk_model_is_described_whatever_its_config_calls_a_layer(kind, tmp_path):
    AutoConfig.for_model(**shrunk(kind)).save_pretrained(tmp_path)
    assert described(str(tmp_path)) == f"{kind}, 2 layers of width 64, random weights, fp32"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "words"), [
    ("qwen2_5_vl", ()), ("smolvlm", ()), ("qwen3_vl", ("batch.packing=true",)),
])  # fmt: skip
def test_a_model_that_reads_images_is_examined_with_none_one_and_three(
    assets, tmp_path, finetune, kind, words
):
    base = pictured.base(assets, kind, tmp_path)
    status, found = examined(finetune, base, "model.reads=[image]", "batch.max_length=4096", *words)
    assert status == 0, found
    counts = found["images"]["why"].removeprefix("documents with ").split(" images")[0]
    assert {"0", "1", "3"} == set(counts.split(", "))
    asked = ("loss", "gradients", "documents side by side", "saved, reloaded, merged")
    assert [found[name]["passed"] for name in asked] == [True] * 4, found
