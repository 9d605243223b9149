"""Write the table of methods and backends in docs/backends.md from the planner's rules.

    python -m tests.method_matrix

A cell is `yes` where a test trains the method on a backend of the group (`test_of` names it), and
`no` where the planner refuses it with the reason below the table. What an adapter or a quantised
base adds is another table's: a run is possible where both say so, which `exceptions` checks.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

from finetune import backend as backends
from finetune import catalog
from finetune.errors import FinetuneError
from finetune.methods import METHODS
from finetune.planner import plan
from finetune.recipe import LoRA, Recipe

PAGE = Path(__file__).parent.parent / "docs/backends.md"
BEGIN, END = "<!-- table: python -m tests.method_matrix -->", "<!-- end of the table -->"
GROUPS = {
    "one process": ("single",),
    "DDP": ("ddp",),
    "FSDP2": (
        "fsdp_full_shard", "fsdp_shard_grad_op", "fsdp_full_shard_offload",
        "fsdp_shard_grad_op_offload", "hsdp", "hsdp_shard_grad_op",
    ),
    "ZeRO-1, -2": ("zero2", "zero1", "zero2_offload"),
    "ZeRO-3": ("zero3", "zero3_offload", "zero3_nvme"),
    "`tp`": ("tp", "tp_fsdp"),
    "`pp`": ("pp", "pp_fsdp"),
    "`pp_tp`": ("pp_tp", "pp_tp_fsdp"),
    "`sp`": ("sp", "sp_fsdp", "sp_tp", "cp"),
    "`ep`": ("ep_fsdp", "ep_tp"),
}  # fmt: skip
"""Backends that answer alike for every method; the first is the one that tests train on."""
PACKED = "packing"
KINDS = ("all weights", "LoRA", "nf4", "int8")
ROWS = {
    "pretrain": "text", "dpo": "preference", "orpo": "preference", "simpo": "preference",
    "cpo": "preference", "kto": "kto", "reward": "preference", "classifier": "labelled",
    "grpo": "prompts", "rloo": "prompts",
}  # fmt: skip
"""A format of each method; of the others `messages`."""
NEEDED: dict[str, dict[str, Any]] = {
    "classifier": {"labels": ["a", "b"]},
    "distill": {"teacher": {"name": "m"}},
    "grpo": {"reward_funcs": ["json_valid"], "max_completion_length": 16},
    "rloo": {"reward_funcs": ["json_valid"], "max_completion_length": 16},
}
EVERYWHERE = "test_method_backends.py::test_a_method_trains_there_as_on_one_process"
PACKS = "test_method_backends.py::test_packs_train_as_rows_do"
PUBLISHED = "test_training_reproduces_published_values"
ONE, SEVERAL = "one process", "DDP; FSDP2; ZeRO-1, -2; ZeRO-3"
CELLS = [
    ("test_backends", "test_losses_are_those_of_one_process", "sft", f"{ONE}; {SEVERAL}"),
    ("test_division", "test_every_division_learns_what_one_process_learns", "sft",
     "`tp`; `pp`; `pp_tp`; `sp`"),
    ("test_divided_experts", "test_divided_experts_learn_what_one_process_learns", "sft", "`ep`"),
    ("test_packed_training", "test_packed_losses_on_two_processes_are_those_of_one", "sft", PACKED),
    ("test_quickstart",
     "test_the_quickstart_teaches_what_the_base_fails_and_its_next_commands_work", "pretrain", ONE),
    ("test_dpo", PUBLISHED, "dpo", ONE),
    ("test_dpo", "test_packs_hold_whole_pairs_and_train_as_pairs_do", "dpo", PACKED),
    ("test_pair_methods", PUBLISHED, "orpo simpo cpo", ONE),
    ("test_kto", PUBLISHED, "kto", ONE),
    ("test_kto", "test_packs_train_as_their_answers_do", "kto", PACKED),
    ("test_scores", PUBLISHED, "reward classifier", ONE),
    ("test_scores", "test_packs_train_as_rows_do", "reward classifier", PACKED),
    ("test_distill", PUBLISHED, "distill", ONE),
    ("test_divided_methods", "test_a_divided_teacher_gives_the_losses_of_one_process", "distill",
     "`tp`"),
    ("test_rollouts", "test_a_run_learns_from_its_groups_and_says_how", "grpo", ONE),
    ("test_rollouts", "test_processes_sample_the_same_and_take_the_same_steps", "grpo", SEVERAL),
    ("test_divided_methods", "test_completions_of_gathered_weights_are_those_of_one_process",
     "grpo", "`tp`"),
    ("test_online", "test_losses_and_gradients_are_the_published_ones", "rloo", ONE),
]  # fmt: skip
"""Tests that train methods on groups of backends, or packed; `EVERYWHERE` trains the others."""
RUN: dict[str, dict[str, str]] = {
    method: {
        column: f"{file}.py::{test}"
        for file, test, methods, columns in CELLS
        if method in methods.split()
        for column in columns.split("; ")
    }
    for method in METHODS
}


def recipe_of(method: str, kind: str = "all weights", packing: bool = False) -> Recipe:
    """A recipe of a method with every other default."""
    fields: dict[str, Any] = {
        "method": method, "model": {"name": "m"},
        "data": [{"source": "d.jsonl", "format": ROWS.get(method, "messages")}],
        "batch": {"rows": 8, "max_length": 64, "packing": packing},
        **NEEDED.get(method, {}),
    }  # fmt: skip
    made = catalog.from_fields(fields)
    if kind == "all weights":
        return made
    model = dataclasses.replace(made.model, quantization="none" if kind == "LoRA" else kind)
    return dataclasses.replace(made, model=model, adapter=LoRA())


def reasons(recipe: Recipe, backend: Any, processes: int | None = None) -> list[str]:
    """Why the planner refuses a recipe on a backend; none where it does not."""
    try:
        plan(recipe, backend, processes)
    except FinetuneError as error:
        return list(error.problems)
    return []


def exceptions() -> list[str]:
    """Cells that are not what the tables of adapters, methods and packing say together."""
    found: list[str] = []
    adapted = {
        (kind, backend): not reasons(recipe_of("sft", kind), backend)
        for kind in KINDS
        for group in GROUPS.values()
        for backend in group
    }
    for method in METHODS:
        packs = not reasons(recipe_of(method, packing=True), "single")
        for name, group in GROUPS.items():
            runs = cell(method, name) != "no"
            for kind in KINDS:
                for packing in (False, True):
                    recipe = recipe_of(method, kind, packing)
                    for backend in group:
                        said = runs and adapted[kind, backend] and (packs or not packing)
                        said &= not _is_gathered_and_quantised(recipe, backend)
                        if said == bool(reasons(recipe, backend)):
                            found.append(f"{method}, {kind}, packing={packing}, {backend}")
    return found


def _is_gathered_and_quantised(recipe: Recipe, backend: str) -> bool:
    """Whether quantised weights would have to be gathered, which docs/parallelism.md excludes."""
    divided = backends.load(backend).axes.any
    return recipe.sampled is not None and divided and recipe.model.quantization != "none"


def test_of(method: str, column: str) -> str:
    """The test that trains a method on a group of backends, or packed."""
    return RUN[method].get(column, PACKS if column == PACKED else EVERYWHERE)


def cell(method: str, column: str) -> str:
    """`yes` or `no`."""
    backend = "single" if column == PACKED else GROUPS[column][0]
    return "no" if reasons(recipe_of(method, packing=column == PACKED), backend) else "yes"


def table() -> str:
    """The table and the reasons below it, in Markdown."""
    columns = [*GROUPS, PACKED]
    lines = [f"| method | {' | '.join(columns)} |", f"|---|{':-:|' * len(columns)}"]
    refused: dict[str, list[str]] = {}
    for method in METHODS:
        lines.append(f"| `{method}` | {' | '.join(cell(method, name) for name in columns)} |")
        for name in columns:
            backend = "single" if name == PACKED else GROUPS[name][0]
            for reason in reasons(recipe_of(method, packing=name == PACKED), backend):
                refused.setdefault(general(reason, method), []).append(f"`{method}`")
    said = [f"- {', '.join(dict.fromkeys(names))}: {why}" for why, names in refused.items()]
    return "\n".join([*lines, "", *said])


def general(reason: str, method: str) -> str:
    """A reason without its method, its backend and what to use instead."""
    short = reason.partition("; ")[0].removeprefix("method: ").removeprefix(f"{method} ")
    short = re.sub(r" \((backend|pipeline|tensor|sequence)[^)]*\)", "", short)
    backends = "|".join(sorted((b for g in GROUPS.values() for b in g), key=len, reverse=True))
    return re.sub(rf"\b(under|because) (?:{backends})\b", r"\1 such a backend", short)


def write(page: Path = PAGE) -> None:
    """Put the table between its marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write()
