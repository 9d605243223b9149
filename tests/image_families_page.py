"""Write the table of `docs/models.md`: `python -m tests.image_families_page`.

It has every class that `AutoModelForImageTextToText` loads.
"""

from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from finetune.planner.families import FAMILIES, UNREAD

PAGE = Path(__file__).parent.parent / "docs/models.md"
BEGIN = "<!-- table: python -m tests.image_families_page -->\n"
FINISH = "<!-- end of the table -->\n"


def table() -> str:
    """The number of classes that are right, their types, and the others by their reason."""
    kinds = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    right = [kind for kind in kinds if FAMILIES.get(kind) and FAMILIES[kind].reads]
    refused: dict[str, list[str]] = {}
    for kind in kinds:
        if kind not in right:
            refused.setdefault(UNREAD[kind], []).append(kind)
    apart = [kind for kind in right if not FAMILIES[kind].concatenates]
    lines = [f"| right: {len(right)} of {len(kinds)} | side by side |", "|---|---|"]
    for kind in right:
        lines.append(f"| `{kind}` | {'padded' if kind in apart else 'right'} |")
    lines += ["", f"| refused: {len(kinds) - len(right)} of {len(kinds)} | the model ... |"]
    lines += ["|---|---|"]
    for reason, names in sorted(refused.items(), key=lambda each: -len(each[1])):
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {reason} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """A text with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(FINISH)
    return before + BEGIN + table() + FINISH + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
