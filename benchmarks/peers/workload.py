"""What every contender trains: a Llama of SmolLM2-135M's shape, on rows as long as GSM8K's.

PLACE/job.json    what a contender is told: rows a step, steps, learning rate, device
PLACE/rows.json   ids and labels of every row, in the order in which steps take them
PLACE/model/      random weights in bf16, and a tokenizer that nothing is tokenised with
"""

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

MEDIAN, SPREAD = 154, math.log(331 / 154) / statistics.NormalDist().inv_cdf(0.99)
"""GSM8K's rows are close to log-normal: half below 154 tokens, 1 % above 331, the mean 162."""
PROMPT = 0.38
"""Share of a row that is its question, and not trained."""
UNTRAINED = -100
RESERVED = 3
"""First ids, which are special tokens and occur in no row."""
CONFIG: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "tie_word_embeddings": True, "max_position_embeddings": 8192, "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5, "initializer_range": 1 / 24, "bos_token_id": None, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
SEED = 0

Row = tuple[list[int], list[int]]
"""Ids of a document, and its labels: the ids where trained, else -100."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What a contender is told; each reads the rest from the same folder."""

    rows: int
    """Rows of an optimizer step."""
    steps: int
    """Optimizer steps, those that are not timed included."""
    gpu: bool = False
    lr: float = 2e-4
    r: int = 16
    alpha: int = 32


def lengths(rows: int) -> list[int]:
    """Tokens of each row: the log-normal's quantiles, each once, in an order drawn once."""
    normal = statistics.NormalDist(math.log(MEDIAN), SPREAD)
    quantiles = [(number + 0.5) / rows for number in range(rows)]
    sizes = [round(math.exp(normal.inv_cdf(share))) for share in quantiles]
    return [sizes[place] for place in np.argsort(_draws(0, rows), kind="stable")]


def make_rows(count: int) -> list[Row]:
    """Documents of random ids, the same on every machine and with every version of NumPy."""
    made: list[Row] = []
    for number, length in enumerate(lengths(count)):
        words = CONFIG["vocab_size"] - RESERVED
        ids = [RESERVED + int(draw) for draw in _draws(number + 1, length) % np.uint64(words)]
        prompt = max(1, round(PROMPT * length))
        made.append((ids, [UNTRAINED] * prompt + ids[prompt:]))
    return made


def _draws(stream: int, count: int) -> np.ndarray:
    """Raw draws of Philox, whose stream NumPy keeps (NEP 19).  # (count,) uint64"""
    return np.random.Philox(key=np.array([SEED, stream], dtype=np.uint64)).random_raw(count)


def write(place: Path, job: Job) -> None:
    """Write the folder; needs torch and transformers, which a reader of it may have others of."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "job.json").write_text(json.dumps(dataclasses.asdict(job)))
    (place / "rows.json").write_text(json.dumps(make_rows(job.rows * job.steps)))
    if not (place / "model" / "config.json").exists():
        _write_model(place / "model")


def _write_model(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.quickstart.tokenizer import train_tokenizer

    torch.manual_seed(SEED)
    config = AutoConfig.for_model("llama", **CONFIG)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    train_tokenizer(["a tokenizer that only says what the special tokens are"], 300, folder)


def read_job(place: Path) -> Job:
    return Job(**json.loads((place / "job.json").read_text()))


def read_rows(place: Path) -> list[Row]:
    return [(ids, labels) for ids, labels in json.loads((place / "rows.json").read_text())]


def of_step(rows: list[Row], step: int, size: int) -> list[Row]:
    """The rows that optimizer step `step` (from 0) trains on, whoever trains."""
    return rows[step * size : (step + 1) * size]
