"""The rules of choosing, machines in words, refused layouts, and the page."""

import dataclasses
import itertools
import json
from typing import Any

import pytest
from conftest import problems_of
from planning import ask, record, shape

import finetune as ft
from finetune import catalog
from finetune.cli.plan_on_machine import SHOWN
from finetune.errors import FinetuneError
from finetune.planner.estimate import advice, hardware, memory, timing, totals, wording
from finetune.planner.estimate.adapter_sizes import lora
from finetune.planner.estimate.advice import micro_tokens
from finetune.planner.estimate.fewest_changes import shortest
from finetune.planner.estimate.layout import Layout
from finetune.planner.estimate.predict import model_source, predict
from finetune.planner.estimate.workload import Workload, nf4_bits
from finetune.planner.plan import plan
from finetune.planner.shapes import published


def best(workload: Workload, machine: hardware.Machine) -> advice.Option:
    return advice.rank(advice.options(workload, machine))[0]


EIGHT = hardware.machine("A100-80", 8, link="pcie4")


@pytest.mark.parametrize(
    ("name", "rank", "machine", "backend"),
    [
        ("llama-3.1-8b", 16, EIGHT, "ddp"),
        ("qwen2.5-0.5b", None, EIGHT, "ddp"),
        ("qwen2.5-0.5b", None, hardware.machine("A100-80"), "single"),
        ("llama-3.1-70b", 16, hardware.machine("H100-80", 8), "fsdp_full_shard"),
    ],
)
def test_what_fits_is_not_sharded_and_frozen_weights_that_do_not_are(name, rank, machine, backend):
    adapter = lora(shape(name), rank) if rank else None
    assert best(Workload(shape(name), 4, 2048, adapter=adapter), machine).name == backend


def test_states_that_no_gpu_holds_go_to_the_host_or_nowhere():
    full = Workload(shape("llama-2-13b"), 1, 2048)
    roomy = hardware.machine("A100-80", 2, host_memory=512e9)
    assert best(full, roomy).workload.layout.offload != "none"
    assert advice.rank(advice.options(full, roomy))[0].host <= 512e9
    poor = hardware.machine("A100-80", 2, host_memory=64e9)
    assert {each.workload.layout.device for each in advice.rank(advice.options(full, poor))} <= {
        "nvme"
    }


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    machine, model = hardware.machine("RTX4090"), shape("llama-3.2-1b")
    workload = Workload(model, 1, 1024, adapter=lora(model, 16), checkpointing="full")
    rows = advice.largest_rows(workload, machine)
    found = [dataclasses.replace(workload, rows=count) for count in (rows, rows + 1)]
    assert [advice.option(each, machine).status != "no" for each in found] == [True, False]


def test_the_fewest_changes_end_in_something_that_fits():
    machine = hardware.machine("RTX4090")
    path = shortest(Workload(shape("llama-3.1-8b"), 1, 2048), machine)
    assert len(path) == 1
    assert advice.option(path[-1].workload, machine).status != "no"
    assert shortest(Workload(shape("qwen3-0.6b"), 1, 512), machine) == []


def large(rows: int, name: str = "meta-llama/Llama-3.1-70B", length: int = 4096) -> ft.SFT:
    recipe = ft.SFT(ft.Model(name)).with_data(ft.Data("rows.jsonl", "text"))
    return recipe.with_batch(rows=rows, micro_rows=1, max_length=length)


def ranked(recipe: ft.SFT, machine: str) -> tuple[list[dict[str, Any]], str]:
    """The ranking of all backends, and its reason."""
    found = record(machine, recipe)
    return found["options"], found["reason"]


def rate(option: dict[str, Any]) -> float:
    return option["tokens"] / option["step"]


H100S = "--gpu H100-80 --gpus 64 --nodes 8"


