"""Speed and memory of models with known shapes and random weights, next to the plan's predictions.

The page is written again after each run, so that results are kept if the machine becomes
unavailable.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.commands import finetune
from benchmarks.job import saved, texts, written
from benchmarks.record import Result
from benchmarks.training import WARMUP, read
from finetune import Batch, Model, Pretrain
from finetune.runs import units
from finetune.runs.run import Run

MINUTES = 30
"""Minutes after which no further run is started."""
DOCUMENTS = 6
"""Documents of about 50 tokens per text, which is then as long as a chat."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One training: model shape, method, and expected speed on an H100."""

    name: str
    config: dict[str, Any]
    adapter: bool = False
    quantization: str = "none"
    pointwise: str = "auto"
    blocks: str = "eager"
    tokens: int = 8_192
    """Tokens per pack; a micro-batch and a step have one pack."""
    backend: str = "single"
    """Backend, on all GPUs of the machine; sharding backends also run on one GPU."""
    profiled: bool = False
    """Whether an untimed step is traced, for the remarks of the page."""
    expected: str = "not stated"
    """Expected tokens per second from a roofline model."""


def llama(hidden: int, width: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    """A Llama configuration with eight key-value heads."""
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
        "vocab_size": vocabulary, "max_position_embeddings": 16_384, "rope_theta": 500_000.0,
        "tie_word_embeddings": layers < 32, "bos_token_id": None, "eos_token_id": 2,
        "pad_token_id": 0,
    }  # fmt: skip


QWEN_06 = {
    **llama(1_024, 3_072, 28, 16, 151_936), "model_type": "qwen3", "head_dim": 128,
}  # fmt: skip
LLAMA_1, LLAMA_8 = llama(2_048, 8_192, 16, 32, 128_256), llama(4_096, 14_336, 32, 32, 128_256)
CASES = (
    Case(
        "8B, LoRA, eager",
        LLAMA_8,
        True,
        pointwise="eager",
        expected="9,000 to 11,500",
        profiled=True,
    ),
    Case("8B, LoRA, compiled", LLAMA_8, True, pointwise="compiled", expected="10,000 to 13,000"),
    Case("8B, QLoRA", LLAMA_8, True, "nf4", expected="0.9 of LoRA"),
    Case("0.6B, all weights", QWEN_06, tokens=16_384, expected="60,000 to 90,000", profiled=True),
    Case("0.6B, all weights, compiled blocks", QWEN_06, blocks="compiled", tokens=16_384),
    Case("1B, all weights", LLAMA_1, tokens=16_384),
    Case("1B, all weights, fsdp_full_shard", LLAMA_1, backend="fsdp_full_shard"),
    Case("1B, all weights, zero3", LLAMA_1, backend="zero3"),
    Case("8B, LoRA, fsdp_full_shard", LLAMA_8, True, backend="fsdp_full_shard"),
)
"""In order of importance."""


def measure(
    folder: Path,
    steps: int,
    publish: Callable[[Result], object],
    cases: Sequence[Case] = CASES,
    minutes: float = MINUTES,
) -> Result:
    """Train each case for `WARMUP` + `steps` steps, and publish the results after each case."""
    begun, measured, remarks = time.monotonic(), dict[str, dict[str, Any]](), list[str]()
    result = _result(measured, remarks, steps)
    for case in cases:
        if time.monotonic() - begun > 60 * minutes:
            remarks.append(f"{case.name}: not begun, after {minutes:g} minutes")
        else:
            try:
                measured[case.name] = _train(folder, case, WARMUP + steps)
            except RuntimeError as error:
                remarks.append(f"{case.name}: {str(error).strip().splitlines()[-1]}")
        result = _result(measured, remarks, steps)
        publish(result)
    return result


def _train(folder: Path, case: Case, steps: int) -> dict[str, Any]:
    place = folder / case.name.replace(", ", "-").replace(" ", "-")
    sizes = (case.config[name] for name in ("model_type", "hidden_size", "vocab_size"))
    base = folder / f"base-{'-'.join(map(str, sizes))}"
    if not base.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**case.config)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # the CPU needs minutes
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(base)
        del model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    alone = case.backend == "single"
    processes = 1 if alone else max(1, torch.cuda.device_count())
    count = max(64, steps * processes * case.tokens // 200)
    recipe = Pretrain(
        Model(str(base), tokenizer=str(place / "tokenizer"), quantization=case.quantization),  # type: ignore[arg-type]
        data=(written(texts(count, DOCUMENTS), place),),
        batch=Batch(processes, 1, case.tokens, "truncate", packing=True),
        data_checks="report",
        max_steps=steps,
    ).with_kernels(pointwise=case.pointwise, blocks=case.blocks)  # type: ignore[arg-type]
    if case.adapter:
        recipe = recipe.with_lora(r=16)
    run = Run(place / "run")
    words = ["--precision", "bf16", "--no-plot", "--output", run.root]
    if not alone:
        words += ["--backend", case.backend, "--processes", str(processes)]
    if case.profiled:
        words.append("--profile")
    verb = "train" if alone else "launch"
    finetune(verb, saved(recipe, place), *words, cache=place / "cache")
    found = read(run, processes)
    plans = list(run.read_metrics("memory"))
    where = run.profile / "where-rank-00000.json"
    return found | {
        "profile_seconds": json.loads(where.read_text()) if where.is_file() else None,
        "expected": case.expected,
        "planned_step_seconds": _planned(run).get("step_seconds"),
        "peak_of_a_step_bytes": plans[0]["peak"] if plans else None,
        "planned_peak_bytes": plans[0]["predicted"] if plans else None,
        "mfu": list(run.read_metrics("train"))[-1]["mfu"],
    }


def _planned(run: Run) -> dict[str, Any]:
    return json.loads(run.plan.read_text())["prediction"] or {}


def _result(measured: dict[str, dict[str, Any]], remarks: list[str], steps: int) -> Result:
    how = (
        "Random weights, packs of short documents, one pack a step and process, in bf16: "
        f"the median of {steps} steps after {WARMUP} others. What is expected is roofline "
        "arithmetic for one H100; what is planned is the run's own `plan.json`."
    )
    head = ["model", "tokens/s", "expected", "step", "planned", "peak", "planned peak", "MFU"]
    rows = [
        [
            name,
            f"{found['tokens_per_second']:,.0f}",
            found["expected"],
            f"{found['step_seconds']:.3g} s",
            _or_none(found["planned_step_seconds"], lambda value: f"{value:.3g} s"),
            _or_none(found["peak_of_a_step_bytes"], units.size),
            _or_none(found["planned_peak_bytes"], units.size),
            f"{found['mfu']:.2f}",
        ]
        for name, found in measured.items()
    ]
    parts = [
        f"{name}, one step by kind of work: {_parts(found['profile_seconds'])}"
        for name, found in measured.items()
        if found["profile_seconds"]
    ]
    return Result("Known shapes", how, {"cases": dict(measured)}, [head, *rows], remarks + parts)


def _parts(seconds: dict[str, float]) -> str:
    largest = sorted(seconds.items(), key=lambda each: -each[1])
    return ", ".join(f"{kind} {1e3 * each:.0f} ms" for kind, each in largest if each > 0)


def _or_none(value: Any, told: Callable[[Any], str]) -> str:
    return "" if value is None else told(value)
