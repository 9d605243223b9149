"""Faults x phases of a run: each ends as stated; started again, a run ends as if none had been."""

import contextlib
import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Train, copy_of, environment, warm_python

from benchmarks.kills import worker_environments
from finetune import Run
from finetune.runs.manifest import sha256

pytestmark = pytest.mark.slow

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
"""Phases of a training in order, each by a file that it opens, makes or renames, or by a call."""
LOADING = "pretrained() 1"
"""The phase `load` by a call: the preparation opens that file too, for the ends of turns."""
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
"""Nothing is opened: the records are already open when a disk fills."""
EARLY = ["prepare", "prepared", "load", "record"]
"""A signal here ends a run without a checkpoint."""
TABLE = [
    ("kill", [*PHASES]),
    ("full", [*PHASES]),
    ("forbidden", ["prepare", "load", "record", "save", "publish"]),
    ("term", EARLY),
    *(("term", [phase]) for phase in PHASES if phase not in EARLY),
    ("hangup", EARLY),
    ("hangup", ["step"]),
]
"""The phases in which one run meets a fault, one after another."""
Fault = tuple[str, str]
"""Its kind, and the file or the call at which it happens."""


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
    """Runs of one recipe, made by the server, which meet a fault or none."""

    def __init__(self, server: "subprocess.Popen[str]", folder: Path, straight: Run) -> None:
        self.server, self.folder, self.log = server, folder, folder / "last.log"
        self.straight = straight

    def train(self, run: Run, fault: Fault | None = None) -> int:
        return self.ask(self.words(run), fault, f"{run.root.name}-cache")

    def train_on_two(self, run: Run, fault: Fault | None = None, faulty_rank: int = 0) -> int:
        words, ranks = [*self.words(run), "--timeout", "0.1"], worker_environments("ddp", 2)
        return self.ask(words, fault, f"{run.root.name}-cache", ranks, faulty_rank)

    def words(self, run: Run) -> list[str]:
        words = f"--precision fp32 --no-plot --resume auto --output {run.root}"
        return ["train", str(self.straight.recipe), *shlex.split(words)]

    def ask(
        self, words: list[str], fault: Fault | None = None, cache: str = "cache",
        launched: Sequence[dict[str, str]] = ({},), faulty_rank: int = 0,
    ) -> int:  # fmt: skip
        """The exit status of a command in a process of its own, or in several."""
        self.log.write_text("")
        self.log.with_suffix(".met").unlink(missing_ok=True)
        variables = {"FINETUNE_CACHE": environment(self.folder / cache)["FINETUNE_CACHE"]}
        job = {
            "words": words, "log": str(self.log), "fault": fault, "faulty_rank": faulty_rank,
            "ranks": [variables | each for each in launched],
        }  # fmt: skip
        print(json.dumps(job), file=self.server.stdin, flush=True)
        return int(self.server.stdout.readline())

    @property
    def told(self) -> str:
        return self.log.read_text()

    def refuse_silence(self, fault: str, phase: str) -> None:
        """The fault happened, and one that a person can mend is told in one line."""
        assert self.log.with_suffix(".met").exists(), f"{phase}: no such file was opened"
        assert "Traceback" not in self.told, phase
        problems = [line for line in self.told.splitlines() if line.startswith("error")]
        reason = REASONS.get(fault)
        assert any(reason in each for each in problems) if reason else not problems, self.told


