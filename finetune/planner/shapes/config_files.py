"""A model's `config.json`: where it may be on this machine, and what it says of the head."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from finetune.cache import hub_cache


def config_paths(name: str, revision: str | None) -> list[Path]:
    """Possible paths: in a local folder, and in the hub cache."""
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    reference = folder / "refs" / wanted
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else wanted
    return [Path(name) / "config.json", folder / "snapshots" / commit / "config.json"]


def has_score_head(fields: Mapping[str, Any]) -> bool:
    """Whether a `config.json` belongs to a sequence classification model."""
    names = fields.get("architectures")
    named = cast(list[Any], names) if isinstance(names, list) else []
    return any(str(name).endswith("ForSequenceClassification") for name in named)
