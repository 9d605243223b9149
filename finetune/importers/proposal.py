"""Propose a recipe for data and a model: `finetune init --model --data`, and `ft.recipe_for`."""

import copy
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune import catalog
from finetune.backend import Precision
from finetune.cache import cache
from finetune.data.chat.chat_templates import suitable
from finetune.data.prepare import prepare
from finetune.data.read.first_rows import has_turns
from finetune.errors import FinetuneError
from finetune.kernels.matmul_rate import rate_of_products
from finetune.methods.online import Online
from finetune.models.model import load_chat_of, load_tokenizer
from finetune.planner.estimate import advice, choice, hardware, wording
from finetune.planner.estimate.plan_api import described, whole_numbers
from finetune.planner.estimate.row_counts import local_rows
from finetune.planner.request import requested
from finetune.planner.rules import incompatibilities
from finetune.planner.shapes.config_files import decoder_fields, fields_of, model_source
from finetune.recipe import Optim, Recipe
from finetune.reports.inspection import recipe_of_data
from finetune.runs import limits

MEASURED = 20_000
"""Rows whose tokens are counted."""
STEPS = 50
"""Steps that an epoch should have at least; a batch has 8 to 32 rows."""
FEW_ROWS = 5_000
"""Rows below which they are passed several times."""
DOCUMENT = 2048
"""Maximum tokens of a piece of a longer document."""
FULL_LR, TIMES = 2e-5, 10
"""Learning rate of all weights, if the method has no default; adapters take `TIMES` as much."""
WEIGHTS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "all weights": (None, "none"), "LoRA": ({"r": 16}, "none"), "QLoRA": ({"r": 16}, "nf4"),
}  # fmt: skip
"""Adapter and quantization; of those that are about as fast, the first is chosen."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A recipe, the reason for each choice, and the words of `finetune plan` and `launch`."""

    recipe: Recipe
    notes: tuple[str, ...]
    plan: str
    launch: str


def recipe_for(
    model: str,
    data: str,
    method: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    overrides: Sequence[str] = (),
) -> Recipe:
    """A recipe for data and a model, as `finetune init FILE --model --data` writes it.

    Format and columns follow from the first rows, the method from what they hold, the length of
    rows from the tokens of up to 20,000 rows, and the weights to train (all, LoRA or QLoRA), the
    backend and the micro-batch are the fastest that safely fit.

    Args:
        model: hub name or folder.
        data: file, folder, glob or hub data set.
        method: by default `sft`, or `pretrain` for texts, `dpo` for pairs, `kto` or `classifier`
            for labels; it has to be given for prompts without answers.
        gpu: name of a GPU, such as RTX4090; by default those of this machine, or its CPU.
        gpus: number of GPUs; by default 1, or all of this machine.
        overrides: `key=value` words, which come last.

    Raises:
        FinetuneError: the data cannot be read, or nothing fits.
    """
    return propose(model, data, method, gpu, gpus, overrides).recipe


def propose(
    model: str,
    data: str,
    method: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    overrides: Sequence[str] = (),
) -> Proposal:
    """The recipe of `recipe_for`, with reasons and commands; errors as there."""
    whole_numbers(gpus=gpus)
    machine = described(gpu, gpus or 1)
    present = hardware.installed() if machine is None else []
    if present:
        machine = hardware.machine(present[0], gpus or len(present))
    recipe = recipe_of_data(data, model, overrides, method)
    if method is None and recipe.data[0].format == "text":
        recipe = recipe_of_data(data, model, overrides, "pretrain")
    fields = catalog.to_fields(recipe)
    notes = [_reading(recipe, method), *_template(recipe, fields)]
    notes += _sizes(recipe, fields, 1 if machine is None else machine.count)
    return _fitted(recipe, fields, notes, machine, overrides)


def _reading(recipe: Recipe, method: str | None) -> str:
    (data,) = recipe.data
    columns = f" with columns={json.dumps(data.columns)}" if data.columns else ""
    asked = "as asked" if method else "for what its rows hold"
    return f"data: format '{data.format}'{columns} by its columns; method '{recipe.method}' {asked}"


