"""Rows with images: the tokens and places of plain processors, and what is refused."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pictured
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from transformers import AutoTokenizer

from finetune import catalog
from finetune.data.chat.render import load_chat
from finetune.data.images.image_file import decode
from finetune.data.prepare import Prepared, prepare
from finetune.errors import FinetuneError
from finetune.models.model import load_chat_of
from finetune.recipe import Recipe

SIZES = {"a": (48, 32), "b": (40, 64)}
TURN = {"role": "assistant", "content": "red"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is known by its config and its processor alone."""
    return pictured.made(tmp_path_factory.mktemp("base"), weights=False)


def recipe_of(base: Path, source: Path, **sections: Any) -> Recipe:
    model = {"name": str(base), "reads": ["image"]}
    data = {"source": str(source), "format": "messages"} | sections.pop("data", {})
    given = {"method": "sft", "model": model | sections.pop("model", {}), "data": [data]}
    return catalog.from_fields(given | sections)


def prepared(base: Path, source: Path, folder: Path, **sections: Any) -> Prepared:
    recipe = recipe_of(base, source, **sections)
    return prepare(recipe, load_chat_of(recipe), folder / "cache")


def drawn(folder: Path, name: str, mode: str = "RGB", size: tuple[int, int] | None = None) -> Path:
    """A picture of noise."""
    size = size or SIZES[name]
    values = np.random.default_rng(len(name)).integers(0, 256, (size[1], size[0], 4), np.uint8)
    path = folder / f"{name}.png"
    Image.fromarray(values, "RGBA").convert(mode).save(path)
    return path


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def asked(*parts: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, TURN], **columns}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize("kind", pictured.KINDS)
def test_tokens_labels_and_pixels_are_those_of_the_plain_processor(assets, tmp_path, kind):
    rows = assets / "oracles/multimodal/data/rows.jsonl"
    base = assets / "oracles/multimodal/models" / kind
    found = prepared(base, rows, tmp_path)
    chat = load_chat_of(recipe_of(base, rows))
    assert chat.images is not None
    documents = found.train.documents
    known = pictured.stored(assets, f"encode_{kind}.json")
    assert chat.images.token_ids.tolist() == [known["image_token"]]
    assert len(documents) == len(known["rows"])
    for number, row in enumerate(known["rows"]):
        ids, trained = documents.document(number)
        assert ids.tolist() == row["ids"]
        assert np.flatnonzero(trained).tolist() == row["trained"]
        images = documents.images_of(number)
        tensors = chat.images.tensors([images])
        total = tensors["pixel_values"].double().sum().item() if images else None
        assert total == (row["pixel_sum"] and pytest.approx(row["pixel_sum"], abs=1e-2))
        if row["grid"]:
            assert tensors["image_grid_thw"].tolist() == row["grid"]
        inside = sum(((ids[i.start : i.end]) == known["image_token"]).sum() for i in images)
        assert inside == (ids == known["image_token"]).sum()
    # Tokens and places, never pixels: 38 images are 3.9 MB of pixels.
    size = sum(path.stat().st_size for path in found.folder.rglob("*") if path.is_file())
    assert size < 30_000


