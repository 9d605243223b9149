"""Compare the sampler of online methods with transformers' `generate` on the same prompts.

    python -m benchmarks.sampling quickstart/base/final quickstart/data/train.jsonl

Both sample the same number of tokens without stop tokens in turns: several completions of each
prompt, as in GRPO, and one completion of each of as many prompts. CPU time is measured. At
temperature 0 both must give the same tokens.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks.record import Circumstances, Result, write
from finetune.inference.decoder import Row, decode

EACH = (8, 1)
"""Numbers of completions per prompt."""


RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path, help="JSON lines with messages, the first is the prompt")
    parser.add_argument("--rows", type=int, default=128, help="completions at once")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--to", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--note", help="a sentence for the record, such as what else was running")
    given = parser.parse_args()
    words = shlex.join(["python", "-m", "benchmarks.sampling", *sys.argv[1:]])
    circumstances = Circumstances.now(words, given.note)
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    found = {str(each): measure(model, given, each) for each in EACH}
    page = write(given.to, "sampling", result(found, given), circumstances)
    print(page.read_text())


def measure(model: Any, given: argparse.Namespace, each: int) -> dict[str, Any]:
    """Compare both on prompts with `each` completions."""
    tokenizer: Any = AutoTokenizer.from_pretrained(given.model)
    prompts = [
        tokenizer(json.loads(line)["messages"][0]["content"])["input_ids"]
        for line in given.data.read_text().splitlines()[: given.rows // each]
        for _ in range(each)
    ]
    racers: dict[str, Callable[[float], list[list[int]]]] = {
        "sampler": lambda heat: ours(model, prompts, given.tokens, heat),
        "generate": lambda heat: theirs(model, prompts, given.tokens, heat),
    }
    greedy = {name: run(0.0) for name, run in racers.items()}
    spent: dict[str, list[float]] = {name: [] for name in racers}
    for _ in range(given.turns):
        for name, run in racers.items():
            begun = time.process_time()
            run(1.0)
            spent[name].append(time.process_time() - begun)
    turns = zip(spent["generate"], spent["sampler"], strict=True)
    return {
        "equal_greedy": sum(a == b for a, b in zip(*greedy.values(), strict=True)),
        "tokens_per_cpu_second": {
            name: given.rows * given.tokens / statistics.median(some)
            for name, some in spent.items()
        },
        "sampler_of_generate": statistics.median(theirs / mine for theirs, mine in turns),
        "cpu_seconds": spent,
    }


def result(found: dict[str, dict[str, Any]], given: argparse.Namespace) -> Result:
    head = [
        "", "generate: tokens per CPU-second", "sampler: tokens per CPU-second",
        "sampler is", "equal at temperature 0",
    ]  # fmt: skip
    rows = [
        [
            f"{int(each)} completions of each prompt",
            *(f"{values['tokens_per_cpu_second'][name]:,.0f}" for name in ("generate", "sampler")),
            f"{values['sampler_of_generate']:.2f}x",
            f"{values['equal_greedy']} of {given.rows}",
        ]
        for each, values in found.items()
    ]
    how = (
        f"{given.rows} completions of {given.tokens} tokens at once, at temperature 1 without a "
        f"stop, by the quickstart's base in fp32 on one thread; medians of {given.turns} turns, "
        "ratios turn by turn. `generate` is that of transformers, on the same weights and prompts."
    )
    return Result("The sampler of online methods", how, found, [head, *rows], [])


def ours(model: Any, prompts: list[list[int]], tokens: int, temperature: float) -> list[list[int]]:
    rows = [Row(ids, tokens, (), temperature, name=(n, n)) for n, ids in enumerate(prompts)]
    decode(model, rows, 0, len(rows))
    return [row.ids for row in rows]


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
