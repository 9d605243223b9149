"""Mixtures of experts: what an adapter reaches, and the load-balancing loss."""

import copy
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from architectures import FIELDS
from documents import documents_of
from families import SIZES, build, distance, gradients
from test_plan import ROWS, refused
from tiny_run import VOCABULARY, byte_tokenizer, save_base
from transformers import AutoConfig

import finetune as ft
from finetune.data.rows.collate import MicroBatch, collate
from finetune.data.rows.store import Rows, single_rows
from finetune.distributed.filling import padded
from finetune.distributed.pipeline import Stage, Step
from finetune.kernels.balance import Balance, balance_of, parts
from finetune.kernels.balance import documents_of as documents_of_tokens
from finetune.kernels.head import give_loss
from finetune.methods.losses import token_loss, token_loss_sum
from finetune.models.model import recompute
from finetune.models.packed_attention import DOCUMENTS
from finetune.planner.balance_loss import coefficient

FACTOR = 0.1
ASKED = {"output_router_logits": True, "router_aux_loss_coef": FACTOR}
MOE: dict[str, dict[str, Any]] = {
    kind: FIELDS[kind] | {"head_dim": 16}
    for kind in (
        "mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "gpt_oss", "granitemoe", "phimoe",
        "qwen3_next",
    )
}  # fmt: skip
MOE["ernie4_5_moe"] = FIELDS["ernie4_5_moe"] | {"moe_layer_start_index": 0}


def balanced(kind: str, attention: str | None = None) -> Any:
    model = build(kind, **(MOE[kind] | ASKED)).train()
    if attention is not None:
        model.set_attn_implementation(attention)
    chunked = kind in ("mixtral", "qwen3_moe")  # and the others from all logits
    give_loss(model, chunked=chunked, balance=balance_of(model, ft.Model()))
    return model


def rows_of(lengths: list[int]) -> Rows:
    made = np.random.default_rng(3)
    return single_rows(
        documents_of(
            (made.integers(3, 300, n).astype(np.int32), made.random(n) < 0.6) for n in lengths
        )
    )


