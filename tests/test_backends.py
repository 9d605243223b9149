"""The switch is real: each backend shards what it says and changes no loss."""

import json
import shutil
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    FP32,
    ROOT,
    Finetune,
    Finished,
    Tiny,
    equal_state,
    largest,
    launch,
    losses,
    run_command,
    warm_python,
    write_recipe,
)
from safetensors import safe_open

from finetune import catalog
from finetune.distributed.deepspeed_nvme import require_room
from finetune.errors import FinetuneError
from finetune.launchers.accelerate import free_port
from finetune.planner import plan
from finetune.planner.estimate import predict
from finetune.planner.estimate.sharding import nvme
from finetune.runs.run import Run

BACKENDS = [
    "single", "ddp",
    "fsdp_full_shard", "fsdp_full_shard_offload",
    "fsdp_shard_grad_op", "fsdp_shard_grad_op_offload",
    "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload",
]  # fmt: skip
SEVERAL = BACKENDS[1:]
EVERYDAY = ("single", "ddp", "fsdp_full_shard", "zero2", "zero3")
"""Backends of the tests that run every day; `make prove` shows every pair of them and a kind."""

Trained = Callable[[str, str], Run]


def now_and_then(backends: Sequence[str]) -> list[Any]:
    """Backends, those that are not everyday ones marked slow."""
    return [
        each if each in EVERYDAY else pytest.param(each, marks=pytest.mark.slow)
        for each in backends
    ]


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "padded": {"batch": {"padding_free": False}},
    "lora": {"adapter": {"r": 8, "dropout": 0.1}, "optim": {"lr": 5e-3}},
    "nf4": {"adapter": {"r": 8}, "model": {"quantization": "nf4"}, "optim": {"lr": 5e-3}},
    "added": {
        "model": {"add_tokens": ["<x>", " a b"]},
        "adapter": {"r": 4, "trainable_token_indices": ["<x>", " a b"]},
    },
}


