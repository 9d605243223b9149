"""Rules for backends that divide a model: required divisibility and unsupported combinations."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from finetune.backend import Backend, names
from finetune.backend.axes import Axes, experts_problem, multiples
from finetune.planner.experts import expert_count
from finetune.planner.families import dividing, family_of
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
    if axes.pipeline > 1 and axes.parts > 1:
        yield (
            f"{backend.name}: a pipeline together with split rows (pp with sp or cp) is untested; "
            "use pp_tp or sp_fsdp"
        )
    if axes.context > 1 and axes.sequence * axes.tensor > 1:
        yield (
            f"{backend.name}: context parallelism together with sequence or tensor parallelism (cp "
            "with sp or tp) is untested; use cp or sp_tp"
        )
    if axes.experts > 1 and axes.pipeline * axes.parts > 1:
        yield (
            f"{backend.name}: expert parallelism together with a pipeline or split rows (ep with "
            "pp, sp or cp) is untested; use ep_fsdp or ep_tp"
        )
    fields = fields_of(recipe)
    if fields:
        yield from of_model(axes, fields)
    yield from _recipe(recipe, backend, processes)


def of_model(axes: Axes, fields: Mapping[str, Any]) -> Iterator[str]:
    """Reasons found in the model's config."""
    if not axes.any:
        return
    fields = {**fields, **(fields.get("text_config") or {})}
    kind = fields.get("model_type")
    if kind is None:
        return  # a problem of its own
    heads = fields.get("num_attention_heads") or 0
    keys = fields.get("num_key_value_heads") or heads
    dropped = [key for key in DROPOUTS if fields.get(key)]
    if dropped and axes.processes > 1:
        yield (
            f"model: {dropped[0]}={fields[dropped[0]]} draws different random numbers on processes "
            f"that divide a model ({axes.words()}); set it to 0 in config.json"
        )
    if axes.pipeline > 1:
        yield from _pipeline_problems(axes, fields)
    if axes.context > 1:
        yield from _context_problems(axes, fields)
    if axes.sequence > 1:
        ways, each, kept = axes.sequence, heads // axes.tensor, keys // axes.tensor
        beside = " of a tensor parallel process" if axes.tensor > 1 else ""
        if each % ways:
            yield _does_not_divide("sequence", ways, each, f"attention heads{beside}")
        if kept % ways and ways % max(kept, 1):
            yield _does_not_divide("sequence", ways, kept, f"key heads{beside}")
    if axes.experts > 1:
        yield from _expert_problems(axes, fields)
    elif expert_count(fields) > 1:
        yield from _undivided_expert_problems(axes, fields)
    if axes.tensor > 1:
        known = dividing("experts" if expert_count(fields) > 1 else "tensor")
        if kind not in known:
            yield (
                f"--tensor {axes.tensor}: tensor parallelism of {kind} is not supported; "
                f"supported types: {', '.join(known)}; use fsdp_full_shard"
            )
        if fields.get("use_qk_norm"):
            yield (
                f"--tensor {axes.tensor}: this {kind} has a norm with separate weights for each "
                "head (use_qk_norm), which transformers does not divide; use fsdp_full_shard"
            )
        for count, what in ((heads, "attention heads"), (keys, "key heads")):
            if count % axes.tensor:
                yield _does_not_divide("tensor", axes.tensor, count, what)


def axes_of(axes: Axes, fields: Mapping[str, Any]) -> Axes:
    """The axes that divide a model with this config: experts only if it has some."""
    return axes if expert_count(fields) > 1 else dataclasses.replace(axes, experts=1)


def _expert_problems(axes: Axes, fields: Mapping[str, Any]) -> Iterator[str]:
    kind, count = fields.get("model_type"), expert_count(fields)
    if count < 2:
        yield f"--experts {axes.experts}: {kind} has no experts to divide; use fsdp_full_shard"
        return
    if "experts" not in family_of(kind).divides:
        yield (
            f"--experts {axes.experts}: dividing the experts of {kind} is not supported; supported "
            f"types: {', '.join(dividing('experts'))}; use fsdp_full_shard, which shards them"
        )
    if count % axes.experts:
        yield _does_not_divide("experts", axes.experts, count, "experts")


def _undivided_expert_problems(axes: Axes, fields: Mapping[str, Any]) -> Iterator[str]:
    """Problems of experts that each process holds, or FSDP2 gathers, as complete tensors."""
    kind = fields.get("model_type")
    if axes.tensor > 1:
        yield (
            f"--tensor {axes.tensor}: the experts of {kind} are not divided by columns and rows "
            f"({axes.words()}); use ep_tp, which places them on the tensor parallel processes, "
            "ep_fsdp or fsdp_full_shard"
        )
    elif axes.sequence > 1 and "sequence" not in family_of(kind).divides:
        yield (
            f"--sequence {axes.sequence}: a mixture of experts of type {kind} is not supported; "
            f"supported types: {', '.join(dividing('sequence'))}; use fsdp_full_shard"
        )


