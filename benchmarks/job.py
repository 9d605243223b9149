"""The job of benchmarks: a Llama with random weights, on rows or packs of equal length."""

import dataclasses
import itertools
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune import Batch, Data, Model, Optim, Pretrain, Recipe, catalog
from finetune.quickstart.records import corpus
from finetune.quickstart.tokenizer import train_tokenizer
from finetune.runs.run import write_json

VOCABULARY = 1_536
ROWS = 256
DOCUMENTS_PER_ROW = 32
"""Documents per text, of about 50 tokens each: texts are truncated to rows, never padded."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Model and batch size of a job."""

    hidden_size: int
    layers: int
    rows: int
    """Rows per optimizer step."""
    micro_rows: int
    length: int
    """Tokens of every row."""

    def config(self) -> dict[str, object]:
        return {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": self.hidden_size,
            "intermediate_size": 3 * self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden_size // 64,
            "num_key_value_heads": self.hidden_size // 64,
            "max_position_embeddings": self.length,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 2,
        }


SMALL = Shape(hidden_size=256, layers=6, rows=16, micro_rows=4, length=128)
"""5.5 million parameters: seconds per backend on two CPU cores."""
DEEP = Shape(hidden_size=576, layers=8, rows=8, micro_rows=4, length=1_024)
"""8 of the 30 layers of SmolLM2-135M, in micro-batches as large as its recipe's."""
PIPED = Shape(hidden_size=576, layers=8, rows=8, micro_rows=1, length=1_024)
"""The same model in 8 micro-batches, each long enough that a stage computes for 0.3 seconds."""
LARGE = Shape(hidden_size=1_024, layers=24, rows=32, micro_rows=8, length=1_024)
"""323 million parameters: large enough for a GPU."""


def write_job(folder: Path, shape: Shape, steps: int) -> Path:
    """Write data, tokenizer and a recipe that trains all weights; returns the recipe's path."""
    made = texts(ROWS, DOCUMENTS_PER_ROW)
    recipe = Pretrain(
        Model(config=shape.config(), tokenizer=str(folder / "tokenizer")),
        data=(written(made, folder),),
        batch=Batch(shape.rows, shape.micro_rows, shape.length, overlong="truncate"),
        data_checks="report",  # every row is truncated, so that steps have equally many tokens
        optim=Optim(lr=1e-3),
        max_steps=steps,
    )
    return saved(recipe, folder)


def write_adapter_job(folder: Path, shape: Shape, steps: int) -> Path:
    """Write a job with LoRA on base weights in bf16, on packs of short documents."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape.config())
    base = folder / "base"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(base)
    data = written(texts(2 * ROWS, 3), folder)  # documents of GSM8K's length
    recipe = Pretrain(
        Model(str(base), tokenizer=str(folder / "tokenizer")),
        data=(data,),
        batch=Batch(shape.rows, shape.micro_rows, shape.length, "truncate", packing=True),
        data_checks="report",
        max_steps=steps,
    )
    return saved(recipe.with_lora(r=16), folder)


def texts(count: int, documents: int) -> list[str]:
    """`count` texts with `documents` documents each."""
    made = corpus(seed=0, rows=count * documents)
    return ["\n".join(itertools.islice(made, documents)) for _ in range(count)]


def written(texts: list[str], folder: Path) -> Data:
    """Write the data and a tokenizer trained on it."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(texts[:64], VOCABULARY, folder / "tokenizer")
    return Data(str(data), "text")


def saved(recipe: Recipe, folder: Path) -> Path:
    path = folder / "recipe.json"
    write_json(path, catalog.to_fields(recipe))
    return path
