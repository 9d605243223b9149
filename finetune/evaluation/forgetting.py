"""General text for measuring forgetting: the increase in loss over the base model."""

from pathlib import Path

from finetune.data.samples import Text
from finetune.errors import FinetuneError, reading
from finetune.evaluation.questions import Asked, of_source
from finetune.recipe import Data

BUILT_IN = Path(__file__).with_name("general.txt")
"""Paragraphs on everyday topics, written for this measure."""


def general_text(file: Path | None) -> list[Asked]:
    """Documents of general text from a file (paragraphs, or rows with `text`), or built-in ones.

    Raises:
        FinetuneError: the file cannot be read, or contains no text.
    """
    path = file or BUILT_IN
    if path.suffix in ("", ".txt", ".md"):
        with reading(f"--general-text {path}: cannot be read"):
            text = path.read_text(encoding="utf-8")
        parts = [part.strip() for part in text.split("\n\n") if part.strip()]
        found = [
            Asked(Text(part), str(path), f"{path} paragraph {n + 1}")
            for n, part in enumerate(parts)
        ]
    else:
        found = of_source(Data(str(path), "text"))
    if not found:
        raise FinetuneError(f"--general-text {path}: contains no text")
    return found
