"""Approximate the shape of a model without formulas, from its modules in transformers.

The model is built without values. Its shape is that of a Llama with as many layers and weights, and
a trace of a few layers (`finetune plan`) tells what each saves for the backward pass in addition.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune.cache import cache
from finetune.errors import reading
from finetune.planner.shapes.architecture import Architecture, Experts
from finetune.planner.shapes.read_config import read

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts in configs."""


def _place(config: Mapping[str, Any]) -> Path:
    """The file of a model's counts in the cache."""
    releases = [importlib.metadata.version(name) for name in ("transformers", "peft")]
    words = json.dumps([releases, dict(config)], sort_keys=True, default=str)
    return cache("shapes") / f"{hashlib.sha256(words.encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def keep(config: Mapping[str, Any], **found: Any) -> None:
    """Keep facts about a model in the cache, next to those that are there."""
    path = _place(config)
    with contextlib.suppress(OSError):  # a folder that cannot be written
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_read(path) | found), encoding="utf-8")


def kept(config: Mapping[str, Any], name: str, make: Callable[[], Any]) -> Any:
    """A fact about a model from the cache, or as `make` finds it, as plain values."""
    found = _read(_place(config))
    if name not in found:
        found = {name: make()}
        keep(config, **found)
    return found[name]


def is_traced(config: Mapping[str, Any]) -> bool:
    """Whether it was tried before to trace what a layer of the model saves."""
    return "extra" in _read(_place(config))


def approximate(config: Mapping[str, Any]) -> Architecture:
    """The shape of a model of any type that transformers has; kept in the cache.

    Raises:
        FinetuneError: transformers cannot build it.
    """
    counted = _read(_place(config))
    if "total" not in counted:
        counted |= _counted(config)
        keep(config, **counted)
    return _shape(str(config.get("model_type")), counted)


def _counted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a model built without values: weights by place, and fields of its config."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    fields = {key: value for key, value in config.items() if key != "model_type"}
    with reading(f"model_type {config.get('model_type')!r}: transformers cannot build it"):
        made = transformers.AutoConfig.for_model(config.get("model_type"), **fields)
        with torch.device("meta"):
            network = transformers.AutoModelForCausalLM.from_config(made)
    text = made.get_text_config(decoder=True)
    table, head = network.get_input_embeddings().weight, network.get_output_embeddings()
    tied = head is not None and head.weight is table
    found = {
        name: next((getattr(text, name) for name in names if getattr(text, name, None)), None)
        for name, names in {
            "layers": ("num_hidden_layers", "n_layer", "num_layers"),
            "heads": ("num_attention_heads", "n_head"), "kv": ("num_key_value_heads",),
            "head_dim": ("head_dim",), "active": ("num_experts_per_tok",), "count": COUNTS,
            "context": ("max_position_embeddings",),
        }.items()
    }  # fmt: skip
    sizes = [(weight.numel(), *weight.shape) for weight in network.parameters()]
    return found | {
        "hidden": table.shape[1], "vocab": table.shape[0], "tied": tied,
        "experts": sum(each[0] for each in sizes if len(each) == 4 and each[1] == found["count"]),
        "total": sum(each[0] for each in sizes),
    }  # fmt: skip


def _shape(kind: str, counted: Mapping[str, Any]) -> Architecture:
    """A Llama with as many layers and weights; `_counted` made the counts."""
    h, layers = counted["hidden"], counted["layers"]
    heads = counted["heads"] or max(1, h // 64)
    kv = counted["kv"] or heads
    kv = kv if heads % kv == 0 else heads
    head_dim = counted["head_dim"] or max(1, h // heads)
    tables = (1 if counted["tied"] else 2) * counted["vocab"] * h
    each = (counted["total"] - tables - counted["experts"]) / layers
    experts = None
    if counted["experts"] and counted["active"]:
        width = max(1, round(counted["experts"] / layers / counted["count"] / 3 / h))
        experts = Experts(counted["count"], counted["active"], width)
    rest = each - 2 * h * (heads + kv) * head_dim  # without attention
    made = read({
        "model_type": "llama", "hidden_size": h, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head_dim,
        "intermediate_size": max(1, round(rest / 3 / h)), "vocab_size": counted["vocab"],
        "tie_word_embeddings": counted["tied"],
    })  # fmt: skip
    few = experts is not None and rest < 0.05 * each
    return dataclasses.replace(
        made, kind=kind, matrices=made.matrices[:4] if few else made.matrices, experts=experts,
        context=counted["context"] or 0, extra=counted.get("extra", 0.0),
    )  # fmt: skip
