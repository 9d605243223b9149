"""A model trains what a gradient reaches, sees no later token, and has weights that are numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FP32, Tiny, Train, once, problems_of, write_recipe
from families import SIZES, adapt, build
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from finetune.errors import FinetuneError
from finetune.models.gradients import excluded, grouped
from finetune.models.reachable import unreached
from finetune.models.soundness import (
    Causality,
    causality,
    cross_attention,
    hold_in_fp32,
    not_finite,
)
from finetune.runs.run import Run

SIGHT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "text_config": {**SIZES, "head_dim": 16}, "vision_config": SIGHT, "mm_tokens_per_image": 4,
    "image_token_index": 319, "boi_token_index": 318, "eoi_token_index": 317,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4,
    "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts_per_tok": 2,
    "mamba_d_state": 8,
}  # fmt: skip
STREAMS: dict[str, Any] = {
    "head_dim": 16, "hidden_size_per_layer_input": 16, "laurel_rank": 8, "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": SIZES["vocab_size"],
}  # fmt: skip
WITHOUT_END = {name: value for name, value in SIZES.items() if name != "max_position_embeddings"}
KINDS: dict[str, dict[str, Any]] = {
    "gemma3": IMAGES, "gemma3n_text": SIZES | STREAMS, "jamba": SIZES | HYBRID,
    "xlnet": WITHOUT_END | {"d_head": 16}, "rwkv": WITHOUT_END,
}  # fmt: skip


def model_of(kind: str, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    given = fields or KINDS.get(kind, SIZES)
    config = AutoConfig.for_model(kind, **given)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def without_gradient(model: nn.Module) -> set[str]:
    """What plain PyTorch gives no gradient to, in rows that are long and many."""
    ids = torch.randint(3, 300, (4, 40), generator=torch.Generator().manual_seed(1))
    model.train()(input_ids=ids, use_cache=False).logits.square().sum().backward()
    return {n for n, p in model.named_parameters() if p.requires_grad and p.grad is None}


def saved(model: PreTrainedModel, folder: Path, tiny: Tiny) -> dict[str, Any]:
    """A folder of a model with the tests' tokenizer, as the section of a recipe."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.model).save_pretrained(folder)
    return {"name": str(folder)}


@pytest.mark.parametrize(
    "kind", ["llama", "gemma3", "gemma3n_text", "jamba", "mixtral", "mamba", "xlnet"]
)
@pytest.mark.parametrize("adapted", [True, False])
def test_what_no_gradient_reaches_is_found_without_numbers(kind: str, adapted: bool) -> None:
    """On `meta` tensors the same as in a backward pass, with nothing changed by it."""
    model = model_of(kind)
    trained = adapt(model) if adapted and kind not in ("xlnet", "mamba") else model
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    implementation = model.config._attn_implementation
    found = unreached(trained)
    assert all(torch.equal(before[name], tensor) for name, tensor in trained.state_dict().items())
    assert all(parameter.grad is None for parameter in trained.parameters())
    assert model.config._attn_implementation == implementation
    assert set(found) == without_gradient(trained)
    past_adapters = ("gemma3n_text", "jamba")  # they read a weight, and not its adapter's output
    assert bool(found) == (kind in ("gemma3", "xlnet", *(past_adapters if adapted else ())))


@pytest.mark.parametrize("zero_experts", [0, 500])
def test_experts_that_no_token_chose_are_not_left_out(zero_experts: int) -> None:
    """Nearly all tokens choose experts without weights; a choice needs real values to be made."""
    fields = {
        "num_layers": 1, "num_hidden_layers": 2, "ffn_hidden_size": 96, "n_routed_experts": 2,
        "expert_ffn_hidden_size": 24, "zero_expert_num": zero_experts, "moe_topk": 2,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 8, "qk_head_dim": 16,
    }  # fmt: skip
    model = model_of("longcat_flash", **SIZES | fields)
    assert unreached(model) == []
    parts = ["experts.gate_up_proj", "experts.down_proj"]
    assert unreached(adapt(model, target_modules=["o_proj"], target_parameters=parts)) == []


