"""Models and data sets by their names on the hub, served from folders of this machine."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished, Tiny, environment, gpus_are_here, losses, run_command, write_recipe
from hub import COMMIT, serve

from finetune.process.warm import TRAINING, Warm
from finetune.runs.run import Run

Hub = tuple[Path, dict[str, str], list[str], str]


@pytest.fixture(scope="module")
def served(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub of `someone/tiny` and `someone/chats`, and an interpreter whose libraries ask it."""
    root = tmp_path_factory.mktemp("served")
    shutil.copytree(tiny.model, root / "hub/models/someone/tiny")
    rows = root / "hub/datasets/someone/chats/data"
    rows.mkdir(parents=True)
    shutil.copy(tiny.data, rows / "train.jsonl")
    shutil.copy(tiny.eval_data, rows / "test.jsonl")
    with serve(root / "hub") as (address, asked):
        variables = {"HF_ENDPOINT": address, "HF_HOME": str(root / "home"), "HF_HUB_OFFLINE": "0"}
        variables["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        if gpus_are_here():
            yield root, variables, asked, sys.executable
            return
        warm = Warm(TRAINING, environment(root) | variables)
        yield root, variables, asked, warm.python
        warm.close()


Verb = Callable[..., Finished]


@pytest.fixture
def hub(served: Hub, tmp_path: Path) -> tuple[Verb, list[str]]:
    """`finetune` with that hub, and what the hub was asked."""
    _, variables, asked, python = served
    asked.clear()

    def run(*words: str | Path, offline: bool = False) -> Finished:
        env = variables | ({"HF_HUB_OFFLINE": "1"} if offline else {})
        command = [sys.executable if offline else python, "-m", "finetune", *map(str, words)]
        more = ["--no-plot"] if words[0] in ("train", "launch") else []
        return run_command([*command, *more], tmp_path, env=env, seconds=240)

    return run, asked


def fields(tiny: Tiny, **data: Any) -> dict[str, Any]:
    chats = {"source": "someone/chats", "format": "messages"}
    return tiny.fields() | {
        "model": {"name": "someone/tiny"}, "data": [chats | data],
        "eval_data": [chats | {"split": "test"}], "adapter": {"r": 4}, "max_steps": 2,
    }  # fmt: skip


@pytest.fixture
def made(hub: tuple[Verb, list[str]], tmp_path: Path) -> Callable[..., Run]:
    """Train a recipe, on two processes where asked."""

    def make(name: str, recipe: dict[str, Any], *launch: str) -> Run:
        path = write_recipe(tmp_path / f"{name}.json", recipe)
        run = Run(tmp_path / f"run-{name}")
        done = hub[0]("launch" if launch else "train", path, *launch, "--output", run.root)
        assert done.status == 0, done.output
        return run

    return make


@pytest.mark.slow
def test_names_on_the_hub_train_what_their_files_train(hub, made, tiny):
    finetune, asked = hub
    named = fields(tiny)
    files = named | {key: tiny.fields()[key] for key in ("model", "data", "eval_data")}
    ddp = ("--backend", "ddp", "--processes", "2")
    run = made("hub", named, *ddp)
    assert losses(run) == losses(made("files", files, *ddp))
    config = json.loads((run.final / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/tiny"
    before = len(asked)
    said = finetune("chat", run.root, "--prompt", "Hello", offline=True)
    assert said.status == 0, said.output
    assert len(asked) == before


@pytest.mark.slow
def test_an_adapter_of_the_hub_is_trained_further_as_its_folder_is(
    hub, made, served, tiny, tmp_path
):
    first = made("first", fields(tiny))
    shutil.copytree(first.final, served[0] / "hub/models/someone/adapter")
    recipe = fields(tiny)
    del recipe["adapter"]

    def further(adapter: str) -> dict[str, Any]:
        return recipe | {"model": {"name": "someone/tiny", "adapter": adapter}}

    named = losses(made("named", further("someone/adapter")))
    assert named == losses(made("folder", further(str(first.final))))
    assert named[0] < losses(first)[0]
    done = hub[0]("train", write_recipe(tmp_path / "absent.json", further("someone/absent")))
    assert done.status == 2
    assert "model.adapter: 'someone/absent' is not a folder here" in done.stderr


@pytest.mark.slow
def test_a_stream_reads_what_it_needs_and_leaves_no_copy(hub, served, tiny, tmp_path):
    finetune, asked = hub
    recipe = fields(tiny, stream=True, first=10) | {"eval_data": []}
    path = write_recipe(tmp_path / "r.json", recipe)
    copies = set((served[0] / "home").rglob("*.arrow"))
    done = finetune("inspect", path, "--json")
    assert done.status == 0, done.output
    assert json.loads(done.stdout)["counts"]["train"]["rows"] == 10
    assert set((served[0] / "home").rglob("*.arrow")) == copies
    assert any(f"/resolve/{COMMIT}/data/train.jsonl" in request for request in asked)
    # The second time the prepared rows are found by the data set's commit.
    asked.clear()
    again = finetune("inspect", path, "--json")
    assert json.loads(again.stdout)["counts"] == json.loads(done.stdout)["counts"]
    assert not any("train.jsonl" in request for request in asked)


def test_a_plan_reads_the_config_of_a_model_on_the_hub(hub, tiny, tmp_path):
    finetune, asked = hub
    recipe = write_recipe(tmp_path / "r.json", fields(tiny))
    done = finetune("plan", recipe, "--gpu", "H100-80", "--backend", "single", "--json")
    assert done.status == 0, done.output
    content = (tiny.model / "model.safetensors").read_bytes()
    tensors = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    expected = sum(math.prod(t["shape"]) for name, t in tensors.items() if name != "__metadata__")
    assert json.loads(done.stdout)["prediction"]["model"]["parameters"] == expected
    assert not any("safetensors" in request for request in asked)


@pytest.mark.parametrize(
    ("section", "value", "told"),
    [
        ("model", {"name": "someone/nothing"}, "model.name"),
        ("data", [{"source": "someone/nothing", "format": "messages"}], "data.source"),
        ("data", [{"source": "someone/chats", "format": "messages", "split": "x"}],
            "Unknown split"),
    ],
)  # fmt: skip
def test_a_name_that_the_hub_does_not_have_is_a_mistake(hub, tiny, tmp_path, section, value, told):
    recipe = write_recipe(tmp_path / "r.json", fields(tiny) | {section: value})
    done = hub[0]("train", recipe, "--output", tmp_path / "run")
    assert done.status == 2, done.output
    assert told in done.stderr
    assert "Traceback" not in done.output
