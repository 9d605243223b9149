"""Recipes to plan, and what the planner says of them."""

import argparse
import contextlib
import dataclasses
import io
import json
import shlex
from collections.abc import Callable
from typing import Any

from method_matrix import reasons

import finetune as ft
from finetune import backend
from finetune.cli import plan as arguments
from finetune.cli import plan_on_machine as command
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes import published
from finetune.planner.shapes.architecture import Architecture
from finetune.planner.shapes.read_config import read

ROWS = ft.Data("rows.jsonl", "messages")
BASE = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 512,
    "tie_word_embeddings": False, "head_dim": 64,
}  # fmt: skip


def refused(recipe: ft.Recipe, name: str, processes: int = 2) -> list[str]:
    """Reasons why a recipe cannot run on a backend."""
    machine = backend.load(name)
    return reasons(recipe, machine, 1 if machine.engine == "single" else processes)


def shape(name: str) -> Architecture:
    """The published shape of that name."""
    config = published.find(name)
    return read(config)


def large(**fields: Any) -> Workload:
    """A step of 2,048 tokens of a Llama of eight billion parameters."""
    config = BASE | {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "head_dim": 128,
    }  # fmt: skip
    return dataclasses.replace(Workload(read(config), 1, 2048), **fields)


def words(line: str) -> argparse.Namespace:
    """The words of `finetune plan` about a machine."""
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    return parser.parse_args(["recipe", *shlex.split(line)])


def ask(line: str, recipe: ft.Recipe, measure: Callable[[Any], float] | None = None) -> str:
    """What `finetune plan` prints for a recipe on a machine; `measure` is of a CPU."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert command.run(words(line), recipe, measure=measure) == 0
    return printed.getvalue()


def record(line: str, recipe: ft.Recipe, **measured: Any) -> dict[str, Any]:
    """The same as a record."""
    return json.loads(ask(f"{line} --json", recipe, **measured))