@contextlib.contextmanager
def served(straight: Run, folder: Path) -> Iterator[Trained]:
    folder.mkdir(exist_ok=True)
    with subprocess.Popen(
        [warm_python(), "-m", "tests.fault_server"], env=environment(folder), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as server:  # fmt: skip
        yield Trained(server, folder, straight)  # which ends when its input does


SECTIONS: dict[str, Any] = {"max_steps": 4, "saving": {"every": 2}, "evaluation": {"every": 2}}


@pytest.fixture(scope="module")
def trained(run_of: Train, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    with served(run_of(**SECTIONS), tmp_path_factory.mktemp("faults")) as found:
        yield found


@pytest.mark.parametrize(("fault", "phases"), TABLE)
def test_a_run_that_meets_faults_is_continued_to_the_same_end(trained, fault, phases):
    run = Run(trained.folder / f"{fault}-{phases[0].replace(' ', '-')}")
    for phase in phases:
        of_file = phase != "load" or fault in ("full", "forbidden")
        status = trained.train(run, (fault, PHASES[phase] if of_file else LOADING))
        if phase in COMPLETE and fault in ("term", "hangup"):
            assert status == 0, trained.told
        else:
            assert status in STATUS[fault], (phase, trained.told)
            trained.refuse_silence(fault, phase)
    assert trained.train(run) == 0, trained.told
    assert outcome(run) == outcome(trained.straight)


HANGS = {
    "load": (1, LOADING),
    "first step": (0, PHASES["first step"]),
    "step": (1, PHASES["step"]),
    "save": (1, r"/\.step-00000002\.partial/"),
    "publish": (0, PHASES["publish"]),
    "card": (0, PHASES["card"]),
}
"""Phases in which one of two ranks hangs: the rank, and a file that it opens, makes or renames."""
LATE = r"rank 1 \(process \d+ on \S+\) did not join the collective; it was last at \w+\.py:\d+ in "


def test_ranks_that_hang_are_named_and_the_run_is_continued(run_of, tmp_path):
    """In three runs at once: ranks mostly wait here."""
    straight = run_of("ddp", **SECTIONS)

    def hang(part: int) -> None:
        with served(straight, tmp_path / str(part)) as trained:
            hang_in(trained, [*HANGS][part::3])

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(hang, range(3)))


def hang_in(trained: Trained, phases: list[str]) -> None:
    run = Run(trained.folder / "hangs")
    for phase in phases:
        rank, file = HANGS[phase]
        assert trained.train_on_two(run, ("hang", file), rank) == 1, (phase, trained.told)
        assert trained.log.with_suffix(".met").exists(), f"{phase}: no such file was opened"
        assert f"rank {rank} (process " in trained.told, phase
        assert "Traceback" not in trained.told, trained.told
        if phase in NO_FILE:  # in Python, while its heartbeat goes on
            assert re.search(LATE, trained.told), trained.told
    assert trained.train_on_two(run) == 0, trained.told
    assert outcome(run) == outcome(trained.straight)


def test_a_preparation_that_hangs_can_be_ended_and_is_continued(trained):
    run = Run(trained.folder / "stuck")
    assert trained.train(run, ("stuck", PHASES["prepare"])) == 75, trained.told
    trained.refuse_silence("term", "prepare")
    assert trained.train(run) == 0, trained.told
    assert outcome(run) == outcome(trained.straight)


@pytest.mark.parametrize("verb", ["report", "export"])
def test_products_of_a_run_are_complete_or_absent(trained, verb):
    run = copy_of(trained.straight, trained.folder / f"{verb}-run").root
    before = outcome(Run(run))
    folder = run if verb == "report" else trained.folder / "exports"
    folder.mkdir(exist_ok=True)
    target = folder / ("report.html" if verb == "report" else "adapter")
    others = set(folder.iterdir())
    words = [verb, str(run), *(["--to", str(target)] if verb == "export" else [])]
    for fault, statuses in STATUS_OF_PRODUCTS.items():
        met = (fault, rf"/{run.parent.name}/.*\b{target.name}")
        assert trained.ask(words, met) in statuses, (fault, trained.told)
        trained.refuse_silence(fault if fault in ("full", "forbidden") else "kill", fault)
        assert not target.exists()
    assert trained.ask(words) == 0, trained.told
    assert set(folder.iterdir()) == others | {target}, "what the faults left there is not gone"
    assert outcome(Run(run)) == before
