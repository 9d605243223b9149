"""Rules for backends that divide a model: required divisibility and unsupported combinations."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from finetune.backend import Backend, names
from finetune.backend.axes import Axes, experts_problem, multiples
from finetune.planner.balance_loss import expert_count
from finetune.planner.families import Axis, dividing, family_of
from finetune.planner.mesh import mesh_of
from finetune.planner.padding import padding
from finetune.planner.shapes.config_files import fields_of, known_fields
from finetune.recipe import Recipe
from finetune.recipe.references import other_model

HEAD_MULTIPLE = 8
"""Ring attention needs head sizes that are multiples of this, for PyTorch's kernels on GPUs."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Linear layers of attention in the mixtures whose experts may be divided."""
DROPOUTS = (
    "attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout", "router_jitter_noise",
)  # fmt: skip
"""Dropout fields of model configs."""


def incompatible(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    """Every reason why the backend cannot divide the recipe's model."""
    axes = backend.axes
    if not axes.any:
        return
    yield from _processes(backend, processes)
    untested = {
        "pp with sp or cp": axes.pipeline > 1 and axes.parts > 1,
        "cp with sp or tp": axes.context > 1 and axes.sequence * axes.tensor > 1,
        "ep with pp, sp or cp": axes.experts > 1 and axes.pipeline * axes.parts > 1,
    }
    for pair, is_asked in untested.items():
        if is_asked:
            yield f"{backend.name}: {pair} is untested; use a backend of `finetune list`"
    yield from of_model(axes, fields_of(recipe))
    yield from _recipe(recipe, backend)
    yield from _batch_problems(recipe, backend, processes)


def of_model(axes: Axes, fields: Mapping[str, Any]) -> Iterator[str]:
    """Reasons found in the model's config."""
    fields = {**fields, **(fields.get("text_config") or {})}
    kind, experts = fields.get("model_type"), expert_count(fields)
    if not axes.any or kind is None:
        return
    dropped = [key for key in DROPOUTS if fields.get(key)]
    if dropped and axes.processes > 1:
        yield (
            f"model: {dropped[0]}={fields[dropped[0]]} draws different random numbers on processes "
            f"that divide a model ({axes.words()}); set it to 0 in config.json"
        )
    yield from _unsupported(axes, kind, experts)
    yield from _indivisible(axes, fields, experts)
    if axes.tensor > 1 and fields.get("use_qk_norm"):
        yield (
            f"--tensor {axes.tensor}: this {kind} has a norm with separate weights for each head "
            "(use_qk_norm), which transformers does not divide; use fsdp_full_shard"
        )
    if axes.context > 1 and fields.get("sliding_window") and fields.get("use_sliding_window", True):
        yield (
            f"--context {axes.context}: sliding_window={fields['sliding_window']}, but the keys of "
            "all previous tokens are gathered; use sp"
        )
    heads = fields.get("num_attention_heads") or 1
    size = fields.get("head_dim") or (fields.get("hidden_size") or 0) // heads
    if axes.ring > 1 and size % HEAD_MULTIPLE:
        yield (
            f"--rotation {axes.rotation}: heads of {size}, but the kernels of ring attention need "
            f"a multiple of {HEAD_MULTIPLE}; use allgather"
        )


def axes_of(axes: Axes, fields: Mapping[str, Any]) -> Axes:
    """The axes that divide a model with this config: experts only if it has some."""
    return axes if expert_count(fields) > 1 else dataclasses.replace(axes, experts=1)


def _unsupported(axes: Axes, kind: str, experts: int) -> Iterator[str]:
    """Axes that do not divide a model type.

    Without experts any type may split the rows by sequence parallelism; with experts, the tensor
    axis places them on its processes (ep_tp), and divides no expert by columns and rows.
    """
    mixture = experts > 1
    needed: dict[Axis, tuple[int, Axis]] = {
        "pipeline": (axes.pipeline, "pipeline"),
        "context": (axes.context, "context"),
        "sequence": (axes.sequence if mixture else 1, "sequence"),
        "tensor": (axes.tensor, "experts" if mixture else "tensor"),
        "experts": (axes.experts if mixture else 1, "experts"),
    }
    for axis, (size, fact) in needed.items():
        if size > 1 and fact not in family_of(kind).divides:
            name = axis.removesuffix("s")
            yield (
                f"--{axis} {size}: {name} parallelism of {kind} is not supported; "
                f"supported types: {', '.join(dividing(fact))}; use fsdp_full_shard"
            )
    if axes.experts > 1 and not mixture:
        yield f"--experts {axes.experts}: {kind} has no experts to divide; use fsdp_full_shard"
    if axes.experts == 1 and axes.tensor > 1 and mixture:
        yield (
            f"--tensor {axes.tensor}: the experts of {kind} are not divided by columns and rows "
            f"({axes.words()}); use ep_tp, ep_fsdp or fsdp_full_shard"
        )


def _indivisible(axes: Axes, fields: Mapping[str, Any], experts: int) -> Iterator[str]:
    """Numbers of layers, heads and experts that do not divide over the processes of an axis."""
    count, parts = fields.get("num_hidden_layers") or 0, axes.pipeline * axes.chunks
    if axes.pipeline > 1 and count < parts:
        most = count // axes.chunks
        instead = f"at most {most} stages" if most > 1 else "a backend without a pipeline"
        several = f" x {axes.chunks} parts ({axes.schedule})" if axes.chunks > 1 else ""
        yield (
            f"--pipeline {axes.pipeline}: {count} layers do not fill {axes.pipeline} stages"
            f"{several}; use {instead}"
        )
    heads = fields.get("num_attention_heads") or 0
    keys = fields.get("num_key_value_heads") or heads
    beside = " of a tensor parallel process" if axes.tensor > 1 else ""
    each, kept = heads // axes.tensor, keys // axes.tensor
    # Keys are repeated for Ulysses if there are fewer than processes.
    repeated = axes.sequence % max(kept, 1) == 0
    needed = (
        ("tensor", axes.tensor, heads, "attention heads"),
        ("tensor", axes.tensor, keys, "key heads"),
        ("sequence", axes.sequence, each, f"attention heads{beside}"),
        ("sequence", 1 if repeated else axes.sequence, kept, f"key heads{beside}"),
        ("experts", axes.experts if experts > 1 else 1, experts, "experts"),
    )
    for axis, size, number, what in needed:
        if number % size:
            fitting = [str(n) for n in range(2, number + 1) if number % n == 0]
            instead = f"use {' or '.join(fitting)}" if fitting else "use another backend"
            yield f"--{axis} {size}: {number} {what} do not divide over {size} processes; {instead}"


def _processes(backend: Backend, processes: int) -> Iterator[str]:
    found, axes = mesh_of(backend, processes), backend.axes
    problem = experts_problem(found.experts, found.tensor, found.shard)
    if problem is not None:
        yield f"--experts {found.experts}: {problem}"
    if found.processes != processes:
        fitting = multiples(axes.processes, processes)
        yield (
            f"processes: {processes} are not a multiple of {axes.words()} ({axes.processes} "
            f"processes); use {' or '.join(map(str, fitting))}"
        )
    elif backend.shard == "none" and found.replicate > 1:
        wider = f"{backend.name}_fsdp"
        yield (
            f"processes: {backend.name} with {axes.words()} runs {axes.processes}, got "
            f"{processes}; use {f'{wider} or ' if wider in names() else ''}a larger axis"
        )
    elif backend.shard != "none" and found.shard < 2:
        yield (
            f"processes: {backend.name} with {axes.words()} leaves 1 of {processes} processes to "
            f"shard over; use {backend.name.removesuffix('_fsdp')}, or more processes"
        )


def _recipe(recipe: Recipe, backend: Backend) -> Iterator[str]:
    axes, model = backend.axes, recipe.model
    quantized = {"model": model, "teacher": recipe.taught_by}
    for section, each in quantized.items():
        if axes.tensor * axes.experts > 1 and each is not None and each.quantization != "none":
            yield (
                f"{section}.quantization: {each.quantization} packs a matrix across its rows and "
                f"columns, which {backend.name} divides; use none, or fsdp_full_shard"
            )
    zero_bubble = axes.pipeline > 1 and axes.schedule == "ZBVZeroBubble"
    held_out = bool(recipe.eval_data) or recipe.eval_rows is not None
    sampled = recipe.sampled
    refused = {
        "model.add_tokens: embeddings are divided during loading, and cannot grow": bool(
            model.add_tokens
        ),
        "model.activation_checkpointing: offload is untested in a divided model; use true": (
            model.activation_checkpointing == "offload"
        ),
        f"method: {recipe.method} needs a score head, which no stage of a pipeline holds": (
            recipe.head.scored and axes.pipeline > 1
        ),
        "parallelism_config_pp_schedule: torch 2.13 cannot run a teacher's forward pass with "
        "ZBVZeroBubble; use 1F1B, or `finetune teach`": zero_bubble
        and recipe.taught_by is not None,
        "evaluation: torch 2.13 cannot evaluate with ZBVZeroBubble; use 1F1B": zero_bubble
        and held_out,
        f"parallelism_config_pp_schedule: {axes.schedule} with FSDP2 is untested; use 1F1B": (
            axes.chunks > 1 and axes.pipeline > 1 and backend.shard != "none"
        ),
        f"method: {recipe.method} compares complete completions, and rows are split": (
            sampled is not None and axes.parts > 1
        ),
        "vllm_server_base_url: the server would load an adapter that is divided, which is "
        "untested": sampled is not None and sampled.elsewhere,
        f"model.quantization: {model.quantization} weights of other processes are not gathered for "
        "sampling": sampled is not None and model.quantization != "none",
        "batch.padding_free: rows are split only without padding, and these are padded; use "
        "batch.packing=true": axes.parts > 1 and not padding(recipe, known_fields(recipe)).free,
    }
    for reason, is_asked in refused.items():
        if is_asked:
            yield f"{reason} (backend {backend.name}); fsdp_full_shard has no such limit"
    for field, other in (("teacher.name", recipe.taught_by), ("reference", other_model(recipe))):
        if other is not None:
            known = fields_of(dataclasses.replace(recipe, model=other, adapter=None))
            problems = of_model(axes_of(axes, known), known)
            yield from (f"{field}: {problem}" for problem in problems)
    yield from _adapter(recipe, backend)


def _batch_problems(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    axes, batch = backend.axes, recipe.batch
    if axes.pipeline == 1:
        return
    data = mesh_of(backend, processes).data
    count = math.ceil(math.ceil(batch.rows / recipe.most_micro_rows) / data)
    unit = axes.pipeline * recipe.most_micro_rows * data
    if count < axes.pipeline:
        yield (
            f"batch.rows: {count} micro-batch{'es' * (count > 1)} per step for {axes.pipeline} "
            f"stages, which leaves stages without work; use batch.rows={unit}"
        )
    elif axes.chunks > 1 and count % axes.pipeline:
        yield (
            f"batch.rows: {count} micro-batches do not divide into rounds of {axes.pipeline} for "
            f"{axes.schedule}; use a multiple of {unit} rows, or 1F1B"
        )


def _adapter(recipe: Recipe, backend: Backend) -> Iterator[str]:
    adapter, axes = recipe.adapter, backend.axes
    if adapter is None:
        return
    if axes.experts > 1 and (named := _on_experts(adapter.targets)):
        yield (
            f"adapter.targets: '{named}' adapts experts, which {backend.name} divides: PEFT 0.21's "
            "adapters on experts multiply complete tensors; name attention layers "
            "(targets=[q_proj,k_proj,v_proj,o_proj]), or use fsdp_full_shard"
        )
    fields = fields_of(recipe)
    if axes.tensor > 1 and family_of(fields).gathers:
        yield (
            f"adapter: the attention of {fields['model_type']} under {backend.name} gathers its "
            "column-parallel outputs, which PEFT 0.21 does not support; use ep_fsdp, or train all "
            "weights"
        )
    init = adapter.init_lora_weights
    refused = {
        "use_dora: DoRA needs the norm of complete rows": adapter.use_dora and axes.tensor > 1,
        "trainable_token_indices: PEFT reads complete embeddings": adapter.trainable_token_indices,
        "target_parameters: tensors of experts": adapter.target_parameters,
        "modules_to_save: copies of modules that are divided": adapter.modules_to_save,
        f"init_lora_weights: '{init}' reads complete base weights": isinstance(init, str)
        and init != "gaussian",
        "dropout: several processes would drop different elements than one": adapter.dropout
        and axes.processes > 1,
    }
    for reason, is_asked in refused.items():
        if is_asked:
            yield f"adapter.{reason}, which {backend.name} does not reproduce; leave it out"


def _on_experts(targets: str | tuple[str, ...]) -> str | None:
    """The adapter target that may match experts in PEFT; None if all targets are attention."""
    if isinstance(targets, str):
        return targets
    return next((each for each in targets if each.split(".")[-1] not in ATTENTION), None)
