"""What differs on a GPU and can be seen without one: choices, refusals, and fake tensors."""

import dataclasses
import functools
import inspect
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from architectures import SIZES
from conftest import write_recipe
from gpus import refuses, without_weights, write_smi
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.integrations import moe

from finetune import catalog
from finetune.distributed import deepspeed, device, heartbeat
from finetune.distributed.device import Found
from finetune.distributed.ranks import Ranks
from finetune.errors import FinetuneError, TrainingFailure
from finetune.kernels import pointwise
from finetune.kernels.expert_products import experts_forward
from finetune.kernels.quantised import QuantState
from finetune.models import packed_attention
from finetune.models.packed_attention import against_varlen, attend, varlen_words
from finetune.models.quantization import placed_while_loading
from finetune.planner import Plan, plan
from finetune.planner.estimate import hardware
from finetune.planner.estimate.layout import Layout
from finetune.planner.estimate.predict import predict
from finetune.planner.estimate.sharding.zero import Gradients
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes.read_config import read
from finetune.process.quiet import growing_segments
from finetune.runs.run import Run
from finetune.training import memory_meter, stages

AMPERE, TURING = (8, 0), (7, 5)


class Names(TorchDispatchMode):
    """Operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))

    def count(self, part: str) -> int:
        return sum(part in name for name in self.calls)


@pytest.fixture
def gpu(monkeypatch) -> Iterator[dict[str, tuple[int, int]]]:
    """Tensors are fake, and a GPU has the capability that is written here."""
    found = {"capability": AMPERE}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: found["capability"])
    with FakeTensorMode():
        yield found
    torch.set_autocast_enabled("cuda", False)
    against_varlen.cache_clear()


def attended(
    dtypes: tuple[torch.dtype, ...],
    window: int | None = None,
    ends: tuple[int, ...] = (0, 90, 210, 300),
) -> Names:
    """Attention over documents with 8 heads of 64 and 2 key heads, on a GPU."""
    given = [
        torch.empty(1, count, ends[-1], 64, dtype=dtype, device="cuda")
        for count, dtype in zip((8, 2, 2), dtypes, strict=True)
    ]
    there = torch.empty(len(ends), dtype=torch.int32, device="cuda")
    with Names() as names:
        attend(
            nn.Module(), *given, None, sliding_window=window, cu_seq_lens_q=there,
            max_length_q=max(b - a for a, b in itertools.pairwise(ends)), document_ends=ends,
        )  # fmt: skip
    return names


def of_torch_2_11(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: Any = (-1, -1),
) -> None:  # fmt: skip
    """The signature of `varlen_attn` there."""


@pytest.mark.parametrize("kernel", [varlen_attn, of_torch_2_11])
@pytest.mark.parametrize("window", [None, 512])
def test_the_one_kernel_is_called_as_each_torch_has_it(kernel, window):
    words = varlen_words(kernel, 0.125, window, shared=True)
    bound = inspect.signature(kernel).bind(*range(7), **words).arguments
    assert bound["window_size"] == ((-1, 0) if window is None else (511, 0))
    assert ("enable_gqa" in bound) == ("enable_gqa" in inspect.signature(kernel).parameters)


def test_calls_of_grouped_experts_and_of_4_bit_scales_bind():
    """Two arguments of transformers' experts are handed on; scales are moved by bitsandbytes."""
    ours, theirs = (
        len(inspect.signature(each).parameters)
        for each in (experts_forward, moe.grouped_mm_experts_forward)
    )
    assert ours == theirs - 1
    assert inspect.signature(QuantState.to).bind(None, torch.device("cuda"))


def test_query_and_key_in_fp32_beside_a_value_in_bf16_reach_the_one_kernel(gpu):
    """So they come under autocast, where norms of heads or tables of positions are in fp32."""
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    assert attended((torch.float32, torch.float32, torch.bfloat16)).count("_varlen_attn") == 1


@pytest.mark.parametrize(
    ("capability", "ends", "window", "varlen"),
    [
        ((9, 0), (0, 2_048), None, 0),
        ((9, 0), (0, 2_047), None, 1),
        ((9, 0), (0, 2_048, 4_096), None, 1),
        ((9, 0), (0, 2_048), 512, 1),
        (AMPERE, (0, 2_048), None, 1),
    ],
)
def test_a_long_document_alone_has_the_attention_of_pytorch_on_hopper(
    gpu, capability, ends, window, varlen
):
    gpu["capability"] = capability
    assert attended((torch.bfloat16,) * 3, window=window, ends=ends).count("_varlen_attn") == varlen


