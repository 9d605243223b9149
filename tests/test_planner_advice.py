"""The rules of choosing, machines in words, refused layouts, and the page."""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import finetune as ft
from finetune import catalog
from finetune.errors import FinetuneError
from finetune.planner import (
    advice,
    changes,
    command,
    hardware,
    page,
    parallelism,
    published,
    timing,
)
from finetune.planner.architecture import Architecture
from finetune.planner.families import read
from finetune.planner.layout import Layout
from finetune.planner.plan import plan
from finetune.planner.predict import model_source, predict
from finetune.planner.workload import Workload, lora

ROOT = Path(__file__).parent.parent


def shape(name: str) -> Architecture:
    config = published.find(name)
    assert config is not None
    return read(config)


def best(workload: Workload, machine: hardware.Machine) -> advice.Option:
    return advice.rank(advice.options(workload, machine))[0]


def test_what_fits_is_not_sharded() -> None:
    eight = hardware.machine("A100-80", 8, link="pcie4")
    adapter = Workload(shape("llama-3.1-8b"), 1, 2048, adapter=lora(shape("llama-3.1-8b"), 16))
    assert best(adapter, eight).name == "ddp"
    assert best(Workload(shape("qwen2.5-0.5b"), 1, 2048), eight).name == "ddp"
    one = hardware.machine("A100-80")
    assert best(Workload(shape("qwen2.5-0.5b"), 1, 2048), one).name == "single"


def test_frozen_weights_that_do_not_fit_are_sharded_all_the_same() -> None:
    large = shape("llama-3.1-70b")
    workload = Workload(large, 1, 2048, adapter=lora(large, 16))
    assert best(workload, hardware.machine("H100-80", 8)).name == "fsdp_full_shard"


def test_states_that_no_gpu_holds_go_to_the_host_or_nowhere() -> None:
    full = Workload(shape("llama-2-13b"), 1, 2048)
    roomy = hardware.machine("A100-80", 2, host_memory=512e9)
    assert best(full, roomy).workload.layout.offload != "none"
    assert advice.rank(advice.options(full, roomy))[0].host <= 512e9
    poor = hardware.machine("A100-80", 2, host_memory=64e9)
    assert {each.workload.layout.device for each in advice.rank(advice.options(full, poor))} <= {
        "nvme"
    }


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    machine = hardware.machine("RTX4090")
    model = shape("llama-3.2-1b")
    workload = Workload(model, 1, 1024, adapter=lora(model, 16), checkpointing="full")
    rows = advice.largest_rows(workload, machine)
    fits = [
        advice.option(Workload(model, n, 1024, adapter=workload.adapter, checkpointing="full"),
                      machine).status != "no"
        for n in (rows, rows + 1)
    ]  # fmt: skip
    assert fits == [True, False]


def test_the_fewest_changes_end_in_something_that_fits() -> None:
    machine = hardware.machine("RTX4090")
    path = changes.shortest(Workload(shape("llama-3.1-8b"), 1, 2048), machine)
    assert path is not None
    assert len(path) == 1
    assert advice.option(path[-1].workload, machine).status != "no"
    assert changes.shortest(Workload(shape("qwen3-0.6b"), 1, 512), machine) == []


def test_tensor_parallelism_is_refused_with_every_reason() -> None:
    with pytest.raises(FinetuneError) as caught:
        parallelism.check(parallelism.Grid(16, 100, 2), shape("llama-30b"), 16, 8, fast=False)
    text = "\n".join(caught.value.problems)
    for reason in ("16 x 100 x 2 = 3200", "52 heads", "a node has 8", "NVLink", "60 layers"):
        assert reason in text


def test_pipelines_wait_as_their_paper_says() -> None:
    assert parallelism.bubble(4, 1) == 0.75
    assert parallelism.bubble(8, 32, 4) == 7 / (4 * 32 + 7)


def test_an_unknown_gpu_lists_the_known_and_says_how_to_describe_one() -> None:
    with pytest.raises(FinetuneError) as caught:
        hardware.machine("RTX4900")
    assert "did you mean 'RTX4090'?" in str(caught.value)
    assert "--gpu-memory 48 --tflops 362 --bandwidth 864" in str(caught.value)
    assert all(name in str(caught.value) for name in hardware.GPUS)


def test_links_and_networks_are_told_apart_and_spelt() -> None:
    with pytest.raises(FinetuneError) as caught:
        hardware.machine("RTX4090", 7, 2, link="nvlink", network="ib40")
    assert len(caught.value.problems) == 3
    fast = hardware.machine("H100-80", 16, 2, network="100gbe")
    assert (fast.link, fast.network, fast.per_node) == (450e9, 12.5e9, 8)
    assert not hardware.machine("A100-80", 8, link="pcie4").fast


