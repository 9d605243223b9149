"""What the tests of a session share is made once, and never taken for finished when it is not."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conftest import ROOT, once

MAKE = """
import os, pathlib, sys, time
from made_once import once

def make(place):
    place.mkdir(parents=True)
    (place / "half").touch()
    if "die" in sys.argv:
        os._exit(9)
    time.sleep(0.2)
    (place / "half").rename(place / f"whole-{os.getpid()}")

once(pathlib.Path(sys.argv[1]), make)
"""


def made(place: Path, *words: str) -> int:
    command = [sys.executable, "-c", MAKE, str(place), *words]
    return subprocess.run(command, cwd=ROOT / "tests", check=False, timeout=120).returncode


def test_what_an_interrupted_suite_left_is_made_again(tmp_path: Path) -> None:
    place = tmp_path / "run"
    assert made(place, "die") == 9
    assert [path.name for path in place.iterdir()] == ["half"]
    assert made(place) == 0
    (whole,) = place.iterdir()
    assert whole.name.startswith("whole-")
    assert once(place, lambda _: 1 / 0) == place


def test_workers_that_need_the_same_run_make_it_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(made, [tmp_path / "run"] * 3)) == [0, 0, 0]
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_suites_at_once_have_folders_of_their_own(shared: Path, tmp_path_factory) -> None:
    """pytest numbers the folder of a session, and the shared one is in it."""
    base = tmp_path_factory.getbasetemp()
    assert shared.parent == (base.parent if base.name.startswith("popen-") else base)
