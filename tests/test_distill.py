"""Distillation equals its definition on whole logits, however a step is cut or spread."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Finetune, Tiny, write_recipe
from peft import PeftModel
from safetensors.torch import load_file
from test_backends import launch
from test_dpo import pairs, steps_of, train
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import finetune as ft
from finetune import catalog
from finetune.data.order import rows_of_step
from finetune.errors import FinetuneError
from finetune.runs.manifest import sha256
from finetune.runs.run import Run

SIZE, STEPS, SEED = 8, 3, 0
EXACT = 1e-5
"""Relative, in fp32: the same sums in another order."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "own-cache"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("taught") / "rows.jsonl"
    rows = ({"messages": row["prompt"] + row["chosen"]} for row in pairs(24))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def teacher(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider model than the student, whose tables have more rows."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    config = LlamaConfig(
        hidden_size=96, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=len(tokenizer) + 8, max_position_embeddings=256,
        tie_word_embeddings=False, initializer_range=0.1, attention_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(9)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def fields(tiny: Tiny, data: Path, teacher: Path, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "method": "distill",
        "model": {"name": str(tiny.model)},
        "teacher": {"name": str(teacher)},
        "data": [{"source": str(data), "format": "messages"}],
        "batch": {"rows": SIZE, "micro_rows": SIZE, "max_length": 128},
        "optim": {"lr": 1e-3, "warmup": 0, "schedule": "constant", "max_grad_norm": None},
        "max_steps": STEPS,
        "seed": SEED,
    }
    for name, value in sections.items():
        merge = isinstance(base.get(name), dict) and isinstance(value, dict)
        base[name] = base[name] | value if merge else value
    return base


def assert_equal(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=EXACT)


LOSSES: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "reverse_kl": {"loss_type": "reverse_kl", "temperature": 2.0},
    "jsd": {"loss_type": "jsd", "beta": 0.2, "ce_weight": 0.5},
}