@pytest.fixture(scope="session")
def trained(tiny: Tiny, finetune: Finetune, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run of a kind of recipe on a backend, started once: six steps, saved every three."""
    root = tmp_path_factory.mktemp("runs")

    def run(kind: str, backend: str) -> Run:
        place = root / kind / backend
        if not place.exists():
            sections = KINDS[kind] | {
                "model": {"name": str(tiny.model)} | KINDS[kind].get("model", {})
            }
            recipe = write_recipe(root / f"{kind}.json", tiny.fields(**sections))
            launch(finetune, recipe, backend, place)
        return Run(place)

    return run


@pytest.mark.parametrize("backend", now_and_then(BACKENDS))
def test_each_rank_holds_what_the_backend_promises(trained: Trained, backend: str) -> None:
    realised = json.loads(trained("full", backend).realised.read_text())
    total = realised["parameters"]
    norms = 5 * 64  # vectors below ZeRO-3's persistence threshold of 10 x hidden size stay whole
    half = total // 2
    whole = {"parameters": total, "gradients": total, "optimizer": total}
    sharded = dict.fromkeys(whole, half)
    zero12 = {"parameters": total, "gradients": half, "optimizer": half}
    zero3 = sharded | {"parameters": (total - norms) // 2 + norms}
    family = backend.removesuffix("_offload")
    expected = {
        "single": [whole],
        "ddp": [whole, whole],
        "fsdp_full_shard": [sharded, sharded],
        "fsdp_shard_grad_op": [sharded, sharded],
        "zero1": [zero12, zero12],
        "zero2": [zero12, zero12],
        "zero3": [zero3, zero3],
    }[family]
    assert total % 2 == 0
    assert realised["ranks"] == expected


@pytest.mark.parametrize("backend", now_and_then(SEVERAL))
def test_losses_are_those_of_one_process(trained: Trained, backend: str) -> None:
    compare("full", trained, backend)


@pytest.mark.slow
def test_added_tokens_are_trained_as_by_one_process(trained: Trained) -> None:
    compare("added", trained, "fsdp_full_shard")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp_full_shard", "zero3"])
def test_an_adapter_is_trained_further_as_by_one_process(
    trained: Trained, tiny: Tiny, finetune: Finetune, tmp_path: Path, backend: str
) -> None:
    first = trained("lora", "single")
    fields = tiny.fields(model={"name": str(tiny.model), "adapter": str(first.root)})
    recipe = write_recipe(tmp_path / "further.json", fields)
    alone, several = Run(tmp_path / "alone"), Run(tmp_path / "several")
    launch(finetune, recipe, "single", alone.root)
    launch(finetune, recipe, backend, several.root)
    assert losses(alone)[0] < losses(first)[0] - 0.01
    assert largest(losses(several), losses(alone)) < FP32


@pytest.mark.parametrize("backend", ["ddp", "fsdp_full_shard", "zero3"])
def test_losses_of_an_adapter_are_those_of_one_process(trained: Trained, backend: str) -> None:
    compare("lora", trained, backend)


def compare(kind: str, trained: Trained, backend: str) -> None:
    """Losses and gradient norms of a backend with those of one process, there of padded rows."""
    alone = trained("padded" if kind == "full" else kind, "single")
    together = trained(kind, backend)
    assert largest(losses(alone), losses(together)) < FP32
    assert largest(losses(alone, "eval"), losses(together, "eval")) < FP32
    norms = [[r["grad_norm"] for r in run.read_metrics("train")] for run in (alone, together)]
    assert largest(*norms) < 1e-4  # norms of about 3


@pytest.mark.slow
def test_two_machines_train_as_one(
    trained: Trained, tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    """DeepSpeed's own launcher would start the second one by itself."""
    recipe = write_recipe(tmp_path / "lora.json", tiny.fields(**KINDS["lora"]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def machine(rank: int) -> Finished:
        return finetune(
            "launch", recipe, "--backend", "zero2", "--processes", "2", "--precision", "fp32",
            "--output", tmp_path / "run", "--num_machines", "2", "--machine_rank", rank,
            "--main_process_ip", "127.0.0.1", "--main_process_port", port,
        )  # fmt: skip

    with ThreadPoolExecutor() as machines:
        done = list(machines.map(machine, range(2)))
    assert [each.status for each in done] == [0, 0], done[0].output + done[1].output
    assert "Finished" in done[0].stdout
    assert "Finished" not in done[1].output
    alone = trained("lora", "single")
    assert largest(losses(alone), losses(Run(tmp_path / "run"))) < FP32


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp_full_shard", "zero3"])
def test_quantised_losses_are_those_of_one_process(trained: Trained, backend: str) -> None:
    alone, together = trained("nf4", "single"), trained("nf4", backend)
    assert largest(losses(alone), losses(together)) < FP32


@pytest.mark.parametrize("backend", ["ddp", "fsdp_full_shard", "zero3"])
def test_resuming_continues_bit_for_bit(
    trained: Trained, finetune: Finetune, tmp_path: Path, backend: str
) -> None:
    straight = trained("full", backend)
    resumed = cut_off(straight, tmp_path / "run", step=3)
    recipe = straight.root.parent.parent / "full.json"
    launch(finetune, recipe, backend, resumed.root, "--resume")
    assert losses(resumed) == losses(straight)
    assert equal_state(straight.checkpoint(6), resumed.checkpoint(6))
    assert not resumed.loss_plot.exists()  # --no-plot reaches the processes


@pytest.mark.parametrize("backend", now_and_then(["fsdp_full_shard", "fsdp_shard_grad_op"]))
def test_a_checkpoint_after_an_evaluation_has_fp32_shards_and_every_moment(
    tiny: Tiny, finetune: Finetune, tmp_path: Path, backend: str
) -> None:
    sections = {"max_steps": 1, "evaluation": {"every": 1}, "saving": {"every": 1}}
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(**sections))
    words = ["--backend", backend, "--processes", "2", "--precision", "bf16"]
    done = finetune("launch", recipe, *words, "--output", tmp_path / "run")
    assert done.status == 0, done.output
    checkpoint = Run(tmp_path / "run").checkpoint(1)
    shapes = json.loads((checkpoint / "manifest.json").read_text())["shapes"]
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


def cut_off(straight: Run, place: Path, step: int) -> Run:
    """A copy of a run as a kill after the checkpoint of a step would have left it."""
    shutil.copytree(straight.root, place)
    run = Run(place)
    for later in run.steps():
        if later > step:
            shutil.rmtree(run.checkpoint(later))
    shutil.rmtree(run.final)
    return run


@pytest.mark.slow
def test_a_checkpoint_continues_on_another_backend(
    trained: Trained, finetune: Finetune, tmp_path: Path
) -> None:
    """Between all of them: `finetune prove --crossings all`; `make prove` runs a ring."""
    straight = trained("full", "fsdp_full_shard")
    resumed = cut_off(straight, tmp_path / "run", step=3)
    launch(finetune, straight.root.parent.parent / "full.json", "zero2", resumed.root, "--resume")
    assert largest(losses(resumed), losses(straight)) < FP32


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


@pytest.mark.parametrize(
    ("backend", "change", "told"),
    [
        (
            "fsdp_full_shard",
            "state.fsdp_plugin.reshard_after_forward = False",
            "error: reshard_after_forward of model.layers.0: the plan has True, Accelerate built "
            "False\nerror: reshard_after_forward of model.layers.1: the plan has True, Accelerate "
            "built False\n",
        ),
        (
            "zero2",
            "state.deepspeed_plugin.deepspeed_config['zero_optimization']['stage'] = 1",
            "error: shard: the plan has grads, Accelerate built optimizer\n",
        ),
    ],
)
def test_an_engine_that_is_not_what_the_plan_says_is_refused(
    tiny: Tiny, tmp_path: Path, backend: str, change: str, told: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(CHANGED.format(change=change))
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=1))
    command = [
        warm_python(), "-m", "accelerate.commands.launch", "--config_file",
        str(ROOT / f"accelerate_configs/{backend}.yaml"), "--num_processes", "2",
        "--mixed_precision", "no", "--main_process_port", str(free_port()), str(script),
        "train", str(recipe), "--output", str(tmp_path / "run"),
    ]  # fmt: skip
    done = run_command(command, tmp_path / "cache", cwd=tmp_path)
    assert done.status != 0
    assert told in done.stderr
    assert Run(tmp_path / "run").steps() == []


def test_a_disk_that_is_too_small_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    settled = plan(catalog.resolve("llama3_3_70b_full"), "zero3_nvme", 8)
    with pytest.raises(FinetuneError) as told:
        require_room(settled, tmp_path / "offload", 8 * 100)
    assert "GB free, but 800 processes offload 126996.4 GB; name" in str(told.value)
    (tmp_path / "file").touch()
    with pytest.raises(FinetuneError, match=r"--nvme-path .*file: File exists"):
        require_room(settled, tmp_path / "file", 8)
    small = plan(catalog.resolve("smollm2_135m_full"), "zero3_nvme", 2)
    require_room(small, tmp_path / "offload", 2)


def planned_on_disk(recipe: Path, processes: int) -> float:
    """Bytes that the plan expects of all processes."""
    settled = plan(catalog.load(recipe), "zero3_nvme", processes, "fp32")
    workload = predict.workload_of(settled, predict.model_source(settled.recipe).shape)
    return processes * nvme.disk(workload)


@pytest.mark.slow
def test_a_disk_holds_what_zero_infinity_offloads(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    """Tensors of 1 MiB and more really go to the disk, and come back after a resume."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if not Path("/usr/include/libaio.h").exists():
        pytest.skip("libaio-dev is not installed")
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=len(tokenizer), max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(3)
    model = tmp_path / "model"
    LlamaForCausalLM(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    sections = {"model": {"name": str(model)}, "max_steps": 4, "saving": {"every": 2}}
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(**sections))
    alone, offloaded = Run(tmp_path / "single"), Run(tmp_path / "nvme")
    launch(finetune, recipe, "single", alone.root)
    # DeepSpeed compiles an operator first: five minutes of a core, which others may use too.
    launch(finetune, recipe, "zero3_nvme", offloaded.root, seconds=2400)
    # DeepSpeed steps each piece with another kernel than torch's; four steps apart by 2e-5.
    assert largest(losses(alone), losses(offloaded)) < 5e-5
    realised = json.loads(offloaded.realised.read_text())
    in_memory = realised["ranks"][0]["optimizer"]
    assert in_memory < realised["parameters"] / 100
    swapped = sum(file.stat().st_size for file in (offloaded.root / "offload").rglob("*.swp"))
    assert swapped == pytest.approx(planned_on_disk(recipe, 2), rel=0.01)
    resumed = cut_off(offloaded, tmp_path / "resumed", step=3)  # the best, which retention kept
    launch(finetune, recipe, "zero3_nvme", resumed.root, "--resume")
    assert largest(losses(resumed), losses(offloaded)) < 5e-5
