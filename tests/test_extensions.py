"""A method, a data format, an exporter and a launcher from outside the package."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, Tiny, warm_python

from finetune import extensions
from finetune.errors import FinetuneError
from finetune.runs.run import Run

PAGE = ROOT / "docs" / "extending.md"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "toy_tuning.py").write_text(code)
    rows = [{"ask": f"Say {word}. ", "say": word} for word in ("yes", "no", "maybe", "always")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def finetune(toy: Path, *words: object) -> "subprocess.CompletedProcess[str]":
    paths = os.pathsep.join([str(toy), str(ROOT)])
    return subprocess.run(
        [warm_python(), "-m", "finetune", *map(str, words)],
        cwd=toy, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip


def recipe(toy: Path, tiny: Tiny, name: str, **sections: object) -> Path:
    fields = tiny.fields(adapter={"r": 2}, max_steps=2) | {
        "data": [{"source": str(toy / "rows.jsonl"), "format": "toy_tuning:SHOUTED"}],
        "eval_data": [],
        "evaluation": {},
        **sections,
    }
    path = toy / f"{name}.json"
    path.write_text(json.dumps(fields))
    return path


def test_extensions_outside_the_package_are_named_and_run(toy, tiny):
    losses = {}
    for name, method in (("plain", "sft"), ("doubled", "toy_tuning:Doubled")):
        asked = recipe(toy, tiny, name, method=method)
        words = ("--output", toy / name, "--precision", "fp32", "--launcher", "toy_tuning:start")
        done = finetune(toy, "launch", asked, *words, "--no-plot")
        assert done.returncode == 0, done.stderr
        run = Run(toy / name)
        assert run.root.with_suffix(".recipe.json").is_file()
        losses[name] = [record["loss"] for record in run.read_metrics("train")]
    assert losses["doubled"][0] == pytest.approx(2 * losses["plain"][0], rel=1e-6)
    assert json.loads((toy / "doubled/recipe.json").read_text())["method"] == "toy_tuning:Doubled"
    resumed = finetune(toy, "train", toy / "doubled/recipe.json", "--output", toy / "doubled",
                       "--resume", "max_steps=3", "--precision", "fp32", "--no-plot")  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    inspected = finetune(toy, "inspect", toy / "plain.json")
    assert "MAYBE" in inspected.stdout
    done = finetune(toy, "export", toy / "doubled", "--to", toy / "out", "--format",
                    "toy_tuning:names")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (toy / "out/names.txt").read_text() == "doubled"
    assert json.loads((toy / "out/export.json").read_text())["kind"] == "toy_tuning:names"
    done = finetune(toy, "eval", toy / "doubled", "--data", toy / "rows.jsonl", "--format",
                    "toy_tuning:SHOUTED", "--metrics", "toy_tuning:POLITE", "--limit", "2",
                    "--max-new-tokens", "2", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["measures"]["polite"]["after"] == 0.0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["method=toy_tuning:Dubled"], "toy_tuning has no 'Dubled'; did you mean 'Doubled'?"),
        (["method=toy_tuning:SHOUTED"], "'toy_tuning:SHOUTED' is not a subclass of finetune.Rec"),
        (["method=toy_tunning:Doubled"], "there is no module 'toy_tunning'; install it, or put"),
        (["data.0.format=toy_tuning:Doubled"], "'toy_tuning:Doubled' is not a finetune.data.form"),
        (["data.0.format=toy_tuning:"], "got 'toy_tuning:', expected module:attribute"),
        (["--launcher", "acelerate"], "--launcher: got 'acelerate', expected one of accelerate"),
    ],
)
def test_a_name_of_nothing_is_refused(toy, tiny, words, problem):
    done = finetune(toy, "launch", recipe(toy, tiny, "refused"), "--output", toy / "no", *words)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
    assert not (toy / "no").exists()


def test_a_module_that_fails_to_import_is_reported(tmp_path, monkeypatch):
    (tmp_path / "broken_toy.py").write_text("import nothing_of_the_kind\n")
    (tmp_path / "raising_toy.py").write_text("raise ValueError('not today')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        FinetuneError, match="broken_toy imports 'nothing_of_the_kind', which is not"
    ):
        extensions.find("method", "broken_toy:X", {})
    with pytest.raises(FinetuneError, match="cannot be imported: ValueError: not today"):
        extensions.find("method", "raising_toy:X", {})
