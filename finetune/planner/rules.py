"""The planner's list: what rejects a recipe on a backend; each problem names field, reason, fix."""

import dataclasses
import json
import re
from collections.abc import Iterator

from finetune.errors import problems_of
from finetune.planner import data_rules, library_limits, mesh_rules, step_rules
from finetune.planner.families import family_of
from finetune.planner.kernels import choices
from finetune.planner.padding import against, leaks, padding
from finetune.planner.prompt_sharing import against_sharing
from finetune.planner.request import Request, Rule
from finetune.planner.shapes.config_files import decoder_fields
from finetune.recipe import Batch, LoRA, Recipe

RECOMPUTED_INIT = re.compile(r"pissa(_niter_\d+)?|olora|orthogonal|gaussian")
INIT_OF_DATA = {
    "eva": "decomposes activations of rows, which are not computed before a training",
    "corda": "scales by activations of rows, which are not computed before a training",
    "lora_ga": "decomposes gradients of rows, which are not computed before a training",
    "loftq": "replaces the base by another one, which would have to be saved with each result",
}
"""Initial values of PEFT that are computed from more than a recipe and its base."""


def incompatibilities(request: Request) -> list[str]:
    """Every problem of a recipe on a backend; empty if it can run."""
    return problems_of(RULES, request)


def completeness(request: Request) -> Iterator[str]:
    """model, adapter, data: a part of the recipe is missing; add it."""
    recipe, model = request.recipe, request.recipe.model
    if model.name is None and model.config is None:
        yield "model: give model.name (a hub id or a folder) or model.config (from scratch)"
    if model.config is not None and not model.config.get("model_type"):
        yield "model.config: `model_type` is missing (llama, qwen3, mistral, ...)"
    if model.config is not None and model.tokenizer is None:
        yield "model.tokenizer: a model built from scratch needs one (a hub id or a folder)"
    if model.adapter is not None and recipe.adapter is None:
        yield (
            "adapter: got null, but model.adapter is to be trained further; add an adapter "
            "section, or use the command line, which reads it from the adapter"
        )
    if not recipe.data:
        yield "data: none; add a source with its format"


def of_data(request: Request) -> Iterator[str]:
    yield from problems_of(data_rules.RULES, request.recipe)


def batch_rows(request: Request) -> Iterator[str]:
    """batch.rows, batch.micro_tokens: not whole micro-batches everywhere; use the value named."""
    recipe, batch, backend = request.recipe, request.recipe.batch, request.backend
    if batch.micro_tokens is not None:
        each = recipe.documents_per_row
        if batch.micro_tokens < recipe.row_length:
            what = "a row" if each == 1 else f"the {each} documents of a row, each"
            yield (
                f"batch.micro_tokens: {batch.micro_tokens} tokens cannot hold {what} of "
                f"batch.max_length={batch.max_length}; use batch.micro_tokens={recipe.row_length}"
            )
        return
    rows, micro, ways = batch.rows, batch.micro_rows, request.mesh.data
    unit = micro * ways
    if rows % unit:
        below, above = rows - rows % unit, rows + unit - rows % unit
        choices = " or ".join(str(value) for value in (below, above) if value)
        readers = "process" + "es" * (ways > 1)
        if backend.axes.any:
            readers = f"group{'s' * (ways > 1)} of processes"
        yield (
            f"batch.rows: {rows} does not divide into micro-batches of {micro} rows on {ways} "
            f"{readers} ({micro} x {ways} = {unit}); use batch.rows={choices}"
        )


def second_heads(request: Request) -> Iterator[str]:
    """kernels.head: two heads are compared in chunks; use chunked, and train nothing on it."""
    recipe = request.recipe
    options = choices(recipe, request.backend, request.kind)
    head = next(each for each in options if each.option == "head")
    if recipe.teaches and head.value == "whole":
        because = f", because {head.fallback}" if head.fallback else ""
        yield (
            f"kernels.head: whole{because}, but {recipe.method} compares two heads in chunks; use "
            "kernels.head=chunked, without an adapter or trained rows on the head"
        )


def token_loss(request: Request) -> Iterator[str]:
    """label_smoothing, token_weight: two of them, or no such loss to change; use one of them."""
    recipe = request.recipe
    smoothing, weight, _ = recipe.token_loss or (0.0, "none", 1.0)
    if smoothing and weight != "none":
        yield f"label_smoothing: {smoothing}, but {weight} weighs the plain loss; use one of them"
    if recipe.teaches and recipe.token_loss is not None:
        yield (
            f"{'label_smoothing' if smoothing else 'token_weight'}: {recipe.method} compares two "
            "distributions, not a token's loss; remove it, or use method=sft"
        )


