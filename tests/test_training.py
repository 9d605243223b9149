"""The loop is exact, a killed run loses nothing, and a bad start is refused with its reason."""

import contextlib
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import Finetune, Tiny, end_tree, start, wait_for, write_recipe
from safetensors.torch import load_file
from test_backends import FP32, equal_state, largest, losses

import finetune as ft
from finetune import catalog
from finetune.recipe import Optim
from finetune.runs.manifest import damage
from finetune.runs.run import Run
from finetune.training.optim import learning_rate


def train(tiny: Tiny, place: Path, resume: bool = False, **sections: Any) -> Run:
    """A run of one process, in this one."""
    recipe = catalog.from_fields(tiny.fields(**sections))
    return ft.train(recipe, precision="fp32", output=place, resume=resume)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path_factory.getbasetemp() / "in-process-cache"))


LORA = {"adapter": {"r": 8}, "optim": {"lr": 5e-3, "warmup": 0}}


def adapter_of(run: Run, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoint(step) / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("micro_rows", [4, 2, 1])
def test_accumulation_does_not_change_the_training(
    tiny: Tiny, tmp_path: Path, micro_rows: int
) -> None:
    whole = train(tiny, tmp_path / "1x8", **LORA, batch={"micro_rows": 8})
    cut = train(tiny, tmp_path / "cut", **LORA, batch={"micro_rows": micro_rows})
    assert largest(losses(whole), losses(cut)) < FP32
    assert largest(losses(whole, "eval"), losses(cut, "eval")) < FP32
    before, after = adapter_of(whole, 6), adapter_of(cut, 6)
    assert before.keys() == after.keys()
    # AdamW divides by the root of the squared gradient: where that is near zero, a sum in another
    # order moves the sign of a step of lr = 5e-3. Six such steps bound the difference.
    assert all(torch.allclose(before[key], after[key], atol=3e-4) for key in before)


def test_the_gradient_is_that_of_the_mean_over_all_tokens(tiny: Tiny, tmp_path: Path) -> None:
    """Against plain transformers: the first step's loss and gradient norm over eight rows."""
    from transformers import AutoModelForCausalLM

    from finetune.cache import cache
    from finetune.data.chat.render import load_chat
    from finetune.data.collate import collate
    from finetune.data.order import rows_of_step
    from finetune.data.prepare import prepare
    from finetune.models.model import load_tokenizer

    sections = {"batch": {"micro_rows": 2}, "max_steps": 1}
    run = train(tiny, tmp_path / "run", **sections)
    recipe = catalog.load(run.recipe)
    chat = load_chat(load_tokenizer(recipe), None)
    rows = prepare(recipe, chat, cache("data")).train
    batch = collate(rows, rows_of_step(0, len(rows), 8, recipe.seed), 0, "cpu")
    model = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    outputs = model(batch.ids, attention_mask=batch.attention_mask, labels=batch.labels)
    outputs.loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    norm = torch.nn.utils.get_total_norm(grads).item()
    first = next(run.read_metrics("train"))
    assert abs(first["loss"] - outputs.loss.item()) < FP32
    assert abs(first["grad_norm"] - norm) < 1e-5
    assert first["trained_tokens"] == int((batch.labels[:, 1:] != -100).sum())


def test_resuming_on_one_process_continues_bit_for_bit(tiny: Tiny, tmp_path: Path) -> None:
    sections = {"adapter": {"r": 8, "dropout": 0.2}, "optim": {"lr": 5e-3}}
    straight = train(tiny, tmp_path / "straight", **sections)
    shutil.copytree(straight.root, tmp_path / "resumed")
    resumed = Run(tmp_path / "resumed")
    shutil.rmtree(resumed.checkpoint(6))
    train(tiny, resumed.root, resume=True, **sections)
    assert losses(resumed) == losses(straight)
    assert losses(resumed, "eval") == losses(straight, "eval")
    assert equal_state(straight.checkpoint(6), resumed.checkpoint(6))


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit", "adafactor", "muon"])
def test_each_optimizer_resumes_where_it_stopped(tiny: Tiny, tmp_path: Path, name: str) -> None:
    sections = {"optim": {"name": name, "lr": 1e-3}}
    straight = train(tiny, tmp_path / "straight", **sections)
    shutil.copytree(straight.root, tmp_path / "resumed")
    resumed = Run(tmp_path / "resumed")
    shutil.rmtree(resumed.checkpoint(6))
    train(tiny, resumed.root, resume=True, **sections)
    assert losses(resumed) == losses(straight)


@pytest.mark.parametrize(
    "backend", ["single", pytest.param("fsdp_full_shard", marks=pytest.mark.slow)]
)
def test_a_killed_run_continues_as_if_it_had_not_been(
    tiny: Tiny, finetune: Finetune, tmp_path: Path, backend: str
) -> None:
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=30, saving={"every": 2}))
    words = [
        "launch", str(recipe), "--backend", backend, "--precision", "fp32",
        "--processes", "1" if backend == "single" else "2", "--output",
    ]  # fmt: skip
    assert finetune(*words, tmp_path / "straight").status == 0
    killed = Run(tmp_path / "killed")
    kill_after(4, [*words, str(killed.root)], killed, tmp_path)
    assert finetune(*words, killed.root, "--resume").status == 0
    assert losses(killed) == losses(Run(tmp_path / "straight"))


