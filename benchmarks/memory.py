"""Predicted and measured peak memory, for every training method and every backend."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import training
from benchmarks.commands import finetune
from benchmarks.job import DOCUMENTS_PER_ROW, VOCABULARY
from benchmarks.record import Result
from finetune import Batch, Data, Model, Pretrain, catalog
from finetune.errors import FinetuneError
from finetune.planner import plan
from finetune.quickstart.records import corpus
from finetune.quickstart.tokenizer import train_tokenizer
from finetune.recipe import Recipe
from finetune.runs import units
from finetune.runs.environment import environment
from finetune.runs.run import Run, write_json

BACKENDS = (*training.BACKENDS, "zero3_nvme")
BOUND = 0.10
METHODS = ("full", "lora", "qlora")
STEPS = 3
LENGTH, MICRO_ROWS, ROWS = 512, 2, 32


def measure(folder: Path, backends: Sequence[str], earlier: Path) -> Result:
    """Train `STEPS` steps of each case that the planner allows, and read the run's metrics.

    Args:
        folder: Folder for models and runs.
        backends: Backends to measure.
        earlier: Results of an earlier call, for the cases of other backends; may not exist.
    """
    write_base(folder)
    values = others(earlier, backends)
    remarks = ["A case that an earlier call measured keeps its commit, in the JSON beside this."]
    commit = environment()["commit"]
    for backend, method, checkpointing in cases(backends):
        name = f"{backend}, {method}{', checkpointing' if checkpointing else ''}"
        processes = 1 if backend == "single" else 2
        recipe = recipe_of(folder, method, checkpointing, processes)
        try:
            plan(recipe, backend, processes)
        except FinetuneError as error:
            remarks.append(f"{name}: not allowed: {'; '.join(error.problems)}")
            continue
        path, run = folder / "recipe.json", Run(folder / name.replace(", ", "-"))
        write_json(path, catalog.to_fields(recipe))
        finetune(
            "launch", path, "--backend", backend, "--processes", str(processes),
            "--output", run.root, cache=folder / "cache",
        )  # fmt: skip
        found = {"backend": backend, "method": method, "processes": processes, "commit": commit}
        values[name] = found | read(run)
        found = values[name]
        print(f"{name}: {found['predicted']:,} of {found['peak']:,}", flush=True)
    errors = [abs(each["error"]) for each in values.values()]
    within = sum(error <= BOUND for error in errors)
    how = (
        f"A Llama of 33.6 million parameters with random weights, bf16, {MICRO_ROWS} rows of "
        f"{LENGTH} tokens in a micro-batch. Measured is what tensors took in the second step over "
        f"what they took before the model was loaded, of the process that held most; {within} "
        f"of {len(errors)} predictions are within {BOUND:.0%}. "
        "Predicted seconds have no bound: they rest on an assumed share of the measured rate."
    )
    return Result("Predicted and measured memory", how, values, tabulate(values), remarks)


def others(earlier: Path, backends: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Earlier results of backends that are not measured now."""
    if not earlier.is_file():
        return {}
    known = json.loads(earlier.read_text())["results"]
    return {name: found for name, found in known.items() if found["backend"] not in backends}


def cases(backends: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    return itertools.product(backends, METHODS, (False, True))


def write_base(folder: Path) -> None:
    """Write a model with random weights, and rows that are longer than the maximum length."""
    documents = corpus(seed=0, rows=ROWS * DOCUMENTS_PER_ROW)
    texts = ["\n".join(itertools.islice(documents, DOCUMENTS_PER_ROW)) for _ in range(ROWS)]
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "data.jsonl").write_text("".join(lines))
    train_tokenizer(texts, VOCABULARY, folder / "base")
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=8192, max_position_embeddings=LENGTH,
        tie_word_embeddings=False, eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "base")


def recipe_of(folder: Path, method: str, checkpointing: bool, processes: int) -> Recipe:
    base = Model(
        str(folder / "base"),
        activation_checkpointing=checkpointing,
        quantization="nf4" if method == "qlora" else "none",
    )
    recipe = Pretrain(
        base,
        data=(Data(str(folder / "data.jsonl"), "text"),),
        batch=Batch(MICRO_ROWS * processes, MICRO_ROWS, LENGTH, overlong="truncate"),
        max_steps=STEPS,
        data_checks="report",  # every row is truncated to the same length
    )
    return recipe if method == "full" else recipe.with_lora(r=16)


def read(run: Run) -> dict[str, Any]:
    """Measured and predicted memory and time of a finished run."""
    (counted,) = run.read_metrics("memory")
    expected = json.loads(run.plan.read_text())["prediction"]
    return {
        "peak": counted["peak"],
        "predicted": counted["predicted"],
        "error": counted["predicted"] / counted["peak"] - 1,
        "moment": expected["moment"],
        "step_seconds": list(run.read_metrics("train"))[-1]["seconds"],
        "predicted_step_seconds": expected["step_seconds"],
    }


def tabulate(values: dict[str, dict[str, Any]]) -> list[list[str]]:
    head = ["case", "predicted", "measured", "error", "predicted step", "measured step"]
    rows = [
        [
            name,
            units.size(found["predicted"]),
            units.size(found["peak"]),
            f"{found['error']:+.1%}",
            units.duration(found["predicted_step_seconds"]),
            units.duration(found["step_seconds"]),
        ]
        for name, found in values.items()
    ]
    return [head, *rows]
