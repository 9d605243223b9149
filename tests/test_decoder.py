"""Rows that are decoded together get the logits that each has alone."""

from typing import Any

import pytest
import torch
from conftest import slow_but
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from finetune.inference import batch as batching
from finetune.inference.batch import Batch, Forward, can_join
from finetune.inference.decoder import Decoder, Row, decode, in_passes
from finetune.kernels.head import give_loss

SMALL = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 128,
    "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHARED = {
    "llama": SMALL,
    "gpt2": {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128},
    "bloom": {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "mistral": {**SMALL, "sliding_window": 4},
    "gemma3_text": {**SMALL, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
}
ALONE = {
    "a recurrent state": ("mamba", {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2}),
    "linear attention":
        ("qwen3_next", {**SMALL, "layer_types": ["linear_attention", "full_attention"]}),
    "positions by length": ("llama",
        {**SMALL, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
}  # fmt: skip


def tiny(kind: str, fields: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **fields, initializer_range=0.3)
    with torch.device("cpu"):
        return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", slow_but(("llama", "bloom", "gemma3_text"), SHARED))
@torch.inference_mode()
def test_rows_join_and_leave_without_a_trace(kind, monkeypatch):
    """Within 1e-4: fp32, whose products add in another order for another number of rows."""
    model = tiny(kind, SHARED[kind])
    assert can_join(model)
    monkeypatch.setattr(batching, "ROOM", 12)
    forward = Forward(model, joins=True)
    texts = [torch.randint(3, 64, (length,)).tolist() for length in (30, 33, 27, 45)]

    def check(batch: Batch, shown: dict[int, int]) -> None:
        """Row by row: the text, and how many of its tokens the row has."""
        for logits, (number, length) in zip(batch.logits, shown.items(), strict=True):
            alone = model(torch.tensor([texts[number][:length]])).logits[0, -1]
            torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)

    batch = Batch(forward, [texts[0][:3], texts[1][:9]], 0)
    check(batch, {0: 3, 1: 9})
    batch.advance([texts[0][3], texts[1][9]])
    batch.join(Batch(forward, [texts[2][:20]], 0))  # longer than what is there
    check(batch, {0: 4, 1: 10, 2: 20})
    batch.advance([texts[0][4], texts[1][10], texts[2][20]])
    batch.keep([0, 1])
    batch.join(*(Batch(forward, [texts[n][:length]], 0) for n, length in ((3, 1), (2, 7))))
    places = {tensor.data_ptr() for tensor in cached(batch)}
    for step in range(14):  # past the window of sliding layers
        more = (texts[0][5 + step], texts[1][11 + step], texts[3][1 + step], texts[2][7 + step])
        batch.advance(more)
        moved = {tensor.data_ptr() for tensor in cached(batch)} != places
        assert moved == (step >= 12)  # a token is put behind the others, which stay
    check(batch, {0: 19, 1: 25, 3: 15, 2: 21})
    batch.keep([2])
    batch.advance([texts[3][15]])
    check(batch, {3: 16})


def cached(batch: Batch) -> list[torch.Tensor]:
    """Keys and values of the layers that keep all tokens."""
    return [each for layer in batch.cache.layers for each in (layer.keys, layer.values)]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba"])
def test_greedy_answers_are_those_of_generate(kind):
    """Nine rows, of which three run at once: those that end leave, and the others join."""
    model = tiny(kind, SHARED.get(kind, ALONE["a recurrent state"][1]))
    stops = list(range(3, 12))
    rows = [
        Row(torch.randint(12, 64, (1 + 3 * n,)).tolist(), 4 + n, stops)
        for n in torch.randperm(9).tolist()
    ]
    decode(model, rows, 0, 3)
    for row in rows:
        ids = torch.tensor([row.prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=row.limit, do_sample=False,
            eos_token_id=stops, pad_token_id=0,
        )  # fmt: skip
        assert row.ids == out[0, ids.shape[1] :].tolist()


def test_a_model_that_computes_its_loss_samples_as_one_that_does_not():
    """In training: with places of their own (GPT-2 has learned ones), and rows that join."""
    model = tiny("gpt2", SHARED["gpt2"])
    prompts = [torch.randint(12, 64, (length,)).tolist() for length in (3, 9, 20)]
    plain = [Row(prompt, 8, ()) for prompt in prompts]
    decode(model, plain, 0, 3)
    give_loss(model, chunked=False)
    trained = [Row(prompt, 8, ()) for prompt in prompts]
    decode(model, trained, 0, 3)
    assert [row.ids for row in trained] == [row.ids for row in plain]
    assert can_join(model)


class TwoRanks:
    """A rank whose partner has more to do."""

    device = torch.device("cpu")

    def __init__(self, model: Any, others: list[list[int]]) -> None:
        self.inner, self.others, self.passes = model, others, 0

    def model(self, **given: Any) -> Any:
        self.passes += 1
        return self.inner(**given)

    def largest(self, values: list[int]) -> list[int]:
        other = self.others.pop(0) if self.others else [0, 0]
        return [max(pair) for pair in zip(values, other, strict=True)]


def test_ranks_run_equally_many_forward_passes():
    others = [[2, 0], [0, 1], [0, 1], [1, 1], [0, 1]]
    ranks = TwoRanks(tiny("llama", SMALL), list(others))
    row = Row([5, 6, 7], 2, ())
    decode(ranks.inner, [row], 0, 3, engine=ranks)
    assert (ranks.passes, len(row.ids)) == (sum(map(sum, others)), 2)


def test_a_cpu_pads_prompts_less_than_it_reads_weights_again():
    passes = in_passes(Row([0] * length, 1, ()) for length in (1000, 4, 2, 990, 2, 40))
    assert [[len(row.prompt) for row in each] for each in passes] == [[2, 2, 4], [40], [990, 1000]]


@pytest.mark.parametrize(("kind", "fields"), ALONE.values(), ids=ALONE.keys())
def test_a_model_whose_rows_change_each_other_shares_nothing(kind, fields):
    assert not can_join(tiny(kind, fields))


def test_a_token_follows_the_probabilities_and_top_p():
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])

    def drawn(count: int, top_p: float) -> torch.Tensor:
        decoder = Decoder(tiny("llama", SMALL), 0, count)
        decoder.rows = [Row([1], 1, (), 2.0, top_p, (7, number)) for number in range(count)]
        return decoder._choose((shares.log() * 2).expand(count, -1))[0]  # temperature 2 undoes it

    counts = torch.bincount(drawn(4000, 1.0), minlength=4)
    chi = ((counts - 4000 * shares) ** 2 / (4000 * shares)).sum().item()
    assert chi < 16.3  # 0.1 % of chi-squared with 3 degrees of freedom
    assert drawn(200, 0.7).unique().tolist() == [0, 1]  # 0.5 is below 0.7, 0.8 is not


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 3}, {"min_p": 0.4}, {"top_k": 4, "top_p": 0.7, "min_p": 0.2},
     {"repetition_penalty": 1.7}, {"repetition_penalty": 0.6, "top_k": 5}],
)  # fmt: skip
def test_the_tokens_that_are_left_have_the_probabilities_of_transformers(fields: dict[str, Any]):
    torch.manual_seed(4)
    logits, seen = torch.randn(64, 12) * 2, [3, 5, 5, 7]
    wanted = torch.stack([logits_of_transformers(each, seen, fields) for each in logits])
    rows = [Row(seen[:3], 2, (), 1.5, name=(0, n), ids=seen[3:], **fields) for n in range(64)]
    decoder = Decoder(tiny("llama", SMALL), 0, 64)
    decoder.rows = rows
    before = logits.clone()
    tokens = decoder._choose(logits)[0]
    assert torch.equal(logits, before)
    found = wanted.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert found.isfinite().all()
    assert torch.allclose(torch.tensor([row.logps[0] for row in rows]), found, atol=1e-5)
    greedy = [Row(seen, 1, (), name=(0, n), **fields) for n in range(64)]
    decoder.rows = greedy
    best = torch.stack([logits_of_transformers(each, seen, fields) for each in logits]).argmax(-1)
    assert torch.equal(decoder._choose(logits)[0], best)


def logits_of_transformers(
    logits: torch.Tensor, seen: list[int], fields: dict[str, Any]
) -> torch.Tensor:
    """After its processors, in its order; temperature 1.5."""
    ids, scores = torch.tensor([seen]), logits[None]
    if "repetition_penalty" in fields:
        scores = RepetitionPenaltyLogitsProcessor(fields["repetition_penalty"])(ids, scores)
    scores = scores / 1.5
    for name, kind in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper)):
        scores = kind(fields[name])(ids, scores) if name in fields else scores
    return (MinPLogitsWarper(fields["min_p"])(ids, scores) if "min_p" in fields else scores)[0]
