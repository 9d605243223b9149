"""Models and rows with images whose losses plain transformers computed, among the assets."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

KINDS = ("qwen2_5_vl", "qwen3_vl", "smolvlm")


def stored(assets: Path, name: str) -> Any:
    return json.loads((assets / "oracles" / "multimodal" / name).read_text())


def drawn(model: PreTrainedModel) -> PreTrainedModel:
    """Its matrices from one generator, in the order of their names."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.08 * torch.randn(parameter.shape, generator=generator))
    return model


def base(assets: Path, kind: str, folder: Path) -> Path:
    """The folder of a model with its processor and its weights."""
    home = folder / kind
    if home.exists():
        return home
    source = assets / "oracles" / "multimodal" / "models" / kind
    model = drawn(AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(source)))
    whole = sum(parameter.double().sum().item() for parameter in model.parameters())
    known = stored(assets, "losses.json")["weights"][kind]
    assert sum(parameter.numel() for parameter in model.parameters()) == known["parameters"]
    assert abs(whole - known["sum"]) < 1e-3
    model.save_pretrained(home)
    for path in source.iterdir():
        if path.name != "config.json":
            (home / path.name).write_bytes(path.read_bytes())
    return home


def recipe(assets: Path, kind: str, folder: Path, run: str, **sections: Any) -> dict[str, Any]:
    """Fields of a recipe that takes the published steps of a run."""
    parts = {"all": ["language", "connector", "tower"], "lora": ["language"]}.get(run, [run])
    model: dict[str, Any] = {"name": str(base(assets, kind, folder)), "reads": ["image"]}
    source = assets / "oracles" / "multimodal"
    given: dict[str, Any] = {
        "method": "sft", "model": model | {"trains": parts},
        "data": [{"source": str(source / "data" / "rows.jsonl"), "format": "messages"}],
        "batch": {"rows": 8, "micro_rows": 4, "max_length": 2048}, "max_steps": 5, "seed": 0,
        "optim": {"lr": 1e-3, "schedule": "constant", "warmup": 0, "max_grad_norm": 1.0},
    }  # fmt: skip
    if run == "lora":
        given["adapter"] = {"r": 4, "alpha": 8}
        given["model"]["adapter"] = str(source / "adapters" / kind)
    for name, section in sections.items():
        both = isinstance(section, dict) and name in given
        given[name] = given[name] | section if both else section
    return given
