"""Types of the fields of a recipe, and the checks of their values."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StringConstraints

from finetune.errors import did_you_mean

STRICT = ConfigDict(extra="forbid", str_strip_whitespace=True, allow_inf_nan=False)

Positive = Annotated[int, Field(gt=0, le=10**12)]
Share = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


def cadence(value: Any) -> Any:
    """Check steps, a fraction of the run, or a text such as `0.5 epochs`."""
    epochs = isinstance(value, str) and re.fullmatch(r"(\d*\.?\d+) epochs?", value)
    share = isinstance(value, float) and 0 < value < 1
    steps = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 10**12
    if steps or share or (epochs and float(epochs[1])):
        return value
    raise ValueError(
        "expected steps (100), a fraction of the run (0.1), or text such as 0.5 epochs"
    )


def rows_or_share(value: Any) -> Any:
    """Check a number of rows, or a fraction of all rows."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and (0 < value < 1 or (1 <= value <= 10**12 and value == int(value))):
        return value if value < 1 else int(value)
    raise ValueError("expected a number of rows (500), or a fraction of all rows (0.05)")


def optimizer(name: str) -> str:
    """Check a built-in name; `module:Class` is imported when it is used."""
    if ":" not in name and name not in OPTIMIZERS:
        known = f"{', '.join(OPTIMIZERS)}, or module:Class of a torch.optim.Optimizer"
        raise ValueError(f"expected one of {known}{did_you_mean(name, OPTIMIZERS)}")
    return name


def tracker(name: str) -> str:
    """Check a built-in name; `module:Class` is imported when it is used."""
    if ":" not in name and name not in TRACKERS:
        known = f"{', '.join(TRACKERS)}, or module:Class of an accelerate.tracking.GeneralTracker"
        raise ValueError(f"expected one of {known}{did_you_mean(name, TRACKERS)}")
    return name


def split_of_rows(split: str) -> str:
    """Check a split, with the part of it that is read."""
    if "[" in split and PART.fullmatch(split) is None:
        raise ValueError("expected a split, or a part such as train[:20%] or train[5000:]")
    return split


def pattern(text: str) -> str:
    """Check a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"'{text}' is not a valid regular expression: {error}") from None
    return text


PART = re.compile(r"[^\[\]]+(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")
OPTIMIZERS = (
    "adamw", "adamw_8bit", "adamw_4bit", "paged_adamw_8bit", "schedule_free_adamw", "adafactor",
    "muon", "lion", "sgd",
)  # fmt: skip
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
Every = Annotated[int | float | str, BeforeValidator(cadence)]
HeldOut = Annotated[int | float, BeforeValidator(rows_or_share)]


def split_names(names: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Turn a word such as `q_proj`, or names with commas between them, into a tuple of names.

    PEFT would read a string as a regular expression that must match the complete module path.
    """
    if not isinstance(names, str) or not re.fullmatch(r"\w+|[\w.]+(\s*,\s*[\w.]+)+", names):
        return names
    return tuple(name.strip() for name in names.split(","))


Names = Annotated[str | tuple[str, ...], AfterValidator(split_names)]
"""Module names, also as words with commas between them, or a regular expression."""
AnswerMetric = Literal["exact", "number", "labels", "f1", "rouge", "bleu", "chrf", "json", "tools"]
"""Answer metrics that need only the rows of the data."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
Token = Annotated[str, StringConstraints(min_length=1, strip_whitespace=False)]
