"""The notebook is executed from its first cell to its last, in a folder that holds nothing else."""

import json
import os
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, environment
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

from finetune import catalog
from finetune.runs.run import Run, open_run

pytestmark = pytest.mark.slow

NOTEBOOK = ROOT / "notebooks" / "finetune.ipynb"
METHODS = ROOT / "notebooks" / "methods.ipynb"
GRPO_RUN = "runs/methods-grpo"
CELL_SECONDS = 600
"""The longest cell takes half a minute on two cores; a loaded machine may take many times that."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the notebook runs; nothing lies beside it either."""
    place = tmp_path_factory.mktemp("notebook") / "notebooks"
    place.mkdir()
    return place


def run_through(notebook: Path, folder: Path, cache: Path) -> NotebookNode:
    """A notebook after every cell ran in a fresh kernel; an error in one raises."""
    kernels = AsyncKernelManager()  # its default kernel is the python of this process
    client = NotebookClient(
        nbformat.read(notebook, as_version=4),
        km=kernels,
        timeout=CELL_SECONDS,
        resources={"metadata": {"path": str(folder)}},
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(variables := environment(cache)):
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.delenv("PYTEST_CURRENT_TEST")  # with it, a kernel does not show what processes print
        return client.execute()


@pytest.fixture(scope="module")
def executed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    return run_through(NOTEBOOK, folder, tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="module")
def methods(
    executed: NotebookNode, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> NotebookNode:
    """With the base that the first notebook trained."""
    return run_through(METHODS, folder, tmp_path_factory.mktemp("c"))


def cell(notebook: NotebookNode, words: str) -> NotebookNode:
    """The one code cell with these words."""
    (found,) = (c for c in notebook.cells if c.cell_type == "code" and words in c.source)
    return found


def printed(code: NotebookNode) -> str:
    return "".join(output.text for output in code.outputs if output.output_type == "stream")


def test_no_cell_fails_and_every_cell_ran(executed: NotebookNode) -> None:
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]


def test_the_launch_trained_every_step_on_two_processes(
    executed: NotebookNode, folder: Path
) -> None:
    run = open_run(folder / "runs" / "notebook")
    steps = catalog.load(run.recipe).max_steps
    assert steps is not None
    assert [record["step"] for record in run.read_metrics("train")] == [*range(1, steps + 1)]
    realised = json.loads(run.realised.read_text())
    assert realised["distributed_type"] == "FSDP"
    assert len(realised["ranks"]) == realised["processes"] == 2
    assert f"{steps}/{steps}" in printed(cell(executed, "run = ft.launch("))


def test_the_plan_the_picture_and_the_answers_are_shown(executed: NotebookNode) -> None:
    assert "fsdp_full_shard: fsdp, sharded: params" in printed(cell(executed, "plan.explain()"))
    (picture,) = cell(executed, "ft.plot_loss").outputs
    assert "image/png" in picture.data
    lines = printed(cell(executed, '"  before  "')).splitlines()
    answers = [line.split(None, 1) for line in lines if line.startswith("  ")]
    assert [words[0] for words in answers] == ["before", "after", "expected"] * 4
    # The base continues with anything but a record; the adapter makes it answer with one.
    assert not any(words[1:] and words[1].startswith('{"name": ') for words in answers[0::3])
    for _, answer in answers[1::3]:
        assert list(json.loads(answer)) == ["name", "item", "count", "day", "city"]


def test_the_exported_adapter_is_what_plain_peft_loads(
    executed: NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import AutoPeftModelForCausalLM
    from safetensors.torch import load_file

    monkeypatch.chdir(folder)  # the base is named by its relative path
    adapter = folder / "runs" / "notebook-adapter"
    loaded = AutoPeftModelForCausalLM.from_pretrained(adapter)
    run = Run(folder / "runs" / "notebook")
    step = run.best_step() or run.newest()
    assert step is not None
    trained = load_file(run.checkpoint(step) / "adapter" / "adapter_model.safetensors")
    held = {name.replace(".default.", "."): value for name, value in loaded.state_dict().items()}
    assert trained
    for name, value in trained.items():
        assert held[name].equal(value.to(held[name].dtype))


def test_the_same_start_learns_by_pairs_and_by_a_reward(
    methods: NotebookNode, folder: Path
) -> None:
    assert not [o for cell in methods.cells for o in cell.get("outputs", ()) if "ename" in o]
    lines = printed(cell(methods, "shares = {}")).splitlines()
    shares, answers = {}, {}
    for line in lines[-3:]:
        name, share, _, answer = line.split(maxsplit=3)
        shares[name], answers[name] = float(share.removesuffix("%")), list(json.loads(answer))
    assert list(shares) == ["SFT", "DPO", "GRPO"]
    assert answers["SFT"] == ["name", "item", "count", "day", "city"]
    assert answers["DPO"] == answers["GRPO"] == sorted(answers["SFT"])
    assert shares["SFT"] < 5
    assert min(shares["DPO"], shares["GRPO"]) > 90
    pictures = [o for c in methods.cells for o in c.get("outputs", ()) if "data" in o]
    assert ["image/png" in each.data for each in pictures] == [True] * 4
    rewards = [each["metrics"]["reward"] for each in Run(folder / GRPO_RUN).read_metrics("train")]
    assert rewards[-1] > 3 * rewards[0] > 0


@pytest.mark.parametrize("path", [NOTEBOOK, METHODS], ids=lambda path: path.stem)
def test_what_is_committed_holds_no_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell for cell in code if cell.outputs or cell.execution_count is not None]
    assert path.stat().st_size < 20_000
