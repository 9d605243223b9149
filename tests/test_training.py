"""The loop is exact, a killed run loses nothing, and a bad start is refused with its reason."""

import contextlib
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    Tiny,
    assert_same_losses,
    cut_off,
    end_tree,
    equal_state,
    losses,
    slow,
    start,
    wait_for,
    write_recipe,
)
from safetensors.torch import load_file

import finetune as ft
from finetune.runs.manifest import damage
from finetune.runs.run import Run
from finetune.training.optim import learning_rate
from finetune.verification.proofs.runs import family_of

LORA = {"adapter": {"r": 8}, "optim": {"lr": 5e-3, "warmup": 0}}


def test_accumulation_does_not_change_the_training(run_of, train):
    whole = run_of(**LORA, batch={"micro_rows": 8})
    cut = train(**LORA, batch={"micro_rows": 1})
    assert_same_losses(whole, cut)
    before, after = (
        load_file(run.checkpoint(6) / "adapter" / "adapter_model.safetensors")
        for run in (whole, cut)
    )
    assert before.keys() == after.keys()
    # AdamW divides by the root of the squared gradient: where that is near zero, a sum in another
    # order moves the sign of a step of lr = 5e-3. Six such steps bound the difference.
    assert all(torch.allclose(before[key], after[key], atol=3e-4) for key in before)


@pytest.mark.parametrize(
    "sections",
    [
        {"adapter": {"r": 8, "dropout": 0.2}, "optim": {"lr": 5e-3}},
        {"optim": {"name": "adamw_8bit"}},
        slow({"optim": {"name": "paged_adamw_8bit"}}),
        slow({"optim": {"name": "adafactor"}}),
        slow({"optim": {"name": "muon"}}),
    ],
)
def test_resuming_on_one_process_continues_bit_for_bit(train, tmp_path, sections):
    """With the numbers of dropout, and the state of each optimizer."""
    two = {"every": 2}
    sections = sections | {"saving": two, "evaluation": two, "max_steps": 4}
    straight = train("straight", **sections)
    resumed = cut_off(straight, tmp_path / "resumed", step=2)
    train("resumed", resume=True, **sections)
    assert losses(resumed) == losses(straight)
    assert losses(resumed, "eval") == losses(straight, "eval")
    assert equal_state(straight.checkpoint(4), resumed.checkpoint(4))


@pytest.mark.parametrize("backend", ["single", slow("fsdp_full_shard")])
def test_a_killed_run_continues_as_if_it_had_not_been(tiny, run_of, finetune, tmp_path, backend):
    sections = {"max_steps": 20, "saving": {"every": 2}}
    straight, killed = run_of(backend, **sections), ft.Run(tmp_path / "killed")
    words = [
        "launch", str(straight.recipe), "--backend", backend, "--precision", "fp32", "--processes",
        "1" if backend == "single" else "2", "--output", str(killed.root), "--no-plot",
    ]  # fmt: skip
    process = start(words, tmp_path, warm=True)
    wait_for(lambda: (killed.newest() or 0) >= 4, process)
    end_tree(process.pid)
    process.communicate()
    assert (finetune(*words, "--resume").status, losses(killed)) == (0, losses(straight))


def test_the_best_checkpoint_stays_and_becomes_the_result(train):
    run = train(
        optim={"lr": 0.3, "warmup": 0, "schedule": "constant"},  # soon gets worse
        evaluation={"every": 1, "patience": 3},
        saving={"every": 1, "keep": 1},
        max_steps=20,
    )
    evaluated = losses(run, "eval")
    best = min(range(len(evaluated)), key=evaluated.__getitem__) + 1
    assert (run.best_step(), len(evaluated)) == (best, best + 3)
    assert [record["reason"] for record in run.read_metrics("end")] == ["early stop"]
    assert run.steps() == [best, best + 3]
    result = load_file(run.final / "model.safetensors")
    kept = load_file(run.checkpoint(best) / "model" / "model.safetensors")
    assert all(torch.equal(result[key], kept[key]) for key in kept)


def test_a_loss_that_stays_high_stops_the_run_and_leaves_its_checkpoints(train, tmp_path):
    every: dict[str, Any] = {"saving": {"every": 0.25, "keep": 9}, "max_steps": 8}
    with pytest.raises(ft.FinetuneError, match=r"step 3: loss .* above optim.max_loss=1"):
        train("cut", optim={"max_loss": 1}, **every)
    assert Run(tmp_path / "cut").steps() == [2]
    assert len(losses(train("whole", optim={"max_loss": 50, "max_loss_steps": 1}, **every))) == 8


def test_a_cadence_beyond_the_run_is_said_and_its_end_is_saved(train, capsys):
    run = train(saving={"every": 500}, evaluation={"every": 7}, max_steps=3)
    said = capsys.readouterr().out
    assert "saving.every: 500 is more than the 3 steps: only at the end" in said
    assert "evaluation.every: 7 is more than the 3 steps: only at the end" in said
    assert (run.steps(), len(losses(run, "eval"))) == ([3], 1)