def noise(request: Request) -> Iterator[str]:
    """model.neftune_alpha: the method compares with a pass without noise; remove it."""
    recipe = request.recipe
    noisy = recipe.model.neftune_alpha is not None
    if noisy and (recipe.takes == "prompts" or recipe.passes_before_step):
        yield (
            f"model.neftune_alpha: {recipe.method} compares log-probabilities of the model with "
            "those of a pass without noise; remove it"
        )


def trained_weights(request: Request) -> Iterator[str]:
    """model.trainable: an adapter freezes all weights; use its own fields, or adapter=null."""
    if request.recipe.model.trainable and request.recipe.adapter is not None:
        yield (
            "model.trainable: it chooses among all weights, and an adapter freezes them; use "
            "adapter.modules_to_save or adapter.layers_to_transform, or adapter=null"
        )


def second_model(request: Request) -> Iterator[str]:
    """beta: the reference would be unsharded; train an adapter, use beta=0, ddp or zero2."""
    backend = request.backend
    if request.recipe.needs_second_model and (
        backend.shard == "params" or request.traits.shards_all
    ):
        yield (
            f"beta: its reference is a second model, which {backend.name} would hold unsharded; "
            "train a new adapter, whose base is the reference, set beta=0, or use ddp or zero2"
        )


def images(request: Request) -> Iterator[str]:
    """model.reads, model.trains: the method or backend has no images, or no reads; use ddp, sft."""
    recipe, model = request.recipe, request.recipe.model
    reasons = {
        f"{request.backend.name} divides a model or the tokens of a row, and an image would cross "
        "its parts; use ddp, fsdp_full_shard or zero3": request.backend.axes.any,
        "vLLM samples completions from text alone here; leave its server out": (
            recipe.sampled is not None and recipe.sampled.elsewhere
        ),
        f"{recipe.method} trains a score head, and transformers has no class of {request.kind} "
        "that has one and reads images; use dpo": (
            recipe.head.scored and bool(request.fields) and not family_of(request.kind).scores
        ),
    }
    for reason, holds in reasons.items():
        if model.reads and holds:
            yield f"model.reads: {reason}"
    if not model.reads and (model.trains != ("language",) or model.processor_kwargs):
        field = "processor_kwargs" if model.processor_kwargs else "trains"
        yield f"model.{field}: it is for a model that reads images; add model.reads=[image]"
    if not model.trains:
        yield "model.trains: no part is trained; name language, connector or tower"


def layout(request: Request) -> Iterator[str]:
    """batch.packing, batch.padding_free: documents would see each other; use false and auto."""
    recipe, batch, fields = request.recipe, request.recipe.batch, decoder_fields(request.fields)
    if batch.packing and batch.padding_free is False:
        yield (
            "batch.padding_free: false, but batch.packing=true concatenates documents; remove one "
            "of the two"
        )
    elif batch.packing and fields:
        for reason in leaks(fields, batch.max_length):
            yield f"batch.packing: {reason}; set batch.packing=false"
    elif not batch.packing and batch.padding_free is True:
        for reason in against(recipe, fields):
            yield f"batch.padding_free: {reason}; use batch.padding_free=auto, which then pads"


def shared_prompts(request: Request) -> Iterator[str]:
    """batch.share_prompts: a prompt cannot be computed once for its answers; use auto."""
    recipe, fields = request.recipe, decoder_fields(request.fields)
    if recipe.batch.share_prompts is True:
        for reason in against_sharing(recipe, request.backend, fields):
            yield (
                f"batch.share_prompts: {reason}; use batch.share_prompts=auto, which then "
                "computes each prompt again"
            )


def precision(request: Request) -> Iterator[str]:
    """precision: this engine scales the loss of fp16 in its own way; use bf16, ddp or FSDP."""
    if request.backend.precision == "fp16" and request.traits.masters:
        yield (
            f"precision: fp16 needs loss scaling, which {request.backend.name} implements "
            "differently; use single, ddp or fsdp_full_shard, or bf16"
        )


