"""What only a GPU can show. Every test is skipped, and says so, where PyTorch sees none.

Losses are compared to tolerances, not bit for bit: sums on a GPU have no fixed order (the gradient
of an embedding is added up by atomic operations).
"""

import gc
import importlib
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from conftest import apart, cut_off, largest, losses, read, run_command, write_recipe
from gpus import NEEDS_GPU
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import finetune as ft
from finetune.checkpoints.staging import Staging
from finetune.data.rows.collate import collate
from finetune.inference.load import load_weights
from finetune.launchers.accelerate import free_port
from finetune.methods.losses import token_loss_sum
from finetune.models.model import recompute
from finetune.models.packed_attention import attend
from finetune.planner import plan
from finetune.training import optim, steps

pytestmark = NEEDS_GPU

KERNEL = 2e-2
"""Attention of unit normals in bf16, which keeps 8 bits of each weight and value."""
ORDER = 1e-4
"""Losses of about 6 in fp32 (TF32 is off) over six steps of AdamW, summed in another order."""
BF16 = 2e-2
"""Losses of about 6 over six steps: bf16 keeps 8 bits, 0.4 %, of each activation. Two processes on
CPUs differ from fp32 by 2e-3."""
LORA: dict[str, Any] = {"adapter": {"r": 8}, "optim": {"lr": 5e-3, "warmup": 0}}
KINDS = pytest.mark.parametrize("kind", [{}, LORA], ids=["full", "lora"])
ROUNDED = ("--precision", "bf16")

READ_BACK = """
import datetime, json, sys
from pathlib import Path
from torch.distributed.tensor import DTensor
from finetune import catalog
from finetune.distributed.build import build
from finetune.planner import plan
from finetune.runs.run import Run
from finetune.training.run_options import Options
from finetune.training.worker import Worker

recipe, backend, precision, place = sys.argv[1:]
settled = plan(catalog.load(Path(recipe)), backend, 1, precision)
engine = build(settled, Path(place) / "offload", datetime.timedelta(minutes=5))
Worker(engine, Run(Path(place)), Options(Path(place))).train()
parameters = list(engine.module.parameters())
found = {
    "engine": engine.accelerator.distributed_type.value,
    "dtypes": sorted({str(p.dtype) for p in parameters}),
    "devices": sorted({p.device.type for p in parameters}),
    "sharded": sum(isinstance(p, DTensor) for p in parameters),
    "parameters": len(parameters),
}
(Path(place) / "found.json").write_text(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("backend", "engine", "dtype"),
    [
        ("single", "NO", "torch.float32"),
        ("fsdp_full_shard", "FSDP", "torch.float32"),
        ("zero2", "DEEPSPEED", "torch.bfloat16"),  # its fp32 masters are the optimizer's
        ("zero3", "DEEPSPEED", "torch.bfloat16"),
    ],
)
def test_one_gpu_realises_the_backend(tiny, tmp_path, backend, engine, dtype):
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=2))
    run = ft.Run(tmp_path / "run")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables = {} if backend == "single" else alone | meeting
    command = [sys.executable, "-c", READ_BACK, str(recipe), backend, "bf16", str(run.root)]
    run_command(command, tmp_path / "cache", cwd=tmp_path, env=variables).passed()
    found = read(run.root / "found.json")
    assert (found["engine"], found["dtypes"], found["devices"]) == (engine, [dtype], ["cuda"])
    assert found["sharded"] == (found["parameters"] if engine == "FSDP" else 0)
    realised = read(run.realised)
    assert realised["mixed_precision"] == "bf16"
    assert realised["device"].startswith("cuda")
    (rank,) = realised["ranks"]
    assert rank["parameters"] == rank["optimizer"] == realised["parameters"]


@pytest.fixture
def on_cpu(tiny, finetune, tmp_path):
    """A run that sees no GPU."""

    def run(precision: str = "fp32", **sections: Any) -> ft.Run:
        recipe = write_recipe(tmp_path / "r.json", tiny.fields(**sections))
        words = ("--precision", precision, "--output", tmp_path / "cpu")
        finetune("train", recipe, *words, env={"CUDA_VISIBLE_DEVICES": ""}).passed()
        return ft.Run(tmp_path / "cpu")

    return run


@pytest.mark.parametrize("backend", ["single", "fsdp_full_shard", "zero2", "zero3"])
def test_launch_trains_on_one_gpu(train, run_of, backend):
    assert apart(run_of(backend, *ROUNDED, processes=1), train()) < BF16


@KINDS
def test_a_gpu_gives_the_losses_of_a_cpu(train, on_cpu, kind):
    alone, on_gpu = on_cpu(**kind), train(**kind)
    assert read(alone.realised)["device"] == "cpu"
    assert read(on_gpu.realised)["device"].startswith("cuda")
    assert apart(alone, on_gpu) < ORDER
    assert apart(alone, on_gpu, "eval") < ORDER


@KINDS
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_numbers_give_the_losses_of_fp32(train, precision, kind):
    precise, rounded = (train(each, precision=each, **kind) for each in ("fp32", precision))
    assert losses(precise) != losses(rounded)
    assert apart(precise, rounded) < BF16


def llama(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1_536, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=512, max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_inputs_of_checkpointed_blocks_wait_in_host_memory():
    ids = torch.randint(0, 512, (4, 1024), device="cuda")
    held: dict[str, int] = {}
    ways: dict[str, Literal[True, "offload"]] = {"device": True, "host": "offload"}
    for place, how in ways.items():
        model = llama(8).to("cuda", torch.bfloat16).train()
        recompute(model, how)
        before = torch.cuda.memory_allocated()
        hidden = model.model(input_ids=ids).last_hidden_state
        held[place] = torch.cuda.memory_allocated() - before
        hidden.sum().backward()
        del model, hidden
        gc.collect()
    assert held["device"] - held["host"] == pytest.approx(8 * ids.numel() * 512 * 2, rel=0.15)


def test_a_base_in_nf4_takes_about_half_a_byte_per_weight(tmp_path):
    """4 bits, 1 byte per 64 weights, and 4 bytes per 64 x 256: 0.516 bytes; 0.5625 without double
    quantisation. Above that stand 1 KiB of codes a tensor and the allocator's blocks of 512."""
    llama(4).save_pretrained(tmp_path)
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = load_weights(tmp_path, torch.bfloat16, quantization="nf4", device="cuda")
    gc.collect()
    held = torch.cuda.memory_allocated() - before
    weights, plain = packed_weights(model)
    assert weights == 4 * (4 * 512 * 512 + 3 * 512 * 1_536)
    assert 0.515 < (held - plain) / weights < 0.53


