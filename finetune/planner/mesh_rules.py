"""Rules for backends that divide a model: required divisibility and unsupported combinations."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from finetune.backend import names
from finetune.backend.axes import Axes, experts_problem, multiples
from finetune.errors import problems_of
from finetune.planner.balance_loss import expert_count
from finetune.planner.families import Axis, dividing, family_of
from finetune.planner.mesh import mesh_of
from finetune.planner.request import Request, Rule
from finetune.planner.shapes.config_files import fields_of
from finetune.recipe.references import other_model

HEAD_MULTIPLE = 8
"""Ring attention needs head sizes that are multiples of this, for PyTorch's kernels on GPUs."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Linear layers of attention in the mixtures whose experts may be divided."""
DROPOUTS = (
    "attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout", "router_jitter_noise",
)  # fmt: skip
"""Dropout fields of model configs."""


def untested(request: Request) -> Iterator[str]:
    """--pipeline, --context, --experts: untested together; use a backend of `finetune list`."""
    axes = request.backend.axes
    pairs = {
        "pp with sp or cp": axes.pipeline > 1 and axes.parts > 1,
        "cp with sp or tp": axes.context > 1 and axes.sequence * axes.tensor > 1,
        "ep with pp, sp or cp": axes.experts > 1 and axes.pipeline * axes.parts > 1,
    }
    for pair, is_asked in pairs.items():
        if is_asked:
            yield f"{request.backend.name}: {pair} is untested; use a backend of `finetune list`"


def of_config(request: Request) -> Iterator[str]:
    """The rules of a model's config on the axes of the backend."""
    yield from of_model(request.backend.axes, request.fields)


def of_model(axes: Axes, fields: Mapping[str, Any]) -> Iterator[str]:
    """Reasons found in the config of a model that is divided; also of a teacher's."""
    fields = {**fields, **(fields.get("text_config") or {})}
    if axes.any and fields.get("model_type") is not None:
        yield from problems_of(OF_MODEL, axes, fields)


def random_numbers(axes: Axes, fields: Mapping[str, Any]) -> Iterator[str]:
    """model: dropout differs on the processes that divide a model; set it to 0 in config.json."""
    dropped = [key for key in DROPOUTS if fields.get(key)]
    if dropped and axes.processes > 1:
        yield (
            f"model: {dropped[0]}={fields[dropped[0]]} draws different random numbers on processes "
            f"that divide a model ({axes.words()}); set it to 0 in config.json"
        )


def attention(axes: Axes, fields: Mapping[str, Any]) -> Iterator[str]:
    """--tensor, --context, --rotation: its attention is not divided so; use the backend named."""
    if axes.tensor > 1 and fields.get("use_qk_norm"):
        yield (
            f"--tensor {axes.tensor}: this {fields['model_type']} has a norm with separate weights "
            "for each head (use_qk_norm), which transformers does not divide; use fsdp_full_shard"
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


def unsupported(axes: Axes, fields: Mapping[str, Any]) -> Iterator[str]:
    """--pipeline, --tensor and other axes: not for this type of model; use fsdp_full_shard."""
    # Without experts any type may split the rows by sequence parallelism; with experts, the tensor
    # axis places them on its processes (ep_tp), and divides no expert by columns and rows.
    kind, mixture = str(fields["model_type"]), expert_count(fields) > 1
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


def indivisible(axes: Axes, fields: Mapping[str, Any]) -> Iterator[str]:
    """--pipeline, --tensor and other axes: layers or heads do not divide; use a size named."""
    experts = expert_count(fields)
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


def processes(request: Request) -> Iterator[str]:
    """processes, --experts: the processes do not fill the axes; use the numbers that are named."""
    backend, count = request.backend, request.processes
    found, axes = mesh_of(backend, count), backend.axes
    problem = experts_problem(found.experts, found.tensor, found.shard)
    if problem is not None:
        yield f"--experts {found.experts}: {problem}"
    if found.processes != count:
        fitting = multiples(axes.processes, count)
        yield (
            f"processes: {count} are not a multiple of {axes.words()} ({axes.processes} "
            f"processes); use {' or '.join(map(str, fitting))}"
        )
    elif backend.shard == "none" and found.replicate > 1:
        wider = f"{backend.name}_fsdp"
        yield (
            f"processes: {backend.name} with {axes.words()} runs {axes.processes}, got "
            f"{count}; use {f'{wider} or ' if wider in names() else ''}a larger axis"
        )
    elif backend.shard != "none" and found.shard < 2:
        yield (
            f"processes: {backend.name} with {axes.words()} leaves 1 of {count} processes to "
            f"shard over; use {backend.name.removesuffix('_fsdp')}, or more processes"
        )


def divided_quantization(request: Request) -> Iterator[str]:
    """model.quantization, teacher.quantization: packed across its rows; use none, or FSDP."""
    axes, recipe = request.backend.axes, request.recipe
    for section, each in {"model": recipe.model, "teacher": recipe.taught_by}.items():
        if axes.tensor * axes.experts > 1 and each is not None and each.quantization != "none":
            yield (
                f"{section}.quantization: {each.quantization} packs a matrix across its rows and "
                f"columns, which {request.backend.name} divides; use none, or fsdp_full_shard"
            )


def not_reproduced(request: Request) -> Iterator[str]:
    """model, method, evaluation, batch: it needs a complete model or row; use fsdp_full_shard."""
    recipe, backend = request.recipe, request.backend
    axes, model = backend.axes, recipe.model
    zero_bubble = axes.pipeline > 1 and axes.schedule == "ZBVZeroBubble"
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
        and request.holds_out,
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
        "batch.packing=true": axes.parts > 1 and not request.padding.free,
    }
    for reason, is_asked in refused.items():
        if is_asked:
            yield f"{reason} (backend {backend.name}); fsdp_full_shard has no such limit"


