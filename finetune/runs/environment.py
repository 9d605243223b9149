"""Record versions, machine and command of a run. Never an environment variable: those hold
secrets, and a run directory is meant to be shared."""

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from finetune.version import __version__

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Packages that only record."""
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "deepspeed",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    *TRACKERS,
)
"""Packages whose version can change a result or how it is recorded."""

_SECRET_NAME = re.compile(r"(token(?![a-z])|secret|passw|api_?key|credential)", re.IGNORECASE)
_SECRET_SHAPE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|[sr]k_(?:live|test)_\w{16,}"
    r"|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|gl(?:pat|dt|rt)-[\w.-]{16,}"
    r"|xox[abeoprs]-[\w-]{10,}|A(?:KI|SI)A[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"
    r"|nvapi-[\w-]{16,}|gsk_\w{16,}|r8_\w{16,}|xai-\w{16,}|pplx-\w{16,}|wandb_v\d_\w{16,}"
    r"|dapi[0-9a-f]{32}|dop_v1_\w{16,}|npm_\w{16,}|pypi-[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|lsv2_\w{16,}|tskey-[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
"""Tokens of hubs, clouds, trackers and servers of models, and JSON web tokens."""
_PASSWORD_OF_URL = re.compile(r"(?<=://)([^/\s@:]*):[^/\s@]*@")
_TOKEN_OF_URL = re.compile(r"(?<=://)[^/\s@:]{16,}(?=[:@])(?=[^/\s]*@)")
"""A user of so many characters is a token."""
_OF_QUERY = re.compile(
    r"([?&#][\w.-]*(?:token|sig|signature|key|secret|passw\w*|credential|auth)=)[^&#\s]+", re.I
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}", re.I)
_HIDDEN = "***"


def environment(devices: Sequence[str] = ()) -> dict[str, Any]:
    """Versions, machine and command of this process, as `environment.json` holds them.

    `devices` are the accelerators' names, which only a caller that has imported torch knows; the
    processor is named where there are none.
    """
    return {
        "versions": versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": list(devices) or [processor()],
        "command": without_secrets(sys.argv),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(Path.cwd()),
    }


def versions() -> dict[str, str]:
    """Installed version of each package that matters, read without importing any of them."""
    installed = {"finetune": __version__}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def processor() -> str:
    """The processor's name and its number of usable cores."""
    name = platform.processor() or platform.machine()
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", facts.read_text(errors="replace"), re.M)
        name = found[1].strip() if found else name
    return f"{name} ({os.cpu_count() or 1} cores)"


def commit(folder: Path) -> str | None:
    """Commit of the git work tree around a folder, with `-dirty` where files differ from it."""
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty"]
    command += ["--exclude", "*"]  # the hash alone, never a tag's name
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def without_secrets(command: Sequence[str]) -> list[str]:
    """A command line with the values of what looks like a token or a password hidden.

    Known: `--hf-token X`, `--token=X`, `tracker.api_key=X`, and what `hide` knows.
    """
    hidden, hide_next = [], False
    for word in command:
        name, equals, _ = word.partition("=")
        secret = _SECRET_NAME.search(name.replace("-", "_")) is not None
        if hide_next:
            hidden.append(_HIDDEN)
        elif equals and secret:
            hidden.append(f"{name}={_HIDDEN}")
        else:
            hidden.append(hide(word))
        hide_next = not hide_next and secret and not equals and word.startswith("-")
    return hidden


def hide(text: str) -> str:
    """A text with common tokens and what a URL holds of passwords hidden."""
    text = _PASSWORD_OF_URL.sub(rf"\1:{_HIDDEN}@", _TOKEN_OF_URL.sub(_HIDDEN, text))
    text = _OF_QUERY.sub(rf"\1{_HIDDEN}", text)
    return _SECRET_SHAPE.sub(_HIDDEN, _BEARER.sub(rf"\1 {_HIDDEN}", text))


_OF_A_MACHINE = re.compile(r"(?:/|~|\.{1,2}/|file:|[A-Za-z]:[\\/])")
"""How a path begins that says where a machine keeps its files."""


def public(value: Any) -> Any:
    """A value of a recipe as a page shows it: no secrets, and a local path by its last name."""
    match value:
        case str() if _OF_A_MACHINE.match(value):
            return hide(re.split(r"[\\/]", value.rstrip("\\/"))[-1])
        case str():
            return hide(value)
        case list():
            return [public(each) for each in value]
        case dict():
            return {key: public(each) for key, each in value.items()}
        case _:
            return value


def command_line(recorded: Sequence[str]) -> str:
    """A recorded command as it is typed in a shell."""
    return shlex.join(recorded)