def expected(
    tiny: Tiny,
    teacher: Path,
    settings: dict[str, Any],
    nf4: BitsAndBytesConfig | None = None,
) -> dict[str, float]:
    """The first step by the definition, on one sequence at a time and with all logits."""
    student = AutoModelForCausalLM.from_pretrained(tiny.model)
    other = AutoModelForCausalLM.from_pretrained(teacher, quantization_config=nf4).eval()
    if nf4 is not None:
        other = other.dequantize()
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    kind, beta = settings.get("loss_type", "forward_kl"), settings.get("beta", 0.5)
    temperature, weight = settings.get("temperature", 1.0), settings.get("ce_weight", 0.0)
    apart = nll = torch.zeros(())
    count = 0
    for number in rows_of_step(0, 24, SIZE, SEED):
        row = pairs(24)[number]
        text = tokenizer.apply_chat_template(row["prompt"] + row["chosen"], tokenize=False)
        prompt = tokenizer.apply_chat_template(
            row["prompt"], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text.removesuffix("\n"))["input_ids"]
        first = len(tokenizer(prompt)["input_ids"])
        given = torch.tensor([ids])
        mine = student(given).logits[0, first - 1 : -1]
        with torch.no_grad():
            theirs = other(given).logits[0, first - 1 : -1, : mine.shape[1]]
        q, p = (F.log_softmax(each / temperature, -1) for each in (mine, theirs))
        m = torch.log(beta * p.exp() + (1 - beta) * q.exp())
        apart = (
            apart
            + {
                "forward_kl": F.kl_div(q, p, log_target=True, reduction="sum"),
                "reverse_kl": F.kl_div(p, q, log_target=True, reduction="sum"),
                "jsd": beta * F.kl_div(m, p, log_target=True, reduction="sum")
                + (1 - beta) * F.kl_div(m, q, log_target=True, reduction="sum"),
            }[kind]
        )
        nll = nll + F.cross_entropy(mine, given[0, first:], reduction="sum")
        count += len(ids) - first
    loss = (apart + weight * nll) / count
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in student.parameters()])
    values = {"loss": loss, "grad_norm": norm, "divergence": apart / count, "nll": nll / count}
    return {name: value.item() for name, value in values.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_each_divergence_is_its_definition(
    tiny: Tiny, data: Path, teacher: Path, tmp_path: Path, name: str
) -> None:
    run = train(tmp_path / "run", fields(tiny, data, teacher, **LOSSES[name], max_steps=1))
    assert steps_of(run)[0] == pytest.approx(expected(tiny, teacher, LOSSES[name]), rel=EXACT)


def test_a_quantised_teacher_teaches_what_plain_transformers_reads(
    tiny: Tiny, data: Path, teacher: Path, tmp_path: Path
) -> None:
    given = fields(tiny, data, teacher, max_steps=1)
    given["teacher"]["quantization"] = "nf4"
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    (found,) = steps_of(train(tmp_path / "run", given))
    assert found == pytest.approx(expected(tiny, teacher, {}, nf4), rel=EXACT)
    plain = expected(tiny, teacher, {})
    assert abs(found["divergence"] / plain["divergence"] - 1) > 100 * EXACT


CUTS: dict[str, dict[str, Any]] = {
    "one at a time": {"micro_rows": 1, "padding_free": False},
    "two, side by side": {"micro_rows": 2, "padding_free": True},
    "by tokens, padded": {"micro_tokens": 300, "padding_free": False},
}


def test_a_step_does_not_depend_on_its_micro_batches(
    tiny: Tiny, data: Path, teacher: Path, tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", fields(tiny, data, teacher))
    for name, batch in CUTS.items():
        run = train(tmp_path / name, fields(tiny, data, teacher, batch=batch))
        assert_equal(steps_of(run), steps_of(whole))
    assert_equal(*packed_and_alone(fields(tiny, data, teacher), tmp_path))


@pytest.mark.parametrize("adapter", [None, {"r": 4}], ids=["full", "lora"])
def test_a_result_holds_nothing_of_the_teacher(
    tiny: Tiny, data: Path, teacher: Path, tmp_path: Path, adapter: Any
) -> None:
    run = train(tmp_path / "run", fields(tiny, data, teacher, adapter=adapter))
    for path in run.root.rglob("*.safetensors"):
        assert not [name for name in load_file(path) if "teacher" in name]
    model = ft.load(run).model
    assert not [name for name, _ in model.named_modules() if "teacher" in name]


@pytest.mark.parametrize(
    ("backend", "sections"),
    [
        pytest.param(backend, sections, id=f"{backend}-{name}", marks=pytest.mark.slow)
        for backend in ("ddp", "fsdp_full_shard", "zero2", "zero3")
        for name, sections in (
            ("full", {"batch": {"micro_rows": 1}, "loss_type": "jsd"}),
            ("lora", {"adapter": {"r": 4}, "batch": {"micro_rows": 2, "padding_free": False}}),
        )
    ],
)
def test_backends_train_as_one_process_does(
    tiny: Tiny, data: Path, teacher: Path, finetune: Finetune, tmp_path: Path, backend: str,
    sections: Any,
) -> None:  # fmt: skip
    given = fields(tiny, data, teacher, **sections)
    alone = train(tmp_path / "alone", given)
    launch(finetune, write_recipe(tmp_path / "r.json", given), backend, tmp_path / backend)
    assert_equal(steps_of(Run(tmp_path / backend)), steps_of(alone))


def test_a_teacher_with_another_vocabulary_is_refused_by_name(
    tiny: Tiny, data: Path, teacher: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<|im_start|>"', '"<|begin|>"'))
    message = (
        r"teacher.name: '.*other' has another vocabulary: 1 of .* ids differ \(1 is "
        r"'<\|im_start\|>' for the student and '<\|begin\|>' for the teacher\)"
    )
    with pytest.raises(FinetuneError, match=message):
        train(tmp_path / "run", fields(tiny, data, other))


def test_a_teacher_that_cannot_teach_is_refused_by_its_own_name(
    tiny: Tiny, data: Path, teacher: Path, tmp_path: Path
) -> None:
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
            train(tmp_path / f"run {name}", fields(tiny, data, tmp_path / name))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"teacher": None}, "give `teacher`"),
        ({"teacher_logps": "folder"}, "not both"),
        ({"beta": 0.2}, "`beta` belongs to loss_type jsd"),
    ],
)
def test_fields_that_do_not_apply_are_refused(
    tiny: Tiny, data: Path, teacher: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(FinetuneError, match=message):
        catalog.from_fields(fields(tiny, data, teacher) | changed)


# Published values.

PUBLISHED: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "reverse_kl": {"loss_type": "reverse_kl"},
    "jsd0.5": {"loss_type": "jsd"},
    "forward_kl_temperature2": {"temperature": 2.0},
    "jsd0.1": {"loss_type": "jsd", "beta": 0.1},
}
EVERY_DAY = ("jsd0.1",)