def test_layouts_that_divide_the_model_are_ranked_with_sizes_that_fit_it():
    options, _ = ranked(large(rows=256), H100S)
    names = {each["backend"] for each in options if each["axes"]}
    assert {"tp_fsdp", "pp_tp_fsdp", "sp_fsdp"} <= names
    for each in options:
        sizes = each["axes"]
        # Of 64 heads and 8 key heads, on nodes of 8; of 80 layers and 256 rows.
        assert sizes.get("tensor", 1) * sizes.get("sequence", 1) in (1, 2, 4, 8)
        stages, count = sizes.get("pipeline", 1), each["accumulation"]
        assert 64 % stages == 0
        assert (stages - 1) / (stages - 1 + count) < 0.1


def test_slow_links_carry_no_sums_of_layers():
    options, _ = ranked(large(256, "Qwen/Qwen3-4B", 512), "--gpu A100-80 --gpus 8 --link pcie4")
    assert {axis for each in options for axis in each["axes"]} == {"pipeline"}


def test_a_division_comes_first_where_rows_are_too_few_for_all_gpus():
    """The size and the batch of arXiv:2104.04473, table 1."""
    gpt = {
        "model_type": "llama", "hidden_size": 12288, "intermediate_size": 32768,
        "num_hidden_layers": 96, "num_attention_heads": 96, "num_key_value_heads": 96,
        "vocab_size": 51200, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    recipe = large(rows=1536, length=2048).with_model(ft.Model(config=gpt, tokenizer="x"))
    machine = "--gpu A100-80 --gpus 3072 --nodes 384"
    options, reason = ranked(recipe, machine)
    assert all(each["axes"] for each in options)
    first = options[0]
    assert reason.startswith(f"{first['backend']} (tensor {first['axes']['tensor']}) fits")
    assert reason.endswith("1536 rows a step are too few for 3072 parallel groups")
    # What is printed last is what runs.
    said = ask(machine, recipe).splitlines()[-1].split()
    assert said[:4] == ["in", "full:", "--backend", first["backend"]]
    sizes = " ".join(f"--{axis}={size}" for axis, size in first["axes"].items())
    named = recipe.with_batch(micro_rows=first["micro_rows"])
    held = record(f"{machine} --backend {first['backend']} {sizes}", named)
    assert max(held["prediction"]["memory"]["stages"]) == first["bytes"]


def test_a_division_that_is_twice_as_fast_comes_first_and_others_are_named():
    machine = f"{H100S} --network 50gbe"
    options, reason = ranked(large(rows=256), machine)
    assert options[0]["backend"] == "fsdp_full_shard"
    safe = [each for each in options if each["axes"] and each["status"] == "safe"]
    quickest = max(safe, key=rate)
    sizes = " x ".join(f"{axis} {size}" for axis, size in quickest["axes"].items())
    told = f"{quickest['backend']} ({sizes}), which divides the model, would reach"
    assert told in ask(machine, large(rows=256))
    few = large(rows=64)  # one row of each GPU: weights are gathered for little work
    options, reason = ranked(few, f"{H100S} --network 100gbe/node")
    assert options[0]["axes"]
    assert rate(options[0]) > 1.5 * max(rate(each) for each in options if not each["axes"])
    assert "and is faster:" in reason


def test_experts_are_divided_where_gathering_all_of_them_takes_long():
    mixtral = large(64, "mistralai/Mixtral-8x7B-v0.1", 2048)
    machine = "--gpu H100-80 --gpus 16 --nodes 2 --network 25gbe"
    options, reason = ranked(mixtral, machine)
    assert options[0]["axes"] == {"experts": 8}
    assert reason.startswith("ep_fsdp (experts 8) fits (")
    assert "and is faster:" in reason
    # Each token's copies for two experts go to eight processes and back, and so do gradients.
    found = record(f"{machine} --backend ep_fsdp --experts 8", mixtral)["prediction"]
    sent = {link["axis"]: link["sent"] for link in found["communication"]["links"]}
    steps, tokens, hidden, layers = 4, 2048, 4096, 32
    assert sent["experts"] == steps * layers * 4 * (2 * tokens * hidden * 2) * 7 / 8


def test_what_is_faster_than_the_first_of_the_ranking_is_named_with_the_reason():
    given = "--gpu H100-80 --gpus 16 --nodes 16 --network 25gbe"
    options, _ = ranked(full_recipe(), given)
    first, quickest = options[0], max(options, key=rate)
    assert quickest["backend"].startswith("zero")
    speed = {each["backend"]: rate(each) for each in reversed(options)}
    assert rate(quickest) > 1.05 * speed[first["backend"]]
    text = ask(given, full_recipe())
    assert f"{quickest['backend']} with {quickest['micro_rows']} rows would be faster" in text
    assert f"{first['backend']} reduces them in fp32" in text
    # On NVLink they are as fast.
    assert "in 16 bits" not in ask("--gpu H100-80 --gpus 8", full_recipe())


def test_a_plan_that_fits_does_not_report_more_than_the_card():
    shapes = shape("llama-3.1-8b")
    for name, count, rows in itertools.product(
        ("T4", "RTX4090", "A100-80", "B200"), (1, 2, 8), (1, 4, 16)
    ):
        machine = hardware.machine(name, count)
        layout, scheme = Layout(), "autocast"
        if count > 1:
            layout, scheme = Layout("fsdp", "params", count), "fsdp"
        workload = Workload(
            shapes, rows, 512, adapter=lora(shapes, 16), layout=layout, scheme=scheme
        )
        found = totals.of(memory.timeline(workload), workload, machine)
        status = advice.option(workload, machine).status
        assert status == "no" or found.high <= machine.gpu.memory
        assert status != "safe" or found.process < machine.gpu.memory


def test_an_unknown_gpu_is_refused_with_the_known_ones_and_how_to_describe_one():
    with pytest.raises(FinetuneError) as caught:
        hardware.machine("RTX4900")
    assert "did you mean 'RTX4090'?" in str(caught.value)
    assert "--gpu-memory 48 --tflops 362 --bandwidth 864" in str(caught.value)
    assert all(name in str(caught.value) for name in hardware.GPUS)


def test_links_and_networks_are_known_however_they_are_written():
    for link, network in (("PCIe 4", "100 GbE"), ("pcie-4", "100GBE"), ("PCIE4", "100gbe")):
        found = hardware.machine("H100-80", 16, 2, link, network)
        assert (found.link, found.network, found.fast) == (32e9, 12.5e9, False)
    for link, network in (("NVLink", "IB-400"), ("nvlink4", "ib400")):
        found = hardware.machine("H100-80", 16, 2, link, network)
        assert (found.link, found.network, found.fast) == (450e9, 50e9, True)
    # 3200 Gb/s of a p5 node are shared by its eight GPUs.
    assert hardware.machine("H100-80", 16, 2, network="efa3200").network == 50e9
    assert len(problems_of(hardware.machine, "RTX4090", 7, 2, link="nvlink", network="ib40")) == 3
    fast = hardware.machine("H100-80", 16, 2, network="100gbe")
    assert (fast.link, fast.network, fast.per_node) == (450e9, 12.5e9, 8)
    assert not hardware.machine("A100-80", 8, link="pcie4").fast
    for name, link in (("RTX4090", "nvlink"), ("RTX4090", "nvlink4"), ("H100-80", "nvlinks")):
        with pytest.raises(FinetuneError, match=f"--link {link}"):
            hardware.machine(name, 8, link=link)
    unnamed = hardware.GPU("GPU", 80e9, 900e12, 3e12)
    assert hardware.machine(unnamed, 8, link="nvlink4").link == 450e9


def test_a_gpu_is_known_by_its_full_name_and_its_memory():
    names = {
        "NVIDIA A100-SXM4-80GB": "A100-80", "A100-40GB-PCIE": "A100-40-PCIe",
        "NVIDIA H100 80GB HBM3": "H100-80", "h200-141gb": "H200", "Tesla T4": "T4",
        "Tesla V100-SXM2-16GB": "V100-16", "NVIDIA GeForce RTX 4090": "RTX4090",
        "RTX 4090 24GB": "RTX4090", "NVIDIA RTX A6000": "A6000", "L40S-48": "L40S",
        "AMD Instinct MI300X": "MI300X", "B200-180": "B200", "NVIDIA H100 NVL": "H100-NVL",
        "NVIDIA GH200 480GB": "GH200-96", "NVIDIA RTX 6000 Ada Generation": "RTX6000Ada",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX-PRO-6000", "L40": "L40",
        "NVIDIA GeForce RTX 4070 Ti SUPER": "RTX4070TiSuper", "NVIDIA A10": "A10", "a10g": "A10G",
        "NVIDIA A800 80GB PCIe": "A800-80-PCIe", "NVIDIA B300 SXM6 AC": "B300", "4090": "RTX4090",
        "AMD Radeon RX 7900 XTX": "RX7900XTX", "NVIDIA GB10": "GB10", "Quadro RTX 8000":
        "Quadro-RTX8000", "NVIDIA TITAN RTX": "TITAN-RTX", "NVIDIA GeForce RTX 4090 D": "RTX4090D",
    }  # fmt: skip
    assert {written: hardware.gpu(written).name for written in names} == names
    for other in ("H100-72", "RTX 4090 Ti", "A100-64GB", "RTX 4090 Laptop GPU", "H100 MIG 1g.10gb"):
        with pytest.raises(FinetuneError, match="--gpu-memory 48"):
            hardware.gpu(other)


def test_every_row_of_the_table_is_found_by_its_own_name_and_by_its_drivers():
    for name, row in hardware.GPUS.items():
        assert hardware.gpu(name) is row
        assert hardware.of_driver(f"NVIDIA {name}", row.memory) == row


def test_a_slice_a_laptop_and_an_unknown_card_are_not_the_whole_card():
    whole = hardware.gpu("A100-40")
    part = hardware.of_driver("NVIDIA A100-SXM4-40GB MIG 3g.20gb", whole.memory / 2)
    assert (part.memory, part.bandwidth) == (whole.memory / 2, whole.bandwidth / 2)
    assert (part.flops, part.nvlink) == (pytest.approx(whole.flops * 3 / 7), 0)
    for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 6090"):
        found = hardware.of_driver(name, 17.1e9)
        assert (found.memory, found.name) == (17.1e9, name)
        assert f"{name} is not in the table" in found.note


def test_cards_that_copy_through_the_host_have_half_a_lane_and_two_nvl_cards_a_bridge():
    assert hardware.machine("RTX4090", 2).link == hardware.machine("A10", 2).link / 2
    assert [hardware.machine("H100-NVL", n).link for n in (2, 4)] == [300e9, 64e9]


def test_network_ports_are_counted_per_gpu_or_per_node():
    for network, rate in (("10gbe", 1.25e9), ("10 GbE/node", 1.25e9 / 8), ("efa3200/node", 50e9)):
        assert hardware.machine("H100-80", 16, 2, network=network).network == rate
    with pytest.raises(FinetuneError, match="--network 10gbe/rack: unknown"):
        hardware.machine("H100-80", 16, 2, network="10gbe/rack")
    said = "1.25 GB/s between nodes for each GPU (one port of a whole node: --network 10gbe/node)"
    for more in ("", "--backend fsdp_full_shard"):
        given = f"--gpu H100-80 --gpus 16 --nodes 2 --network 10gbe {more}"
        assert said in ask(given, full_recipe())


def test_words_about_a_machine_without_a_gpu_are_refused(monkeypatch):
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    idle = "of a machine with GPUs, and there is none here; name one: --gpu H100-80"
    told = problems_of(ask, "--network bogus --link pcie4 --nodes 2 --price 1", full_recipe())
    first, second = told
    assert first.startswith("--network bogus: unknown; known are ib100, ")
    assert second == f"--nodes 2, --link pcie4, --network bogus, --price 1.0: {idle}"
    with pytest.raises(FinetuneError, match="--network ib400: of a machine with GPUs"):
        ft.plan(full_recipe(), "single", network="ib400")


def test_a_step_is_never_faster_than_its_parts():
    machine = hardware.machine("A100-80", 8, link="pcie4")
    workload = Workload(shape("llama-2-7b"), 1, 2048, scheme="fsdp",
                        layout=Layout("fsdp", "params", 8))  # fmt: skip
    found = advice.option(workload, machine).times
    assert max(found.compute, found.communication) <= found.step
    assert found.step <= found.compute + found.communication
    work = timing.flops_per_token(shape("llama-2-7b"), 2048)
    assert found.flops == work * 2048


def test_offloaded_weights_travel_over_pcie_in_each_pass():
    machine = hardware.machine("A100-80")
    layout = Layout("deepspeed", "params", 1, 1, "all", "cpu")
    once, twice = (
        Workload(
            shape("llama-2-7b"), 1, 512, scheme="deepspeed", layout=layout, checkpointing="full",
            accumulation=steps,
        )
        for steps in (64, 128)
    )  # fmt: skip
    found, more = (advice.option(each, machine).times for each in (once, twice))
    # 2 bytes a weight in each of two passes; gradients and updates travel once a step.
    lane = machine.gpu.pcie * timing.PCIE_EFFICIENCY
    each = 4 * once.shape.parameters / lane
    assert more.offload - found.offload == pytest.approx(64 * each, rel=1e-3)
    assert found.bound == "offload"
    shared = dataclasses.replace(once, layout=Layout("deepspeed", "params", 2, 1, "all", "cpu"))
    half = advice.option(shared, hardware.machine("A100-80", 2)).times
    assert half.offload < found.offload
    assert advice.option(Workload(shape("llama-2-7b"), 1, 512), machine).times.offload == 0


def full_recipe(rows: int = 64) -> ft.SFT:
    model = ft.Model("Qwen/Qwen3-8B", activation_checkpointing=True)
    recipe = ft.SFT(model, max_steps=100).with_data(ft.Data("rows.jsonl", "text"))
    return recipe.with_batch(rows=rows, micro_rows=1, max_length=2048)


def test_a_prediction_has_the_verdict_first_and_a_bar_per_moment():
    settled = plan(full_recipe(), "fsdp_full_shard", 8)
    prediction = predict(settled, hardware.machine("H100-80", 8, price=2.5))
    text = wording.page(prediction)
    assert text.startswith("fsdp_full_shard on 8 x H100-80: fits")
    assert text.count("GB") > 5
    assert [each.name for each in prediction.timeline.moments if each.name not in text] == []
    assert prediction.cost == prediction.gpu_hours * 2.5
    record = json.loads(json.dumps(prediction.summary()))
    assert record["memory"]["allocated"] == prediction.timeline.peak.total
    assert record["time"]["seconds"] == 100 * prediction.times.step
    with pytest.raises(FinetuneError, match="--gpus 4: the plan runs 8"):
        predict(settled, hardware.machine("H100-80", 4))


def test_a_model_without_a_config_is_refused_with_the_searched_places(tmp_path):
    nowhere = {str(tmp_path / "nothing"): "no such folder", "nobody/nothing": "hub cache"}
    for name, told in nowhere.items():
        with pytest.raises(FinetuneError, match=told):
            model_source(ft.SFT(ft.Model(name)))
    folder = tmp_path / "model"
    folder.mkdir()
    config = published.find("llama-2-7b")
    (folder / "config.json").write_text(json.dumps(config))
    found = model_source(ft.SFT(ft.Model(str(folder))))
    assert (found.shape.parameters, found.where) == (6_738_415_616, str(folder / "config.json"))


def test_the_command_ranks_backends_with_reasons_and_names_what_it_left_out():
    options, reason = ranked(full_recipe(), "--gpu H100-80 --gpus 8")
    assert "ddp" not in {each["backend"] for each in options}  # 20 bytes a parameter: twice a GPU
    assert options[0]["status"] == "safe"
    assert "fits" in reason
    given = "--gpu H100-80 --gpus 8"
    text = ask(f"{given} --backend fsdp_full_shard", full_recipe())
    assert text.startswith("fsdp_full_shard on 8 x H100-80: fits")
    assert f"and {len(options) - SHOWN} that are slower or less simple" in ask(given, full_recipe())


def test_the_words_for_what_is_ranked_first_plan_just_that():
    recipe = full_recipe(rows=8).with_qlora()
    model = dataclasses.replace(recipe.model, activation_checkpointing=True)
    recipe = recipe.with_model(model)
    given = "--gpu RTX4090 --rows 1000 --price 0.5"
    ranked = ask(given, recipe).splitlines()
    best = ranked[3].split()
    whole, in_full = ranked[-2:]
    assert whole.startswith("whole run: ")
    assert whole.endswith("at the given price")
    assert in_full.endswith("model.activation_checkpointing=false")
    _, _, _, backend, *changes = in_full.split()
    text = ask(f"{given} --backend {backend}", catalog.override(recipe, changes))
    assert whole in text.splitlines()
    assert f"memory   {best[3]} GB of" in text
    assert f"{best[5]} tokens/s" in text


def test_the_command_describes_a_gpu_by_numbers():
    given = "--gpu-memory 48 --tflops 362 --bandwidth 864"
    text = ask(f"{given} --backend single --fit", full_recipe(rows=8).with_qlora())
    assert "largest micro-batch that fits" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--gpu-memory 48", "--tflops, --bandwidth"),
        ("--gpu H100-80 --host-ram -1", "above 0"),
        *(
            (f"--gpu H100-80 {flag} 0", f"{flag} 0: expected a whole number of at least 1")
            for flag in ("--gpus", "--rows", "--nodes")
        ),
        *(
            (
                f"--gpu-memory 48 --tflops {number} --bandwidth 864",
                f"--tflops {number}: expected a number above 0",
            )
            for number in ("nan", "inf")
        ),
    ],
)
def test_counts_below_one_and_invalid_numbers_are_refused(words, told):
    with pytest.raises(FinetuneError, match=told):
        ask(words, full_recipe())


