"""DPO equals its definition on one sequence at a time, however a step is cut or spread."""

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Finetune, Tiny, write_recipe
from oracles import published
from peft import PeftModel
from test_backends import launch
from torch.distributions import Categorical
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetune as ft
from finetune import catalog
from finetune.data.order import rows_of_step
from finetune.errors import FinetuneError
from finetune.methods.dpo import DPO
from finetune.runs.run import Run

ROWS, SIZE, STEPS, SEED = 24, 8, 4, 0
LR, BETA = 1e-3, 0.3
EXACT = 1e-5
"""Relative to a loss of about 1, in fp32: sums of hundreds of log-probabilities."""
METRICS = [name for name in DPO.metrics if name not in ("nll_loss", "token_loss")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "own-cache"))


def pairs(count: int = ROWS, seed: int = 5) -> list[dict[str, Any]]:
    """Prompts with two answers of uneven lengths."""
    rng = random.Random(seed)
    words = "the a cat dog sees red blue house tree runs sings over under quickly and then".split()

    def said(longest: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, longest)))

    return [
        {
            "prompt": [{"role": "user", "content": f"{said(12)} {number}"}],
            "chosen": [{"role": "assistant", "content": f"{said(20)} yes"}],
            "rejected": [{"role": "assistant", "content": f"{said(20)} no"}],
        }
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs()))
    return path


def fields(tiny: Tiny, data: Path, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "method": "dpo",
        "model": {"name": str(tiny.model)},
        "data": [{"source": str(data), "format": "preference"}],
        "batch": {"rows": SIZE, "micro_rows": SIZE, "max_length": 128},
        "optim": {"lr": LR, "warmup": 0, "schedule": "constant", "max_grad_norm": None},
        "beta": BETA,
        "max_steps": STEPS,
        "seed": SEED,
    }
    for name, value in sections.items():
        merge = isinstance(base.get(name), dict) and isinstance(value, dict)
        base[name] = base[name] | value if merge else value
    return base


def train(place: Path, given: dict[str, Any], resume: bool = False) -> Run:
    recipe = catalog.from_fields(given)
    return ft.train(recipe, precision="fp32", output=place, resume=resume)


def sequences(tiny: Tiny) -> list[tuple[tuple[list[int], int], ...]]:
    """Of each pair both sequences, with the number of tokens of the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)

    def ids(messages: list[dict[str, str]], prompt: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return tokenizer(text if prompt else text.removesuffix("\n"))["input_ids"]

    return [
        tuple(
            (ids(row["prompt"] + row[name], False), len(ids(row["prompt"], True)))
            for name in ("chosen", "rejected")
        )
        for row in pairs()
    ]


def logp(model: Any, ids: list[int], prompt: int) -> torch.Tensor:
    return answer_sums(model, ids, prompt)[0]


def answer_sums(model: Any, ids: list[int], prompt: int) -> tuple[torch.Tensor, float, float]:
    """The log-probability of an answer, and the sums over its tokens of mean logit and entropy."""
    logits = model(torch.tensor([ids])).logits[0, prompt - 1 : -1]
    said = logits.log_softmax(-1)[torch.arange(len(ids) - prompt), torch.tensor(ids[prompt:])]
    entropy = Categorical(logits=logits.detach().double()).entropy().sum().item()
    return said.double().sum(), logits.double().mean(-1).sum().item(), entropy


def expected(
    tiny: Tiny, policy: Any, reference: Any, loss: str = "sigmoid", e: float = 0.0, w: float = 0.0,
    other: Any = None,
) -> list[dict[str, float]]:  # fmt: skip
    """The definition, on one sequence at a time and without padding; `reference` gives a context
    in which the policy is the reference, or None for the policy as it is now; `other` is another
    model that is the reference."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    data, beta = sequences(tiny), BETA
    with torch.no_grad(), reference or contextlib.nullcontext():
        kept = [[logp(other or policy, *each).item() for each in row] for row in data]
    found = []
    for step in range(STEPS):
        sums: dict[str, float] = dict.fromkeys(["loss", *METRICS], 0.0)
        logits, tokens, entropy = np.zeros(2), np.zeros(2), 0.0
        for row in rows_of_step(step, ROWS, SIZE, SEED):
            sides = [answer_sums(policy, *each) for each in data[row]]
            (of_c, by_c, spread_c), (of_r, by_r, spread_r) = sides
            ref_c, ref_r = kept[row]
            n_c, n_r = (len(ids) - prompt for ids, prompt in data[row])
            logits += (by_c, by_r)
            tokens += (n_c, n_r)
            entropy += spread_c + spread_r
            a, b = of_c - ref_c, of_r - ref_r
            h, mean = beta * (a - b), a / n_c - b / n_r
            term = {
                "sigmoid": -(1 - e) * F.logsigmoid(h) - e * F.logsigmoid(-h),
                "robust": (-(1 - e) * F.logsigmoid(h) + e * F.logsigmoid(-h)) / (1 - 2 * e),
                "hinge": torch.relu(1 - h),
                "ipo": (mean - 1 / (2 * beta)) ** 2,
                "sigmoid_norm": -F.logsigmoid(beta * mean),
            }[loss] - w * of_c / n_c
            (term / SIZE).backward()
            values = {
                "loss": term, "rewards/chosen": beta * a, "rewards/rejected": beta * b,
                "rewards/margins": h, "logps/chosen": of_c, "logps/rejected": of_r,
                "rewards/accuracies": float(a - b > 1e-4), "lengths/chosen": n_c,
                "lengths/rejected": n_r, "pairs/tied": float(abs(a - b) <= 1e-4),
            }  # fmt: skip
            for name, value in values.items():
                value = value.item() if isinstance(value, torch.Tensor) else value
                sums[name] += value / SIZE
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained]).item()
        optimizer.step()
        optimizer.zero_grad()
        sums |= dict(zip(("logits/chosen", "logits/rejected"), logits / tokens, strict=True))
        found.append({**sums, "entropy": entropy / tokens.sum(), "grad_norm": norm})
    return found


