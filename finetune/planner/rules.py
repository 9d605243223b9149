"""Rules that reject a recipe on a backend; each problem names the field, the reason and a fix."""

import dataclasses
import fnmatch
import json
import re
from collections.abc import Iterator

from finetune.backend import Backend
from finetune.planner import division, limits
from finetune.planner.engines import TRAITS
from finetune.planner.families import family_of
from finetune.planner.kernels import choices, model_type
from finetune.planner.mesh import mesh_of
from finetune.planner.padding import against, padding
from finetune.planner.shapes.config_files import fields_of, known_fields
from finetune.planner.shapes.prequantised import prequantised
from finetune.planner.shared_prompts import sharing_problems
from finetune.recipe import Batch, Data, LoRA, Recipe

RECOMPUTED_INIT = re.compile(r"pissa(_niter_\d+)?|olora|orthogonal|gaussian")


def incompatibilities(recipe: Recipe, backend: Backend, processes: int) -> list[str]:
    """Every problem of a recipe on a backend; empty if it can run."""
    rules = (
        _completeness,
        _limits,
        _mixture,
        _method,
        _second_model,
        _batch,
        _padding,
        _precision,
        _quantization,
        prequantised,
        _adapter,
        _vocabulary,
        _attention,
        _checkpointing,
        _blocks,
        _disk,
        _optimizer,
        _evaluation,
        _processes,
        division.incompatible,
    )
    return [problem for rule in rules for problem in rule(recipe, backend, processes)]


