"""Folders whose weights are quantised already are trained right, or refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import problems_of
from safetensors.torch import load_file, save_file
from tiny_run import (
    ROUNDING,
    SIZES,
    byte_tokenizer,
    logits,
    plain_model,
    relative,
    save_base,
    save_checkpoint,
    start_run,
    tiny_experts,
    tiny_llama,
    trained_adapter,
)
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
)

import finetune as ft
from finetune import FinetuneError, LoRA, Options, Recipe, export, load
from finetune.checkpoints.base_weights import codes_in
from finetune.checks.files import missing_files
from finetune.inference.load import base_model
from finetune.models.load_checks import unread
from finetune.models.quantization import keep_unpacked
from finetune.models.starting_adapter import complete_adapter
from finetune.planner import plan

BITSANDBYTES = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}


def recipe(folder: Path, quantization: str = "none") -> Recipe:
    made = ft.SFT(ft.Model(str(folder), quantization=quantization))
    return made.with_data(ft.Data("rows.jsonl", "messages")).with_lora(r=4)


def config_only(folder: Path, **stored: Any) -> Path:
    folder.mkdir()
    fields = {"model_type": "llama", "quantization_config": stored}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


FROM = "use the model that it was made from"
REFUSED = {
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "none", "nf4 (NF4 of bitsandbytes), and model.quantization is 'none'; set "
            f"model.quantization=nf4 and an adapter, or {FROM}"),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "nf4",
             "int8 (LLM.int8 of bitsandbytes), and model.quantization is 'nf4'; set "
             f"model.quantization=int8 and an adapter, or {FROM}"),
    "fp4": ({"quant_method": "bitsandbytes", "_load_in_4bit": True}, "nf4",
            f"fp4, which cannot be trained here; {FROM}"),
    "fp8": ({"quant_method": "fp8"}, "nf4",
            "fp8, and model.quantization=nf4 would quantize them again; set "
            f"model.quantization=none, which dequantizes them, or {FROM}"),
    "gptq": ({"quant_method": "gptq", "bits": 4}, "none",
             f"gptq, which cannot be trained here; {FROM}"),
    "awq": ({"quant_method": "awq", "bits": 4}, "none",
            f"awq, which cannot be trained here; {FROM}"),
    "compressed-tensors": ({"quant_method": "compressed-tensors"}, "none",
                           f"compressed-tensors, which cannot be trained here; {FROM}"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_plan_names_how_the_weights_are_stored_and_what_to_do(tmp_path, kind):
    stored, asked, told = REFUSED[kind]
    folder = config_only(tmp_path / "model", **stored)
    whole = f"model.name: the weights of '{folder}' are stored in {told}"
    assert problems_of(plan, recipe(folder, asked), "single", 1) == (whole,)


def test_fsdp_refuses_bits_packed_in_integers(tmp_path):
    stored, _, _ = REFUSED["nf4"]
    packed = recipe(config_only(tmp_path / "model", **stored), "nf4")
    plan(packed, "ddp", 2)
    with pytest.raises(FinetuneError, match="packed in uint8, and fsdp_full_shard shards"):
        plan(packed, "fsdp_full_shard", 2)
    floats = config_only(tmp_path / "floats", **stored, bnb_4bit_quant_storage="bfloat16")
    plan(recipe(floats, "nf4"), "fsdp_full_shard", 2)


CODES = {
    "I8": lambda weight: (weight * 100).round().to(torch.int8),
    "F8_E4M3": lambda weight: weight.to(torch.float8_e4m3fn),
    "U8": lambda weight: torch.zeros(len(weight), weight.shape[1] // 2, dtype=torch.uint8),
    "I32": lambda weight: torch.zeros(len(weight), weight.shape[1] // 8, dtype=torch.int32),
}
"""Codes of a weight by their name in a header: two and eight in one integer are four bits each."""


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("shard", ["5GB", "100KB"])
def test_codes_that_config_json_does_not_mention_are_refused(tmp_path, dtype, shard):
    """transformers reads the codes as weights, without their scales and without a warning."""
    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder, max_shard_size=shard)
    byte_tokenizer().save_pretrained(folder)
    files = sorted(folder.glob("*.safetensors"))
    assert (len(files) > 1) == (shard == "100KB")
    for path in files:
        stored = load_file(path)
        coded = {name: CODES[dtype](each) for name, each in stored.items() if "down_proj" in name}
        save_file(stored | coded, path, metadata={"format": "pt"})
    wanted = (
        f"model.name: {folder}: the tensor model.layers.0.mlp.down_proj.weight is stored as "
        f"{dtype} (and 1 more like it), and config.json has no quantization_config, so that its "
        "codes would be read as weights; use the model that it was made from, or copy the "
        "config.json that was saved with these files"
    )
    assert wanted in missing_files(recipe(folder))
    assert problems_of(base_model, recipe(folder)) == (wanted,)


def test_integers_that_are_not_weights_are_read(tmp_path):
    """Files of older libraries hold masks and positions, which are not quantized weights."""
    tensors = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "transformer.h.0.attn.masked_bias": torch.tensor(-128, dtype=torch.int8),
        "model.embeddings.position_ids": torch.arange(8)[None],
        "model.embeddings.token_type_ids": torch.zeros(1, 8, dtype=torch.int64),
        "model.layers.0.ffn.gate.tid2eid": torch.zeros(8, 2, dtype=torch.int32),
        "model.norm.num_batches_tracked": torch.tensor(3),
        "model.layers.0.mlp.down_proj.weight": torch.ones(4, 4, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert codes_in([tmp_path / "model.safetensors"]) is None


def test_an_adapter_in_codes_is_refused(tmp_path):
    base = save_base(tiny_llama(), tmp_path / "base")
    trained_adapter(tiny_llama()).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: each.to(torch.float8_e4m3fn) for name, each in load_file(path).items()}, path)
    asked = dataclasses.replace(recipe(base), adapter=None)
    model = dataclasses.replace(asked.model, adapter=str(tmp_path / "adapter"))
    with pytest.raises(FinetuneError, match=r"is stored as F8_E4M3 \(and 27 more like it\), whose"):
        complete_adapter(dataclasses.replace(asked, model=model))


def quantised_base(tmp: Path, kind: str) -> tuple[Path, Path, PreTrainedModel]:
    """A plain folder, one quantised by bitsandbytes, and the model that was saved there."""
    plain = save_base(tiny_llama(), tmp / "plain")
    quantised = plain_model(plain, quantization_config=BITSANDBYTES[kind])
    keep_unpacked(quantised)  # repacked weights of these sizes cannot be multiplied
    quantised.save_pretrained(tmp / kind)
    byte_tokenizer().save_pretrained(tmp / kind)
    return plain, tmp / kind, quantised


@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_a_bitsandbytes_folder_is_read_trained_on_and_merged(tmp_path, kind):
    plain, folder, quantised = quantised_base(tmp_path, kind)
    run = start_run(tmp_path / "run", folder, LoRA(r=4), quantization=kind)
    assert relative(logits(base_model(recipe(folder, kind), torch.float32)),
                    logits(quantised)) == 0  # fmt: skip
    save_checkpoint(run, 10, trained_adapter(tiny_llama()))
    answering = logits(load(run, dtype=torch.float32).model)
    merged = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "merged", merge=True))
    assert getattr(merged.config, "quantization_config", None) is None
    card = (tmp_path / "merged" / "README.md").read_text()
    assert f"The files of the base are quantized ({kind}); the adapter is merged into its" in card
    if kind == "nf4":
        assert relative(logits(merged), answering) < ROUNDING
    else:  # LLM.int8 also rounds what a layer is given; the dequantised weights multiply it as is
        assert relative(logits(merged), answering) < 0.1
        weight = load_file(plain / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
        dequantised = base_model(recipe(folder, kind), torch.float32, quantized=False)
        found = dequantised.get_parameter("model.layers.0.mlp.up_proj.weight")
        half = weight.abs().amax(1, keepdim=True) / 127 / 2  # of what 8 bits tell apart in a row
        sixteen = weight.abs() * 2**-10  # bitsandbytes rounds in fp16 first
        assert ((found - weight).abs() <= half + sixteen).all()
    assert relative(logits(merged), logits(tiny_llama())) > 0.1  # the adapter is in it


def test_training_from_a_bitsandbytes_folder_begins_with_its_own_loss(tmp_path):
    _, folder, quantised = quantised_base(tmp_path, "nf4")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "completion": "bc"}) + "\n")
    made = recipe(folder, "nf4").with_data(ft.Data(str(rows), "prompt_completion"))
    made = dataclasses.replace(made.with_batch(rows=1, max_length=32), max_steps=1)
    run = ft.train(made, precision="fp32", options=Options(tmp_path / "run", plot=False))
    (first,) = run.read_metrics("train")
    ids = torch.tensor([[*byte_tokenizer()("abc")["input_ids"], 256]])
    with torch.inference_mode():
        given = quantised(input_ids=ids).logits[0, :-1]
    wanted = torch.nn.functional.cross_entropy(given, ids[0, 1:])
    assert first["loss"] == pytest.approx(float(wanted), rel=1e-5)


BLOCK = 32
E2M1 = torch.tensor([s * v for s in (1, -1) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
"""What the 16 codes of four bits stand for (OCP Microscaling Formats, version 1.0)."""


def write_fp8(plain: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Weights as Qwen3-FP8 has them, e4m3 with a scale a block; returns what they stand for."""
    stored, meant = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if "_proj" in name:
            rows, columns = (size // BLOCK for size in weight.shape)
            tiles = weight.view(rows, BLOCK, columns, BLOCK)
            scale = tiles.abs().amax((1, 3)).clamp(min=1e-8) / 448
            codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            stored[name] = codes.reshape(weight.shape)
            stored[f"{name}_scale_inv"] = scale
            meant[name] = (codes.float() * scale[:, None, :, None]).reshape(weight.shape)
    folder.mkdir()
    for path in plain.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [tiny_llama, tiny_experts])