def _context_problems(axes: Axes, fields: Mapping[str, Any]) -> Iterator[str]:
    kind = fields.get("model_type")
    if "context" not in family_of(kind).divides:
        yield (
            f"--context {axes.context}: context parallelism of {kind} is not supported; types with "
            f"attention without window, cap or sink are: {', '.join(dividing('context'))}; use sp"
        )
    elif fields.get("sliding_window") and fields.get("use_sliding_window", True):
        yield (
            f"--context {axes.context}: sliding_window={fields['sliding_window']}, but the keys of "
            "all previous tokens are gathered; use sp"
        )
    size = _head_size(fields)
    if axes.ring > 1 and size % HEAD_MULTIPLE:
        yield (
            f"--rotation {axes.rotation}: heads of {size}, but the kernels of ring attention need "
            f"a multiple of {HEAD_MULTIPLE}; use allgather"
        )


def _head_size(fields: Mapping[str, Any]) -> int:
    heads = fields.get("num_attention_heads") or 1
    return fields.get("head_dim") or (fields.get("hidden_size") or 0) // heads


def _pipeline_problems(axes: Axes, fields: Mapping[str, Any]) -> Iterator[str]:
    kind, count = fields.get("model_type"), fields.get("num_hidden_layers") or 0
    name, parts = f"--pipeline {axes.pipeline}", axes.pipeline * axes.chunks
    if "pipeline" not in family_of(kind).divides:
        yield (
            f"{name}: pipeline parallelism of {kind} is not supported; supported types: "
            f"{', '.join(dividing('pipeline'))}; use fsdp_full_shard"
        )
    if count < parts:
        most = count // axes.chunks
        instead = f"at most {most} stages" if most > 1 else "a backend without a pipeline"
        several = f" x {axes.chunks} parts ({axes.schedule})" if axes.chunks > 1 else ""
        yield (f"{name}: {count} layers do not fill {axes.pipeline} stages{several}; use {instead}")


def _does_not_divide(axis: str, size: int, count: int, what: str) -> str:
    fitting = [str(each) for each in range(2, count + 1) if count % each == 0]
    instead = f"use {' or '.join(fitting)}" if fitting else "use a backend without this axis"
    return f"--{axis} {size}: {count} {what} do not divide over {size} processes; {instead}"


def _processes(backend: Backend, processes: int) -> Iterator[str]:
    found = mesh_of(backend, processes)
    problem = experts_problem(found.experts, found.tensor, found.shard)
    if problem is not None:
        yield f"--experts {found.experts}: {problem}"
    if found.processes != processes:
        fitting = multiples(backend.axes.processes, processes)
        yield (
            f"processes: {processes} are not a multiple of {backend.axes.words()} "
            f"({backend.axes.processes} processes); use {' or '.join(map(str, fitting))}"
        )
    elif backend.shard == "none" and found.replicate > 1:
        wider = f"{backend.name}_fsdp"
        others = f"{wider}, whose other processes read rows of their own, or "
        yield (
            f"processes: {backend.name} with {backend.axes.words()} runs {backend.axes.processes}, "
            f"got {processes}; use {others if wider in names() else ''}a larger axis"
        )
    elif backend.shard != "none" and found.shard < 2:
        yield (
            f"processes: {backend.name} with {backend.axes.words()} leaves 1 of {processes} "
            f"processes to shard over; use {backend.name.removesuffix('_fsdp')}, or more processes"
        )


