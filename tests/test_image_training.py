"""Training of models that read images: the losses of plain transformers, on every backend."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pictured
import pytest
import torch
from conftest import cut_off, launch, merged, slow, slow_but, write_recipe
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)

import finetune as ft
from finetune import Run, backend, catalog
from finetune.data.images.inputs import ImageInputs
from finetune.data.prepare import prepare
from finetune.data.rows.collate import collate
from finetune.errors import FinetuneError
from finetune.exporters.export import export
from finetune.kernels.head import give_loss
from finetune.models.image_parts import image_inputs, part_of, within_parts
from finetune.models.model import as_trained, load_chat_of
from finetune.planner.plan import plan
from finetune.training.run_options import Options

COLOURS = ("red", "blue", "lime", "black")
PARTS = ["language", "connector", "tower"]


def pictures(folder: Path, rows: int = 24) -> Path:
    """Rows of one picture, of two, or, every third one, of text alone, which are the shortest."""
    lines = []
    for number in range(rows):
        colour = COLOURS[number % 4]
        user = [{"type": "text", "text": f"Say {colour}."}]
        for each in range(number % 3):
            size = 32 + 16 * ((number + each) % 3), 48
            noise = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), np.uint8)
            Image.fromarray(noise).save(folder / f"{number}-{each}.png")
            user.insert(0, {"type": "image", "path": f"{number}-{each}.png"})
        answer = {"role": "assistant", "content": colour * (1 + number % 3)}
        lines.append({"messages": [{"role": "user", "content": user}, answer]})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictured.made(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("pictures"))


def fields(base: Path, rows: Path, **sections: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "method": "sft", "model": {"name": str(base), "reads": ["image"]},
        "data": [{"source": str(rows), "format": "messages"}], "max_steps": 2, "seed": 3,
        "batch": {"rows": 8, "micro_rows": 2, "max_length": 512},
        "optim": {"lr": 1e-3, "schedule": "constant", "warmup": 0},
    }  # fmt: skip
    return merged(given, sections)


def trained(folder: Path, given: dict[str, Any], resume: bool = False) -> Run:
    return ft.train(
        catalog.from_fields(given), precision="fp32", options=Options(folder, resume, plot=False)
    )


def steps(run: Run) -> list[tuple[float, float]]:
    return [(each["loss"], each["grad_norm"]) for each in run.read_metrics("train")]


def close(
    found: list[tuple[float, float]], wanted: list[tuple[float, float]], of_norms: float = 2e-5
) -> bool:
    """The tolerances of sums in another order: 1e-5 of a loss, 2e-5 of a norm."""
    if not found or len(found) != len(wanted):
        return False
    both = list(zip(found, wanted, strict=True))
    losses = all(a == pytest.approx(b, rel=1e-5) for (a, _), (b, _) in both)
    return losses and all(a == pytest.approx(b, rel=of_norms) for (_, a), (_, b) in both)


def has_published_steps(run: Run, assets: Path, kind: str, parts: str) -> bool:
    known = pictured.stored(assets, "losses.json")["models"][kind][parts][: pictured.STEPS]
    return close(steps(run), [(each["loss"], each["grad_norm"]) for each in known])


@pytest.mark.parametrize(
    ("kind", "parts", "free"),
    [
        ("qwen2_5_vl", "connector", "auto"), ("qwen3_vl", "all", "auto"),
        ("smolvlm", "language", "auto"), ("smolvlm", "lora", False),
    ],
)  # fmt: skip
def test_losses_and_norms_are_those_of_plain_transformers(
    assets, tmp_path, shared, kind, parts, free
):
    """Models, parts and layouts in turn; `test_every_engine_...` has all parts of each model."""
    batch = {"padding_free": free}
    run = trained(tmp_path / "run", pictured.recipe(assets, kind, shared, parts, batch=batch))
    assert has_published_steps(run, assets, kind, parts)


@pytest.fixture(scope="module")
def usual(base: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("usual")
    return trained(folder, fields(base, rows, model={"trains": PARTS}))


@pytest.mark.parametrize(
    "section",
    [
        {"batch": {"micro_rows": 8}, "model": {"activation_checkpointing": "attention"}},
        {"batch": {"padding_free": False}, "model": {"attention": "eager"}},
    ],
    ids=str,
)
def test_layouts_accumulation_and_recomputation_change_nothing(
    base, rows, tmp_path, usual, section
):
    section = section | {"model": {"trains": PARTS} | section.get("model", {})}
    other = trained(tmp_path / "other", fields(base, rows, **section))
    assert close(steps(other), steps(usual))


def test_packed_rows_train_as_rows_of_one_document(base, rows, tmp_path):
    one = {"max_steps": 1, "model": {"trains": PARTS}}
    alone = trained(tmp_path / "alone", fields(base, rows, batch={"rows": 24}, **one))
    recipe = catalog.from_fields(fields(base, rows, batch={"packing": True}, **one))
    packs = len(prepare(recipe, load_chat_of(recipe), tmp_path / "cache").train)
    assert packs < 12
    batch = {"packing": True, "rows": packs, "micro_rows": 1}
    packed = trained(tmp_path / "packed", fields(base, rows, batch=batch, **one))
    assert close(steps(packed), steps(alone))


# A filler.


def loaded(base: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)


def gradients(
    base: Path, recipe: ft.Recipe, indices: list[int], free: bool, everywhere: bool, folder: Path
) -> dict[str, torch.Tensor | None]:
    """Gradients of a micro-batch of rows, with or without a filler."""
    chat = load_chat_of(recipe)
    found = prepare(recipe, chat, folder).side_by_side(free)
    inputs = image_inputs(recipe.model, chat.images, alone=True)
    assert isinstance(inputs, ImageInputs)
    found = found.with_image_inputs(dataclasses.replace(inputs, everywhere=everywhere))
    batch = collate(found.train, np.array(indices), 257, "cpu")
    assert (batch.ids == 262).any() == everywhere
    model = loaded(base)
    give_loss(model, chunked=False)
    labels = batch.labels.flatten()
    places = torch.nonzero(labels != -100).flatten()
    given = batch.inputs()
    given = {name: value for name, value in given.items() if name != "document_ends"}
    model(**given, use_cache=False, places=places - 1, targets=labels[places]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("free", [True, False])
def test_a_filler_adds_exactly_nothing_to_the_gradient(base, rows, tmp_path, free):
    recipe = catalog.from_fields(fields(base, rows))
    # Rows 0, 3, 6, ... have no image. Of one length, so that a filler changes no padding.
    of_text = [0, 12]
    plain, filled = (
        gradients(base, recipe, of_text, free, filler, tmp_path) for filler in (False, True)
    )
    part = part_of(loaded(base), plain)
    for name, gradient in filled.items():
        assert gradient is not None, name
        if part[name] == "language":
            # A product of one row more rounds its sums otherwise: 1e-5 of the largest element.
            atol = 1e-5 * float(gradient.abs().max())
            torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=atol)
        else:
            assert plain[name] is None
            assert not gradient.any(), name


def test_a_rank_that_never_has_an_image_trains_as_one_process(base, rows, tmp_path, finetune):
    """Rows are sorted by length, so that the second rank gets all those of text."""
    lines = rows.read_text().splitlines()
    kept = [line for number, line in enumerate(lines) if number % 3 != 2]  # half has no image
    source = rows.with_name("halves.jsonl")
    source.write_text("\n".join(kept) + "\n")
    batch = {"rows": len(kept), "micro_rows": len(kept) // 2}
    given = fields(base, source, batch=batch, model={"trains": PARTS})
    recipe = catalog.from_fields(given)
    data = prepare(recipe, load_chat_of(recipe), tmp_path / "cache").train
    pictured_rows = [bool(data.documents.images_of(int(data.members[n]))) for n in range(len(data))]
    longest = np.argsort(-data.lengths, kind="stable")[: len(kept) // 2]
    assert sum(pictured_rows) == sum(pictured_rows[n] for n in longest) == len(kept) // 2
    alone = trained(tmp_path / "alone", given)
    path = write_recipe(tmp_path / "recipe.json", given)
    launch(finetune, path, "ddp", tmp_path / "both")
    assert close(steps(Run(tmp_path / "both")), steps(alone))


BACKENDS = ("ddp", "fsdp_full_shard", "zero3", "zero2", "hsdp")
"""One of each engine and of each way to hold weights: `make prove` compares all backends."""


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["all", "lora"])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_engine_has_the_losses_of_plain_transformers(
    assets, tmp_path, shared, finetune, runs_of, name, parts
):
    kind = pictured.KINDS[BACKENDS.index(name) % 3]
    given = {each: pictured.recipe(assets, kind, shared, each) for each in ("all", "lora")}
    if name == "hsdp":  # two copies, each on two processes
        run = Run(tmp_path / "run")
        finetune(
            "launch", write_recipe(tmp_path / "r.json", given[parts]), "batch.micro_rows=2",
            "--backend", name, "--processes", "4", "--shard-size", "2", "--precision", "fp32",
            "--output", run.root,
        ).passed()  # fmt: skip
    else:
        run = runs_of(name, given)[parts]
    assert has_published_steps(run, assets, kind, parts)


@pytest.mark.parametrize(
    ("first", "second"),
    [("single", "ddp"), slow("zero3", "fsdp_full_shard"), slow("fsdp_full_shard", "single")],
)
def test_a_run_goes_on_in_the_middle_of_an_epoch_on_another_backend(
    base, rows, tmp_path, run_of, finetune, first, second
):
    given = fields(base, rows, model={"trains": PARTS}, saving={"every": 1, "keep": 9})
    whole = run_of("single", fields=given)
    cut = cut_off(run_of(first, fields=given), tmp_path / "cut", 1)
    path = write_recipe(tmp_path / "recipe.json", given)
    launch(finetune, path, second, cut.root, "--resume")
    assert close(steps(Run(cut.root)), steps(whole))


# Results.


def logits(model: torch.nn.Module, folder: Path, row: dict[str, Any]) -> torch.Tensor:
    """What plain transformers computes of a row, with the processor of a result."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    content = row["messages"][0]["content"]
    images = [Image.open(part["path"]) for part in content if part["type"] == "image"]
    pixels = processor(images, return_tensors="pt")
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    for grid in pixels["image_grid_thw"]:
        text = text.replace("<|image_pad|>", "<|holder|>" * int(grid.prod() // 4), 1)
    ids = tokenizer(text.replace("<|holder|>", "<|image_pad|>"), return_tensors="pt")
    types = (ids["input_ids"] == 262).long()
    with torch.inference_mode():
        return model(**ids, **pixels, mm_token_type_ids=types).logits


def row_of(rows: Path, number: int) -> dict[str, Any]:
    row = json.loads(rows.read_text().splitlines()[number])
    for part in row["messages"][0]["content"]:
        if part["type"] == "image":
            part["path"] = str(rows.parent / part["path"])
    return row


def test_a_result_has_its_processor_and_plain_transformers_computes_the_same(base, rows, tmp_path):
    small = {"size": {"shortest_edge": 512, "longest_edge": 2048}}
    given = fields(base, rows, model={"trains": PARTS, "processor_kwargs": small})
    run = trained(tmp_path / "run", given)
    model = AutoModelForImageTextToText.from_pretrained(run.final, dtype=torch.float32)
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    stored = json.loads((run.final / "preprocessor_config.json").read_text())
    assert stored["size"] == small["size"]
    row = row_of(rows, 2)
    before = logits(loaded(base), run.final, row)
    assert (logits(model, run.final, row) - before).abs().max() > 0.01
    exported = export(run, tmp_path / "export")
    copy = AutoModelForImageTextToText.from_pretrained(exported, dtype=torch.float32)
    assert torch.equal(logits(copy, exported, row), logits(model, run.final, row))


@pytest.mark.parametrize("parts", [slow(["connector"]), ["language", "tower"]])
def test_an_adapter_reaches_the_parts_that_are_named_and_loads_everywhere(
    base, rows, tmp_path, parts
):
    given = fields(base, rows, model={"trains": parts}, adapter={"r": 2}, max_steps=1)
    run = trained(tmp_path / "run", given)
    names = load_file(run.final / "adapter_model.safetensors")
    owners = part_of(loaded(base), [name.removeprefix("base_model.model.") for name in names])
    assert set(owners.values()) == set(parts)
    row = row_of(rows, 2)
    adapted = PeftModel.from_pretrained(loaded(base), run.final)
    wanted = logits(adapted, run.final, row)
    assert (wanted - logits(loaded(base), base, row)).abs().max() > 1e-3
    merged = export(run, tmp_path / "merged", merge=True)
    model = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32)
    torch.testing.assert_close(logits(model, merged, row), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts", [["tower"], ["connector"]])
def test_parts_that_are_not_named_stay_as_they_are(base, rows, tmp_path, parts):
    run = trained(tmp_path / "run", fields(base, rows, model={"trains": parts}, max_steps=1))
    before, after = (
        dict(model.named_parameters())
        for model in (loaded(base), AutoModelForImageTextToText.from_pretrained(run.final))
    )
    owners = part_of(loaded(base), before)
    changed = {owners[name] for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(parts)


@pytest.mark.parametrize("adapter", [None, {"r": 2}])
def test_checkpoints_ask_for_no_gradient_of_pixels(base, rows, adapter):
    """A frozen tower would be run twice more for it."""
    given = fields(base, rows, adapter=adapter, model={"activation_checkpointing": True})
    recipe = catalog.from_fields(given)
    processor = load_chat_of(recipe).images
    assert processor is not None
    model = loaded(base)
    trained_model: Any = as_trained(model, within_parts(model, recipe))
    trained_model.train()
    features = model.model.get_image_features(**processor.filler[1]).pooler_output
    assert not any(each.requires_grad for each in features)
    assert model.get_input_embeddings()(torch.tensor([[65]])).requires_grad


def test_only_the_language_model_is_quantized(base, rows, tmp_path, capsys):
    pytest.importorskip("bitsandbytes")
    given = fields(base, rows, model={"quantization": "nf4"}, adapter={"r": 2})
    run = trained(tmp_path / "run", given)
    assert len(steps(run)) == 2
    printed = " ".join(capsys.readouterr().out.split())
    packed = sum(
        parameter.numel()
        for name, parameter in loaded(base).named_parameters()
        if "language_model.layers" in name and parameter.dim() == 2
    )
    whole = sum(parameter.numel() for parameter in loaded(base).parameters())
    assert f"{packed / whole:.1%} of the base's weights are in nf4" in printed


# What is refused.


@pytest.mark.parametrize(
    ("sections", "name", "reason"),
    [
        ({}, "tp", "tp divides a model or the tokens of a row"),
        ({}, "cp", "cp divides a model or the tokens of a row"),
        ({"model": {"reads": []}}, "single", "qwen2_5_vl also reads images: set model.reads"),
        ({"model": {"trains": []}}, "single", "model.trains: no part is trained"),
        ({"model": {"name": None, "config": {"model_type": "llama"}, "tokenizer": "x"}}, "single",
            "model.reads: llama is not known to read images; use one of"),
        ({"model": {"name": None, "reads": [], "config": {"model_type": "llama"}, "tokenizer": "x",
            "trains": ["tower"]}}, "single", "add model.reads=[image]"),
    ],
)  # fmt: skip
def test_a_plan_says_what_cannot_be_trained_with_images(base, rows, sections, name, reason):
    machine = backend.load(name)
    with pytest.raises(FinetuneError) as error:
        plan(catalog.from_fields(fields(base, rows, **sections)), machine)
    assert any(reason in problem for problem in error.value.problems)


# Other methods.


def pairs(rows: Path) -> Path:
    """Pairs of answers to the questions of `pictures`."""
    lines = []
    for number, line in enumerate(rows.read_text().splitlines()):
        question, answer = json.loads(line)["messages"]
        other = {"role": "assistant", "content": COLOURS[(number + 1) % 4]}
        lines.append({"prompt": [question], "chosen": [answer], "rejected": [other]})
    path = rows.with_name("pairs.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("method", slow_but(("dpo",), ("dpo", "orpo", "simpo", "cpo", "kto")))
def test_images_of_a_prompt_belong_to_each_of_its_answers(base, rows, tmp_path, method):
    data = [{"source": str(pairs(rows)), "format": "preference"}]
    given = fields(base, rows, method=method, data=data, adapter={"r": 2}, max_steps=1)
    free, padded = (
        trained(tmp_path / str(each), given | {"batch": given["batch"] | {"padding_free": each}})
        for each in ("auto", False)
    )
    assert close(steps(free), steps(padded))
    if method == "dpo":
        # The reference is the model at the start, if both see the same images.
        assert steps(free)[0][0] == pytest.approx(np.log(2), rel=1e-6)
    recipe = catalog.from_fields(given)
    documents = prepare(recipe, load_chat_of(recipe), tmp_path / "cache").train.documents
    counts = [len(documents.images_of(number)) for number in range(len(documents))]
    assert counts == [row % 3 for row in range(24) for _ in range(2)]


def test_a_student_learns_from_a_teacher_that_sees_the_same_images(base, rows, tmp_path):
    given = fields(base, rows, method="distill", teacher={"name": str(base)}, max_steps=1)
    # The student is its own teacher: their divergence is zero, with any images.
    assert steps(trained(tmp_path / "run", given))[0][0] == pytest.approx(0.0, abs=1e-6)
