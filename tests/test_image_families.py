"""Each family that reads images trains as in plain transformers, or is refused by name."""

import dataclasses
import importlib.util
import inspect
import itertools
import json
from pathlib import Path
from typing import Any

import image_families
import image_families_page
import numpy as np
import pytest
import torch
import transformers
from conftest import (
    ROOT,
    launch,
    merged,
    run_command,
    slow,
    slow_but,
    warm_python,
    write_recipe,
)
from PIL import Image
from shrunk_families import MADE
from test_image_answers import asked, picture, plain_answer, plain_model
from test_image_training import PARTS, close, fields, pairs, pictures, steps, trained
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

import finetune as ft
from finetune import SFT, Model, Run, catalog
from finetune.cache import cache
from finetune.data.prepare import prepare
from finetune.data.rows.order import rows_of_step
from finetune.inference.generate import generate, load_folder
from finetune.models import image_parts
from finetune.models.model import load_chat_of
from finetune.planner.families import FAMILIES, UNREAD
from finetune.training.run_options import Options
from finetune.verification.model_checks.examination import Examination
from finetune.verification.proofs.exports import Delivery, check_deliveries
from finetune.verification.proofs.matrix import FP32

STEPS, ROWS = 2, 8
PLAIN = transformers.ProcessorMixin.replace_image_token


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return pictures(tmp_path_factory.mktemp("pictures"))


def test_the_table_of_families_has_what_is_tested_here():
    known = {kind for kind, family in FAMILIES.items() if family.reads}
    assert known == image_families.RIGHT.keys() - {"pixtral"}  # a `llava` with another tower


OFTEN = ("qwen3_vl_moe", "llava_next", "gemma3", "gemma4", "qwen3_5")
"""Positions of three numbers and experts, tiles, masks of both ways, and recurrent states."""
NAMES = slow_but(OFTEN, image_families.RIGHT)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A family with the steps of plain transformers."""

    given: dict[str, Any]
    wanted: list[tuple[float, float]]

    @classmethod
    def of(cls, name: str, rows: Path, folder: Path) -> "Subject":
        base = image_families.saved(name, folder / "base")
        model = {"name": str(base), "trains": PARTS, "router_aux_loss": "none"}
        batch = {"rows": ROWS, "micro_rows": 2, "max_length": 2048}
        given = fields(base, rows, model=model, batch=batch, max_steps=STEPS)
        recipe = catalog.from_fields(given)
        chat = load_chat_of(recipe)
        assert chat.images is not None
        data = prepare(recipe, chat, folder / "cache").train
        chosen = [
            rows_of_step(step, len(data), ROWS, recipe.seed).tolist() for step in range(STEPS)
        ]
        for picked in chosen:  # so that a micro-batch of the shortest rows has a filler
            shortest = sorted(picked, key=lambda number: int(data.lengths[number]))[:2]
            numbers = [int(number) for each in shortest for number in data.numbers(each)]
            assert not any(data.documents.images_of(number) for number in numbers)
        torch.manual_seed(0)
        lr = given["optim"]["lr"]
        return cls(
            given,
            image_families.plain_steps(base, rows, chat.images.whole, data.documents, chosen, lr),
        )

    def matches(self, run: Run) -> bool:
        # A step of AdamW at 1e-3 moves a weight of a tiny gradient by the sign of its rounding.
        return close(steps(run), self.wanted, of_norms=5e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_trains_as_in_plain_transformers(rows, tmp_path, name):
    subject = Subject.of(name, rows, tmp_path)
    assert subject.matches(trained(tmp_path / "auto", subject.given))
    padded = {"batch": {"padding_free": False, "micro_rows": 4}}
    recomputed = {"model": {"activation_checkpointing": True}}
    given = merged(dict(subject.given), padded | recomputed)
    assert subject.matches(trained(tmp_path / "padded", given))


@pytest.mark.parametrize("name", NAMES)
def test_a_family_answers_as_in_plain_transformers(tmp_path, name):
    folder = image_families.saved(name, tmp_path / "base")
    loaded = load_folder(folder)
    one, two = (picture(tmp_path, number) for number in range(2))
    rows = [("a?", [one]), ("b?", [two, one]), ("c", [])]
    questions = [asked(text, *shown) for text, shown in rows]
    found = generate(loaded, questions, max_new_tokens=12)
    model = plain_model(folder)
    for answer, question, (_, shown) in zip(found, questions, rows, strict=True):
        assert answer == plain_answer(model, loaded, question, shown)


SCORED = [each for each, family in FAMILIES.items() if family.scores]
EXPERTS = ["mlp.experts", *(f"shared_experts.{each}_proj" for each in ("down", "gate", "up"))]
NEEDED: dict[str, dict[str, Any]] = {"mistral_large4": {"exclude_modules": EXPERTS}}
"""What PEFT's adapters of a family need, as the refusal without it says."""


