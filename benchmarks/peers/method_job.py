"""The job of contenders in a race of methods: texts that each of them tokenizes itself.

PLACE/job.json     settings of a contender
PLACE/rows.jsonl   pairs, judged answers or prompts, in the order of steps
PLACE/ours.jsonl   the same rows, arranged so that the toolkit's shuffle yields that order
PLACE/model/       random weights in fp32, and a word-level tokenizer
PLACE/pictures/    for rows with pictures (`image_job`)

Only `write` imports the toolkit.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from benchmarks.peers import image_job
from benchmarks.peers.workload import CONFIG, RESERVED, Row, short_tokens, words_of

METHODS = ("dpo", "kto", "orpo", "reward", "grpo", "images")
PROMPT = 0.38
"""Share of a row that is its prompt."""
COMPLETION_TOKENS, PROMPT_TOKENS, GENERATIONS = 48, 64, 8
"""For online methods: maximum tokens of a completion, tokens and completions of a prompt."""
SHAPES: dict[str, dict[str, Any]] = {
    "135m": CONFIG,
    "16m": CONFIG
    | {
        "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 8192,
    },
}  # fmt: skip
"""SmolLM2-135M, and a smaller model with the same proportions of body and head, for shared CPUs."""


@dataclasses.dataclass(frozen=True)
class MethodJob:
    """Settings of a contender; rows and model are in the same folder."""

    method: str
    rows: int
    """Pairs (two answers each), judged answers, or sampled completions per optimizer step."""
    steps: int
    """Optimizer steps, including untimed ones."""
    shape: str = "16m"
    seed: int = 0
    lr: float = 1e-6
    r: int = 16
    alpha: int = 32

    @property
    def rows_on_disk(self) -> int:
        """Lines of the file per step."""
        return self.rows // GENERATIONS if self.method == "grpo" else self.rows


Pair = tuple[list[int], list[int], list[int]]
"""Ids of a prompt and of two answers to it, without the end token."""


def pairs(job: MethodJob) -> list[Pair]:
    """Pairs of random words; sequences have the lengths of GSM8K's rows."""
    count, made = job.rows_on_disk * job.steps, list[Pair]()
    vocabulary = SHAPES[job.shape]["vocab_size"]
    vocabulary -= len(image_job.SPECIAL) if job.method == "images" else 0
    chosen, rejected = (short_tokens(count, job.seed, stream) for stream in (0, 1))
    for number, lengths in enumerate(zip(chosen, rejected, strict=True)):
        prompt = max(1, round(PROMPT * lengths[0]))
        sizes = [max(1, round((1 - PROMPT) * length) - 1) for length in lengths]
        if job.method == "grpo":
            prompt = PROMPT_TOKENS
        parts = (
            words_of(job.seed, 2 + 3 * number + part, size, vocabulary)
            for part, size in enumerate((prompt, *sizes))
        )
        made.append(tuple(parts))  # type: ignore[arg-type]
    return made


def line_of(job: MethodJob, number: int, pair: Pair) -> dict[str, Any]:
    """A row of the file, with column names that both TRL and the toolkit support."""
    prompt, first, second = (" ".join(f"w{each}" for each in ids) for ids in pair)
    if job.method == "grpo":
        return {"prompt": prompt}
    if job.method == "images":
        return image_job.line_of(number, prompt, first)
    if job.method == "kto":
        wanted = number % 2 == 0
        answer = first if wanted else second
        return {"prompt": prompt, "completion": f" {answer}", "label": wanted}
    return {"prompt": prompt, "chosen": f" {first}", "rejected": f" {second}"}


def documents_of_step(job: MethodJob, step: int) -> list[list[int]]:
    """Ids of all documents in the loss of a step."""
    end = CONFIG["eos_token_id"]
    start = step * job.rows_on_disk
    found: list[list[int]] = []
    for number, pair in enumerate(pairs(job)[start : start + job.rows_on_disk], start):
        prompt, *answers = pair
        if job.method == "images":
            found.append([*image_job.ids_of(number, SHAPES[job.shape]), *prompt, *answers[0], end])
            continue
        taken = answers if job.method != "kto" else [answers[number % 2]]
        found += [[*prompt, *answer, end] for answer in taken]
    return found


def as_row(ids: list[int]) -> Row:
    """A document whose labels are not compared: models of these methods get no labels."""
    return ids, ids


def read_job(place: Path) -> MethodJob:
    return MethodJob(**json.loads((place / "job.json").read_text()))


def read_lines(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward for online methods: the share of a completion's tokens with an even id."""
    return [sum(1 - each % 2 for each in ids) / max(1, len(ids)) for ids in completion_ids]


def write(place: Path, job: MethodJob) -> None:
    """Write the folder; needs torch, transformers and the toolkit."""
    import numpy as np

    from finetune.data.rows.order import permutation

    place.mkdir(parents=True, exist_ok=True)
    (place / "job.json").write_text(json.dumps(dataclasses.asdict(job)))
    lines = [json.dumps(line_of(job, *each)) + "\n" for each in enumerate(pairs(job))]
    (place / "rows.jsonl").write_text("".join(lines))
    places = np.argsort(permutation(len(lines), job.seed, 0))
    (place / "ours.jsonl").write_text("".join(lines[at] for at in places))
    if job.method == "images":
        image_job.write_pictures(place / image_job.FOLDER, len(lines), job.seed)
    if not (place / "model" / "config.json").exists():
        _write_model(place / "model", SHAPES[job.shape], job.method)


def _write_model(folder: Path, config: dict[str, Any], method: str) -> None:
    """Write the model, for reward models with a score head, so that all start from the same one."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    special = ["<pad>", "<unknown>", "</s>"]
    words = {**{name: number for number, name in enumerate(special)}}
    words |= {f"w{number}": number for number in range(RESERVED, config["vocab_size"])}
    if method == "images":
        words = {
            name: number
            for name, number in words.items()
            if number < config["vocab_size"] - len(image_job.SPECIAL)
        }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=special[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], unk_token=special[1],
        eos_token=special[2], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    torch.manual_seed(0)
    if method == "images":
        image_job.write_model(folder, config, fast)
        return
    fast.save_pretrained(folder)
    kind, more = AutoModelForCausalLM, {}
    if method == "reward":
        kind, more = AutoModelForSequenceClassification, {"num_labels": 1}
    made = AutoConfig.for_model("llama", **config, **more)
    kind.from_config(made, dtype=torch.float32).save_pretrained(folder)