def kill_after(step: int, words: list[str], run: Run, cache: Path) -> None:
    """Start a run and end all of its processes with SIGKILL once a checkpoint is complete."""
    process = start(words, cache, warm=True)
    wait_for(lambda: (run.newest() or 0) >= step, process)
    end_tree(process.pid)
    process.communicate()


def test_the_best_checkpoint_stays_and_becomes_the_result(tiny: Tiny, tmp_path: Path) -> None:
    sections = {
        "optim": {"lr": 0.3, "warmup": 0, "schedule": "constant"},  # soon gets worse
        "evaluation": {"every": 1, "patience": 3},
        "saving": {"every": 1, "keep": 1},
        "max_steps": 20,
    }
    run = train(tiny, tmp_path / "run", **sections)
    evaluated = losses(run, "eval")
    best = min(range(len(evaluated)), key=evaluated.__getitem__) + 1
    assert run.best_step() == best
    assert len(evaluated) == best + 3
    assert [record["reason"] for record in run.read_metrics("end")] == ["early stop"]
    assert run.steps() == [best, best + 3]
    result = load_file(run.final / "model.safetensors")
    kept = load_file(run.checkpoint(best) / "model" / "model.safetensors")
    assert all(torch.equal(result[key], kept[key]) for key in kept)


def test_the_schedule_counts_optimizer_steps_of_the_job() -> None:
    optim = Optim(schedule="linear", warmup=2, min_lr=0.1)
    rates = [learning_rate(step, 10, optim, 1.0) for step in range(11)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[10] == pytest.approx(0.1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    with contextlib.suppress(OSError), (place / "somebody else's").open("wb") as other:
        while True:
            other.write(bytes(2**16))


def test_a_full_disk_leaves_the_previous_checkpoint(
    tiny: Tiny, tmp_path: Path, small_disk: Path
) -> None:
    sections = {"saving": {"every": 1, "keep": 3}, "max_steps": 400}
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(**sections))
    run = Run(small_disk / "run")
    words = ["train", str(recipe), "--precision", "fp32", "--output", str(run.root)]
    process = start(words, tmp_path, warm=True)
    wait_for(lambda: (run.newest() or 0) >= 2, process)
    fill(small_disk)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in told
    newest = run.newest()
    assert newest is not None
    assert f"step {newest} is the newest complete one" in told
    assert not list(run.checkpoints.glob(".*"))
    assert damage(run.checkpoint(newest)) == []


def test_saving_in_the_background_writes_the_same_checkpoints(tiny: Tiny, tmp_path: Path) -> None:
    sections = {"saving": {"every": 1, "keep": 9}, "adapter": {"r": 8}}
    waiting = train(tiny, tmp_path / "waiting", **sections)
    sections["saving"]["background"] = True
    going_on = train(tiny, tmp_path / "going-on", **sections)
    assert losses(going_on) == losses(waiting)
    assert going_on.steps() == waiting.steps() == [1, 2, 3, 4, 5, 6]
    for step in waiting.steps():
        assert equal_state(waiting.checkpoint(step), going_on.checkpoint(step))
        assert damage(going_on.checkpoint(step)) == []
    assert sorted(r["step"] for r in going_on.read_metrics("save")) == [1, 2, 3, 4, 5, 6]
    assert going_on.best_step() == waiting.best_step()


TWO = ["--backend", "ddp", "--processes", "2", "--precision", "fp32", "--output"]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_disk_that_fills_between_checkpoints_is_reported(
    tiny: Tiny, tmp_path: Path, small_disk: Path, processes: int, steps: int
) -> None:
    """After one step what was built is written too, and either may be what there is no room for."""
    sections = {"saving": {"every": 100_000}, "max_steps": 400, "evaluation": {"every": None}}
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(**sections))
    run = Run(small_disk / "run")
    words = ["train", str(recipe), "--precision", "fp32", "--output", str(run.root)]
    if processes == 2:
        words = ["launch", str(recipe), *TWO, str(run.root)]
    process = start(words, tmp_path, warm=True)
    wait_for(lambda: len(list(run.read_metrics("train"))) >= steps, process)
    fill(small_disk)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 1, told
    files = [run.metrics, run.realised][: 3 - steps]
    said = ": cannot be written (No space left on device); free disk space"
    assert any(f"{file}{said}" in told for file in files), told
    assert "Traceback" not in told


