"""A run is a directory: every file name of the record, in one place.

RUN/
  recipe.json        the recipe as it was resolved, with its method
  plan.json          what was derived before anything was loaded
  environment.json   library versions, devices, command
  realised.json      what Accelerate built: engine, precision, elements held per rank
  starting_adapter.json   folder, SHA-256 and base of the adapter that it went on from, if any
  data.json          rows, tokens, trained tokens, dropped, truncated
  bad_rows.jsonl     rows that `on_bad_row=drop` left out, each with its file, row and problem
  metrics.jsonl      one JSON object a line: kind "start", "train", "eval", "save", "end"
  proof.json         a proof of its recipe, where `finetune report --proof` put one
  samples.json       generations before and after, where they were asked for
  answers.jsonl      questions, answers and references of the last `finetune eval`
  checkpoints/step-00000010/   see `finetune.checkpoint`; manifest.json is written last
  flight_records/    rank-00000.json, ...: torch's last collectives, kept when one failed
  run.lock           held by the process that trains
  best.json          {"step": ..., "loss": ...} of the best evaluation
  final/             the result: PEFT adapter or whole model, tokenizer, model card (README.md)
  profile/           torch profiler's trace of one step of each rank, and where its time went
  loss.png
  report.html
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from finetune.errors import FinetuneError


@dataclasses.dataclass(frozen=True)
class Run:
    """Names and reads what a run directory holds; `root` need not exist yet."""

    root: Path

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def realised(self) -> Path:
        return self.root / "realised.json"

    @property
    def data(self) -> Path:
        return self.root / "data.json"

    @property
    def bad_rows(self) -> Path:
        return self.root / "bad_rows.jsonl"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.root / "samples.json"

    @property
    def answers(self) -> Path:
        return self.root / "answers.jsonl"

    @property
    def proof(self) -> Path:
        return self.root / "proof.json"

    @property
    def initial_adapter(self) -> Path:
        return self.root / "initial_adapter"

    @property
    def starting_adapter(self) -> Path:
        return self.root / "starting_adapter.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def flight_records(self) -> Path:
        return self.root / "flight_records"

    @property
    def best(self) -> Path:
        return self.root / "best.json"

    @property
    def final(self) -> Path:
        return self.root / "final"

    @property
    def loss_plot(self) -> Path:
        return self.root / "loss.png"

    @property
    def profile(self) -> Path:
        return self.root / "profile"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        manifests = self.checkpoints.glob("step-????????/manifest.json")
        numbers = (path.parent.name.removeprefix("step-") for path in manifests)
        return sorted(int(number) for number in numbers if number.isdecimal())

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


def write_json(path: Path, value: Any) -> None:
    """Write a record whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(value, indent=2) + "\n")
    scratch.replace(path)
