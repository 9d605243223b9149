"""SIGKILL runs at random moments, and check that they finish with the losses of uninterrupted runs.

    python -m benchmarks kills --count 200

An attempt is killed at a random moment between the preparation of its data and its card, every
third one during a save; the next attempt continues with `--resume auto`. Either all ranks are
killed, or one of them, after which the others must end by themselves.

Starting a process takes much longer than training such a small model. Therefore one process imports
everything and forks the workers of each attempt: with the same code, collectives and files, and the
environment of `accelerate launch`. Compiled operations are shared; every run has its own cache
otherwise. `--add` adds to the counts of the last result, which is written after every run.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from benchmarks.record import ROOT, Circumstances, Result, write
from finetune import backend as backends
from finetune import catalog
from finetune.errors import FinetuneError
from finetune.planner.engines import TRAITS
from finetune.process.quiet import quiet
from finetune.recipe import Recipe
from finetune.runs.manifest import sha256
from finetune.runs.run import Run
from finetune.training.worker import train

BACKENDS = tuple(backends.names())
STEPS = 12
BACKGROUND = 3
"""One in this many runs saves in the background."""
DONE_SECONDS = 600.0
"""Seconds after which an attempt that was not killed counts as hanging; an operator may compile."""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks kills", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="kills, over all backends")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no other after so long")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), metavar="BACKEND")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--add", action="store_true", help="to the counts of the last result")
    parser.add_argument("--note")
    arguments = parser.parse_args(words)
    command = " ".join(["python -m benchmarks kills", *words])
    circumstances = Circumstances.now(command, arguments.note)
    quiet()
    import finetune.reports.plot  # noqa: F401  # matplotlib, once for all workers

    before = arguments.to / "kills.json"
    earlier = json.loads(before.read_text()) if arguments.add and before.exists() else None
    if earlier is not None and not all(
        each.keys() >= set(KINDS) for each in earlier["results"]["backends"].values()
    ):
        parser.error(f"--add: {before} counts other kinds of kills; begin a new one with --to")
    with tempfile.TemporaryDirectory(prefix="finetune-kills-") as scratch:
        bench = Bench(Path(scratch), arguments.seed, earlier)

        def publish() -> Path:
            return write(arguments.to, "kills", bench.result(), circumstances)

        until = time.monotonic() + arguments.seconds
        bench.go(arguments.backends, arguments.count, until, publish)
        page = publish()
    print(f"\n{page.read_text()}\nwrote {page}")
    return 1 if bench.wrong else 0


class Bench:
    """Kills runs of each backend, and counts the outcomes."""

    def __init__(self, folder: Path, seed: int, earlier: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.counts: dict[str, dict[str, int]] = {}
        self.wrong: list[str] = []
        self.before: dict[str, dict[str, int]] = {}
        """Counts of earlier parts."""
        self.parts: list[dict[str, Any]] = []
        if earlier is not None:
            self.add(earlier)
        self.rng = random.Random(f"{seed} {len(self.parts)}")
        self.background = False
        self.recipes = write_recipes(folder)
        os.environ["DS_ACCELERATOR"] = "cpu"

    def go(
        self, names: Sequence[str], count: int, until: float, publish: Callable[[], object]
    ) -> None:
        """Kill `count` times, one run after another, alternating backends."""
        straight: dict[str, Outcome] = {}
        number = 0
        while self.kills < count and time.monotonic() < until:
            name = names[number % len(names)]
            self.background = number % BACKGROUND == BACKGROUND - 1
            if name not in straight:
                run, seconds = Run(self.folder / f"straight-{name}"), time.monotonic()
                self.attempt(name, run)
                straight[name] = outcome(run)
                if len(straight[name]["train"]) != STEPS:
                    raise SystemExit(f"{name} does not train: {log_of(run).read_text()}")
                self.counts[name] = dict.fromkeys(KINDS, 0)
                self.counts[name]["milliseconds"] = int(1e3 * (time.monotonic() - seconds))
            self.one_run(name, number, straight[name], count, until)
            number += 1
            publish()

    @property
    def kills(self) -> int:
        return sum(counts["kills"] for counts in self.counts.values())

    def one_run(
        self, backend: str, number: int, straight: "Outcome", count: int, until: float
    ) -> None:
        """Kill a run up to eight times, then let it finish."""
        run, counts = Run(self.folder / f"{number}-{backend}"), self.counts[backend]
        for _ in range(8):
            if self.kills >= count or time.monotonic() > until:
                break
            killed = self.attempt(backend, run, kill=True)
            if killed is None:
                break  # it finished before it was killed
            counts["kills"] += 1
            counts[killed] += 1
        with contextlib.suppress(TimeoutError):
            self.attempt(backend, run)
        counts["runs"] += 1
        found = outcome(run)
        if found == straight:
            counts["right"] += 1
            shutil.rmtree(run.root)
            shutil.rmtree(self.cache(run))
        else:
            differing = [each for each in found if found[each] != straight[each]]
            told = "; ".join(f"{each}: {found[each]} of {straight[each]}" for each in differing)
            self.wrong.append(f"{backend} run {number}: {told}")
            print(f"WRONG {self.wrong[-1]}", flush=True)
        print(
            f"{self.kills} kills, run {number} on {backend} is right: {not self.wrong}", flush=True
        )

    def attempt(self, backend: str, run: Run, kill: bool = False) -> str | None:
        """Start the workers; returns the phase in which they were killed, None if they finished."""
        machine = backends.load(backend)
        world = 1 if TRAITS[machine.engine].alone else 2
        if machine.shard_size is not None or machine.axes.any:  # one process per place of its mesh
            world = machine.processes
        environments = worker_environments(backend, world)
        nvme = machine.device == "nvme"
        chosen = "pretrained" if nvme else "experts" if machine.axes.experts > 1 else "from scratch"
        recipe = self.recipes[chosen].with_saving(every=2, background=self.background)
        os.environ["FINETUNE_CACHE"] = str(self.cache(run))
        workers = [fork(recipe, run, environment) for environment in environments]
        if not kill:
            wait(workers, DONE_SECONDS)
            return None
        seconds = self.counts[backend]["milliseconds"] / 1e3
        inside_save = self.rng.random() < 1 / 3
        moment = time.monotonic() + self.rng.uniform(0, 0.8 if inside_save else 1.05) * seconds
        pause = self.rng.uniform(0, 0.03)
        while time.monotonic() < moment and not ended(workers):
            time.sleep(0.001)
        if inside_save:
            while not ended(workers) and not list(run.checkpoints.glob(".step-*.partial")):
                time.sleep(0.0005)
            time.sleep(pause)
        if ended(workers):
            wait(workers, DONE_SECONDS)
            return None
        phase = self.phase(run)
        alone = world > 1 and self.rng.random() < 0.3
        for worker in [self.rng.choice(workers)] if alone else workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        if alone:  # torch's agent does so to the remaining ranks
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGTERM)
        wait(workers, DONE_SECONDS)
        if alone:
            self.counts[backend]["one_rank"] += 1
        return phase

    def cache(self, run: Run) -> Path:
        """A separate cache, so that each run prepares its data; compiled code is shared."""
        place = self.folder / "caches" / run.root.name
        if not place.exists():
            (self.folder / "compiled").mkdir(exist_ok=True)
            place.mkdir(parents=True)
            (place / "compiled").symlink_to(self.folder / "compiled")
        return place

    def phase(self, run: Run) -> str:
        """The phase of a run, determined from its files."""
        if not list(self.cache(run).rglob("counts.json")):
            return "prepare"
        if not list(run.read_metrics("train")):
            return "load"
        if list(run.checkpoints.glob(".step-*.partial")):
            return "save"
        return "finish" if list(run.read_metrics("end")) else "step"

    def add(self, earlier: dict[str, Any]) -> None:
        """Add the counts of earlier parts."""
        found = earlier["results"]
        last = found["kills"] - sum(part["kills"] for part in found["parts"])
        part = {"command": earlier["command"], "commit": earlier["commit"], "kills": last}
        self.parts = [*found["parts"], part]
        self.before, self.wrong = found["backends"], list(found["wrong"])

    def totals(self) -> dict[str, dict[str, int]]:
        """The counts of each backend, including earlier parts."""
        nothing = dict.fromkeys(KINDS, 0)
        return {
            name: {
                kind: each.get(name, nothing)[kind] + other.get(name, nothing)[kind]
                for kind in KINDS
            }
            for each, other in [(self.before, self.counts)]
            for name in sorted({*each, *other})
        }

    def result(self) -> Result:
        totals = self.totals()
        kills = sum(counts["kills"] for counts in totals.values())
        head = ["backend", "runs", "right", "kills", *PHASES, "of one rank"]
        rows = [
            [f"`{name}`", *(str(counts[kind]) for kind in KINDS)] for name, counts in totals.items()
        ]
        how = (
            f"Runs of {STEPS} steps with a checkpoint after each second one, killed by SIGKILL at "
            f"random moments and continued with `--resume auto`: {kills} kills in all; one of "
            f"{BACKGROUND} runs saves in the background. `load` is all that lies between the data "
            "and the first step, `finish` what comes after the last. A run is right where every "
            "step's and evaluation's loss, `best.json`, the files of its result, their weights and "
            "its card but for the lines of time and memory are, bit for bit, those of a run that "
            "was never killed."
        )
        values = {"kills": kills, "wrong": self.wrong, "backends": totals, "parts": self.parts}
        remarks = [
            f"{each['kills']} kills by `{each['command']}` at commit {each['commit']}"
            for each in self.parts
        ]
        return Result("Killed runs", how, values, [head, *rows], [*self.wrong, *remarks])


PHASES = ("prepare", "load", "step", "save", "finish")
KINDS = ("runs", "right", "kills", *PHASES, "one_rank")


Outcome = dict[str, Any]
"""Values that must be bit-identical, regardless of how often a run was killed."""


def outcome(run: Run) -> Outcome:
    found: Outcome = {
        kind: [(record["step"], record["loss"]) for record in run.read_metrics(kind)]
        for kind in ("train", "eval")
    }
    found["best"] = json.loads(run.best.read_text()) if run.best.exists() else None
    files = sorted(run.final.glob("*"))
    told = {path.name: sha256(path) if path.suffix == ".safetensors" else "" for path in files}
    return found | {"result": told, "card": card(run)}


def card(run: Run) -> list[str]:
    """The lines of a result's card that do not depend on time and memory."""
    page = run.final / "README.md"
    lines = page.read_text().splitlines() if page.exists() else []
    return [line for line in lines if not line.startswith(("| Wall time |", "| Peak memory "))]


