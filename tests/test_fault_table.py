"""Faults x phases of a run: each ends as stated; started again, a run ends as if none had been."""

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Tiny, environment, write_recipe

from benchmarks.kills import worker_environments
from finetune.runs.manifest import sha256
from finetune.runs.run import Run

PHASES = {
    "prepare": r"\.rows/documents/lengths",
    "prepared": r"\.rows$",
    "load": r"/model/generation_config\.json$",
    "record": r"/\.data\.json\.",
    "first step": r"/metrics\.jsonl$",
    "after the first step": r"/\.realised\.json\.",
    "step": "train_step() 2",
    "evaluation": "evaluate() 1",
    "save": r"/\.step-00000002\.partial/tokenizer$",
    "manifest": r"/\.step-00000002\.partial/\.manifest\.json\.",
    "best": r"/\.best\.json\.",
    "publish": r"/\.final\.partial/tokenizer\.json$",
    "card": r"/final/\.README\.md\.",
}
"""Phases of a training, each by a file that it opens, makes or renames, or by a call."""
STATUS = {"kill": {-9}, "term": {75}, "hangup": {75}, "full": {1, 2}, "forbidden": {1, 2}}
STATUS_OF_PRODUCTS = STATUS | {"term": {-15}, "hangup": {-1}, "stuck": {-15}}
"""Commands without progress to save end by the signal itself."""
REASONS = {
    "term": "interrupted by SIGTERM",
    "hangup": "interrupted by SIGHUP",
    "full": "No space left on device",
    "forbidden": "Permission denied",
}
COMPLETE = {"publish", "card"}
"""After the last step is saved: a signal has nothing left to save, and the run ends as usual."""
NO_FILE = {"step", "evaluation"}
"""Nothing is opened: no permission is asked, and the records are already open when a disk fills."""
TABLE = [
    (fault, phase)
    for fault in STATUS
    for phase in PHASES
    if not (fault == "forbidden" and phase in NO_FILE)
]

Serve = Callable[..., int]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """(log, words, cache, fault) -> the exit status of a command in a process of its own."""
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "fault_server.py")],
        env=environment(tmp_path_factory.mktemp("cache")), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None
    stdin, stdout = server.stdin, server.stdout

    def ask(
        log: Path, words: list[str], cache: Path, fault: tuple[str, str] | None = None,
        launched: Sequence[dict[str, str]] = ({},), faulty_rank: int = 0,
    ) -> int:  # fmt: skip
        log.write_text("")
        job = {
            "words": words, "log": str(log), "fault": fault, "faulty_rank": faulty_rank,
            "ranks": [{"FINETUNE_CACHE": str(cache), **variables} for variables in launched],
        }  # fmt: skip
        stdin.write(json.dumps(job) + "\n")
        stdin.flush()
        return int(stdout.readline())

    yield ask
    stdin.close()
    server.wait(60)


def outcome(run: Run) -> dict[str, object]:
    """What a fault must not change."""
    files = {path.name for path in run.final.iterdir()}
    weights = {path.name: sha256(path) for path in run.final.glob("*.safetensors")}
    losses = {
        kind: [(record["step"], record["loss"]) for record in run.read_metrics(kind)]
        for kind in ("train", "eval")
    }
    return {"files": files, "weights": weights, "best": json.loads(run.best.read_text()), **losses}


class Trained:
    def __init__(self, serve: Serve, folder: Path, tiny: Tiny) -> None:
        self.serve, self.folder = serve, folder
        fields = tiny.fields(max_steps=4, saving={"every": 2}, evaluation={"every": 2})
        self.recipe = write_recipe(folder / "recipe.json", fields)
        self.straight = Run(folder / "straight")
        assert self.train(self.straight) == 0, self.told

    @functools.cached_property
    def straight_on_two(self) -> Run:
        run = Run(self.folder / "straight-on-two")
        assert self.train_on_two(run) == 0, self.told
        return run

    def train(self, run: Run, fault: tuple[str, str] | None = None) -> int:
        return self.ask(self.words(run), fault, self.cache(run))

    def train_on_two(
        self, run: Run, fault: tuple[str, str] | None = None, faulty_rank: int = 0
    ) -> int:
        words = [*self.words(run), "--timeout", "0.1"]
        return self.ask(words, fault, self.cache(run), worker_environments("ddp", 2), faulty_rank)

    def words(self, run: Run) -> list[str]:
        return [
            "train", str(self.recipe), "--precision", "fp32", "--no-plot", "--resume", "auto",
            "--output", str(run.root),
        ]  # fmt: skip

    def cache(self, run: Run) -> Path:
        return self.folder / f"{run.root.name}-cache"

    def ask(
        self, words: list[str], fault: tuple[str, str] | None = None, cache: Path | None = None,
        *ranks: Any,
    ) -> int:  # fmt: skip
        self.log = self.folder / "last.log"
        self.log.with_suffix(".met").unlink(missing_ok=True)
        return self.serve(self.log, words, cache or self.folder / "cache", fault, *ranks)

    @property
    def told(self) -> str:
        return self.log.read_text()

    def refuse_silence(self, fault: str) -> None:
        """The fault happened, and one that a person can mend is told in one line."""
        assert self.log.with_suffix(".met").exists(), "no file of this phase was opened"
        assert "Traceback" not in self.told
        problems = [line for line in self.told.splitlines() if line.startswith("error")]
        reason = REASONS.get(fault)
        assert any(reason in each for each in problems) if reason else not problems, self.told


