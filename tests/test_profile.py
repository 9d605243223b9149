"""Where a step goes is told by kind of work, and its rate against what the machine can multiply."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import write_recipe
from records import START, trained, write_run
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

import finetune as ft
from finetune import catalog
from finetune.kernels import activation
from finetune.kernels.cpu.attention import DocumentAttention
from finetune.kernels.matmul_rate import matmul_flops
from finetune.kernels.pointwise import compile_chains
from finetune.planner.estimate.timing import step_flops
from finetune.planner.shapes.read_config import read
from finetune.runs.metrics import read_history
from finetune.runs.run import Run
from finetune.training import profiler as kinds
from finetune.training.profiler import Profile, spent

SMOLLM2_135M = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip


def test_a_step_needs_no_padding_and_no_logits_of_unlabelled_tokens():
    shape = read(SMOLLM2_135M)
    inside = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    head, scores = 49152 * 576, 30 * 576
    whole = step_flops(shape, tokens=100, trained_tokens=62, length=50)
    assert whole == 100 * (6 * inside + 6 * scores * 50) + 62 * 6 * head
    adapted = step_flops(shape, tokens=100, trained_tokens=62, length=50, adapter=1000)
    assert adapted == 100 * (4 * inside + 6 * 1000 + 6 * scores * 50) + 62 * 4 * head


def test_products_are_measured_in_flops_per_second():
    rate = matmul_flops(torch.device("cpu"), torch.float32)
    assert 1e8 < rate < 1e13  # from a phone's core to a large server


@pytest.fixture
def traced(tmp_path) -> Callable[..., tuple[dict[str, float], list[str]]]:
    """Seconds of a step by kind of work, and what is told of it."""

    def trace(work: Callable[[], object], ranks: frozenset[int] = frozenset()) -> Any:
        told: list[str] = []
        profile = Profile(tmp_path, 0, told.append, vocabulary=320, ranks=ranks)
        with profile.of_step(0):
            work()
        assert not told
        with profile.of_step(2):
            work()
        return json.loads((tmp_path / "where-rank-00000.json").read_text()), told

    return trace


def test_products_are_distinguished_by_their_shapes(traced):
    hidden = torch.randn(100, 64)
    others = torch.randn(64, 96), torch.randn(64, 8), torch.randn(64, 320)
    found, told = traced(lambda: [hidden @ each for each in others * 50], frozenset({8}))
    assert found.keys() == set(kinds.ROWS)
    assert min(found[kind] for kind in (kinds.MATMUL, kinds.ADAPTERS, kinds.HEAD)) > 0
    assert found[kinds.COMMUNICATION] == 0
    assert told[0].startswith("time of a step of ")


def test_products_of_our_attention_are_attention(traced):
    """Heads of 32 are as wide as two adapters of rank 16."""
    given = [torch.randn(1, 4, 200, 32, requires_grad=True) for _ in range(3)]
    found, _ = traced(
        lambda: DocumentAttention.apply(*given, [0, 120, 200], 0.1).sum().backward(),
        frozenset({16}),
    )
    assert found[kinds.ADAPTERS] == found[kinds.MATMUL] == 0
    assert found[kinds.ATTENTION] > 0.5 * (sum(found.values()) - found[kinds.REST])


def test_compiled_operations_do_not_count_as_waiting(traced):
    given = torch.randn(2000, 2000), torch.randn(2000, 2000), False
    compile_chains(True)
    try:
        found, _ = traced(lambda: [activation.gated(*given) for _ in range(20)])
    finally:
        compile_chains(False)
    assert found[kinds.ELEMENTWISE] > found[kinds.REST]


def event(
    number: int, name: str, start: float, end: float, gpu: bool = False, **about: Any
) -> FunctionEvent:
    return FunctionEvent(
        id=number, name=name, thread=1, start_us=start, end_us=end, use_device="cuda",
        device_type=DeviceType.CUDA if gpu else DeviceType.CPU, **about,
    )  # fmt: skip


def test_each_kernel_of_a_gpu_counts_once():
    """Events as kineto makes them of a step of 8,000 us, 7,500 of which kernels run."""
    launched = [
        (event(1, "aten::mul", 0, 5), "void vectorized_elementwise_kernel<4, ...>", 1000),
        (event(2, "aten::mm", 6, 12, input_shapes=[[8, 16], [16, 320]]), "nvjet_tst_128x256", 4000),
        (event(3, "aten::copy_", 13, 15), "Memcpy DtoD (Device -> Device)", 500),
        (event(4, "aten::_flash_attention_forward", 16, 20), "void pytorch_flash::flash_fwd", 2000),
    ]
    events, at = [operation for operation, _, _ in launched], 500
    for number, (operation, name, duration) in enumerate(launched):
        operation.append_kernel(name, 0, duration)
        events.append(event(10 + number, name, at, at + duration, gpu=True))
        at += duration
    optimizer = "Optimizer.step#AdamW.step"
    events += [
        event(20, optimizer, 500, 1500, gpu=True, is_user_annotation=True),
        event(21, "ncclDevKernel_AllReduce", 0, 400, gpu=True),
    ]
    found = spent(events, 320, frozenset({8}), cuda=True)
    assert {kind: round(seconds * 1e6) for kind, seconds in found.items() if seconds} == {
        kinds.ELEMENTWISE: 1000,
        kinds.HEAD: 4000,
        kinds.COPIES: 500,
        kinds.ATTENTION: 2000,
        kinds.REST: 500,
    }


def test_a_run_that_ends_before_the_traced_step_reports_it(tiny, tmp_path, capsys):
    options = ft.Options(tmp_path / "run", plot=False, profile=True)
    ft.train(catalog.from_fields(tiny.fields(max_steps=1)), precision="fp32", options=options)
    assert "--profile has no effect: it traces step 3" in " ".join(capsys.readouterr().out.split())


def test_a_run_reports_its_rates_and_traces_one_step(tiny, finetune, tmp_path):
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=4, adapter={"r": 4}))
    done = finetune("train", recipe, "--profile", "--output", tmp_path / "run").passed()
    run = Run(tmp_path / "run")
    trace = json.loads((run.profile / "trace-rank-00000.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::mm", "GroupedLoRA", "ChunkedLoss"} <= names
    assert "time of a step of" in done.output
    steps = list(run.read_metrics("train"))
    assert (
        0 < min(step["mfu"] for step in steps) < 1
    )  # a busy machine may slow what it is measured by
    assert all(0 < step["data_seconds"] < step["seconds"] for step in steps)
    assert f"{steps[0]['real_tokens'] / steps[0]['slots']:.0%} real" in done.output


@pytest.mark.parametrize("missing", ["data_seconds", "mfu"])
def test_a_record_of_an_earlier_release_is_read(tmp_path, missing):
    run = write_run(tmp_path, [START, trained(1)])
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k != missing} for line in lines]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in kept))
    (step,) = read_history(run).trained
    assert step.data_seconds == 0
    assert math.isnan(step.mfu)
