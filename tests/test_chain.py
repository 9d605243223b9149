"""A chain trains what its stages would train by hand, and goes on where it was interrupted."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Finetune, Tiny, losses, read, slow, write_recipe

from finetune.runs.run import Run

SHORT: dict[str, Any] = {"saving": {}, "evaluation": {}, "max_steps": 2}
ADAPTER = {"r": 4, "targets": ["q_proj", "up_proj"]}


def recipe(tiny: Tiny, folder: Path, name: str, **sections: Any) -> str:
    return str(write_recipe(folder / f"{name}.json", tiny.fields(**SHORT | sections)))


@pytest.mark.parametrize("second", [ADAPTER, slow({"r": 2})], ids=["same", "other"])
def test_a_stage_starts_from_the_result_before_it(
    tiny: Tiny, finetune: Finetune, tmp_path: Path, second: Any
):
    a = recipe(tiny, tmp_path, "a", adapter=ADAPTER)
    b = recipe(tiny, tmp_path, "b", adapter=second, optim={"lr": 1e-2}, seed=5)
    finetune("launch", a, b, "--chain", "two", "--precision", "fp32", cwd=tmp_path).passed()
    root = tmp_path / "runs" / "two"
    assert read(root / "chain.json")["stages"] == [
        {"recipe": a, "run": "1-a"}, {"recipe": b, "run": "2-b"},
    ]  # fmt: skip
    start = root / "1-a"
    if second != ADAPTER:
        start = tmp_path / "merged"
        finetune("export", root / "1-a", "--merge", "--to", start).passed()
    words = ["--precision", "fp32", "--output", tmp_path / "alone"]
    finetune("launch", b, f"model.name={start}", *words, cwd=tmp_path).passed()
    assert losses(Run(root / "2-b")) == losses(Run(tmp_path / "alone"))


def test_a_chain_goes_on_with_the_stage_that_failed(tiny: Tiny, finetune: Finetune, tmp_path: Path):
    a = recipe(tiny, tmp_path, "a", adapter=ADAPTER)
    data = tmp_path / "later.jsonl"
    b = recipe(tiny, tmp_path, "b", adapter=ADAPTER, data=[{"source": str(data), "format": "text"}])
    words = ["launch", a, b, "--chain", "two", "--precision", "fp32"]
    assert "later.jsonl" in finetune(*words, cwd=tmp_path).refused()
    first = tmp_path / "runs" / "two" / "1-a" / "metrics.jsonl"
    before = first.read_bytes()
    data.write_bytes(b'{"text": "what is learned is kept"}\n' * 8)
    assert "continue it with --resume" in finetune(*words, cwd=tmp_path).refused()
    done = finetune(*words, "--resume", cwd=tmp_path).passed()
    assert "stage 2 of 2" in done.stdout
    assert first.read_bytes() == before
    assert (tmp_path / "runs" / "two" / "2-b" / "final" / "README.md").is_file()
    other = finetune("launch", b, a, "--chain", "two", "--resume", cwd=tmp_path).refused()
    assert "has another chain" in other


def test_a_chain_that_cannot_be_trained_is_refused_before_its_first_stage(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
):
    a = recipe(tiny, tmp_path, "a", adapter=ADAPTER)
    b = recipe(tiny, tmp_path, "b", model={"quantization": "nf4"})
    refused = finetune("launch", a, b, "--chain", "two", cwd=tmp_path).refused()
    assert "quantization" in refused
    assert "two recipes" in finetune("launch", a, "--chain", "two", cwd=tmp_path).refused()
    words = ["--chain", "two", "--launcher", "slurm"]
    assert "does not wait" in finetune("launch", a, a, *words, cwd=tmp_path).refused()
    assert not (tmp_path / "runs").exists()
