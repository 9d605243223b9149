"""Rows with images: none is cut or crosses a document, and what they cost on disk and in memory."""

import dataclasses
import itertools
import json
import random
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pictured
import pytest
import torch
from PIL import Image
from test_images import recipe_of as images_recipe
from transformers import AutoConfig, AutoModelForImageTextToText

from finetune.checks.images import planned
from finetune.data.images.image_file import ImageFile, PlacedImage, digest_of
from finetune.data.prepare import Prepared, prepare
from finetune.data.rows.collate import MicroBatch, collate
from finetune.data.rows.packing import pack
from finetune.data.rows.prefetch import feed
from finetune.data.rows.store import Documents, Rows
from finetune.errors import FinetuneError
from finetune.models.image_parts import image_inputs
from finetune.models.model import load_chat_of
from finetune.recipe import Recipe
from finetune.runs import units
from finetune.verification.memory.traced_images import pictured_rows

IMAGE, SIDE = 262, 16
"""Id of the token that features replace, and pixels of a side of the square that is one token."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is known by its config and its processor alone."""
    return pictured.made(tmp_path_factory.mktemp("base"), weights=False)


def drawn(folder: Path, source: random.Random, count: int) -> dict[str, int]:
    """Pictures of noise, by name: the tokens of each."""
    tokens = dict[str, int]()
    for number in range(count):
        across, down = source.randint(2, 6), source.randint(2, 6)  # 4 to 36 tokens
        values = np.random.default_rng(number).integers(
            0, 256, (SIDE * down, SIDE * across, 3), np.uint8
        )
        Image.fromarray(values).save(folder / f"{number:03}.png")
        tokens[f"{number:03}.png"] = across * down
    return tokens


def written(path: Path, source: random.Random, count: int, pictures: list[str]) -> list[list[str]]:
    """Rows of some turns with text and pictures anywhere; returns the pictures of each."""
    shown = list[list[str]]()
    with path.open("w") as file:
        for _ in range(count):
            turns, own = list[dict[str, Any]](), list[str]()
            for _ in range(source.randint(1, 3)):
                names = source.choices(pictures, k=source.randint(0, 3))
                parts: list[dict[str, str]] = [{"type": "image", "path": name} for name in names]
                parts += [
                    {"type": "text", "text": "x" * source.randint(1, 20)}
                    for _ in range(source.randint(1, 3))
                ]
                source.shuffle(parts)
                own += [part["path"] for part in parts if part["type"] == "image"]
                turns.append({"role": "user", "content": parts})
                turns.append({"role": "assistant", "content": "y" * source.randint(1, 30)})
            shown.append(own)
            file.write(json.dumps({"messages": turns}) + "\n")
    return shown


def recipe_of(base: Path, rows: Path, **batch: Any) -> Recipe:
    return images_recipe(base, rows, data_checks="report", batch=batch)


def prepared(recipe: Recipe, folder: Path) -> Prepared:
    return prepare(recipe, load_chat_of(recipe), folder / "cache")


def test_no_image_is_cut_and_none_crosses_a_document(base, tmp_path):
    count = 60
    source = random.Random(count)
    tokens = drawn(tmp_path, source, 24)
    path = tmp_path / "rows.jsonl"
    shown = written(path, source, count, list(tokens))
    whole = prepared(recipe_of(base, path, max_length=1024), tmp_path).train.documents
    assert len(whole) == count
    for most in (60, 150):
        recipe = recipe_of(base, path, max_length=most, overlong="truncate")
        documents = prepared(recipe, tmp_path).train.documents
        cut = uncut = 0
        for number in range(len(documents)):
            ids, _ = documents.document(number)
            row = int(documents.origins[number, 1]) - 1
            # A prefix that ends at the longest length, or in front of an image that is over it.
            complete, placed = whole.document(row)[0], whole.images_of(row)
            assert [each.end - each.start for each in placed] == [tokens[n] for n in shown[row]]
            over = [each.start for each in placed if each.start < most < each.end]
            assert len(ids) == min([len(complete), most, *over])
            assert ids.tolist() == complete[: len(ids)].tolist()
            inside = [each for each in placed if each.end <= len(ids)]
            assert documents.images_of(number) == inside
            assert (ids == IMAGE).sum() == sum(each.end - each.start for each in inside)
            cut, uncut = cut + (len(ids) < len(complete)), uncut + (len(inside) > 0)
        assert min(cut, uncut) > len(documents) // 20  # the draws have both
        check_packs(recipe, documents, source.randint(most, 4 * most))