def plain(tiny: Tiny) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)


def steps_of(run: Run) -> list[dict[str, float]]:
    return [
        {"loss": each["loss"], "grad_norm": each["grad_norm"], **each["metrics"]}
        for each in run.read_metrics("train")
    ]


def assert_equal(
    found: list[dict[str, float]], wanted: list[dict[str, float]], tolerance: float = EXACT
) -> None:
    assert len(found) == len(wanted)
    for step, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        for name in theirs:
            # Rewards and losses are differences of log-probabilities of some 100 nats.
            near = pytest.approx(theirs[name], rel=tolerance, abs=10 * tolerance)
            assert mine[name] == near, (step, name)


LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "conservative": {"label_smoothing": 0.1},
    "robust": {"loss_type": "robust", "label_smoothing": 0.1},
    "hinge": {"loss_type": "hinge"},
    "ipo": {"loss_type": "ipo"},
    "sigmoid_norm": {"loss_type": "sigmoid_norm"},
    "with supervised tuning": {"sft_weight": 0.5},
}


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_its_definition(tiny: Tiny, data: Path, tmp_path: Path, name: str) -> None:
    settings = LOSSES[name]
    run = train(tmp_path / "run", fields(tiny, data, **settings))
    wanted = expected(
        tiny, plain(tiny), None, settings.get("loss_type", "sigmoid"),
        settings.get("label_smoothing", 0.0), settings.get("sft_weight", 0.0),
    )  # fmt: skip
    assert_equal(steps_of(run), wanted)


def test_the_first_step_begins_at_the_reference(tiny: Tiny, data: Path, tmp_path: Path) -> None:
    first = steps_of(train(tmp_path / "run", fields(tiny, data, max_steps=1)))[0]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert abs(first["rewards/chosen"]) < 1e-5
    assert (first["rewards/accuracies"], first["pairs/tied"]) == (0, 1)


CUTS: dict[str, dict[str, Any]] = {
    "one at a time": {"micro_rows": 1, "padding_free": False},
    "two, padded": {"micro_rows": 2, "padding_free": False},
    "two, side by side": {"micro_rows": 2, "padding_free": True},
    "all, padded": {"micro_rows": 8, "padding_free": False},
    "by tokens": {"micro_tokens": 300, "padding_free": True},
    "by tokens, padded": {"micro_tokens": 300, "padding_free": False},
}


@pytest.mark.parametrize("name", CUTS)
def test_a_step_does_not_depend_on_its_micro_batches(
    tiny: Tiny, data: Path, tmp_path: Path, name: str
) -> None:
    run = train(tmp_path / "run", fields(tiny, data, batch={"max_length": 64, **CUTS[name]}))
    assert_equal(steps_of(run), expected(tiny, plain(tiny), None))


