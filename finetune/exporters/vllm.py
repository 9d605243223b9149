"""Export an adapter that vLLM serves beside its base, after checking that vLLM accepts it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.exporters import adapter
from finetune.exporters.source import Source
from finetune.inference.load import ADAPTER_WEIGHTS, tensor_shapes
from finetune.reports.card import Kind

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `--max-lora-rank` (vLLM 0.32)."""

SERVED_WHOLE = {"score", "classifier"}
"""Modules that vLLM (0.32) takes from `modules_to_save`."""

REFUSED = ("use_dora", "lora_bias", "layer_replication", "alora_invocation_tokens", "use_qalora",
           "use_bdlora", "trainable_token_indices")  # fmt: skip
"""Fields of an adapter's configuration with which vLLM (0.32) refuses it, or ignores a part."""


def check(source: Source) -> None:
    """Refuse an adapter that vLLM would refuse.

    Raises:
        FinetuneError: the run has no adapter, or there are reasons: with every one.
    """
    config = adapter.check(source).to_dict()
    assert source.adapter is not None, "checked"
    reasons = problems(config, tensor_shapes(source.adapter / ADAPTER_WEIGHTS))
    if reasons:
        raise FinetuneError(
            *(f"--format vllm: {reason}; --format merged can be served" for reason in reasons)
        )


def write(source: Source, folder: Path) -> Kind:
    """Write the adapter in PEFT's format, after `check`."""
    return adapter.write(source, folder)


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))


def problems(config: dict[str, Any], tensors: Iterable[str]) -> list[str]:
    """Why vLLM (0.32) would refuse an adapter, or serve another one than was trained."""
    found = [f"vLLM takes no adapter with {name}" for name in REFUSED if config.get(name)]
    if config.get("bias", "none") != "none":
        found.append(f"vLLM takes no adapter with bias={config['bias']}")
    whole = set(config.get("modules_to_save") or ()) - SERVED_WHOLE
    if whole:
        found.append(f"vLLM takes no trained modules_to_save ({', '.join(sorted(whole))})")
    if largest_rank(config) > RANKS[-1]:
        found.append(f"vLLM takes ranks up to {RANKS[-1]}, not {largest_rank(config)}")
    parts = (".lora_A.", ".lora_B.", ".lora_embedding_A", ".lora_embedding_B", ".score.")
    others = [name for name in tensors if not any(part in name for part in parts)]
    if others and not found:
        found.append(f"vLLM takes no {others[0]} in an adapter")
    return found


def largest_rank(config: dict[str, Any]) -> int:
    return max([config["r"], *(config.get("rank_pattern") or {}).values()])


def served_rank(config: dict[str, Any]) -> int:
    """The value of `--max-lora-rank` that is enough for an adapter that has no `problems`."""
    return next(each for each in RANKS if each >= largest_rank(config))


def command(folder: Path, base: str, config: dict[str, Any]) -> str:
    """What starts vLLM in the folder of an adapter.

    The template is named because vLLM otherwise uses that of the base.
    """
    template = folder / "chat_template.jinja"
    chosen = " --chat-template chat_template.jinja" if template.is_file() else ""
    return (
        f"vllm serve {base} --tokenizer . --enable-lora --max-lora-rank {served_rank(config)} "
        f"--lora-modules tuned=.{chosen}"
    )
