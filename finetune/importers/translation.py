"""Record the outcome of each key of another toolkit's configuration."""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

Outcome = Literal["translated", "differs", "no counterpart", "not needed"]
OF_ADAPTERS = ("use_peft", "use_rslora", "use_dora", "additional_target")


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

    @property
    def shards(self) -> bool:
        """Whether the backend shards the state of the optimizer."""
        return self.fields.get("backend", "single") not in ("single", "ddp")

    @property
    def lost(self) -> list[str]:
        """Keys without a counterpart."""
        return [key for key, (outcome, _) in self.outcomes.items() if outcome == "no counterpart"]

    def set(self, path: str, value: Any) -> None:
        """Set a field of the recipe by its dotted path."""
        *sections, last = path.split(".")
        place = self.fields
        for section in sections:
            place[section] = place.get(section) or {}
            place = place[section]
        place[last] = value

    def put(self, path: str, value: Any, keys: str | list[str]) -> None:
        """Set a field, to which keys are translated."""
        self.set(path, value)
        self.say(keys, "translated", f"{path}={shown(value)}")

    def assume(self, path: str, value: Any) -> None:
        """Set a field to the other toolkit's default."""
        self.set(path, value)
        self.assumed.append(f"{path}={shown(value)}: the other toolkit's default")

    def move(self, key: str, path: str, change: Callable[[Any], Any] | None = None) -> None:
        """Translate a key, if it is given, to a field with the same meaning."""
        if key in self.source:
            self.put(path, self.source[key] if change is None else change(self.source[key]), key)

    def move_all(self, paths: Mapping[str, str]) -> None:
        """Translate keys to fields with the same meaning and the same values."""
        for key, path in paths.items():
            self.move(key, path)

    def move_or_assume(self, key: str, path: str, usual: Any) -> None:
        """Translate a key, or set the other toolkit's default if it is not given."""
        if key in self.source:
            self.move(key, path)
        else:
            self.assume(path, usual)

    def say(self, keys: str | list[str], outcome: Outcome, text: str) -> None:
        """Record an outcome of keys, as a list or with spaces between; those not given are not."""
        for key in keys.split() if isinstance(keys, str) else keys:
            if key in self.source or key.split(".")[0] in self.source:
                self.outcomes[key] = (outcome, text)

    def say_all(self, outcome: Outcome, keys: Mapping[str, str]) -> None:
        """Record an outcome of keys, which are listed by the reason."""
        for reason, named in keys.items():
            self.say(named, outcome, reason)

    def say_values(self, at: str, values: Mapping[str, Any], read: Collection[str]) -> None:
        """Record the values of a source that are neither `read` nor have an outcome."""
        for key, value in values.items():
            if key not in read and f"{at}.{key}" not in self.outcomes:
                reason = f"{shown(value)}: no field of a source corresponds to it"
                self.say([f"{at}.{key}"], "no counterpart", reason)

    def held_out(self, key: str) -> None:
        """Translate the rows that are held out: a number, or a fraction of the rows."""
        if self.get(key):
            self.move(key, "eval_rows")
        else:
            self.say(key, "not needed", "nothing is held out")

    def per_epoch(self, key: str, path: str, epochs: Any) -> None:
        """Translate how often something is done in an epoch, to a fraction of the run."""
        times = self.get(key)
        if not isinstance(times, int | float) or times <= 0:
            self.say(key, "not needed", "it is off")
            return
        passes = epochs if isinstance(epochs, int | float) and epochs > 0 else 1
        every = round(1 / (times * passes), 6) if times * passes > 1 else None
        self.set(path, every)
        self.say(key, "translated", f"{path}={shown(every)} of the run")

    def say_off(self, keys: str) -> None:
        """Record keys that have no outcome as switched off."""
        self.say([k for k in keys.split() if k not in self.outcomes], "not needed", "it is off")

    def no_adapter(self, *starts: str) -> None:
        """Leave the adapter out; keys of one are those that begin so, or name it."""
        self.set("adapter", None)
        keys = [key for key in self.source if key.startswith(starts) or key in OF_ADAPTERS]
        self.say(keys, "not needed", "no adapter: all weights are trained")

    def refuse_flags(self, keys: Mapping[str, str]) -> None:
        """Record switches without a counterpart, by the reason: not needed if they are off."""
        for reason, named in keys.items():
            for key in named.split():
                off = self.get(key) in (False, "false", "none", "no", 0, "", [], {})
                self.say(key, "not needed" if off else "no counterpart", reason)

    def finish(self) -> None:
        """Record every key without an outcome as one without a counterpart."""
        for key in self.source:
            if not any(key in (said, said.split(".")[0]) for said in self.outcomes):
                self.say([key], "no counterpart", "no recipe field corresponds to it")


def shown(value: Any) -> str:
    """A value as in `key=value` on the command line, truncated if it is long."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def listed(value: Any) -> list[Any]:
    """A list as it is, another value as a list of one."""
    return value if isinstance(value, list) else [value]


def mapping(value: Any) -> dict[str, Any]:
    """An object as it is; empty for other values."""
    return value if isinstance(value, dict) else {}


def text(value: Any) -> str:
    """A value as a string; YAML booleans become `true` and `false`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def names_in(value: object) -> list[str]:
    """The names of a list, or of a text with commas between them."""
    if isinstance(value, list):
        return [text(each) for each in value]
    return [name.strip() for name in text(value).split(",")]
