"""Check that vLLM supports an adapter, and how it is served there."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from finetune.data.images.processor import FILES
from finetune.errors import refuse
from finetune.exporters import adapter
from finetune.exporters.source import Source
from finetune.inference.load import ADAPTER_WEIGHTS, tensor_shapes

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `--max-lora-rank` (vLLM 0.32)."""

LANGUAGE = (".language_model.", ".text_model.", ".lm_head.")
"""Parts of the names of modules of the language model, in models of transformers that read images.
"""
SERVED_WHOLE = {"score", "classifier"}
"""Modules that vLLM (0.32) loads from `modules_to_save`."""

REFUSED = ("use_dora", "lora_bias", "layer_replication", "alora_invocation_tokens", "use_qalora",
           "use_bdlora", "trainable_token_indices")  # fmt: skip
"""Fields of an adapter's configuration that vLLM (0.32) rejects or partly ignores."""


def check(source: Source) -> None:
    """Reject an adapter that vLLM does not support.

    Raises:
        FinetuneError: the run has no adapter, or vLLM does not support it; the message lists all
            reasons.
    """
    config = adapter.check(source).to_dict()
    assert source.adapter is not None, "checked"
    reasons = problems(config, tensor_shapes(source.adapter / ADAPTER_WEIGHTS))
    refuse(f"--format vllm: {reason}; --format merged can be served" for reason in reasons)


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))


def problems(config: dict[str, Any], tensors: Iterable[str]) -> list[str]:
    """Reasons why vLLM (0.32) would reject an adapter, or serve it incorrectly."""
    if config.get("peft_type", "LORA") != "LORA":
        return [f"vLLM supports LoRA alone, not {config['peft_type']}"]
    found = [f"vLLM does not support adapters with {name}" for name in REFUSED if config.get(name)]
    if config.get("bias", "none") != "none":
        found.append(f"vLLM does not support adapters with bias={config['bias']}")
    whole = set(config.get("modules_to_save") or ()) - SERVED_WHOLE
    if whole:
        found.append(f"vLLM does not support trained modules_to_save ({', '.join(sorted(whole))})")
    if largest_rank(config) > RANKS[-1]:
        found.append(f"vLLM supports ranks up to {RANKS[-1]}, got {largest_rank(config)}")
    parts = (".lora_A.", ".lora_B.", ".lora_embedding_A", ".lora_embedding_B", ".score.")
    others = [name for name in tensors if not any(part in name for part in parts)]
    if others and not found:
        found.append(f"vLLM does not support {others[0]} in an adapter")
    return found


def largest_rank(config: dict[str, Any]) -> int:
    return max([config["r"], *(config.get("rank_pattern") or {}).values()])


def served_rank(config: dict[str, Any]) -> int:
    """The smallest sufficient value of `--max-lora-rank`, for an adapter without `problems`."""
    return next(each for each in RANKS if each >= largest_rank(config))


def image_words(folder: Path) -> list[str]:
    """Options for an adapter in a folder that has modules of a tower or connector.

    Without them vLLM (0.32) leaves these modules out without a word.
    """
    tensors = tensor_shapes(folder / ADAPTER_WEIGHTS)
    inside = any(all(part not in name for part in LANGUAGE) for name in tensors)
    sees = any((folder / name).is_file() for name in FILES)
    return ["--enable-tower-connector-lora"] if sees and inside else []


def dtype_words(dtype: torch.dtype | None) -> list[str]:
    """Options for a compute data type; without them vLLM (0.32) computes fp32 models in bf16."""
    return [] if dtype is None else ["--dtype", str(dtype).removeprefix("torch.")]


def command(folder: Path, base: str, config: dict[str, Any], dtype: torch.dtype | None) -> str:
    """The command that starts vLLM, to run in the folder of an adapter.

    It passes the chat template because vLLM otherwise uses the template of the base.
    """
    template = folder / "chat_template.jinja"
    chosen = " --chat-template chat_template.jinja" if template.is_file() else ""
    return (
        f"vllm serve {base} --tokenizer . --enable-lora --max-lora-rank {served_rank(config)} "
        f"--lora-modules tuned=.{chosen} {' '.join([*image_words(folder), *dtype_words(dtype)])}"
    ).rstrip()