@pytest.mark.parametrize(
    "name", [n if n in EVERY_DAY else pytest.param(n, marks=pytest.mark.slow) for n in PUBLISHED]
)
def test_training_reproduces_published_values(assets: Path, tmp_path: Path, name: str) -> None:
    """A computation on single sequences, checked against TRL; both agree to 1e-6."""
    oracles = assets / "oracles"
    if not oracles.is_dir():
        pytest.skip("no published values among the assets")
    published = json.loads((oracles / "distillation.json").read_text())
    texts = {e["row"]: e for e in json.loads((oracles / "pairs.json").read_text())["rows"]}
    base = assets / "models/stories260K"
    merged = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), oracles / "adapter"
    ).merge_and_unload()  # type: ignore[operator]
    merged.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "teacher")
    rows = [texts[each["row"]] for each in published["rows"]]
    source = tmp_path / "rows.jsonl"
    source.write_text(
        "".join(json.dumps({"messages": row["prompt"] + row["chosen"]}) + "\n" for row in rows)
    )
    given = {
        "method": "distill",
        "model": {"name": str(base), "chat_template": str(oracles / "template.jinja")},
        "teacher": {"name": str(tmp_path / "teacher")},
        "data": [{"source": str(source), "format": "messages"}],
        "batch": {"rows": 8, "micro_rows": 4, "max_length": 512},
        "optim": {"warmup": 0, "schedule": "constant", "max_grad_norm": None},
        "train_on": "completion",
        "max_steps": 1,
        **PUBLISHED[name],
    }
    (found,) = steps_of(train(tmp_path / "run", given))
    wanted = published["runs"][name]
    assert found["loss"] == pytest.approx(wanted["loss_per_token"], rel=1e-4)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3)


# A teacher whose log-probabilities are stored.


def stored(finetune: Finetune, given: dict[str, Any], place: Path, top_k: int) -> dict[str, Any]:
    """The recipe with a folder that `finetune teach` wrote instead of its teacher."""
    recipe = write_recipe(place.with_suffix(".json"), given)
    done = finetune("teach", recipe, "--output", place, "--top-k", top_k)
    assert done.status == 0, done.output
    return given | {"teacher": None, "teacher_logps": str(place)}


def test_stored_log_probabilities_teach_as_the_teacher_does(
    tiny: Tiny, data: Path, teacher: Path, finetune: Finetune, tmp_path: Path
) -> None:
    """All of them, in fp16; and the likeliest with the rest as one, by the definition."""
    vocabulary = len(AutoTokenizer.from_pretrained(tiny.model))
    live = fields(tiny, data, teacher)
    whole = stored(finetune, live, tmp_path / "whole", vocabulary)
    (first, *_), (wanted, *_) = (
        steps_of(train(tmp_path / name, each)) for name, each in (("stored", whole), ("live", live))
    )
    assert first == pytest.approx(wanted, rel=2e-3)  # fp16: 11 bits
    jsd = fields(tiny, data, teacher, loss_type="jsd", beta=0.2, max_steps=1)
    few = stored(finetune, jsd, tmp_path / "few", 5)
    for name, batch in CUTS.items():
        run = train(tmp_path / name, few | {"batch": few["batch"] | batch})
        assert_equal(steps_of(run), [expected_of_few(tiny, Path(few["teacher_logps"]))])
    assert_equal(*packed_and_alone(few, tmp_path))
    other = few | {"data": [few["data"][0] | {"first": 20}]}
    with pytest.raises(FinetuneError, match="was made for other rows, or other trained tokens"):
        train(tmp_path / "other", other)
    with pytest.raises(FinetuneError, match=r"at temperature 1\.0, and the recipe has 2\.0"):
        train(tmp_path / "warm", few | {"temperature": 2.0})
    for place, told in written_wrongly(tmp_path / "few").items():
        with pytest.raises(FinetuneError, match=f"teacher_logps: {place}: .*{told}"):
            train(tmp_path / "run", few | {"teacher_logps": place})
    damaged = bytearray((tmp_path / "few/logps.npy").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "few/logps.npy").write_bytes(damaged)
    with pytest.raises(FinetuneError, match=r"logps.npy does not match its recorded hash"):
        train(tmp_path / "damaged", few)