def forms(folder: Path) -> dict[str, tuple[Path, str]]:
    """The same row in every form, by name: a file and its format."""
    paths = [drawn(folder, name) for name in SIZES]
    one, two = (
        f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" for path in paths
    )
    place = {"type": "image"}

    def row(first: Any, second: Any, **columns: Any) -> dict[str, Any]:
        return asked(first, text("and"), second, text("?"), **columns)

    rows = {
        "path": row(place | {"path": "a.png"}, place | {"path": str(paths[1])}),
        "image": row(place | {"image": "a.png"}, place | {"image": "b.png"}),
        "url": row(place | {"url": f"file://{paths[0]}"}, place | {"url": two}),
        "openai": row(
            {"type": "image_url", "image_url": {"url": one}},
            {"type": "image_url", "image_url": {"url": two, "detail": "low"}},
        ),
        "columns": row(place, place, images=["a.png", {"path": "b.png", "bytes": None}]),
        "both": row(place, place | {"path": "b.png"}, image="a.png"),
        "text": {
            "messages": [{"role": "user", "content": "<image>and\n<image>\n?"}, TURN],
            "images": ["a.png", "b.png"],
        },
    }
    found = {
        name: (written(folder / f"{name}.jsonl", each), "messages") for name, each in rows.items()
    }
    turns = [{"from": "human", "value": "<image>\nand<image>?"}, {"from": "gpt", "value": "red"}]
    row = {"conversations": turns, "images": ["a.png", "b.png"]}
    found["sharegpt"] = written(folder / "sharegpt.jsonl", row), "sharegpt"
    table = {
        "messages": [[{"role": "user", "content": "<image>and<image>?"}, TURN]],
        "images": [[{"bytes": path.read_bytes(), "path": path.name} for path in paths]],
    }
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "rows.parquet")
    return found | {"parquet": (folder / "rows.parquet", "messages")}


def test_every_form_of_a_row_gives_the_same_tokens_labels_and_pixels(base, tmp_path):
    found = forms(tmp_path)
    chat = load_chat_of(recipe_of(base, tmp_path))
    assert chat.images is not None
    seen = {}
    for name, (path, kind) in found.items():
        documents = prepared(base, path, tmp_path, data={"format": kind}).train.documents
        ids, trained = documents.document(0)
        images = documents.images_of(0)
        pixels = chat.images.tensors([images])["pixel_values"]
        places = [(image.start, image.end, image.digest) for image in images]
        seen[name] = ids.tolist(), trained.tolist(), places, pixels.tolist()
    assert len(seen["path"][2]) == 2
    assert [name for name in seen if seen[name] != seen["path"]] == []


def test_no_token_of_an_image_is_trained_even_if_all_tokens_are(base, tmp_path):
    drawn(tmp_path, "a")
    path = written(tmp_path / "rows.jsonl", asked(text("x"), {"type": "image", "path": "a.png"}))
    (documents,) = [prepared(base, path, tmp_path, train_on="all").train.documents]
    ids, trained = documents.document(0)
    (image,) = documents.images_of(0)
    assert np.flatnonzero(~trained).tolist() == [0, *range(image.start, image.end)]
    assert set(ids[image.start : image.end]) == {262}


