"""A run is a directory: every file name of the record, in one place.

RUN/
  recipe.json        the recipe as it was resolved, with its method
  plan.json          what was derived before anything was loaded
  environment.json   library versions, devices, command
  realised.json      what Accelerate built: engine, precision, elements held per rank
  starting_adapter.json   folder, SHA-256 and base of the adapter that it went on from, if any
  data.json          rows, tokens, trained tokens, dropped, truncated
  reference.npz      log-probabilities of a method's reference, one a sequence
  bad_rows.jsonl     rows that `on_bad_row=drop` left out, each with its file, row and problem
  rollouts/          completions of a sampling that several steps learn from
  completions.jsonl  some sampled completions of each sampling, with their rewards
  metrics.jsonl      one JSON object a line: kind "start", "train", "eval", "save", "end"
  proof.json         a proof of its recipe, where `finetune report --proof` put one
  samples.json       generations before and after, where they were asked for
  eval/NAME/         what `finetune eval` measured: results.json, samples.jsonl, index.html
  checkpoints/step-00000010/   see `finetune.checkpoints.checkpoint`; manifest.json is written last
  flight_records/    rank-00000.json, ...: torch's last collectives, kept when one failed
  run.lock           held by the process that trains
  best.json          {"step": ..., "loss": ...} of the best evaluation
  final/             the result: PEFT adapter or whole model, tokenizer, model card (README.md)
  profile/           torch profiler's trace of one step of each rank, and where its time went
  loss.png
  report.html
"""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, cast

from finetune.errors import FinetuneError


@dataclasses.dataclass(frozen=True)
class Run:
    """Names and reads what a run directory holds; `root` need not exist yet."""

    root: Path

    @property
    def recipe(self) -> Path:
        """`recipe.json`: the recipe with every field."""
        return self.root / "recipe.json"

    @property
    def plan(self) -> Path:
        """`plan.json`: what was derived before anything was loaded."""
        return self.root / "plan.json"

    @property
    def environment(self) -> Path:
        """`environment.json`: library versions, devices, command."""
        return self.root / "environment.json"

    @property
    def realised(self) -> Path:
        """`realised.json`: what Accelerate built."""
        return self.root / "realised.json"

    @property
    def data(self) -> Path:
        """`data.json`: counts of rows and tokens."""
        return self.root / "data.json"

    @property
    def bad_rows(self) -> Path:
        """`bad_rows.jsonl`: rows that `on_bad_row=drop` left out."""
        return self.root / "bad_rows.jsonl"

    @property
    def reference(self) -> Path:
        """Log-probabilities of the reference, which a resumed run reads (`DPO`)."""
        return self.root / "reference.npz"

    @property
    def rollouts(self) -> Path:
        """`rollouts/`: completions that several steps learn from, which a resumed run reads."""
        return self.root / "rollouts"

    @property
    def completions(self) -> Path:
        """`completions.jsonl`: some sampled completions of each sampling, with their rewards."""
        return self.root / "completions.jsonl"

    @property
    def metrics(self) -> Path:
        """`metrics.jsonl`: one JSON object a line."""
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """`samples.json`: answers before and after training."""
        return self.root / "samples.json"

    @property
    def evaluations(self) -> Path:
        """`eval/`: a folder for each evaluation by `finetune eval`."""
        return self.root / "eval"

    @property
    def proof(self) -> Path:
        """`proof.json`: a proof of the recipe, where one was added."""
        return self.root / "proof.json"

    @property
    def initial_adapter(self) -> Path:
        """`initial_adapter/`: the adapter at step 0, where it was not the usual zero."""
        return self.root / "initial_adapter"

    @property
    def starting_adapter(self) -> Path:
        """`starting_adapter.json`: the adapter that training went on from."""
        return self.root / "starting_adapter.json"

    @property
    def checkpoints(self) -> Path:
        """`checkpoints/`: one folder a step."""
        return self.root / "checkpoints"

    @property
    def flight_records(self) -> Path:
        """`flight_records/`: torch's last collectives, where one failed."""
        return self.root / "flight_records"

    @property
    def best(self) -> Path:
        """`best.json`: step and loss of the best evaluation."""
        return self.root / "best.json"

    @property
    def final(self) -> Path:
        """`final/`: the result, as PEFT or transformers loads it."""
        return self.root / "final"

    @property
    def loss_plot(self) -> Path:
        """`loss.png`: the loss curve."""
        return self.root / "loss.png"

    @property
    def profile(self) -> Path:
        """`profile/`: the trace of one step of each rank."""
        return self.root / "profile"

    @property
    def report(self) -> Path:
        """`report.html`: the page that `finetune report` writes."""
        return self.root / "report.html"

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint of an optimizer step, which need not exist."""
        return self.checkpoints / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first.

        Raises OSError for a folder that may not be read: its checkpoints are there all the same.
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
        """What a run that ended with an error can be continued from."""
        newest = self.newest()
        if newest is None:
            return "there is no complete checkpoint yet"
        return f"the last complete checkpoint is that of step {newest}: continue with --resume"

    def best_step(self) -> int | None:
        """Step of the best evaluation, where one was made and its checkpoint is there."""
        if not self.best.exists():
            return None
        try:
            step = json.loads(self.best.read_text(encoding="utf-8"))["step"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise FinetuneError(
                f"{self.best}: cannot be read: {error}; `--resume` writes it anew from the newest "
                "checkpoint, and `finetune export --step` needs none"
            ) from None
        return step if step in self.steps() else None

    def read_metrics(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """The records of `metrics.jsonl`, all or of one kind; a line that is none is left out."""
        if not self.metrics.exists():
            return
        for line in self.metrics.read_bytes().splitlines():
            try:
                read = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(read, dict):
                record = cast(dict[str, Any], read)
                if kind is None or record.get("kind") == kind:
                    yield record


def open_run(root: str | Path) -> Run:
    """The run in a directory; raises FinetuneError where there is none."""
    run = Run(Path(root))
    if not run.recipe.is_file():
        raise FinetuneError(f"{root}: not a run directory (it has no {run.recipe.name})")
    return run


@contextlib.contextmanager
def of_record(path: Path) -> Generator[None]:
    """Within it, whatever cannot be made of a record is said of the record.

    Raises:
        FinetuneError: it is no JSON, or not of the shape that training writes.
    """
    try:
        yield
    except (
        TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError,
    ) as error:  # fmt: skip
        raise FinetuneError(
            f"{path}: cannot be read as training writes it ({type(error).__name__}: "
            f"{str(error)[:200]}); put back a copy of it, or move it away"
        ) from error


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a record; an empty one where it was not written.

    Raises:
        FinetuneError: it is no JSON, or another kind of value.
    """
    if not path.is_file():
        return {}
    with of_record(path):
        read = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(read, dict):
            raise TypeError(f"it holds a {type(read).__name__}, expected an object")
    return cast(dict[str, Any], read)


def write_json(path: Path, value: Any) -> None:
    """Write a record whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all; half a character becomes a question mark.

    Raises OSError that names the file, on a full disk too, and leaves nothing behind.
    """
    scratch = path.with_name(f".{path.name[:200]}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8", errors="replace")
        scratch.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