def step(model: Any, batches: list[MicroBatch]) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss of a step, its share of balance, and the gradients, as the training loop makes them."""
    model.zero_grad()
    terms = sum(batch.trained_tokens for batch in batches)
    real = sum(batch.real_tokens for batch in batches)
    loss = balance = 0.0
    for batch in batches:
        found = token_loss(model, batch)
        whole, share = parts(found.sum, found.balance, real / terms)
        (whole / terms).backward()
        loss += whole.item() / terms
        balance += share.item() / terms
    return loss, balance, gradients(model)


@pytest.mark.parametrize("kind", MOE)
def test_one_row_has_the_loss_and_the_gradient_of_transformers(kind):
    model = balanced(kind)
    (batch,) = [collate(rows_of([19]), np.array([0]), 0, "cpu")]
    plain = build(kind, **(MOE[kind] | ASKED)).train()
    output = plain(input_ids=batch.ids, labels=batch.labels)
    output.loss.backward()
    loss, balance, found = step(model, [batch])
    assert output.aux_loss.item() > 1
    assert balance == pytest.approx(FACTOR * output.aux_loss.item(), rel=1e-6)
    assert loss == pytest.approx(output.loss.item(), rel=1e-6)
    assert distance(found, gradients(plain)) < 3e-5  # sums in another order


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_a_step_does_not_depend_on_how_its_rows_are_split(kind):
    """Any accumulation, padded or side by side, and beside ranks that have no rows."""
    rows = rows_of([19, 7, 12, 3, 16, 5, 9, 11])
    numbers = np.arange(8)
    packed = dataclasses.replace(rows, bounds=np.array([0, 3, 4, 8]), packed=True)
    cuts = {
        "each": [collate(rows, numbers[n : n + 1], 0, "cpu") for n in range(8)],
        "padded by 2": [collate(rows, numbers[n : n + 2], 0, "cpu") for n in range(0, 8, 2)],
        "padded by 4": [collate(rows, numbers[n : n + 4], 0, "cpu") for n in range(0, 8, 4)],
        "padded by 8": [collate(rows, numbers, 0, "cpu")],
        "idle rank": [collate(rows, numbers, 0, "cpu"), collate(rows, numbers[:0], 0, "cpu")],
        "packed": [collate(packed, np.array([n]), 0, "cpu") for n in range(3)],
        "one pack": [collate(packed, np.arange(3), 0, "cpu")],
    }
    plain, side = balanced(kind), balanced(kind, DOCUMENTS)
    steps = {name: step(side if "pack" in name else plain, cut) for name, cut in cuts.items()}
    loss, balance, wanted = steps["each"]
    for name, (other, share, found) in steps.items():
        assert other == pytest.approx(loss, rel=1e-6), name
        assert share == pytest.approx(balance, rel=1e-6), name
        # Products of another shape are summed in another order.
        assert distance(found, wanted) < 2e-5, name


def test_padding_of_a_long_pack_is_not_counted():
    """On a CPU a pack of 1,024 tokens or more is filled up, with a document of padding."""
    packed = dataclasses.replace(rows_of([1000, 30]), bounds=np.array([0, 2]), packed=True)
    batch = collate(packed, np.array([0]), 0, "cpu")
    assert (batch.ids.numel(), batch.real_tokens) == (1088, 1030)
    found, number = documents_of_tokens(batch.ids, None, batch.boundaries.ends, 1030)
    assert (number, found.bincount().tolist()) == (3, [1000, 30, 0, 58])


def test_evaluation_leaves_the_balance_out():
    model = balanced("mixtral").eval()
    batch = collate(rows_of([19, 7]), np.arange(2), 0, "cpu")
    labels = batch.labels
    with torch.no_grad():
        logits = model(input_ids=batch.ids, attention_mask=batch.attention_mask).logits
        wanted = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        assert token_loss_sum(model, batch).item() == pytest.approx(wanted.item(), rel=1e-6)


def test_a_router_that_chooses_evenly_has_the_least_loss():
    """Two layers of two experts, one chosen: even choices give N * 2 * (1/2 * 1/2) = 1."""
    even = torch.tensor([[9.0, -9.0], [-9.0, 9.0]])
    single = torch.tensor([[9.0, -9.0], [9.0, -9.0]])
    tokens = torch.tensor([0, 0])
    balance = Balance(experts=2, chosen=1, coefficient=0.5)
    assert balance.sum((even, even), tokens, 1).item() == pytest.approx(0.5 * 2 * 1.0, rel=1e-6)
    assert balance.sum((single, single), tokens, 1).item() == pytest.approx(0.5 * 2 * 2, rel=1e-6)


def test_layers_of_several_stages_have_the_loss_of_all_layers():
    """Documents of 3 and 2 tokens and a token of padding, next to a micro-batch of 4 documents."""
    made = torch.Generator().manual_seed(2)
    layers = [torch.randn(6, 4, generator=made).requires_grad_() for _ in range(3)]
    tokens, balance = torch.tensor([0, 0, 0, 1, 1, 2]), Balance(4, 2, 0.5)
    whole = balance.sum(tuple(layers), tokens, 2)
    wanted = torch.autograd.grad(whole, layers)
    first, last = (balance.tally(part, tokens, 4) for part in (tuple(layers[:2]), (layers[2],)))
    found = balance.of_tally(first + last, tokens, 2)
    assert torch.equal(found, whole)
    for grad, expected in zip(torch.autograd.grad(found, layers), wanted, strict=True):
        assert torch.equal(grad, expected)


def test_stages_on_one_process_pass_on_what_their_routers_chose():
    """Two parts of one model, whose rows are padded to one shape."""
    model = balanced("qwen3_moe")
    complete = copy.deepcopy(model)
    plain = collate(rows_of([9, 5]), np.arange(2), 0, "cpu")
    (batch,) = padded([plain], 0, multiple=4)
    whole, balance = token_loss_sum(complete, plain)
    (whole + balance).backward()
    stages = [Stage(model, range(n, n + 1), n, 2, several=True) for n in range(2)]
    for stage in stages:
        loss_of = lambda _, head: token_loss_sum(head, batch).sum()  # noqa: E731
        stage.step = Step([batch], [0], loss_of, torch.float32, training=True, seen={})
    hidden, tally = stages[0](torch.zeros(1))
    loss = stages[1](hidden, tally)
    loss.backward()
    assert loss.item() == pytest.approx((whole + balance).item(), rel=1e-6)
    assert distance(gradients(model), gradients(complete)) < 1e-5


def test_rows_padded_to_one_shape_are_documents_without_their_padding():
    ids = torch.arange(6).reshape(2, 3)
    short = MicroBatch(ids, ids, torch.tensor([[1, 1, 1], [1, 0, 0]]), 2, 4, 4)
    full = MicroBatch(torch.arange(4)[None], torch.arange(4)[None], None, 1, 4, 4)
    for batch, wanted in zip(
        padded([short, full], 0), ([0, 0, 0, 2, 1, 2, 2, 2], [0] * 4 + [2] * 4), strict=True
    ):
        found, number = documents_of_tokens(batch.ids, batch.unpadded, None, batch.real_tokens)
        assert (found.tolist(), number) == (wanted, 2)


def test_recomputed_blocks_give_the_same_gradient():
    model = balanced("qwen3_moe")
    batch = collate(rows_of([19, 7]), np.arange(2), 0, "cpu")
    _, _, wanted = step(model, [batch])
    recompute(model, True)
    _, _, found = step(model, [batch])
    assert distance(found, wanted) < 1e-6


@pytest.mark.parametrize(
    ("asked", "fields", "factor"),
    [
        ("model", {"output_router_logits": True, "router_aux_loss_coef": 0.02}, 0.02),
        ("model", {"output_router_logits": True}, 0.001),
        ("model", {"output_router_logits": False, "router_aux_loss_coef": 0.02}, None),
        ("none", {"output_router_logits": True}, None),
        ("on", {"output_router_logits": False, "router_aux_loss_coef": 0.02}, 0.02),
        (0.3, {"output_router_logits": False, "router_aux_loss_coef": 0.02}, 0.3),
        (0.0, {"output_router_logits": True}, None),
    ],
)
def test_the_factor_is_that_of_the_recipe_or_of_the_config(asked, fields, factor):
    config = {"model_type": "mixtral", "num_local_experts": 4} | fields
    assert coefficient(ft.Model(router_aux_loss=asked), config) == (factor, "")


@pytest.mark.parametrize(
    ("asked", "config", "source"),
    [
        (0.1, {"model_type": "llama"}, "got 0.1"),
        (0.1, {"model_type": "deepseek_v3", "n_routed_experts": 8}, "got 0.1"),
        (
            "model",
            {"model_type": "jetmoe", "num_local_experts": 8, "output_router_logits": True},
            "config.json has output_router_logits=true",
        ),
    ],
)
def test_a_loss_that_is_not_known_is_refused_by_the_plan(asked, config, source):
    model = ft.Model(config=config, tokenizer="t", router_aux_loss=asked)
    assert refused(ft.SFT(model).with_data(ROWS), "single") == [
        f"model.router_aux_loss: {source}, but no load-balancing loss is implemented for "
        f"{config['model_type']}; set model.router_aux_loss=none to train without one"
    ]


@pytest.mark.parametrize("kind", sorted({"olmoe", "flex_olmo", "mixtral", "qwen3_moe", "jamba"}))
def test_default_factors_are_those_of_transformers(kind):
    config = AutoConfig.for_model(kind, output_router_logits=True)
    stated = config.router_aux_loss_coef
    fields = config.to_dict() | {"router_aux_loss_coef": None}
    assert coefficient(ft.Model(), fields) == (stated, "")


def test_a_run_records_and_reports_the_balance(train, tmp_path, capsys):
    """The first step of all weights has the loss of transformers on each row, by its tokens."""
    fields = SIZES | MOE["qwen3_moe"] | ASKED | {"vocab_size": VOCABULARY, "eos_token_id": 256}
    model = build("qwen3_moe", **fields)
    base, rows = save_base(model, tmp_path / "base"), tmp_path / "rows.jsonl"
    samples = [("the cat", " sat on it"), ("a dog ran to the old tree", " and back")] * 2
    rows.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in samples))
    recipe = {
        "method": "sft", "model": {"name": str(base)}, "max_steps": 1, "train_on": "all",
        "data": [{"source": str(rows), "format": "prompt_completion"}],
        "batch": {"rows": 4, "micro_rows": 2, "max_length": 64, "padding_free": False},
    }  # fmt: skip
    run = train(fields=recipe)
    told = "model.router_aux_loss: 0.1 x the load-balancing loss of the experts, by document, is"
    assert told in " ".join(capsys.readouterr().out.split())
    (line,) = run.read_metrics("train")
    tokenizer = byte_tokenizer()
    cross = balance = terms = tokens = 0.0
    for prompt, completion in samples:
        ids = torch.tensor([[*tokenizer(prompt + completion).input_ids, 256]])
        output = model.eval()(input_ids=ids, labels=ids)
        alone = output.loss.item() - FACTOR * output.aux_loss.item()
        cross, terms = cross + alone * (ids.numel() - 1), terms + ids.numel() - 1
        balance, tokens = balance + output.aux_loss.item() * ids.numel(), tokens + ids.numel()
    assert (line["trained_tokens"], line["real_tokens"]) == (terms, tokens)
    assert line["router_aux_loss"] == pytest.approx(FACTOR * balance / tokens, rel=1e-5)
    assert line["loss"] == pytest.approx(cross / terms + FACTOR * balance / tokens, rel=1e-5)
