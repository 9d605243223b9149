"""Record the outcome of each key of another toolkit's configuration."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

Outcome = Literal["translated", "differs", "no counterpart", "not needed"]


@dataclasses.dataclass
class Translation:
    """A configuration, the recipe fields set so far, and the outcome of each key."""

    source: dict[str, Any]
    """Keys and values, without keys that are null."""
    processes: int
    """Assumed number of processes, which the files of neither toolkit contain."""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    outcomes: dict[str, tuple[Outcome, str]] = dataclasses.field(
        default_factory=dict[str, tuple[Outcome, str]]
    )
    assumed: list[str] = dataclasses.field(default_factory=list[str])
    """Values taken from the other toolkit's defaults, which differ from ours."""

    def get(self, key: str, default: Any = None) -> Any:
        return self.source.get(key, default)

    def set(self, path: str, value: Any) -> None:
        """Set a field of the recipe by its dotted path."""
        *sections, last = path.split(".")
        place = self.fields
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value

    def move(self, key: str, path: str, change: Callable[[Any], Any] | None = None) -> None:
        """Translate a key, if it is given, to a field with the same meaning."""
        if key in self.source:
            value = self.source[key] if change is None else change(self.source[key])
            self.set(path, value)
            self.say(key, "translated", f"{path}={shown(value)}")

    def say(self, key: str, outcome: Outcome, text: str) -> None:
        """Record an outcome; a key that is not in the source is not recorded."""
        if key.split(".")[0] in self.source:
            self.outcomes[key] = (outcome, text)

    def refuse_flag(self, key: str, text: str) -> None:
        """Record a switch without a counterpart: not needed if off, no counterpart if on."""
        if key in self.source:
            off = self.source[key] in (False, "false", "none", "no", 0, "", [], {})
            self.say(key, "not needed" if off else "no counterpart", text)

    def finish(self) -> None:
        """Record every key without an outcome as one without a counterpart."""
        for key in self.source:
            if not any(said.split(".")[0] == key for said in self.outcomes):
                self.say(key, "no counterpart", "no recipe field corresponds to it")


def shown(value: Any) -> str:
    """A value as in `key=value` on the command line, truncated if it is long."""
    text = {True: "true", False: "false", None: "null"}.get(value) if _is_word(value) else None
    text = str(value) if text is None else text
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def text(value: Any) -> str:
    """A value as a string; YAML booleans become `true` and `false`."""
    return str(value).lower() if isinstance(value, bool) else str(value)
