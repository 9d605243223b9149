"""The notebooks are executed from the first cell to the last, beside what the quickstart leaves."""

import json
import os
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, Finetune, environment, gpus_are_here, warm_python
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from peft import AutoPeftModelForCausalLM
from quickstarted import quickstarted
from safetensors.torch import load_file

from finetune import Run, catalog, open_run
from finetune.quickstart.pictures import COLOURS

pytestmark = pytest.mark.slow

NOTEBOOK = ROOT / "notebooks" / "finetune.ipynb"
METHODS = ROOT / "notebooks" / "methods.ipynb"
CELL_SECONDS = 600
"""The longest cell takes half a minute on two cores; a loaded machine may take many times that."""


@pytest.fixture(scope="module")
def folder(shared: Path, finetune: Finetune) -> Path:
    """Where the notebooks run, as in a clone after `make quickstart`."""
    place = quickstarted(shared, finetune) / "notebooks"
    place.mkdir(exist_ok=True)
    return place


def run_through(notebook: NotebookNode, folder: Path, cache: Path) -> NotebookNode:
    """A notebook after every cell ran in a fresh kernel; an error in one raises."""
    kernels = AsyncKernelManager()  # its default kernel is the python of this process
    if not gpus_are_here() and kernels.kernel_spec is not None:
        words = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]
        kernels.kernel_spec.argv = [warm_python(), *words]
    place = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, km=kernels, timeout=CELL_SECONDS, resources=place)
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(variables := environment(cache)):
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.delenv("PYTEST_CURRENT_TEST")  # with it, a kernel does not show what processes print
        return client.execute()


@pytest.fixture(scope="module")
def executed(folder: Path, session_cache: Path) -> NotebookNode:
    return run_through(nbformat.read(NOTEBOOK, as_version=4), folder, session_cache)


@pytest.fixture(scope="module")
def methods(folder: Path, session_cache: Path) -> NotebookNode:
    return run_through(nbformat.read(METHODS, as_version=4), folder, session_cache)


def code_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def cell(notebook: NotebookNode, words: str) -> NotebookNode:
    """The one code cell with these words."""
    (found,) = (each for each in code_of(notebook) if words in each.source)
    return found


def printed(code: NotebookNode) -> str:
    return "".join(output.text for output in code.outputs if output.output_type == "stream")


def test_every_cell_ran_and_the_launch_trained_every_step_on_two_processes(executed, folder):
    code = code_of(executed)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]
    run = open_run(folder / "runs" / "notebook")
    steps = catalog.load(run.recipe).max_steps or 0
    assert [record["step"] for record in run.read_metrics("train")] == [*range(1, steps + 1)]
    realised = json.loads(run.realised.read_text())
    assert realised["distributed_type"] == "FSDP"
    assert len(realised["ranks"]) == realised["processes"] == 2
    assert f"{steps}/{steps}" in printed(cell(executed, "run = ft.launch("))


def test_without_a_quickstart_the_notebook_trains_a_base(tmp_path, session_cache):
    """On fewer of its rows here; in a folder that holds nothing else."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    last = next(n for n, each in enumerate(notebook.cells) if "quickstart_base" in each.source)
    notebook.cells = notebook.cells[: last + 1]
    rows = "first=22_400"
    assert rows in notebook.cells[last].source
    notebook.cells[last].source = notebook.cells[last].source.replace(rows, "first=64")
    run_through(notebook, tmp_path, session_cache)
    base = open_run(tmp_path / "quickstart" / "base")
    assert [each["reason"] for each in base.read_metrics("end")] == ["finished"]
    for file in ("base/final/model.safetensors", "data/train.jsonl", "data/held_out.jsonl"):
        assert (tmp_path / "quickstart" / file).is_file()


def test_the_plan_the_picture_and_the_answers_are_shown(executed):
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


def test_a_picture_is_shown_and_answered(executed):
    shown = cell(executed, "drawn = question")
    question, colour = printed(shown).strip().split(" -> ")
    assert any("image/png" in each.get("data", {}) for each in shown.outputs)
    assert question.endswith(("?", "."))
    (answer,) = (o.data for o in cell(executed, "[[question]]").outputs if "data" in o)
    assert answer["text/plain"] in {f"['{each}']" for each in COLOURS}
    assert colour in COLOURS


def test_the_exported_adapter_is_what_plain_peft_loads(executed, folder, monkeypatch):
    monkeypatch.chdir(folder)  # the base is named by its relative path
    loaded = AutoPeftModelForCausalLM.from_pretrained(folder / "runs" / "notebook-adapter")
    run = Run(folder / "runs" / "notebook")
    step = run.best_step() or run.newest() or 0
    trained = load_file(run.checkpoint(step) / "adapter" / "adapter_model.safetensors")
    held = {name.replace(".default.", "."): value for name, value in loaded.state_dict().items()}
    assert trained
    for name, value in trained.items():
        assert held[name].equal(value.to(held[name].dtype))


def test_the_same_start_learns_by_pairs_and_by_a_reward(methods, folder):
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
    run = Run(folder.parent / "runs/methods-grpo")
    rewards = [each["metrics"]["reward"] for each in run.read_metrics("train")]
    assert rewards[-1] > 3 * rewards[0] > 0


@pytest.mark.parametrize("path", [NOTEBOOK, METHODS], ids=lambda path: path.stem)
def test_what_is_committed_holds_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    run = [cell for cell in code_of(notebook) if cell.outputs or cell.execution_count is not None]
    assert run == []
    assert path.stat().st_size < 20_000
