"""Name and read the files of a run directory."""

import contextlib
import dataclasses
import json
import os
import re
import secrets
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from finetune.errors import FinetuneError, reading

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def refuse_scheme(path: Path) -> Path:
    """Refuse an address such as s3://bucket/run, which would be a local folder named `s3:`."""
    if SCHEME.match(str(path)):
        raise FinetuneError(
            f"'{path}': not a path on this machine; give a local path, and copy what is written "
            "there to its store"
        )
    return path


class File(property):
    """The path of a file or folder in a run directory."""

    def __init__(self, name: str, about: str) -> None:
        super().__init__(lambda run: run.root / name)
        self.__doc__ = f"`{name}`: {about}"

    if TYPE_CHECKING:

        def __get__(self, run: object, owner: type | None = None, /) -> Path: ...  # pyright: ignore[reportIncompatibleMethodOverride]


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of a run directory; `root` does not have to exist yet."""

    root: Path

    def __post_init__(self) -> None:
        refuse_scheme(self.root)

    recipe = File("recipe.json", "the resolved recipe with every field, and its method.")
    plan = File("plan.json", "the plan, derived before anything was loaded.")
    environment = File("environment.json", "library versions, devices, command.")
    realised = File("realised.json", "what Accelerate built: engine, precision, elements per rank.")
    data = File("data.json", "counts of rows and tokens.")
    bad_rows = File("bad_rows.jsonl", "rows dropped by `on_bad_row=drop`, with their problems.")
    reference = File(
        "reference.npz", "log-probabilities of the reference, one per sequence (`DPO`)."
    )
    values = File("values.npz", "what a method computed for each document before the first step.")
    rollouts = File("rollouts/", "completions that several steps train on, read by a resumed run.")
    completions = File("completions.jsonl", "some completions of each sampling, with rewards.")
    metrics = File("metrics.jsonl", 'one JSON object per line, of kind "start", "train", ...')
    job = File("job.json", "the job of a scheduler that trains it.")
    attempts = File("attempts.jsonl", "each start of that job and its end.")
    samples = File("samples.json", "answers before and after training.")
    evaluations = File("eval/", "one folder per evaluation by `finetune eval`.")
    proof = File("proof.json", "a proof of the recipe, if one was added.")
    initial_adapter = File("initial_adapter/", "the adapter at step 0, if it was not all zeros.")
    starting_adapter = File("starting_adapter.json", "the adapter that training started from.")
    checkpoints = File("checkpoints/", "one folder per saved step; manifest.json is written last.")
    flight_records = File("flight_records/", "the last collectives, dumped by torch if one failed.")
    lock = File("run.lock", "locked by the process that trains.")
    log = File("job/log.txt", "the output of a launch that no terminal shows.")
    best = File("best.json", "step and loss of the best evaluation.")
    final = File("final/", "the result, in the format of PEFT or transformers.")
    loss_plot = File("loss.png", "the loss curve.")
    profile = File("profile/", "the trace of one step of each rank.")
    report = File("report.html", "the page written by `finetune report`.")

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint of an optimizer step, which may not exist."""
        return self.checkpoints / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first.

        Raises OSError if the folder is not readable, because it may still contain checkpoints.
        """
        try:
            names = os.listdir(self.checkpoints)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(
            int(name[len("step-") :])
            for name in names
            if re.fullmatch(r"step-[0-9]{8}", name)
            and (self.checkpoints / name / "manifest.json").exists()
        )

    def newest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        steps = self.steps()
        return steps[-1] if steps else None

    def standing(self) -> str:
        """A sentence on where a run that ended with an error can be resumed from."""
        newest = self.newest()
        if newest is None:
            return "there is no complete checkpoint yet"
        return f"the last complete checkpoint is that of step {newest}: continue with --resume"

    def best_step(self) -> int | None:
        """Step of the best evaluation; None without an evaluation or without its checkpoint."""
        if not self.best.exists():
            return None
        with reading(
            f"{self.best}: cannot be read",
            "`--resume` rewrites it from the newest checkpoint, and `finetune export --step` does "
            "not need it",
        ):
            step = json.loads(self.best.read_text(encoding="utf-8"))["step"]
        return step if step in self.steps() else None

    def read_metrics(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """Records of `metrics.jsonl`, all or of one kind; other lines are skipped."""
        for record in read_lines(self.metrics):
            if kind is None or record.get("kind") == kind:
                yield record


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, which may not exist; other lines are skipped."""
    return objects(path.read_bytes().splitlines() if path.exists() else ())


def objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects in some lines; other lines, such as one cut off by a kill, are skipped."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            read = json.loads(line)
            if isinstance(read, dict):
                yield cast(dict[str, Any], read)


def open_run(root: str | Path) -> Run:
    """The run in a directory; raises FinetuneError if it is not a run directory."""
    run = Run(Path(root))
    if not run.recipe.is_file():
        raise FinetuneError(f"{root}: not a run directory (it has no {run.recipe.name})")
    return run


@contextlib.contextmanager
def of_record(path: Path) -> Generator[None]:
    """Turn errors inside this context into an error about the file at `path`.

    Raises:
        FinetuneError: the file is not JSON, or not in the structure that training writes.
    """
    instead = "restore it from a copy, or move it away"
    with reading(f"{path}: cannot be read as training writes it", instead):
        yield


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of the record; empty if the file does not exist.

    Raises:
        FinetuneError: the file is not JSON or not an object.
    """
    if not path.is_file():
        return {}
    with of_record(path):
        read = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(read, dict):
            raise TypeError(f"it contains a {type(read).__name__}, expected an object")
    return cast(dict[str, Any], read)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically; unpaired surrogates become question marks."""
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8", errors="replace")


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A file to write next to another one, which it replaces at the end; or a device, itself.

    Raises OSError with the file's name, for example on a full disk, and leaves nothing behind.
    """
    if path.exists() and not path.is_file():
        with naming(path):
            yield path
        return
    scratch = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}")
    try:
        with naming(path):
            yield scratch
            scratch.replace(path)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


@contextlib.contextmanager
def naming(path: Path) -> Generator[None]:
    """Name a file in errors of writing it: the system reports a full disk without a name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
