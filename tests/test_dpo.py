"""DPO equals its definition on one sequence at a time, however a step is cut or spread."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Tiny, Train, copy_of, slow_but
from oracles import published
from peft import LoraConfig, PeftModel, get_peft_model
from preference import (
    CUTS,
    EXACT,
    ROWS,
    SEED,
    SIZE,
    Steps,
    answer_sums,
    assert_equal,
    fields_of,
    logp,
    other_model,
    packed_and_alone,
    pairs,
    pairs_file,
    plain,
    sequences,
    steps_of,
    train,
    with_another_vocabulary,
    written,
)
from transformers import AutoModelForCausalLM

from finetune.data.rows.order import rows_of_step
from finetune.errors import FinetuneError
from finetune.methods.dpo import DPO
from finetune.runs.run import Run

STEPS, BETA = 2, 0.3
NATS = 1e-4
"""Rewards and losses are differences of log-probabilities of some 100 nats in fp32."""
METRICS = [name for name in DPO.metrics if name not in ("nll_loss", "token_loss")]


@pytest.fixture(scope="session")
def data(shared):
    return pairs_file(shared)


def fields(tiny: Tiny, data: Path, **sections: Any) -> dict[str, Any]:
    given = {"beta": BETA, "saving": {"every": 1}} | sections
    return fields_of("dpo", tiny.model, data, "preference", **given)


@pytest.fixture(scope="module")
def whole(tiny, data, tmp_path_factory) -> Run:
    """Two steps, each of eight pairs at once."""
    return train(tmp_path_factory.mktemp("whole") / "run", fields(tiny, data))


@pytest.fixture
def trained(tiny, data, tmp_path) -> Train:
    """A run in a folder of that name: `trained("a", beta=0.1)`."""
    return lambda name="run", **sections: train(tmp_path / name, fields(tiny, data, **sections))


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "own-cache"))
    return tmp_path / "own-cache"


def expected(
    tiny: Tiny, policy: Any, reference: Any = None, loss: Any = "sigmoid", e: float = 0.0,
    w: float = 0.0, other: Any = None, weights: Any = (1.0,), ld: float = 1.0,
) -> Steps:  # fmt: skip
    """The definition, on one sequence at a time and without padding; `reference` gives a context
    in which the policy is the reference, or None for the policy as it is now; `other` is another
    model that is the reference."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    data, beta = sequences(tiny), BETA
    counted = [
        [torch.tensor([1.0 if at < min(sizes) else ld for at in range(n)]) for n in sizes]
        for sizes in ([len(ids) - prompt for ids, prompt in row] for row in data)
    ]
    with torch.no_grad(), reference or contextlib.nullcontext():
        kept = [
            [logp(other or policy, *each, of).item() for each, of in zip(*both, strict=True)]
            for both in zip(data, counted, strict=True)
        ]
    found = []
    for step in range(STEPS):
        sums: dict[str, float] = dict.fromkeys(["loss", *METRICS], 0.0)
        logits, tokens, entropy = np.zeros(2), np.zeros(2), 0.0
        for row in rows_of_step(step, ROWS, SIZE, SEED):
            sides = [
                answer_sums(policy, *each, of)
                for each, of in zip(data[row], counted[row], strict=True)
            ]
            (of_c, by_c, spread_c), (of_r, by_r, spread_r) = sides
            ref_c, ref_r = kept[row]
            n_c, n_r = (len(ids) - prompt for ids, prompt in data[row])
            logits += (by_c, by_r)
            tokens += (n_c, n_r)
            entropy += spread_c + spread_r
            a, b = of_c - ref_c, of_r - ref_r
            h, mean = beta * (a - b), a / n_c - b / n_r
            x, y = beta * a, beta * b
            right = torch.sigmoid(torch.stack([h, -h]))
            losses = {
                "sigmoid": -(1 - e) * F.logsigmoid(h) - e * F.logsigmoid(-h),
                "robust": (-(1 - e) * F.logsigmoid(h) + e * F.logsigmoid(-h)) / (1 - 2 * e),
                "hinge": torch.relu(1 - h),
                "ipo": (mean - 1 / (2 * beta)) ** 2,
                "sigmoid_norm": -F.logsigmoid(beta * mean),
                "exo_pair": F.kl_div(
                    torch.tensor([1 - e, e]).log(), right.log(), reduction="sum", log_target=True
                ),
                "nca_pair": -F.logsigmoid(x) - 0.5 * F.logsigmoid(-x) - 0.5 * F.logsigmoid(-y),
                "bco_pair": -F.logsigmoid(x) - F.logsigmoid(-y),
                "sppo_hard": (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2,
                "apo_zero": 1 - torch.sigmoid(x) + torch.sigmoid(y),
                "apo_down": torch.sigmoid(x) + 1 - torch.sigmoid(h),
                "sft": -of_c / n_c,
            }
            names = [loss] if isinstance(loss, str) else loss
            term = -w * of_c / n_c
            for name, weight in zip(names, weights, strict=True):
                term = term + weight * losses[name]
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


def assert_defined(run: Run, wanted: Steps) -> None:
    assert_equal(steps_of(run, without=("nll_loss", "token_loss")), wanted, near=NATS)


LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "conservative": {"label_smoothing": 0.1},
    "robust": {"loss_type": "robust", "label_smoothing": 0.1},
    "hinge": {"loss_type": "hinge"},
    "ipo": {"loss_type": "ipo"},
    "sigmoid_norm": {"loss_type": "sigmoid_norm"},
    "with supervised tuning": {"sft_weight": 0.5},
    "exo_pair": {"loss_type": "exo_pair", "label_smoothing": 0.05},
    **{name: {"loss_type": name} for name in ("nca_pair", "bco_pair", "sppo_hard", "sft")},
    **{name: {"loss_type": name} for name in ("apo_zero", "apo_down")},
    "mpo": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 0.5]},
    "long answers": {"ld_alpha": 0.25},
}


