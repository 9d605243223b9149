"""The subjects of fuzzing: files that the toolkit reads, with the functions that read them."""

import contextlib
import dataclasses
import io
import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.fuzz import changes
from finetune import backend, catalog
from finetune.checkpoints import checkpoint
from finetune.checkpoints import resume as claim
from finetune.checkpoints.base_weights import fingerprint
from finetune.checks import request
from finetune.cli import main as cli
from finetune.data.chat.render import load_chat
from finetune.data.fingerprint import fingerprint as key_of
from finetune.data.fingerprint import source_keys
from finetune.data.prepare import COUNTS, prepare
from finetune.data.read.sources import find_sources
from finetune.errors import FinetuneError
from finetune.evaluation.questions import of_source
from finetune.exporters.export import export
from finetune.exporters.publish import describe
from finetune.inference.generate import open_model
from finetune.inference.load import find_checkpoint, open_checkpoint
from finetune.methods.sft import SFT
from finetune.models.model import load_tokenizer
from finetune.models.starting_adapter import complete_adapter
from finetune.quickstart.tokenizer import train_tokenizer
from finetune.recipe import Data, Model, Recipe
from finetune.reports.proof_page import read_proof, write_page
from finetune.runs.manifest import damage, newest_intact, sealed
from finetune.runs.metrics import Metrics, read_history
from finetune.runs.run import Run, open_run
from finetune.training.worker import train

