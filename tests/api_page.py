"""Write `docs/api.md` from the public names: `python -m tests.api_page`."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import finetune as ft
from finetune.recipe.changes import Changes

PAGE = Path(__file__).parent.parent / "docs/api.md"
GROUPS = {
    "Recipes": "SFT Pretrain RewardModel Classifier Distill Recipe Model LoRA Teacher Data "
    "Batch Optim Kernels Evaluation Saving",
    "Preferences": "DPO ORPO SimPO CPO KTO",
    "Online": "GRPO RLOO Reward",
    "Before a training": "recipe_for load_recipe plan Plan Prediction doctor prove",
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
        "raises `FinetuneError`. This page is written by `python -m tests.api_page`.",
        "",
    ]
    for title, names in grouped().items():
        lines += [f"## {title}", ""]
        lines += [line for name in names for line in described(name, getattr(ft, name))]
    return "\n".join(lines).rstrip() + "\n"


def described(name: str, value: Any) -> list[str]:
    text = (inspect.getdoc(value) or "").splitlines()
    if not inspect.isclass(value):
        return [f"### `{name}`", "", "```text", f"{name}{signature(value)}", "```", "", *text, ""]
    lines = [f"### `{name}`", "", *text, ""]
    listed = [
        f"- `{inner}{'' if isinstance(each, property) else signature(each)}`: {first(each)}"
        for inner, each in members(value).items()
    ]
    lines += [*listed, ""] if listed else []
    if dataclasses.is_dataclass(value) and hasattr(value, "__pydantic_fields__"):
        lines += ["Fields: [recipes.md](recipes.md).", ""]
    return lines


def members(value: type) -> dict[str, Any]:
    """Public methods and properties with a docstring; of `Recipe`, those that change it."""
    if value is ft.Recipe:
        found = vars(Changes) | vars(value)
        return {name: each for name, each in found.items() if name.startswith("with_")}
    return {
        name: each
        for name, each in vars(value).items()
        if not name.startswith("_")
        and (inspect.isfunction(each) or isinstance(each, property))
        and each.__doc__
    }


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
        if parameter.kind is parameter.VAR_KEYWORD:
            parameters.append(f"**{parameter.name}")
            continue
        default = parameter.default
        plain = default is parameter.empty
        parameters.append(parameter.name if plain else f"{parameter.name}={default!r}")
    return f"({', '.join(parameters)})"


def first(value: Any) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
