"""Distillation equals its definition on whole logits, however a step is cut or spread."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import preference
import pytest
import torch
import torch.nn.functional as F
from conftest import Finetune, Tiny, once, slow_but, write_recipe
from oracles import MODEL, recipe_of, stored, texts
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import finetune as ft
from finetune import catalog
from finetune.data.rows.order import rows_of_step
from finetune.errors import FinetuneError
from finetune.runs.manifest import sha256
from finetune.runs.run import Run


@pytest.fixture(scope="session")
def data(shared) -> Path:
    rows = ({"messages": row["prompt"] + row["chosen"]} for row in preference.pairs())
    return once(shared / "methods/taught.jsonl", lambda path: preference.written(path, rows))


@pytest.fixture(scope="session")
def teacher(tiny, shared) -> Path:
    """A wider model than the student, whose tables have more rows."""

    def make(folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tiny.model)
        config = LlamaConfig(
            hidden_size=96, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=len(tokenizer) + 8, max_position_embeddings=256,
            tie_word_embeddings=False, initializer_range=0.1, attention_dropout=0.0,
        )  # fmt: skip
        torch.manual_seed(9)
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return once(shared / "methods/teacher", make)


def fields(tiny: Tiny, data: Path, teacher: Path, **sections: Any) -> dict[str, Any]:
    given = {"teacher": {"name": str(teacher)}} | sections
    return preference.fields_of("distill", tiny.model, data, "messages", **given)


@pytest.fixture(scope="module")
def whole(tiny, data, teacher, tmp_path_factory) -> Run:
    """Two steps, each of eight rows at once."""
    return preference.train(tmp_path_factory.mktemp("whole") / "run", fields(tiny, data, teacher))


def answers(tiny: Tiny) -> list[tuple[torch.Tensor, int]]:
    """The ids of each row, and the place of its first label, in the order of the first step."""
    given = [row[0] for row in preference.sequences(tiny)]
    chosen = rows_of_step(0, preference.ROWS, preference.SIZE, preference.SEED)
    return [(torch.tensor([given[row][0]]), given[row][1]) for row in chosen]


def as_step(student: Any, loss: Any, **values: Any) -> dict[str, float]:
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in student.parameters()])
    values = {"loss": loss, "grad_norm": norm} | values
    return {name: value.item() for name, value in values.items()}


LOSSES: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "reverse_kl": {"loss_type": "reverse_kl", "temperature": 2.0},
    "jsd": {"loss_type": "jsd", "beta": 0.2, "ce_weight": 0.5},
}


def kl(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    return F.kl_div(to, of, log_target=True, reduction="sum")


def expected(
    tiny: Tiny, teacher: Path, settings: dict[str, Any], nf4: BitsAndBytesConfig | None = None
) -> dict[str, float]:
    """The first step by the definition, on one sequence at a time and with all logits."""
    student = AutoModelForCausalLM.from_pretrained(tiny.model)
    other = AutoModelForCausalLM.from_pretrained(teacher, quantization_config=nf4).eval()
    if nf4 is not None:
        other = other.dequantize()
    kind, beta = settings.get("loss_type", "forward_kl"), settings.get("beta", 0.5)
    temperature, weight = settings.get("temperature", 1.0), settings.get("ce_weight", 0.0)
    apart = nll = torch.zeros(())
    count = 0
    for given, first in answers(tiny):
        mine = student(given).logits[0, first - 1 : -1]
        with torch.no_grad():
            theirs = other(given).logits[0, first - 1 : -1, : mine.shape[1]]
        q, p = (F.log_softmax(each / temperature, -1) for each in (mine, theirs))
        m = torch.log(beta * p.exp() + (1 - beta) * q.exp())
        apart = apart + {
            "forward_kl": kl(p, q), "reverse_kl": kl(q, p),
            "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m),
        }[kind]  # fmt: skip
        nll = nll + F.cross_entropy(mine, given[0, first:], reduction="sum")
        count += len(mine)
    loss = (apart + weight * nll) / count
    return as_step(student, loss, divergence=apart / count, nll=nll / count)


@pytest.mark.parametrize("name", LOSSES)
def test_each_divergence_is_its_definition(tiny, data, teacher, tmp_path, whole, name):
    given = fields(tiny, data, teacher, **LOSSES[name], max_steps=1)
    run = preference.train(tmp_path / "run", given) if LOSSES[name] else whole
    assert preference.steps_of(run)[0] == pytest.approx(
        expected(tiny, teacher, LOSSES[name]), rel=preference.EXACT
    )


def test_a_quantised_teacher_teaches_what_plain_transformers_reads(tiny, data, teacher, tmp_path):
    given = fields(tiny, data, teacher, max_steps=1)
    given["teacher"]["quantization"] = "nf4"
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    (found,) = preference.steps_of(preference.train(tmp_path / "run", given))
    assert found == pytest.approx(expected(tiny, teacher, {}, nf4), rel=preference.EXACT)
    assert (
        abs(found["divergence"] / expected(tiny, teacher, {})["divergence"] - 1)
        > 100 * preference.EXACT
    )


def test_a_step_does_not_depend_on_its_micro_batches(tiny, data, teacher, tmp_path, whole):
    for name, batch in preference.CUTS.items():
        run = preference.train(tmp_path / name, fields(tiny, data, teacher, batch=batch))
        preference.assert_equal(preference.steps_of(run), preference.steps_of(whole))
    given = fields(tiny, data, teacher, batch={"max_length": 256})
    preference.assert_equal(*map(preference.steps_of, preference.packed_and_alone(given, tmp_path)))


@pytest.mark.parametrize("adapter", [None, {"r": 4}], ids=["full", "lora"])
def test_a_result_holds_nothing_of_the_teacher(tiny, data, teacher, tmp_path, whole, adapter):
    lora = fields(tiny, data, teacher, adapter=adapter, max_steps=1)
    run = preference.train(tmp_path / "run", lora) if adapter else whole
    for path in run.root.rglob("*.safetensors"):
        assert not [name for name in load_file(path) if "teacher" in name]
    assert not [name for name, _ in ft.load(run).model.named_modules() if "teacher" in name]


def test_a_teacher_with_another_vocabulary_is_refused_by_name(tiny, data, teacher, tmp_path):
    other = preference.with_another_vocabulary(teacher, tmp_path / "other")
    message = (
        r"teacher.name: '.*other' has another vocabulary: 1 of .* ids differ \(1 is "
        r"'<\|im_start\|>' for the student and '<\|begin\|>' for the teacher\)"
    )
    with pytest.raises(FinetuneError, match=message):
        preference.train(tmp_path / "run", fields(tiny, data, other))


def test_a_teacher_that_cannot_teach_is_refused_by_its_own_name(tiny, data, teacher, tmp_path):
    """It has too few rows, a weight that is not a number, or no weights."""
    model = AutoModelForCausalLM.from_pretrained(teacher)
    told = {
        "few": r"teacher.name: the data has token \d+, but the embedding of '.*few' has 20 rows",
        "nan": r"teacher.name: 1 tensor of '.*nan' contains NaN or infinity: lm_head.weight",
        "none": r"teacher.name: '.*none' cannot be loaded.* set teacher.pickle=true",
    }
    for name in told:
        shutil.copytree(teacher, tmp_path / name)
    (tmp_path / "none/model.safetensors").unlink()
    model.lm_head.weight.data[3, 5] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    model.resize_token_embeddings(20)
    model.save_pretrained(tmp_path / "few")
    for name, message in told.items():
        with pytest.raises(FinetuneError, match=message):
            preference.train(tmp_path / f"run {name}", fields(tiny, data, tmp_path / name))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"teacher": None}, "give `teacher`"),
        ({"teacher_logps": "folder"}, "not both"),
        ({"beta": 0.2}, "`beta` belongs to loss_type jsd"),
    ],
)
def test_fields_that_do_not_apply_are_refused(tiny, data, teacher, changed, message):
    with pytest.raises(FinetuneError, match=message):
        catalog.from_fields(fields(tiny, data, teacher) | changed)


PUBLISHED: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "reverse_kl": {"loss_type": "reverse_kl"},
    "jsd0.5": {"loss_type": "jsd"},
    "forward_kl_temperature2": {"temperature": 2.0},
    "jsd0.1": {"loss_type": "jsd", "beta": 0.1},
}


@pytest.mark.parametrize("name", slow_but(("jsd0.1",), PUBLISHED))
def test_training_reproduces_published_values(tiny, data, teacher, assets, tmp_path, name):
    """A computation on single sequences, checked against TRL; both agree to 1e-6."""
    published = stored(assets, "distillation")
    base, of_row = assets / MODEL, texts(assets)
    student = AutoModelForCausalLM.from_pretrained(base)
    merged = PeftModel.from_pretrained(student, assets / "oracles/adapter").merge_and_unload()  # type: ignore[operator]
    merged.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "teacher")
    rows = (of_row[each["row"]] for each in published["rows"])
    messages = ({"messages": row["prompt"] + row["chosen"]} for row in rows)
    source = preference.written(tmp_path / "rows.jsonl", messages)
    given = recipe_of(
        assets, "distill", source, "messages", {"lr": 1e-3, "steps": [0]},
        teacher={"name": str(tmp_path / "teacher")}, train_on="completion", **PUBLISHED[name],
    )  # fmt: skip
    (found,) = preference.steps_of(preference.train(tmp_path / "run", given))
    wanted = published["runs"][name]
    assert found["loss"] == pytest.approx(wanted["loss_per_token"], rel=1e-4)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3)


def taught(finetune: Finetune, given: dict[str, Any], place: Path, top_k: int) -> dict[str, Any]:
    """The recipe with a folder that `finetune teach` wrote instead of its teacher."""
    recipe = write_recipe(place.with_suffix(".json"), given)
    finetune("teach", recipe, "--output", place, "--top-k", top_k).passed()
    return given | {"teacher": None, "teacher_logps": str(place)}


def test_stored_log_probabilities_teach_as_the_teacher_does(
    tiny, data, teacher, finetune, tmp_path, whole
):
    """All of them, in fp16; and the likeliest with the rest as one, by the definition."""
    vocabulary = len(AutoTokenizer.from_pretrained(tiny.model))
    live = fields(tiny, data, teacher, max_steps=1)
    every = taught(finetune, live, tmp_path / "whole", vocabulary)
    (first,) = preference.steps_of(preference.train(tmp_path / "stored", every))
    assert first == pytest.approx(preference.steps_of(whole)[0], rel=2e-3)  # fp16: 11 bits
    few = taught(finetune, live | {"loss_type": "jsd", "beta": 0.2}, tmp_path / "few", 5)
    wanted = expected_of_few(tiny, tmp_path / "few")
    for name, batch in preference.CUTS.items():
        run = preference.train(tmp_path / name, few | {"batch": few["batch"] | batch})
        preference.assert_equal(preference.steps_of(run), [wanted])
    longer = few | {"batch": few["batch"] | {"max_length": 256}}
    preference.assert_equal(
        *map(preference.steps_of, preference.packed_and_alone(longer, tmp_path))
    )
    wrong = {
        "was made for other rows, or other trained tokens": {
            "data": [few["data"][0] | {"first": 20}]
        },
        r"at temperature 1\.0, and the recipe has 2\.0": {"temperature": 2.0},
    } | {
        f"teacher_logps: {place}: .*{told}": {"teacher_logps": place}
        for place, told in written_wrongly(tmp_path / "few").items()
    }
    for message, changed in wrong.items():
        with pytest.raises(FinetuneError, match=message):
            preference.train(tmp_path / "refused", few | changed)
    damaged = bytearray((tmp_path / "few/logps.npy").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "few/logps.npy").write_bytes(damaged)
    with pytest.raises(FinetuneError, match=r"logps.npy does not match its recorded hash"):
        preference.train(tmp_path / "damaged", few)


def test_log_probabilities_beyond_fp16_are_stored_as_the_least(
    tiny, data, teacher, finetune, tmp_path
):
    """At a temperature of 1e-5 one token has probability 1."""
    given = fields(tiny, data, teacher, temperature=1e-5, max_steps=1)
    cold = taught(finetune, given, tmp_path / "cold", 5)
    logps = np.load(tmp_path / "cold/logps.npy")
    assert logps.min() == -100
    assert (logps[:, 0] == 0).mean() > 0.9
    (step,) = preference.steps_of(preference.train(tmp_path / "run", cold))
    assert 0 < step["loss"] <= 100


def written_wrongly(folder: Path) -> dict[str, str]:
    """Copies of stored values that are wrong although their hashes are right, with the message."""
    ids, logps = np.load(folder / "ids.npy"), np.load(folder / "logps.npy")
    n = len(ids)
    wrong: dict[str, tuple[np.ndarray, np.ndarray, str]] = {
        "k": (ids[:, :3], logps, rf"logps.npy has float16 \({n}, 6\), expected floats \({n}, 4\)"),
        "rows": (ids[1:], logps[1:], rf"ids.npy has int32 \({n - 1}, 5\), expected integers"),
        "ids": (ids + 1000, logps, r"ids.npy has ids beyond the \d+ tokens of the vocabulary"),
        "nan": (ids, logps * np.float16("nan"), r"logps.npy has log-probabilities that are above"),
        "infinite": (ids, logps - np.float16("inf"), "log-probabilities that are above 0 or not"),
    }
    told: dict[str, str] = {}
    for name, (some, values, message) in wrong.items():
        other = folder.with_name(f"{folder.name} {name}")
        shutil.copytree(folder, other)
        np.save(other / "ids.npy", some)
        np.save(other / "logps.npy", values)
        about = json.loads((other / "teacher.json").read_text())
        about["files"] = {file: sha256(other / file) for file in about["files"]}
        (other / "teacher.json").write_text(json.dumps(about))
        told[str(other)] = message
    return told


def expected_of_few(tiny: Tiny, folder: Path) -> dict[str, float]:
    """The first step with k + 1 classes, on one sequence at a time."""
    student = AutoModelForCausalLM.from_pretrained(tiny.model)
    known, shares = (torch.from_numpy(np.load(folder / n)) for n in ("ids.npy", "logps.npy"))
    labels = [len(ids) - first for (ids, first), _ in preference.sequences(tiny)]
    assert sum(labels) == len(known)
    rows = rows_of_step(0, preference.ROWS, preference.SIZE, preference.SEED)
    apart, nll, count = torch.zeros(()), torch.zeros(()), 0
    for row, (given, first) in zip(rows, answers(tiny), strict=True):
        at = slice(sum(labels[:row]), sum(labels[: row + 1]))
        logits = student(given).logits[0, first - 1 : -1]
        q = logits.softmax(-1).gather(1, known[at].long())
        q, p = torch.cat([q, 1 - q.sum(1, keepdim=True)], 1), shares[at].float().exp()
        assert (p.sum(1) - 1).abs().max() < 4e-3
        m = 0.2 * p + 0.8 * q
        apart = apart + (0.2 * p * (p / m).log() + 0.8 * q * (q / m).log()).sum()
        nll = nll + F.cross_entropy(logits, given[0, first:], reduction="sum")
        count += len(p)
    loss = apart / count
    return as_step(student, loss, divergence=loss, nll=nll / count)
