"""Models and data sets by their names on the hub, served from folders of this machine."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished, Tiny, environment, write_recipe
from hub import COMMIT, serve

from finetune.runs.run import Run

Verb = Callable[..., Finished]


@pytest.fixture
def hub(tiny: Tiny, tmp_path: Path) -> Iterator[tuple[Verb, list[str]]]:
    """`finetune` with a hub of `someone/tiny` and `someone/chats`; and what that was asked."""
    root = tmp_path / "hub"
    shutil.copytree(tiny.model, root / "models/someone/tiny")
    rows = root / "datasets/someone/chats/data"
    rows.mkdir(parents=True)
    shutil.copy(tiny.data, rows / "train.jsonl")
    shutil.copy(tiny.eval_data, rows / "test.jsonl")
    with serve(root) as (address, asked):
        variables = environment(tmp_path / "cache") | {
            "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }  # fmt: skip
        del variables["HF_HUB_OFFLINE"]

        def run(*words: str | Path, offline: bool = False) -> Finished:
            done = subprocess.run(
                [sys.executable, "-m", "finetune", *map(str, words)],
                env=variables | ({"HF_HUB_OFFLINE": "1"} if offline else {}),
                capture_output=True, text=True, timeout=240, check=False,
            )  # fmt: skip
            return Finished(done.returncode, done.stdout, done.stderr)

        yield run, asked


def fields(tiny: Tiny, **data: Any) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "model": {"name": "someone/tiny"},
        "data": [{"source": "someone/chats", "format": "messages", **data}],
        "eval_data": [{"source": "someone/chats", "format": "messages", "split": "test"}],
        "adapter": {"r": 4},
        "max_steps": 2,
    }
    return tiny.fields() | sections


def losses(run: Run) -> list[float]:
    return [record["loss"] for record in run.read_metrics("train")]


@pytest.mark.slow
def test_names_on_the_hub_train_what_their_files_train(hub, tiny, tmp_path):
    finetune, asked = hub
    named = fields(tiny)
    files = named | {key: tiny.fields()[key] for key in ("model", "data", "eval_data")}
    runs = {}
    for name, recipe in (("hub", named), ("files", files)):
        path, runs[name] = (
            write_recipe(tmp_path / f"{name}.json", recipe),
            Run(tmp_path / f"run-{name}"),
        )
        done = finetune(
            "launch", path, "--backend", "ddp", "--processes", "2", "--output", runs[name].root
        )
        assert done.status == 0, done.output
    assert losses(runs["hub"]) == losses(runs["files"])
    config = json.loads((runs["hub"].final / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/tiny"
    before = len(asked)
    said = finetune("chat", runs["hub"].root, "--prompt", "Hello", offline=True)
    assert said.status == 0, said.output
    assert len(asked) == before


@pytest.mark.slow
def test_an_adapter_of_the_hub_is_trained_further_as_its_folder_is(hub, tiny, tmp_path):
    finetune, _ = hub
    first = Run(tmp_path / "first")
    recipe = write_recipe(tmp_path / "first.json", fields(tiny))
    done = finetune("train", recipe, "--output", first.root)
    assert done.status == 0, done.output
    shutil.copytree(first.final, tmp_path / "hub/models/someone/adapter")
    told = {}
    for name, adapter in (("named", "someone/adapter"), ("folder", str(first.final))):
        further = fields(tiny) | {"model": {"name": "someone/tiny", "adapter": adapter}}
        del further["adapter"]
        run = Run(tmp_path / name)
        done = finetune(
            "train", write_recipe(tmp_path / f"{name}.json", further), "--output", run.root
        )
        assert done.status == 0, done.output
        told[name] = losses(run)
    assert told["named"] == told["folder"]
    assert told["named"][0] < losses(first)[0]
    absent = fields(tiny) | {"model": {"name": "someone/tiny", "adapter": "someone/absent"}}
    done = finetune("train", write_recipe(tmp_path / "absent.json", absent))
    assert done.status == 2
    assert "model.adapter: 'someone/absent' is not a folder here" in done.stderr


def test_a_stream_reads_what_it_needs_and_leaves_no_copy(hub, tiny, tmp_path):
    finetune, asked = hub
    recipe = write_recipe(
        tmp_path / "r.json", fields(tiny, stream=True, first=10) | {"eval_data": []}
    )
    done = finetune("inspect", recipe, "--json")
    assert done.status == 0, done.output
    assert json.loads(done.stdout)["counts"]["train"]["rows"] == 10
    copies = [
        path for path in (tmp_path / "home" / "datasets").rglob("*") if path.suffix == ".arrow"
    ]
    assert copies == []
    assert any(f"/resolve/{COMMIT}/data/train.jsonl" in request for request in asked)
    # The second time the prepared rows are found by the data set's commit.
    asked.clear()
    again = finetune("inspect", recipe, "--json")
    assert json.loads(again.stdout)["counts"] == json.loads(done.stdout)["counts"]
    assert not any("train.jsonl" in request for request in asked)


def test_a_plan_reads_the_config_of_a_model_on_the_hub(hub, tiny, tmp_path):
    finetune, asked = hub
    recipe = write_recipe(tmp_path / "r.json", fields(tiny))
    done = finetune("plan", recipe, "--gpu", "H100-80", "--backend", "single", "--json")
    assert done.status == 0, done.output
    tensors = header(tiny.model / "model.safetensors")
    expected = sum(math.prod(t["shape"]) for name, t in tensors.items() if name != "__metadata__")
    assert json.loads(done.stdout)["prediction"]["model"]["parameters"] == expected
    assert not any("safetensors" in request for request in asked)


def header(file: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors."""
    content = file.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


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
    finetune, _ = hub
    recipe = write_recipe(tmp_path / "r.json", fields(tiny) | {section: value})
    done = finetune("train", recipe, "--output", tmp_path / "run")
    assert done.status == 2, done.output
    assert told in done.stderr
    assert "Traceback" not in done.output