def quantization(request: Request) -> Iterator[str]:
    """model.quantization: packed weights are not trained or sharded; add an adapter, or use ddp."""
    recipe, backend = request.recipe, request.backend
    kind = recipe.model.quantization
    if kind == "none":
        return
    if recipe.adapter is None:
        yield (
            f"model.quantization: {kind} weights cannot be trained; add an adapter "
            "(with_qlora) or use model.quantization=none"
        )
    if recipe.model.config is not None:
        yield f"model.quantization: {kind} needs pretrained weights (model.name)"
    if kind == "int8" and (request.traits.floats_only or backend.shard == "params"):
        yield (
            f"model.quantization: int8 weights cannot be sharded by {backend.name}; use nf4, or a "
            "backend that keeps parameters unsharded (ddp, zero2)"
        )


def patterns(request: Request) -> Iterator[str]:
    """adapter.targets and its other patterns: not a regular expression; write one of Python's."""
    adapter = request.recipe.adapter
    if adapter is None:
        return
    given: dict[str, object] = {
        "targets": adapter.targets,
        "exclude_modules": adapter.exclude_modules,
        **{f"rank_pattern.{pattern}": pattern for pattern in adapter.rank_pattern},
        **{f"alpha_pattern.{pattern}": pattern for pattern in adapter.alpha_pattern},
    }
    for field, pattern in given.items():
        if isinstance(pattern, str):
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"adapter.{field}: '{pattern}' is not a valid regular expression: {error}"


def initial_adapter(request: Request) -> Iterator[str]:
    """adapter.init_lora_weights: computed from data, or unknown; initialize with PEFT first."""
    init = request.recipe.adapter.init_lora_weights if request.recipe.adapter else True
    if init in INIT_OF_DATA:
        base = "" if init == "eva" else ", and the base as it changed it in model.name"
        yield (
            f"adapter.init_lora_weights: '{init}' {INIT_OF_DATA[init]}; initialize the adapter "
            "with PEFT, save it with init_lora_weights=True and name its folder in model.adapter"
            f"{base}; or use true"
        )
    elif isinstance(init, str) and not RECOMPUTED_INIT.fullmatch(init):
        yield (
            f"adapter.init_lora_weights: '{init}' is unknown; use true, gaussian, pissa, "
            "pissa_niter_16, olora or orthogonal"
        )
    if _reads_base(request.recipe) and request.recipe.saving.average > 1:
        yield f"saving.average: '{init}' is published as a difference; use saving.average=1"
    if _reads_base(request.recipe) and request.recipe.model.quantization != "none":
        yield f"adapter.init_lora_weights: '{init}' reads base weights; use quantization=none"


def _reads_base(recipe: Recipe) -> bool:
    """Whether the initial values of an adapter are computed from the weights of the base."""
    init = recipe.adapter.init_lora_weights if recipe.adapter else True
    return isinstance(init, str) and init != "gaussian"


def token_rows(request: Request) -> Iterator[str]:
    """adapter.trainable_token_indices: ZeRO-3 gathers by module; use zero2 or fsdp_full_shard."""
    adapter = request.recipe.adapter
    if adapter is not None and adapter.trainable_token_indices and request.gathers_by_module:
        yield (
            "adapter.trainable_token_indices: PEFT reads complete embeddings in the forward pass, "
            f"but {request.backend.name} gathers them only for their own module; use "
            "fsdp_full_shard or zero2"
        )


def added_tokens(request: Request) -> Iterator[str]:
    """model.add_tokens: their rows would stay untrained, or be rounded; train these rows, once."""
    recipe, backend = request.recipe, request.backend
    added, adapter = recipe.model.add_tokens, recipe.adapter
    repeated = sorted({token for token in added if added.count(token) > 1})
    if repeated:
        yield f"model.add_tokens: {', '.join(map(repr, repeated))} more than once; list it once"
    if added and backend.device == "nvme":
        yield (
            f"model.add_tokens: embeddings that grow are not partitioned during loading, and "
            f"{backend.name} would round them; use zero3_offload"
        )
    if adapter is None or not added or recipe.model.adapter is not None:
        return
    if not (adapter.trainable_token_indices or adapter.modules_to_save):
        words = ", ".join(json.dumps(token, ensure_ascii=False) for token in added)
        yield (
            f"model.add_tokens: the adapter would not train the rows of {words}; set "
            f"adapter.trainable_token_indices=[{words}] to train these rows, "
            "adapter.modules_to_save=[embed_tokens, lm_head] to train all rows, or adapter=null"
        )