def test_the_machines_own_gpus_take_every_word_about_nodes(monkeypatch):
    monkeypatch.setattr(hardware, "installed", lambda: [hardware.GPUS["H100-80"]] * 8)
    own = "--gpus 64 --nodes 8 --network 10gbe --price 2 --rows 640 --host-ram 512"
    own += " --backend fsdp_full_shard"
    found = record(own, full_recipe())["prediction"]
    assert found == record(f"--gpu H100-80 {own}", full_recipe())["prediction"]
    assert (found["machine"]["network"], found["machine"]["host_memory"]) == (1.25e9, 512e9)


def test_hybrid_sharding_has_shards_within_a_node_and_copies_over_nodes():
    shared, nodes = "--gpu H100-80 --backend", "--gpus 16 --nodes 2"
    hybrid = record(f"{shared} hsdp {nodes}", full_recipe())
    within = record(f"{shared} fsdp_full_shard --gpus 8", full_recipe())["prediction"]
    found = hybrid["prediction"]
    assert (hybrid["backend"], hybrid["processes"]) == ("hsdp", 16)
    assert hybrid["mesh"] == {"replicate": 2, "shard": 8}
    # A copy over 8 GPUs takes in each node what one node of 8 takes.
    assert found["memory"]["moments"] == within["memory"]["moments"]
    # Its shard of the fp32 gradients is summed over two nodes once a step, 2 x 1/2 x 4 bytes.
    assert found["communication"]["between"] == pytest.approx(4 * found["model"]["parameters"] / 8)
    text = ask(f"{shared} hsdp_shard_grad_op {nodes}", full_recipe())
    assert text.startswith("hsdp_shard_grad_op on 16 x H100-80 in 2 nodes: fits")
    assert "in 2 copies over 8 processes each" in text
    four = record(f"{shared} hsdp {nodes} --shard-size 4", full_recipe())
    assert four["mesh"] == {"replicate": 4, "shard": 4}
    for backend, size, why in (
        ("hsdp", 16, "would cross nodes"),
        ("hsdp", 3, "do not divide into copies of 3"),
        ("fsdp_full_shard", 8, "fsdp_full_shard keeps a single copy of the model"),
    ):
        with pytest.raises(FinetuneError, match=why):
            ask(f"{shared} {backend} {nodes} --shard-size {size}", full_recipe())


