"""A damaged checkpoint is never continued: an intact one is, or the error says what to do."""

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import Finetune, Finished, Tiny, start, wait_for, write_recipe
from safetensors.torch import load_file, save_file
from test_backends import losses
from test_interruption import steps_made

from finetune.checkpoints import base_weights
from finetune.data import scratch
from finetune.errors import FinetuneError
from finetune.exporters.publish import publish
from finetune.recipe import Model
from finetune.runs.manifest import FORMAT, OtherFormat, damage, newest_intact, read_manifest, sealed
from finetune.runs.run import Run


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
    "flipped": (flip_a_bit, "damaged, its sha256 does not match the manifest"),
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
    assert "renamed to damaged-step-00000006, resuming from step 3" in stderr
    assert losses(run) == losses(trained)
    assert run.steps() == [3, 6]
    assert newest_intact(run) == (6, {})


def test_without_an_intact_checkpoint_the_error_names_a_way_out(
    finetune: Finetune, trained: Run, run: Run
) -> None:
    for step in (3, 6):
        flip_a_bit(state_of(run, step))
    status, stderr = resume(finetune, trained, run, "--resume", "auto")
    assert status == 2
    assert stderr.splitlines()[-1] == (
        f"error: {run.root}: no checkpoint is intact; restore one from a copy, or remove "
        f"{run.checkpoints} and start again without --resume"
    )
    assert run.steps() == [3, 6]  # nothing was touched


