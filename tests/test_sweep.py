"""A sweep trains what a launch with the same values trains, goes on after a kill, and compares."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Finetune, Tiny, end_tree, losses, start, wait_for, write_recipe

from finetune.cli.main import main
from finetune.launchers.sweep import Space, space_of
from finetune.runs.run import Run

optuna = pytest.importorskip("optuna")

SHORT: dict[str, Any] = {"max_steps": 2, "saving": {}, "evaluation": {"every": 1}}
FP32 = ("--precision", "fp32", "--no-plot")


def recipe(tiny: Tiny, folder: Path, **sections: Any) -> str:
    fields = tiny.fields(**SHORT | {"adapter": {"r": 4}} | sections)
    return str(write_recipe(folder / "r.json", fields))


def study(root: Path) -> Any:
    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{root / 'optuna.db'}")


def test_trials_of_choices_are_all_combinations_each_as_a_launch_trains_it(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
):
    word = recipe(tiny, tmp_path)
    words = ["optim.lr=1e-2,1e-3", "adapter.r=2,3", "seed=5", *FP32]
    done = finetune("sweep", word, *words, "--trials", "4", cwd=tmp_path).passed()
    root = tmp_path / "runs" / "r-sweep"
    found = study(root).trials
    assert [(each.params["optim.lr"], each.params["adapter.r"]) for each in found] == [
        ("1e-2", "2"), ("1e-2", "3"), ("1e-3", "2"), ("1e-3", "3"),
    ]  # fmt: skip
    values = ["optim.lr=1e-3", "adapter.r=2", "seed=5"]
    finetune("launch", word, *values, *FP32, "--output", "alone", cwd=tmp_path).passed()
    alone = Run(tmp_path / "alone")
    for kind in ("train", "eval"):
        assert losses(Run(root / "trial-002"), kind) == losses(alone, kind)
    assert found[2].value == min(losses(alone, "eval"))
    best = min(range(4), key=lambda number: found[number].value)
    assert f"best         runs/r-sweep/trial-00{best}: " in done.stdout
    page = (root / "index.html").read_text()
    assert all(text in page for text in ("Trials", "trial-003", "Recipes: differences"))


@pytest.mark.slow
def test_a_killed_sweep_goes_on_as_if_it_had_not_been(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
):
    """The second trial is killed with its sweep after its first checkpoint."""
    word = recipe(tiny, tmp_path, max_steps=30, saving={"every": 1}, evaluation={"every": 15})
    words = ["sweep", word, "optim.lr=1e-4..1e-2:log", *FP32, "--trials", "3"]
    finetune(*words, "--output", "straight", cwd=tmp_path).passed()
    words += ["--output", "cut"]
    process = start(words, tmp_path, warm=True)
    second = Run(tmp_path / "cut" / "trial-001")
    wait_for(lambda: second.newest() is not None, process)
    end_tree(process.pid)
    process.wait()
    assert "continue it with --resume" in finetune(*words, cwd=tmp_path).refused()
    finetune(*words, "--resume", cwd=tmp_path).passed()
    other = finetune(*words, "seed=3", "--resume", cwd=tmp_path).refused()
    assert "has another sweep" in other
    straight, cut = study(tmp_path / "straight").trials, study(tmp_path / "cut").trials
    assert [each.params for each in cut] == [each.params for each in straight]
    assert [each.value for each in cut] == [each.value for each in straight]
    for number in range(3):
        runs = [Run(tmp_path / name / f"trial-00{number}") for name in ("straight", "cut")]
        assert losses(runs[0]) == losses(runs[1])
    assert len([*second.read_metrics("start")]) == 2


@pytest.mark.slow
def test_a_trial_that_is_worse_than_the_median_stops_early_and_is_saved(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
):
    """With steps for seconds: records are read twice a second, on a busy machine less often."""
    long = {"max_steps": 300, "saving": {"every": 300}, "evaluation": {"every": 25}}
    word = recipe(tiny, tmp_path, **long)
    words = ["optim.lr=1e-2,1e-9", *FP32, "--trials", "2", "--prune-after", "1"]
    done = finetune("sweep", word, *words, "--output", "s", cwd=tmp_path).passed()
    assert [each.state.name for each in study(tmp_path / "s").trials] == ["COMPLETE", "PRUNED"]
    second = Run(tmp_path / "s" / "trial-001")
    (end,) = second.read_metrics("end")
    assert end["reason"] == "interrupted"
    assert second.newest() == end["step"] < 300
    assert "stopped early" in done.stdout


@pytest.mark.slow
def test_a_failed_trial_does_not_end_the_others_but_three_in_a_row_do(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
):
    word = recipe(tiny, tmp_path)
    words = ["optim.lr=1e-3", "optim.max_loss=1,2,3,100", "optim.max_loss_steps=1", *FP32]
    done = finetune("sweep", word, *words, "--output", "s", cwd=tmp_path)
    assert done.status == 1
    assert "3 trials in a row failed" in done.stderr
    words[1] = "optim.max_loss=1,100"
    done = finetune("sweep", word, *words, "--output", "t", cwd=tmp_path).passed()
    assert [each.state.name for each in study(tmp_path / "t").trials] == ["FAIL", "COMPLETE"]
    assert "failed: " in done.stdout


def test_what_a_word_searches():
    known = "qwen3_0_6b_lora"
    assert space_of(known, "optim.lr=1e-5..1e-3:log") == Space("optim.lr", 1e-5, 1e-3, True)
    assert space_of(known, "adapter.r=2..8") == Space("adapter.r", 2, 8)
    assert space_of(known, "adapter.r=8,16") == Space("adapter.r", choices=("8", "16"))
    kinds = Space("optim.betas", choices=("[0.9,0.95]", "[0.8,0.9]"))
    assert space_of(known, "optim.betas=[0.9,0.95],[0.8,0.9]") == kinds
    for fixed in ("optim.lr=1e-5", "adapter.targets=q_proj,v_proj", "optim.betas=0.9,0.95"):
        assert space_of(known, fixed) is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["optim.lr=1e-3..1e-5"], "optim.lr=1e-3..1e-5: expected LOW..HIGH with a lower LOW"),
        (["optim.lr=0..1e-5:log"], "with a lower LOW above 0"),
        (["optim.lr=1e-3"], "nothing is searched"),
        (["optim.lr=1e-3,1e-4", "optim.lr=1e-2"], "optim.lr: given more than once"),
        (["optim.lr=1e-3,1e-4", "eval_data=[]"], "give eval_data or eval_rows"),
        (["optim.lr=1e-3,fast"], "optim.lr=fast: override: optim.lr: "),
        (["optim.lt=1e-3,1e-4"], "optim.lt=1e-3: override: optim.lt: unknown key"),
        (["adapter.r=0..4"], "adapter.r=0: override: adapter.r: "),
        (
            ["model.quantization=none,nf4", "adapter=null"],
            "model.quantization=nf4: model.quantization",
        ),
        (
            ["batch.micro_rows=1,8", "batch.max_length=128,10000000"],
            "batch.micro_rows=8 batch.max_length=10000000: needs ",
        ),
        (["optim.lr=1e-3,1e-4", "--chain", "x"], "--chain, --launcher: a sweep waits"),
        (["optim.lr=1e-3,1e-4", "--num_machines", "2"], "a sweep trains on one machine"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_named_before_the_first_trial(
    words: list[str], told: str, tiny: Tiny, tmp_path: Path,
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", recipe(tiny, tmp_path), *words]) == 2
    assert told in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()
