"""The job of all contenders: a Llama of SmolLM2-135M's shape, on rows with a workload's lengths.

PLACE/job.json    settings of a contender: rows per step, steps, learning rate, device
PLACE/rows.json   ids and labels of all rows, in the order of steps
PLACE/model/      random weights in bf16, and a tokenizer, which is not used for the rows
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

MEDIAN, SPREAD = 154, math.log(331 / 154) / statistics.NormalDist().inv_cdf(0.99)
"""GSM8K's rows are close to log-normal: median 154 tokens, 99th percentile 331, mean 162."""
ALPACA = {
    0.0: 18, 0.05: 29, 0.1: 35, 0.25: 53, 0.5: 142, 0.75: 296, 0.9: 405, 0.95: 454, 0.99: 568,
    1.0: 758,
}  # fmt: skip
"""Tokens of 999 rows of Alpaca's instructions by quantile (LLaMA-Factory's sample, Mistral v3's
tokenizer); 12 % of them are prompts."""
UNTRAINED = -100
RESERVED = 3
"""Number of ids of special tokens, which do not occur in rows."""
CONFIG: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "tie_word_embeddings": True, "max_position_embeddings": 8192, "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5, "initializer_range": 1 / 24, "bos_token_id": None, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
MODEL_SEED = 0

Row = tuple[list[int], list[int]]
"""Ids of a document, and its labels: equal to the ids where trained, otherwise -100."""


def _short(share: float) -> float:
    """Quantile of the row length in tokens."""
    return math.exp(statistics.NormalDist(math.log(MEDIAN), SPREAD).inv_cdf(share))


def _tail(share: float) -> float:
    """Quantile of the row length, with 15 % of rows log-uniform from 331 to 3,000 tokens."""
    return _short(share / 0.85) if share < 0.85 else _between(331, 3000, (share - 0.85) / 0.15)


def _alpaca(share: float) -> float:
    return float(np.interp(share, list(ALPACA), list(ALPACA.values())))


def _long(share: float) -> float:
    return _between(1700, 6600, share)


def _between(least: float, most: float, share: float) -> float:
    return least * (most / least) ** share


@dataclasses.dataclass(frozen=True)
class Workload:
    """Rows, method and contenders of a race."""

    about: str
    """Description of the rows for the results page."""
    tokens: Callable[[float], float] = _short
    """Quantile function of the row length."""
    prompt: float = 0.38
    """Share of a row that is its untrained prompt."""
    method: Literal["lora", "full", "qlora"] = "lora"
    rows: int = 8
    """Default number of rows per optimizer step."""
    micro_rows: int | None = None
    """Rows per padded forward pass, sorted by length within a step; None for all rows of a step."""
    uneven: bool = False
    """Whether steps differ so much that rates are computed over all of them."""
    large: bool = False
    """Whether other toolkits race without Trainer + PEFT on CPUs, to limit memory."""
    peers: tuple[str, ...] = (
        "ours_shipped", "trainer_grouped", "trl", "trl_packing", "llamafactory", "ours_eager",
        "ours_malloc",
    )  # fmt: skip
    """Default contenders other than Trainer + PEFT."""