EACH_DAY = ("conservative", "ipo", "mpo", "long answers")


@pytest.mark.parametrize("name", slow_but(EACH_DAY, LOSSES))
def test_each_loss_is_its_definition(trained, tiny, whole, name):
    settings = LOSSES[name]
    run = trained(**settings) if settings else whole
    loss, e = settings.get("loss_type", "sigmoid"), settings.get("label_smoothing", 0.0)
    w, weights = settings.get("sft_weight", 0.0), settings.get("loss_weights", (1.0,))
    ld = settings.get("ld_alpha", 1.0)
    wanted = expected(tiny, plain(tiny), loss=loss, e=e, w=w, weights=weights, ld=ld)
    assert_defined(run, wanted)


def test_the_first_step_begins_at_the_reference_and_the_next_one_leaves_it(whole):
    """Numbers that nobody reads would keep the loss at ln 2."""
    first, last = steps_of(whole)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert abs(first["rewards/chosen"]) < 1e-5
    assert (first["rewards/accuracies"], first["pairs/tied"]) == (0, 1)
    assert last["rewards/margins"] > 0.1


OF_PAIRS = CUTS | {
    "two, padded": {"micro_rows": 2, "padding_free": False},
    "by tokens": {"micro_tokens": 300, "padding_free": True},
}


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", slow_but(("one at a time", "by tokens"), OF_PAIRS))
def test_a_step_does_not_depend_on_its_micro_batches(trained, whole, name):
    """Nor do the numbers of the reference."""
    run = trained(batch={"max_length": 64, **OF_PAIRS[name]})
    assert_equal(steps_of(run), steps_of(whole), near=NATS)


def test_packs_hold_whole_pairs_and_train_as_pairs_do(tiny, data, tmp_path):
    packed, alone = packed_and_alone(fields(tiny, data, batch={"max_length": 256}), tmp_path)
    assert '"documents": 48' in packed.data.read_text()
    assert_equal(steps_of(packed), steps_of(alone), near=NATS)


