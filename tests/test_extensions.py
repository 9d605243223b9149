"""A method, a data format, an exporter and a launcher from outside the package."""

import json
import os
import re
from pathlib import Path

import pytest
from conftest import ROOT, Tiny, write_recipe

from finetune import extensions
from finetune.cli import main as cli
from finetune.errors import FinetuneError
from finetune.runs.run import Run

PAGE = ROOT / "docs" / "extending.md"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "my_tuning.py").write_text("\n".join(code))
    rows = [{"ask": f"Say {word}. ", "say": word} for word in ("yes", "no", "maybe", "always")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def recipe(toy: Path, tiny: Tiny, name: str, **sections: object) -> Path:
    fields = tiny.fields(adapter={"r": 2}, max_steps=2) | {
        "data": [{"source": str(toy / "rows.jsonl"), "format": "my_tuning:ASKED"}],
        "eval_data": [], "evaluation": {}, **sections,
    }  # fmt: skip
    return write_recipe(toy / f"{name}.json", fields)


def test_extensions_outside_the_package_are_named_and_run(toy, tiny, finetune):
    def done(words: str) -> str:
        paths = {"PYTHONPATH": os.pathsep.join([str(toy), str(ROOT)])}
        return finetune(*words.split(), cwd=toy, env=paths).passed().stdout

    losses = {}
    trained = "--precision fp32 --output"
    for name, method in (("plain", "sft"), ("doubled", "my_tuning:Doubled")):
        recipe(toy, tiny, name, method=method)
        done(f"launch {name}.json --launcher my_tuning:start {trained} {name}")
        run = Run(toy / name)
        assert run.root.with_suffix(".recipe.json").is_file()
        losses[name] = [record["loss"] for record in run.read_metrics("train")]
    assert losses["doubled"][0] == pytest.approx(2 * losses["plain"][0], rel=1e-6)
    assert json.loads((toy / "doubled/recipe.json").read_text())["method"] == "my_tuning:Doubled"
    done(f"train doubled/recipe.json --resume max_steps=3 {trained} doubled")
    assert "MAYBE" in done("inspect plain.json")
    done("export doubled --to out --format my_tuning:names")
    assert (toy / "out/names.txt").read_text() == "doubled"
    assert json.loads((toy / "out/export.json").read_text())["kind"] == "my_tuning:names"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["method=my_tuning:Dubled"], "my_tuning has no 'Dubled'; did you mean 'Doubled'?"),
        (["method=my_tuning:ASKED"], "'my_tuning:ASKED' is not a subclass of finetune.Rec"),
        (["method=my_tunning:Doubled"], "there is no module 'my_tunning'; install it, or put"),
        (["data.0.format=my_tuning:Doubled"], "'my_tuning:Doubled' is not a finetune.data.form"),
        (["data.0.format=my_tuning:"], "got 'my_tuning:', expected module:attribute"),
        (["--launcher", "acelerate"], "--launcher: got 'acelerate', expected one of accelerate"),
    ],
)
def test_a_name_of_nothing_is_refused(toy, tiny, monkeypatch, capsys, words, problem):
    monkeypatch.syspath_prepend(str(toy))
    asked = recipe(toy, tiny, "refused")
    assert cli.main(["launch", str(asked), "--output", str(toy / "no"), *words]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert "Traceback" not in said
    assert not (toy / "no").exists()


def test_a_module_that_fails_to_import_is_reported(tmp_path, monkeypatch):
    (tmp_path / "broken_toy.py").write_text("import nothing_of_the_kind\n")
    (tmp_path / "timing_toy.py").write_text(
        "import signal\nLEFT = signal.getitimer(signal.ITIMER_REAL)\n"
    )
    (tmp_path / "raising_toy.py").write_text("raise ValueError('not today')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, told in (
        ("broken_toy", "broken_toy imports 'nothing_of_the_kind', which is not"),
        ("raising_toy", "cannot be imported: ValueError: not today"),
    ):
        with pytest.raises(FinetuneError, match=told):
            extensions.find("method", f"{name}:X", {})
    assert extensions.find("method", "timing_toy:LEFT", {}) == (0.0, 0.0)  # no clock ends it