WORKLOADS = {
    "short": Workload("as long as those of GSM8K"),
    "tail": Workload(
        "15 % of them up to 3,000 tokens, padded in micro-batches of 2 rows of about one length",
        _tail, micro_rows=2, uneven=True, large=True, peers=("ours_eager", "trl_packing"),
    ),
    "long": Workload(
        "of 1,700 to 6,600 tokens",
        _long, rows=2, micro_rows=1, large=True, peers=("ours_eager", "trl_packing"),
    ),
    "prompt_heavy": Workload("with long questions", prompt=0.95, peers=("ours_eager",)),
    "alpaca": Workload(
        "as long as those of Alpaca", _alpaca, prompt=0.12,
        peers=("ours_shipped", "trainer_grouped"),
    ),
    "full": Workload("as long as those of GSM8K", method="full", peers=("ours_eager",)),
    "qlora": Workload("as long as those of GSM8K", method="qlora", peers=("ours_lora",)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """Settings of a contender; rows and model are in the same folder."""

    rows: int
    """Rows per optimizer step."""
    steps: int
    """Optimizer steps, including untimed ones."""
    gpu: bool = False
    name: str = "short"
    """Name of the workload."""
    seed: int = 0
    """Seed of the rows: their ids, and their order."""
    rows_file: str | None = None
    """File with rows to use instead of the workload's: see `rows_of`."""
    lr: float = 2e-4
    r: int = 16
    alpha: int = 32

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.name]

    @property
    def micro_rows(self) -> int:
        """Rows per padded forward pass."""
        return min(self.rows, self.workload.micro_rows or self.rows)


def lengths(job: Job) -> list[int]:
    """Tokens of each row: evenly spaced quantiles of the workload, in a random order."""
    count = job.rows * job.steps
    quantiles = [(number + 0.5) / count for number in range(count)]
    sizes = [round(job.workload.tokens(share)) for share in quantiles]
    drawn = [sizes[place] for place in np.argsort(_draws(job.seed, 0, count), kind="stable")]
    if job.workload.micro_rows is None:
        return drawn
    starts = range(0, count, job.rows)
    return [size for start in starts for size in sorted(drawn[start : start + job.rows])]


def make_rows(job: Job) -> list[Row]:
    """Documents of random ids, equal on all machines and with all versions of NumPy."""
    made: list[Row] = []
    for number, length in enumerate(lengths(job)):
        ids = words_of(job.seed, number + 1, length, CONFIG["vocab_size"])
        prompt = max(1, round(job.workload.prompt * length))
        made.append((ids, [UNTRAINED] * prompt + ids[prompt:]))
    return made


def words_of(seed: int, stream: int, count: int, vocabulary: int) -> list[int]:
    """Random ids of a vocabulary, without special tokens."""
    words = np.uint64(vocabulary - RESERVED)
    return [RESERVED + int(draw) for draw in _draws(seed, stream, count) % words]


def short_tokens(count: int, seed: int, stream: int) -> list[int]:
    """Row lengths in tokens as in GSM8K: evenly spaced quantiles in a random order."""
    sizes = [round(_short((number + 0.5) / count)) for number in range(count)]
    return [sizes[place] for place in np.argsort(_draws(seed, stream, count), kind="stable")]


def rows_of(path: Path, job: Job) -> list[Row]:
    """The first rows of a JSONL file with `input_ids` and optional `labels`.

    Raises:
        ValueError: a line is not a valid row, or there are too few.
    """
    made: list[Row] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(made) == job.rows * job.steps:
                break
            try:
                row = json.loads(line)
                ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
                told = "" if len(ids) == len(labels) else f"{len(labels)} labels of {len(ids)} ids"
                outside = [each for each in ids if not RESERVED <= each < CONFIG["vocab_size"]]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                told, outside, ids, labels = f"no row of `input_ids` ({error!r})", [], [], []
            if not told and outside:
                told = f"id {outside[0]}, expected {RESERVED} to {CONFIG['vocab_size'] - 1}"
            if not told and len(ids) < 2:
                told = f"{len(ids)} tokens, expected at least 2"
            if told:
                raise ValueError(f"{path} line {number}: {told}")
            made.append((ids, labels))
    if len(made) < job.rows * job.steps:
        raise ValueError(
            f"{path}: {len(made)} rows, expected {job.rows * job.steps} for {job.steps} steps of "
            f"{job.rows}; use fewer --steps or --rows"
        )
    if job.workload.micro_rows is None:
        return made
    starts = range(0, len(made), job.rows)
    return [row for at in starts for row in sorted(made[at : at + job.rows], key=_length)]


def _length(row: Row) -> int:
    return len(row[0])


def _draws(seed: int, stream: int, count: int) -> np.ndarray:
    """Raw draws of Philox, whose stream NumPy guarantees (NEP 19).  # (count,) uint64"""
    return np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(count)


def write(place: Path, job: Job) -> None:
    """Write the folder, with torch and transformers; readers may have other versions of both."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "job.json").write_text(json.dumps(dataclasses.asdict(job)))
    rows = make_rows(job) if job.rows_file is None else rows_of(Path(job.rows_file), job)
    (place / "rows.json").write_text(json.dumps(rows))
    if not (place / "model" / "config.json").exists():
        _write_model(place / "model")


def _write_model(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.quickstart.tokenizer import train_tokenizer

    torch.manual_seed(MODEL_SEED)
    config = AutoConfig.for_model("llama", **CONFIG)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    train_tokenizer(["a tokenizer that only says what the special tokens are"], 300, folder)


def read_job(place: Path) -> Job:
    return Job(**json.loads((place / "job.json").read_text()))


def read_rows(place: Path) -> list[Row]:
    return [(ids, labels) for ids, labels in json.loads((place / "rows.json").read_text())]


def of_step(rows: list[Row], step: int, size: int) -> list[Row]:
    """The rows of optimizer step `step` (from 0), for all contenders."""
    return rows[step * size : (step + 1) * size]