def continued(tiny: Tiny, folder: Path) -> dict[str, Any]:
    """Sections that train an adapter further that is not zero."""
    torch.manual_seed(3)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    model = get_peft_model(plain(tiny), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    adapter = {"r": 4, "alpha": 8, "targets": "all-linear"}
    return {"model": {"name": str(tiny.model), "adapter": str(folder)}, "adapter": adapter}


@pytest.mark.parametrize("reference", ["start", "base"])
def test_an_adapter_that_is_trained_further_has_the_reference_that_is_named(
    trained, tiny, tmp_path, reference
):
    run = trained(**continued(tiny, tmp_path / "adapter"), reference=reference)
    policy = PeftModel.from_pretrained(plain(tiny), tmp_path / "adapter", is_trainable=True)
    wanted = expected(tiny, policy, policy.disable_adapter() if reference == "base" else None)
    assert_defined(run, wanted)
    assert (wanted[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)) == (reference == "start")


def base_chosen(tiny: Tiny, step: int = 0) -> float:
    """Mean log-probability of the chosen answers of a step, by the base."""
    model, rows = plain(tiny), sequences(tiny)
    with torch.no_grad():
        chosen = [logp(model, *rows[row][0]).item() for row in rows_of_step(step, ROWS, SIZE, SEED)]
    return sum(chosen) / SIZE


@pytest.mark.parametrize("init", slow_but(("pissa",), [True, "pissa", "olora"]))
@pytest.mark.parametrize("reference", ["start", "base"])
def test_a_new_adapter_starts_as_the_base_for_every_initialization(trained, tiny, init, reference):
    sections = {"adapter": {"r": 4, "init_lora_weights": init}, "reference": reference}
    (first,) = steps_of(trained(**sections, max_steps=1))
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert first["logps/chosen"] == pytest.approx(base_chosen(tiny), rel=EXACT)


@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens", "lm_head"]])
def test_a_trained_head_is_off_while_the_base_is_the_reference(trained, tiny, modules):
    sections = {"adapter": {"r": 4, "modules_to_save": modules}, "reference": "base"}
    steps = steps_of(trained(**sections))
    assert steps[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert steps[1]["rewards/margins"] > 0.1
    for number, step in enumerate(steps):
        reference = step["logps/chosen"] - step["rewards/chosen"] / BETA
        assert reference == pytest.approx(base_chosen(tiny, number), rel=EXACT)


def test_another_reference_model_gives_the_same_numbers_after_resuming(
    trained, tiny, data, tmp_path, own_cache
):
    """Though its numbers are gone, in the run as in the cache."""
    other = other_model(tiny, tmp_path / "other")
    given = fields(tiny, data, reference=str(other))
    run = train(tmp_path / "run", given)
    wanted = expected(tiny, plain(tiny), other=AutoModelForCausalLM.from_pretrained(other))
    assert_defined(run, wanted)
    assert abs(wanted[0]["rewards/chosen"]) > 0.1
    straight = steps_of(run)
    shutil.rmtree(run.checkpoint(2))
    shutil.rmtree(own_cache)
    run.reference.unlink()
    assert steps_of(train(run.root, given, resume=True)) == straight


@pytest.mark.parametrize(
    "name", slow_but(("continued",), ["full", "lora", "pissa", "nf4", "continued"])
)
def test_a_reference_by_the_name_of_the_base_is_the_base_for_any_policy(
    trained, tiny, tmp_path, name
):
    sections: dict[str, Any] = {"adapter": None if name == "full" else {"r": 4}}
    if name == "pissa":
        sections["adapter"] |= {"init_lora_weights": "pissa"}
    elif name == "nf4":
        sections["model"] = {"name": str(tiny.model), "quantization": "nf4"}
    elif name == "continued":
        sections = continued(tiny, tmp_path / "adapter")
        sections["batch"] = {"micro_rows": 2, "padding_free": False}
    shutil.copytree(tiny.model, tmp_path / "copy")
    by_word, by_name = (
        steps_of(trained(str(n), **sections, reference=r, max_steps=1))
        for n, r in enumerate(("base", str(tmp_path / "copy")))
    )
    assert_equal(by_name, by_word, near=NATS)


def test_a_reference_with_another_vocabulary_or_none_is_refused(trained, tiny, tmp_path):
    other = str(with_another_vocabulary(tiny.model, tmp_path / "other"))
    differs = r"'.*other' has another vocabulary: 1 of .* for the trained model and '<\|b"
    for name, told in ((other, differs), ("strat", "no tokenizer can be loaded from 'strat'")):
        with pytest.raises(FinetuneError, match=f"reference: {told}"):
            trained(reference=name)


@pytest.mark.usefixtures("own_cache")
def test_dropout_does_not_reach_the_reference(trained):
    runs = (
        trained(str(dropout), adapter={"r": 4, "dropout": dropout}, max_steps=1)
        for dropout in (0.0, 0.3)
    )
    assert np.array_equal(*(np.load(run.reference)["reference"] for run in runs))


def test_resuming_reads_the_numbers_of_the_run_though_the_cache_is_gone(
    tiny, data, tmp_path, whole, own_cache
):
    given = fields(tiny, data)
    resumed = copy_of(whole, tmp_path / "resumed")
    shutil.rmtree(resumed.checkpoint(2))
    train(resumed.root, given, resume=True)
    assert steps_of(resumed) == steps_of(whole)
    assert not (own_cache / "reference").exists()
    shutil.rmtree(resumed.checkpoint(2))
    content = bytearray(resumed.reference.read_bytes())
    content[len(content) // 2] ^= 1
    resumed.reference.write_bytes(content)
    with pytest.raises(FinetuneError, match="log-probabilities of the reference cannot be read"):
        train(resumed.root, given, resume=True)


@pytest.mark.usefixtures("own_cache")
def test_a_second_run_takes_the_numbers_from_the_cache(trained, whole, capfd):
    for number, (told, sections) in enumerate((
        ("computed in", {"max_steps": 1}), ("from", {"batch": {"micro_rows": 4}}),
        ("computed in", {"adapter": {"r": 4, "use_dora": True}, "max_steps": 1}),
    )):  # fmt: skip
        run = trained(str(number), **sections)
        assert f"48 log-probabilities, {told}" in capfd.readouterr().out
        if told == "from":
            assert_equal(steps_of(run), steps_of(whole), near=NATS)


def test_evaluation_reports_means_over_all_held_out_pairs(tiny, data, tmp_path):
    given = fields(tiny, data, eval_rows=6, evaluation={"every": 1, "micro_rows": 4})
    run = train(tmp_path / "run", given)
    found = list(run.read_metrics("eval"))
    assert ([each["step"] for each in found], found[0]["tokens"]) == ([1, 2], 6)
    assert found[0]["metrics"].keys() == {*METRICS, "token_loss"}
    assert '"documents": 12' in run.data.read_text()


# --- published values: TRL 1.16 and a computation on single sequences, of 260,000 weights --------

EVERY_DAY = ("sigmoid_beta0.1/lora_reference_start", "ipo_beta0.1/full")
OTHERS = (
    "sigmoid_beta0.1/lora", "sigmoid_beta0.5/full", "ipo_beta0.1/lora", "hinge_beta0.1/lora",
    "robust_beta0.1_smoothing0.1/lora", "conservative_beta0.1_smoothing0.1/lora",
    "length_normalised_beta2/lora",
)  # fmt: skip


@pytest.mark.parametrize("name", slow_but(EVERY_DAY, (*EVERY_DAY, *OTHERS)))
def test_training_reproduces_published_values(assets, tmp_path, name):
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


def test_a_quantised_base_is_its_own_reference(tiny, data, tmp_path):
    """QLoRA: the first step is at ln 2, and each way to cut a step gives the same steps."""
    model = {"name": str(tiny.model), "quantization": "nf4"}
    given = fields(tiny, data, model=model, adapter={"r": 4})
    first, last = whole = steps_of(train(tmp_path / "whole", given))
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert last["rewards/margins"] > 0
    assert 1e-6 < abs(first["logps/chosen"] / base_chosen(tiny) - 1) < 0.1
    given["batch"] |= {"micro_rows": 2, "padding_free": False}
    assert_equal(steps_of(train(tmp_path / "cut", given)), whole, near=NATS)


def test_a_margin_is_subtracted_from_the_difference_of_rewards(tiny, tmp_path):
    """At the first step rewards are equal, and the loss is that of the margins alone."""
    rows = (row | {"margin": number % 3} for number, row in enumerate(pairs()))
    given = fields(tiny, written(tmp_path / "margins.jsonl", rows), max_steps=1)
    assert steps_of(train(tmp_path / "left out", given))[0]["loss"] == pytest.approx(np.log(2))
    first = steps_of(train(tmp_path / "used", given | {"margin": True}))[0]
    chosen = rows_of_step(0, ROWS, SIZE, SEED) % 3
    assert first["loss"] == pytest.approx(np.log1p(np.exp(chosen)).mean(), rel=1e-6)
    with pytest.raises(FinetuneError, match=r"`margin` belongs to loss_type sigmoid, .*; got ipo"):
        DPO(loss_type="ipo", margin=True)