@pytest.mark.slow
def test_families_are_adapted_saved_reloaded_and_merged(tmp_path):
    """As the doctor compares losses and gradients; one plain process loads all results."""
    deliveries = list[Delivery]()
    for name in MADE:
        base = image_families.saved(name, tmp_path / name)
        recipe = SFT(Model(str(base), reads=("image",))).with_lora(**NEEDED.get(name, {}))
        folder = tmp_path / f"{name}-examined"
        folder.mkdir()
        examined = Examination(recipe, folder, cache("data"))
        # The other layouts and recomputation are compared where all weights are trained.
        found = list(itertools.islice(examined.findings(), 9))
        assert [each for each in found if each.passed is False] == []
        assert {"gradients", "images"} <= {each.name for each in found if each.passed}
        options = Options(folder / "run", plot=False)
        run = ft.train(examined.recipe, "single", "fp32", options=options)
        deliveries.append(Delivery("own", name, examined.subject, run, bf16=False))
    checks = check_deliveries(deliveries, FP32)
    assert [check for check in checks if not check.passed] == []
    assert len(checks) == len(MADE)


@pytest.mark.parametrize("name", slow_but(("gemma3",), SCORED))
def test_a_score_head_reads_the_images_of_a_pair(rows, tmp_path, name):
    """Score, not the language model, is trained: its first loss is that of plain transformers."""
    base = image_families.saved(name, tmp_path / "base")
    source = pairs(rows)
    changed = {"data": [{"source": str(source), "format": "preference"}], "max_steps": 1}
    given = fields(base, rows, method="reward", **changed, optim={"lr": 1e-12}, batch={"rows": 24})
    run = trained(tmp_path / "run", given)
    recipe = catalog.from_fields(given)
    chat = load_chat_of(recipe)
    assert chat.images is not None
    documents = prepare(recipe, chat, tmp_path / "cache").train.documents
    model = transformers.AutoModelForSequenceClassification.from_pretrained(run.final).eval()
    assert image_parts.part_of(model, ["score.weight"]) == {"score.weight": "language"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    accepted, losses = inspect.signature(model.forward).parameters, list[float]()
    for row, line in enumerate(map(json.loads, source.read_text().splitlines())):
        scores = list[float]()
        for number, answer in ((2 * row, "chosen"), (2 * row + 1, "rejected")):
            text = tokenizer.apply_chat_template(line["prompt"] + line[answer], tokenize=False)
            names = [part["path"] for part in line["prompt"][0]["content"] if "path" in part]
            pictured = {"images": [[Image.open(rows.parent / each) for each in names]]}
            inputs = chat.images.whole(
                **(pictured if names else {}), text=[text], return_tensors="pt",
                **{"return_mm_token_type_ids": True} if "mm_token_type_ids" in accepted else {},
            )  # fmt: skip
            assert inputs["input_ids"][0].tolist() == documents.document(number)[0].tolist()
            with torch.no_grad():
                scores.append(model(**inputs, use_cache=False).logits[0, 0].item())
        losses.append(np.logaddexp(0.0, scores[1] - scores[0]))
    (found,) = (loss for loss, _ in steps(run))
    assert found == pytest.approx(np.mean(losses), rel=1e-5)


LAYERS = {"qwen2_5_vl": "depth", "smolvlm": "num_hidden_layers", "gemma3": "num_hidden_layers"}


@pytest.mark.parametrize(
    ("name", "parts", "recomputes"),
    [
        ("gemma3", PARTS, False), *(slow(name, PARTS, False) for name in ("qwen2_5_vl", "smolvlm")),
        *(slow(name, PARTS, True) for name in LAYERS),
        slow("qwen2_5_vl", ["language"], False), slow("smolvlm", ["language"], True),
    ],
)  # fmt: skip
def test_the_measured_peak_is_within_a_twentieth_of_the_plan(tmp_path, name, parts, recomputes):
    """The tower is 14 times as large as the language model, and runs again if it is trained."""
    wide = {"hidden_size": 96, "intermediate_size": 192, LAYERS[name]: 6}
    base = image_families.saved(name, tmp_path / "base", **wide)
    picture(tmp_path, 1)
    user = [{"type": "image", "path": "1.png"}, {"type": "text", "text": "Say red."}]
    row = {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": "red"}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(row)}\n" * 24)
    given = fields(
        base, path, model={"trains": parts, "activation_checkpointing": recomputes},
        batch={"micro_rows": 4}, data_checks="report", max_steps=4,  # so that rows are read ahead
    )  # fmt: skip
    (counted,) = trained(tmp_path / "run", given).read_metrics("memory")
    assert counted["peak"] == pytest.approx(counted["predicted"], rel=0.05)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("gemma3", "single"), *(slow(n, "single") for n in LAYERS if n != "gemma3"),
     slow("gemma3", "fsdp_full_shard")],
)  # fmt: skip
def test_a_plan_is_verified_by_a_trace_with_pictures(rows, tmp_path, session_cache, name, backend):
    wide = {"hidden_size": 96, "intermediate_size": 192, LAYERS[name]: 6}
    base = image_families.saved(name, tmp_path / "base", **wide)
    batch = {"micro_rows": 2, "max_length": 128}
    path = write_recipe(
        tmp_path / "recipe.json", fields(base, rows, model={"trains": PARTS}, batch=batch)
    )
    words = ["--gpu", "H100-80", "--gpus", str(1 + (backend != "single")), "--precision", "fp32"]
    command = [warm_python(), "-m", "finetune", "plan", str(path), "--backend", backend, *words]
    found = json.loads(run_command([*command, "--verify", "--json"], session_cache, ROOT).stdout)
    found = found["verification"]
    assert found["agrees"], found
    assert {"forward: tower", "backward: tower"} <= {each["name"] for each in found["moments"]}
    (saved,) = (c for c in found["components"] if c["component"] == "saved activations")
    assert saved["traced"] > 0.5 * max(each["traced"] for each in found["moments"])  # the tower's
    assert saved["predicted"] == pytest.approx(saved["traced"], rel=0.05)


