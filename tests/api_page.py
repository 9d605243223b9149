"""Write `docs/api.md` from the public names: `python -m tests.api_page`."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import finetune as ft
from finetune.changes import Changes

PAGE = Path(__file__).parent.parent / "docs/api.md"
GROUPS = {
    "Recipes": "SFT Pretrain RewardModel Classifier Distill Recipe Model LoRA Teacher Data "
    "Batch Optim Kernels Evaluation Saving",
    "Preferences": "DPO ORPO SimPO CPO KTO",
    "Online": "GRPO RLOO Reward",
    "Before a training": "load_recipe plan Plan Prediction doctor prove",
    "Training": "launch train Options Run open_run",
    "Afterwards": "load load_base open_model Loaded generate exact_match references Score",
    "Files": "export report plot_loss quickstart_data",
    "Errors": "FinetuneError TrainingFailure Interrupted",
}


def grouped() -> dict[str, list[str]]:
    """The public names by the headings of the page; a new name is among the last."""
    groups = {title: words.split() for title, words in GROUPS.items()}
    known = {name for names in groups.values() for name in names}
    others = [name for name in ft.HOMES if name not in known]
    return groups | ({"Others": others} if others else {})


def page() -> str:
    lines = [
        "# Python",
        "",
        "Everything public, as `import finetune as ft`. A wrong field or value",
    ]
    lines += ["raises `FinetuneError`. This page is written by `python -m tests.api_page`.", ""]
    for title, names in grouped().items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += described(name, getattr(ft, name))
    return "\n".join(lines).rstrip() + "\n"


def described(name: str, value: Any) -> list[str]:
    lines = [f"### `{name}`", ""]
    if not inspect.isclass(value):
        lines += ["```text", f"{name}{signature(value)}", "```", ""]
    lines += [*text(value), ""]
    if not inspect.isclass(value):
        return lines
    listed = list[str]()
    members = vars(Changes) | vars(value) if value is ft.Recipe else vars(value)
    for inner, member in members.items():
        if inner.startswith("_") or (value is not ft.Recipe and not documented(member)):
            continue
        if value is ft.Recipe and not inner.startswith("with_"):
            continue
        shown = inner if isinstance(member, property) else f"{inner}{signature(member)}"
        listed += [f"- `{shown}`: {first(member)}"]
    lines += [*listed, ""] if listed else []
    if dataclasses.is_dataclass(value) and hasattr(value, "__pydantic_fields__"):
        lines += ["Fields: [recipes.md](recipes.md).", ""]
    return lines


def documented(member: Any) -> bool:
    return (inspect.isfunction(member) or isinstance(member, property)) and bool(member.__doc__)


def signature(value: Any) -> str:
    """Names and defaults; the types are in the package, where an editor shows them."""
    parameters: list[str] = []
    starred = False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parameters, starred = [*parameters, "*"], True
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            parameters, starred = [*parameters, f"*{parameter.name}"], True
            continue
        default = parameter.default
        plain = default is parameter.empty
        parameters.append(parameter.name if plain else f"{parameter.name}={default!r}")
    return f"({', '.join(parameters)})"


def text(value: Any) -> list[str]:
    return (inspect.getdoc(value) or "").splitlines()


def first(value: Any) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