@pytest.mark.parametrize(
    ("author", "said"),
    [
        ("somebody", "somebody/Llama-3.1-8B is assumed to have that of llama-3.1-8b"),
        ("meta-llama", "the table of published shapes"),
    ],
)
def test_a_shape_taken_from_a_name_is_marked_as_such(monkeypatch, author, said):
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    recipe = full_recipe().with_model(ft.Model(f"{author}/Llama-3.1-8B"))
    for more in (
        "",
        H100S,
        f"{H100S} --backend fsdp_full_shard",
        f"{H100S} --tensor 8",
    ):
        for text in (ask(more, recipe), ask(f"{more} --json", recipe)):
            assert said in text
            assert ("is assumed to have" in text) == (author == "somebody")


def test_four_bits_are_proposed_before_a_disk():
    model = ft.Model("meta-llama/Llama-2-13b-hf", activation_checkpointing=True)
    recipe = full_recipe().with_model(model).with_lora()
    given = "--gpu RTX4090 --host-ram 32"
    text = ask(given, recipe)
    assert text.startswith("zero3_nvme fits")
    assert "before offloading to disk, try these changes, which fit without offload\n  -" in text
    assert "frozen weights in 4 bits: model.quantization=nf4 (fits)" in text
    found = record(given, recipe)
    assert {each["backend"] for each in found["options"]} == {"zero3_nvme"}
    (change,) = found["changes"]
    assert (change["setting"], change["fits"]) == ("model.quantization=nf4", True)
    # 2 bytes of each weight of a layer become those of NF4; what one matrix unpacks to is scratch.
    llama = shape("llama-2-13b")
    weights = llama.layers * llama.linear_weights
    assert change["bytes"] == pytest.approx((2 - nf4_bits() / 8) * weights, rel=0.02)
    # With host memory for offload there is nothing to change.
    assert record("--gpu RTX4090 --host-ram 256", recipe)["changes"] == []


