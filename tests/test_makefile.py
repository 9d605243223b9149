"""The Makefile: what its targets are, and which PyTorch it installs where."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

(TORCH,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
REST = "-m pip install --no-compile -c constraints.txt -e .[dev]"
LOCAL_CPU = f"-m pip install --no-compile --no-deps --no-index torch=={TORCH}+cpu"
INDEX_CPU = (
    "-m pip install --no-compile --no-deps --index-url https://download.pytorch.org/whl/cpu "
    f"--timeout 15 --retries 2 torch=={TORCH}+cpu"
)
PLAIN = f"-m pip install --no-compile --no-deps torch=={TORCH}"
CUDA = f"-m pip install --no-compile --no-deps torch==={TORCH}"
ROCM = f"for this machine's AMD GPU: make setup TORCH=torch=={TORCH}+rocm..."

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="chooses between builds for Linux")


@pytest.fixture
def checkout(tmp_path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(folder: Path, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run make as a person does, not as a part of the make that may have started these tests."""
    inherited = ("MAKE", "MFLAGS", "COVERAGE", "ARGS", "WORKERS")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(inherited)}
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        ["make", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def executable(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_help_lists_every_target_and_train_and_plan_are_one_command_each():
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = make(ROOT).stdout
    assert set(re.findall(r"^  make ([a-z-]+) +\S", shown, re.MULTILINE)) == set(targets.split())
    assert shown == make(ROOT, "help").stdout
    words = ["RECIPE=qwen3_0_6b_lora", "BACKEND=zero2", "PROCESSES=4", "ARGS=optim.lr=1e-4"]
    for target, verb in (("train", "launch"), ("plan", "plan")):
        command = make(ROOT, "-n", target, *words).stdout.splitlines()[-1]
        expected = f"finetune {verb} qwen3_0_6b_lora optim.lr=1e-4 --backend zero2 --processes 4"
        assert command == f".venv/bin/{expected}"


def test_a_test_that_hangs_fails_with_its_stack(tmp_path):
    (tmp_path / "test_hangs.py").write_text(
        "import time\ndef test_before(): pass\ndef test_hangs(): time.sleep(600)\n"
    )
    words = f"-c pyproject.toml -p no:cacheprovider -o faulthandler_timeout=0.5 {tmp_path}"
    command = make(ROOT, "-n", "test", "WORKERS=1", f"ARGS={words}").stdout.splitlines()[-1]
    done = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "1 failed, 1 passed" in done.stdout
    assert "line 3 in test_hangs" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train BACKEND=ddp", ["name a recipe: make train RECIPE=quickstart"]),
        (
            "setup PYTHON=./old-python",
            ["needs Python 3.11 or newer", "./old-python", "make setup PYTHON=/path/to/python3"],
        ),
    ],
)
def test_what_is_missing_is_named_with_the_way_out_before_setup(checkout, words, told):
    executable(checkout / "old-python", "exit 1")
    result = make(checkout, *words.split())
    assert (result.returncode, [each for each in told if each not in result.stderr]) == (2, [])
    assert not (checkout / ".venv/.ready").exists()


def test_an_interrupted_set_up_starts_again_and_one_that_is_at_work_is_left_alone(checkout):
    ended = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True)
    (checkout / ".venv").mkdir()
    (checkout / ".venv/.unfinished").write_text(ended.stdout)
    (checkout / ".venv/half-written").touch()
    result = make(checkout, "setup", "PYTHON=/no/such/python")
    assert "the last set-up did not finish" in result.stdout
    assert not (checkout / ".venv").exists()
    (checkout / ".venv").mkdir()
    (checkout / ".venv/.unfinished").write_text(f"{os.getpid()}\n")
    result = make(checkout, "setup")
    assert result.returncode == 2
    assert f"process {os.getpid()} is setting up .venv" in result.stderr
    assert (checkout / ".venv/.unfinished").exists()