@pytest.mark.parametrize("fails", [False, True])
def test_weights_with_adapters_stay_parameters(fails, monkeypatch):
    """PEFT registers an adapted tensor anew after each forward pass, also after one that fails."""
    model = adapt(build("llama"), target_modules=[], target_parameters=["q_proj.weight"])
    before = [name for name, _ in model.named_parameters()]
    if fails:
        monkeypatch.setattr(model.base_model.model.model.norm, "forward", torch.bincount)
    unreached(model)
    assert [name for name, _ in model.named_parameters()] == before
    assert sum(".q_proj.base_layer.weight" in name for name in before) == 2


def test_an_expert_without_a_token_is_not_left_out() -> None:
    """Experts that are modules of their own; the second kind is never called."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shares, chosen = self.gate(x).softmax(-1).max(-1)
            result = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                where = torch.where(chosen == number)
                if len(where[0]) and number < 2:
                    result[where] = expert(x[where]) * shares[where][:, None]
            return result

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(320, 8)
            self.mlp, self.unused = Layer(), Layer()

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> tuple[torch.Tensor]:
            return (self.mlp(self.embed(input_ids)) @ self.embed.weight.T,)

    found = unreached(Model())
    assert ({name.split(".")[0] for name in found}, len(found)) == ({"unused"}, 10)


@pytest.mark.parametrize("given", ["", ("gate_proj",), r".*\.gate_proj"])
def test_the_pattern_that_leaves_adapters_out_keeps_those_that_are_reached(given: Any) -> None:
    model = adapt(model_of("gemma3"))
    names = unreached(model)
    pattern = excluded(names, model, given)
    narrower = adapt(model.unload(), exclude_modules=pattern)
    left = {name for name, p in narrower.named_parameters() if p.requires_grad}
    text = {name for name in left if "language_model" in name}
    assert (left, len(text)) == (text, 2 * 2 * (7 if not given else 6))


def test_a_pattern_with_numbers_is_used_only_where_every_layer_is_left_out() -> None:
    model = adapt(build("llama"))
    names = [name for name, _ in model.named_parameters() if "lora" in name]
    one = [name for name in names if "layers.1.mlp.up_proj" in name]
    assert excluded(one, model, ()) == r"(?:model\.layers\.1\.mlp\.up_proj(?:\..*)?)"
    both = [name for name in names if "mlp.up_proj" in name]
    assert excluded(both, model, ()) == r"(?:model\.layers\.\d+\.mlp\.up_proj(?:\..*)?)"


def test_names_are_grouped_by_layer() -> None:
    assert grouped([f"layers.{n}.up" for n in range(9)] + ["head"]) == "layers.N.up (9), head"


def test_an_adapter_that_is_read_past_is_left_out_of_run_and_result(tiny, tmp_path, train, capsys):
    """Jamba multiplies with the weight of `dt_proj` itself: counted, saved and configured so."""
    model = saved(model_of("jamba"), tmp_path / "jamba", tiny)
    run = train(model=model, adapter={"r": 4}, max_steps=1)
    told = " ".join(capsys.readouterr().out.split())
    assert "no gradient of a text reaches it: model.layers.N.mamba.dt_proj (2): 2 adapters" in told
    tensors = load_file(run.final / "adapter_model.safetensors")
    assert not any("dt_proj" in name for name in tensors)
    assert all(tensor.any() for tensor in tensors.values())
    again = PeftModel.from_pretrained(model_of("jamba"), str(run.final))
    assert {n for n, _ in again.named_parameters() if "lora" in n} == {
        name.replace(".weight", ".default.weight") for name in tensors
    }
    settled = json.loads(run.realised.read_text())
    assert settled["trainable_parameters"] == sum(tensor.numel() for tensor in tensors.values())


@pytest.fixture(scope="session")
def images(tiny, shared) -> dict[str, Any]:
    """A model for images and texts."""
    folder = once(shared / "soundness/gemma3", lambda place: saved(model_of("gemma3"), place, tiny))
    return {"name": str(folder)}


def test_what_a_recipe_names_and_no_gradient_reaches_is_refused(images, tmp_path, train):
    adapter = {"r": 4, "targets": ["q_proj", "fc1"], "modules_to_save": ["multi_modal_projector"]}
    saves, targets = problems_of(train, model=images, adapter=adapter)
    assert saves.startswith("adapter.modules_to_save: no gradient of a text reaches 'multi_modal_")
    assert targets.startswith("adapter.targets: no gradient reaches an adapter on 'fc1' (model.vis")
    assert not (tmp_path / "run" / "recipe.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "adapter", "precision", "tolerance"),
    [
        ("ddp", {"r": 4}, "fp32", FP32),
        # Its width is in the text config, where Accelerate does not look for it.
        ("zero3", {"r": 4}, "fp32", FP32),
        # Units that no forward pass enters, with gradients that wait in another type than weights.
        ("fsdp_full_shard", {"r": 4}, "bf16", 2e-2),
    ],
)
def test_several_processes_train_the_text_part_of_a_model_for_images_as_one_does(
    tiny, images, tmp_path, train, finetune, backend, adapter, precision, tolerance
):
    sections: dict[str, Any] = {"model": images, "adapter": adapter, "max_steps": 2}
    recipe = write_recipe(tmp_path / "recipe.json", tiny.fields(**sections))
    done = finetune(
        "launch", recipe, "--backend", backend, "--processes", "2", "--precision", precision,
        "--output", tmp_path / "several",
    ).passed()  # fmt: skip
    assert "model.vision_tower" in done.stdout
    one, several = (
        [step["loss"] for step in run.read_metrics("train")]
        for run in (train(**sections), Run(tmp_path / "several"))
    )
    assert len(one) == 2
    assert several == pytest.approx(one, rel=0, abs=tolerance)


BIDIRECTIONAL = ("bert", "roberta", "xlm", "electra", "xlnet")
CAUSAL = ("llama", "gemma2", "mixtral", "mamba", "gpt2", "opt", "bloom", "rwkv", "jamba")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in (*BIDIRECTIONAL, *CAUSAL)),
        *((kind, torch.bfloat16) for kind in ("bert", "llama")),
    ],
)
def test_a_model_that_sees_later_tokens_is_found(kind: str, dtype: torch.dtype) -> None:
    model = model_of(kind).to(dtype)
    assert (causality(model, 320, dtype=dtype).leak > 0) == (kind in BIDIRECTIONAL)


def test_a_decoder_with_windows_and_one_made_causal_are_accepted() -> None:
    for model in (build("gemma2", sliding_window=4), model_of("bert", **SIZES, is_decoder=True)):
        assert cross_attention(model) is None
        assert causality(model, 320) == Causality(finite=True, leak=0.0)


@pytest.mark.parametrize("kind", ["whisper", "bart", "trocr", "prophetnet"])
def test_the_decoder_of_an_encoder_decoder_is_found(kind: str) -> None:
    with torch.device("meta"):
        problem = cross_attention(model_of(kind, vocab_size=320, pad_token_id=0))
    assert problem.startswith("it is the decoder of an encoder-decoder: every block has cross att")


def test_models_of_other_kinds_are_refused_before_training(tiny, train):
    instead = "name a decoder-only language model (Llama, Qwen, Mistral, Gemma, ...)"
    told: dict[str, str] = {}
    for kind in ("bert", "whisper", "t5"):
        fields = {"model_type": kind, **SIZES}
        fields |= {"max_position_embeddings": 256} if kind == "bert" else {}
        fields |= {"decoder_attention_heads": 4} if kind == "whisper" else {}
        model = {"name": None, "config": fields, "tokenizer": str(tiny.model)}
        with pytest.raises(FinetuneError) as caught:
            train(model=model)
        told[kind] = str(caught.value)
        # The attention of a BERT is measured; the others are known by their types.
        decoder = "use a decoder such as Qwen3, Llama or Gemma"
        assert told[kind].endswith(instead if kind == "bert" else decoder)
        assert "\n" not in told[kind]
    assert told["bert"].startswith("model: 'bert' cannot be trained here: its attention is not ca")
    for kind in ("whisper", "t5"):
        assert told[kind].startswith(f"model.config: {kind} is an encoder-decoder model, ")


def test_what_transformers_cannot_build_is_refused_while_loading(tiny, train):
    model = {"name": None, "config": {"model_type": "vit"}, "tokenizer": str(tiny.model)}
    (problem,) = problems_of(train, model=model)
    assert problem.startswith("model.config: Unrecognized configuration class")
    assert problem.endswith("name a decoder-only language model (Llama, Qwen, Mistral, Gemma, ...)")


def test_nonfinite_weights_are_blamed_on_the_base(tiny, tmp_path, train):
    name = "model.layers.1.mlp.up_proj.weight"
    model = saved(build("llama"), tmp_path / "base", tiny)
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors[name][3, 5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    assert problems_of(train, model=model, adapter={"r": 4}) == (
        f"model.name: 1 tensor of '{tmp_path / 'base'}' contains NaN or infinity: {name}; name a "
        "folder whose weights are intact",
    )


def test_a_nan_row_of_the_embedding_is_blamed_when_it_is_read(tiny, tmp_path, train):
    """The check before the first step draws tokens of its own."""
    base = AutoModelForCausalLM.from_pretrained(tiny.model)
    with torch.no_grad():
        base.model.embed_tokens.weight[2] = float("inf")  # the end of each turn
    model = saved(base, tmp_path / "base", tiny)
    with pytest.raises(FinetuneError, match=r"inf.*: model\.embed_tokens\.weight; name a folder"):
        train(model=model, adapter={"r": 4})


def test_a_quantized_nan_weight_is_still_detected() -> None:
    from bitsandbytes.nn import Linear4bit, Params4bit

    weight = torch.randn(64, 64)
    weight[0, 0] = float("nan")
    layer = Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    layer.weight = Params4bit(weight, requires_grad=False, quant_type="nf4")
    assert not_finite(nn.ModuleDict({"up": layer.to("cpu")})) == ["up.weight"]


def test_masks_of_infinities_are_finite_enough() -> None:
    model = build("llama")
    model.register_buffer("mask", torch.full((4,), -torch.inf))
    assert not_finite(model) == []
    assert causality(model, 320).finite


def test_all_that_is_trained_is_held_in_fp32() -> None:
    model = adapt(build("qwen3", torch.bfloat16), modules_to_save=["embed_tokens", "lm_head"])
    hold_in_fp32(model)
    kinds = {(p.requires_grad, p.dtype) for p in model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    assert model.get_input_embeddings()(torch.tensor([3])).dtype == torch.bfloat16


def test_a_fully_trained_module_moves_in_bf16(tiny, train):
    """An update of 1e-5 is rounded away in bf16, where weights are 0.02."""
    run = train(
        adapter={"r": 4, "modules_to_save": ["lm_head"]}, max_steps=2, precision="bf16",
        optim={"lr": 1e-5, "warmup": 0, "schedule": "constant", "weight_decay": 0.0},
    )  # fmt: skip
    head = load_file(run.final / "adapter_model.safetensors")["base_model.model.lm_head.weight"]
    base = load_file(tiny.model / "model.safetensors")["lm_head.weight"].bfloat16().float()
    assert head.dtype == torch.float32
    moved = (head - base).abs()
    assert float((moved > 0).float().mean()) > 0.99
    # Two steps of AdamW at 1e-5 with gradients of one sign.
    assert 0.5e-5 < float(moved.mean()) <= 2.1e-5


@pytest.mark.skipif(is_flash_attn_2_available(), reason="FlashAttention 2 is installed")
def test_attention_that_is_not_installed_is_refused_with_another(train: Train) -> None:
    (problem,) = problems_of(train, model={"attention": "flash_attention_2"})
    assert problem.startswith("model.name: ")
    assert problem.endswith("or set model.attention=sdpa, which computes the same")