def packed_weights(model: nn.Module) -> tuple[int, int]:
    """Weights that are held in 4 bits, and bytes of everything else."""
    from bitsandbytes.nn.modules import Params4bit

    parameters = list(model.parameters())
    packed = [p for p in parameters if isinstance(p, Params4bit)]
    rest = [p for p in parameters if not isinstance(p, Params4bit)]
    states: list[Any] = [p.quant_state for p in packed]
    weights = sum(state.shape.numel() for state in states)
    return weights, sum(tensor.nbytes for tensor in [*rest, *model.buffers()])


def test_qlora_trains_on_a_gpu_as_on_a_cpu(train, on_cpu):
    kind: dict[str, Any] = LORA | {"model": {"quantization": "nf4"}}
    assert apart(on_cpu(**kind), train(**kind)) < BF16


def test_the_recorded_peak_is_that_of_the_allocator(train):
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run = train()
    parameters = read(run.realised)["parameters"]
    recorded = [step["memory"] for step in run.read_metrics("train")]
    (end,) = run.read_metrics("end")
    assert recorded == sorted(recorded)
    # fp32 weights, gradients and two moments: 16 bytes a parameter, and activations on top.
    assert before + 16 * parameters < recorded[-1] <= end["peak_memory"]
    assert end["peak_memory"] <= torch.cuda.max_memory_allocated()


