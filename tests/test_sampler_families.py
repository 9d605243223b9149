"""Greedy completions of every architecture are those of the plain model without a cache."""

import pytest
import torch
from architectures import FIELDS, SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.inference.decoder import Row, decode
from finetune.planner.families import FAMILIES

EVERY_DAY = ("gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_5_text", "lfm2", "jamba", "falcon_h1")
"""Windows, sinks, latent keys, and recurrent states of four kinds."""
ROUNDED = 1e-4
"""Logits in fp32, from a cache and from one pass: sums of other lengths round differently."""

OTHERS = [kind for kind in ("llama", *FIELDS) if kind not in EVERY_DAY]


@pytest.mark.parametrize(
    "kind", [*EVERY_DAY, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]
)
def test_greedy_completions_are_those_of_the_plain_model(kind):
    """Prompts of three lengths in a batch, two completions each; rows that end leave the cache."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **{**SIZES, **FIELDS.get(kind, {})})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # initial weights of transformers leave logits near zero
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    prompts = [(5, 6, 7), (8, 9, 10, 11, 12, 13, 14), (20,)]
    stops = tuple(range(1, 25))  # likely enough that some rows end early
    rows = [Row(prompt, 10, stops) for prompt in prompts for _ in range(2)]
    decode(model, rows, 0, 64)
    for row in rows:
        ids = torch.tensor([[*row.prompt, *row.ids]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(row.prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(row.ids)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() < ROUNDED
        assert row.stopped == (row.ids[-1] in stops)


def test_every_recurrent_architecture_is_sampled():
    known = {kind for kind, f in FAMILIES.items() if f.recurrent and not f.reads}
    assert known <= set(FIELDS)
