"""Time of the startup checks before a model is loaded, for many rows and large weight files."""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.job import VOCABULARY, texts
from benchmarks.record import Result
from finetune import Batch, Model, Pretrain, Recipe
from finetune import backend as backends
from finetune.checkpoints.base_weights import fingerprint
from finetune.checkpoints.resume import claim, finished
from finetune.checks import request
from finetune.checks.start import identity
from finetune.data.chat.render import load_chat
from finetune.data.prepare import prepare
from finetune.models.model import load_tokenizer
from finetune.quickstart.tokenizer import train_tokenizer
from finetune.recipe import Data
from finetune.runs.run import Run

ROWS = 200_000
LAYERS, HIDDEN, WIDTH = 32, 4_096, 14_336
PARTS = 4
HOW = (
    "The checks of a start, in the order of a start, one after another in a process that has "
    f"imported everything: {ROWS:,} rows that were prepared before, and the weight files of a "
    "Llama of 8 billion parameters, whose places are not on the disk (sparse files). Medians."
)


def measure(folder: Path, repeats: int) -> Result:
    """Time each check `repeats` times after an untimed round, which prepares the rows."""
    recipe = write_job(folder)
    rounds = [_round(recipe, folder) for _ in range(repeats + 1)][1:]
    values = {
        name: {
            "wall_seconds": statistics.median(each[name][0] for each in rounds),
            "cpu_seconds": statistics.median(each[name][1] for each in rounds),
        }
        for name in rounds[0]
    }
    total = {
        kind: sum(each[kind] for each in values.values())
        for kind in ("wall_seconds", "cpu_seconds")
    }
    rows = [
        [name, f"{each['wall_seconds']:.3f} s", f"{each['cpu_seconds']:.3f} s"]
        for name, each in {**values, "**all**": total}.items()
    ]
    return Result(
        "Checks at a start", HOW, {"checks": values, "rows": ROWS, **total},
        [["check", "wall", "processor"], *rows], [],
    )  # fmt: skip


def _round(recipe: Recipe, folder: Path) -> dict[str, tuple[float, float]]:
    """Wall-clock and CPU seconds of each check."""
    taken = dict[str, tuple[float, float]]()
    run = Run(folder / "run")

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begun, processor = time.perf_counter(), time.process_time()
        found = work()
        taken[name] = time.perf_counter() - begun, time.process_time() - processor
        return found

    plan = timed("plan, files", lambda: request.check(recipe, backends.load("single"), 1, "bf16"))
    timed("run directory", lambda: (finished(run, plan), claim(run, plan, "auto")))
    tokenizer = timed("tokenizer", lambda: load_tokenizer(recipe))
    chat = load_chat(tokenizer, None)
    data = timed("prepared rows", lambda: prepare(recipe, chat, folder / "cache"))
    base = timed("weight files", lambda: fingerprint(recipe.model))
    timed("what ranks compare", lambda: identity(plan, data, base))
    return taken


def write_job(folder: Path, rows: int = ROWS) -> Recipe:
    """Write rows, a tokenizer and the sparse files of a model; returns the recipe."""
    made = texts(64, 1)
    base = folder / "base"
    train_tokenizer(made, VOCABULARY, base)
    (folder / "data.jsonl").write_text(
        "".join(
            json.dumps({"text": f"{number} {made[number % 64]}"}) + "\n" for number in range(rows)
        )
    )
    write_model(base)
    model, data = Model(str(base)), Data(str(folder / "data.jsonl"), "text")
    recipe = Pretrain(model, data=(data,), batch=Batch(16, 4, 512), data_checks="report")
    return recipe.with_lora(r=16)


def write_model(folder: Path) -> None:
    """Config, index and weight files of 8 billion parameters in bf16; only headers are on disk."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128_256,
        "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8_192,
        "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    named, tensors = dict[str, str](), list(_tensors())
    for part in range(PARTS):
        name = f"model-{part + 1:05}-of-{PARTS:05}.safetensors"
        header, end = dict[str, Any](), 0
        for tensor, shape in tensors[part::PARTS]:
            size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
            named[tensor], end = name, end + size
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    index = {"metadata": {}, "weight_map": named}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _tensors() -> Iterator[tuple[str, list[int]]]:
    """Name and shape of each parameter."""
    yield "model.embed_tokens.weight", [128_256, HIDDEN]
    for layer in range(LAYERS):
        start = f"model.layers.{layer}"
        for name, rows in (("q", HIDDEN), ("k", 1_024), ("v", 1_024), ("o", HIDDEN)):
            yield f"{start}.self_attn.{name}_proj.weight", [rows, HIDDEN]
        for name, shape in (
            ("gate", [WIDTH, HIDDEN]), ("up", [WIDTH, HIDDEN]), ("down", [HIDDEN, WIDTH]),
        ):  # fmt: skip
            yield f"{start}.mlp.{name}_proj.weight", shape
        for name in ("input", "post_attention"):
            yield f"{start}.{name}_layernorm.weight", [HIDDEN]
    yield "model.norm.weight", [HIDDEN]
    yield "lm_head.weight", [128_256, HIDDEN]
