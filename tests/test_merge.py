"""A merge a module at a time gives, bit for bit, what PEFT gives with all of the model in fp32."""

import itertools
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear
from safetensors.torch import load_file, save_file
from tiny_run import (
    disturb,
    save_base,
    save_checkpoint,
    sign,
    start_run,
    tiny_experts,
    tiny_gpt2,
    tiny_llama,
    tiny_tied_qwen,
)
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.merge import plan
from finetune import LoRA, Run, TrainingFailure, export
from finetune.exporters import low_rank
from finetune.exporters.merge import ADAPTER
from finetune.exporters.source import open_source
from finetune.kernels import cpu
from finetune.models.vocabulary import grow

LINEAR = {"target_modules": "all-linear"}
CONV1D = {"fan_in_fan_out": True}
CASES: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Any]]] = {
    "lora": (tiny_llama, LINEAR),
    "rslora and ranks": (tiny_llama, LINEAR | {
        "use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 3}}),
    "dora": (tiny_llama, LINEAR | {"use_dora": True}),
    "whole modules": (tiny_llama, LINEAR | {"modules_to_save": ["lm_head", "norm"]}),
    "bias": (tiny_gpt2, CONV1D | {"target_modules": ["c_attn"], "lora_bias": True}),
    "Conv1D": (tiny_gpt2, CONV1D | {"target_modules": ["c_attn", "c_proj"]}),
    "Conv1D with dora": (tiny_gpt2, CONV1D | {"target_modules": ["c_attn"], "use_dora": True}),
    "tied": (tiny_tied_qwen, LINEAR),
    "experts untouched": (tiny_experts, {"target_modules": ["q_proj", "o_proj"]}),
    "experts": (tiny_experts, {
        "target_modules": ["v_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "trained tokens": (
        tiny_tied_qwen, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]}),
}  # fmt: skip


def adapter_run(
    tmp: Path, base: PreTrainedModel, rows: int = 0, shards: str = "5GB", **fields: Any
) -> tuple[Run, Path]:
    """A run with a trained adapter on a base in bf16, of several files where `shards` is small."""
    base = base.to(torch.bfloat16)
    folder = save_base(base, tmp / "base")
    base.save_pretrained(folder, max_shard_size=shards)
    if shards != "5GB":
        (folder / "model.safetensors").unlink()
    run = start_run(tmp / "run", folder, LoRA(r=4))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    grow(model, rows)
    torch.manual_seed(3)
    trained = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **fields))
    disturb(trained)
    save_checkpoint(run, 10, trained)
    return run, folder


def merged_by_peft(run: Run, base: Path, rows: int = 0) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    grow(model, rows)
    wrapped: Any = PeftModel.from_pretrained(model, str(run.checkpoint(10) / "adapter"))
    return wrapped.merge_and_unload(safe_merge=True).to(torch.bfloat16).state_dict()


def same(folder: Path, wanted: dict[str, torch.Tensor]) -> bool:
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert found.keys() == wanted.keys()
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("base", "fields"), CASES.values(), ids=CASES.keys())
def test_a_merge_is_that_of_peft_in_fp32_rounded_once(tmp_path, base, fields):
    run, folder = adapter_run(tmp_path, base(), **fields)
    merged = export(run, tmp_path / "out", merge=True)
    assert same(merged, merged_by_peft(run, folder))
    if fields is LINEAR:
        exact = export(run, tmp_path / "exact", merge=True, dtype=torch.float32)
        stored, whole = (load_file(each / "model.safetensors") for each in (merged, exact))
        assert {each.dtype for each in whole.values()} == {torch.float32}
        assert all(torch.equal(stored[name], whole[name].bfloat16()) for name in whole)