def log_of(run: Run) -> Path:
    """Path of the log of a run's workers."""
    return run.root.parent / f"{run.root.name}.log"


def fork(recipe: Recipe, run: Run, environment: dict[str, str]) -> int:
    """Start a worker that trains and exits; returns its process id."""
    sys.stdout.flush()
    worker = os.fork()
    if worker:
        return worker
    status = 1
    try:
        os.environ.update(environment)
        silence = os.open(log_of(run), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        train(recipe, None if environment else "single", "fp32", run.root, resume="auto")
        status = 0
    except FinetuneError as error:
        print(f"error: {error}", file=sys.stderr)
        status = error.exit_status
    finally:
        sys.stdout.flush()
        os._exit(status)
    raise AssertionError


def worker_environments(backend: str, world: int) -> list[dict[str, str]]:
    """Environment variables that `accelerate launch` sets for each worker of a backend."""
    if world == 1:
        return [{}]
    place = str(ROOT / "accelerate_configs" / f"{backend}.yaml")
    words = [
        "--config_file",
        place,
        "--num_processes",
        str(world),
        "--mixed_precision",
        "no",
        "none.py",
    ]
    arguments = launch_command_parser().parse_args(words)
    arguments, defaults, _ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        # As `accelerate.commands.launch.launch_command` does before it starts anything (1.15).
        fields = ",".join(defaults.deepspeed_config)
        arguments.deepspeed_fields_from_accelerate_config = fields
        _, shared = prepare_deepspeed_cmd_env(arguments)
    else:
        shared = prepare_multi_gpu_env(arguments)
    shared = {key: value for key, value in shared.items() if os.environ.get(key) != value}
    machine = backends.load(backend)
    if machine.axes.any:
        shared |= machine.axes.variables()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def ended(workers: list[int]) -> bool:
    """Whether any worker has ended."""
    return any(
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) for worker in workers
    )