def attention(request: Request) -> Iterator[str]:
    """model.attention: transformers lacks it, or checkpointing excludes it; use what is named."""
    recipe, fields = request.recipe, decoder_fields(request.fields)
    asked = recipe.model.attention
    if asked == "sdpa" and not family_of(fields).sdpa and not request.padding.free:
        free = padding(dataclasses.replace(recipe, batch=Batch()), fields).free
        yield (
            f"model.attention: transformers has no sdpa for {fields['model_type']}; use "
            f"model.attention=eager{', or batch.padding_free=auto' if free else ''}"
        )
    if recipe.model.checkpointing == "attention" and asked in ("eager", "flex_attention"):
        yield (
            "model.activation_checkpointing: `attention` keeps the output of a single operation, "
            f"but {asked} attention is not one; use model.attention=sdpa, or "
            "model.activation_checkpointing=true"
        )


def compiled_blocks(request: Request) -> Iterator[str]:
    """kernels.blocks: what a block would be compiled with changes inside of it; use eager."""
    recipe, backend, kind = request.recipe, request.backend, request.kind
    checkpointing = recipe.model.activation_checkpointing
    packed = recipe.model.quantization
    reasons = {
        f"blocks of {kind} are not known to compile": kind and not family_of(kind).compiles,
        f"{backend.name} divides the products of a block": backend.axes.any,
        f"{backend.name} gathers weights in hooks inside of a block": request.gathers_by_module,
        f"model.quantization={packed} has products that are not compiled": packed != "none",
        f"model.activation_checkpointing={checkpointing} selects operations of eager blocks": (
            checkpointing not in (True, False)
        ),
    }
    for reason, holds in reasons.items():
        if holds and recipe.kernels.blocks != "eager":
            yield f"kernels.blocks: compiled, but {reason}; use kernels.blocks=eager"


def rounded_on_disk(request: Request) -> Iterator[str]:
    """model, adapter.init_lora_weights: DeepSpeed would round it on disk; use zero3_offload."""
    # It (0.19) keeps the precision of the run only for weights that it partitions while loading.
    # Others are stored on disk in 16 bits on a machine without fp16.
    recipe, backend = request.recipe, request.backend
    model, adapter = recipe.model, recipe.adapter or LoRA()
    whole = {
        "model.config: a model from scratch": model.config is not None,
        f"model.quantization: a base in {model.quantization}": model.quantization != "none",
        f"adapter.init_lora_weights: '{adapter.init_lora_weights}'": _reads_base(recipe),
        f"adapter.kind: a base of {adapter.kind}": adapter.kind != "lora",
    }
    for what, is_whole in whole.items():
        if is_whole and backend.device == "nvme":
            yield (
                f"{what} is not partitioned during loading, and {backend.name} would round it; use "
                "zero3_offload"
            )


def processes(request: Request) -> Iterator[str]:
    """processes: too many or too few for the engine; use the number or the backend named."""
    count, backend, traits = request.processes, request.backend, request.traits
    if count < 1:
        yield f"processes: got {count}, expected at least 1"
    elif traits.alone and count > 1:
        yield (
            f"processes: {backend.engine} runs one process, got {count}; use ddp or fsdp_full_shard"
        )
    elif backend.axes.any:
        return  # see `mesh_rules.processes`
    elif backend.shard_size is not None and count % backend.shard_size:
        yield (
            f"processes: {count} is not a multiple of the shard size {backend.shard_size}; use "
            "a multiple of it, or --shard-size"
        )
    elif count < traits.least:
        yield f"processes: {backend.engine} needs at least {traits.least}, got {count}; use single"


def divided(request: Request) -> Iterator[str]:
    """The rules of a backend that divides a model."""
    if request.backend.axes.any:
        yield from problems_of(mesh_rules.RULES, request)


LAYOUT: tuple[Rule, ...] = (layout, shared_prompts)
"""Rules of the rows, asked again with the config as transformers loads it, defaults filled in."""
OF_CONFIG: tuple[Rule, ...] = (*library_limits.RULES, mesh_rules.of_config)
"""Rules of a config file, asked again where only the hub had it when the plan was made."""
RULES: tuple[Rule, ...] = (
    completeness, *library_limits.RULES, of_data, second_heads, token_loss, noise, trained_weights,
    second_model, batch_rows, *LAYOUT, precision, quantization, patterns, initial_adapter,
    token_rows, added_tokens, attention, images, compiled_blocks, rounded_on_disk,
    *step_rules.RULES, processes, divided,
)  # fmt: skip
"""Every rule. Those that only collect others have no field in their docstring."""
