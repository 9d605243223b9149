"""A damaged checkpoint is never continued: an intact one is, or the error says what to do."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Finetune, Tiny, start, wait_for, write_recipe
from test_backends import losses
from test_interruption import steps_made

from finetune.integrity import FORMAT, damage, newest_intact
from finetune.run import Run


@pytest.fixture(scope="session")
def trained(tiny: Tiny, finetune: Finetune, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six steps, saved after three and six."""
    root = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(root / "r.json", tiny.fields())
    run = Run(root / "run")
    assert finetune("train", recipe, "--precision", "fp32", "--output", run.root).status == 0
    return run


@pytest.fixture
def run(trained: Run, tmp_path: Path) -> Run:
    """A copy without its result, so that it is not complete."""
    shutil.copytree(trained.root, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    return Run(tmp_path / "run")


def resume(finetune: Finetune, trained: Run, run: Run, *words: str) -> tuple[int, str]:
    recipe = trained.root.parent / "r.json"
    done = finetune("train", recipe, "--precision", "fp32", "--output", run.root, *words)
    assert "Traceback" not in done.output
    return done.status, done.stderr


def state_of(run: Run, step: int) -> Path:
    return next((run.checkpoint(step) / "state").iterdir())


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def tear(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (flip_a_bit, "damaged, its sha256 is not that of the manifest"),
    "torn": (tear, "damaged, "),
    "gone": (Path.unlink, "missing, though the manifest lists it"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_newest_intact_checkpoint_continues(
    finetune: Finetune, trained: Run, run: Run, kind: str
) -> None:
    harm, told = DAMAGE[kind]
    harm(state_of(run, 6))
    status, stderr = resume(finetune, trained, run, "--resume")
    assert status == 0
    assert f"warning: {run.checkpoint(6)}: damaged: {run.checkpoint(6) / 'state'}" in stderr
    assert told in stderr
    assert "renamed to damaged-step-00000006, going on from step 3" in stderr
    assert losses(run) == losses(trained)
    assert run.steps() == [3, 6]
    assert newest_intact(run) == (6, {})


def test_where_nothing_is_intact_the_error_says_what_to_do(
    finetune: Finetune, trained: Run, run: Run
) -> None:
    for step in (3, 6):
        flip_a_bit(state_of(run, step))
    status, stderr = resume(finetune, trained, run, "--resume", "auto")
    assert status == 2
    assert stderr.splitlines()[-1] == (
        f"error: {run.root}: no checkpoint is intact; restore one from a copy, or remove "
        f"{run.checkpoints} and start anew without --resume"
    )
    assert run.steps() == [3, 6]  # nothing was touched


def rewrite(run: Run, number: int, **changes: object) -> None:
    path = run.checkpoint(number) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_another_versions_format_is_refused_and_not_taken_for_damage(
    finetune: Finetune, trained: Run, run: Run
) -> None:
    rewrite(run, 6, format=FORMAT + 1)
    status, stderr = resume(finetune, trained, run, "--resume")
    assert status == 2
    assert stderr == (
        f"error: {run.checkpoint(6)}/manifest.json: a checkpoint of format {FORMAT + 1}, this "
        f"version reads format {FORMAT}; continue it with the version of finetune in its "
        "environment.json, or start anew in another --output\n"
    )


ENTRY = {"bytes": 1, "sha256": ""}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"files": {"../../recipe.json": ENTRY}}, "leaves the checkpoint's folder"),
        ({"files": {"/etc/passwd": ENTRY}}, "leaves the checkpoint's folder"),
        ({"files": []}, "files: expected keys and values, got []"),
        ({"step": "6"}, "step: got '6', progress has 6"),
        ({"shapes": {"w": "3"}}, "shapes: w: got '3', expected sizes"),
        ({"format": None}, "no format: it is no manifest of a checkpoint"),
    ],
)  # fmt: skip
def test_a_manifest_that_is_none_is_damage(run: Run, changes: dict[str, object], told: str) -> None:
    rewrite(run, 6, **changes)
    assert told in "\n".join(damage(run.checkpoint(6)))


def test_a_recipe_with_other_mathematics_is_refused_by_its_fields(
    finetune: Finetune, trained: Run, run: Run
) -> None:
    status, stderr = resume(
        finetune, trained, run, "--resume", "optim.lr=0.5", "batch.micro_rows=4", "max_steps=9",
        "saving.keep=9", "backend=ddp",
    )  # fmt: skip
    assert status == 2
    assert "They differ in optim.lr: 0.001 -> 0.5. Free to change are backend, batch.m" in stderr


def test_two_runs_in_one_directory_are_refused(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=4000))
    words = ["train", str(recipe), "--precision", "fp32", "--output", str(tmp_path / "run")]
    first = start(words, tmp_path)
    wait_for(lambda: steps_made(Run(tmp_path / "run")) > 0, first)
    second = finetune(*words, "--resume", "auto")
    first.kill()
    first.communicate()
    assert second.status == 2
    assert second.stderr == (
        f"error: {tmp_path / 'run'}: process {first.pid} on {os.uname().nodename} trains in it; "
        "wait for its end, or choose another --output\n"
    )


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "read-only"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a read-only file system cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_directory_that_cannot_be_written_is_told(
    tiny: Tiny, finetune: Finetune, tmp_path: Path, read_only: Path
) -> None:
    recipe = write_recipe(tmp_path / "r.json", tiny.fields())
    done = finetune("train", recipe, "--output", read_only / "run")
    assert (done.status, done.stderr) == (
        2,
        f"error: {read_only / 'run'}: no directory for a run (Read-only file system); choose "
        "another --output\n",
    )


def test_a_disk_too_small_is_told_before_the_first_step(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        recipe = write_recipe(tmp_path / "r.json", tiny.fields(saving={"every": 1, "keep": 5}))
        done = finetune("train", recipe, "--precision", "fp32", "--output", place / "run")
        assert done.status == 2
        assert "free, the checkpoints to come take up to" in done.stderr
        assert "make room, choose another --output, or lower saving.keep" in done.stderr
        assert steps_made(Run(place / "run")) == 0
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_rehearsal_writes_and_reads_back_the_real_state(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    fields = tiny.fields(saving={"every": 3, "rehearse": True})
    recipe = write_recipe(tmp_path / "r.json", fields)
    done = finetune("train", recipe, "--precision", "fp32", "--output", tmp_path / "run")
    assert done.status == 0
    names = [line.split("  ")[0].strip() for line in done.stdout.splitlines()[:5]]
    assert names == ["ranks", "memory", "disk", "start", "rehearsal"]
    assert done.stdout.splitlines()[4].endswith("s, equal")
    assert not (tmp_path / "run" / ".rehearsal").exists()