def test_the_peak_of_a_step_is_planned(train):
    """Within 5 %: each of its many small tensors takes a multiple of 512 bytes."""
    (counted,) = train(batch={"rows": 32, "micro_rows": 16}).read_metrics("memory")
    assert counted["predicted"] == pytest.approx(counted["peak"], rel=0.05)


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit"])
def test_8_bit_adamw_trains_and_resumes(tmp_path, train, name):
    whole = train("adamw")
    straight = train("straight", optim={"name": name})
    # Moments in 8 bits: the losses of AdamW, of about 6, to 1 % over six steps.
    assert apart(straight, whole) < 5e-2
    cut_off(straight, tmp_path / "resumed", 3)
    assert apart(train("resumed", resume=True, optim={"name": name}), straight) < ORDER


def test_adamw_is_fused():
    """What it computes is compared with a CPU by the losses of every run above."""
    (fused,) = optim.build(nn.Linear(64, 64, device="cuda"), ft.Optim(), 1e-2)
    assert isinstance(fused, torch.optim.AdamW)
    assert all(group["fused"] for group in fused.param_groups)


def test_a_gpu_answers_as_a_cpu_does(train):
    loaded = ft.load(train(**LORA), dtype=torch.float32)
    assert loaded.model.device.type == "cuda"
    prompts = [[{"role": "user", "content": text}] for text in ("the cat", "a red house sings")]
    on_gpu = ft.generate(loaded, prompts, max_new_tokens=12)
    loaded.model.to("cpu")
    assert on_gpu == ft.generate(loaded, prompts, max_new_tokens=12)


