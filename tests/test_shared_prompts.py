"""A prompt that documents of a micro-batch share is computed once, and nothing else changes."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import preference
import pytest
import torch
from architectures import FIELDS, SIZES
from conftest import Tiny
from documents import documents_of
from transformers import AutoConfig, AutoModelForCausalLM

from finetune import catalog
from finetune.backend import load
from finetune.data.rows.collate import MicroBatch, collate
from finetune.data.rows.order import rows_of_step, split_rows
from finetune.data.rows.shared_prompts import computed_lengths, computed_once, repeated_tokens
from finetune.data.rows.store import Columns, Rows, TokenColumn, single_rows
from finetune.errors import FinetuneError
from finetune.kernels.head import give_loss
from finetune.kernels.repeated import repeated
from finetune.methods.grpo import GRPO
from finetune.methods.losses import labelled, token_logps
from finetune.methods.online import ADVANTAGE, OLD, REFERENCE
from finetune.models.packed_attention import DOCUMENTS, attend
from finetune.models.recurrence import separate_documents
from finetune.planner import plan, rules
from finetune.planner.families import FAMILIES
from finetune.planner.prompt_sharing import shared_prompts
from finetune.planner.request import Request
from finetune.rewards import Reward
from finetune.runs.run import Run

CLOSE = 2e-6
"""Relative, in fp32: matrix products of another number of rows round differently."""
EVERY_DAY = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3")
"""Plain, with normalized heads, with a window, soft caps, sinks, and latent keys."""
OTHERS = [
    kind
    for kind, family in FAMILIES.items()
    if family.concatenates and not (family.recurrent or family.reads) and kind not in EVERY_DAY
]
SIDE_BY_SIDE = "side by side without padding, each attending to itself alone"
ONCE = "a prompt that {} share is computed once"
COMPLETIONS: dict[str, Any] = {
    "method": "grpo", "reward_funcs": ["json_valid"], "beta": 0.0, "max_completion_length": 9,
    "data": [{"source": "prompts.jsonl", "format": "prompts"}],
}  # fmt: skip


def column(ids: Iterable[int], prompt: int) -> Columns:
    """A document whose tokens after the prompt are trained."""
    tokens = np.array(list(ids), dtype=np.int32)
    return tokens, np.arange(len(tokens)) >= prompt


def rows_of(columns: list[Columns]) -> Rows:
    rows = single_rows(documents_of(columns))
    return dataclasses.replace(rows, padding_free=True, share_prompts=True)


def batches(rows: Rows) -> tuple[MicroBatch, MicroBatch]:
    """All rows in one micro-batch: with shared prompts, and with repeated ones."""
    repeated = dataclasses.replace(rows, share_prompts=False)
    every = np.arange(len(rows))
    return collate(rows, every, 0, "cpu"), collate(repeated, every, 0, "cpu")


def test_a_shared_prompt_is_in_a_micro_batch_once() -> None:
    """The third document has the prompt of the first, and the second one its first token."""
    rows = rows_of([column([5, 6, 7, 8], 2), column([5, 9, 4], 2), column([5, 6, 3, 2], 2)])
    batch, repeated = batches(rows)
    assert batch.ids.tolist() == [[5, 6, 7, 8, 9, 4, 3, 2]]
    assert batch.labels.tolist() == [[-100, -100, 7, 8, -100, 4, 3, 2]]
    places, targets = labelled(batch)
    assert places.tolist() == [1, 2, 4, 1, 6]
    assert targets.tolist() == labelled(repeated)[1].tolist() == [7, 8, 4, 3, 2]
    assert batch.last_places.tolist() == [3, 5, 7]
    bounds = batch.boundaries
    assert bounds.positions.tolist() == [[0, 1, 2, 3, 1, 2, 2, 3]]
    assert bounds.document_tokens.tolist() == [0, 1, 2, 3, 0, 4, 5, 0, 1, 6, 7]
    assert bounds.token_places.tolist() == [0, 1, 2, 3, 5, 6, 9, 10]
    assert (bounds.numbers, bounds.longest) == ((0, 4, 7, 11), 4)
    assert batch.document_labels.tolist() == repeated.document_labels.tolist() == [2, 1, 2]
    counts = [(b.rows, b.trained_tokens, b.real_tokens, b.attended) for b in (batch, repeated)]
    assert counts == [(3, 5, 11, 11)] * 2


def test_only_tokens_before_the_first_label_are_shared_and_never_all_of_a_document() -> None:
    prompt = list(range(5, 15))
    given = [column([*prompt, 1, 2], 10), column([*prompt, 1, 2], 10), column(prompt, 99)]
    assert repeated_tokens(given) == [(0, 0), (10, 0), (9, 1)]
    trained_inside = column([*prompt, 1], 4)
    assert repeated_tokens([given[0], trained_inside]) == [(0, 0), (4, 0)]
    assert repeated_tokens([trained_inside, given[0]]) == [(0, 0), (10, 0)]
    one_token = column([5], 0)
    assert repeated_tokens([one_token, one_token]) == [(0, 0), (0, 0)]


def test_few_repeated_tokens_are_computed_again() -> None:
    """One of 21 tokens is less than a twentieth, one of 20 is not."""
    for size in (19, 18):
        index = computed_once([column(range(5, 5 + size), 5), column([5, 1], 1)])
        assert (index is None) == (size == 19)


def test_a_large_micro_batch_on_a_cpu_is_filled_to_the_tokens_that_it_computes() -> None:
    prompt = [7] * 300
    batch, repeated = batches(rows_of([column([*prompt, *[n] * 400], 300) for n in (1, 2, 3)]))
    assert (batch.ids.numel(), repeated.ids.numel()) == (1_536, 2_112)  # of 1,500 and 2,100
    assert batch.boundaries.numbers == (0, 700, 1_400, 2_100, 2_136)
    assert batch.boundaries.positions[0, -36:].tolist() == list(range(36))
    assert (batch.real_tokens, batch.attended) == (2_100, 2_136)


def test_the_computed_tokens_of_a_pair_are_known_before_it_is_collated() -> None:
    documents = documents_of([column([1, 2, 3, 9], 3), column([1, 2, 3, 8, 8], 3), *[
        column([n, n], 1) for n in (4, 5)
    ]])  # fmt: skip
    pairs = Rows(documents, np.arange(4), np.array([0, 2, 4]), packed=False, share_prompts=True)
    assert computed_lengths(pairs).tolist() == [6, 4]
    assert computed_lengths(dataclasses.replace(pairs, share_prompts=False)).tolist() == [9, 4]


def answers() -> Rows:
    """Five answers to two prompts, which start with the same four tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 96, size) for size in (9, 14)]
    prompts[1][:4] = prompts[0][:4]
    return rows_of([
        column([*prompts[number], *rng.integers(2, 96, size)], len(prompts[number]))
        for number, size in ((0, 5), (1, 7), (0, 12), (1, 1), (0, 3))
    ])  # fmt: skip


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**(SIZES | FIELDS.get(kind, {}) | {"model_type": kind}))
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=DOCUMENTS
    )
    give_loss(model, chunked=False)
    separate_documents(model)
    return model


