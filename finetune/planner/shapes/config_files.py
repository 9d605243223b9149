"""Paths where a model's `config.json` may be on this machine."""

from pathlib import Path

from finetune.cache import hub_cache


def config_paths(name: str, revision: str | None) -> list[Path]:
    """Possible paths: in a local folder, and in the hub cache."""
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    reference = folder / "refs" / wanted
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else wanted
    return [Path(name) / "config.json", folder / "snapshots" / commit / "config.json"]