def test_the_processor_of_pixtral_imports_that_of_torchvision():
    """Else `_module_of` is not needed."""
    found = importlib.util.find_spec("transformers.models.pixtral.processing_pixtral")
    assert found is not None
    assert found.origin is not None
    assert "from .image_processing_pixtral import get_resize" in Path(found.origin).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [("gemma4", "ddp"), ("mistral3", "fsdp_full_shard"), ("ovis2", "zero3"), ("qwen3_5", "zero2")],
)
def test_a_family_trains_on_two_processes_as_in_plain_transformers(
    rows, tmp_path, finetune, name, backend
):
    subject = Subject.of(name, rows, tmp_path)
    path = write_recipe(tmp_path / "recipe.json", subject.given)
    launch(finetune, path, backend, tmp_path / "run")
    assert subject.matches(Run(tmp_path / "run"))


def test_every_class_of_images_and_text_is_right_or_refused_with_its_reason():
    kinds = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    right = {kind for kind, family in FAMILIES.items() if family.reads}
    assert right | UNREAD.keys() == kinds
    assert not right & UNREAD.keys()
    text = image_families_page.PAGE.read_text("utf-8")
    assert text == image_families_page.page(text), "python -m tests.image_families_page"


@pytest.mark.parametrize("kind", UNREAD)
def test_a_reason_against_a_class_is_a_fact_of_transformers(kind):
    kinds, reason = IMAGE_PROCESSOR_MAPPING_NAMES.get(kind, {}), UNREAD[kind]
    processor = getattr(transformers, str(PROCESSOR_MAPPING_NAMES.get(kind)), None)
    assert ("torchvision only" in reason) <= (kinds.keys() == {"torchvision"})
    assert ("encoder-decoder" in reason) == CONFIG_MAPPING[kind]().is_encoder_decoder
    if "rewrites" in reason and processor is not None:
        assert processor.replace_image_token is PLAIN
