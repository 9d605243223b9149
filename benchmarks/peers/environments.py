"""A virtual environment for each peer, so that its pinned versions do not conflict with others."""

import hashlib
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
PACKAGES = {
    "trl": ["trl", "peft", "pillow"],
    "llamafactory": ["llamafactory"],
    "unsloth": ["unsloth"],
}
"""Packages of each environment; versions are in `constraints_NAME.txt`, if it exists."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS = 1800


class CannotInstall(Exception):
    """A peer could not be installed; the message is the last line of pip."""


def python_of(name: str, folder: Path) -> Path:
    """The interpreter of a peer's environment, which is created if needed.

    Raises:
        CannotInstall: pip failed.
    """
    place, pins = folder / name, HERE / f"constraints_{name}.txt"
    python, mark = place / "bin" / "python", place / ".ready"
    wanted = hashlib.sha256(
        torch.__version__.encode() + (pins.read_bytes() if pins.exists() else b"")
    ).hexdigest()
    if mark.exists() and mark.read_text() == wanted:
        return python
    print(f"installing {name} in {place} (once; minutes)", flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(place)])
    _install_torch(python)
    more = ["-c", str(pins)] if pins.exists() else []
    _pip(python, f"torch=={torch.__version__}", "psutil", *PACKAGES[name], *more)
    if name == "llamafactory" and torch.__version__.endswith("+cpu"):
        _leave_out_audio_and_vision(python)
    mark.write_text(wanted)
    return python


def _install_torch(python: Path) -> None:
    """Install the same build of torch as here; the default index would give CPUs the CUDA build."""
    wanted = f"torch==={torch.__version__}"
    if not torch.__version__.endswith("+cpu"):
        _pip(python, wanted)
        return
    try:
        _pip(python, "--no-index", wanted)  # from a folder in pip's configuration
    except CannotInstall:
        _pip(python, "--index-url", CPU_INDEX, "--timeout", "15", "--retries", "2", wanted)


def _leave_out_audio_and_vision(python: Path) -> None:
    """Remove torchvision and torchaudio, which LLaMA-Factory 0.9.5 requires in builds for CUDA.

    Text models need neither. transformers works without torchvision, and `import torchaudio` gets
    an empty module.
    """
    _run([str(python), "-m", "pip", "uninstall", "--yes", "torchvision", "torchaudio"])
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run(
        [str(python), "-c", find], capture_output=True, text=True, check=True
    ).stdout.strip()
    (Path(packages) / "torchaudio.py").write_text('"""Stands for torchaudio."""\n')


def _pip(python: Path, *words: str) -> None:
    _run([str(python), "-m", "pip", "install", "--quiet", *words])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"not installed after {SECONDS} s") from None
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise CannotInstall(said[-1] if said else f"status {done.returncode}")