def wait(workers: list[int], seconds: float) -> None:
    """Wait until all workers have ended.

    Raises:
        TimeoutError: workers were left after `seconds`, and were killed.
    """
    left, until = list(workers), time.monotonic() + seconds
    while left:
        left = [worker for worker in left if os.waitpid(worker, os.WNOHANG) == (0, 0)]
        if left and time.monotonic() > until:
            for worker in left:
                os.kill(worker, signal.SIGKILL)
                os.waitpid(worker, 0)
            raise TimeoutError(f"{len(left)} workers did not end within {seconds} s")
        time.sleep(0.002)


def write_recipes(folder: Path) -> dict[str, Recipe]:
    """Recipes for models of 30,000 parameters, by what they train; uneven rows, many saves."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.quickstart.records import corpus
    from finetune.quickstart.tokenizer import train_tokenizer

    texts = [text for text, _ in zip(corpus(seed=0, rows=64), range(64), strict=False)]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(texts, 300, folder / "tokenizer")
    config: dict[str, Any] = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
    }  # fmt: skip
    fields = {
        "method": "pretrain",
        "data": [{"source": str(data), "format": "text"}],
        "eval_rows": 4,
        "evaluation": {"every": 10},
        "batch": {"rows": 4, "micro_rows": 1, "max_length": 64, "overlong": "truncate"},
        "data_checks": "report",
        "optim": {"lr": 1e-3},
        "saving": {"every": 2},
        "max_steps": STEPS,
    }
    experts = {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "head_dim": 8}
    experts |= {"num_experts": 4, "num_experts_per_tok": 2}
    base, tokenizer = folder / "base", {"tokenizer": str(folder / "tokenizer")}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(base)
    models = {
        "from scratch": {"config": config},
        "experts": {"config": config | experts},
        "pretrained": {"name": str(base)},
    }
    return {
        name: catalog.from_fields(fields | {"model": {**model, **tokenizer}})
        for name, model in models.items()
    }