def test_a_product_in_pieces_is_that_of_peft_bit_for_bit():
    for rows, columns, plain in ((2048, 1024, True), (1088, 1600, True), (70, 64, False)):
        torch.manual_seed(1)
        base = torch.nn.Linear(columns, rows, bias=False)
        stored = base.weight.data.bfloat16()
        base.weight.data = stored.float()
        layer = Linear(base, ADAPTER, config=LoraConfig(r=12, lora_alpha=7), r=12, lora_alpha=7)
        torch.nn.init.normal_(layer.lora_B[ADAPTER].weight)
        assert low_rank.is_plain(layer, ADAPTER) is plain
        if plain:
            exact = low_rank.add_product(stored, layer, ADAPTER, torch.float32)
            half = low_rank.add_product(stored, layer, ADAPTER, torch.bfloat16)
            layer.merge()
            assert torch.equal(exact, base.weight.data)
            assert torch.equal(half, base.weight.data.bfloat16())


def test_files_of_the_base_and_of_the_result_may_be_cut_anywhere(tmp_path):
    base = tiny_experts(moe_intermediate_size=48)
    run, folder = adapter_run(tmp_path, base, shards="50KB", **LINEAR)
    assert len(list(folder.glob("model-*.safetensors"))) > 5
    out = export(run, tmp_path / "out", merge=True, shard_size="80KB")
    parts = list(out.glob("model-*.safetensors"))
    assert len(parts) > 3
    assert all(path.stat().st_size < 90_000 for path in parts)
    assert same(out, merged_by_peft(run, folder))
    names = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert names == {name: path.name for path in parts for name in load_file(path)}


@pytest.mark.parametrize("fields", [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}])
def test_a_merge_has_rows_for_added_tokens(tmp_path, fields):
    rows = 263
    run, folder = adapter_run(tmp_path, tiny_llama(), rows, **LINEAR, **fields)
    out = export(run, tmp_path / "out", merge=True)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == rows
    assert same(out, merged_by_peft(run, folder, rows))


def test_a_merge_allocates_what_is_planned_and_no_more(tmp_path):
    """The largest matrix and two buffers of rows; the base and a fp32 adapter are only mapped."""
    model = tiny_llama(hidden_size=256, intermediate_size=1024)
    run, folder = adapter_run(tmp_path, model, **LINEAR)
    merge = open_source(run, None, None, "5GB").merge
    adapter = run.checkpoint(10) / "adapter" / "adapter_model.safetensors"
    planned = plan(merge.base.network, 4, torch.bfloat16)
    assert planned.adapter == sum(each.nbytes for each in load_file(adapter).values())
    assert planned.matrix == 1024 * 256 * 2 + 2 * 1024 * 256 * 4
    mapped = (folder / "model.safetensors").stat().st_size
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        for unit in merge.tensors():
            del unit
    events = [each for each in trace.profiler.kineto_results.events() if each.name() == "[memory]"]
    changes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    held = itertools.accumulate(size for size in changes if abs(size) != mapped)
    assert planned.matrix <= max(held) <= planned.matrix + 64  # and the ends that are checked


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not the malloc of glibc")
def test_freed_memory_is_returned_to_the_system():
    """A block above them keeps freed ones in the process: 128 MB until the heap is trimmed."""

    def private() -> int:
        return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

    held = [torch.ones(16_000) for _ in range(2000)]
    size, last = sum(each.nbytes for each in held), held[-1]
    before = private()
    del held
    freed = private()
    cpu.return_free_memory()
    assert last.sum() == 16_000
    assert before - freed < 0.1 * size
    assert before - private() > 0.9 * size


def test_a_merge_that_is_not_finite_is_refused_and_leaves_nothing(tmp_path):
    run, _ = adapter_run(tmp_path, tiny_llama(), **LINEAR)
    path = run.checkpoint(10) / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(each for each in tensors if each.endswith("k_proj.lora_B.weight"))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    sign(run.checkpoint(10), 10)
    with pytest.raises(TrainingFailure, match=r"k_proj.weight is not finite after merging"):
        export(run, tmp_path / "out", merge=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["base", "run"]