def gradient(model: Any) -> torch.Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    "kind", [*EVERY_DAY, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]
)
def test_log_probabilities_and_gradients_are_those_of_repeated_prompts(kind: str) -> None:
    model, found = model_of(kind), list[tuple[torch.Tensor, torch.Tensor]]()
    shared, repeated = batches(answers())
    assert (shared.ids.numel(), repeated.ids.numel()) == (47, 83)
    for batch in (shared, repeated):
        logps, _ = token_logps(model, batch)
        (logps * torch.linspace(0.5, 1.5, len(logps))).sum().backward()
        found.append((logps.detach(), gradient(model)))
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() < CLOSE * theirs.norm()


def test_the_loss_of_completions_is_that_of_repeated_prompts():
    """Completions of two groups in turn, with values of each and of each of their tokens."""
    rows, rng = answers(), np.random.default_rng(1)
    documents = rows.documents
    tokens = {
        name: TokenColumn.at_labels(documents, rng.normal(-4, 1, len(documents.ids)))
        for name in (OLD, REFERENCE)
    }
    rows = dataclasses.replace(rows, columns={ADVANTAGE: rng.normal(size=5)}, token_columns=tokens)
    recipe = GRPO(reward_funcs=(Reward("json_valid"),), beta=0.1, loss_type="grpo")
    model, found = model_of("llama"), list[tuple[dict[str, float], torch.Tensor]]()
    for batch in batches(rows):
        loss = recipe.loss(model, batch)
        loss.sum.backward()
        metrics = {name: float(value) / count for name, (value, count) in loss.metrics.items()}
        found.append(({"sum": float(loss.sum), **metrics}, gradient(model)))
    (mine, grads), (wanted, others) = found
    assert mine == pytest.approx(wanted, rel=1e-5)
    assert (grads - others).norm() < 1e-5 * others.norm()