@pytest.mark.parametrize(
    ("capability", "size", "reason"),
    [
        (AMPERE, 64, None),
        ((9, 0), 256, None),
        (TURING, 64, "this GPU is older than Ampere"),
        (AMPERE, 60, "the head size 60 is not a multiple of 8 up to 256"),
        ((9, 0), 264, "the head size 264 is not a multiple of 8 up to 256"),
        ((8, 0), 224, None),
        ((8, 9), 224, "this GPU has too little shared memory for heads of 224"),
        ((12, 0), 256, None),
    ],
)
def test_why_a_gpu_lacks_the_one_kernel(gpu, capability, size, reason, monkeypatch):
    gpu["capability"] = capability
    assert against_varlen(torch.device("cuda"), size) == reason
    monkeypatch.setattr(torch.version, "hip", "6.4")
    against_varlen.cache_clear()
    assert against_varlen(torch.device("cuda"), size) == "the kernel has not been tested on ROCm"


@pytest.mark.parametrize(
    ("dtype", "capability", "window", "whole"),
    [
        (torch.float32, AMPERE, None, True),
        (torch.float16, TURING, None, True),
        (torch.float32, AMPERE, 32, True),
        (torch.float16, AMPERE, None, False),
    ],
)
def test_shared_key_heads_are_repeated_where_only_flash_attention_would_share_them(
    gpu, monkeypatch, dtype, capability, window, whole
):
    seen: list[tuple[int, bool]] = []

    def product(query: Any, key: Any, value: Any, *, enable_gqa: bool, **_: Any) -> torch.Tensor:
        seen.append((key.shape[1], enable_gqa))
        return query

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", product)
    monkeypatch.setattr(packed_attention, "LARGEST_HEAD", 0)  # not the one kernel
    gpu["capability"] = capability
    attended((dtype,) * 3, window=window)
    assert seen == [(8, False) if whole else (2, True)] * 3


@pytest.mark.parametrize("capability", [(9, 0), AMPERE])
def test_flash_attention_3_is_used_where_it_is_installed(tmp_path, monkeypatch, gpu, capability):
    asked: list[str] = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", asked.append)
    gpu["capability"] = capability
    place = torch.device("cuda")
    assert packed_attention.use_flash_3(place, dropped=False) is None
    (tmp_path / "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    packed_attention._has_flash_3.cache_clear()
    assert packed_attention.use_flash_3(place, dropped=True) is None
    told = packed_attention.use_flash_3(place, dropped=False)
    packed_attention._has_flash_3.cache_clear()
    assert (told is None, asked) == ((False, ["FA3"]) if capability == (9, 0) else (True, []))


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'NVIDIA Thor, [N/A]'", [("NVIDIA Thor", None)]),
        ("echo 'NVIDIA H100 80GB HBM3, 81559'", [("NVIDIA H100 80GB HBM3", 81559 * 2.0**20)]),
        ("sleep 5; echo 'NVIDIA L4, 23034'", []),
        ("echo broken; exit 9", []),
    ],
)
def test_whatever_nvidia_smi_says_is_read(tmp_path, monkeypatch, script, found):
    write_smi(tmp_path, script, monkeypatch)
    monkeypatch.setattr(hardware, "SMI_SECONDS", 1)
    assert hardware.listed() == found
    if found and found[0][1] is None:
        told = "Thor reports no dedicated memory; describe it by"
        with pytest.raises(FinetuneError, match=told):
            hardware.installed()


CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


def h100(**changes: Any) -> Found:
    given: dict[str, Any] = {
        "build": "2.14.1+cu130", "kind": "cuda", "usable": 2, "listed": (), "visible": None,
        "capability": (9, 0), "architectures": CUDA_13,
    }  # fmt: skip
    return Found(**given | changes)


L4 = {"usable": 0, "listed": ("NVIDIA L4",)}


