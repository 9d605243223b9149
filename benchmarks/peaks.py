"""Predicted and measured peak memory of small trainings that are drawn at random.

A draw takes a family, a shape, a method, an adapter, a backend, a precision and lengths, each
independently; what is refused before a run is drawn again.
"""

import dataclasses
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.commands import finetune
from benchmarks.record import Result
from finetune import backend as backends
from finetune import catalog
from finetune.backend import Precision
from finetune.checks.request import check
from finetune.errors import FinetuneError
from finetune.process.warm import TRAINING, Warm, available
from finetune.quickstart.records import corpus
from finetune.quickstart.tokenizer import train_tokenizer
from finetune.recipe import Recipe
from finetune.runs import units
from finetune.runs.environment import environment
from finetune.runs.run import Run, write_json

BOUND = 0.05
COUNT = 40
ROWS, TOKENIZER = 48, 1_024
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {}, "smollm3": {},
    "gemma": {}, "gemma2": {"sliding_window": 4096}, "gemma3_text": {"sliding_window": 512},
    "granite": {}, "phi3": {}, "olmo2": {}, "gpt2": {}, "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 160},
}  # fmt: skip
FORMATS = {
    "pretrain": "text", "sft": "messages", "dpo": "preference", "orpo": "preference",
    "simpo": "preference", "kto": "kto", "reward": "preference", "classifier": "labelled",
    "grpo": "prompts",
}  # fmt: skip
METHODS = ("sft", "sft", "pretrain", *FORMATS)
NEEDED: dict[str, dict[str, Any]] = {
    "classifier": {"labels": ["a", "b"]},
    "grpo": {"reward_funcs": ["json_valid"], "num_generations": 4, "max_completion_length": 32},
}
ADAPTERS: tuple[dict[str, Any] | None, ...] = (
    None, None, {"r": 8}, {"r": 32, "dropout": 0.1}, {"r": 8, "targets": ["q_proj", "v_proj"]},
    {"r": 8, "use_dora": True}, {"r": 8, "modules_to_save": ["lm_head"]},
)  # fmt: skip
BACKENDS = (
    *["single"] * 6, "ddp", "ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "zero1", "zero2",
    "zero2_offload", "zero3", "tp", "tp_fsdp",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Draw:
    """One training."""

    config: dict[str, Any]
    fields: dict[str, Any]
    """Of the recipe, without the name of its model."""
    backend: str
    precision: Precision

    @property
    def processes(self) -> int:
        return 1 if self.backend == "single" else 4 if self.backend == "tp_fsdp" else 2

    @property
    def name(self) -> str:
        fields, batch = self.fields, self.fields["batch"]
        adapter = fields["adapter"]
        words = [self.config["model_type"], fields["method"]]
        words += (
            ["all weights"]
            if adapter is None
            else [" ".join(f"{k}={v}" for k, v in adapter.items())]
        )
        words += [fields["model"]["quantization"]] * (fields["model"]["quantization"] != "none")
        words += [f"{self.config['num_hidden_layers']} x {self.config['hidden_size']}"]
        words += [f"vocabulary {self.config['vocab_size']:,}"]
        words += [f"{batch['micro_rows']} of {batch['rows']} x {batch['max_length']}"]
        words += ["packing"] * batch["packing"]
        words += ["recomputed"] * fields["model"]["activation_checkpointing"]
        return ", ".join([*words, self.backend, self.precision])


def draw(rng: random.Random) -> Draw:
    family, heads = rng.choice(list(FAMILIES)), rng.choice((4, 8))
    hidden = rng.choice((128, 256, 384))
    config: dict[str, Any] = {
        "model_type": family, "hidden_size": hidden, "num_hidden_layers": rng.choice((2, 4, 6, 8)),
        "num_attention_heads": heads, "num_key_value_heads": heads // rng.choice((1, 2)),
        "head_dim": hidden // heads, "intermediate_size": rng.choice((2, 3, 4)) * hidden,
        "vocab_size": rng.choice((1_024, 4_096, 16_384, 49_152)), "max_position_embeddings": 1_024,
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
        "tie_word_embeddings": rng.random() < 0.5,
    } | FAMILIES[family]  # fmt: skip
    method, micro = rng.choice(METHODS), rng.choice((1, 2, 4))
    adapter = rng.choice(ADAPTERS)
    backend = rng.choice(BACKENDS)
    model = {
        "quantization": "nf4" if adapter and rng.random() < 0.25 else "none",
        "activation_checkpointing": rng.random() < 0.4,
    }
    batch = {
        "rows": 4 * micro * rng.choice((1, 2)), "micro_rows": micro,
        "max_length": rng.choice((64, 128, 256, 512, 1_024)), "overlong": "truncate",
        "packing": method in ("sft", "pretrain") and rng.random() < 0.3,
    }  # fmt: skip
    fields: dict[str, Any] = {
        "method": method, "model": model, "adapter": adapter, "batch": batch, "max_steps": 3,
        "data_checks": "report", "optim": {"name": rng.choice(("adamw", "adamw", "adamw", "sgd"))},
    }  # fmt: skip
    return Draw(
        config, fields | NEEDED.get(method, {}), backend, rng.choice(("bf16", "bf16", "fp32"))
    )


def drawn(folder: Path, seed: int, count: int) -> Iterator[tuple[int, Draw, Recipe]]:
    """Draws that are not refused, with their recipes, whose models are written to `folder`."""
    rng, made = random.Random(seed), 0
    for number in range(100 * count):
        if made == count:
            return
        each = draw(rng)
        place = folder / f"model-{number}"
        try:
            config = AutoConfig.for_model(**each.config)
            place.mkdir(parents=True, exist_ok=True)
            config.save_pretrained(place)
            recipe = recipe_of(folder, each, place)
            check(recipe, backends.load(each.backend), each.processes, each.precision)
        except (FinetuneError, ValueError):
            continue
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(place)
        made += 1
        yield number, each, recipe


def recipe_of(folder: Path, each: Draw, place: Path) -> Recipe:
    kind = FORMATS[each.fields["method"]]
    source = folder / f"{kind}-{each.fields['batch']['max_length']}.jsonl"
    if not source.is_file():
        source.write_text("".join(json.dumps(row) + "\n" for row in rows_of(kind, each)))
    tokenizer = {"tokenizer": str(folder / "tokenizer"), "chat_template": "chatml"}
    data = [{"source": str(source), "format": kind}]
    model = {"name": str(place), **tokenizer, **each.fields["model"]}
    return catalog.from_fields(each.fields | {"model": model, "data": data})


def rows_of(kind: str, each: Draw) -> Iterator[dict[str, Any]]:
    """Rows of uneven lengths, some of them about as long as the maximum."""
    rng, words = random.Random(1), " ".join(corpus(seed=1, rows=400)).split()
    most = each.fields["batch"]["max_length"] // 3  # a word has about two tokens

    def said(share: float) -> str:
        return " ".join(rng.choices(words, k=max(2, int(share * most * rng.uniform(0.3, 1)))))

    for number in range(ROWS):
        user, assistant = {"role": "user", "content": said(0.3)}, [said(0.6), said(0.6)]
        answers = [[{"role": "assistant", "content": answer}] for answer in assistant]
        yield {
            "text": {"text": said(1.2)},
            "messages": {"messages": [user, *answers[0]]},
            "preference": {"prompt": [user], "chosen": answers[0], "rejected": answers[1]},
            "kto": {"messages": [user, *answers[0]], "label": number % 2 == 0},
            "labelled": {"text": said(1), "label": "ab"[number % 2]},
            "prompts": {"prompt": [user]},
        }[kind]


def measure(
    folder: Path, earlier: Path, publish: Callable[[Result], object], count: int = COUNT,
    seed: int = 0, minutes: float = math.inf,
) -> Result:  # fmt: skip
    """Train `count` draws for three steps each, and compare the peak of the second step.

    Args:
        earlier: results of draws that were measured at this commit, which are kept.
        publish: writes the results so far.
        minutes: begin no training after so long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(list(corpus(seed=0, rows=200)), TOKENIZER, folder / "tokenizer")
    values = kept(earlier)
    python = Warm(TRAINING).python if available() else sys.executable
    until = time.monotonic() + 60 * minutes
    for number, each, recipe in drawn(folder, seed, count):
        if time.monotonic() > until:
            break
        if each.name in values:
            continue
        path, run = folder / f"{number}.json", Run(folder / f"run-{number}")
        write_json(path, catalog.to_fields(recipe))
        words = ["train"] if each.backend == "single" else ["launch"]
        several = [] if each.backend == "single" else ["--processes", str(each.processes)]
        try:
            finetune(
                *words, path, "--backend", each.backend, *several, "--precision", each.precision,
                "--output", run.root, "--no-plot", cache=folder / "cache", python=python,
            )  # fmt: skip
        except RuntimeError as error:
            values[each.name] = {"number": number, "problem": str(error)[-600:]}
            print(f"{number} {each.name}: {error}", flush=True)
            continue
        (counted,) = run.read_metrics("memory")
        found = {name: counted.get(name) for name in ("peak", "predicted", "parts", "length")}
        moment = (json.loads(run.plan.read_text()).get("prediction") or {}).get("moment")
        error = None if found["predicted"] is None else found["predicted"] / found["peak"] - 1
        values[each.name] = {"number": number, **found, "moment": moment, "error": error}
        shown = "none" if error is None else f"{error:+.1%}"
        print(f"{number} {shown} {each.name}: {found}", flush=True)
        publish(result(values, seed))
    return result(values, seed)


def kept(earlier: Path) -> dict[str, dict[str, Any]]:
    """Draws of earlier results that were measured at this commit.

    Results that are committed are changed by the first draw, so `--to` names another folder.
    """
    found = json.loads(earlier.read_text()) if earlier.is_file() else {}
    return found["results"] if found.get("commit") == environment()["commit"] else {}


def result(values: dict[str, Any], seed: int) -> Result:
    """The page of what was measured, by the name of the draw."""
    near = sum(abs(found.get("error") or 1.0) <= BOUND for found in values.values())
    how = (
        f"{len(values)} trainings of three steps, drawn with seed {seed} over families, shapes, "
        "methods, adapters, backends, precisions and lengths. Measured is the peak of tensors in "
        f"the second step; {near} of {len(values)} predictions are within {BOUND:.0%}."
    )
    return Result("Predicted and measured peaks of drawn trainings", how, values, table(values), [])


def table(values: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = [["training", "predicted", "measured", "error"]]
    for name, found in values.items():
        if "peak" not in found or found["error"] is None:
            rows.append(
                [name, "none", found.get("problem", "")[-80:] or units.size(found["peak"]), ""]
            )
            continue
        sizes = [units.size(found[key]) for key in ("predicted", "peak")]
        rows.append([name, *sizes, f"{found['error']:+.1%}"])
    return rows