def test_log_probabilities_beyond_fp16_are_stored_as_the_least(
    tiny: Tiny, data: Path, teacher: Path, finetune: Finetune, tmp_path: Path
) -> None:
    """At a temperature of 1e-5 one token has probability 1."""
    given = fields(tiny, data, teacher, temperature=1e-5, max_steps=1)
    cold = stored(finetune, given, tmp_path / "cold", 5)
    logps = np.load(tmp_path / "cold/logps.npy")
    assert logps.min() == -100
    assert (logps[:, 0] == 0).mean() > 0.9
    (step,) = steps_of(train(tmp_path / "run", cold))
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


def packed_and_alone(given: dict[str, Any], folder: Path) -> list[list[dict[str, float]]]:
    """Steps of all rows, in packs and one by one."""
    packing = {"packing": True, "rows": 1, "micro_rows": 1, "max_length": 256}
    probe = train(folder / "probe", given | {"batch": packing})
    packs = json.loads(probe.data.read_text())["train"]["rows"]
    assert packs < 24
    batches = (packing | {"rows": packs}, {"rows": 24, "micro_rows": 4, "max_length": 256})
    return [
        steps_of(train(folder / f"all {number}", given | {"batch": batch}))
        for number, batch in enumerate(batches)
    ]


def expected_of_few(tiny: Tiny, folder: Path) -> dict[str, float]:
    """The first step with k + 1 classes, on one sequence at a time."""
    student = AutoModelForCausalLM.from_pretrained(tiny.model)
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    known, shares = (torch.from_numpy(np.load(folder / n)) for n in ("ids.npy", "logps.npy"))
    sequences, at = [], 0
    for row in pairs(24):
        text = tokenizer.apply_chat_template(row["prompt"] + row["chosen"], tokenize=False)
        prompt = tokenizer.apply_chat_template(
            row["prompt"], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text.removesuffix("\n"))["input_ids"]
        first = len(tokenizer(prompt)["input_ids"])
        labels = slice(at, at + len(ids) - first)
        at = labels.stop
        sequences.append((torch.tensor([ids]), first, labels))
    assert at == len(known)
    apart, nll, count = torch.zeros(()), torch.zeros(()), 0
    for number in rows_of_step(0, 24, SIZE, SEED):
        given, first, labels = sequences[number]
        logits = student(given).logits[0, first - 1 : -1]
        q = logits.softmax(-1).gather(1, known[labels].long())
        q, p = torch.cat([q, 1 - q.sum(1, keepdim=True)], 1), shares[labels].float().exp()
        assert (p.sum(1) - 1).abs().max() < 4e-3
        m = 0.2 * p + 0.8 * q
        apart = apart + (0.2 * p * (p / m).log() + 0.8 * q * (q / m).log()).sum()
        nll = nll + F.cross_entropy(logits, given[0, first:], reduction="sum")
        count += len(p)
    loss = apart / count
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in student.parameters()])
    values = {"loss": loss, "grad_norm": norm, "divergence": loss, "nll": nll / count}
    return {name: value.item() for name, value in values.items()}
