"""Compile C and C++ code for the CPU of this machine on first use, and cache the library."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._subclasses import FakeTensor

from finetune.cache import cache
from finetune.runs.run import replacing

COMPILERS = {".c": ("gcc", "clang", "cc"), ".cpp": ("g++", "clang++", "c++")}
LANGUAGES = {".c": "C", ".cpp": "C++"}
FLAGS = (
    "-O3", "-march=native", "-fPIC",
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)  # fmt: skip
SECONDS = 120


class CannotCompile(Exception):
    """The code cannot be compiled on this machine; the message has the reason."""


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether C can read a tensor's numbers: not those of a GPU, nor of a trace, which has none."""
    return tensor.is_cpu and not isinstance(tensor, FakeTensor)


def compiled(
    source: Path, flags: Sequence[str], libraries: Sequence[str] = (), version: str = ""
) -> ctypes.CDLL:
    """Load the functions of a source file, from the cache or compiled now.

    Args:
        source: C or C++ file.
        flags: Compiler flags in addition to `FLAGS`.
        libraries: Linker flags.
        version: Version of headers that do not belong to the compiler.

    Raises:
        CannotCompile: with the reason.
    """
    names = COMPILERS[source.suffix]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise CannotCompile(f"this machine has no {LANGUAGES[source.suffix]} compiler")
    words = [compiler, *FLAGS, *flags]
    with tempfile.TemporaryDirectory(prefix="finetune-") as scratch:
        made = _made(source, words, [*libraries, "-lm"], version, Path(scratch))
        try:
            return ctypes.CDLL(str(made))
        except OSError as error:
            raise CannotCompile(f"the library from {compiler} cannot be loaded ({error})") from None


def _made(
    source: Path, words: Sequence[str], libraries: Sequence[str], version: str, scratch: Path
) -> Path:
    """The library of a source file for exactly this CPU, from the cache or compiled now."""
    # The compiler's verbose output shows what -march=native means on this CPU.
    language = "c" if source.suffix == ".c" else "c++"
    said = _run([*words, "-E", "-v", "-x", language, os.devnull]).stderr
    headers = sorted(source.parent.glob("*.h"))
    told = b"".join(each.read_bytes() for each in (source, *headers))
    told += f"{said}{libraries}{version}".encode()
    name = f"{source.stem}-{hashlib.sha256(told).hexdigest()[:16]}.so"
    kept = cache("compiled") / name
    if kept.exists():
        return kept
    # Not linked with an OpenMP library: PyTorch has loaded one, and two would not share threads.
    unlinked, made = scratch / f"{source.stem}.o", scratch / name
    _run([*words, "-c", str(source), "-o", str(unlinked)])
    _run([words[0], "-shared", str(unlinked), "-o", str(made), *libraries])
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with replacing(kept) as own:
            shutil.copyfile(made, own)
    except OSError:  # a full or read-only disk: this process can still use it
        return made
    return kept


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        words = (error.stderr.strip().splitlines() or [f"status {error.returncode}"])[0]
        raise CannotCompile(f"{command[0]} failed: {words}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{command[0]} did not run ({error})") from None