def second_models(request: Request) -> Iterator[str]:
    """teacher.name, reference: the axes do not divide this model; use fsdp_full_shard."""
    recipe, axes = request.recipe, request.backend.axes
    for field, other in (("teacher.name", recipe.taught_by), ("reference", other_model(recipe))):
        if other is not None:
            known = fields_of(dataclasses.replace(recipe, model=other, adapter=None))
            problems = of_model(axes_of(axes, known), known)
            yield from (f"{field}: {problem}" for problem in problems)


def micro_batches(request: Request) -> Iterator[str]:
    """batch.rows: a step has too few micro-batches for the stages of a pipeline; use more rows."""
    recipe, axes, data = request.recipe, request.backend.axes, request.mesh.data
    count = math.ceil(math.ceil(recipe.batch.rows / recipe.most_micro_rows) / data)
    unit = axes.pipeline * recipe.most_micro_rows * data
    if count < axes.pipeline:
        yield (
            f"batch.rows: {count} micro-batch{'es' * (count > 1)} per step for {axes.pipeline} "
            f"stages, which leaves stages without work; use batch.rows={unit}"
        )
    elif axes.chunks > 1 and axes.pipeline > 1 and count % axes.pipeline:
        yield (
            f"batch.rows: {count} micro-batches do not divide into rounds of {axes.pipeline} for "
            f"{axes.schedule}; use a multiple of {unit} rows, or 1F1B"
        )


def adapted_experts(request: Request) -> Iterator[str]:
    """adapter, adapter.targets: PEFT needs complete experts or columns; name attention layers."""
    adapter, backend, axes = request.recipe.adapter, request.backend, request.backend.axes
    if adapter is None:
        return
    if axes.experts > 1 and (named := _on_experts(adapter.targets)):
        yield (
            f"adapter.targets: '{named}' adapts experts, which {backend.name} divides: PEFT 0.21's "
            "adapters on experts multiply complete tensors; name attention layers "
            "(targets=[q_proj,k_proj,v_proj,o_proj]), or use fsdp_full_shard"
        )
    if axes.tensor > 1 and family_of(request.fields).gathers:
        yield (
            f"adapter: the attention of {request.kind} under {backend.name} gathers its "
            "column-parallel outputs, which PEFT 0.21 does not support; use ep_fsdp, or train all "
            "weights"
        )


def divided_adapter(request: Request) -> Iterator[str]:
    """adapter.use_dora and other fields: they need complete tensors; leave them out."""
    adapter, backend, axes = request.recipe.adapter, request.backend, request.backend.axes
    if adapter is None:
        return
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


OF_MODEL = (random_numbers, unsupported, indivisible, attention)
"""Rules of the axes and a model's config."""
RULES: tuple[Rule, ...] = (
    processes, untested, of_config, divided_quantization, not_reproduced, second_models,
    micro_batches, adapted_experts, divided_adapter,
)  # fmt: skip
"""Rules of a backend that divides a model."""