@pytest.mark.parametrize("merge", [False, True], ids=["adapter", "merged"])
def test_what_a_gpu_trained_loads_without_one(tmp_path, train, merge):
    run = train(**LORA)
    folder = ft.export(run, tmp_path / "out", merge=merge)
    plain = AutoModelForCausalLM if merge else AutoPeftModelForCausalLM
    elsewhere = plain.from_pretrained(folder, dtype=torch.float32).eval()
    assert elsewhere.device.type == "cpu"
    here = ft.load(run, dtype=torch.float32).model
    ids = torch.arange(3, 43)[None]  # (1, 40)
    with torch.no_grad():
        got, expected = elsewhere(input_ids=ids).logits, here(input_ids=ids.cuda()).logits.cpu()
    assert torch.allclose(got, expected, atol=1e-4)  # fp32 logits of about 1, in another order
    if not merge:
        stored = load_file(folder / "adapter_model.safetensors")
        assert all(value.isfinite().all() for value in stored.values())
        assert any(value.count_nonzero() for name, value in stored.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, KERNEL), (torch.float32, 1e-4)], ids=["bf16", "fp32"]
)
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(
    ("window", "places"),
    [(None, (0, 1, 90, 173, 300)), (7, (0, 1, 90, 173, 300)), (None, (0, 2_100))],
)
def test_the_kernel_of_packed_documents_computes_what_a_cpu_does_one_by_one(
    window, places, size, dtype, tolerance
):
    """With shared key heads; in fp32 by a kernel call per document, also on the GPU."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, places[-1], size, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    ends = torch.tensor(places, dtype=torch.int32)
    longest = int(ends.diff().max())
    results: list[list[torch.Tensor]] = []
    for device, computed in (("cpu", torch.float32), ("cuda", dtype)):
        there = [each.to(device, computed).requires_grad_() for each in inputs]
        mixed, _ = attend(
            nn.Module(), *there, None, sliding_window=window,
            cu_seq_lens_q=ends.to(device), max_length_q=longest,
        )  # fmt: skip
        mixed.square().sum().backward()
        grads = [each.grad for each in there]
        results.append([each.float().cpu() for each in (mixed, *grads) if each is not None])
    for alone, together in zip(*results, strict=True):
        assert (alone - together).abs().max() < tolerance * alone.abs().max()


@pytest.mark.parametrize(("precision", "near"), [("fp32", ORDER), ("bf16", BF16)])
def test_packed_rows_on_a_gpu_have_the_losses_of_a_cpu(train, on_cpu, precision, near):
    given = {"batch": {"rows": 4, "packing": True}, **LORA, "precision": precision}
    assert apart(train(**given), on_cpu(**given)) < near


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "backend", ["ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "zero2", "zero3"]
)
@KINDS
def test_two_gpus_have_the_losses_of_one_and_resume(
    tmp_path, train, run_of, finetune, backend, kind
):
    assert_resumes(run_of(backend, *ROUNDED, **kind), train(**kind), backend, 2, finetune, tmp_path)


@pytest.mark.parametrize("backend", ["fsdp_full_shard_offload", "zero2_offload"])
def test_a_backend_that_offloads_trains_and_resumes_on_one_gpu(
    tmp_path, train, run_of, finetune, backend
):
    assert_resumes(run_of(backend, *ROUNDED, processes=1), train(), backend, 1, finetune, tmp_path)


def assert_resumes(
    straight: ft.Run, alone: ft.Run, backend: str, processes: int, finetune: Any, folder: Path
) -> None:
    """A run in bf16 has the losses of fp32, and has them again after half of its steps."""
    assert apart(straight, alone) < BF16
    resumed = cut_off(straight, folder / "resumed", 3)
    words = ("--processes", processes, *ROUNDED, "--output", resumed.root, "--resume")
    finetune("launch", straight.recipe, "--backend", backend, *words).passed()
    assert apart(resumed, straight) < BF16


def test_copies_into_page_locked_memory_have_the_bytes_of_plain_ones():
    """A model of 0.1 billion weights with two moments; the measured rates are printed."""
    device = torch.device("cuda", torch.cuda.current_device())
    given = [torch.randn(4_096, 4_096, device=device) for _ in range(18)]
    given += [torch.randn(64, 33, device=device).T, torch.ones((), device=device)]
    staging, seconds = Staging(device, keep=True), list[float]()
    for number in range(4):
        queued = [each + number for each in given]
        expected = [each.cpu() for each in queued]
        started = time.perf_counter()
        staging.begin()
        copies = [staging.copy(queued.pop(0)) for _ in given]  # each source is freed at once
        staging.wait()
        seconds.append(time.perf_counter() - started)
        assert all(map(torch.equal, copies, expected))
        assert (staging.buffer is None) == (number == 0)
    assert staging.buffer.is_pinned()
    size = sum(each.nbytes for each in given)
    print("GB/s of each copy:", ", ".join(f"{size / 1e9 / each:.1f}" for each in seconds))
    staging.release()


def test_compiled_operations_have_the_losses_of_eager_ones(train):
    eager, compiled = (
        losses(train(how, precision="bf16", kernels={"pointwise": how}))
        for how in ("eager", "compiled")
    )
    assert largest(eager, compiled) < BF16


def test_the_parts_of_a_profile_are_its_step(run_of):
    run = run_of("single", *ROUNDED, "--profile")
    found = read(run.profile / "where-rank-00000.json")
    seconds = next(each["seconds"] for each in run.read_metrics("train") if each["step"] == 3)
    assert sum(found.values()) <= 1.1 * seconds  # the profiler's own time is part of the step's


@KINDS
def test_a_forward_and_a_backward_pass_wait_for_no_value(kind):
    sys.path.insert(0, str(Path(__file__).parent / "cuda_trace"))
    traced = importlib.import_module("traced")
    recipe = traced.recipe_of("qwen3", bool(kind), "packs", head_dim=16)
    _, trained = traced.built(plan(recipe, "single", 1, "bf16"))
    rows = traced.packs(traced.documents())
    batch = collate(rows, np.arange(len(rows)), 0, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        token_loss_sum(trained, batch).backward()  # kernels are loaded
        torch.cuda.set_sync_debug_mode("error")
        try:
            token_loss_sum(trained, batch).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("batch", [{"packing": True}, {"padding_free": False, "micro_rows": 4}])
def test_a_step_waits_for_the_gpu_twice(train, monkeypatch, batch):
    """For the norm of the gradient, and for the sums that are reported."""
    waits = list[int]()
    step_of = steps.train_step

    def counted(*given: Any) -> Any:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return step_of(*given)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                waits.append(sum("synchronizing CUDA" in str(each.message) for each in told))

    monkeypatch.setattr(steps, "train_step", counted)
    train(batch=batch)
    assert max(waits[2:]) <= 2  # kernels are loaded, and memory was measured, in the first ones