def test_missing_host_memory_is_reported_when_nothing_fits():
    recipe = full_recipe().with_model(ft.Model("meta-llama/Llama-3.1-70B"))
    first = ask("--gpu A100-80 --gpus 8 --host-ram 128", recipe).splitlines()[0]
    assert "nothing fits on 8 x A100-80: the smallest is zero3_nvme" in first
    assert "of host memory in a node of 128.0 GB" in first


def test_a_plan_proposes_wider_micro_batches_where_memory_holds_them():
    recipe = large(16, "meta-llama/Llama-3.1-8B", 1024).with_lora(r=16)
    a100 = hardware.machine("A100-80")

    def on_a100(recipe: ft.SFT) -> ft.Prediction:
        return predict(plan(recipe, "single"), a100)

    found = on_a100(recipe)
    wider = micro_tokens(found.plan, found.workload, a100)
    rows = wider // 1024
    fits = [
        on_a100(recipe.with_batch(micro_tokens=count * 1024)).status for count in (rows, rows + 1)
    ]
    assert fits[0] == "safe"
    assert rows == 16 or fits[1] != "safe"
    assert f"  wider    batch.micro_tokens={wider} fits too" in wording.verdict(found)
    for other in ({"micro_tokens": 2048}, {"rows": 1}, {"micro_rows": 16}):
        settled = on_a100(recipe.with_batch(**other))
        assert micro_tokens(settled.plan, settled.workload, a100) is None
        assert "wider" not in wording.verdict(settled)
    full = on_a100(recipe.with_full_weights())
    assert full.status == "no"
    assert "wider" not in wording.verdict(full)
