"""Shared fixtures: a tiny real model, uneven data, and real runs through the command line."""

import functools
import gc
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hurried  # noqa: F401
import pytest
from made_once import once as once

import finetune as ft
from finetune import backend as backends
from finetune import catalog
from finetune.kernels.pointwise import compile_chains
from finetune.process.warm import TRAINING, Warm
from finetune.runs.run import Run
from finetune.training.run_options import Options

ROOT = Path(__file__).parent.parent
# pytest rewrites the assertions of each file of tests: once, if the result may be kept.
sys.dont_write_bytecode = False
# Two files are tested in parallel: with one thread per core in each, they would compete.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The command line also sets it before importing torch: the profiler writes into captured output.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# Coverage measures pytest's workers but not the commands that tests start: a signal that ends a
# command could interrupt coverage while it holds its lock.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)

LAUNCH_SECONDS = 900
"""Time limit in seconds: a launch takes about 10, or about 360 if it compiles an operator."""


LONG = (
    "test_slurm", "test_notebook", "test_two_hosts", "test_method_backends", "test_hosts",
    "test_backends", "test_image_families", "test_store",
    "test_prover", "test_benchmarks", "test_fault_table", "test_optim", "test_documents",
    "test_prepare", "test_division", "test_doctor", "test_image_training", "test_tuners",
    "test_faults", "test_damage", "test_verifier", "test_board", "test_divided_experts",
    "test_quickstart", "test_models",
)  # fmt: skip
"""Slowest files. They run first, so that no worker is left with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (*LONG, stem := item.path.stem).index(stem))


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays: a collection, as each training does one, passes over it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Stop coverage for a test whose signal handler could raise inside of coverage's lock."""
    library = sys.modules.get("coverage")
    running = library and library.Coverage.current()
    if running is None or item.get_closest_marker("signals") is None:
        return (yield)
    running.stop()
    try:
        return (yield)
    finally:
        running.start()


@pytest.fixture(autouse=True)
def eager_chains() -> None:
    """A training of an earlier test in this process may have compiled the chains of all."""
    compile_chains(False)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Generator[None]:
    """What a file of tests imported or made to last is passed over by later collections too."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of real models, tokenizers and data; tests that need it are skipped without it."""
    folder = Path(os.environ.get("FINETUNE_ASSETS", ROOT.parent / "shared" / "assets"))
    if not folder.is_dir():
        pytest.skip("no test assets: set FINETUNE_ASSETS")
    return folder