def test_packs_hold_whole_pairs_and_train_as_pairs_do(
    tiny: Tiny, data: Path, tmp_path: Path
) -> None:
    """All packs in one step, so that its rows are those of the data."""
    batch = {"packing": True, "rows": 3, "micro_rows": 1, "max_length": 256}
    packed = train(tmp_path / "packed", fields(tiny, data, batch=batch, max_steps=2))
    counts = json.loads(packed.data.read_text())["train"]
    packs = counts["rows"]
    assert (counts["documents"], packs < ROWS) == (2 * ROWS, True)
    batch |= {"rows": packs}
    packed = train(tmp_path / "whole", fields(tiny, data, batch=batch, max_steps=2))
    alone = train(tmp_path / "alone", fields(tiny, data, batch={"rows": ROWS}, max_steps=2))
    assert_equal(steps_of(packed), steps_of(alone))


def adapter(tiny: Tiny, folder: Path) -> Path:
    """An adapter that is not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(
        plain(tiny), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("reference", ["start", "base"])
def test_an_adapter_that_is_trained_further_has_the_reference_that_is_named(
    tiny: Tiny, data: Path, tmp_path: Path, reference: str
) -> None:
    given = adapter(tiny, tmp_path / "adapter")
    sections = {
        "model": {"name": str(tiny.model), "adapter": str(given)},
        "adapter": {"r": 4, "alpha": 8, "targets": "all-linear"},
        "reference": reference,
    }
    run = train(tmp_path / "run", fields(tiny, data, **sections))
    policy = PeftModel.from_pretrained(plain(tiny), given, is_trainable=True)
    context = policy.disable_adapter() if reference == "base" else None
    wanted = expected(tiny, policy, context)
    assert_equal(steps_of(run), wanted)
    assert (wanted[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)) == (reference == "start")


@pytest.mark.parametrize("init", [True, "pissa", "olora"])
@pytest.mark.parametrize("reference", ["start", "base"])
def test_a_new_adapter_starts_as_the_base_for_every_initialization(
    tiny: Tiny, data: Path, tmp_path: Path, init: bool | str, reference: str
) -> None:
    sections = {"adapter": {"r": 4, "init_lora_weights": init}, "reference": reference}
    first = steps_of(train(tmp_path / "run", fields(tiny, data, **sections, max_steps=1)))[0]
    base = base_chosen(tiny)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert first["logps/chosen"] == pytest.approx(base, rel=EXACT)


@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens", "lm_head"]])
def test_a_trained_head_is_off_while_the_base_is_the_reference(
    tiny: Tiny, data: Path, tmp_path: Path, modules: list[str]
) -> None:
    base = untied(tiny, tmp_path / "base")
    sections: dict[str, Any] = {
        "model": {"name": str(base)},
        "adapter": {"r": 4, "modules_to_save": modules},
        "reference": "base",
    }
    steps = steps_of(train(tmp_path / "run", fields(tiny, data, **sections, max_steps=2)))
    assert steps[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert steps[1]["rewards/margins"] > 0.1
    for number, step in enumerate(steps):
        reference = step["logps/chosen"] - step["rewards/chosen"] / BETA
        assert reference == pytest.approx(base_chosen(tiny, number), rel=EXACT)


def untied(tiny: Tiny, folder: Path) -> Path:
    """The same model with a head of its own."""
    model = plain(tiny)
    model.config.tie_word_embeddings = False
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.model).save_pretrained(folder)
    return folder


def other_model(tiny: Tiny, folder: Path) -> Path:
    """A model with the same tokenizer and other weights."""
    model = plain(tiny)
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.model).save_pretrained(folder)
    return folder


def test_another_reference_model_gives_the_same_numbers_after_resuming(
    tiny: Tiny, data: Path, tmp_path: Path
) -> None:
    """Though its numbers are gone, in the run as in the cache."""
    other = other_model(tiny, tmp_path / "other")
    given = fields(tiny, data, reference=str(other), saving={"every": 2})
    run = train(tmp_path / "run", given)
    model = AutoModelForCausalLM.from_pretrained(other)
    wanted = expected(tiny, plain(tiny), None, other=model)
    assert_equal(steps_of(run), wanted)
    assert abs(wanted[0]["rewards/chosen"]) > 0.1
    straight = steps_of(run)
    shutil.rmtree(run.checkpoint(4))
    shutil.rmtree(tmp_path / "own-cache")
    run.reference.unlink()
    assert steps_of(train(run.root, given, resume=True)) == straight


@pytest.mark.parametrize(
    "name", ["full", "lora", "pissa", "nf4", "continued", "continued, padded"]
)  # fmt: skip
def test_a_reference_by_the_name_of_the_base_is_the_base_for_any_policy(
    tiny: Tiny, data: Path, tmp_path: Path, name: str
) -> None:
    sections: dict[str, Any] = {}
    if name == "pissa":
        sections = {"adapter": {"r": 4, "init_lora_weights": "pissa"}}
    elif name == "nf4":
        model = {"name": str(tiny.model), "quantization": "nf4"}
        sections = {"model": model, "adapter": {"r": 4}}
    elif name == "continued":
        given = adapter(tiny, tmp_path / "adapter")
        model = {"name": str(tiny.model), "adapter": str(given)}
        batch = {"micro_rows": 2, "padding_free": False}
        sections = {"model": model, "adapter": {"r": 4, "alpha": 8}, "batch": batch}
    shutil.copytree(tiny.model, tmp_path / "copy")
    runs = [
        steps_of(train(tmp_path / str(n), fields(tiny, data, **sections, reference=r, max_steps=1)))
        for n, r in enumerate(("base", str(tmp_path / "copy")))
    ]
    assert_equal(runs[1], runs[0])


def test_a_reference_with_another_vocabulary_or_none_is_refused(
    tiny: Tiny, data: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny.model, other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<|im_start|>"', '"<|begin|>"'))
    message = (
        r"reference: '.*other' has another vocabulary: 1 of .* for the trained model and '<\|b"
    )
    with pytest.raises(FinetuneError, match=message):
        train(tmp_path / "run", fields(tiny, data, reference=str(other)))
    with pytest.raises(FinetuneError, match="reference: no tokenizer can be loaded from 'strat'"):
        train(tmp_path / "run", fields(tiny, data, reference="strat"))


def base_chosen(tiny: Tiny, step: int = 0) -> float:
    """Mean log-probability of the chosen answers of a step, by the base."""
    model, rows = plain(tiny), sequences(tiny)
    with torch.no_grad():
        chosen = [logp(model, *rows[row][0]).item() for row in rows_of_step(step, ROWS, SIZE, SEED)]
    return sum(chosen) / SIZE


def test_dropout_does_not_reach_the_reference(tiny: Tiny, data: Path, tmp_path: Path) -> None:
    runs = [
        train(tmp_path / f"{dropout}", fields(tiny, data, adapter={"r": 4, "dropout": dropout}))
        for dropout in (0.0, 0.3)
    ]
    first, second = (np.load(run.reference)["reference"] for run in runs)
    assert np.array_equal(first, second)


def test_resuming_reads_the_numbers_of_the_run_though_the_cache_is_gone(
    tiny: Tiny, data: Path, tmp_path: Path
) -> None:
    given = fields(tiny, data, saving={"every": 2})
    straight = train(tmp_path / "straight", given)
    shutil.copytree(straight.root, tmp_path / "resumed")
    resumed = Run(tmp_path / "resumed")
    shutil.rmtree(resumed.checkpoint(4))
    shutil.rmtree(tmp_path / "own-cache")
    train(resumed.root, given, resume=True)
    assert steps_of(resumed) == steps_of(straight)
    shutil.rmtree(resumed.checkpoint(4))
    content = bytearray(resumed.reference.read_bytes())
    content[len(content) // 2] ^= 1
    resumed.reference.write_bytes(content)
    with pytest.raises(FinetuneError, match="log-probabilities of the reference cannot be read"):
        train(resumed.root, given, resume=True)


def test_a_second_run_takes_the_numbers_from_the_cache(
    tiny: Tiny, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = train(tmp_path / "first", fields(tiny, data))
    assert "48 log-probabilities, computed in" in capfd.readouterr().out
    second = train(tmp_path / "second", fields(tiny, data, batch={"micro_rows": 4}))
    assert "48 log-probabilities, from" in capfd.readouterr().out
    assert_equal(steps_of(second), steps_of(first))
    train(tmp_path / "third", fields(tiny, data, adapter={"r": 4, "use_dora": True}, max_steps=1))
    assert "48 log-probabilities, computed in" in capfd.readouterr().out


def test_evaluation_reports_means_over_all_held_out_pairs(
    tiny: Tiny, data: Path, tmp_path: Path
) -> None:
    given = fields(tiny, data, eval_rows=6, evaluation={"every": 2, "micro_rows": 4})
    run = train(tmp_path / "run", given)
    found = list(run.read_metrics("eval"))
    assert [each["step"] for each in found] == [2, 4]
    assert found[0]["tokens"] == 6
    assert found[0]["metrics"].keys() == {*METRICS, "token_loss"}
    assert json.loads(run.data.read_text())["eval"]["documents"] == 12


def test_a_reference_that_does_not_move_is_not_what_is_trained(
    tiny: Tiny, data: Path, tmp_path: Path
) -> None:
    """Rewards leave zero: numbers that nobody reads would keep the loss at ln 2."""
    last = steps_of(train(tmp_path / "run", fields(tiny, data)))[-1]
    assert last["rewards/margins"] > 0.1


@pytest.mark.parametrize(
    ("backend", "sections"),
    [
        pytest.param(backend, sections, id=f"{backend}-{name}", marks=pytest.mark.slow)
        for backend in ("ddp", "fsdp_full_shard", "zero2", "zero3")
        for name, sections in (
            ("full", {"batch": {"micro_rows": 1}}),
            ("lora", {"adapter": {"r": 4}, "batch": {"micro_rows": 2, "padding_free": False}}),
        )
    ],
)
def test_backends_train_as_one_process_does(
    tiny: Tiny, data: Path, finetune: Finetune, tmp_path: Path, backend: str, sections: Any
) -> None:
    given = fields(tiny, data, **sections)
    if "adapter" in sections:  # every process holds another reference whole, before the policy
        given["reference"] = str(other_model(tiny, tmp_path / "other"))
    alone = train(tmp_path / "alone", given)
    recipe = write_recipe(tmp_path / "r.json", given)
    launch(finetune, recipe, backend, tmp_path / backend)
    assert_equal(steps_of(Run(tmp_path / backend)), steps_of(alone))


# Published values: TRL 1.16 and a computation on single sequences, on a model of 260,000 weights.

EVERY_DAY = ("sigmoid_beta0.1/lora", "sigmoid_beta0.1/lora_reference_start", "ipo_beta0.1/full")
OTHERS = (
    "sigmoid_beta0.1/full", "sigmoid_beta0.5/full", "sigmoid_beta0.5/lora", "ipo_beta0.1/lora",
    "hinge_beta0.1/full", "hinge_beta0.1/lora", "robust_beta0.1_smoothing0.1/lora",
    "conservative_beta0.1_smoothing0.1/full", "conservative_beta0.1_smoothing0.1/lora",
    "length_normalised_beta2/lora",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [*EVERY_DAY, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_training_reproduces_published_values(assets: Path, tmp_path: Path, name: str) -> None:
    """Sums of up to 1,600 nats, which the published values hold in fp32: to 1e-4 nats each."""
    given, published_run = published(assets, tmp_path, "dpo", name)
    beta = given["beta"]
    found = steps_of(train(tmp_path / "run", given))
    for mine, theirs in zip(found, published_run["steps"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-4 * beta)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4, abs=1e-6)
        for side in ("chosen", "rejected"):
            mean = sum(theirs[f"logps/{side}"]) / 8
            assert mine[f"logps/{side}"] == pytest.approx(mean, abs=1e-3)
            near = pytest.approx(theirs[f"rewards/{side}"], abs=1e-3 * beta)
            assert mine[f"rewards/{side}"] == near
        assert mine["rewards/accuracies"] == pytest.approx(theirs["rewards/accuracies"])


def test_a_quantised_base_is_its_own_reference(tiny: Tiny, data: Path, tmp_path: Path) -> None:
    """QLoRA: the first step is at ln 2, and each way to cut a step gives the same steps."""
    given = fields(
        tiny, data, model={"name": str(tiny.model), "quantization": "nf4"}, adapter={"r": 4}
    )
    whole = steps_of(train(tmp_path / "whole", given))
    assert whole[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert whole[-1]["rewards/margins"] > 0
    full = base_chosen(tiny)
    assert 1e-6 < abs(whole[0]["logps/chosen"] / full - 1) < 0.1
    given["batch"] |= {"micro_rows": 2, "padding_free": False}
    assert_equal(steps_of(train(tmp_path / "cut", given)), whole)


def test_a_margin_is_subtracted_from_the_difference_of_rewards(
    tiny: Tiny, data: Path, tmp_path: Path
) -> None:
    """At the first step rewards are equal, and the loss is that of the margins alone."""
    source = tmp_path / "margins.jsonl"
    rows = [row | {"margin": number % 3} for number, row in enumerate(pairs())]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = fields(tiny, source, max_steps=1)
    assert steps_of(train(tmp_path / "left out", given))[0]["loss"] == pytest.approx(np.log(2))
    first = steps_of(train(tmp_path / "used", given | {"margin": True}))[0]
    chosen = rows_of_step(0, ROWS, SIZE, SEED) % 3
    assert first["loss"] == pytest.approx(np.log1p(np.exp(chosen)).mean(), rel=1e-6)
    with pytest.raises(FinetuneError, match="`margin` belongs to every loss_type but ipo"):
        DPO(loss_type="ipo", margin=True)