def check_packs(recipe: Recipe, documents: Documents, capacity: int) -> None:
    """Each image of a pack is within one document, and has as many features as tokens."""
    inputs = image_inputs(recipe.model, load_chat_of(recipe).images, alone=True)
    rows = Rows(documents, *pack(documents.lengths, capacity), packed=True, image_inputs=inputs)
    assert len(rows) < len(documents)
    for index in range(len(rows)):
        batch = collate(rows, np.array([index]), 257, "cpu")
        assert batch.boundaries is not None
        ends, sizes = batch.boundaries.numbers, list[int]()
        for number, (start, end) in zip(
            rows.numbers(index), itertools.pairwise(ends), strict=False
        ):
            own = [each.end - each.start for each in documents.images_of(int(number))]
            assert batch.boundaries.positions[0, 0, start:end].tolist() == [*range(end - start)]
            assert int((batch.ids[0, start:end] == IMAGE).sum()) == sum(own)
            sizes += own
        grids = batch.images.get("image_grid_thw", torch.empty(0, 3, dtype=torch.int64))
        assert (grids.prod(-1) // 4).tolist() == sizes
        assert len(batch.images.get("pixel_values", ())) == 4 * sum(sizes)


def bytes_of(found: Prepared) -> int:
    return sum(path.stat().st_size for path in found.folder.rglob("*") if path.is_file())


def test_the_cache_has_8_bytes_an_image_token_and_200_a_picture_at_most(base, tmp_path):
    source = random.Random(0)
    tokens = drawn(tmp_path, source, 60)
    for name in ("with", "without"):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for number, picture in enumerate(tokens):
                image = [{"type": "image", "path": picture}] if name == "with" else []
                asked = [*image, {"type": "text", "text": f"picture {number}"}]
                turns = [("user", asked), ("assistant", "yes")]
                row = {"messages": [{"role": role, "content": text} for role, text in turns]}
                file.write(json.dumps(row) + "\n")
    both = [
        bytes_of(prepared(recipe_of(base, tmp_path / f"{name}.jsonl", max_length=256), tmp_path))
        for name in ("with", "without")
    ]
    markers = 2 * len(tokens)  # around the image, for which the rows are longer as well
    assert both[0] - both[1] <= 8 * (sum(tokens.values()) + markers) + 200 * len(tokens)


def test_the_feed_has_the_pixels_of_two_steps_at_most(base, tmp_path):
    source = random.Random(1)
    tokens = drawn(tmp_path, source, 12)
    written(tmp_path / "rows.jsonl", source, 40, list(tokens))
    recipe = recipe_of(base, tmp_path / "rows.jsonl", max_length=1024)
    rows = prepared(recipe, tmp_path).train
    inputs = image_inputs(recipe.model, load_chat_of(recipe).images, alone=True)
    rows = dataclasses.replace(rows, image_inputs=inputs)
    alive, seen = set[int](), list[int]()

    def make(step: int) -> MicroBatch:
        batch = collate(rows, np.arange(4 * step, 4 * step + 4), 257, "cpu")
        alive.add(step)
        weakref.finalize(batch.images["pixel_values"], alive.discard, step)
        return batch

    with feed(make, 10, torch.device("cpu")) as taking:
        for step in range(10):
            batch = taking.take(step)
            if step < 9:
                while step + 1 not in alive:  # the next one is made while this one is trained on
                    time.sleep(0.001)
            time.sleep(0.02)  # a feed that went further would have begun
            seen.append(len(alive))
            assert step in alive
            del batch
    assert max(seen) == 2
    assert not alive


def test_the_plan_counts_the_images_of_the_data_and_the_parts_of_the_model(base, tmp_path):
    source = random.Random(2)
    tokens = drawn(tmp_path, source, 12)
    shown = written(tmp_path / "rows.jsonl", source, 30, list(tokens))
    recipe = recipe_of(base, tmp_path / "rows.jsonl", max_length=1024)
    parts, images, largest, decoded = planned(recipe)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(base))
    tower = model.model.visual
    merger = sum(parameter.numel() for parameter in tower.merger.parameters())
    inside = sum(parameter.numel() for parameter in tower.parameters()) - merger
    text = sum(parameter.numel() for parameter in model.parameters()) - inside - merger
    assert parts.split("parts        ")[1] == (
        f"language {text:,} (trained), connector {merger:,}, tower {inside:,} parameters"
    )
    rows = [[tokens[name] for name in of_row] for of_row in shown]
    assert (
        f"{sum(map(bool, rows))} of the first 30 rows, {min(map(len, rows))} to "
        f"{max(map(len, rows))} each; {round(sum(map(sum, rows)) / 30)} tokens in a mean row, at "
        f"most {max(map(sum, rows))}"
    ) in images
    most = max(each for row in rows for each in row)
    assert f"{most} tokens, {units.size(4 * most * 2 * 3 * 64 * 4 + 24)} of pixels" in largest
    assert f"decodes {recipe.batch.rows * sum(map(len, rows)) / 30:.3g} images" in decoded


def test_a_trace_has_rows_full_of_the_largest_image_that_fits(base, tmp_path):
    for name, side in (("a", 2), ("b", 4)):
        Image.new("RGB", (SIDE * side, SIDE * side)).save(tmp_path / f"{name}.png")
    parts = [{"type": "image", "path": f"{name}.png"} for name in "ab"]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "y"}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": turns}))
    # Images of 16 and of 4 tokens, each with another token behind it.
    for length, tokens in ((34, 32), (33, 16), (17, 16), (16, 12), (5, 4)):
        found = pictured_rows(recipe_of(base, path, max_length=length), 3, length)
        assert found.ids.shape == (3, length)
        assert found.tokens == (found.ids == IMAGE).sum() == 3 * tokens
    without = recipe_of(base, tmp_path / "none.jsonl", max_length=50)
    assert pictured_rows(without, 1, 50).tokens == 36  # the largest of the processor
    with pytest.raises(FinetuneError, match="the smallest image has more tokens"):
        pictured_rows(without, 1, 4)


def test_images_of_threads_are_those_of_the_complete_processor(base, tmp_path):
    names = [*drawn(tmp_path, random.Random(3), 9)]
    files = [ImageFile(path=str(tmp_path / name)) for name in names]
    placed = [PlacedImage(0, 0, each, digest_of(each.read())) for each in files]
    processor = load_chat_of(recipe_of(base, tmp_path)).images
    assert processor is not None
    found = processor.tensors([placed[:2], [], placed[2:]])
    opened = [Image.open(tmp_path / name) for name in names]
    wanted = processor.whole(
        images=[opened], text=[processor.token * len(opened)], return_tensors="pt"
    )
    assert found.keys() == {"pixel_values", "image_grid_thw"}
    assert all(found[name].equal(wanted[name]) for name in found)
