"""What a machine's parts can do: rates by type, links by number, and what runs nothing here."""

import argparse

import pytest

import finetune as ft
from finetune.errors import FinetuneError
from finetune.planner import arguments, command, hardware, timing
from finetune.planner.families import read
from finetune.planner.workload import Workload, lora

CONFIG = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "intermediate_size": 2816, "vocab_size": 8192,
}  # fmt: skip


def words(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--backend", "--precision"):
        parser.add_argument(name)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--json", action="store_true")
    arguments.add_arguments(parser)
    return parser.parse_args(given)


def recipe(**batch: int) -> ft.SFT:
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
def test_a_gpu_multiplies_at_the_rate_of_its_data_sheet_in_each_type(
    name: str, fp32: float, bf16: float
) -> None:
    machine = hardware.machine(name)
    shape = read(CONFIG)
    for scheme, rate in (("fp32", fp32), ("autocast", bf16)):
        workload = Workload(shape, 1, 512, scheme=scheme, adapter=lora(shape, 8))
        assert timing.attained(machine, workload) == pytest.approx(rate * machine.gpu.mfu)


@pytest.mark.parametrize("name", ["T4", "V100"])
def test_a_gpu_without_bf16_is_timed_in_fp32_and_says_what_its_fast_type_is(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ((), ("--backend", "single")):
        assert command.run(words("--gpu", name, *more), recipe().with_lora()) == 0
        text = capsys.readouterr().out
        assert f"{name} has no bf16 units: PyTorch computes it in fp32" in text
        assert "This toolkit has no fp16" in text
    given = ("--gpu", name, "--backend", "single", "--precision", "fp32")
    assert command.run(words(*given), recipe().with_lora()) == 0
    assert "bf16 units" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["RTX3090", "A6000"])
def test_a_bridge_joins_two_cards_and_no_more(name: str) -> None:
    two, four = hardware.machine(name, 2), hardware.machine(name, 4)
    assert (two.link, two.fast) == (56e9, True)
    assert (four.link, four.fast) == (32e9, False)
    assert hardware.machine(name, 4, nodes=2).fast  # two in each node
    with pytest.raises(FinetuneError, match=f"a bridge joins two {name}, and a node has 4"):
        hardware.machine(name, 4, link="nvlink")
    assert hardware.machine("A100-80", 8).fast


def test_a_process_drives_one_die_of_an_mi250x(capsys: pytest.CaptureFixture[str]) -> None:
    found = hardware.gpu("AMD Instinct MI250X")
    assert (found.memory, found.flops) == (64 * 2**30 // 10**8 * 10**8, 191.5e12)
    for more in ((), ("--backend", "fsdp_full_shard")):
        assert command.run(words("--gpu", "MI250X", "--gpus", "4", *more), recipe()) == 0
        assert "--gpus counts devices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Gaudi3", "Intel Gaudi"), ("HPU", "Intel Gaudi"), ("TPU v4", "a TPU"), ("v5e-8", "a TPU"),
        ("Apple M3 Max", "Apple silicon"), ("M1", "Apple silicon"), ("MPS", "Apple silicon"),
        ("AWS Trainium", "AWS Trainium or Inferentia"), ("Intel Arc A770", "an Intel GPU"),
        ("Ascend 910B", "Huawei Ascend"),
    ],
)  # fmt: skip
def test_an_accelerator_that_runs_nothing_here_is_not_planned_for(name: str, kind: str) -> None:
    with pytest.raises(FinetuneError) as caught:
        hardware.machine(name)
    (problem,) = caught.value.problems
    assert problem == (
        f"--gpu {name}: {kind} does not run this toolkit, which trains on GPUs of CUDA and ROCm "
        "and on CPUs; name one of those, such as A100-80 or MI300X"
    )
