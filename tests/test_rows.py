"""Rows that are continued together get the logits that each has alone."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.inference import rows as batching
from finetune.inference.rows import Draw, Rows, can_share
from finetune.serving.scheduler import in_passes

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


@pytest.mark.parametrize("kind", SHARED)
@torch.inference_mode()
def test_rows_join_and_leave_without_a_trace(kind, monkeypatch):
    """Within 1e-4: fp32, whose products add in another order for another number of rows."""
    model = tiny(kind, SHARED[kind])
    assert can_share(model)
    monkeypatch.setattr(batching, "ROOM", 12)
    monkeypatch.setattr(batching.RoomyLayer, "room", 12)
    texts = [torch.randint(3, 64, (length,)).tolist() for length in (30, 33, 27, 45)]

    def check(rows: Rows, shown: dict[int, int]) -> None:
        """Row by row: the text, and how many of its tokens the row has."""
        for logits, (number, length) in zip(rows.logits, shown.items(), strict=True):
            alone = model(torch.tensor([texts[number][:length]])).logits[0, -1]
            torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)

    rows = Rows(model, [texts[0][:3], texts[1][:9]], 0)
    check(rows, {0: 3, 1: 9})
    rows.advance([texts[0][3], texts[1][9]])
    rows.join(Rows(model, [texts[2][:20]], 0))  # longer than what is there
    check(rows, {0: 4, 1: 10, 2: 20})
    rows.advance([texts[0][4], texts[1][10], texts[2][20]])
    rows.keep([0, 1])
    rows.join(*(Rows(model, [texts[number][:length]], 0) for number, length in ((3, 1), (2, 7))))
    places = {tensor.data_ptr() for tensor in cached(rows)}
    for step in range(14):  # past the window of sliding layers
        more = (texts[0][5 + step], texts[1][11 + step], texts[3][1 + step], texts[2][7 + step])
        rows.advance(more)
        moved = {tensor.data_ptr() for tensor in cached(rows)} != places
        assert moved == (step >= 12)  # a token is put behind the others, which stay
    check(rows, {0: 19, 1: 25, 3: 15, 2: 21})
    rows.keep([2])
    rows.advance([texts[3][15]])
    check(rows, {3: 16})


def cached(rows: Rows) -> list[torch.Tensor]:
    """Keys and values of the layers that keep all tokens."""
    return [each for layer in rows._cache.layers for each in (layer.keys, layer.values)]


def test_a_cpu_pads_prompts_less_than_it_reads_weights_again():
    lengths = [1000, 4, 2, 990, 2, 40]
    order, passes = in_passes([[0] * length for length in lengths], torch.device("cpu"))
    assert [lengths[number] for number in order] == [2, 2, 4, 40, 990, 1000]
    assert [[len(prompt) for prompt in each] for each in passes] == [[2, 2, 4], [40], [990, 1000]]
    order, passes = in_passes([[0] * length for length in lengths], torch.device("meta"))
    assert order == [0, 1, 2, 3, 4, 5]
    assert [[len(prompt) for prompt in each] for each in passes] == [lengths]


@pytest.mark.parametrize(("kind", "fields"), ALONE.values(), ids=ALONE.keys())
def test_a_model_whose_rows_change_each_other_shares_nothing(kind, fields):
    assert not can_share(tiny(kind, fields))


def test_a_draw_follows_the_probabilities_and_its_seed():
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = shares.log() * 2  # temperature 2 undoes it
    draw = Draw(2.0, 1.0, 7)
    drawn = [draw(logits) for _ in range(4000)]
    counts = torch.bincount(torch.tensor(drawn), minlength=4)
    chi = ((counts - 4000 * shares) ** 2 / (4000 * shares)).sum().item()
    assert chi < 16.3  # 0.1 % of chi-squared with 3 degrees of freedom
    again = Draw(2.0, 1.0, 7)
    assert [again(logits) for _ in range(50)] == drawn[:50]
    nucleus = Draw(2.0, 0.7, 7)
    assert {nucleus(logits) for _ in range(200)} == {0, 1}  # 0.5 is below 0.7, 0.8 is not
    assert Draw(0.0, 1.0, 7)(logits) == 0
