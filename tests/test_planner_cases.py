"""The published and measured cases, where they are at hand."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_every_bound_holds_on_the_public_cases(assets: Path) -> None:
    cases = assets.parent / "plan_cases.json"
    if not cases.is_file():
        pytest.skip("no plan_cases.json beside the assets")
    done = subprocess.run(
        [sys.executable, "benchmarks/plan_cases.py", str(cases)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "MISSED" not in done.stdout, done.stdout
    assert done.returncode == 0, done.stderr


def test_a_missed_bound_is_exit_status_1(tmp_path: Path) -> None:
    case = (
        '{"public": [{"id": "nf4/wrong", "category": "nf4", "expected": 5.0, "tolerance": '
        '{"rel": 0.01}, "inputs": {"blocksize": 64, "double_quant": true}}]}'
    )
    path = tmp_path / "cases.json"
    path.write_text(case)
    done = subprocess.run(
        [sys.executable, "benchmarks/plan_cases.py", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "MISSED" in done.stdout