def installed(checkout: Path, *words: str, gpu: bool, reachable: str) -> tuple[list[str], str]:
    """What set-up asks of pip on a machine with or without a GPU, and what it says.

    pip is stood in for by a script that writes down its words, and that fails for every build of
    PyTorch but the reachable one.
    """
    executable(checkout / "bin/nvidia-smi", "echo 'GPU 0: ...'" if gpu else "exit 9")
    executable(
        checkout / ".venv/bin/python",
        f"""[ "$*" = "-m pip --version" ] && exit 0
        echo "$*" >>pip.log
        case "$*" in *torch*) [ "$*" = "{reachable}" ];; esac""",
    )
    result = make(checkout, "setup", *words, path=checkout / "bin")
    assert result.returncode == 0, result.stderr
    assert (checkout / ".venv/.ready").exists()
    assert not (checkout / ".venv/.unfinished").exists()
    return (checkout / "pip.log").read_text().splitlines(), result.stdout


@on_linux
@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("AMD=absent", [CUDA]),
        ("AMD=absent", [LOCAL_CPU]),
        ("AMD=absent", [LOCAL_CPU, INDEX_CPU]),
        ("AMD=kfd", [LOCAL_CPU, INDEX_CPU, PLAIN]),
        (f"TORCH=torch=={TORCH}+cu126", [f"{PLAIN}+cu126"]),
    ],
    ids=["CUDA", "CPU build that pip knows", "PyTorch's own index", "no CPU build", "asked for"],
)
def test_a_machine_gets_the_build_of_pytorch_that_fits_it(checkout, words, asked):
    """A GPU that can be used decides, then the builds in this order; a line says how for AMD."""
    (checkout / "kfd").touch()
    gpu = LOCAL_CPU not in asked
    pips, said = installed(checkout, *words.split(), gpu=gpu, reachable=asked[-1])
    assert pips == [*asked, REST, "-m compileall -qq -j 0 .venv/lib finetune recipes"]
    assert (ROCM in said) == ("kfd" in words)


def test_benchmarks_on_gpus_end_within_45_minutes():
    command = make(ROOT, "-n", "bench-gpu").stdout
    limits = re.findall(r"timeout --signal=INT (\d+)m \S+ -m benchmarks", command)
    assert sum(map(int, limits)) == 45
    assert len(limits) == command.count("-m benchmarks") == 2


def test_gpus_are_traced_with_the_newest_and_the_lowest_pytorch(checkout):
    """Each in an environment of its own, whose constraints name no PyTorch and no setuptools.

    setuptools of `constraints.txt` is newer than PyTorch 2.11 allows.
    """
    (lowest,) = re.findall(r'"torch>=([^"]+)"', (ROOT / "pyproject.toml").read_text())
    executable(
        checkout / ".venv/bin/python",
        """echo "$*" >>pip.log
        [ "$2" = venv ] || exit 0
        mkdir -p "$3/bin"; printf '#!/bin/sh\\necho "$0 $*" >>pip.log' >"$3/bin/python"
        chmod +x "$3"/bin/python""",
    )
    (checkout / ".venv/.ready").touch()
    result = make(checkout, "test-cuda-trace", "ARGS=-x")
    assert result.returncode == 0, result.stderr
    log = (checkout / "pip.log").read_text()
    versions = re.findall(r"torch==(\S+)", log)
    assert versions[1:] == [f"{lowest}.0"]
    traced = [f".cuda-trace/{version}" for version in versions]
    assert [each for each in log.splitlines() if "pytest tests" in each] == [
        f"{place}/bin/python -m pytest tests/cuda_trace -x" for place in traced
    ]
    for place in traced:
        kept = (checkout / place / "constraints.txt").read_text()
        assert f"-c {place}/constraints.txt torch==" in log
        assert re.findall(r"^(torch|setuptools)==", kept, re.MULTILINE) == []
        assert "\ntransformers==" in kept


@on_linux
def test_set_up_is_done_once_and_again_when_a_pin_changes(checkout):
    once, _ = installed(checkout, gpu=False, reachable=LOCAL_CPU)
    assert "Nothing to be done" in make(checkout, "setup").stdout
    later = (checkout / ".venv/.ready").stat().st_mtime + 10
    os.utime(checkout / "constraints.txt", (later, later))
    assert installed(checkout, gpu=False, reachable=LOCAL_CPU)[0] == once * 2
