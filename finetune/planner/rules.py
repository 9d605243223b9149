"""Rules that reject a recipe on a backend; each problem names the field, the reason and a fix."""

import dataclasses
import fnmatch
import json
import re
from collections.abc import Iterator

from finetune.backend import Backend
from finetune.planner import limits, mesh_rules
from finetune.planner.engines import TRAITS
from finetune.planner.families import family_of
from finetune.planner.kernels import choices, model_type
from finetune.planner.mesh import mesh_of
from finetune.planner.padding import layout_problems, padding
from finetune.planner.prompt_sharing import sharing_problems
from finetune.planner.shapes.config_files import fields_of, known_fields
from finetune.planner.shapes.prequantised import prequantised
from finetune.recipe import Batch, Data, LoRA, Recipe

RECOMPUTED_INIT = re.compile(r"pissa(_niter_\d+)?|olora|orthogonal|gaussian")


def incompatibilities(recipe: Recipe, backend: Backend, processes: int) -> list[str]:
    """Every problem of a recipe on a backend; empty if it can run."""
    return [
        *_completeness(recipe),
        *limits.problems(recipe, fields_of(recipe)),
        *mixture_problems(recipe),
        *method_problems(recipe),
        *_method(recipe, backend),
        *_batch(recipe, backend, processes),
        *layout_problems(recipe, known_fields(recipe)),
        *sharing_problems(recipe, backend, known_fields(recipe)),
        *prequantised(recipe, backend),
        *_quantization(recipe, backend),
        *_adapter(recipe, backend),
        *_vocabulary(recipe, backend),
        *_attention(recipe),
        *_blocks(recipe, backend),
        *_disk(recipe, backend),
        *_optimizer(recipe, backend),
        *_evaluation(recipe),
        *_processes(backend, processes),
        *mesh_rules.incompatible(recipe, backend, processes),
    ]


def _completeness(recipe: Recipe) -> Iterator[str]:
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
    batch, each = recipe.batch, recipe.documents_per_row
    if batch.micro_tokens is not None:
        if batch.micro_tokens < recipe.row_length:
            what = "a row" if each == 1 else f"the {each} documents of a row, each"
            yield (
                f"batch.micro_tokens: {batch.micro_tokens} tokens cannot hold {what} of "
                f"batch.max_length={batch.max_length}; use batch.micro_tokens={recipe.row_length}"
            )
        return
    rows, micro = batch.rows, batch.micro_rows
    ways = mesh_of(backend, max(1, processes)).data
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


def _method(recipe: Recipe, backend: Backend) -> Iterator[str]:
    """What a method needs of the kernels, and backends that cannot hold a second model."""
    head = next(c for c in choices(recipe, backend, model_type(recipe)) if c.option == "head")
    if recipe.teaches and head.value == "whole":
        because = f", because {head.fallback}" if head.fallback else ""
        yield (
            f"kernels.head: whole{because}, but {recipe.method} compares two heads in chunks; use "
            "kernels.head=chunked, without an adapter or trained rows on the head"
        )
    smoothing, weight, _ = recipe.token_loss or (0.0, "none", 1.0)
    if smoothing and weight != "none":
        yield f"label_smoothing: {smoothing}, but {weight} weighs the plain loss; use one of them"
    if recipe.teaches and recipe.token_loss is not None:
        yield (
            f"{'label_smoothing' if smoothing else 'token_weight'}: {recipe.method} compares two "
            "distributions, not a token's loss; remove it, or use method=sft"
        )
    noisy = recipe.model.neftune_alpha is not None
    if noisy and (recipe.takes == "prompts" or recipe.passes_before_step):
        yield (
            f"model.neftune_alpha: {recipe.method} compares log-probabilities of the model with "
            "those of a pass without noise; remove it"
        )
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


def _quantization(recipe: Recipe, backend: Backend) -> Iterator[str]:
    quantization, traits = recipe.model.quantization, TRAITS[backend.engine]
    if backend.precision == "fp16" and traits.masters:
        yield (
            f"precision: fp16 needs loss scaling, which {backend.name} implements differently; use "
            "single, ddp or fsdp_full_shard, or bf16"
        )
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


def _gathers_by_module(backend: Backend) -> bool:
    """Whether a weight is complete only while its own module runs (ZeRO-3)."""
    return TRAITS[backend.engine].for_own_module and backend.shard == "params"