BACKENDS = Path(__file__).parents[2] / "accelerate_configs"
SAID = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the name of the red house?"},
    {"role": "assistant", "content": "It has none."},
]
CALLED = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "w", "arguments": {"city": "Ulm"}}}]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "Sunny."},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": SAID}, {"messages": CALLED, "tools": TOOLS}],
    "sharegpt": [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
                  "system": "s"}],
    "alpaca": [{"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]}],
    "text": [{"text": "a red house"}],
}  # fmt: skip


PLANNED = ("--json", "--backend", "single", "--gpu", "h100")
"""Arguments that name a machine, so that the speed of this one is not measured in each case."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """Files of one kind, and the function that reads one of them."""

    files: Sequence[Path]
    """Files to change, one per case."""
    read: Callable[[Path], object]
    """Reads a file; must return or raise FinetuneError."""
    weight: float
    """Relative share of cases."""
    finish: Callable[[random.Random, Path], None] = lambda _, __: None
    """Updates the hash in a changed file, so that the contents behind it are read."""
    change: Callable[[random.Random, str, bytes], bytes] = changes.change


def command(*words: str | Path) -> None:
    """Run the command line in this process.

    Raises:
        FinetuneError: it failed with an error message.
        AssertionError: it failed in another way.
    """
    told = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
        status = cli.main([str(word) for word in words])
    if status not in (0, 1, 2):
        raise AssertionError(f"exit status {status}: {told.getvalue()}")
    lines = told.getvalue().splitlines()
    if status and not any(line.startswith("error: ") for line in lines):
        raise AssertionError(f"exit status {status} without a reason: {told.getvalue()[:200]}")
    if status:
        raise FinetuneError(*(line for line in lines if line.startswith("error: ")))


def small_recipe(home: Path) -> Recipe:
    model = Model(str(home / "model"))
    data = Data(str(home / "data.jsonl"), "messages")
    recipe = SFT(model).with_data(data).with_lora(r=2)
    recipe = recipe.with_batch(rows=2, micro_rows=1, max_length=512).with_optim(lr=1e-3)
    saving = dataclasses.replace(recipe.saving, every=1)
    evaluation = dataclasses.replace(recipe.evaluation, every=1)
    return dataclasses.replace(
        recipe, max_steps=2, eval_rows=2, saving=saving, evaluation=evaluation
    )


def build(home: Path) -> None:
    """Write a small model, data, a recipe, a run, and an export of the run."""
    rows = [{"messages": [*SAID[:2], {"role": "assistant", "content": f"It is {number}."}]}
            for number in range(8)]  # fmt: skip
    home.mkdir(parents=True, exist_ok=True)
    (home / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_tokenizer([json.dumps(rows), json.dumps(CALLED)], 300, home / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=300, max_position_embeddings=512, pad_token_id=0,
        bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(home / "model")
    recipe = small_recipe(home)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = train(recipe, precision="fp32", output=home / "run")
    samples = [{"prompt": "a", "before": "b", "after": "c", "reference": "c"}]
    run.samples.write_text(json.dumps(samples))
    run.proof.write_text(json.dumps(proof_of(recipe)))
    (home / "proof").mkdir()
    shutil.copy(run.proof, home / "proof/proof.json")
    export(run, home / "exported")


def proof_of(recipe: Recipe) -> dict[str, Any]:
    """A proof in the format of `finetune prove`."""
    check = {"kind": "own", "backend": "ddp", "name": "equal", "passed": False, "summary": "s"}
    grid = {"columns": ["step", "loss"], "rows": [[1, 2.5]]}
    return {
        "format": 1, "proved": False, "notes": {"own": ["n"]}, "verdict": "no",
        "recipe": catalog.to_fields(recipe), "seconds": 1.0,
        "settings": {"steps": 2, "processes": 2, "precision": "fp32"}, "launches": 3,
        "environment": {"started": "now", "commit": "0", "command": ["finetune", "prove"]},
        "tolerance": {"loss": 1e-4}, "checks": [check | {"grid": grid}, check | {"grid": None}],
        "refused": [{"kind": "own", "backend": "zero3", "reason": "r"}],
    }  # fmt: skip


def subjects(home: Path) -> dict[str, Subject]:
    """All subjects, with the files that `build` wrote."""
    run, recipe = Run(home / "run"), small_recipe(home)
    records = [
        run.recipe, run.plan, run.environment, run.realised, run.data, run.metrics, run.samples,
        run.proof, run.best,
    ]  # fmt: skip
    manifest = run.checkpoint(2) / "manifest.json"
    exported = home / "exported"
    model_files = [path for path in sorted((home / "model").iterdir()) if path.name != "README.md"]
    adapter_files = [exported / name for name in ("adapter_config.json",
                     "adapter_model.safetensors", "tokenizer_config.json",
                     "generation_config.json")]  # fmt: skip
    template = home / "model/chat_template.jinja"
    return {
        "recipes": Subject(_recipes(home), _read_recipe, 20),
        "overrides": Subject([home / "overrides.txt"], _overrides(home), 10, change=_pairs(recipe)),
        "plans": Subject(
            [home / "recipes/recipe.json"],
            lambda path: command("plan", path, *PLANNED), 3,
        ),
        "backends": Subject(_backends(home), _read_backend, 20),
        "reports": Subject(records, lambda _: command("report", run.root), 3),
        "cards": Subject(records, lambda _: describe(run, plot=False), 3),
        "resumed": Subject([*records[:6], run.best, manifest], _resumed(run, recipe), 14, _reseal),
        "manifests": Subject([manifest], _manifests(run), 12, _reseal),
        "proofs": Subject([home / "proof/proof.json"], _proofs(home), 2),
        "data": Subject(_data_files(home), _read_data(home), 16),
        "asked": Subject(
            [path for path in _data_files(home) if not path.name.startswith("text")], _asked, 3
        ),
        "templates": Subject([template], _templates(home), 2),
        "prepared": Subject(_prepared(home), _read_prepared(home), 4, _reseal),
        "models": Subject(model_files, _models(home), 0.8),
        "adapters": Subject(adapter_files, _adapters(home), 1.5),
        "exports": Subject([exported / "export.json"], lambda _: _exports(home), 0.5),
        "starts": Subject(
            [*model_files, home / "data.jsonl"], _starts(home), 0.08,
        ),
    }  # fmt: skip


# Recipes and backends.


def _recipes(home: Path) -> list[Path]:
    folder, recipe = home / "recipes", small_recipe(home)
    folder.mkdir(exist_ok=True)
    fields = catalog.to_fields(recipe)
    (folder / "recipe.json").write_text(json.dumps(fields))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(fields))
    (folder / "recipe.py").write_text(
        '"""A recipe."""\n\nimport finetune as ft\n\n'
        'recipe = ft.SFT(ft.Model("a/b")).with_data(ft.Data("d.jsonl", "messages"))\n'
        "recipe = recipe.with_lora(r=2).with_optim(lr=1e-3)\n"
    )
    return sorted(folder.iterdir())


def _read_recipe(path: Path) -> None:
    catalog.describe(path)
    catalog.override(catalog.load(path), ["seed=1"])


def _overrides(home: Path) -> Callable[[Path], object]:
    def read(path: Path) -> None:
        pairs = path.read_text("utf-8", "surrogatepass").split("\x1f")
        catalog.resolve(str(home / "recipes/recipe.json"), pairs)

    (home / "overrides.txt").write_text("optim.lr=1e-4")
    return read


def _pairs(recipe: Recipe) -> Callable[[random.Random, str, bytes], bytes]:
    fields = catalog.to_fields(recipe)
    paths = [".".join(map(str, path)) for path in changes._places(fields)]

    def change(rng: random.Random, name: str, content: bytes) -> bytes:
        pairs = list[str]()
        for _ in range(rng.choice((1, 1, 2, 4))):
            value = rng.choice(changes.VALUES)
            text = value if isinstance(value, str) and rng.random() < 0.5 else repr(value)
            text = rng.choice((text, changes._written(value), rng.choice(changes.ALIASES)))
            path = rng.choice(paths) + rng.choice(("", "", "", ".a", ".0", ".", ".-1", ".a.b.c"))
            pairs.append(path + rng.choice(("=", "=", "=", "", "==")) + text)
        return "\x1f".join(pairs).encode("utf-8", "surrogatepass")

    return change


def _backends(home: Path) -> list[Path]:
    folder = home / "backends"
    folder.mkdir(exist_ok=True)
    return [
        Path(shutil.copy(BACKENDS / f"{name}.yaml", folder))
        for name in ("single", "fsdp_full_shard", "zero3_offload")
    ]


def _read_backend(path: Path) -> None:
    backend.load(str(path))
    backend.describe(str(path))


# Runs.


def _resumed(run: Run, recipe: Recipe) -> Callable[[Path], object]:
    plan = request.check(recipe, backend.load("single"), 1, "fp32")

    def read(_: Path) -> None:
        claim.finished(run, plan)
        step = claim.claim(run, plan, resume="auto")
        if step is not None:
            checkpoint.progress_of(run.checkpoint(step))
            Metrics(run, is_main=True).resume_at(step)

    return read


def _reseal(rng: random.Random, path: Path) -> None:
    if path.name in ("manifest.json", COUNTS) and rng.random() < 0.7:
        with contextlib.suppress(ValueError, TypeError, RecursionError, AttributeError):
            path.write_text(json.dumps(sealed(json.loads(path.read_bytes()))))


def _manifests(run: Run) -> Callable[[Path], object]:
    def read(_: Path) -> None:
        damage(run.checkpoint(2))
        newest_intact(run)
        for asked in (None, 2, "best"):
            open_checkpoint(run, asked)
        find_checkpoint(run)
        checkpoint.progress_of(run.checkpoint(2))

    return read


def _proofs(home: Path) -> Callable[[Path], object]:
    def read(path: Path) -> None:
        command("report", home / "run", "--proof", path.parent)
        read_proof(path)
        write_page(path, home / "proof/proof.html")

    return read


def _exports(home: Path) -> None:
    export(open_run(home / "run"), home / "exported")


# Data.


def _data_files(home: Path) -> list[Path]:
    folder = home / "data"
    folder.mkdir(exist_ok=True)
    for name, rows in ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / f"{name}.jsonl").write_bytes(text)
        (folder / f"{name}.json").write_text(json.dumps(rows))
        for ending in changes.PACKERS:
            _, pack = changes.PACKERS[ending]
            (folder / f"{name}.jsonl{ending}").write_bytes(pack(text))
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
        with pyarrow.ipc.new_stream(folder / f"{name}.arrow", table.schema) as stream:
            stream.write_table(table)
    (folder / "alpaca.csv").write_text("instruction,input,output\na,b,c\nd,,f\n")
    (folder / "alpaca.tsv").write_text("instruction\tinput\toutput\na\tb\tc\n")
    (folder / "text.txt").write_text("a red house\n<|endoftext|>\nanother\n")
    (folder / "text.csv.gz").write_bytes(changes.PACKERS[".gz"][1](b"text\na\nb\n"))
    return sorted(folder.iterdir())


def _forget(home: Path) -> None:
    shutil.rmtree(home / "cache", ignore_errors=True)


def _read_data(home: Path) -> Callable[[Path], object]:
    tokenizer = load_tokenizer(small_recipe(home))
    chat = load_chat(tokenizer, None)

    def read(path: Path) -> None:
        _forget(home)
        data = Data(str(path), path.name.split(".")[0])
        base = dataclasses.replace(small_recipe(home), data=(data,), eval_rows=None)
        prepare(base, chat, home / "cache")

    return read


def _asked(path: Path) -> None:
    of_source(Data(str(path), path.name.split(".")[0]))


def _templates(home: Path) -> Callable[[Path], object]:
    def read(path: Path) -> None:
        recipe = small_recipe(home)
        recipe = dataclasses.replace(
            recipe, model=dataclasses.replace(recipe.model, chat_template=str(path))
        )
        tokenizer = load_tokenizer(recipe)
        _forget(home)
        prepare(recipe, load_chat(tokenizer, str(path)), home / "cache")

    return read


def _prepared(home: Path) -> list[Path]:
    recipe = small_recipe(home)
    chat = load_chat(load_tokenizer(recipe), None)
    folder = prepare(recipe, chat, home / "prepared").folder
    sources, evaluated = find_sources(recipe)
    both = [*sources, *evaluated]
    assert folder.name == key_of(recipe, both, source_keys(recipe, chat, both))
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _read_prepared(home: Path) -> Callable[[Path], object]:
    recipe = small_recipe(home)
    chat = load_chat(load_tokenizer(recipe), None)

    def read(_: Path) -> None:
        prepared = prepare(recipe, chat, home / "prepared")
        for number in range(len(prepared.train)):
            prepared.train.row(number)
            prepared.place(int(prepared.train.numbers(number)[0]))

    return read


# Models and adapters.


def _models(home: Path) -> Callable[[Path], object]:
    recipe = small_recipe(home)

    def read(_: Path) -> None:
        fingerprint(recipe.model)
        load_chat(load_tokenizer(recipe), None)
        command("plan", home / "recipes/recipe.json", *PLANNED)
        open_model(home / "model")

    return read


def _adapters(home: Path) -> Callable[[Path], object]:
    recipe = small_recipe(home)
    model = dataclasses.replace(recipe.model, adapter=str(home / "exported"))
    recipe = dataclasses.replace(recipe, model=model, adapter=None)

    def read(_: Path) -> None:
        load_tokenizer(complete_adapter(recipe))
        open_model(home / "exported")

    return read


def _starts(home: Path) -> Callable[[Path], object]:
    recipe = dataclasses.replace(small_recipe(home), max_steps=1)

    def read(_: Path) -> None:
        shutil.rmtree(home / "started", ignore_errors=True)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run = train(recipe, precision="fp32", output=home / "started")
        assert all(math.isfinite(each.loss) for each in read_history(run).trained)

    return read
