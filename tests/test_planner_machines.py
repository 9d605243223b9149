"""What a machine's parts can do: rates by type, links by number, and what runs nothing here."""

import dataclasses
import importlib
import json
import math
import re
from statistics import median
from typing import Any

import pytest
from conftest import ROOT
from planning import ask, record

import finetune as ft
from finetune import catalog
from finetune.errors import FinetuneError
from finetune.planner.estimate import advice, hardware, wording
from finetune.planner.estimate.adapter_sizes import lora
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes.read_config import read

CONFIG = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "intermediate_size": 2816, "vocab_size": 8192,
}  # fmt: skip


def recipe(**batch: Any) -> ft.SFT:
    model = ft.Model(config=CONFIG, tokenizer="t")
    made = ft.SFT(model, max_steps=10).with_data(ft.Data("rows.jsonl", "text"))
    return made.with_batch(**({"rows": 32, "micro_rows": 1, "max_length": 512} | batch))


@pytest.mark.parametrize(
    ("name", "fp32", "bf16"),
    [
        ("T4", 8.1e12, 8.1e12), ("V100", 15.7e12, 15.7e12), ("V100-16", 15.7e12, 15.7e12),
        ("A100-80", 19.5e12, 312e12), ("H100-80", 67e12, 989e12), ("RTX3090", 35.6e12, 71e12),
        ("RTX4090", 82.6e12, 165e12), ("L4", 30.3e12, 121e12), ("MI250X", 47.9e12, 191.5e12),
    ],
)  # fmt: skip
def test_a_gpu_multiplies_at_the_rate_of_its_data_sheet_in_each_type(name, fp32, bf16):
    machine = hardware.machine(name)
    shape = read(CONFIG)
    for scheme, rate in (("fp32", fp32), ("autocast", bf16)):
        workload = Workload(shape, 1, 512, scheme=scheme, adapter=lora(shape, 8))
        assert machine.gpu.attained(workload.compute, workload.fp16) == pytest.approx(
            rate * machine.gpu.reached
        )


@pytest.mark.parametrize("name", ["T4", "V100"])
def test_a_gpu_without_bf16_is_timed_in_fp32_with_a_hint_to_fp16(name):
    for more in ("--precision bf16", "--backend single"):
        text = ask(f"--gpu {name} {more}", recipe().with_lora())
        assert f"{name} has no bf16 units: PyTorch computes it in fp32" in text
        assert "training refuses bf16 on it: use --precision fp16" in text
    given = f"--gpu {name} --backend single --precision fp32"
    assert "bf16 units" not in ask(given, recipe().with_lora())
    # A ranking is of the precision that trains there.
    text = ask(f"--gpu {name}", recipe().with_lora())
    assert "bf16 units" not in text
    assert text.splitlines()[-1].endswith("--precision fp16")


@pytest.mark.parametrize("name", ["RTX3090", "A6000"])
def test_a_bridge_joins_two_cards_and_no_more(name):
    two, four = hardware.machine(name, 2), hardware.machine(name, 4)
    assert ((two.link, two.fast), (four.link, four.fast)) == ((56e9, True), (32e9, False))
    assert hardware.machine(name, 4, nodes=2).fast  # two in each node
    with pytest.raises(FinetuneError, match=f"a bridge joins two {name}, and a node has 4"):
        hardware.machine(name, 4, link="nvlink")
    assert hardware.machine("A100-80", 8).fast


def test_fewer_cards_of_a_mesh_use_fewer_links():
    links = {count: hardware.machine("MI300X", count).link for count in (2, 4, 8, 16)}
    assert links == {2: 64e9, 4: 336e9 * 3 / 7, 8: 336e9, 16: 336e9}  # PCIe is faster than one link


