"""Record versions, machine and command of a run.

Environment variables are never recorded: they contain secrets, and run directories are shared.
"""

import datetime
import functools
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from finetune.runs.limits import usable_cores
from finetune.version import __version__

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Experiment trackers."""
PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed", "datasets",
    "tokenizers", "safetensors", "numpy", *TRACKERS,
)  # fmt: skip
"""Packages whose version can affect a result or its record."""

_SECRET_NAME = re.compile(r"(token(?![a-z])|secret|passw|api_?key|credential)", re.IGNORECASE)
_SECRET_SHAPE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|[sr]k_(?:live|test)_\w{16,}"
    r"|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|gl(?:pat|dt|rt)-[\w.-]{16,}"
    r"|xox[abeoprs]-[\w-]{10,}|A(?:KI|SI)A[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"
    r"|nvapi-[\w-]{16,}|gsk_\w{16,}|r8_\w{16,}|xai-\w{16,}|pplx-\w{16,}|wandb_v\d_\w{16,}"
    r"|dapi[0-9a-f]{32}|dop_v1_\w{16,}|npm_\w{16,}|pypi-[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|lsv2_\w{16,}|tskey-[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
"""Tokens of hubs, clouds, trackers and model APIs, and JSON web tokens."""
_PASSWORD_OF_URL = re.compile(r"(?<=://)([^/\s@:]*):[^/\s@]*@")
_TOKEN_OF_URL = re.compile(r"(?<=://)[^/\s@:]{16,}(?=[:@])(?=[^/\s]*@)")
"""A user name of at least 16 characters is treated as a token."""
_OF_QUERY = re.compile(
    r"([?&#][\w.-]*(?:token|sig|signature|key|secret|passw\w*|credential|auth)=)[^&#\s]+", re.I
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}", re.I)
_HIDDEN = "***"


def environment(devices: Sequence[str] = ()) -> dict[str, Any]:
    """Contents of `environment.json`: versions, machine and command of this process.

    `devices` are names of accelerators, passed by callers that have imported torch; without any,
    the processor is recorded.
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
    """Installed version of each package in `PACKAGES`, read without importing it."""
    found = {"finetune": __version__} | {name: _installed(name) for name in PACKAGES}
    return {name: version for name, version in found.items() if version is not None}


@functools.cache
def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's name and the number of logical cores that this process may use."""
    name = platform.processor() or platform.machine()
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", facts.read_text(errors="replace"), re.M)
        name = found[1].strip() if found else name
    return f"{name} ({usable_cores()} cores)"


def commit(folder: Path) -> str | None:
    """Commit of the git work tree around a folder, with `-dirty` if tracked files differ."""
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty"]
    command += ["--exclude", "*"]  # the hash alone, never a tag's name
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def without_secrets(command: Sequence[str]) -> list[str]:
    """A command line with values that look like a token or password replaced by `***`.

    Covers `--hf-token X`, `--token=X`, `tracker.api_key=X`, and everything that `hide` covers.
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
    """A text with common tokens and the passwords of URLs replaced by `***`."""
    text = _PASSWORD_OF_URL.sub(rf"\1:{_HIDDEN}@", _TOKEN_OF_URL.sub(_HIDDEN, text))
    text = _OF_QUERY.sub(rf"\1{_HIDDEN}", text)
    return _SECRET_SHAPE.sub(_HIDDEN, _BEARER.sub(rf"\1 {_HIDDEN}", text))


_OF_A_MACHINE = re.compile(r"(?:/|~|\.{1,2}/|file:|[A-Za-z]:[\\/])")
"""Start of a local path."""


def public(value: Any) -> Any:
    """A recipe value for a public page: no secrets, and only the last part of a local path."""
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