@pytest.mark.parametrize(
    ("changes", "here", "told"),
    [
        ({}, 2, None),
        ({}, 4, "4 on this machine, where PyTorch can use 2 GPUs; use --processes 2"),
        ({"usable": 1, "visible": "1"}, 2,
         "can use 1 GPU (CUDA_VISIBLE_DEVICES=1); use --processes 1"),
        ({"capability": TURING}, 1, "precision: bf16 is emulated, slowly, on the GPU of rank 0"),
        ({"capability": (7, 0)}, 1, "PyTorch 2.14.1+cu130 does not support the GPU of rank 0"),
        ({"capability": (12, 1)}, 1, None),  # compiled from compute_120 when it is loaded
        ({"usable": 0, "listed": ("NVIDIA L4",) * 2, "visible": "7", "reason": "no device"}, 1,
         "CUDA_VISIBLE_DEVICES=7: names no GPU of this machine, which has 2 x NVIDIA L4: 0 to 1"),
        (L4 | {"reason": "The NVIDIA driver is too old"}, 1,
         "cannot use this machine's 1 x NVIDIA L4: The NVIDIA driver is too old; update the"),
        (L4 | {"visible": ""}, 1, None),
        (L4 | {"kind": None}, 1, None),
        ({"kind": "hip", "capability": (0, 0), "architectures": ()}, 1, None),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_gpus_of_a_machine_is_told(changes, here, told):
    problems = device.problems(h100(**changes), "bf16", 0, here)
    assert len(problems) == (told is not None)
    assert told is None or told in problems[0]


def test_one_line_says_why_a_machine_with_an_accelerator_trains_on_its_cpu(monkeypatch):
    assert device.unused_accelerator(h100()) == []
    assert device.unused_accelerator(h100(usable=0)) == []
    (hidden,) = device.unused_accelerator(h100(**L4, visible=""))
    assert hidden == "device: trains on the CPU, because CUDA_VISIBLE_DEVICES is empty"
    (plain,) = device.unused_accelerator(h100(**L4, kind=None))
    assert "is a build without CUDA, although the driver lists NVIDIA L4" in plain
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert device.on_cpu()
    (apple,) = device.unused_accelerator(h100(usable=0, kind=None))
    assert apple.endswith("because this toolkit is untested on mps devices")


def test_an_unused_gpu_is_named_before_the_model_is_loaded(
    tiny, train, tmp_path, monkeypatch, capsys
):
    write_smi(tmp_path, "echo 'NVIDIA L4, 23034'", monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(FinetuneError):
        train(fields=without_weights(tiny, tmp_path))
    built = f"PyTorch {torch.__version__} is a build without"
    assert capsys.readouterr().out.count(f"note: device: trains on the CPU, because {built}") == 1


def test_the_gpu_of_a_process_has_its_number(monkeypatch):
    """A thread cannot be moved to `cuda`, which names no GPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    named = [torch.device("cuda"), torch.device("cuda", 1), torch.device("cpu")]
    assert [str(device.numbered(each)) for each in named] == ["cuda:3", "cuda:1", "cpu"]


def test_processes_that_hold_a_gpu_are_named_and_gpus_that_differ_by_rank():
    answer = "GPU-1, 4711, /opt/app/server, 60000 MiB\nGPU-1, 12, python, 500 MiB\nnonsense\n"
    users = device.processes_of(answer, own=12)
    assert users == ["/opt/app/server (process 4711) with 60000 MiB"]
    told = device.too_full(40e9, 20 * 10**9, 80 * 10**9, lambda: users)
    assert told
    assert "the plan predicts 37.3 GiB, but only 18.6 GiB of 74.5 GiB are free" in told
    assert "in use, by /opt/app/server (process 4711) with 60000 MiB; stop that" in told
    assert device.too_full(10e9, 20 * 10**9, 80 * 10**9, lambda: users) is None
    assert device.different(["L4 with 24 GB"] * 3) is None
    told = device.different(["L4 with 24 GB", "L4 with 24 GB", "T4 with 16 GB"])
    assert "rank 0 has L4 with 24 GB, rank 2 has T4 with 16 GB" in told


def test_a_compiler_that_is_missing_or_fails_leaves_chains_eager(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=refuses))
    pointwise.failure.cache_clear()
    told = pointwise.failure(torch.device("cpu"))
    pointwise.failure.cache_clear()
    assert told.startswith("TorchInductor cannot compile for this cpu device: ")
    assert "Python.h: no such file" in told
    doubled = pointwise.Chain(lambda x: x * 2)
    doubled.__dict__["compiled"] = torch.compile(doubled.eager, backend=refuses)
    pointwise.compile_chains(True)
    try:
        assert torch.equal(doubled.by_inductor(torch.ones(3)), torch.full((3,), 2.0))
        assert not pointwise.Chain.compiling
    finally:
        pointwise.compile_chains(False)
    assert "eager from here on, because" in capsys.readouterr().err


class BesideAnEagerRank(Ranks):
    """A process that can compile, of a job in which another one cannot."""

    control, device = None, torch.device("cpu")
    rank, world, is_main = 0, 2, True

    def __init__(self, settled: Plan) -> None:
        self.plan = settled

    def sums_and_maxima(self, summed: list[float], largest: list[Any]) -> tuple[Any, Any]:
        return summed, [1 for _ in largest]


def test_no_rank_compiles_if_one_cannot(tiny, monkeypatch):
    recipe = catalog.from_fields(tiny.fields(kernels={"pointwise": "compiled"}))
    monkeypatch.setattr(stages, "tokens_of_run", lambda *_: 1.0)
    job: Any = BesideAnEagerRank(plan(recipe, "ddp", 2, "fp32"))
    notes = stages.choose_compiled(job, None, 1)  # type: ignore[arg-type]
    assert notes[0] == "kernels.pointwise: eager, because another rank cannot compile"
    assert not pointwise.Chain.compiling


def test_a_quantised_model_is_cut_in_host_memory_or_the_plan_says_that_it_is_whole():
    """Llama-3.3-70B in NF4 is 39 GB; each of four cards has 24."""
    recipe = catalog.resolve("llama3_3_70b_qlora")
    machine = hardware.machine("4090", 4, host_memory=128e9)
    cut, whole = (
        predict(plan(recipe, backend, 4), machine) for backend in ("fsdp_full_shard", "zero3")
    )
    assert cut.timeline.peak.total < machine.usable
    assert 4 * 39e9 < cut.host < 4 * 41e9
    assert cut.status == "no"  # 158 GB of host memory while four processes load
    assert whole.timeline.peak.name == "loading"
    assert whole.timeline.peak.total > 39e9
    assert whole.status == "no"


def test_the_host_memory_of_loading_and_of_saving_is_planned():
    """Eight billion weights in fp32 on each of eight processes of a node; FSDP widens shards.

    Each process copies its share of weights and two moments in fp32, in the background or not.
    """
    recipe, parameters = catalog.resolve("llama3_1_8b_full"), 8_030_261_248
    machine = hardware.machine("H100-80", 8, host_memory=200e9)
    whole, cut = (predict(plan(recipe, name, 8), machine) for name in ("ddp", "fsdp_full_shard"))
    assert whole.host == 8 * 4 * parameters > 256e9
    assert (cut.host, cut.status) == (12 * parameters, "safe")
    for background, every in ((True, 100), (True, None), (False, 100)):
        saving = recipe.with_saving(background=background, every=every)
        assert predict(plan(saving, "zero2", 8), machine).host == 12 * parameters


@pytest.mark.parametrize(
    ("backend", "processes", "cpu", "overlaps"),
    [
        ("zero2", 8, False, True), ("zero2", 8, True, False), ("zero2", 1, False, False),
        ("zero2_offload", 8, False, False), ("zero1", 8, False, False), ("zero3", 8, False, None),
    ],
)  # fmt: skip
def test_zero_2_reduces_a_bucket_while_the_next_one_fills_on_several_gpus(
    tmp_path, backend, processes, cpu, overlaps
):
    settled = plan(catalog.resolve("llama3_1_8b_full"), backend, processes)
    config = deepspeed._plugin(settled, tmp_path, cpu).deepspeed_config["zero_optimization"]
    assert config.get("overlap_comm") == overlaps


def test_what_fsdp_quantises_is_loaded_on_the_host_and_zero_2_has_a_second_bucket_on_gpus():
    assert placed_while_loading(quantised=True, shards_all=True) == {"device_map": {"": "cpu"}}
    assert placed_while_loading(quantised=True, shards_all=False) == {}
    assert placed_while_loading(quantised=False, shards_all=True) == {}
    shape = read({"model_type": "llama"} | SIZES)
    layout = Layout("deepspeed", "grads", 2)
    here = Workload(shape, 1, 64, scheme="deepspeed", layout=layout, wide_gradients=True)
    one, two = (Gradients(each).filling for each in (dataclasses.replace(here, cpu=True), here))
    assert (one, two) == (2 * shape.parameters, 2 * one)


@pytest.mark.slow
def test_shards_that_are_widened_have_the_bits_of_weights_that_were(tiny, finetune, tmp_path):
    """A model in bf16, and the same values in a file of fp32."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        folder = tmp_path / str(dtype)
        shutil.copytree(tiny.model, folder)
        model = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.bfloat16)
        model.to(dtype).save_pretrained(folder)
        fields = tiny.fields(model={"name": str(folder)}, max_steps=3, eval_data=[])
        fields |= {"evaluation": {}, "saving": {}}
        recipe = write_recipe(tmp_path / f"{dtype}.json", fields)
        words = "--backend fsdp_full_shard --processes 2 --precision fp32 --output".split()
        run = Run(tmp_path / f"run-{dtype}")
        finetune("launch", recipe, *words, run.root).passed()
        (rank, _) = json.loads(run.realised.read_text())["ranks"]
        assert rank["optimizer"] == rank["parameters"]
        found.append([record["loss"] for record in run.read_metrics("train")])
    assert len(found[0]) == 3
    assert found[0] == found[1]


def test_the_flight_recorders_of_gloo_and_nccl_are_read_together():
    gloo = {"version": "2.10", "pg_status": {"0": {"last_enqueued_collective": 3}}}
    entries = [{"collective_seq_id": 9}]
    nccl = {"pg_status": {"0": {"last_enqueued_collective": 9}}, "entries": entries}
    found = heartbeat.merged([gloo, nccl])
    assert sorted(group["last_enqueued_collective"] for group in found["pg_status"].values()) == [
        3, 9,
    ]  # fmt: skip
    assert found["entries"] == entries
    assert heartbeat.collectives_begun() == 0


def test_each_rank_is_watched_by_another_and_its_silence_is_timed():
    """Two hosts of four: every process has one that sees it end, every host one that hears it."""
    ranks = [heartbeat.watched(rank, rank % 4, 4, 8) for rank in range(8)]
    assert [process for process, _ in ranks] == [1, 2, 3, 0, 5, 6, 7, 4]
    assert [beats for _, beats in ranks] == [4, None, None, None, 0, None, None, None]
    assert [heartbeat.watched(rank, rank, 2, 2) for rank in range(2)] == [(1, None), (0, None)]
    silence = heartbeat.Unchanged()
    assert [silence.seconds(7, now) for now in (10.0, 40.0, 75.0)] == [0.0, 30.0, 65.0]
    assert silence.seconds(8, 80.0) == 0.0


def test_the_rank_that_others_waited_for_is_named_with_those_that_nccl_ended():
    """NCCL ends ranks 0 and 1, which wait; rank 2 hangs before the collective."""
    other = "another host"
    waiting = [heartbeat.Beat(rank, 9, 5, 40, 99, other, "loop.py:9", 600.0) for rank in (0, 1)]
    hung = heartbeat.Beat(2, 9, 5, 39, 77, other, "feed.py:3 in take", 601.0)
    told = "rank 2 (process 77 on another host) did not join a collective for 601 s; it was last at"
    assert heartbeat.stalled([*waiting, hung]) == [f"{told} feed.py:3 in take"]
    assert heartbeat.stalled([*waiting, dataclasses.replace(hung, stalled=3.0)]) == []
    assert heartbeat.stalled([]) == []


class Counter:
    """PyTorch's count of a GPU, with what it counts written here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = self.highest = self.workspaces = 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: self.held)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: self.highest)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.forget)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear, raising=False)

    def hold(self, size: int) -> None:
        self.held, self.highest = size, max(self.highest, size)

    def forget(self, *_: object) -> None:
        self.highest = self.held

    def clear(self) -> None:
        self.held -= self.workspaces


def test_the_peak_of_a_step_does_not_hold_that_of_loading(monkeypatch):
    counter, place = Counter(monkeypatch), torch.device("cuda", 0)
    meter = memory_meter.Meter(place)
    counter.hold(900)  # quantised
    counter.hold(100)
    with meter.measuring(nn.Linear(1, 1)):
        counter.hold(300)
        counter.hold(150)
        counter.workspaces = 64  # of all that is held; the plan counts them with the context
    assert (meter.peak, counter.held, memory_meter.peak_bytes(place)) == (300 - 64, 150 - 64, 900)
    counter.hold(1000)
    assert memory_meter.peak_bytes(place) == 1000
    memory_meter._before.clear()


def test_blocks_of_a_gpu_grow_where_the_environment_does_not_say(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    growing_segments()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    growing_segments()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "backend:native"


GREEDY = """
import torch
from finetune.methods.sft import SFT

class Greedy(SFT):
    taken = 0

    def loss(self, model, batch):
        Greedy.taken += 1
        if Greedy.taken > 2 * 4:  # micro-batches of two steps
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
            )
        return super().loss(model, batch)
"""


def test_an_out_of_memory_error_is_one_message(tiny, train, tmp_path, monkeypatch):
    (tmp_path / "greedy.py").write_text(GREEDY)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TrainingFailure) as failure:
        train(method="greedy:Greedy", saving={"every": 1})
    (told,) = failure.value.problems
    assert re.fullmatch(
        r"step 3: out of memory on cpu of rank 0, which had used up to \S+ \S+ \(\S+ \S+ "
        r"predicted\): Tried to allocate 2\.00 GiB; change batch\.micro_rows=1 \(-\S+ \S+\) or "
        r"model\.activation_checkpointing=true \(-\S+ \S+\).*; the last complete checkpoint is "
        r"that of step 2: continue with --resume",
        told,
    ), told
