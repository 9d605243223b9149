"""A damaged checkpoint is never continued: an intact one is, or the error says what to do."""

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Train, copy_of, losses, problems_of, wait_for, write_recipe
from faulty import begin, steps_made
from safetensors.torch import load_file, save_file

import finetune as ft
from finetune import FinetuneError, Model, Run
from finetune.checkpoints import base_weights, lock
from finetune.cli import main as cli
from finetune.data import scratch
from finetune.exporters.publish import publish
from finetune.runs.manifest import FORMAT, OtherFormat, damage, newest_intact, read_manifest, sealed
from finetune.verification.proofs.runs import end, family_of


@pytest.fixture
def trained(run_of: Train) -> Run:
    """Six steps, saved after three and six."""
    return run_of()


@pytest.fixture
def run(trained: Run, tmp_path: Path) -> Run:
    """A copy without its result, so that it is not complete."""
    copy = copy_of(trained, tmp_path / "run")
    shutil.rmtree(copy.final)
    return copy


def refusal(train: Train, **given: object) -> str:
    """What a training that goes on is refused with."""
    return "\n".join(problems_of(train, **{"resume": True, **given}))


def state_of(run: Run, step: int) -> Path:
    return next((run.checkpoint(step) / "state").iterdir())


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def tear(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewrite(run: Run, number: int, /, *, seal: bool = False, **changes: object) -> None:
    """Change a manifest, as an older version wrote it unless sealed; None takes a key out."""
    path = run.checkpoint(number) / "manifest.json"
    manifest = json.loads(path.read_text()) | changes
    kept = {key: each for key, each in manifest.items() if each is not None and key != "sha256"}
    path.write_text(json.dumps(sealed(kept) if seal else kept))


def empty_the_manifest(run: Run) -> None:
    (run.checkpoint(6) / "manifest.json").write_bytes(b"")


DAMAGE: dict[str, tuple[Callable[[Run], None], str]] = {
    "flipped": (
        lambda run: flip_a_bit(state_of(run, 6)),
        "damaged: {state}: damaged, its sha256 does not match the manifest; renamed",
    ),
    "torn": (lambda run: tear(state_of(run, 6)), "damaged: {state}: damaged, "),
    "gone": (
        lambda run: state_of(run, 6).unlink(),
        "damaged: {state}: missing, though the manifest lists it; renamed",
    ),
    "of another recipe": (
        lambda run: rewrite(
            run, 6, seal=True, recipe=read_manifest(run.checkpoint(6))["recipe"] | {"seed": 99}
        ),
        "damaged: it belongs to the run of another recipe; they differ in seed: 99 -> 0; renamed",
    ),
    "an empty manifest of a complete run": (empty_the_manifest, ""),
}


@pytest.mark.parametrize(("harm", "told"), DAMAGE.values(), ids=DAMAGE.keys())
def test_the_newest_intact_checkpoint_continues(train, trained, run, capsys, harm, told):
    told = told.format(state=state_of(run, 6))
    if harm is empty_the_manifest:
        shutil.copytree(trained.final, run.final)
    harm(run)
    train(resume="auto" if run.final.exists() else True)
    stderr = capsys.readouterr().err
    assert f"warning: {run.checkpoint(6)}: {told}" in stderr.replace("/manifest.json", "")
    assert "renamed to damaged-step-00000006, resuming from step 3" in stderr
    assert (losses(run), run.steps(), newest_intact(run)) == (losses(trained), [3, 6], (6, {}))


def test_without_an_intact_checkpoint_the_error_names_a_way_out(train, run):
    for step in (3, 6):
        flip_a_bit(state_of(run, step))
    assert refusal(train, resume="auto").splitlines()[-1] == (
        f"{run.root}: no checkpoint is intact; restore one from a copy, or remove "
        f"{run.checkpoints} and start again without --resume"
    )
    assert run.steps() == [3, 6]  # nothing was touched


def test_a_checkpoint_under_the_name_of_another_step_or_of_none_is_never_continued(train, run):
    shutil.copytree(run.checkpoint(3), run.checkpoints / "step-personal")
    assert run.steps() == [3, 6]
    shutil.rmtree(run.checkpoint(6))
    run.checkpoint(3).rename(run.checkpoint(5))
    assert "it is the checkpoint of step 3, in the folder of another" in refusal(train)
    assert run.steps() == [5]


def test_a_manifest_without_a_recipe_is_continued(train, trained, run, capsys):
    shutil.rmtree(run.checkpoint(6))
    rewrite(run, 3, seal=True, recipe=None)
    train(resume=True)
    assert capsys.readouterr().err == ""
    assert losses(run) == losses(trained)


def test_a_kill_between_the_last_record_and_the_card_is_finished_by_the_next_start(
    finetune, trained, tiny, tmp_path
):
    run = copy_of(trained, tmp_path / "run")
    card = (run.final / "README.md").read_text()
    (run.final / "README.md").unlink()
    recipe = write_recipe(tmp_path / "r.json", tiny.fields())
    words = ("launch", recipe, "--backend", "single", "--precision", "fp32", "--output", run.root)
    done = finetune(*words, "--resume", "auto", plot=True)
    assert (done.status, done.stdout) == (0, f"{run.root}: complete, nothing to resume\n")
    assert (run.final / "README.md").read_text() == card
    assert run.loss_plot.read_bytes().startswith(b"\x89PNG")


def test_a_damaged_best_checkpoint_is_not_published(run):
    weights = run.checkpoint(run.best_step() or 0) / "model" / "model.safetensors"
    flip_a_bit(weights)
    with pytest.raises(FinetuneError, match=f"{weights}: damaged, its sha256 does not match"):
        publish(run)
    assert not run.final.exists()


def test_a_kill_between_a_checkpoint_and_its_best_json_loses_nothing(train, trained, run, tmp_path):
    """And what is torn is named by what only reads it."""
    right = trained.best.read_text()
    for torn in ('{"step": 3, "loss": 9.5}', '{"st', None):
        shutil.rmtree(run.final, ignore_errors=True)
        run.best.unlink()
        if torn is not None:
            run.best.write_text(torn)
        if torn == '{"st':
            with pytest.raises(FinetuneError, match=f"{run.best}: cannot be read"):
                ft.export(run, tmp_path / "out")
        train(resume=True)
        assert run.best.read_text() == right


def test_another_versions_format_is_refused_and_not_taken_for_damage(train, run):
    rewrite(run, 6, format=FORMAT + 1)
    assert refusal(train) == (
        f"{run.checkpoint(6)}/manifest.json: a checkpoint of format {FORMAT + 1}, this "
        f"version reads formats 1 and {FORMAT}; continue it with the version of finetune in its "
        "environment.json, or start again in another --output"
    )


ENTRY = {"bytes": 1, "sha256": ""}
INVALID: list[tuple[dict[str, object], str]] = [
    ({"files": {"../../recipe.json": ENTRY}}, "is outside the checkpoint's folder"),
    ({"files": {"/etc/passwd": ENTRY}}, "is outside the checkpoint's folder"),
    ({"files": {"a" * 300: ENTRY}}, "missing, though the manifest lists it"),
    ({"files": []}, "files: Input should be a valid dictionary, got []"),
    ({"step": "6"}, "step: Input should be a valid integer, got '6'"),
    ({"shapes": {"w": "3"}}, "shapes: w: Input should be a valid list, got '3'"),
    ({"format": None}, "no format: it is not a checkpoint's manifest"),
]


def test_an_invalid_manifest_and_every_flipped_bit_of_one_count_as_damage(run):
    path = run.checkpoint(6) / "manifest.json"
    good = path.read_bytes()
    for changes, told in INVALID:
        path.write_bytes(good)
        rewrite(run, 6, **changes)
        assert told in "\n".join(damage(run.checkpoint(6)))
    unharmed = json.loads(good)
    for place in range(0, len(good), 7):
        content = bytearray(good)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        try:
            assert damage(run.checkpoint(6)) or json.loads(content) == unharmed, place
        except OtherFormat:
            assert b'"format"' in good[place - 12 : place]


def test_a_run_is_not_continued_in_another_precision(finetune, train, tiny, trained, run, tmp_path):
    recipe = write_recipe(tmp_path / "r.json", tiny.fields())
    words = ["launch", recipe, "--precision", "bf16", "--output", run.root, "--resume", "auto"]
    told = (
        f"{run.root}: trained in fp32; bf16 would change its results; continue it with "
        "--precision fp32, or choose another --output"
    )
    for complete in (False, True):
        if complete:
            shutil.copytree(trained.final, run.final)
        assert refusal(train, resume="auto", precision="bf16") == told
        done = finetune(*words)
        assert (done.status, done.stderr) == (2, f"error: {told}\n")


def test_a_recipe_with_other_mathematics_is_refused_by_its_fields(train, run):
    free = {"batch": {"micro_rows": 4}, "max_steps": 9, "saving": {"keep": 9}, "backend": "ddp"}
    told = refusal(train, optim={"lr": 0.5}, **free)
    assert "They differ in optim.lr: 0.001 -> 0.5. Fields that may change: backend, " in told


def rows_and_tokens(run: Run, split: str) -> str:
    counts = json.loads(run.data.read_text())[split]
    return f"{counts['documents']} rows of {counts['tokens']:,} tokens"


def test_a_run_goes_on_with_its_own_data_only(tiny, train, tmp_path):
    data, held = tmp_path / "data.jsonl", tmp_path / "eval.jsonl"
    lines, others = tiny.data.read_text().splitlines(), tiny.eval_data.read_text().splitlines()
    mine = {
        "data": [{"source": str(data), "format": "messages"}],
        "eval_data": [{"source": str(held), "format": "messages"}],
    }

    def write(now_train: list[str], now_eval: list[str]) -> None:
        data.write_text("\n".join(now_train))
        held.write_text("\n".join(now_eval))

    write(lines, others)
    run = train(**mine, max_steps=3)
    record = run.data.read_text()
    then = {split: rows_and_tokens(run, split) for split in ("train", "eval")}

    def refused(now_train: list[str], now_eval: list[str]) -> str:
        write(now_train, now_eval)
        told = refusal(train, **mine)
        assert (run.steps(), run.data.read_text()) == ([3], record)
        begin = f"{run.root}: the data is not that of the run: "
        end = "; restore the old data, or choose another --output"
        assert told.startswith(begin)
        assert told.endswith(end)
        return told.removeprefix(begin).removesuffix(end)

    fewer = refused(lines[:30], others)
    assert fewer.startswith(f"to train on {then['train']} then, 30 rows of ")
    assert fewer.endswith(" tokens now")
    assert refused([lines[1], lines[0], *lines[2:]], [*others[:-1], others[0]]).startswith(
        f"to train on {then['train']}, but different ones; to evaluate on {then['eval']} then, 8 "
    )
    # What may change does not change the rows; and a manifest from before says nothing of them.
    write(lines, others)
    free = {"batch": {"micro_rows": 4}, "saving": {"every": 1}, "data_checks": "report"}
    train(resume=True, **mine, **free, max_steps=4)
    assert run.steps() == [3, 4]
    manifest = json.loads((run.checkpoint(4) / "manifest.json").read_text())
    assert manifest["progress"].pop("data")["train"]["documents"] == 48
    rewrite(run, 4, progress=manifest["progress"])
    write(lines[:30], others)
    train(resume=True, **mine, max_steps=5)


def test_two_runs_in_one_directory_are_refused(tiny, train, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LOCK_SECONDS", 0.2)
    run = Run(tmp_path / "run")
    first = begin(tiny, run, max_steps=4000)
    wait_for(lambda: steps_made(run) > 0, first)
    family = family_of(first.pid)
    for each in family:
        each.suspend()  # it holds its lock and takes no time from the second
    told = refusal(train, resume="auto", max_steps=4000)
    end(family)
    first.communicate()
    (_, holder, *_) = (run.root / "run.lock").read_text().split()
    assert int(holder) in {each.pid for each in family}
    assert told == (
        f"{run.root}: in use by process {holder} on {os.uname().nodename}; "
        "wait until it ends, or choose another --output"
    )


def test_the_lock_of_another_host_reports_its_last_write(train, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LOCK_SECONDS", 0.2)
    run = tmp_path / "run"
    run.mkdir()
    file = run / "run.lock"
    file.write_text("process 7 on node-gone\n")
    os.utime(file, (time.time() - 7200,) * 2)
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert refusal(train, resume=False, max_steps=1) == (
            f"{run}: in use by process 7 on node-gone; wait until it ends, or choose "
            "another --output (it last wrote 2 h 00 min ago; if that host is gone, a network "
            "disk may keep its lock: delete run.lock)"
        )
        file.unlink()  # as the message says
        train(max_steps=1)


def test_a_disk_without_locks_is_reported_and_used(train, tmp_path, monkeypatch, capsys):
    def none(file: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    train(max_steps=1)
    assert (
        f"warning: {tmp_path}/run/run.lock: its file system has no locks (Function not "
        "implemented): a second training in this directory would not be detected\n"
    ) in capsys.readouterr().err


def test_the_lock_of_a_cache_is_not_waited_for_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "LOCK_SECONDS", 0.2)
    cache = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(cache, fcntl.LOCK_EX)
    with scratch.scratch_for(tmp_path / "rows") as folder:
        assert folder.is_dir()
    os.close(cache)
    assert not list(tmp_path.iterdir())


def test_an_unwritable_directory_is_reported(train, mounted):
    read_only = mounted("ro,size=1m")
    assert refusal(train, name="mounted/run", resume=False) == (
        f"{read_only / 'run'}: cannot be a run directory (Read-only file system); choose "
        "another --output"
    )


def test_a_disk_too_small_is_reported_before_the_first_step(train, mounted):
    small = mounted("size=4m")
    told = refusal(train, name="mounted/run", resume=False, saving={"every": 1, "keep": 5})
    assert "free, the coming checkpoints need up to" in told
    assert "free disk space, choose another --output, or lower saving.keep" in told
    assert steps_made(Run(small / "run")) == 0


def test_a_rehearsal_writes_and_reads_back_the_real_state(train, capsys):
    run = train(saving={"every": 3, "rehearse": True})
    lines = capsys.readouterr().out.splitlines()[:6]
    names = [line.split("  ")[0].strip() for line in lines]
    assert names == ["ranks", "memory", "disk", "model", "start", "rehearsal"]
    assert lines[5].endswith("s, equal")
    assert not (run.root / ".rehearsal").exists()


def test_another_base_under_the_same_name_is_refused(tiny, train, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    mine = {"model": {"name": str(model)}, "adapter": {"r": 4}, "saving": {"every": 2}}
    run = train(**mine, max_steps=2)
    first = base_weights.fingerprint(Model(str(model)))
    assert read_manifest(run.checkpoint(2))["progress"]["base"] == first
    # Other weights of the same shapes and sizes, in every second dimension of the layers.
    tensors = load_file(model / "model.safetensors")
    changed = {name: each * 3 if "mlp" in name else each for name, each in tensors.items()}
    save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
    now = base_weights.fingerprint(Model(str(model)))
    told = (
        f"{run.checkpoint(2)}: it was trained on different frozen weights than {model} "
        f"has now ({first} then, {now} now): restore the old weights, or start another run"
    )
    assert refusal(train, **mine, max_steps=4) == told
    assert problems_of(ft.export, run, tmp_path / "merged", merge=True) == (told,)
    capsys.readouterr()
    assert cli.main(["eval", str(run.root)]) == 2
    assert capsys.readouterr().err.endswith(f"error: {told}\n")
    assert not (tmp_path / "merged").exists()
    shutil.copyfile(tiny.model / "model.safetensors", model / "model.safetensors")
    train(resume=True, **mine, max_steps=4)


def test_a_large_base_is_identified_by_a_sample_of_each_tensor(tmp_path):
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
