"""Checkpoints hold boxes, and those of format 1, which hold flat ranges, go on as they were."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import FP32, problems_of
from safetensors import safe_open
from safetensors.torch import save_file

import finetune as ft
from finetune import FinetuneError, Options, Run
from finetune.distributed.boxes import Box, boxes_of
from finetune.distributed.reader import Reader

STORED = Path(__file__).parent / "format1"
"""Two steps of a tiny model on three processes of DDP, its data, and what four steps gave."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    shutil.copytree(STORED, tmp_path / "stored")
    return tmp_path / "stored"


def losses(run: Run) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in run.read_metrics("train")}


def test_a_checkpoint_of_format_1_is_continued(place, finetune):
    run = Run(place / "run")
    expected = losses(run)
    assert sorted(expected) == [1, 2, 3, 4]
    words = ("--precision", "fp32", "--output", "run", "--resume", "--no-plot")
    finetune("train", "recipe.json", *words, cwd=place).passed()
    assert losses(run) == pytest.approx(expected, abs=FP32)
    written = json.loads((run.checkpoint(4) / "manifest.json").read_text())
    assert written["format"] == 2
    (file,) = (run.checkpoint(4) / "state").glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        kept = {label for label in tensors.keys() if not label.endswith("|whole")}  # noqa: SIM118
        shapes = {label: tuple(tensors.get_slice(label).get_shape()) for label in kept}
    sizes = written["shapes"]
    assert shapes == {
        f"{name}|{key}|{','.join('0' for _ in sizes[name])}": tuple(sizes[name])
        for name in sizes
        for key in ("weight", "exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize("harm", ["flipped", "missing", "cut"])
def test_a_damaged_checkpoint_of_format_1_is_named(place, monkeypatch, harm):
    file = Run(place / "run").checkpoint(2) / "state" / "rank-00001-of-00003.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(content if harm == "flipped" else content[:-100])
    monkeypatch.chdir(place)
    options = Options(Path("run"), resume=True, plot=False)
    recipe = ft.load_recipe("recipe.json")
    told = "; ".join(problems_of(ft.train, recipe, precision="fp32", options=options))
    assert "step-00000002" in told
    assert file.name in told


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (1, 7)])
def test_a_range_is_boxes_in_its_order(shape):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    origin = tuple(0 for _ in shape)
    for start in range(whole.numel() + 1):
        for end in range(start, whole.numel() + 1):
            boxes = boxes_of(shape, start, end - start)
            found = [whole[box.within(origin)].reshape(-1) for box in boxes]
            assert [n for part in found for n in part.tolist()] == list(range(start, end))


def test_a_reader_pastes_columns_and_refuses_what_is_missing_or_there_twice(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    columns = [Box((0, 0), (3, 3)), Box((0, 3), (3, 1))]

    def saved(folder: str, boxes: list[Box]) -> Reader:
        state = tmp_path / folder / "state"
        state.mkdir(parents=True)
        for number, box in enumerate(boxes):
            label = f"w|weight|{','.join(map(str, box.offsets))}"
            part = whole[box.within((0, 0))].contiguous()
            save_file({label: part}, state / f"rank-{number}.safetensors")
        return Reader(tmp_path / folder, {"w": (3, 4)})

    with saved("whole", columns) as reader:
        assert torch.equal(reader.full("w", "weight").reshape(3, 4), whole)
        assert reader.range("w", "weight", 2, 5).tolist() == [2, 3, 4, 5, 6]
    with saved("lacking", columns[:1]) as reader, pytest.raises(FinetuneError) as lacking:
        reader.full("w", "weight")
    assert "no elements 3 to 12 of w (weight)" in str(lacking.value)
    twice = [*columns, Box((1, 0), (1, 4))]
    with saved("twice", twice) as reader, pytest.raises(FinetuneError, match="twice"):
        reader.full("w", "weight")
