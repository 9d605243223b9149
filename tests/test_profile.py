"""Where a step goes is told by kind of work, and its rate against what the machine can multiply."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Finetune, Tiny, write_recipe
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from finetune.kernels import activation
from finetune.kernels.chains import compile_chains
from finetune.kernels.cpu.attention import DocumentAttention
from finetune.kernels.matmul_rate import matmul_flops
from finetune.planner.estimate.timing import step_flops
from finetune.planner.shapes.read_config import read
from finetune.runs.run import Run
from finetune.training.profiler import (
    ADAPTERS,
    ATTENTION,
    COMMUNICATION,
    COPIES,
    ELEMENTWISE,
    HEAD,
    MATMUL,
    REST,
    ROWS,
    Profile,
    spent,
)

SMOLLM2_135M = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip


def test_a_step_needs_no_padding_and_no_logits_of_unlabelled_tokens() -> None:
    shape = read(SMOLLM2_135M)
    inside = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    head, scores = 49152 * 576, 30 * 576
    whole = step_flops(shape, tokens=100, trained_tokens=62, length=50)
    assert whole == 100 * (6 * inside + 6 * scores * 50) + 62 * 6 * head
    adapted = step_flops(shape, tokens=100, trained_tokens=62, length=50, adapter=1000)
    assert adapted == 100 * (4 * inside + 6 * 1000 + 6 * scores * 50) + 62 * 4 * head


def test_products_are_measured_in_flops_per_second() -> None:
    rate = matmul_flops(torch.device("cpu"), torch.float32)
    assert 1e8 < rate < 1e13  # from a phone's core to a large server


def test_products_are_distinguished_by_their_shapes(tmp_path: Path) -> None:
    told: list[str] = []
    traced = Profile(tmp_path, 0, told.append, vocabulary=320, ranks=frozenset({8}))
    hidden, weight, down, head = (torch.randn(100, 64), torch.randn(64, 96), torch.randn(64, 8),
                                  torch.randn(64, 320))  # fmt: skip
    with traced.of_step(0):
        hidden @ weight
    assert not told
    with traced.of_step(2):
        for _ in range(50):
            hidden @ weight, hidden @ down, hidden @ head
    found = json.loads((tmp_path / "where-rank-00000.json").read_text())
    assert found.keys() == set(ROWS)
    assert {kind for kind in (MATMUL, ADAPTERS, HEAD) if found[kind] > 0} == {
        MATMUL,
        ADAPTERS,
        HEAD,
    }
    assert found[COMMUNICATION] == 0
    assert told[0].startswith("time of a step of ")


def test_products_of_our_attention_are_attention(tmp_path: Path) -> None:
    """Heads of 32 are as wide as two adapters of rank 16."""
    traced = Profile(tmp_path, 0, None, vocabulary=320, ranks=frozenset({16}))
    query, key, value = (torch.randn(1, 4, 200, 32, requires_grad=True) for _ in range(3))
    with traced.of_step(2):
        DocumentAttention.apply(query, key, value, [0, 120, 200], 0.1).sum().backward()
    found = json.loads((tmp_path / "where-rank-00000.json").read_text())
    assert found[ADAPTERS] == found[MATMUL] == 0
    assert found[ATTENTION] > 0.5 * (sum(found.values()) - found[REST])


def test_compiled_operations_do_not_count_as_waiting(tmp_path: Path) -> None:
    traced = Profile(tmp_path, 0, None, 320, frozenset())
    given = torch.randn(2000, 2000), torch.randn(2000, 2000), False
    compile_chains(True)
    try:
        activation.gated(*given)
        with traced.of_step(2):
            for _ in range(20):
                activation.gated(*given)
    finally:
        compile_chains(False)
    found = json.loads((tmp_path / "where-rank-00000.json").read_text())
    assert found[ELEMENTWISE] > found[REST]


def event(
    number: int, name: str, start: float, end: float, gpu: bool = False, **about: Any
) -> FunctionEvent:
    kind = DeviceType.CUDA if gpu else DeviceType.CPU
    return FunctionEvent(
        id=number, name=name, thread=1, start_us=start, end_us=end, use_device="cuda",
        device_type=kind, **about,
    )  # fmt: skip


def test_each_kernel_of_a_gpu_counts_once() -> None:
    """Events as kineto makes them of a step of 8,000 us, 7,500 of which kernels run."""
    launched = [
        (event(1, "aten::mul", 0, 5), "void vectorized_elementwise_kernel<4, ...>", 1000),
        (event(2, "aten::mm", 6, 12, input_shapes=[[8, 16], [16, 320]]), "nvjet_tst_128x256", 4000),
        (event(3, "aten::copy_", 13, 15), "Memcpy DtoD (Device -> Device)", 500),
        (event(4, "aten::_flash_attention_forward", 16, 20), "void pytorch_flash::flash_fwd", 2000),
    ]
    kernels, at = list[FunctionEvent](), 500
    for number, (operation, name, duration) in enumerate(launched):
        operation.append_kernel(name, 0, duration)
        kernels.append(event(10 + number, name, at, at + duration, gpu=True))
        at += duration
    marked = event(
        20, "Optimizer.step#AdamW.step", 500, 1500, gpu=True, is_user_annotation=True
    )  # fmt: skip
    reduced = event(21, "ncclDevKernel_AllReduce", 0, 400, gpu=True)
    operations = [operation for operation, _, _ in launched]
    found = spent([*operations, *kernels, marked, reduced], 320, frozenset({8}), cuda=True)
    told = {kind: round(seconds * 1e6) for kind, seconds in found.items() if seconds}
    assert told == {ELEMENTWISE: 1000, HEAD: 4000, COPIES: 500, ATTENTION: 2000, REST: 500}


def test_a_run_that_ends_before_the_traced_step_reports_it(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=2))
    done = finetune("train", recipe, "--profile", "--output", tmp_path / "run")
    assert done.status == 0, done.output
    assert "--profile has no effect: it traces step 3" in " ".join(done.output.split())


def test_a_run_reports_its_rates_and_traces_one_step(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=4, adapter={"r": 4}))
    done = finetune("train", recipe, "--profile", "--output", tmp_path / "run")
    assert done.status == 0, done.output
    run = Run(tmp_path / "run")
    trace = json.loads((run.profile / "trace-rank-00000.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::mm", "GroupedLoRA", "ChunkedLoss"} <= names
    assert "time of a step of" in done.output
    steps = list(run.read_metrics("train"))
    assert all(0 < step["mfu"] < 1 for step in steps)
    assert all(0 < step["data_seconds"] < step["seconds"] for step in steps)
    shown = f"{steps[0]['real_tokens'] / steps[0]['slots']:.0%} real"
    assert shown in done.output


@pytest.mark.parametrize("missing", ["data_seconds", "mfu"])
def test_a_record_of_an_earlier_release_is_read(tmp_path: Path, missing: str) -> None:
    from records import START, trained, write_run

    from finetune.runs.metrics import read_history

    run = Run(tmp_path)
    write_run(tmp_path, [START, trained(1)])
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k != missing} for line in lines]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in kept))
    (step,) = read_history(run).trained
    assert step.data_seconds == 0
    assert math.isnan(step.mfu)