def test_fp8_weights_are_dequantised_while_they_are_loaded(tmp_path, build, dtype):
    meant = write_fp8(save_base(build(), tmp_path / "plain"), tmp_path / "fp8")
    base_model(recipe(tmp_path / "fp8"), dtype).save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == meant.keys()
    for name, weight in meant.items():
        assert torch.equal(saved[name], weight.to(dtype)), name
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())


def test_mxfp4_experts_are_dequantised_while_they_are_loaded(tmp_path):
    """gpt-oss as it is published: two codes a byte, and an exponent for each 32 of them."""
    torch.manual_seed(1)
    fields = {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
    sizes = SIZES | {"intermediate_size": 64}
    save_base(GptOssForCausalLM(GptOssConfig(**sizes, **fields)), tmp_path)
    stored, meant = {}, {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = weight.shape
            del stored[name]
            blocks = torch.randint(256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 126, (experts, outer, inner // 32), dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
            values = E2M1[codes] * torch.exp2(scales.float() - 127)[..., None]
            meant[name] = values.flatten(-2).transpose(1, 2)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = base_model(recipe(tmp_path), torch.float32).state_dict()
    assert loaded.keys() == meant.keys()
    assert all(torch.equal(loaded[name], meant[name]) for name in meant)


def test_what_was_trained_from_fp8_is_exported_as_plain_weights(tmp_path):
    meant = write_fp8(save_base(tiny_llama(), tmp_path / "plain"), tmp_path / "fp8")
    run = start_run(tmp_path / "run", tmp_path / "fp8", LoRA(r=4))
    base = tiny_llama()
    base.load_state_dict(meant)
    model = trained_adapter(base)
    save_checkpoint(run, 10, model)
    merged = export(run, tmp_path / "merged", merge=True)
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    assert relative(logits(plain_model(merged)), logits(model)) < ROUNDING


def test_tensors_that_no_module_takes_are_errors_or_notes_by_what_they_belong_to():
    unexpected = {
        "model.layers.0.self_attn.q_proj.bias",  # config.json says: no bias
        "model.layers.2.mlp.up_proj.weight",  # config.json says: two layers
        "model.layers.0.mlp.up_proj.qweight",
        *("model.vision_tower.patch.weight", "model.vision_tower.patch.bias", "mtp.norm.weight"),
    }
    wrong, notes = unread({"unexpected_keys": unexpected}, tiny_llama())
    none = "no module takes the tensor model.layers"
    assert wrong == [
        f"{none}.0.mlp.up_proj.qweight: the weights are quantised",
        f"{none}.0.self_attn.q_proj.bias",
        f"{none}.2.mlp.up_proj.weight",
    ]
    assert notes == [
        "model.name: 2 tensors of model.vision_tower are not used",
        "model.name: 1 tensors of mtp.norm are not used",
    ]


def test_a_config_with_fewer_layers_than_the_files_is_refused(tmp_path):
    folder = save_base(tiny_llama(), tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(FinetuneError, match=r"no module takes the tensor model\.layers\.1\."):
        base_model(recipe(folder))