def _recipe(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    axes, model, adapter = backend.axes, recipe.model, recipe.adapter
    quantized = {"model": model, "teacher": recipe.taught_by}
    for section, each in quantized.items():
        if axes.tensor * axes.experts > 1 and each is not None and each.quantization != "none":
            yield (
                f"{section}.quantization: {each.quantization} weights cannot be divided by "
                f"{backend.name} (bitsandbytes packs a matrix across its rows and columns); use "
                "none, or fsdp_full_shard"
            )
    if model.add_tokens:
        yield (
            f"model.add_tokens: {backend.name} divides embeddings during loading, and they cannot "
            "grow afterwards; train a model that has the tokens, or use fsdp_full_shard"
        )
    if model.activation_checkpointing == "offload":
        yield (
            f"model.activation_checkpointing: offload is untested under {backend.name}; use true"
        )
    if recipe.scores is not None and axes.pipeline > 1:
        yield (
            f"method: {recipe.method} needs a score head, which no stage of a pipeline holds; it "
            f"does not run under {backend.name} ({axes.words()}); use fsdp_full_shard"
        )
    if recipe.taught_by is not None and axes.pipeline > 1 and axes.schedule == "ZBVZeroBubble":
        yield (
            "parallelism_config_pp_schedule: torch 2.13 cannot run a teacher's forward pass with "
            "ZBVZeroBubble; use 1F1B, or store its log-probabilities (finetune teach)"
        )
    for field, other in (("teacher.name", recipe.taught_by), ("reference", other_model(recipe))):
        if other is not None:
            known = fields_of(dataclasses.replace(recipe, model=other, adapter=None))
            problems = of_model(axes_of(axes, known), known)
            yield from (f"{field}: {problem}" for problem in problems)
    if recipe.sampled is not None:
        yield from _sampling(recipe, backend)
    yield from _batch_problems(recipe, backend, processes)
    if axes.parts > 1 and not padding(recipe, known_fields(recipe)).free:
        yield (
            f"batch.padding_free: {backend.name} splits rows only without padding, and these "
            "are padded; use batch.packing=true, or batch.padding_free=auto with a model that "
            "supports it"
        )
    if adapter is not None:
        yield from _adapter(recipe, backend)


def _sampling(recipe: Recipe, backend: Backend) -> Iterator[str]:
    """Problems of gathering the weights for a sampling, and of giving them to a server."""
    if backend.axes.parts > 1:
        yield (
            f"method: {recipe.method} compares complete completions, and {backend.name} splits "
            "them; use fsdp_full_shard or tp"
        )
    if recipe.samples_elsewhere:
        yield (
            f"vllm_server_base_url: {backend.name} divides the adapter that the server would load, "
            "which is untested; leave it out, or use fsdp_full_shard"
        )
    if recipe.model.quantization != "none":
        yield (
            f"model.quantization: {recipe.model.quantization} weights of other processes are not "
            f"gathered for sampling under {backend.name}; use none, or fsdp_full_shard"
        )


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
    if axes.chunks > 1 and backend.shard != "none":
        yield f"parallelism_config_pp_schedule: {axes.schedule} with FSDP2 is untested; use 1F1B"
    held_out = bool(recipe.eval_data) or recipe.eval_rows is not None
    if axes.schedule == "ZBVZeroBubble" and held_out:
        yield (
            "evaluation: torch 2.13 cannot evaluate with the schedule ZBVZeroBubble; remove "
            "eval_data and eval_rows, or use 1F1B"
        )


def _adapter(recipe: Recipe, backend: Backend) -> Iterator[str]:
    adapter = recipe.adapter
    assert adapter is not None
    init, axes = adapter.init_lora_weights, backend.axes
    if backend.axes.experts > 1 and (named := _on_experts(adapter.targets)):
        yield (
            f"adapter.targets: '{named}' adapts experts, which {backend.name} divides: PEFT 0.21's "
            "adapters on experts multiply complete tensors; name attention layers "
            "(targets=[q_proj,k_proj,v_proj,o_proj]), or use fsdp_full_shard"
        )
    fields = fields_of(recipe)
    if backend.axes.tensor > 1 and family_of(fields).gathers:
        yield (
            f"adapter: the attention of {fields['model_type']} under {backend.name} gathers its "
            "column-parallel outputs, which PEFT 0.21 does not support; use ep_fsdp, or train all "
            "weights"
        )
    refused = {
        "adapter.use_dora: DoRA needs the norm of complete rows": adapter.use_dora
        and axes.tensor > 1,
        "adapter.trainable_token_indices: PEFT reads complete embeddings": bool(
            adapter.trainable_token_indices
        ),
        "adapter.target_parameters: tensors of experts": bool(adapter.target_parameters),
        "adapter.modules_to_save: copies of modules that are divided": bool(
            adapter.modules_to_save
        ),
        f"adapter.init_lora_weights: '{init}' reads complete base weights": isinstance(init, str)
        and init != "gaussian",
        "adapter.dropout: several processes would drop different elements than one": bool(
            adapter.dropout
        )
        and axes.processes > 1,
    }
    for reason, holds in refused.items():
        if holds:
            yield f"{reason}, which {backend.name} does not reproduce; leave it out"


def _on_experts(targets: str | tuple[str, ...]) -> str | None:
    """The adapter target that may match experts in PEFT; None if all targets are attention."""
    if isinstance(targets, str):
        return targets
    return next((each for each in targets if each.split(".")[-1] not in ATTENTION), None)
