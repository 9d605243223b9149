"""The published and measured cases, where they are at hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


MIXTRAL = {"model": "mixtral-8x7b", "gpus": 8, "strategy": "fsdp_full"}


@pytest.mark.parametrize(
    ("expected", "tolerance", "within", "error"),
    [
        ("62G", {}, True, 0),
        ("65G", {}, False, 3 / 65),
        ("65G", {"rel": 0.05}, True, 3 / 65),
        ("31G", {"rel": 0.05}, False, 1),
        ("62", {"rel": 0.05}, False, 1),
        ("OOM", {"rel": 0.05}, False, 1),
    ],
)
def test_a_size_is_a_number_of_gigabytes_and_held_to_its_tolerance(
    expected: str, tolerance: dict[str, float], within: bool, error: float, tmp_path: Path
) -> None:
    case = {"category": "measured_peak", "expected": {"accum1": expected}, "inputs": MIXTRAL}
    found = outcomes(tmp_path, case | {"tolerance": tolerance})[0]
    assert (found["within"], found["error"]) == (within, pytest.approx(error))


def test_nine_of_ten_measured_peaks_are_within_their_own_tolerance(tmp_path: Path) -> None:
    """Within 10 %, as all must be, and yet not within what the case allows."""
    case = {"category": "measured_peak", "expected": {"accum1": "65G"}, "inputs": MIXTRAL}
    path = tmp_path / "cases.json"
    for tolerance, status in (({"rel": 0.05}, 0), ({"rel": 0.01}, 1)):
        path.write_text(json.dumps([{"id": "one", "tolerance": tolerance} | case]))
        done = subprocess.run(
            [sys.executable, "benchmarks/plan_cases.py", str(path)],
            cwd=ROOT,
            capture_output=True,
            check=False,
        )
        assert done.returncode == status


def outcomes(tmp_path: Path, *cases: dict[str, object]) -> list[dict[str, Any]]:
    """What the benchmark makes of cases of this schema."""
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([{"id": "one", "tolerance": {"rel": 0.001}} | c for c in cases]))
    done = subprocess.run(
        [sys.executable, "benchmarks/plan_cases.py", str(path), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["cases"]


LLAMA = {"h": 4096, "L": 32, "a": 32, "kv": 8, "f": 14336, "V": 128256}
P = 8_030_261_248


def test_a_case_that_cannot_be_evaluated_is_missed_and_hides_no_other(tmp_path: Path) -> None:
    odd = {"category": "nf4", "expected": 1, "inputs": {"params": "many"}}
    good = {"category": "param_count", "expected": P, "inputs": {"cfg": LLAMA}}
    found = outcomes(tmp_path, odd, good)
    assert [case["within"] for case in found] == [False, True]
    assert found[0]["problem"].startswith("TypeError")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"h": 1600, "L": 48, "a": 25, "f": 6400, "V": 50257, "arch": "gpt2"}, 1_557_611_200),
        (
            {"h": 2304, "L": 26, "a": 8, "kv": 4, "f": 9216, "V": 256000, "hd": 256,
             "arch": "gemma2"}, 2_614_341_888,
        ),
        (
            {"h": 2048, "L": 48, "a": 32, "kv": 4, "f": 768, "V": 151936, "hd": 128, "E": 128,
             "k": 8, "arch": "qwen3"}, 30_532_122_624,
        ),
    ],
)  # fmt: skip
def test_a_short_config_means_its_family(
    config: dict[str, object], expected: int, tmp_path: Path
) -> None:
    case = {"category": "param_count", "expected": expected, "inputs": {"cfg": config}}
    assert outcomes(tmp_path, case)[0]["within"]


def test_hybrid_sharding_is_described_by_its_groups_or_by_all_processes(tmp_path: Path) -> None:
    shared = {"params": P, "strategy": "hsdp", "accum": 1, "trainable": "all"}
    shared |= {"param_bytes": 2, "grad_bytes": 2}
    expected = {"intra": 3 * 2 * P * 7 / 8, "inter": 2 * 2 * P / 8 / 2}
    ways = ({"shard": 8, "replicas": 2}, {"dp": 16, "shard_size": 8}, {"dp": 16, "replicas": 2})
    found = outcomes(tmp_path, *(
        {"category": "comm_volume", "expected": expected, "inputs": shared | way} for way in ways
    ))  # fmt: skip
    assert all(case["within"] for case in found)


def test_qlora_and_eight_bits_are_known_by_each_of_their_names(tmp_path: Path) -> None:
    run = {
        "model": "llama2-7b", "b": 1, "s": 1024, "r": 8, "ckpt": True, "unit": "GB",
        "metric": "allocated",
    }  # fmt: skip
    modes = ("qlora", "qlora_nf4-dq", "lora")
    updates = ("adamw8bit", "AdamW_8bit", "adamw")
    found = outcomes(tmp_path, *(
        {"category": "measured_peak", "expected": 1, "inputs": run | {"mode": mode}}
        for mode in modes
    ), *(
        {"category": "measured_peak", "expected": 1, "inputs": run | {"optimizer": update}}
        for update in updates
    ))  # fmt: skip
    peaks = [case["predicted"] for case in found]
    assert peaks[0] == peaks[1] < peaks[2]
    assert peaks[3] == peaks[4] < peaks[5]