def _template(recipe: Recipe, fields: dict[str, Any]) -> Iterator[str]:
    """Set a built-in chat template if the data has conversations and the tokenizer has none."""
    tokenizer = load_tokenizer(recipe)
    (data,) = recipe.data
    if recipe.model.chat_template or tokenizer.chat_template or not has_turns(data):
        return
    name = suitable(tokenizer)
    fields["model"]["chat_template"] = name
    yield f"model.chat_template={name}: the tokenizer has no template of its own"


def _sizes(recipe: Recipe, fields: dict[str, Any], processes: int) -> Iterator[str]:
    """Set the row length, the batch, the epochs and the held-out rows by the tokens of the rows."""
    (data,) = recipe.data
    first = min(data.first or MEASURED, MEASURED)
    measured = catalog.from_fields(fields | {"data": [fields["data"][0] | {"first": first}]})
    chat = load_chat_of(measured)
    rows = prepare(measured, chat, cache("data")).train
    if not len(rows):
        raise FinetuneError(f"data: {data.source} has no row that {recipe.method} can train on")
    lengths = rows.documents.lengths[rows.members]
    count = max(len(rows), local_rows(recipe) or 0)
    longest, most = int(lengths.max()), int(np.quantile(lengths, 0.99))
    context = decoder_fields(fields_of(recipe)).get("max_position_embeddings") or longest
    asked = longest if longest <= 2 * most else most
    length = min(64 * math.ceil(asked / 64), context - recipe.completion_length)
    whole = recipe.data[0].format == "text"
    length = min(length, DOCUMENT) if whole else length
    over = int(np.count_nonzero(lengths > length))
    batch = {"max_length": length + recipe.completion_length}
    what = f"longest {longest:,} tokens, 99% at most {most:,}"
    if over or count > len(rows):
        batch["overlong"] = "split" if whole else "drop"
        what += f"; {over:,} of {len(rows):,} measured rows are longer: {batch['overlong']}"
    yield f"batch.max_length={batch['max_length']}: {what}"
    if batch.get("overlong") == "split":
        count = round(float(np.ceil(lengths / length).sum()) * count / len(rows))
    group = recipe.num_generations if isinstance(recipe, Online) else 1
    unit = math.lcm(processes, group)
    wanted = 2 ** int(np.clip(math.log2(max(1, count * recipe.rows_per_sample / STEPS)), 3, 5))
    batch["rows"] = unit * math.ceil(wanted / unit)
    fields["batch"] |= batch
    fields["epochs"] = epochs = 3 if count < FEW_ROWS and recipe.takes in SMALL else 1
    yield f"batch.rows={batch['rows']}, epochs={epochs}: for {count:,} rows"
    if count >= STEPS:
        fields["eval_rows"] = 512 if count > 20 * 512 else 0.05
        fields["evaluation"]["every"] = fields["saving"]["every"] = 0.2
        yield f"eval_rows={fields['eval_rows']}: held out; evaluated after each fifth of the run"


SMALL = ("text", "labelled")
"""Kinds of samples that a run passes several times if there are few."""


