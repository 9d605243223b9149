"""The switch is real: each backend shards what it says and changes no loss."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    FP32,
    Finished,
    accelerate_launch,
    apart,
    assert_same_losses,
    cut_off,
    equal_state,
    largest,
    launch,
    losses,
    read,
    slow,
    write_recipe,
)
from safetensors import safe_open

import finetune as ft
from finetune import catalog
from finetune.distributed.deepspeed_nvme import require_room
from finetune.launchers.accelerate import free_port
from finetune.planner import plan
from finetune.planner.estimate import predict
from finetune.planner.estimate.sharding import nvme

__all__ = ["largest"]

BACKENDS = ["single", "ddp", "fsdp_full_shard", "zero2", "zero3"]
"""One of each engine and stage; `make prove` shows every pair of a backend and a kind."""


LORA: dict[str, Any] = {"adapter": {"r": 8, "dropout": 0.1}, "optim": {"lr": 5e-3}}
ADDED = ["<x>", " a b"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_rank_holds_what_the_backend_promises(run_of, backend):
    realised = read(run_of(backend).realised)
    total = realised["parameters"]
    norms = 5 * 64  # vectors below ZeRO-3's persistence threshold of 10 x hidden size stay whole
    half = total // 2
    whole = {"parameters": total, "gradients": total, "optimizer": total}
    sharded = dict.fromkeys(whole, half)
    zero12 = {"parameters": total, "gradients": half, "optimizer": half}
    zero3 = sharded | {"parameters": (total - norms) // 2 + norms}
    expected = {
        "single": [whole],
        "ddp": [whole, whole],
        "fsdp_full_shard": [sharded, sharded],
        "zero2": [zero12, zero12],
        "zero3": [zero3, zero3],
    }[backend]
    assert total % 2 == 0
    assert realised["ranks"] == expected


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_losses_are_those_of_one_process(run_of, backend):
    """There of padded rows."""
    assert_same_losses(run_of(batch={"padding_free": False}), run_of(backend))


@pytest.mark.slow
def test_added_tokens_are_trained_as_by_one_process(run_of):
    adapter = {"r": 4, "trainable_token_indices": ADDED}
    assert_same_losses(
        *(
            run_of(backend, model={"add_tokens": ADDED}, adapter=adapter)
            for backend in ("single", "fsdp_full_shard")
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp_full_shard", "zero3"])
def test_an_adapter_is_trained_further_as_by_one_process(run_of, backend):
    first = run_of(**LORA)
    alone, several = (
        run_of(each, model={"adapter": str(first.root)}) for each in ("single", backend)
    )
    assert losses(alone)[0] < losses(first)[0] - 0.01
    assert apart(several, alone) < FP32


def test_losses_of_an_adapter_are_those_of_one_process(run_of):
    """Processes drop the elements that one process drops."""
    assert_same_losses(run_of(**LORA), run_of("ddp", **LORA))


@pytest.fixture
def machines(tiny, finetune, tmp_path):
    """A launch over two machines, rank by rank in the folders given."""
    recipe, port = write_recipe(tmp_path / "lora.json", tiny.fields(**LORA)), free_port()

    def machine(rank: int, folder: Path) -> Finished:
        return finetune(
            "launch", recipe, "--backend", "zero2", "--processes", "2", "--precision", "fp32",
            "--output", folder, "--num_machines", "2", "--machine_rank", rank,
            "--main_process_ip", "127.0.0.1", "--main_process_port", port,
        )  # fmt: skip

    def launched(*folders: Path) -> list[Finished]:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(machine, range(2), folders))

    return launched


@pytest.mark.slow
def test_machines_that_do_not_share_the_run_directory_are_told_before_the_first_step(
    machines, tmp_path
):
    done = machines(tmp_path / "here", tmp_path / "there")
    host = socket.gethostname()
    for finished, name in zip(done, ("here", "there"), strict=True):
        assert finished.status == 2
        assert (
            f"{tmp_path / name}: rank 1 on {host} cannot see what rank 0 on {host} writes there; "
            "choose an --output on a disk that all hosts share"
        ) in finished.output
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.slow
def test_two_machines_train_as_one(run_of, machines, tmp_path):
    """DeepSpeed's own launcher would start the second one by itself."""
    done = machines(tmp_path / "run", tmp_path / "run")
    assert [each.status for each in done] == [0, 0], done[0].output + done[1].output
    assert "Finished" in done[0].stdout
    assert "Finished" not in done[1].output
    assert apart(run_of(**LORA), ft.Run(tmp_path / "run")) < FP32


@pytest.mark.parametrize("backend", ["fsdp_full_shard", "zero2"])
def test_resuming_continues_bit_for_bit(run_of, finetune, tmp_path, backend):
    straight = run_of(backend)
    resumed = cut_off(straight, tmp_path / "run", step=3)
    launch(finetune, straight.recipe, backend, resumed.root, "--resume")
    assert losses(resumed) == losses(straight)
    assert equal_state(straight.checkpoint(6), resumed.checkpoint(6))
    assert not resumed.loss_plot.exists()  # --no-plot reaches the processes