def reseal(folder: Path, **changes: object) -> None:
    """Change a manifest as if it had been written so; None takes a key out."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | changes
    kept = {key: value for key, value in manifest.items() if value is not None}
    path.write_text(json.dumps(sealed(kept)))


def test_a_checkpoint_of_another_recipe_is_set_aside(
    finetune: Finetune, trained: Run, run: Run
) -> None:
    recipe = json.loads((run.checkpoint(6) / "manifest.json").read_text())["recipe"]
    reseal(run.checkpoint(6), recipe=recipe | {"seed": 99})
    status, stderr = resume(finetune, trained, run, "--resume")
    assert status == 0
    assert (
        f"warning: {run.checkpoint(6)}: damaged: it belongs to the run of another recipe; they "
        f"differ in seed: 99 -> {recipe['seed']}; renamed to damaged-step-00000006, resuming from "
        "step 3" in stderr
    )
    assert losses(run) == losses(trained)


def test_a_checkpoint_under_the_name_of_another_step_is_never_continued(
    finetune: Finetune, trained: Run, run: Run
) -> None:
    shutil.rmtree(run.checkpoint(6))
    run.checkpoint(3).rename(run.checkpoint(5))
    status, stderr = resume(finetune, trained, run, "--resume")
    assert status == 2
    assert "it is the checkpoint of step 3, in the folder of another" in stderr
    assert run.steps() == [5]


def test_a_manifest_without_a_recipe_is_continued(
    finetune: Finetune, trained: Run, run: Run
) -> None:
    shutil.rmtree(run.checkpoint(6))
    reseal(run.checkpoint(3), recipe=None)
    assert resume(finetune, trained, run, "--resume") == (0, "")
    assert losses(run) == losses(trained)


def test_the_damaged_manifest_of_a_complete_run_is_set_aside(
    finetune: Finetune, trained: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(trained.root, tmp_path / "run"))
    (run.checkpoint(6) / "manifest.json").write_bytes(b"")
    status, stderr = resume(finetune, trained, run, "--resume", "auto")
    assert status == 0
    assert "renamed to damaged-step-00000006, resuming from step 3" in stderr
    assert losses(run) == losses(trained)


def test_a_kill_between_the_last_record_and_the_card_is_finished_by_the_next_start(
    finetune: Finetune, trained: Run, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(trained.root, tmp_path / "run"))
    card = (run.final / "README.md").read_text()
    (run.final / "README.md").unlink()
    recipe = trained.root.parent / "r.json"
    words = ("launch", recipe, "--backend", "single", "--precision", "fp32", "--output", run.root)
    done = finetune(*words, "--resume", "auto", plot=True)
    assert (done.status, done.stdout) == (0, f"{run.root}: complete, nothing to resume\n")
    assert (run.final / "README.md").read_text() == card
    assert run.loss_plot.read_bytes().startswith(b"\x89PNG")


def test_a_damaged_best_checkpoint_is_not_published(run: Run) -> None:
    step = run.best_step()
    assert step is not None
    weights = run.checkpoint(step) / "model" / "model.safetensors"
    flip_a_bit(weights)
    with pytest.raises(FinetuneError, match=f"{weights}: damaged, its sha256 does not match"):
        publish(run)
    assert not run.final.exists()


def test_a_kill_between_a_checkpoint_and_its_best_json_loses_nothing(
    finetune: Finetune, trained: Run, run: Run
) -> None:
    right = trained.best.read_text()
    for torn in ('{"step": 3, "loss": 9.5}', '{"st', None):
        shutil.rmtree(run.final, ignore_errors=True)
        run.best.unlink()
        if torn is not None:
            run.best.write_text(torn)
        status, stderr = resume(finetune, trained, run, "--resume")
        assert (status, run.best.read_text()) == (0, right), stderr


def test_a_torn_best_json_is_reported(finetune: Finetune, run: Run, tmp_path: Path) -> None:
    run.best.write_text('{"st')
    done = finetune("export", run.root, "--to", tmp_path / "out")
    assert done.status == 2
    assert f"{run.best}: cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_other_folders_next_to_checkpoints_are_left_alone(run: Run) -> None:
    shutil.copytree(run.checkpoint(3), run.checkpoints / "step-personal")
    assert run.steps() == [3, 6]


def rewrite(run: Run, number: int, **changes: object) -> None:
    path = run.checkpoint(number) / "manifest.json"
    manifest = json.loads(path.read_text()) | changes
    del manifest["sha256"]  # as one of an older version
    path.write_text(json.dumps(manifest))


def test_another_versions_format_is_refused_and_not_taken_for_damage(
    finetune: Finetune, trained: Run, run: Run
) -> None:
    rewrite(run, 6, format=FORMAT + 1)
    status, stderr = resume(finetune, trained, run, "--resume")
    assert status == 2
    assert stderr == (
        f"error: {run.checkpoint(6)}/manifest.json: a checkpoint of format {FORMAT + 1}, this "
        f"version reads formats 1 and {FORMAT}; continue it with the version of finetune in its "
        "environment.json, or start again in another --output\n"
    )


def test_every_flipped_bit_of_a_manifest_is_found(run: Run) -> None:
    path = run.checkpoint(6) / "manifest.json"
    good = path.read_bytes()
    unharmed = json.loads(good)
    for place in range(0, len(good), 7):
        content = bytearray(good)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        try:
            assert damage(run.checkpoint(6)) or json.loads(content) == unharmed, place
        except OtherFormat:
            assert b'"format"' in good[place - 12 : place]


def other_precision(finetune: Finetune, trained: Run, run: Run, verb: str) -> Finished:
    recipe = trained.root.parent / "r.json"
    words = ["--precision", "bf16", "--output", run.root, "--resume", "auto"]
    return finetune(verb, recipe, *words)


@pytest.mark.parametrize("verb", ["train", "launch"])
def test_a_run_is_not_continued_in_another_precision(
    finetune: Finetune, trained: Run, run: Run, verb: str
) -> None:
    done = other_precision(finetune, trained, run, verb)
    assert (done.status, done.stderr) == (
        2,
        f"error: {run.root}: trained in fp32; bf16 would change its results; continue it with "
        "--precision fp32, or choose another --output\n",
    )
    shutil.copytree(trained.final, run.final)
    assert other_precision(finetune, trained, run, verb).stderr == done.stderr  # complete too


ENTRY = {"bytes": 1, "sha256": ""}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"files": {"../../recipe.json": ENTRY}}, "is outside the checkpoint's folder"),
        ({"files": {"/etc/passwd": ENTRY}}, "is outside the checkpoint's folder"),
        ({"files": {"a" * 300: ENTRY}}, "missing, though the manifest lists it"),
        ({"files": []}, "files: expected keys and values, got []"),
        ({"step": "6"}, "step: got '6', progress has 6"),
        ({"shapes": {"w": "3"}}, "shapes: w: got '3', expected sizes"),
        ({"format": None}, "no format: it is not a checkpoint's manifest"),
    ],
)  # fmt: skip
def test_an_invalid_manifest_counts_as_damage(
    run: Run, changes: dict[str, object], told: str
) -> None:
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
    assert "They differ in optim.lr: 0.001 -> 0.5. Fields that may change: backend, " in stderr


def rows_and_tokens(run: Run, split: str) -> str:
    counts = json.loads(run.data.read_text())[split]
    return f"{counts['documents']} rows of {counts['tokens']:,} tokens"


def test_a_run_goes_on_with_its_own_data_only(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    data, held = tmp_path / "data.jsonl", tmp_path / "eval.jsonl"
    lines, others = tiny.data.read_text().splitlines(), tiny.eval_data.read_text().splitlines()
    data.write_text("\n".join(lines))
    held.write_text("\n".join(others))
    fields = tiny.fields(
        data=[{"source": str(data), "format": "messages"}],
        eval_data=[{"source": str(held), "format": "messages"}],
    )
    recipe, run = write_recipe(tmp_path / "r.json", fields), Run(tmp_path / "run")
    words = ("train", recipe, "--precision", "fp32", "--output", run.root)
    assert finetune(*words, "max_steps=3").status == 0
    record = run.data.read_text()
    then = {split: rows_and_tokens(run, split) for split in ("train", "eval")}

    def refused(now_train: list[str], now_eval: list[str]) -> str:
        data.write_text("\n".join(now_train))
        held.write_text("\n".join(now_eval))
        done = finetune(*words, "--resume")
        assert done.status == 2
        assert run.steps() == [3]
        assert run.data.read_text() == record
        begin = f"error: {run.root}: the data is not that of the run: "
        end = "; restore the old data, or choose another --output\n"
        assert done.stderr.startswith(begin)
        assert done.stderr.endswith(end)
        return done.stderr.removeprefix(begin).removesuffix(end)

    fewer = refused(lines[:30], others)
    assert fewer.startswith(f"to train on {then['train']} then, 30 rows of ")
    assert fewer.endswith(" tokens now")
    swapped = refused([lines[1], lines[0], *lines[2:]], [*others[:-1], others[0]])
    assert swapped.startswith(
        f"to train on {then['train']}, but different ones; to evaluate on {then['eval']} then, 8 "
    )
    # What may change does not change the rows; and a manifest from before says nothing of them.
    data.write_text("\n".join(lines))
    held.write_text("\n".join(others))
    free = ("batch.micro_rows=4", "max_steps=4", "saving.every=1", "data_checks=report")
    assert finetune(*words, "--resume", *free).status == 0
    assert run.steps() == [3, 4]
    manifest = json.loads((run.checkpoint(4) / "manifest.json").read_text())
    assert manifest["progress"].pop("data")["train"]["documents"] == 48
    rewrite(run, 4, progress=manifest["progress"])
    data.write_text("\n".join(lines[:30]))
    assert finetune(*words, "--resume", "max_steps=5").status == 0


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
        f"error: {tmp_path / 'run'}: in use by process {first.pid} on {os.uname().nodename}; "
        "wait until it ends, or choose another --output\n"
    )


def test_the_lock_of_another_host_reports_its_last_write(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=1))
    run = tmp_path / "run"
    run.mkdir()
    lock = run / "run.lock"
    lock.write_text("process 7 on node-gone\n")
    os.utime(lock, (time.time() - 7200,) * 2)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        words = ("train", recipe, "--precision", "fp32", "--output", run)
        refused = finetune(*words)
        assert refused.status == 2
        assert refused.stderr == (
            f"error: {run}: in use by process 7 on node-gone; wait until it ends, or choose "
            "another --output (it last wrote 2 h 00 min ago; if that host is gone, a network "
            "disk may keep its lock: delete run.lock)\n"
        )
        lock.unlink()  # as the message says
        assert finetune(*words).status == 0


def test_a_disk_without_locks_is_reported_and_used(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    (tmp_path / "none.c").write_text(
        "#include <errno.h>\nint flock(int f, int how) { errno = ENOSYS; return -1; }\n"
    )
    library = tmp_path / "none.so"
    subprocess.run(["cc", "-shared", "-o", library, tmp_path / "none.c"], check=True)
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=1))
    words = ("train", recipe, "--precision", "fp32", "--output", tmp_path / "run")
    done = finetune(*words, env={"LD_PRELOAD": str(library)}, cold=True)
    assert done.status == 0
    assert (
        f"warning: {tmp_path}/run/run.lock: its file system has no locks (Function not "
        "implemented): a second training in this directory would not be detected\n"
    ) in done.stderr


def test_the_lock_of_a_cache_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "LOCK_SECONDS", 0.2)
    cache = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(cache, fcntl.LOCK_EX)
    with scratch.scratch_for(tmp_path / "rows") as folder:
        assert folder.is_dir()
    os.close(cache)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "read-only"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a read-only file system cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_an_unwritable_directory_is_reported(
    tiny: Tiny, finetune: Finetune, tmp_path: Path, read_only: Path
) -> None:
    recipe = write_recipe(tmp_path / "r.json", tiny.fields())
    done = finetune("train", recipe, "--output", read_only / "run")
    assert (done.status, done.stderr) == (
        2,
        f"error: {read_only / 'run'}: cannot be a run directory (Read-only file system); choose "
        "another --output\n",
    )


def test_a_disk_too_small_is_reported_before_the_first_step(
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
        assert "free, the coming checkpoints need up to" in done.stderr
        assert "free disk space, choose another --output, or lower saving.keep" in done.stderr
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
    names = [line.split("  ")[0].strip() for line in done.stdout.splitlines()[:6]]
    assert names == ["ranks", "memory", "disk", "model", "start", "rehearsal"]
    assert done.stdout.splitlines()[5].endswith("s, equal")
    assert not (tmp_path / "run" / ".rehearsal").exists()


# The base.


def scaled(path: Path) -> None:
    """Other weights of the same shapes and sizes, in every second dimension of the layers."""
    tensors = load_file(path)
    changed = {name: t * 3 if "mlp" in name else t for name, t in tensors.items()}
    save_file(changed, path, metadata={"format": "pt"})


def test_another_base_under_the_same_name_is_refused(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    fields = tiny.fields(model={"name": str(model)}, adapter={"r": 4}, saving={"every": 2})
    run, recipe = Run(tmp_path / "run"), write_recipe(tmp_path / "r.json", fields)
    words = ["train", recipe, "--precision", "fp32", "--output", run.root]
    assert finetune(*words, "max_steps=2").status == 0
    first = base_weights.fingerprint(Model(str(model)))
    assert read_manifest(run.checkpoint(2))["progress"]["base"] == first
    scaled(model / "model.safetensors")
    now = base_weights.fingerprint(Model(str(model)))
    told = (
        f"error: {run.checkpoint(2)}: its adapter was trained on different weights than {model} "
        f"has now ({first} then, {now} now): restore the old weights, or start another run\n"
    )
    for refused in (
        [*words, "max_steps=4", "--resume"],
        ["export", run.root, "--to", tmp_path / "merged", "--merge"],
        ["eval", run.root],
    ):
        done = finetune(*refused)
        assert (done.status, done.stderr[-len(told) :]) == (2, told), refused
    assert not (tmp_path / "merged").exists()
    shutil.copyfile(tiny.model / "model.safetensors", model / "model.safetensors")
    assert finetune(*words, "max_steps=4", "--resume").status == 0


def test_a_large_base_is_identified_by_a_sample_of_each_tensor(tmp_path: Path) -> None:
    """20 MB in parts: one number in the middle of a tensor, a name, a size, a part's header."""
    torch.manual_seed(0)
    parts = {
        "model-00001-of-00002.safetensors": {"a": torch.randn(2_500_000), "b": torch.randn(64)},
        "model-00002-of-00002.safetensors": {"c": torch.randn(4_500_000)},
    }
    names = {name: part for part, tensors in parts.items() for name in tensors}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    def seen(changed: dict[str, torch.Tensor]) -> str | None:
        for part, tensors in parts.items():
            save_file({name: changed.get(name, t) for name, t in tensors.items()}, tmp_path / part)
        return base_weights.fingerprint(Model(str(tmp_path)))

    first = seen({})
    middle = parts["model-00002-of-00002.safetensors"]["c"].clone()
    middle[2_250_000] += 1
    assert seen({"c": middle}) != first
    assert seen({"b": torch.zeros(64)}) != first
    assert seen({"b": torch.zeros(65)}) != first
    assert seen({}) == first
    assert base_weights.fingerprint(Model(config={"model_type": "llama"})) is None
    assert base_weights.fingerprint(Model("not/on-this-machine")) is None