@pytest.fixture(scope="module")
def trained(serve: Serve, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(serve, tmp_path_factory.mktemp("faults"), tiny)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "phase"), TABLE)
def test_a_run_that_meets_a_fault_is_continued_to_the_same_end(
    trained: Trained, fault: str, phase: str
) -> None:
    run = Run(trained.folder / f"{fault}-{phase.replace(' ', '-')}")
    status = trained.train(run, (fault, PHASES[phase]))
    if phase in COMPLETE and fault in ("term", "hangup"):
        assert status == 0
    else:
        assert status in STATUS[fault], trained.told
        trained.refuse_silence(fault)
    assert trained.train(run) == 0, trained.told
    assert outcome(run) == outcome(trained.straight)


HANGS = {
    "load": (1, r"/model/generation_config\.json$"),
    "record": (0, PHASES["record"]),
    "first step": (0, PHASES["first step"]),
    "step": (1, PHASES["step"]),
    "evaluation": (1, PHASES["evaluation"]),
    "save": (1, r"/\.step-00000002\.partial/"),
    "best": (0, PHASES["best"]),
    "publish": (0, PHASES["publish"]),
    "card": (0, PHASES["card"]),
}
"""Phases in which one of two ranks hangs: the rank, and a file that it opens, makes or renames."""


@pytest.mark.slow
@pytest.mark.parametrize("phase", HANGS)
def test_a_rank_that_hangs_is_named_and_the_run_is_continued(trained: Trained, phase: str) -> None:
    rank, file = HANGS[phase]
    run = Run(trained.folder / f"hang-{phase.replace(' ', '-')}")
    assert trained.train_on_two(run, ("hang", file), rank) == 1, trained.told
    assert trained.log.with_suffix(".met").exists(), "no file of this phase was opened"
    assert f"rank {rank} (process " in trained.told
    assert "Traceback" not in trained.told, trained.told
    assert trained.train_on_two(run) == 0, trained.told
    assert outcome(run) == outcome(trained.straight_on_two)


@pytest.mark.slow
def test_a_preparation_that_hangs_can_be_ended_and_is_continued(trained: Trained) -> None:
    run = Run(trained.folder / "stuck")
    assert trained.train(run, ("stuck", PHASES["prepare"])) == 75, trained.told
    trained.refuse_silence("term")
    assert trained.train(run) == 0, trained.told
    assert outcome(run) == outcome(trained.straight)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["report", "export"])
@pytest.mark.parametrize("fault", STATUS_OF_PRODUCTS)
def test_products_of_a_run_are_complete_or_absent(trained: Trained, fault: str, verb: str) -> None:
    run, before = trained.straight.root, outcome(trained.straight)
    folder = run if verb == "report" else trained.folder / f"{fault}-exports"
    folder.mkdir(exist_ok=True)
    target = folder / ("report.html" if verb == "report" else "adapter")
    others = set(folder.iterdir())
    words = [verb, str(run), *(["--to", str(target)] if verb == "export" else [])]
    met = (fault, rf"/{run.parent.name}/.*\b{target.name}")
    assert trained.ask(words, met) in STATUS_OF_PRODUCTS[fault], trained.told
    trained.refuse_silence(fault if fault in ("full", "forbidden") else "kill")
    assert not target.exists()
    assert trained.ask(words) == 0, trained.told
    assert target.exists()
    assert outcome(trained.straight) == before
    if verb == "report":
        target.unlink()
    else:
        shutil.rmtree(target)
    assert set(folder.iterdir()) == others, "what the fault left there is not gone"