def test_a_step_is_never_faster_than_its_parts() -> None:
    machine = hardware.machine("A100-80", 8, link="pcie4")
    workload = Workload(shape("llama-2-7b"), 1, 2048, scheme="fsdp",
                        layout=Layout("fsdp", "params", 8))  # fmt: skip
    found = advice.option(workload, machine).times
    assert max(found.compute, found.communication) <= found.step
    assert found.step <= found.compute + found.communication
    work = timing.flops_per_token(shape("llama-2-7b"), 2048)
    assert found.flops == work * 2048


def test_offload_breaks_even_where_the_formula_says() -> None:
    assert timing.offload_break_even(989e12, 0.4, 50e9) == pytest.approx(3956)


def full_recipe(rows: int = 64) -> ft.SFT:
    model = ft.Model("Qwen/Qwen3-8B", activation_checkpointing=True)
    recipe = ft.SFT(model, max_steps=100).with_data(ft.Data("rows.jsonl", "text"))
    return recipe.with_batch(rows=rows, micro_rows=1, max_length=2048)


def test_a_prediction_has_the_verdict_first_and_a_bar_per_moment() -> None:
    machine = hardware.machine("H100-80", 8, price=2.5)
    prediction = predict(plan(full_recipe(), "fsdp_full_shard", 8), machine)
    text = page.page(prediction)
    assert text.startswith("fsdp_full_shard on 8 x H100-80: fits")
    assert text.count("GB") > 5
    for moment in prediction.timeline.moments:
        assert moment.name in text
    assert prediction.gpu_hours is not None
    assert prediction.cost == prediction.gpu_hours * 2.5
    record = json.loads(json.dumps(prediction.summary()))
    assert record["memory"]["allocated"] == prediction.timeline.peak.total
    assert record["time"]["seconds"] == 100 * prediction.times.step


def test_a_machine_of_another_size_than_the_plan_is_refused() -> None:
    with pytest.raises(FinetuneError, match="--gpus 4: the plan runs 8"):
        predict(plan(full_recipe(), "fsdp_full_shard", 8), hardware.machine("H100-80", 4))


def test_a_model_without_a_config_says_where_one_was_looked_for(tmp_path: Path) -> None:
    nowhere = {str(tmp_path / "nothing"): "no such folder", "nobody/nothing": "hub cache"}
    for name, told in nowhere.items():
        with pytest.raises(FinetuneError, match=told):
            model_source(ft.SFT(ft.Model(name)))
    folder = tmp_path / "model"
    folder.mkdir()
    config = published.find("llama-2-7b")
    (folder / "config.json").write_text(json.dumps(config))
    found = model_source(ft.SFT(ft.Model(str(folder))))
    assert found.shape.parameters == 6_738_415_616
    assert found.where == str(folder / "config.json")


def words(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--backend", "--precision"):
        parser.add_argument(name)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--json", action="store_true")
    command.add_arguments(parser)
    return parser.parse_args(given)


def test_the_command_ranks_backends_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.perf_counter()
    assert command.run(words("--gpu", "H100-80", "--gpus", "8", "--json"), full_recipe()) == 0
    assert time.perf_counter() - begun < 3
    found = json.loads(capsys.readouterr().out)
    names = [option["backend"] for option in found["options"]]
    assert "ddp" not in names  # 20 bytes a parameter are twice a GPU
    assert found["options"][0]["status"] == "safe"
    assert "fits" in found["reason"]


def test_the_words_for_what_is_ranked_first_plan_just_that(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = full_recipe(rows=8).with_qlora()
    model = dataclasses.replace(recipe.model, activation_checkpointing=True)
    recipe = dataclasses.replace(recipe, model=model)
    given = ("--gpu", "RTX4090", "--rows", "1000", "--price", "0.5")
    assert command.run(words(*given), recipe) == 0
    ranked = capsys.readouterr().out.splitlines()
    best = ranked[3].split()
    whole, in_full = ranked[-2:]
    assert whole.startswith("whole run: ")
    assert whole.endswith("at the given price")
    assert in_full.endswith("model.activation_checkpointing=false")
    _, _, _, backend, *changes = in_full.split()
    changed = catalog.override(recipe, changes)
    assert command.run(words(*given, "--backend", backend), changed) == 0
    text = capsys.readouterr().out
    assert whole in text.splitlines()
    assert f"memory   {best[3]} GB of" in text
    assert f"{best[5]} tokens/s" in text


def test_the_command_describes_a_gpu_by_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--gpu-memory", "48", "--tflops", "362", "--bandwidth", "864")
    recipe = full_recipe(rows=8).with_qlora()
    assert command.run(words(*given, "--backend", "single", "--fit"), recipe) == 0
    text = capsys.readouterr().out
    assert "largest micro-batch that fits" in text
    with pytest.raises(FinetuneError, match="--tflops, --bandwidth"):
        command.run(words("--gpu-memory", "48"), recipe)
    with pytest.raises(FinetuneError, match="above 0"):
        command.run(words("--gpu", "H100-80", "--host-ram", "-1"), recipe)


def test_planning_needs_no_torch() -> None:
    script = (
        "import sys; from finetune.planner import command, predict, page, changes; "
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