def on_two(
    tiny: Tiny, tmp_path: Path, sections: dict[str, Any]
) -> tuple[Run, "subprocess.Popen[str]"]:
    """A run on two processes that has just been started."""
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(**sections))
    run = Run(tmp_path / "run")
    return run, start(["launch", str(recipe), *TWO, str(run.root)], tmp_path)


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_unnamed_error_of_tokenizers_ends_every_rank_with_its_cause(
    tiny: Tiny, tmp_path: Path, background: bool
) -> None:
    """A limit on the size of files, set while it runs: the state fits, tokenizer.json does not."""
    sections = {
        "adapter": {"r": 1, "targets": ["q_proj"]},
        "saving": {"every": 1, "background": background},
        "evaluation": {"every": None},
        "max_steps": 400,
    }
    run, process = on_two(tiny, tmp_path, sections)
    wait_for(lambda: (run.newest() or 0) >= 1, process)
    for child in psutil.Process(process.pid).children(recursive=True):
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (8000, 8000))
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    newest = run.newest()
    assert (
        f"{run.checkpoint((newest or 0) + 1)}: the checkpoint could not be written (Exception: "
        f"File too large (os error 27)); step {newest} is the newest complete one"
    ) in told
    assert "Traceback" not in told


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_best_json_that_cannot_be_written_ends_every_rank(
    tiny: Tiny, tmp_path: Path, background: bool
) -> None:
    sections = {
        "saving": {"every": 10_000, "background": background},
        "evaluation": {"every": 20},
        "max_steps": 400,
    }
    run, process = on_two(tiny, tmp_path, sections)
    wait_for(lambda: any(run.read_metrics("train")), process)
    run.best.mkdir()  # no file can take its place
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"{run.root}: the checkpoint of step 20 is complete, but best.json could not" in told
    assert "Is a directory" in told
    assert "Traceback" not in told
    assert damage(run.checkpoint(20)) == []