@pytest.mark.parametrize("backend", ["fsdp_full_shard", slow("fsdp_shard_grad_op")])
def test_a_checkpoint_after_an_evaluation_has_fp32_shards_and_every_moment(run_of, backend):
    steps = {"max_steps": 1, "evaluation": {"every": 1}, "saving": {"every": 1}}
    checkpoint = run_of(backend, "--precision", "bf16", **steps).checkpoint(1)
    shapes = read(checkpoint / "manifest.json")["shapes"]
    held: dict[tuple[str, str], int] = {}
    for path in (checkpoint / "state").iterdir():
        with safe_open(path, "pt") as file:
            for key in list(file.keys()):
                name, kind, _ = key.split("|")
                part = file.get_slice(key)
                assert part.get_dtype() == "F32"
                held[name, kind] = held.get((name, kind), 0) + torch.Size(part.get_shape()).numel()
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    assert held == {(n, k): torch.Size(s).numel() for n, s in shapes.items() for k in kinds}


CHANGED = """
from finetune.cli.main import run
from finetune.distributed.base import Engine

prepare = Engine.prepare

def prepare_another(self, model, optimizers):
    state = self.accelerator.state
    {change}
    prepare(self, model, optimizers)

Engine.prepare = prepare_another
run()
"""

RESHARD = (
    "error: reshard_after_forward of model.layers.{}: the plan has True, Accelerate built False"
)


@pytest.mark.parametrize(
    ("backend", "change", "told"),
    [
        (
            "fsdp_full_shard",
            "state.fsdp_plugin.reshard_after_forward = False",
            f"{RESHARD.format(0)}\n{RESHARD.format(1)}\n",
        ),
        (
            "zero2",
            "state.deepspeed_plugin.deepspeed_config['zero_optimization']['stage'] = 1",
            "error: shard: the plan has grads, Accelerate built optimizer\n",
        ),
    ],
)
def test_an_engine_that_is_not_what_the_plan_says_is_refused(tiny, tmp_path, backend, change, told):
    script = tmp_path / "train.py"
    script.write_text(CHANGED.format(change=change))
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=1))
    words = ("--num_processes", "2", script, "train", recipe, "--output", tmp_path / "run")
    done = accelerate_launch(backend, tmp_path, *words)
    assert done.status != 0
    assert told in done.stderr
    assert ft.Run(tmp_path / "run").steps() == []


def test_a_disk_that_is_too_small_is_refused_before_anything_is_loaded(tmp_path):
    settled = plan(catalog.resolve("llama3_3_70b_full"), "zero3_nvme", 8)
    with pytest.raises(ft.FinetuneError) as told:
        require_room(settled, tmp_path / "offload", 8 * 100)
    assert "GB free, but 800 processes offload 126996.4 GB; name" in str(told.value)
    (tmp_path / "file").touch()
    with pytest.raises(ft.FinetuneError, match=r"--nvme-path .*file: File exists"):
        require_room(settled, tmp_path / "file", 8)
    small = plan(catalog.resolve("smollm2_135m_full"), "zero3_nvme", 2)
    require_room(small, tmp_path / "offload", 2)


@pytest.mark.slow
def test_a_disk_holds_what_zero_infinity_offloads(tiny, train, finetune, tmp_path):
    """Tensors of 1 MiB and more really go to the disk, and come back after a resume."""
    if not Path("/usr/include/libaio.h").exists():
        pytest.skip("libaio-dev is not installed")
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
    model = tiny.other(tmp_path / "model", "llama", num_key_value_heads=8, **sizes)
    sections = {"model": {"name": str(model)}, "max_steps": 4, "saving": {"every": 2}}
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(**sections))
    alone, offloaded = train("single", **sections), ft.Run(tmp_path / "nvme")
    # DeepSpeed compiles an operator first: two minutes of a core, which others may use too.
    launch(finetune, recipe, "zero3_nvme", offloaded.root, seconds=2400)
    # DeepSpeed steps each piece with another kernel than torch's; four steps apart by 2e-5.
    assert apart(alone, offloaded) < 5e-5
    realised = read(offloaded.realised)
    assert realised["ranks"][0]["optimizer"] < realised["parameters"] / 100
    swapped = sum(file.stat().st_size for file in (offloaded.root / "offload").rglob("*.swp"))
    settled = plan(catalog.load(recipe), "zero3_nvme", 2, "fp32")
    workload = predict.workload_of(settled, predict.model_source(settled.recipe).shape)
    assert swapped == pytest.approx(2 * nvme.Swapped(workload).disk, rel=0.01)
    resumed = cut_off(offloaded, tmp_path / "resumed", step=3)  # the best, which retention kept
    launch(finetune, recipe, "zero3_nvme", resumed.root, "--resume")
    assert apart(resumed, offloaded) < 5e-5