def test_a_process_drives_one_die_of_an_mi250x():
    found = hardware.gpu("AMD Instinct MI250X")
    assert (found.memory, found.flops) == (64 * 2**30 // 10**8 * 10**8, 191.5e12)
    for more in ("", "--backend fsdp_full_shard"):
        assert "--gpus counts devices" in ask(f"--gpu MI250X --gpus 4 {more}", recipe())


SMALL = CONFIG | {
    "hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 640,
}  # fmt: skip


def small(rows: int, length: int = 128) -> Workload:
    shape = read(SMALL)
    return Workload(shape, rows, length, adapter=lora(shape, 8), accumulation=32 // rows)


def test_a_step_takes_as_long_as_its_operations_are_started_or_its_products_and_others_run():
    machine = hardware.machine("H100-80")
    found = advice.option(small(1), machine).times
    # Two norms, rotation, attention, the unit, and seven matrices with adapters.
    assert found.launches > 32 * 12 * 3 * 50 * hardware.LAUNCH
    assert (found.bound, found.step) == ("launches", found.launches)
    # Twice the rows in half the micro-batches are started half as often.
    assert advice.option(small(2), machine).times.launches == found.launches / 2
    for shape in (CONFIG, CONFIG | {"hidden_size": 8192, "intermediate_size": 28672}):
        found = advice.option(Workload(read(shape), 8, 4096), machine).times
        assert found.bound == "compute"
        assert found.step == found.compute + found.moves
        # Attention is slower than the products of matrices.
        assert found.compute > found.flops / (machine.gpu.reached * machine.gpu.flops)
    sharded = advice.option(Workload(read(shape), 8, 4096, scheme="fsdp"), machine).times
    assert sharded.moves == found.moves  # the same for every engine


def test_recomputing_repeats_a_quarter_of_the_work_of_a_step_at_the_same_rate():
    machine, shape = hardware.machine("H100-80"), read(CONFIG)
    kept, again = (
        advice.option(Workload(shape, 8, 512, checkpointing=each), machine).times
        for each in ("none", "full")
    )
    assert again.flops / kept.flops == pytest.approx(4 / 3, rel=0.02)
    assert again.compute / kept.compute == pytest.approx(4 / 3, rel=0.02)


def test_nine_of_ten_published_rates_are_within_a_quarter(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    rates = importlib.import_module("plan_rates").rates()
    held = [each for each in rates if each.case.get("held")]
    assert (len(held), len(rates)) == (24, 90)
    for some, share in ((rates, 0.9), (held, 0.85)):
        near = [each for each in some if 0.8 <= each.ratio <= 1.25]
        assert len(near) >= share * len(some)


def test_the_first_of_the_ranking_fills_the_gpu_where_few_rows_do_not():
    given = recipe(max_length=256).with_model(ft.Model(config=SMALL, tokenizer="t")).with_lora(r=8)
    first, *others = record("--gpu RTX4090", given)["options"]
    assert first["micro_rows"] > 1
    speed = {each["micro_rows"]: each["tokens"] / each["step"] for each in (*others, first)}
    assert speed[1] < speed[2] < speed[4]


def test_a_cpu_plan_counts_time_outside_matrix_products():
    cpu = hardware.processor(200e9, 1, 16e9)
    here = Workload(read(SMALL), 2, 64, cpu=True)
    found = advice.option(here, cpu).times
    assert found.step == pytest.approx(found.compute + found.launches + found.moves)
    assert found.launches > 0
    # AdamW alone moves 32 bytes a weight.
    assert found.moves > 32 * here.trained / hardware.CPU_BANDWIDTH


def test_own_runs_calibrate_the_plan_of_their_card_alone(run_of):
    run = run_of()
    asked = f"--calibrate --runs {run.root}"
    found = record(asked, recipe(), measure=lambda _: 200e9)
    seconds = [each["seconds"] for each in run.read_metrics("train")][1:]
    (counted,) = run.read_metrics("memory")
    foreseen = json.loads(run.plan.read_text())["prediction"]
    assert found["calibration"]["steps"] == [median(seconds) / foreseen["step_seconds"]]
    assert found["calibration"]["peaks"] == [counted["peak"] / counted["predicted"]]
    (line,) = (
        line for line in ask(asked, recipe(), measure=lambda _: 200e9).splitlines()
        if line.startswith("calibrated")
    )  # fmt: skip
    longer = found["time"]["step"] * found["calibration"]["steps"][0]
    assert f"by the medians {wording.duration(longer)} a step" in line
    for more in ("", "--backend ddp"):
        with pytest.raises(FinetuneError, match=r"on H100-80 .* there are 1 on CPU; train one"):
            ask(f"--gpu H100 --gpus 2 {more} {asked}", recipe())


def test_a_plan_without_a_gpu_predicts_the_step_time_on_this_cpu(monkeypatch):
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    slow, fast = (record("", recipe(), measure=lambda _, r=r: r)["time"] for r in (200e9, 400e9))
    assert (slow["steps"], slow["seconds"], slow["tokens"]) == (10, 10 * slow["step"], 32 * 512)
    assert (slow["compute"], slow["moves"]) == (pytest.approx(2 * fast["compute"]), fast["moves"])
    text = ask("", recipe(), measure=lambda _: 200e9)
    assert "200 GFLOP/s a process (measured)" in text
    assert "whole run    10 steps" in text


def test_steps_of_packs_are_counted_by_the_tokens_of_rows(tmp_path):
    packed = ft.SFT(ft.Model(config=CONFIG, tokenizer="t"), epochs=3.0)
    packed = packed.with_batch(rows=8, micro_rows=1, max_length=1024, packing=True)

    def whole_run(recipe: ft.SFT, more: str = "") -> str:
        lines = ask(f"--gpu RTX4090 --backend single {more}", recipe).splitlines()
        (line,) = (each for each in lines if each.startswith("whole run"))
        return line

    unknown = packed.with_data(ft.Data("somebody/rows", "text"))
    assert "--row-tokens" in whole_run(unknown, "--rows 1000")
    steps = math.ceil(3 * math.ceil(1000 * 250 / 1024) / 8)
    assert f" {steps} steps" in whole_run(unknown, "--rows 1000 --row-tokens 250")
    with pytest.raises(FinetuneError, match="--row-tokens 5000: rows have at most"):
        ask("--gpu RTX4090 --backend single --rows 1000 --row-tokens 5000", unknown)
    # Local rows of 400 letters are about 100 tokens.
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps({"text": "x" * 387}) + "\n") * 200)
    local = packed.with_data(ft.Data(str(path), "text"))
    assert f" {math.ceil(3 * math.ceil(200 * 100 / 1024) / 8)} steps" in whole_run(local)
    # Without packing rows are rows, and short ones take less time.
    rows = unknown.with_batch(packing=False)
    assert f" {3 * 1000 // 8} steps" in whole_run(rows, "--rows 1000")
    words = "--gpu RTX4090 --backend single --rows 1000"
    full, short = (
        record(f"{words} {more}", rows)["prediction"]["time"] for more in ("", "--row-tokens 256")
    )
    assert (short["tokens"], short["flops"]) == (
        full["tokens"] / 4,
        pytest.approx(full["flops"] / 4, rel=0.1),
    )
    assert short["step"] < full["step"]
    with pytest.raises(FinetuneError, match="--row-tokens 0: expected a whole number"):
        ask("--row-tokens 0", unknown)


def test_sampling_is_a_moment_of_the_step_under_every_backend_and_decides_the_verdict():
    small = ["batch.micro_rows=1", "model.activation_checkpointing=true"]
    given, small = "qwen3_0_6b_grpo", ["model.name=Qwen/Qwen3-8B", *small]
    grpo = catalog.resolve(given, small)
    for backend in ("ddp", "fsdp_full_shard", "zero3", "tp"):
        found = ft.plan(grpo, backend, gpus=2, gpu="H100-80")
        (moment,) = (each for each in found.timeline.moments if each.name == "sampling")
        weights = found.source.shape.parameters * 2
        # Every process samples with complete weights, next to its own state.
        assert sum(moment.parts[name] for name in ("weights", "units")) >= 0.99 * weights
    text = ask("--gpu RTX4090 --backend single", grpo)
    assert "DOES NOT FIT" in text
    assert "most in 'sampling'" in text
    most = int(re.search(r"sampling_rows=(\d+) is the most", text)[1])
    assert 0 < most < 64
    for rows, fits in ((most, True), (most + 1, False)):
        changed = catalog.resolve(given, [*small, f"sampling_rows={rows}"])
        assert (ft.plan(changed, "single", gpu="RTX4090").status != "no") == fits


def test_a_step_has_its_sampling_and_no_token_is_faster_than_reading_the_weights():
    grpo = catalog.resolve("qwen3_0_6b_grpo")
    found = ft.plan(grpo, "ddp", gpus=8, gpu="H100-80", rows=7473)
    times, gpu = found.times, found.machine.gpu
    assert times.sampling > 512 * 2 * found.source.shape.parameters / gpu.bandwidth
    assert times.step == pytest.approx(times.sampling + times.scoring + times.training)
    assert found.seconds == found.steps * times.step
    text = found.page()
    assert all(f"\n  {part} " in text for part in ("sampling", "rewards", "training"))
    again = catalog.resolve("qwen3_0_6b_grpo", ["num_iterations=2"])
    other = ft.plan(again, "ddp", gpus=8, gpu="H100-80").times
    assert other.sampling == pytest.approx(times.sampling / 2)


def test_an_evaluation_of_as_many_rows_as_a_step_takes_its_forward_pass():
    """All weights, nothing recomputed: a step is three passes, and a run of ten has two more."""
    plain = ft.plan(recipe(), gpu="H100-80", rows=320)
    made = dataclasses.replace(recipe(), eval_rows=32).with_evaluation(every=5)
    held_out = ft.plan(made, gpu="H100-80", rows=320)
    step = plain.times.step
    assert plain.seconds == 10 * step
    assert held_out.seconds == pytest.approx(10 * step + 2 * step / 3, rel=1e-9)
    assert held_out.evaluation_seconds == pytest.approx(2 * step / 3, rel=1e-9)
    assert "of them for evaluation)" in held_out.page()