def merged(base: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """A recipe with other values; sections are merged into those of the base."""
    for name, value in sections.items():
        merge = isinstance(base.get(name), dict) and isinstance(value, dict)
        base[name] = base[name] | value if merge else value
    return base


@dataclass(frozen=True)
class Tiny:
    """A model folder with its tokenizer, and a data file of uneven conversations."""

    model: Path
    data: Path
    eval_data: Path

    def fields(self, **sections: Any) -> dict[str, Any]:
        """A recipe as a dictionary; sections are merged into the defaults."""
        base: dict[str, Any] = {
            "method": "sft",
            "model": {"name": str(self.model)},
            "data": [{"source": str(self.data), "format": "messages"}],
            "eval_data": [{"source": str(self.eval_data), "format": "messages"}],
            "batch": {"rows": 8, "micro_rows": 2, "max_length": 128},
            "optim": {"lr": 1e-3, "warmup": 2, "weight_decay": 0.1, "max_grad_norm": 0.5},
            "saving": {"every": 3},
            "evaluation": {"every": 3},
            "max_steps": 6,
        }
        return merged(base, sections)

    def other(
        self,
        folder: Path,
        kind: str,
        seed: int = 7,
        change: Callable[[str, Any], object] = lambda name, weight: None,
        **sizes: Any,
    ) -> Path:
        """Write a model of another kind with random weights and this tokenizer."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model)
        given: dict[str, Any] = {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(tokenizer),
            "max_position_embeddings": 256, "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None,
        } | sizes  # fmt: skip
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given))
        for name, parameter in model.named_parameters():
            change(name, parameter.data)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of this test session share; another suite has its own."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def session_cache(shared: Path) -> Path:
    """One cache of prepared rows and compiled code for what the tests of a session train."""
    os.environ["FINETUNE_CACHE"] = str(shared / "cache")
    return shared / "cache"


@pytest.fixture(scope="session")
def tiny(shared: Path) -> Tiny:
    place = once(shared / "tiny", build_tiny)
    return Tiny(place / "model", place / "data.jsonl", place / "eval.jsonl")


Train = Callable[..., Run]
Runs = Callable[[str, dict[str, dict[str, Any]]], dict[str, Run]]


@pytest.fixture
def train(tiny: Tiny, tmp_path: Path) -> Train:
    """Train in this process, in fp32: `train("a", optim={"lr": 1e-2})` has its run in tmp_path/a.

    `resume` goes on with the run of that name; `fields` replaces those of `tiny`.
    """

    def run(
        name: str = "run",
        *,
        resume: bool = False,
        precision: Any = "fp32",
        fields: dict[str, Any] | None = None,
        **sections: Any,
    ) -> Run:
        recipe = catalog.from_fields(fields or tiny.fields(**sections))
        options = Options(tmp_path / name, resume, plot=False)
        return ft.train(recipe, precision=precision, options=options)

    return run


@pytest.fixture(scope="session")
def run_of(tiny: Tiny, finetune: "Finetune", shared: Path) -> Train:
    """A finished run that all tests of a session share: `run_of("zero2", adapter={"r": 8})`.

    It is made by the command line when the first test asks, in fp32, on two processes unless the
    backend is `single`. A test that changes it starts from `copy_of(run, tmp_path / "mine")`.
    """

    def run(
        backend: str = "single",
        *words: str,
        processes: int = 2,
        fields: dict[str, Any] | None = None,
        **sections: Any,
    ) -> Run:
        fields = fields or tiny.fields(**sections)
        named = json.dumps([fields, backend, processes, words], sort_keys=True)
        key = f"{fields['method']}-{backend}-{hashlib.sha256(named.encode()).hexdigest()[:12]}"

        def make(place: Path) -> None:
            recipe = write_recipe(shared / "recipes" / f"{key}.json", fields)
            alone = backend == "single"
            verb = ["train", recipe] if alone else ["launch", recipe, "--processes", str(processes)]
            precision = [] if "--precision" in words else ["--precision", "fp32"]
            done = finetune(*verb, "--backend", backend, *precision, "--output", place, *words)
            assert done.status == 0, done.output

        return Run(once(shared / "runs" / key, make))

    return run


IN_TURN = ROOT / "tests/train_recipes.py"


@pytest.fixture(scope="session")
def runs_of(shared: Path) -> Runs:
    """Finished runs that one launch trains in turn: `runs_of("ddp", {"a": fields})["a"]`.

    As `run_of`, in fp32 on two processes, or as many as the backend divides a model over.
    """

    def run(backend: str, recipes: dict[str, dict[str, Any]]) -> dict[str, Run]:
        named = json.dumps([recipes, backend], sort_keys=True)
        key = f"{backend}-{hashlib.sha256(named.encode()).hexdigest()[:12]}"

        def make(place: Path) -> None:
            place.mkdir()
            places = {str(place / name): fields for name, fields in recipes.items()}
            words = (IN_TURN, write_recipe(place / "recipes.json", places))
            axes = backends.load(backend).axes
            sizes = axes.variables() if axes.any else {}
            accelerate_launch(backend, place, *words, env=sizes).passed()

        folder = once(shared / "in_turn" / key, make)
        return {name: Run(folder / name) for name in recipes}

    return run


def copy_of(run: Run, place: Path) -> Run:
    """A copy of a finished run, for a test that damages it or goes on with it."""
    shutil.copytree(run.root, place)
    return Run(place)


def cut_off(run: Run, place: Path, step: int) -> Run:
    """A copy of a run as a kill after the checkpoint of a step would have left it."""
    cut = copy_of(run, place)
    for later in cut.steps():
        if later > step:
            shutil.rmtree(cut.checkpoint(later))
    shutil.rmtree(cut.final)
    return cut


def slow(*given: Any) -> Any:
    """A row of a table that is left to the slow tests."""
    return pytest.param(*given, marks=pytest.mark.slow)


def slow_but(everyday: Collection[str], every: Iterable[str]) -> list[Any]:
    """Names of cases, those that are not everyday ones marked slow."""
    return [name if name in everyday else slow(name) for name in every]


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(read(path) | fields))


def problems_of(call: Callable[..., object], *given: Any, **named: Any) -> tuple[str, ...]:
    """The problems with which a call is refused."""
    with pytest.raises(ft.FinetuneError) as refusal:
        call(*given, **named)
    return refusal.value.problems


FP32 = 2e-6
"""Losses of about 6 in fp32: the order of a sum over ranks and pieces moves the seventh digit."""


def losses(run: Run, kind: str = "train") -> list[float]:
    return [record["loss"] for record in run.read_metrics(kind)]


def largest(first: list[float], second: list[float]) -> float:
    assert len(first) == len(second) > 0
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def apart(first: Run, second: Run, kind: str = "train") -> float:
    """The largest difference of the losses of two runs."""
    return largest(losses(first, kind), losses(second, kind))


def assert_same_losses(first: Run, second: Run) -> None:
    """Losses of steps and evaluations, and gradient norms, in fp32."""
    for kind in ("train", "eval"):
        assert apart(first, second, kind) < FP32
    norms = [[step["grad_norm"] for step in run.read_metrics("train")] for run in (first, second)]
    assert largest(*norms) < 1e-4  # norms of about 3


def equal_state(first: Path, second: Path) -> bool:
    """Whether two checkpoints hold the same weights and moments, bit for bit."""
    import torch
    from safetensors import safe_open

    for file in (first / "state").iterdir():
        with safe_open(file, "pt") as a, safe_open(second / "state" / file.name, "pt") as b:
            if set(a.keys()) != set(b.keys()):
                return False
            if not all(torch.equal(a.get_tensor(key), b.get_tensor(key)) for key in a.keys()):  # noqa: SIM118
                return False
    return True


def launch(
    finetune: "Finetune",
    recipe: Path,
    backend: str,
    place: Path,
    *words: str,
    seconds: float = LAUNCH_SECONDS,
) -> None:
    """Two processes; one is started by itself, without Accelerate's launcher."""
    verb = ["train", recipe] if backend == "single" else ["launch", recipe, "--processes", "2"]
    finetune(
        *verb, "--backend", backend, "--precision", "fp32", "--output", place, *words,
        seconds=seconds,
    ).passed()  # fmt: skip


@pytest.fixture
def compiling(eager_chains: None) -> None:
    """Chains of cheap operations are compiled where they are long enough."""
    compile_chains(True)


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Makes a file system of its own with options of `mount`, which lasts as long as the test."""

    def mount(options: str) -> Path:
        place = tmp_path / "mounted"
        place.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if subprocess.run(words, capture_output=True).returncode:
            pytest.skip("a file system cannot be mounted here")
        request.addfinalizer(lambda: subprocess.run(["umount", "-l", str(place)], check=True))
        return place

    return mount


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of three prompts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{word}"}}\n' for word in ("a cat", "the dog", "sees")))
    return path


def build_tiny(folder: Path) -> Tiny:
    """Write a tiny Llama with random weights, a byte-level tokenizer, and uneven rows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    rows = conversations(56)
    files = {}
    for name, part in (("data", rows[:48]), ("eval", rows[48:])):
        files[name] = written(folder / f"{name}.jsonl", ({"messages": row} for row in part))
    tokenizer = build_tokenizer([turn["content"] for row in rows for turn in row])
    config = LlamaConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=256,
        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return Tiny(folder / "model", files["data"], files["eval"])


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Questions with answers of 1 to 40 words, so that masks are uneven."""
    rng = random.Random(11)
    text = "the a cat dog sees red blue house tree runs sings over under quickly and then"
    words = text.split()
    return [
        [
            {"role": "user", "content": " ".join(rng.choices(words, k=rng.randint(1, 20)))},
            {"role": "assistant", "content": " ".join(rng.choices(words, k=rng.randint(1, 40)))},
        ]
        for _ in range(count)
    ]


def build_tokenizer(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>"
    )
    fast.chat_template = (ROOT / "finetune/data/chat/templates/chatml.jinja").read_text()
    return fast


@dataclass(frozen=True)
class Finished:
    """The exit status and output of a command."""

    status: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    def passed(self) -> "Finished":
        assert self.status == 0, self.output
        return self

    def refused(self) -> str:
        """What a command says that refuses a mistake."""
        assert self.status == 2, self.output
        assert "Traceback" not in self.output
        return self.stderr


Finetune = Callable[..., Finished]


@functools.cache
def warm_python() -> str:
    """An interpreter that has already imported PyTorch and related libraries."""
    return Warm((*TRAINING, "tests.hurried"), environment(ROOT)).python


@functools.cache
def gpus_are_here() -> bool:
    """Whether PyTorch sees a GPU: its libraries cannot be forked, so that every process is cold."""
    import torch

    return torch.cuda.is_available()


LIGHT = {"list", "show", "plan", "init", "import", "--version", "--help"}
"""Commands that import little."""


@pytest.fixture(scope="session")
def finetune(tmp_path_factory: pytest.TempPathFactory, session_cache: Path) -> Finetune:
    """Run the command line in a separate process: `finetune("train", "recipe.json", ...)`.

    The process and the workers that it launches are forked with imports done, unless `cold`.
    `plot` draws the loss curve, which takes a second of processor time.
    """
    here = tmp_path_factory.mktemp("here")

    def run(
        *words: str | Path,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        seconds: float = LAUNCH_SECONDS,
        plot: bool = False,
        cold: bool = False,
    ) -> Finished:
        light = not words or words[0] in LIGHT
        python = sys.executable if cold or light or gpus_are_here() else warm_python()
        command = [python, "-m", "finetune", *map(str, words)]
        if words[:1] in (("train",), ("launch",)) and not plot:
            command.append("--no-plot")
        return run_command(command, session_cache, cwd or here, env, seconds)

    return run


def run_command(
    command: list[str],
    cache: Path,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    seconds: float = LAUNCH_SECONDS,
) -> Finished:
    """Run a command until it ends or reaches the time limit, and end all of its processes."""
    process = subprocess.Popen(
        command,
        cwd=cwd or cache,
        env=environment(cache) | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            end_tree(process.pid)
            process.wait()
    return Finished(process.returncode, stdout, stderr)


def accelerate_launch(
    backend: str | Path,
    cache: Path,
    *words: str | Path,
    env: dict[str, str] | None = None,
) -> Finished:
    """Plain `accelerate launch` with the file of a backend: `... "-m", "finetune", "train"`.

    Its workers would read the sizes of stages and experts from its command line, which a forked
    launcher does not have: give them as variables in `env`.
    """
    named = isinstance(backend, str)
    config = ROOT / f"accelerate_configs/{backend}.yaml" if named else backend
    given = ["--config_file", config, "--mixed_precision", "no", "--main_process_port", "0"]
    command = [warm_python(), "-m", "accelerate.commands.launch", *map(str, [*given, *words])]
    return run_command(command, cache, env=env)


def together(script: str, count: int, folder: Path) -> Finished:
    """Run a script in several processes, which leave their group at its end."""
    path = folder / "script.py"
    path.write_text(script + "dist.destroy_process_group()\n")
    launched = [warm_python(), "-m", "torch.distributed.run", "--standalone"]
    return run_command([*launched, f"--nproc-per-node={count}", str(path)], folder)


def start(words: list[str], cache: Path, warm: bool = False, **env: str) -> "subprocess.Popen[str]":
    """Start the command line without waiting for it; with `warm`, its imports are already done."""
    return subprocess.Popen(
        [
            warm_python() if warm and not gpus_are_here() else sys.executable,
            "-m",
            "finetune",
            *words,
        ],
        cwd=cache,
        env=environment(cache) | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(
    happened: Callable[[], bool], process: "subprocess.Popen[str]", seconds: float = 300
) -> None:
    """Wait until a running process has caused a condition; asking takes a quarter of the time."""
    asked = time.monotonic()
    until = asked + seconds
    while not happened():
        if process.poll() is not None:
            raise AssertionError(f"it ended first: {process.communicate()}")
        if time.monotonic() > until:
            end_tree(process.pid)
            raise AssertionError("it did not happen in time")
        time.sleep(max(0.005, 3 * (time.monotonic() - asked)))
        asked = time.monotonic()


def end_tree(pid: int) -> None:
    """End a process and all processes that it started; torch gives each worker its own session."""
    from finetune.verification.proofs.runs import end, family_of

    end(family_of(pid))


def environment(cache: Path) -> dict[str, str]:
    """Environment variables of this process, without those that would affect a launch.

    The cache is a test's own but for compiled operations, which take each rank seconds to make.
    """
    session = Path(os.environ.get("FINETUNE_CACHE", cache))
    if cache not in (ROOT, session) and not (compiled := cache / "compiled").exists():
        for folder in (cache, session / "compiled"):
            folder.mkdir(parents=True, exist_ok=True)
        compiled.symlink_to(session / "compiled")
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ACCELERATE_", "FSDP_", "FINETUNE_", "RANK", "WORLD_SIZE"))
        and key != "TORCHINDUCTOR_CACHE_DIR"  # set by tests that train in this process
    }
    return kept | {"FINETUNE_CACHE": str(cache), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def written(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_recipe(path: Path, fields: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields))
    return path