def _adapter(recipe: Recipe, backend: Backend) -> Iterator[str]:
    adapter = recipe.adapter
    if adapter is None:
        return
    if recipe.model.trainable:
        yield (
            "model.trainable: it chooses among all weights, and an adapter freezes them; use "
            "adapter.modules_to_save or adapter.layers_to_transform, or adapter=null"
        )
    yield from _patterns(adapter)
    init = adapter.init_lora_weights
    if isinstance(init, str) and not RECOMPUTED_INIT.fullmatch(init):
        yield (
            f"adapter.init_lora_weights: '{init}' needs data or settings that a recipe does not "
            "contain; use true, gaussian, pissa, pissa_niter_16, olora or orthogonal"
        )
    if _reads_base(recipe) and recipe.model.quantization != "none":
        yield f"adapter.init_lora_weights: '{init}' reads base weights; use quantization=none"
    reading = {
        "use_dora: DoRA reads complete base weights": adapter.use_dora,
        "trainable_token_indices: PEFT reads complete embeddings": adapter.trainable_token_indices,
    }
    for reason, is_asked in reading.items():
        if is_asked and _gathers_by_module(backend):
            yield (
                f"adapter.{reason} in the forward pass, but {backend.name} gathers them only for "
                "their own module; use fsdp_full_shard or zero2"
            )


def _reads_base(recipe: Recipe) -> bool:
    """Whether the initial values of an adapter are computed from the weights of the base."""
    init = recipe.adapter.init_lora_weights if recipe.adapter else True
    return isinstance(init, str) and init != "gaussian"


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


def _vocabulary(recipe: Recipe, backend: Backend) -> Iterator[str]:
    """Added tokens whose rows would not be trained, or would be rounded."""
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


def _attention(recipe: Recipe) -> Iterator[str]:
    attention, fields = recipe.model.attention, known_fields(recipe)
    if attention == "sdpa" and not family_of(fields).sdpa and not padding(recipe, fields).free:
        free = padding(dataclasses.replace(recipe, batch=Batch()), fields).free
        yield (
            f"model.attention: transformers has no sdpa for {fields['model_type']}; use "
            f"model.attention=eager{', or batch.padding_free=auto' if free else ''}"
        )
    if recipe.model.checkpointing == "attention" and attention in ("eager", "flex_attention"):
        yield (
            "model.activation_checkpointing: `attention` keeps the output of a single operation, "
            f"but {attention} attention is not one; use model.attention=sdpa, or "
            "model.activation_checkpointing=true"
        )


def _blocks(recipe: Recipe, backend: Backend) -> Iterator[str]:
    if recipe.kernels.blocks == "eager":
        return
    kind, checkpointing = model_type(recipe), recipe.model.activation_checkpointing
    quantization = recipe.model.quantization
    reasons = {
        f"blocks of {kind} are not known to compile": kind and not family_of(kind).compiles,
        f"{backend.name} divides the products of a block": backend.axes.any,
        f"{backend.name} gathers weights in hooks inside of a block": _gathers_by_module(backend),
        f"model.quantization={quantization} has products that are not compiled": (
            quantization != "none"
        ),
        f"model.activation_checkpointing={checkpointing} selects operations of eager blocks": (
            checkpointing not in (True, False)
        ),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        yield f"kernels.blocks: compiled, but {reason}; use kernels.blocks=eager"


def _disk(recipe: Recipe, backend: Backend) -> Iterator[str]:
    """Models that DeepSpeed 0.19 would round when it offloads to disk.

    It keeps the precision of the run only for weights that it partitions while loading. Weights
    that are built unpartitioned first are stored on disk in 16 bits on a machine without fp16.
    """
    model, adapter = recipe.model, recipe.adapter
    whole = {
        "model.config: a model from scratch": model.config is not None,
        f"model.quantization: a base in {model.quantization}": model.quantization != "none",
        f"adapter.init_lora_weights: '{adapter.init_lora_weights if adapter else ''}'": _reads_base(
            recipe
        ),
    }
    for what, is_whole in whole.items():
        if is_whole and backend.device == "nvme":
            yield (
                f"{what} is not partitioned during loading, and {backend.name} would round it; use "
                "zero3_offload"
            )


def _optimizer(recipe: Recipe, backend: Backend) -> Iterator[str]:
    name = recipe.optim.name
    complete = {
        "adamw_8bit": "quantizes its moments in blocks of complete tensors",
        "paged_adamw_8bit": "quantizes its moments in blocks of complete tensors",
        "adafactor": "needs complete rows and columns of matrices",
        "muon": "orthogonalizes complete matrices",
    }
    if name in complete and (backend.shard != "none" or backend.axes.any):
        yield f"optim.name: {name} {complete[name]}, which {backend.name} shards; use adamw, or ddp"
    if backend.engine == "deepspeed" and (":" in name or name in ("lion", "sgd")):
        yield (
            f"optim.name: checkpoints of {backend.name} hold the two moments of AdamW, and not the "
            f"state of {name}; use fsdp_full_shard"
        )


def _evaluation(recipe: Recipe) -> Iterator[str]:
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


def _processes(backend: Backend, processes: int) -> Iterator[str]:
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
    elif processes < traits.least:
        yield f"processes: {engine} needs at least {traits.least}, got {processes}; use single"
