"""Published shapes of well-known models, used if a config cannot be read.

Gated repositories require a login even for their `config.json`. `models.txt` has a row per model.
"""

import json
import re
from pathlib import Path
from typing import Any

ROW_TOKENS = {"openai/gsm8k": 190}
"""Average tokens per row: question and answer in ChatML, with SmolLM2's tokenizer."""

_ENDINGS = re.compile(
    r"-(instruct|chat|base|thinking|it|pt|hf|\d+k|\d{4}|intermediate.*|step.*|bnb.*|deduped|for.*)(?=-|$)"
)


def _key(name: str) -> str:
    last = name.rsplit("/", 1)[-1].lower().replace("_", "-").removeprefix("meta-")
    return re.sub(r"[-\s]", "", _ENDINGS.sub("", last))


def _row(line: str) -> tuple[str, dict[str, Any]]:
    name, kind, *numbers = line.split()
    h, layers, heads, kv, width, vocab = (int(number) for number in numbers[:6])
    config: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": h,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": width,
        "vocab_size": vocab,
        "tie_word_embeddings": "tied" in numbers[6:],
    }
    if kind == "gpt2":  # its config uses different names
        config |= {"n_embd": h, "n_layer": layers, "n_head": heads, "n_inner": width}
    for word in numbers[6:]:
        field, _, value = word.partition("=")
        if field == "head":
            config["head_dim"] = int(value)
        elif field == "experts":
            count, active = value.split("/")
            many = "num_local_experts" if kind == "mixtral" else "num_experts"
            config |= {many: int(count), "num_experts_per_tok": int(active)}
        elif field == "moe":
            config["moe_intermediate_size"] = int(value)
        elif value:
            config[field] = json.loads(value)
    return name, config


_TABLE = Path(__file__).with_name("models.txt").read_text(encoding="utf-8").splitlines()
CONFIGS: dict[str, dict[str, Any]] = dict(
    _row(line) for line in _TABLE if line and not line.startswith("#")
)
_KEYS = {_key(name): name for name in CONFIGS}


AUTHORS = (
    "meta-llama", "huggyllama", "codellama", "tinyllama", "huggingfacetb", "01-ai", "mistralai",
    "qwen", "google", "openai-community", "eleutherai", "microsoft", "openai", "deepseek-ai",
    "allenai", "ibm-granite", "liquidai",
)  # fmt: skip
"""Hub organizations that published the models of the table."""


def row(name: str) -> str | None:
    """The row of a model, by hub id or short name; None if it is not in the table."""
    key = _key(name)
    return _KEYS.get(key) or _KEYS.get(re.sub(r"v\d\.\d$", "", key)) or _KEYS.get(f"{key}v0.1")


def find(name: str) -> dict[str, Any] | None:
    """The config of a model, by hub id or short name; None if it is not in the table."""
    found = row(name)
    return None if found is None else CONFIGS[found]


def source(name: str) -> str:
    """Source of the config from `find`; for a model of another author only the name matches."""
    author, _, rest = name.rpartition("/")
    if not author or author.lower() in AUTHORS:
        return "the table of published shapes"
    return (
        f"the table of published shapes: {name} is assumed to have that of {row(rest)}, which it "
        "is called after; a folder with its config.json as model.name says for certain"
    )
