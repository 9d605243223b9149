"""The job that is timed: a Llama with random weights, on rows of equal length."""

import dataclasses
import itertools
import json
from pathlib import Path

from finetune import Batch, Data, Model, Optim, Pretrain, catalog
from finetune.quickstart.records import corpus
from finetune.quickstart.tokenizer import train_tokenizer
from finetune.run import write_json

VOCABULARY = 1_536
ROWS = 256
DOCUMENTS_PER_ROW = 32
"""About 50 tokens each: more than the longest row of a job, so that rows are cut, never padded."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Size of a job."""

    hidden_size: int
    layers: int
    rows: int
    """Per optimizer step."""
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
DEEP = Shape(hidden_size=576, layers=30, rows=8, micro_rows=4, length=160)
"""The layers of SmolLM2-135M, on rows as long as those of GSM8K."""
LARGE = Shape(hidden_size=1_024, layers=24, rows=32, micro_rows=8, length=1_024)
"""323 million parameters: enough work for a GPU."""


def write_job(folder: Path, shape: Shape, steps: int, lora: bool = False) -> Path:
    """Write data, tokenizer and recipe; returns the recipe's file.

    All weights are trained, or with `lora` an adapter of every linear layer.
    """
    documents = corpus(seed=0, rows=ROWS * DOCUMENTS_PER_ROW)
    texts = ["\n".join(itertools.islice(documents, DOCUMENTS_PER_ROW)) for _ in range(ROWS)]
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(texts[:64], VOCABULARY, folder / "tokenizer")
    recipe = Pretrain(
        Model(config=shape.config(), tokenizer=str(folder / "tokenizer")),
        data=(Data(str(data), "text"),),
        batch=Batch(shape.rows, shape.micro_rows, shape.length, overlong="truncate"),
        data_checks="report",  # every row is cut, so that each step has equally many tokens
        optim=Optim(lr=1e-3),
        max_steps=steps,
    )
    if lora:
        recipe = recipe.with_lora(r=16)
    path = folder / "recipe.json"
    write_json(path, catalog.to_fields(recipe))
    return path