def test_gradients_of_many_repetitions_are_summed_in_fp32():
    """1 + 512 / 512 in bf16, where 1 + 1 / 512 is 1."""
    states = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    copies = repeated(states, torch.zeros(513, dtype=torch.int64))
    copies.backward(torch.tensor([1.0] + [2**-9] * 512, dtype=torch.bfloat16).view(copies.shape))
    assert states.grad.item() == 2


def test_a_model_that_does_not_pass_on_shared_prompts_is_refused():
    states, ends = torch.randn(1, 2, 5, 8), (0, 4, 8)
    given = {"cu_seq_lens_q": torch.tensor(ends, dtype=torch.int32), "document_ends": ends}
    with pytest.raises(FinetuneError, match="Module does not pass on which documents share"):
        attend(torch.nn.Module(), states, states, states, None, max_length_q=4, **given)


@pytest.fixture(scope="session")
def data(shared) -> Path:
    return preference.pairs_file(shared)


def fields(tiny: Tiny, data: Path, **sections: Any) -> dict[str, Any]:
    return preference.fields_of("dpo", tiny.model, data, "preference", **{"beta": 0.3} | sections)


def repeated_in_step(tiny: Tiny, step: int, micro_rows: int) -> int:
    """Tokens of prompts that are not the first with their beginning in their micro-batch."""
    of_pairs = preference.sequences(tiny)
    lengths = np.array([sum(len(ids) for ids, _ in row) for row in of_pairs])
    total = 0
    for chosen in split_rows(
        rows_of_step(step, preference.ROWS, preference.SIZE, preference.SEED), lengths, micro_rows
    ):
        prompts = [ids[:prompt] for row in chosen for ids, prompt in of_pairs[row]]
        beginnings = {tuple(ids[: end + 1]) for ids in prompts for end in range(len(ids))}
        total += sum(map(len, prompts)) - len(beginnings)
    return total


@pytest.mark.parametrize(
    ("adapter", "precision", "near"), [(None, "fp32", 1e-5), ({"r": 4}, "bf16", 1e-2)]
)
def test_pairs_train_as_with_repeated_prompts_on_fewer_tokens(
    tiny, data, tmp_path, adapter, precision, near
):
    """Two micro-batches of 4 pairs in each step; numbers in bf16 have 8 bits."""
    runs = list[Run]()
    for share in ("auto", False):
        given = fields(
            tiny, data, batch={"micro_rows": 4, "share_prompts": share}, adapter=adapter,
            kernels={"pointwise": "compiled"},
        )  # fmt: skip
        runs.append(preference.train(tmp_path / str(share), given, precision=precision))
    preference.assert_equal(*map(preference.steps_of, runs), rel=near, near=10 * near)
    trained = [list(run.read_metrics("train")) for run in runs]
    for step, (once, again) in enumerate(zip(*trained, strict=True)):
        assert once["real_tokens"] == again["real_tokens"] == again["slots"]
        assert again["slots"] - once["slots"] == repeated_in_step(tiny, step, 4) > 0
    lines = [next(run.read_metrics("start"))["padding"] for run in runs]
    assert lines == [f"{SIDE_BY_SIDE}; {ONCE.format('both answers of a pair')}", SIDE_BY_SIDE]


