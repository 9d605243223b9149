"""What is exported is what was trained, and plain transformers and PEFT load it."""

import fcntl
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import slow_but
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_run import (
    ROUNDING,
    Trained,
    byte_tokenizer,
    disturb,
    logits,
    lora_run,
    plain_model,
    relative,
    save_base,
    save_checkpoint,
    sign,
    start_run,
    tiny_llama,
    tiny_tied_qwen,
    trained_adapter,
)
from transformers import AutoTokenizer, GenerationConfig

from finetune import FinetuneError, LoRA, Run, TrainingFailure, export, load
from finetune.data.chat.render import load_chat
from finetune.data.formats import read_row

VARIANTS = {
    "lora": {},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "pissa with rslora and ranks": {
        **{"init_lora_weights": "pissa", "use_rslora": True},
        **{"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    },
    "dora with olora": {"init_lora_weights": "olora", "use_dora": True},
    "whole modules": {"modules_to_save": ["lm_head", "norm"]},
}
EVERYDAY = ("lora", "dora with olora", "pissa with rslora and ranks", "whole modules")


def plain_adapter(base: Path, folder: Path) -> torch.nn.Module:
    return PeftModel.from_pretrained(plain_model(base), str(folder)).eval()


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return lora_run(tmp_path)


@pytest.mark.parametrize("variant", slow_but(EVERYDAY, VARIANTS))
def test_a_run_its_adapter_in_plain_peft_and_its_merge_give_the_logits_of_training(
    tmp_path, variant
):
    trained = lora_run(tmp_path, **VARIANTS[variant])
    adapter = export(trained.run, tmp_path / "adapter")
    merged = export(trained.run, tmp_path / "merged", merge=True)
    loaded = load(trained.run).model
    for model in (loaded, plain_adapter(trained.base, adapter), plain_model(merged)):
        assert relative(logits(model), trained.logits) < ROUNDING


TIED = {
    "attention only": ({"target_modules": ["q_proj"]}, True),
    "adapter on the head": ({"target_modules": ["q_proj", "lm_head"]}, False),
    "adapter on the embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, False),
    "embedding trained whole": ({"modules_to_save": ["embed_tokens"]}, False),
    "head trained whole": ({"modules_to_save": ["lm_head"]}, False),
    "both trained whole": ({"modules_to_save": ["embed_tokens", "lm_head"]}, False),
    "both trained as one": (
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        True,
    ),
}


@pytest.mark.parametrize(
    "trains", slow_but(("embedding trained whole", "both trained as one"), TIED)
)
def test_exports_of_a_tied_model_keep_embedding_and_head_as_trained(tmp_path, trains):
    fields, stays = TIED[trains]
    trained = lora_run(tmp_path, tiny_tied_qwen(), **fields)
    adapter = export(trained.run, tmp_path / "adapter")
    assert relative(logits(plain_adapter(trained.base, adapter)), trained.logits) < ROUNDING
    folder = export(trained.run, tmp_path / "out", merge=True)
    model = plain_model(folder)
    assert relative(logits(model), trained.logits) < ROUNDING
    assert model.config.tie_word_embeddings is stays
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not stays


@pytest.mark.parametrize("base", [tiny_llama, tiny_tied_qwen])
def test_a_whole_model_is_exported_bit_for_bit_in_shards(tmp_path, base):
    model = base()
    run = start_run(tmp_path / "run", save_base(model, tmp_path / "base"))
    disturb(model)
    save_checkpoint(run, 10, model)
    folder = export(run, tmp_path / "out", shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert torch.equal(logits(plain_model(folder)), logits(model))


@pytest.mark.parametrize("merge", [False, True])
def test_an_export_has_the_settings_of_its_base_and_run_and_its_readme_runs(
    trained, tmp_path, merge, monkeypatch
):
    path = trained.base / "generation_config.json"
    shipped = {"temperature": 0.6, "top_p": 0.9}  # without do_sample, as some models ship them
    path.write_text(json.dumps({**json.loads(path.read_text()), **shipped}))
    folder = export(trained.run, tmp_path / "out", merge)
    saved = AutoTokenizer.from_pretrained(trained.run.checkpoint(10) / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == saved.chat_template
    generation = GenerationConfig.from_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids(["<|end|>", "<|im_end|>"])  # and that of the turn
    assert (generation.eos_token_id, generation.pad_token_id) == (ends, 257)
    kept = (generation.do_sample, generation.temperature, generation.top_p)
    assert kept == (True, 0.6, 0.9)
    (path,) = folder.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    assert len(shapes) > 20
    assert all(0 not in shape for shape in shapes)
    if not merge:
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(trained.base)
        assert config["inference_mode"] is True
    monkeypatch.chdir(folder)
    _, code, *_ = Path("README.md").read_text().split("```")
    names: dict[str, Any] = {}
    exec(code.removeprefix("python"), names)
    assert relative(logits(names["model"].eval()), trained.logits) < ROUNDING
    assert names["tokenizer"].chat_template == byte_tokenizer().chat_template


def test_a_random_initialisation_without_its_stored_initial_adapter_is_refused(tmp_path):
    base = tiny_llama()
    run = start_run(tmp_path / "run", save_base(base, tmp_path / "base"), LoRA(r=4))
    model = trained_adapter(base, init_lora_weights="pissa_niter_1")
    save_checkpoint(run, 10, model)
    with pytest.raises(FinetuneError, match="cannot be recomputed"):
        export(run, tmp_path / "out")
    with pytest.raises(FinetuneError, match="cannot be recomputed"):
        load(run)


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"adapter": {"r": 4, "init_lora_weights": "pissa_niter_2"}}, id="random"),
        pytest.param({"model": {"quantization": "nf4"}, "adapter": {"r": 4}}, id="nf4"),
        pytest.param(
            {"adapter": {"r": 4, "modules_to_save": ["embed_tokens"]}},
            id="whole embedding",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_was_trained_has_its_recorded_loss_wherever_it_is_loaded(
    tiny, train, tmp_path, sections
):
    run = train(**sections, optim={"lr": 1e-2}, max_steps=4, evaluation={"every": 4})
    (recorded,) = (record["loss"] for record in run.read_metrics("eval"))
    places = [load(run).model]
    if "model" not in sections:  # NF4 is merged onto another base: the unquantised one
        places.append(plain_model(export(run, tmp_path / "merged", merge=True)))
        places.append(plain_adapter(tiny.model, export(run, tmp_path / "plain")))
    for model in places:
        assert evaluation_loss(model, tiny.eval_data, run) == pytest.approx(recorded, rel=1e-5)


def evaluation_loss(model: torch.nn.Module, data: Path, run: Run) -> float:
    """Mean loss of the assistant's tokens, one row at a time, in plain PyTorch."""
    chat = load_chat(AutoTokenizer.from_pretrained(run.checkpoint(4) / "tokenizer"), None)
    total, count = 0.0, 0
    for line in data.read_text().splitlines():
        row = chat.render(read_row("messages", json.loads(line)), "assistant")
        ids = torch.tensor([row.ids])
        kept = torch.tensor(row.trained)[1:]
        with torch.inference_mode():
            predicted = model(input_ids=ids).logits[0, :-1].float()[kept]
        total += torch.nn.functional.cross_entropy(predicted, ids[0, 1:][kept], reduction="sum")
        count += int(kept.sum())
    return float(total) / count


NAME = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"


def rewrite(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a checkpoint and sign it again."""
    (path,) = checkpoint.glob("*/*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    sign(checkpoint, 10)


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_with_empty_or_without_its_tensors_is_refused_by_name(trained, tmp_path, merge):
    for change, told in (
        (lambda tensors: tensors.update({NAME: torch.empty(0)}), NAME),
        (lambda tensors: tensors.pop(NAME), f"{NAME} is missing"),
    ):
        rewrite(trained.run.checkpoint(10), change)
        with pytest.raises(FinetuneError, match=told):
            export(trained.run, tmp_path / "out", merge)
    rewrite(trained.run.checkpoint(10), dict.clear)
    with pytest.raises(FinetuneError) as caught:
        export(trained.run, tmp_path / "out", merge)
    assert len(caught.value.problems) == 2 * 7 * 2  # A and B of 7 linear modules in 2 layers
    assert not (tmp_path / "out").exists()


def test_a_whole_model_that_lacks_a_tensor_is_refused(tmp_path):
    model = tiny_llama()
    run = start_run(tmp_path / "run", save_base(model, tmp_path / "base"))
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(save_checkpoint(run, 10, model), lambda tensors: tensors.pop(name))
    with pytest.raises(FinetuneError, match=f"{name} is missing"):
        export(run, tmp_path / "out")


def test_a_damaged_file_is_named_with_the_checkpoint_to_use_instead(trained, tmp_path):
    for step in (20, 30):
        save_checkpoint(trained.run, step, trained_adapter(tiny_llama()))
        path = trained.run.checkpoint(step) / "adapter" / "adapter_model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(FinetuneError) as caught:
        export(trained.run, tmp_path / "out")
    assert caught.value.problems == (
        f"{path}: damaged, its sha256 does not match the manifest; use step 10 instead",
    )
    assert export(trained.run, tmp_path / "out", step=10) == tmp_path / "out"


def test_files_and_a_manifest_that_are_gone_or_cut_are_named(trained, tmp_path):
    checkpoint = trained.run.checkpoint(10)
    newer = save_checkpoint(trained.run, 20, trained_adapter(tiny_llama())) / "manifest.json"
    newer.write_bytes(newer.read_bytes()[:100])
    with pytest.raises(FinetuneError) as caught:
        export(trained.run, tmp_path / "out")
    (told,) = caught.value.problems
    assert told.startswith(f"{newer}: cannot be read: ")
    assert told.endswith("; use step 10 instead")
    (checkpoint / "tokenizer" / "tokenizer.json").unlink()
    weights = checkpoint / "adapter" / "adapter_model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(FinetuneError) as caught:
        export(trained.run, tmp_path / "out", step=10)
    assert sorted(caught.value.problems) == [
        f"{weights}: damaged, 1000 bytes instead of {size}; no older intact checkpoint",
        f"{checkpoint}/tokenizer/tokenizer.json: missing, though the manifest lists it; "
        "no older intact checkpoint",
    ]


def test_only_an_earlier_export_is_replaced_and_no_folder_with_other_files(trained, tmp_path):
    out = export(trained.run, tmp_path / "out")
    export(trained.run, out, merge=True)
    assert (out / "model.safetensors").exists()
    assert not (out / "adapter_config.json").exists()
    (out / "model.gguf").write_text("mine")
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    for folder, name in ((out, "model.gguf"), (other, "thesis.txt")):
        with pytest.raises(FinetuneError, match=rf"not written by an export \({name}\)"):
            export(trained.run, folder)
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "other", "out", "run"]


def test_a_shard_size_that_is_none_is_refused(trained, tmp_path):
    for size in ("x", "0", "-5GB", ""):
        with pytest.raises(FinetuneError, match=f"--shard-size: got '{size}', expected a size"):
            export(trained.run, tmp_path / "out", shard_size=size)
    assert not (tmp_path / "out").exists()


def test_what_a_killed_export_left_is_removed_by_the_next(trained, tmp_path, capsys):
    left, used = tmp_path / ".out.left.rows", tmp_path / ".out.used.rows"
    for scratch in (left, used):
        (scratch / "new").mkdir(parents=True)
        (scratch / "new/model.safetensors").write_bytes(b"weights")
    writer = os.open(used, os.O_RDONLY)
    fcntl.flock(writer, fcntl.LOCK_EX)  # as an export does that is still writing
    export(trained.run, tmp_path / "out")
    os.close(writer)
    assert capsys.readouterr().err == f"removed {left}: its writer had been killed\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [used.name, "base", "out", "run"]


def test_a_disk_that_fills_up_leaves_the_earlier_export_as_it_was(trained, tmp_path):
    out = export(trained.run, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for merge in (False, True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # bytes: less than the weights
        try:
            with pytest.raises(TrainingFailure, match=f"{out}: could not be written"):
                export(trained.run, out, merge)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "run"]