def _completeness(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    model = recipe.model
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


def _limits(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    yield from limits.problems(recipe, fields_of(recipe))


def _mixture(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    return mixture_problems(recipe)


def mixture_problems(recipe: Recipe) -> Iterator[str]:
    """Contradictions in the weights of the sources, which no command accepts."""
    for section in ("data", "eval_data"):
        sources: tuple[Data, ...] = getattr(recipe, section)
        weighted = [data.weight is not None for data in sources]
        if not any(weighted):
            continue
        for number, data in enumerate(sources):
            if data.weight is None:
                yield (
                    f"{section}.{number}.weight: none, while {section}.{weighted.index(True)} has "
                    "one; give every source of the mixture a weight, or none of them"
                )
            elif data.repeat > 1:
                yield (
                    f"{section}.{number}.repeat: {data.repeat}, but the weights determine how much "
                    "of each source an epoch contains; remove one of the two"
                )


def _batch(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    rows, micro = recipe.batch.rows, recipe.batch.micro_rows
    if recipe.batch.micro_tokens is not None:
        yield from _micro_tokens(recipe)
        return
    ways = mesh_of(backend, max(1, processes)).data
    unit = micro * ways
    if rows % unit:
        below, above = rows - rows % unit, rows + unit - rows % unit
        choices = " or ".join(str(value) for value in (below, above) if value)
        yield (
            f"batch.rows: {rows} does not divide into micro-batches of {micro} rows on {ways} "
            f"{_readers(backend, ways)} ({micro} x {ways} = {unit}); use batch.rows={choices}"
        )


def _readers(backend: Backend, count: int) -> str:
    several = count > 1
    return f"group{'s' * several} of processes" if backend.axes.any else f"process{'es' * several}"


def _padding(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    batch = recipe.batch
    if batch.packing and batch.padding_free is False:
        yield (
            "batch.padding_free: false, but batch.packing=true concatenates documents; remove one "
            "of the two"
        )
    elif not batch.packing and batch.padding_free is True:
        for reason in against(recipe, known_fields(recipe)):
            yield f"batch.padding_free: {reason}; use batch.padding_free=auto, which then pads"
    yield from sharing_problems(recipe, backend, known_fields(recipe))


def _micro_tokens(recipe: Recipe) -> Iterator[str]:
    batch, needed, each = recipe.batch, recipe.row_length, recipe.documents_per_row
    if batch.micro_tokens is not None and batch.micro_tokens < needed:
        what = "a row" if each == 1 else f"the {each} documents of a row, each"
        yield (
            f"batch.micro_tokens: {batch.micro_tokens} tokens cannot hold {what} of "
            f"batch.max_length={batch.max_length}; use batch.micro_tokens={needed}"
        )


def _method(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    yield from method_problems(recipe)
    if recipe.teaches:
        head = next(c for c in choices(recipe, backend, model_type(recipe)) if c.option == "head")
        if head.value == "whole":
            yield (
                f"kernels.head: {head.value}{f', because {head.fallback}' * bool(head.fallback)}, "
                f"but {recipe.method} compares two heads in chunks; use kernels.head=chunked, "
                "without an adapter or trained rows on the head"
            )


def method_problems(recipe: Recipe) -> Iterator[str]:
    """Data settings that the method does not support, which no command accepts."""
    if recipe.batch.overlong == "split" and recipe.takes != "prompts":
        if recipe.scores is not None:
            why = "scores whole sequences"
        elif recipe.takes == "judged":
            why = "learns from the label of a whole answer"
        else:
            why = "compares the documents of a row, and pieces of them are not comparable"
        if "split" not in recipe.fits_rows_by:
            yield f"batch.overlong: split, but {recipe.method} {why}; use drop or truncate"

    if recipe.takes == "prompts":
        yield from _prompts(recipe)


def _second_model(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    """Backends that cannot hold a second model."""
    sharded = backend.shard == "params" or TRAITS[backend.engine].shards_all
    if recipe.needs_second_model and sharded:
        yield (
            f"beta: its reference is a second model, which {backend.name} would hold unsharded; "
            "train a new adapter, whose base is the reference, set beta=0, or use ddp or zero2"
        )


def _prompts(recipe: Recipe) -> Iterator[str]:
    """Settings that do not work with prompts and sampled completions."""
    batch = recipe.batch
    if batch.overlong in ("truncate", "split"):
        yield (
            f"batch.overlong: {batch.overlong}, but part of a prompt is a different request; use "
            "drop"
        )
    if batch.packing:
        yield (
            "batch.packing: true, but completions are sampled during training and concatenated by "
            "batch.padding_free; remove batch.packing"
        )
    yield from recipe.problems()


def _precision(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    if backend.precision == "fp16" and TRAITS[backend.engine].masters:
        yield (
            f"precision: fp16 needs loss scaling, which {backend.name} implements differently; use "
            "single, ddp or fsdp_full_shard, or bf16"
        )


def _quantization(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    quantization, traits = recipe.model.quantization, TRAITS[backend.engine]
    if quantization == "none":
        return
    if recipe.adapter is None:
        yield (
            f"model.quantization: {quantization} weights cannot be trained; add an adapter "
            "(with_qlora) or use model.quantization=none"
        )
    if recipe.model.config is not None:
        yield f"model.quantization: {quantization} needs pretrained weights (model.name)"
    if quantization == "int8" and (traits.floats_only or backend.shard == "params"):
        yield (
            f"model.quantization: int8 weights cannot be sharded by {backend.name}; use nf4, or a "
            "backend that keeps parameters unsharded (ddp, zero2)"
        )


def _adapter(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    adapter = recipe.adapter
    if adapter is None:
        return
    yield from _patterns(adapter)
    init = adapter.init_lora_weights
    special = isinstance(init, str) and init != "gaussian"
    if isinstance(init, str) and not RECOMPUTED_INIT.fullmatch(init):
        yield (
            f"adapter.init_lora_weights: '{init}' needs data or settings that a recipe does not "
            "contain; use true, gaussian, pissa, pissa_niter_16, olora or orthogonal"
        )
    if special and recipe.model.quantization != "none":
        yield f"adapter.init_lora_weights: '{init}' reads base weights; use quantization=none"
    if backend.shard == "params" and TRAITS[backend.engine].for_own_module and adapter.use_dora:
        yield (
            f"adapter.use_dora: DoRA reads complete base weights in its forward pass, but "
            f"{backend.name} gathers them only for their own module; use fsdp_full_shard or zero2"
        )


def _patterns(adapter: LoRA) -> Iterator[str]:
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


def _vocabulary(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    """Added tokens whose rows would not be trained, and rows that a backend cannot train."""
    added, adapter = recipe.model.add_tokens, recipe.adapter
    repeated = sorted({token for token in added if added.count(token) > 1})
    if repeated:
        yield f"model.add_tokens: {', '.join(map(repr, repeated))} more than once; list it once"
    if added and backend.device == "nvme":
        yield (
            f"model.add_tokens: embeddings that grow are not partitioned during loading, and "
            f"{backend.name} would round them; use zero3_offload"
        )
    if adapter is None:
        return
    rows = adapter.trainable_token_indices
    if added and not rows and not adapter.modules_to_save and recipe.model.adapter is None:
        words = ", ".join(json.dumps(token, ensure_ascii=False) for token in added)
        yield (
            f"model.add_tokens: the adapter would not train the rows of {words}; set "
            f"adapter.trainable_token_indices=[{words}] to train these rows, "
            "adapter.modules_to_save=[embed_tokens, lm_head] to train all rows, or adapter=null"
        )
    if rows and TRAITS[backend.engine].for_own_module and backend.shard == "params":
        yield (
            "adapter.trainable_token_indices: PEFT reads complete embeddings in the forward pass, "
            f"but {backend.name} gathers them only for their own module; use fsdp_full_shard or "
            "zero2"
        )


def _attention(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    if recipe.model.attention != "sdpa":
        return
    fields = known_fields(recipe)
    kind = fields.get("model_type")
    if not family_of(kind).sdpa and not padding(recipe, fields).free:
        free = padding(dataclasses.replace(recipe, batch=Batch()), fields).free
        yield (
            f"model.attention: transformers has no sdpa for {kind}; use model.attention=eager"
            f"{', or batch.padding_free=auto' if free else ''}"
        )


def _checkpointing(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    attention = recipe.model.attention
    if recipe.model.checkpointing == "attention" and attention in ("eager", "flex_attention"):
        yield (
            f"model.activation_checkpointing: `attention` keeps the output of a single operation, "
            f"but {attention} attention is not one; use model.attention=sdpa, or "
            "model.activation_checkpointing=true"
        )


def _blocks(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    if recipe.kernels.blocks == "eager":
        return
    kind, checkpointing = model_type(recipe), recipe.model.activation_checkpointing
    cuts = TRAITS[backend.engine].for_own_module and backend.shard == "params"
    reasons = {
        f"blocks of {kind} are not known to compile": kind is not None
        and not family_of(kind).compiles,
        f"{backend.name} divides the products of a block": backend.axes.any,
        f"{backend.name} gathers weights in hooks of modules inside of a block": cuts,
        f"model.quantization={recipe.model.quantization} has products that are not compiled": (
            recipe.model.quantization != "none"
        ),
        f"model.activation_checkpointing={checkpointing} selects operations of eager blocks": (
            checkpointing not in (True, False)
        ),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        yield f"kernels.blocks: compiled, but {reason}; use kernels.blocks=eager"


def _disk(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    """Models that DeepSpeed 0.19 would round when it offloads to disk.

    It keeps the precision of the run only for weights that it partitions while loading. Weights
    that are built unpartitioned first are stored on disk in 16 bits on a machine without fp16.
    """
    if backend.device != "nvme":
        return
    init = recipe.adapter.init_lora_weights if recipe.adapter else True
    whole = {
        "model.config: a model from scratch": recipe.model.config is not None,
        f"model.quantization: a base in {recipe.model.quantization}": recipe.model.quantization
        != "none",
        f"adapter.init_lora_weights: '{init}'": isinstance(init, str) and init != "gaussian",
    }
    for what, is_whole in whole.items():
        if is_whole:
            yield (
                f"{what} is not partitioned during loading, and {backend.name} would round it; use "
                "zero3_offload"
            )


def _optimizer(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    name = recipe.optim.name
    sharded = backend.shard != "none" or backend.axes.any
    if name in ("adamw_8bit", "paged_adamw_8bit") and sharded:
        yield (
            f"optim.name: {name} quantizes its moments in blocks, and {backend.name} shards "
            "tensors across blocks, so the result would depend on the number of processes; use "
            "adamw, or ddp"
        )
    if name == "adafactor" and sharded:
        yield (
            f"optim.name: adafactor needs complete rows and columns of matrices, which "
            f"{backend.name} shards; use adamw, or ddp"
        )
    if backend.engine == "deepspeed" and (":" in name or name in ("lion", "sgd")):
        yield (
            f"optim.name: checkpoints of {backend.name} hold the two moments of AdamW, and not the "
            f"state of {name}; use fsdp_full_shard"
        )
    if name == "muon" and sharded:
        yield (
            f"optim.name: muon orthogonalizes complete matrices, which {backend.name} shards; use "
            "adamw, or ddp"
        )


def _evaluation(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    held_out = bool(recipe.eval_data) or recipe.eval_rows is not None
    evaluation = recipe.evaluation
    asked = (evaluation.every, evaluation.patience, evaluation.metrics or None)
    if not held_out and any(each is not None for each in asked):
        yield "evaluation: there is nothing to evaluate on; give eval_data or eval_rows"
    if recipe.eval_data and recipe.eval_rows is not None:
        yield "eval_rows: rows are held out of `data` only if eval_data is not given; remove one"
    yield from _best(recipe, held_out)


def _best(recipe: Recipe, held_out: bool) -> Iterator[str]:
    """A criterion for the best checkpoint that is not measured; answer metrics are not checked."""
    best, known = recipe.evaluation.best, _evaluated(recipe)
    if best != "loss" and not held_out:
        yield f"evaluation.best: {best}, but nothing is evaluated; give eval_data or eval_rows"
    is_known = any(fnmatch.fnmatch(best.removeprefix("-"), each) for each in known)
    if best != "loss" and not is_known and not recipe.evaluation.metrics:
        yield (
            f"evaluation.best: {best} is not measured by method {recipe.method}; available are "
            f"{', '.join(['loss', *known])}"
        )


def _evaluated(recipe: Recipe) -> list[str]:
    """Names of the metrics of an evaluation other than its loss; `*` matches any name."""
    if recipe.takes == "prompts":
        lengths = [f"{each}_length" for each in ("mean", "min", "max", "mean_terminated")]
        rewards = (f"rewards/{name}/mean" for name in recipe.evaluated_rewards)
        return [
            "reward",
            *rewards,
            *(f"completions/{name}" for name in (*lengths, "clipped_ratio")),
        ]
    more = ["f1", "f1/*"] if recipe.scores is not None and recipe.takes == "labelled" else []
    derived = recipe.derived(dict.fromkeys(recipe.metrics, 0.0))
    return [*dict.fromkeys([*recipe.metrics, *derived, *recipe.extremes, *more])]


def _processes(recipe: Recipe, backend: Backend, processes: int) -> Iterator[str]:
    traits, engine = TRAITS[backend.engine], backend.engine
    if processes < 1:
        yield f"processes: got {processes}, expected at least 1"
    elif traits.alone and processes > 1:
        yield f"processes: {engine} runs one process, got {processes}; use ddp or fsdp_full_shard"
    elif backend.axes.any:
        return  # see `division`
    elif backend.shard_size is not None and processes % backend.shard_size:
        yield (
            f"processes: {processes} is not a multiple of the shard size {backend.shard_size}; use "
            "a multiple of it, or --shard-size"
        )
    elif processes < (least := traits.least):
        yield f"processes: {engine} needs at least {least}, got {processes}; use single"
