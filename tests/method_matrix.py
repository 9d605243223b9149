"""Write the README's table of methods and backends from the planner's rules.

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

README = Path(__file__).parent.parent / "README.md"
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
AS_ONE = "test_backends_train_as_one_process_does"
PUBLISHED = "test_training_reproduces_published_values"
DIVIDED = "test_division.py::test_every_division_learns_what_one_process_learns"
EXPERTS = "test_divided_experts.py::test_divided_experts_learn_what_one_process_learns"
FIRST = "test_the_quickstart_teaches_what_the_base_fails_and_its_next_commands_work"
EVERYWHERE = "test_method_backends.py::test_a_method_trains_there_as_on_one_process"
PACKS = "test_method_backends.py::test_packs_train_as_rows_do"
SAMPLED = "test_rollouts.py::test_processes_sample_the_same_and_take_the_same_steps"
TAUGHT = "test_a_divided_teacher_gives_the_losses_of_one_process"
GATHERED = "test_completions_of_gathered_weights_are_those_of_one_process"


def _on(groups: str, test: str) -> dict[str, str]:
    return dict.fromkeys(groups.split("; "), test)


SEVERAL = "DDP; FSDP2; ZeRO-1, -2; ZeRO-3"
SCORES = {
    "one process": f"test_scores.py::{PUBLISHED}",
    **_on(SEVERAL, f"test_scores.py::{AS_ONE}"),
    PACKED: "test_scores.py::test_packs_train_as_rows_do",
}
RUN: dict[str, dict[str, str]] = {
    "sft": {
        **_on(f"one process; {SEVERAL}", "test_backends.py::test_losses_are_those_of_one_process"),
        **_on("`tp`; `pp`; `pp_tp`; `sp`", DIVIDED),
        "`ep`": EXPERTS,
        PACKED: "test_packed_training.py::test_packed_losses_on_two_processes_are_those_of_one",
    },
    "pretrain": _on("one process", f"test_quickstart.py::{FIRST}"),
    "dpo": {
        "one process": f"test_dpo.py::{PUBLISHED}",
        **_on(SEVERAL, f"test_dpo.py::{AS_ONE}"),
        PACKED: "test_dpo.py::test_packs_hold_whole_pairs_and_train_as_pairs_do",
    },
    "orpo": {
        "one process": f"test_pair_methods.py::{PUBLISHED}",
        "FSDP2": f"test_pair_methods.py::{AS_ONE}",
    },
    "simpo": {
        "one process": f"test_pair_methods.py::{PUBLISHED}",
        "ZeRO-3": f"test_pair_methods.py::{AS_ONE}",
    },
    "cpo": _on("one process", f"test_pair_methods.py::{PUBLISHED}"),
    "kto": {
        "one process": f"test_kto.py::{PUBLISHED}",
        **_on("DDP; FSDP2; ZeRO-3", f"test_kto.py::{AS_ONE}"),
        PACKED: "test_kto.py::test_packs_train_as_their_answers_do",
    },
    "reward": SCORES,
    "classifier": SCORES,
    "distill": {
        "one process": f"test_distill.py::{PUBLISHED}",
        **_on(SEVERAL, f"test_distill.py::{AS_ONE}"),
        "`tp`": f"test_divided_methods.py::{TAUGHT}",
    },
    "grpo": {
        "one process": "test_rollouts.py::test_a_run_learns_from_its_groups_and_says_how",
        **_on(SEVERAL, SAMPLED),
        "`tp`": f"test_divided_methods.py::{GATHERED}",
    },
    "rloo": _on("one process", "test_online.py::test_losses_and_gradients_are_the_published_ones"),
}  # fmt: skip
"""Tests that train a method on a group of backends, or packed; `EVERYWHERE` trains the others."""


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
    stored = "none" if kind == "LoRA" else kind
    model = dataclasses.replace(made.model, quantization=stored)
    return dataclasses.replace(made, model=model, adapter=LoRA())


def reasons(recipe: Recipe, backend: str) -> list[str]:
    """Why the planner refuses a recipe on a backend; none where it does not."""
    try:
        plan(recipe, backend)
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
    short = re.sub(r" \((pipeline|tensor|sequence)[^)]*\)", "", short)
    backends = "|".join(sorted((b for g in GROUPS.values() for b in g), key=len, reverse=True))
    return re.sub(rf"\b(under|because) (?:{backends})\b", r"\1 such a backend", short)


def write(readme: Path = README) -> None:
    """Put the table between its marks."""
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write()