def test_the_schedule_counts_optimizer_steps_of_the_job():
    optim = ft.Optim(schedule="linear", warmup=2, min_lr=0.1)
    rates = [learning_rate(step, 10, optim, 1.0) for step in range(11)]
    assert (rates[:3], rates[6]) == ([0.5, 1.0, 1.0], pytest.approx(0.1 + 0.9 * 0.5))
    assert rates[10] == pytest.approx(0.1)


def fill(place: Path) -> None:
    with contextlib.suppress(OSError), (place / "somebody else's").open("wb") as other:
        while True:
            other.write(bytes(2**16))


def begun(
    tiny: Tiny, folder: Path, run: ft.Run, processes: int = 1, **sections: Any
) -> "subprocess.Popen[str]":
    """Start a long run, whose end is caused."""
    recipe = write_recipe(folder / "r.json", tiny.fields(**sections, max_steps=400))
    words = ["train", str(recipe)]
    if processes == 2:
        words = ["launch", str(recipe), "--backend", "ddp", "--processes", "2"]
    words += ["--precision", "fp32", "--output", str(run.root), "--no-plot"]
    return start(words, folder, warm=True)


def end_of(process: "subprocess.Popen[str]") -> str:
    """What a process told that failed as it should."""
    _, told = process.communicate(timeout=120)
    assert process.returncode == 1, told
    assert "Traceback" not in told
    return told


def test_a_full_disk_leaves_the_previous_checkpoint(tiny, tmp_path, mounted):
    small_disk = mounted("size=24m")
    run = ft.Run(small_disk / "run")
    process = begun(tiny, tmp_path, run, saving={"every": 1, "keep": 3})
    wait_for(lambda: (run.newest() or 0) >= 2, process)
    fill(small_disk)
    told, newest = end_of(process), run.newest()
    assert f"step {newest} is the newest complete one" in told
    assert not list(run.checkpoints.glob(".*"))
    assert damage(run.checkpoint(newest)) == []


def test_saving_in_the_background_writes_the_same_checkpoints(train):
    sections = {"adapter": {"r": 8}, "max_steps": 4}
    waiting, going_on = (
        train(str(background), **sections, saving={"every": 1, "keep": 9, "background": background})
        for background in (False, True)
    )
    assert losses(going_on) == losses(waiting)
    assert going_on.steps() == waiting.steps() == [1, 2, 3, 4]
    for step in waiting.steps():
        assert equal_state(waiting.checkpoint(step), going_on.checkpoint(step))
        assert damage(going_on.checkpoint(step)) == []
    assert sorted(r["step"] for r in going_on.read_metrics("save")) == [1, 2, 3, 4]
    assert going_on.best_step() == waiting.best_step()


@pytest.mark.parametrize(("processes", "steps"), [(1, 1), slow(2, 2), slow(2, 1)])
def test_a_disk_that_fills_between_checkpoints_is_reported(
    tiny, tmp_path, mounted, processes, steps
):
    """After one step what was built is written too, and either may be what there is no room for."""
    small_disk = mounted("size=24m")
    run = ft.Run(small_disk / "run")
    sections = {"saving": {"every": 100_000}, "evaluation": {"every": None}}
    process = begun(tiny, tmp_path, run, processes, **sections)
    wait_for(lambda: len(list(run.read_metrics("train"))) >= steps, process)
    fill(small_disk)
    told = end_of(process)
    files = [run.metrics, run.realised][: 3 - steps]
    said = ": cannot be written (No space left on device); free disk space"
    assert any(f"{file}{said}" in told for file in files), told


IN_BACKGROUND = pytest.mark.parametrize("background", [False, True])


@pytest.mark.slow
@IN_BACKGROUND
def test_an_unnamed_error_of_tokenizers_ends_every_rank_with_its_cause(tiny, tmp_path, background):
    """A limit on the size of files, set while it runs: the state fits, tokenizer.json does not."""
    run = ft.Run(tmp_path / "run")
    process = begun(
        tiny, tmp_path, run, processes=2, adapter={"r": 1, "targets": ["q_proj"]},
        saving={"every": 1, "background": background}, evaluation={"every": None},
    )  # fmt: skip
    wait_for(lambda: (run.newest() or 0) >= 1, process)
    for each in family_of(process.pid):
        resource.prlimit(each.pid, resource.RLIMIT_FSIZE, (8000, 8000))
    told, newest = end_of(process), run.newest()
    assert (
        f"{run.checkpoint((newest or 0) + 1)}: the checkpoint could not be written (Exception: "
        f"File too large (os error 27)); step {newest} is the newest complete one"
    ) in told


@pytest.mark.slow
@IN_BACKGROUND
def test_a_best_json_that_cannot_be_written_ends_every_rank(tiny, tmp_path, background):
    run = ft.Run(tmp_path / "run")
    saving = {"every": 10_000, "background": background}
    process = begun(tiny, tmp_path, run, processes=2, saving=saving, evaluation={"every": 20})
    wait_for(lambda: any(run.read_metrics("train")), process)
    run.best.mkdir()  # no file can take its place
    told = end_of(process)
    assert f"{run.root}: the checkpoint of step 20 is complete, but best.json could not" in told
    assert "Is a directory" in told
    assert damage(run.checkpoint(20)) == []