def test_transparent_and_turned_images_are_made_upright_and_white_and_counted(base, tmp_path):
    clear = Image.new("RGBA", (48, 32), (255, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (48, 32), "red").save(tmp_path / "turned.jpg", exif=exif)
    image, _ = decode((tmp_path / "clear.png").read_bytes(), "clear")
    assert image.getcolors() == [(48 * 32, (255, 255, 255))]
    image, _ = decode((tmp_path / "turned.jpg").read_bytes(), "turned")
    assert image.size == (32, 48)
    rows = [asked({"type": "image", "path": name}) for name in ("clear.png", "turned.jpg")]
    counts = prepared(base, written(tmp_path / "rows.jsonl", *rows), tmp_path).counts["train"]
    assert (counts["images_transparent"], counts["images_rotated"]) == (1, 1)


def bad(folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Rows that are refused, each with a part of the reason."""
    whole = drawn(folder, "a").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "text.png").write_text("no image")
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    Image.fromarray(np.full((16, 16), 40_000, np.uint16)).save(folder / "deep.png")
    Image.new("1", (13_400, 13_400)).save(folder / "bomb.png")
    Image.new("1", (10_000, 9_900)).save(folder / "large.png")
    Image.new("RGB", (1, 400)).save(folder / "line.png")

    def image(**part: Any) -> dict[str, Any]:
        return asked({"type": "image", **part})

    return {
        "missing": (image(path="gone.png"), "gone.png' cannot be read: No such file"),
        "cut": (image(path="cut.png"), "cut.png' cannot be decoded: "),
        "no image": (image(path="text.png"), "text.png' cannot be decoded: Pillow does not know"),
        "animated": (image(path="moving.gif"), "moving.gif' has 2 frames"),
        "16 bits": (image(path="deep.png"), "deep.png' has more than 8 bits per channel"),
        "bomb": (
            image(path="bomb.png"),
            "bomb.png' cannot be decoded: it has more than 178,956,970",
        ),
        "large": (image(path="large.png"), "large.png' has 10000 x 9900 pixels"),
        "line": (image(path="line.png"), "line.png': the image processor refuses it: "),
        "folder": (image(path="."), "cannot be read: Is a directory"),
        "address": (image(url="https://x.org/a.png"), "is a web address (https://x.org/a.png)"),
        "base64": (image(url="data:image/png;base64,?"), "whose content is not base64"),
        "number": (image(path=7), "is a number, expected the path of an image"),
        "two": (image(path="a.png", url="a.png"), "names 2 images"),
        "fewer": (asked({"type": "image"}), "1 places for images that name no file"),
        "more": (asked(text("?"), images=["a.png"]), "0 places for images that name no file"),
        "token": (
            asked({"type": "image", "path": "a.png"}, text("<|image_pad|>")),
            "writes 2 times <|image_pad|> for 1 images",
        ),
        "token alone": (asked(text("<|image_pad|>")), "writes 1 times <|image_pad|> for 0 images"),
        "mark": (asked({"type": "image", "path": "a.png"}, text("\ufffc")), "contains U+FFFC"),
        "video": (asked({"type": "video", "path": "a.mp4"}), "neither text nor an image: video"),
    }


def test_a_bad_image_is_refused_with_its_file_and_row(base, tmp_path):
    good = asked({"type": "image", "path": "a.png"})
    for name, (row, reason) in bad(tmp_path).items():
        path = written(tmp_path / "rows.jsonl", good, row)
        with pytest.raises(FinetuneError) as error:
            prepared(base, path, tmp_path)
        (found,) = error.value.problems
        assert found.startswith(f"{path} row 2: "), name
        assert reason in found, name
        assert "BytesIO" not in found
    assert [*(tmp_path / "cache").iterdir()] == []  # nothing is half prepared


def test_bad_images_are_dropped_and_listed_if_the_source_says_so(base, tmp_path):
    rows = [row for row, _ in bad(tmp_path).values()]
    good = asked({"type": "image", "path": "a.png"})
    path = written(tmp_path / "rows.jsonl", *rows, good)
    found = prepared(base, path, tmp_path, data={"on_bad_row": "drop"}, data_checks="report")
    assert (found.counts["train"]["bad"], len(found.train)) == (len(rows), 1)
    assert found.bad_rows is not None
    assert len(found.bad_rows.read_text().splitlines()) == len(rows)


@pytest.mark.parametrize("mode", ["CMYK", "L", "P", "1", "LA", "YCbCr"])
def test_images_of_other_modes_become_rgb_as_in_transformers(tmp_path, mode):
    from transformers.image_utils import load_image

    size = (16, 16)
    name = "picture.tif" if mode in ("CMYK", "YCbCr") else "picture.png"
    values = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    Image.fromarray(values).convert("L" if mode == "LA" else "RGB").convert(mode).save(
        tmp_path / name
    )
    image, notes = decode((tmp_path / name).read_bytes(), name)
    assert (image.mode, image.size) == ("RGB", size)
    assert image.tobytes() == load_image(str(tmp_path / name)).tobytes()
    assert notes == ({"images_transparent"} if mode == "LA" else set())


def test_a_photo_of_a_phone_with_a_second_picture_is_its_first_one(tmp_path):
    first, second = (Image.new("RGB", (32, 32), colour) for colour in ("red", "blue"))
    first.save(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=[second])
    image, _ = decode((tmp_path / "a.jpg").read_bytes(), "a")
    assert image.getpixel((8, 8))[0] > 250


def test_a_model_without_reads_refuses_a_row_with_an_image(base, tmp_path):
    drawn(tmp_path, "a")
    path = written(tmp_path / "rows.jsonl", asked({"type": "image", "path": "a.png"}))
    recipe = recipe_of(base, path, model={"reads": []})
    chat = load_chat(AutoTokenizer.from_pretrained(str(recipe.model.name)), None)
    with pytest.raises(
        FinetuneError, match=r"row 1: the row has images.*set model.reads=\[image\]"
    ):
        prepare(recipe, chat, tmp_path / "cache")


def test_a_row_is_truncated_in_front_of_an_image_and_never_inside(base, tmp_path):
    for name in SIZES:
        drawn(tmp_path, name)
    parts = [{"type": "image", "path": "a.png"}, text("and"), {"type": "image", "path": "b.png"}]
    turns = [
        {"role": "user", "content": parts[:2]},
        TURN,
        {"role": "user", "content": parts[2:]},
        TURN,
    ]
    path = written(tmp_path / "rows.jsonl", {"messages": turns})
    whole = prepared(base, path, tmp_path).train.documents
    first, second = whole.images_of(0)
    cut = {"max_length": second.start + 2, "overlong": "truncate"}
    found = prepared(base, path, tmp_path, batch=cut, data_checks="report").train.documents
    assert found.document(0)[0].tolist() == whole.document(0)[0][: second.start].tolist()
    assert [image.end for image in found.images_of(0)] == [first.end]
    with pytest.raises(FinetuneError, match=r"row 1: batch\.overlong=split would part"):
        prepared(base, path, tmp_path, batch=cut | {"overlong": "split"})
    with pytest.raises(FinetuneError, match="longer than"):
        prepared(base, path, tmp_path, batch=cut | {"overlong": "error"})


def test_a_changed_file_is_refused_by_name(base, tmp_path):
    image = drawn(tmp_path, "a")
    path = written(tmp_path / "rows.jsonl", asked({"type": "image", "path": "a.png"}))
    found = prepared(base, path, tmp_path)
    before = image.read_bytes()
    image.touch()  # another time, the same content
    again = prepared(base, path, tmp_path)
    assert again.folder == found.folder
    image.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(FinetuneError, match=f"image '{image}' has changed since") as error:
        prepared(base, path, tmp_path)
    assert str(found.folder) in str(error.value)
    chat = load_chat_of(recipe_of(base, path))
    assert chat.images is not None
    with pytest.raises(FinetuneError, match=f"image '{image}' has changed since"):
        chat.images.tensors([found.train.documents.images_of(0)])
    image.unlink()
    with pytest.raises(FinetuneError, match=f"image '{image}'"):
        prepared(base, path, tmp_path)


def test_rows_of_one_text_with_two_images_are_no_duplicates(base, tmp_path):
    drawn(tmp_path, "a")
    (tmp_path / "c.png").write_bytes(drawn(tmp_path, "bb", size=SIZES["a"]).read_bytes())
    rows = [asked({"type": "image", "path": name}) for name in ("a.png", "c.png", "a.png")]
    counts = prepared(base, written(tmp_path / "rows.jsonl", *rows), tmp_path).counts["train"]
    assert counts["duplicates"] == 1


def test_settings_of_the_processor_are_used_checked_and_saved(base, tmp_path):
    drawn(tmp_path, "a")
    path = written(tmp_path / "rows.jsonl", asked({"type": "image", "path": "a.png"}))
    small = {"processor_kwargs": {"size": {"shortest_edge": 256, "longest_edge": 512}}}
    usual, fewer = (
        prepared(base, path, tmp_path, model=model).train.documents.images_of(0)
        for model in ({}, small)
    )
    assert fewer[0].end - fewer[0].start < usual[0].end - usual[0].start
    recipe = recipe_of(base, path, model=small)
    chat = load_chat_of(recipe)
    assert chat.images is not None
    chat.images.save(tmp_path)
    stored = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert stored["size"] == small["processor_kwargs"]["size"]
    assert stored["image_processor_type"] == "Qwen2VLImageProcessor"
    wrong = recipe_of(base, path, model={"processor_kwargs": {"sise": 1}})
    with pytest.raises(FinetuneError, match="has no setting 'sise'; did you mean 'size'"):
        load_chat_of(wrong)