def _fitted(
    recipe: Recipe,
    fields: dict[str, Any],
    notes: list[str],
    machine: hardware.Machine | None,
    overrides: Sequence[str],
) -> Proposal:
    """Choose weights, backend and micro-batch: the fastest that safely fits."""
    cpu = machine is None
    precision: Precision = "bf16" if machine is None or machine.gpu.bf16 else "fp16"
    if machine is None:
        machine = hardware.processor(rate_of_products(precision), 1, limits.memory().total)
    try:
        model_source(recipe)
    except FinetuneError as error:
        made = _with_weights(recipe, fields, "LoRA", overrides)
        notes.append(f"adapter, backend: not chosen by memory: {error}")
        return _proposal(made, notes, machine, cpu, precision)
    tried, least, problems = dict[str, tuple[Recipe, advice.Option]](), list[Least](), list[str]()
    for name, made in _different(recipe, fields, overrides):
        try:
            found = choice.candidates(made, machine, precision, divided=False, cpu=cpu)
        except FinetuneError as error:
            problems += error.problems
            continue
        found = [each for each in found if not cpu or each.name == "single"]
        small = min(found, key=lambda each: each.peak.total)
        least.append((small.peak.total, f"{name} with {small.name}"))
        words = f"{wording.size(small.peak.total)} with {small.name} do not fit"
        fitting = advice.rank(found)
        ranked = choice.allowed(made, fitting, precision)
        if ranked:
            tried[name] = made, ranked[0]
            words = f"{ranked[0].speed} with {ranked[0].name}"
        elif fitting:
            backend = choice.backend_of(fitting[0], machine, precision)
            problems += incompatibilities(requested(made, backend, machine.count))
            words = f"only {backend.name} fits, and cannot train it"
        notes.append(f"{name}: {words}")
    where = "this machine" if cpu else wording.machine_words(machine)
    if not tried and not problems:
        count, words = min(least)
        problems = [
            f"nothing fits on {where} with {wording.size(machine.usable)}: the smallest is {words},"
            f" {wording.size(count)}; give more or larger GPUs (--gpu H100-80 --gpus 2), a smaller "
            "model, or a smaller batch.max_length"
        ]
    if not tried:
        raise FinetuneError(*dict.fromkeys(problems))
    safe = [name for name, (_, best) in tried.items() if best.status == "safe"] or [*tried]
    fastest = min(tried[name][1].comparable for name in safe)
    name = next(n for n in safe if tried[n][1].comparable <= fastest * (1 + advice.SAME_TIME))
    made, best = tried[name]
    made, words = choice.chosen(made.with_backend(best.name), best)
    host = f", and {wording.size(best.host)} of host memory" if best.host else ""
    notes.append(
        f"{name}, backend={best.name}, {', '.join(words)}: the fastest that fits on {where}, "
        f"{wording.size(best.peak.total)} of {wording.size(best.usable)}{host}"
    )
    return _proposal(catalog.override(made, overrides), notes, machine, cpu, precision)


Least = tuple[float, str]
"""Bytes of the smallest way to train, and what it is."""


def _different(
    recipe: Recipe, fields: dict[str, Any], overrides: Sequence[str]
) -> Iterator[tuple[str, Recipe]]:
    """The recipes for each of `WEIGHTS` that the overrides leave different."""
    seen = list[Recipe]()
    for name in WEIGHTS:
        made = _with_weights(recipe, fields, name, overrides)
        if made not in seen:
            yield name, made
        seen.append(made)


def _with_weights(
    recipe: Recipe, fields: dict[str, Any], name: str, overrides: Sequence[str]
) -> Recipe:
    """A recipe that trains these weights, with a learning rate for them."""
    changed = copy.deepcopy(fields)
    changed["adapter"], changed["model"]["quantization"] = copy.deepcopy(WEIGHTS[name])
    made = catalog.with_words(changed, overrides)
    if any(word.startswith("optim.lr=") for word in overrides):
        return made
    lr = FULL_LR if recipe.optim.lr == Optim().lr else recipe.optim.lr
    return made.with_optim(lr=lr if made.adapter is None else round(TIMES * lr, 12))


def _proposal(
    recipe: Recipe, notes: list[str], machine: hardware.Machine, cpu: bool, precision: Precision
) -> Proposal:
    several = machine.count > 1
    gpus = "" if cpu else f" --backend {recipe.backend} --gpu {machine.gpu.name}"
    half = " --precision fp16" if precision == "fp16" else ""
    plan = f"{gpus}{f' --gpus {machine.count}' if several else ''}{half}"
    launch = f"{f' --processes {machine.count}' if several else ''}{half}"
    return Proposal(recipe, tuple(notes), plan, launch)


def write(path: Path, proposal: Proposal, model: str, data: str) -> str:
    """Write the file of a proposal; returns what to print: the reasons, and the next commands."""
    from finetune.importers import recipe_file

    recipe_file.write(path, proposal.recipe, f"{model} on {data}.", list(proposal.notes))
    lines = [*proposal.notes, f"wrote {path}", "next:", f"  finetune inspect {path}"]
    lines += [
        f"  finetune plan {path}{proposal.plan}",
        f"  finetune launch {path}{proposal.launch}",
    ]
    return "\n".join(lines)
