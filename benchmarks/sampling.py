"""Race the sampler of online methods against transformers' `generate`: same weights and prompts.

    python -m benchmarks.sampling quickstart/base/final quickstart/data/train.jsonl

Both sample the same number of tokens without a stop, several completions of each prompt as GRPO
does, in turns; the processor's time counts. At temperature 0 both must give the same tokens.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from finetune.inference.sampling import Sampler, Wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path, help="JSON lines with messages, the first is the prompt")
    parser.add_argument("--rows", type=int, default=128, help="completions at once")
    parser.add_argument("--each", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(given.model)
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    prompts = [
        tokenizer(json.loads(line)["messages"][0]["content"])["input_ids"]
        for line in given.data.read_text().splitlines()[: given.rows // given.each]
        for _ in range(given.each)
    ]
    racers: dict[str, Callable[[float], list[list[int]]]] = {
        "sampler": lambda heat: ours(model, prompts, given.tokens, heat),
        "generate": lambda heat: theirs(model, prompts, given.tokens, heat),
    }
    greedy = {name: run(0.0) for name, run in racers.items()}
    same = sum(a == b for a, b in zip(*greedy.values(), strict=True))
    print(f"greedy: {same} of {given.rows} completions are equal")
    best = dict.fromkeys(racers, float("inf"))
    for _ in range(given.turns):
        for name, run in racers.items():
            begun = time.process_time()
            run(1.0)
            best[name] = min(best[name], time.process_time() - begun)
    for name, seconds in best.items():
        print(f"{name}: {given.rows * given.tokens / seconds:,.0f} tokens per CPU-second")
    print(f"sampler / generate: {best['generate'] / best['sampler']:.2f}")


def ours(model: Any, prompts: list[list[int]], tokens: int, temperature: float) -> list[list[int]]:
    wanted = [Wanted(tuple(prompt), row, row) for row, prompt in enumerate(prompts)]
    sampler = Sampler(model, (), tokens, temperature, pad_id=0, batch_rows=len(prompts))
    return [each.ids for each in sampler(wanted, 0, 0)]


def theirs(
    model: Any, prompts: list[list[int]], tokens: int, temperature: float
) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    heat = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    config = GenerationConfig(
        max_new_tokens=tokens, min_new_tokens=None, do_sample=temperature > 0, pad_token_id=0,
        eos_token_id=None, use_cache=True, **heat,
    )  # fmt: skip
    model.generation_config = config
    with torch.inference_mode():
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    return out[:, longest:].tolist()


if __name__ == "__main__":
    main()