def test_a_memory_forecast_knows_tokens_that_only_attention_repeats(tiny, data, tmp_path):
    run = preference.train(tmp_path / "run", fields(tiny, data, adapter={"r": 4}))
    (counted,) = run.read_metrics("memory")
    assert counted["peak"] == pytest.approx(counted["predicted"], rel=0.05)


@pytest.mark.parametrize("free", [True, False])
def test_a_start_predicts_the_peak_of_pairs(tiny, tmp_path, free):
    """Pairs of one length, so that each micro-batch needs what the longest one does."""
    texts = {
        "prompt": ("user", "{} dogs see the blue house and the tree"),
        "chosen": ("assistant", "under the red tree chosen"),
        "rejected": ("assistant", "under the red tree rejected"),
    }
    rows = (
        {name: [{"role": role, "content": text.format(n)}] for name, (role, text) in texts.items()}
        for n in range(10, 20)
    )
    batch = {"rows": 4, "micro_rows": 4, "padding_free": free}
    source = preference.written(tmp_path / "pairs.jsonl", rows)
    given = fields(tiny, source, adapter={"r": 4}, batch=batch, reference="base")
    run = preference.train(tmp_path / "run", given)
    (counted,) = run.read_metrics("memory")
    predicted = json.loads(run.plan.read_text())["prediction"]["peak_memory"]
    assert counted["peak"] == pytest.approx(predicted, rel=0.1)


DIFFERS = "differs between repetitions of a token"
AGAINST: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"method": "sft"}, {}, "sft has one sequence for each prompt"),
    ({"batch": {"packing": True}}, {}, "packed rows (batch.packing=true) repeat prompts"),
    ({"batch": {"padding_free": False}}, {}, "rows are padded (batch.padding_free=false)"),
    (
        {"model": {"attention": "flash_attention_2"}}, {},
        "model.attention=flash_attention_2 does not repeat shared tokens",
    ),
    ({"adapter": {"dropout": 0.1}}, {}, f"adapter.dropout {DIFFERS}"),
    ({}, {"attention_dropout": 0.1}, f"the model's attention_dropout {DIFFERS}"),
    ({}, {"model_type": "qwen3_next"}, "'qwen3_next' models have layers with a state"),
    (
        {}, {"rope_scaling": {"type": "longrope"}},
        "'longrope' positions depend on the length of each document",
    ),
    (
        {"model": {"router_aux_loss": 0.01}}, {"model_type": "mixtral", "num_local_experts": 4},
        "the load-balancing loss of experts counts each token of a document",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "config", "reason"), AGAINST)
def test_prompts_are_not_shared_where_that_is_not_exact(changed, config, reason):
    config = {"model_type": "llama"} | config
    base: dict[str, Any] = {"method": "dpo", "model": {"config": config, "tokenizer": "none"}}
    given = {**base, **changed, "model": base["model"] | changed.get("model", {})}
    recipe, single = catalog.from_fields(given), load("single")
    assert shared_prompts(recipe, single, config).reasons == (reason,)
    assert not shared_prompts(recipe, single, config).shared
    required = recipe.with_batch(share_prompts=True)
    assert list(rules.shared_prompts(Request(recipe, single, 1, config))) == []
    assert list(rules.shared_prompts(Request(required, single, 1, config))) == [
        f"batch.share_prompts: {reason}; use batch.share_prompts=auto, which then computes each "
        "prompt again"
    ]


def test_a_plan_and_a_start_refuse_prompts_that_cannot_be_shared(tiny, data, tmp_path):
    reason = "batch.share_prompts: adapter.dropout differs between repetitions of a token"
    required = fields(tiny, data, batch={"share_prompts": True}, adapter={"dropout": 0.1})
    with pytest.raises(FinetuneError, match=reason):
        preference.train(tmp_path / "run", required)
    pairs, completions = (
        plan(catalog.from_fields(fields(tiny, data) | changed), load("single"))
        for changed in ({}, COMPLETIONS)
    )
    assert pairs.prompts.line(pairs.padding).endswith(ONCE.format("both answers of a pair"))
    assert f"rows         {SIDE_BY_SIDE}; {ONCE.format('the completions of a group')}" in (
        completions.explain()
    )
