"""Launchers other than ours train the same; what a scheduler left is refused or has no effect."""

import sys

import pytest
from conftest import FP32, apart, losses, problems_of, read, run_command, slow, warm_python

import finetune as ft
from finetune import catalog
from finetune.checks import request
from finetune.launchers.accelerate import free_port
from finetune.process import rendezvous
from finetune.process.quiet import OF_A_LAUNCH, OF_MPI

COMPLETE = {
    "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "10.255.255.1",
    "MASTER_PORT": "29577",
}  # fmt: skip
"""Of a job of two processes whose first address nobody answers."""
TORCHRUN = COMPLETE | {"TORCHELASTIC_RUN_ID": "7"}
ONE = {"WORLD_SIZE": "1"}
SHORT = {"max_steps": 2, "saving": {}, "evaluation": {}, "adapter": {"r": 4}}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*OF_A_LAUNCH, "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def given_are(variables: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    for name, value in given.items():
        variables.setenv(name, value)


@pytest.mark.parametrize(
    ("given", "named", "count"),
    [
        ({}, False, None),
        ({}, True, None),
        (COMPLETE | ONE, True, None),
        (TORCHRUN, False, 2),
        (TORCHRUN | ONE, False, None),
        (TORCHRUN | ONE, True, 1),
        (COMPLETE, True, 2),
    ],
)
def test_the_variables_say_how_many_processes_there_are(variables, given, named, count):
    given_are(variables, given)
    assert rendezvous.started(named) == count


@pytest.mark.parametrize(
    ("given", "named", "lacks"),
    [
        ({"WORLD_SIZE": "4"}, False, "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set"),
        ({"WORLD_SIZE": "4"}, True, "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set"),
        ({**COMPLETE, "WORLD_SIZE": "4"}, False, "TORCHELASTIC_RUN_ID not set"),
    ],
)
def test_variables_without_a_launcher_are_refused(variables, given, named, lacks):
    given_are(variables, given)
    (problem,) = problems_of(rendezvous.started, named)
    assert f"({lacks}), and it would wait for 3 others" in problem
    assert "finetune launch --backend ddp --processes 4 or torchrun" in problem
    assert "unset WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT" in problem


@pytest.mark.parametrize("text", ["", "two", "-1", "0"])
def test_an_invalid_world_size_is_refused(variables, text):
    variables.setenv("WORLD_SIZE", text)
    with pytest.raises(ft.FinetuneError, match=f"WORLD_SIZE={text}: expected a whole number"):
        rendezvous.started(False)


@pytest.mark.parametrize("name", OF_MPI)
def test_variables_of_mpi_are_refused_unless_there_is_a_world(variables, name):
    variables.setenv(name, "1")
    assert rendezvous.started(False) is None
    variables.setenv(name, "4")
    with pytest.raises(ft.FinetuneError, match=f"{name}=4: set by mpirun or srun.* unset {name} "):
        rendezvous.started(False)
    given_are(variables, TORCHRUN)
    assert rendezvous.started(False) == 2


def test_processes_of_accelerate_launch_name_no_other_backend(variables, tiny):
    given_are(variables, COMPLETE | {"ACCELERATE_MIXED_PRECISION": "no"})
    recipe = catalog.from_fields(tiny.fields())
    assert request.check_here(recipe, "ddp").backend.engine == "ddp"
    (told,) = problems_of(request.check_here, recipe, "zero2")
    assert told.startswith("--backend zero2: accelerate launch started another")
    variables.delenv("RANK")
    with pytest.raises(ft.FinetuneError, match="WORLD_SIZE=2: set without RANK, as by accelerate"):
        request.check_here(recipe)


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (ONE, ["train"]),
        ({"WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}, ["launch", "--backend", "single"]),
    ],
)
def test_variables_that_a_scheduler_left_reach_no_run_of_ours(
    run_of, tmp_path, finetune, left, words
):
    alone = run_of(**SHORT)
    given = (alone.recipe, "--precision", "fp32", "--output", tmp_path / "run")
    finetune(*words, *given, env=COMPLETE | left, seconds=120).passed()
    assert losses(ft.Run(tmp_path / "run")) == losses(alone)


@pytest.mark.parametrize("named", ["ddp", slow("zero2")])
def test_torchrun_starts_a_backend(run_of, tmp_path, named):
    alone, run = run_of(**SHORT), ft.Run(tmp_path / "run")
    command = [
        warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
        "finetune", "train", str(alone.recipe), *(() if named == "ddp" else ("--backend", named)),
        "--precision", "fp32", "--no-plot", "--output", str(run.root),
    ]  # fmt: skip
    run_command(command, tmp_path, seconds=120).passed()
    assert apart(run, alone) < FP32
    realised = read(run.plan)
    assert (realised["backend"], realised["processes"]) == (named, 2)


NOTEBOOK = """
from accelerate import notebook_launcher

def work(recipe, output):
    import finetune as ft
    from finetune import catalog
    ft.train(catalog.resolve(recipe), precision="fp32", output=output)

if __name__ == "__main__":
    notebook_launcher(work, ({recipe!r}, {output!r}), num_processes=2, use_port="{port}")
"""


@pytest.mark.slow
def test_notebook_launcher_starts_the_processes(run_of, tmp_path):
    alone, run = run_of(**SHORT), ft.Run(tmp_path / "run")
    names = {"recipe": str(alone.recipe), "output": str(run.root)}
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK.format(**names, port=free_port()))
    run_command([sys.executable, str(script)], tmp_path, seconds=120).passed()
    assert apart(run, alone) < FP32
