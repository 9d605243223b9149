"""Reject what transformers or PEFT cannot train, by model type and adapter fields."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from finetune.errors import FinetuneError
from finetune.planner.balance_loss import coefficient, expert_count
from finetune.planner.families import ENCODER_DECODER, FAMILIES, UNREAD, family_of
from finetune.planner.request import Request, Rule
from finetune.planner.shapes.prequantised import (
    BITSANDBYTES,
    DEQUANTISED,
    storage_of,
    stored_kind,
)
from finetune.planner.shapes.read_config import read
from finetune.recipe import LoRA, Recipe

MAMBA_UNREACHED = ("out_proj", "conv1d")
"""Modules that PEFT 0.21 refuses, as the kernels of Mamba read their weights directly."""
DROPOUT = re.compile(r"(?!classifier_|summary_)(\w+_)?(dropout|pdrop|layerdrop)")
"""Names of dropout rates in configs, without those of heads that are not trained here."""
WITHOUT_3D = "adapters on expert tensors (three-dimensional parameters)"
MOST_LAYERS = 10_000


def advice(recipe: Recipe, fields: Mapping[str, Any]) -> Iterator[str]:
    """Warnings about a model, given its config."""
    rates = dropout(fields)
    if recipe.reads_reference and rates:
        yield (
            f"model.name: its config has {_rates(rates)}, and the log-probabilities of the "
            "reference are computed without dropout, so each reward is noisy; 0 is usual"
        )


def _field(recipe: Recipe) -> str:
    return "model.config" if recipe.model.config is not None else "model.name"


def dropout(fields: Mapping[str, Any]) -> dict[str, float]:
    """Dropout rates above 0 that a decoder applies in training, by their names in its config."""
    text = fields.get("text_config")
    inner = dropout(cast(Mapping[str, Any], text)) if isinstance(text, Mapping) else {}
    own = {
        name: value
        for name, value in fields.items()
        if isinstance(value, float) and value > 0 and DROPOUT.fullmatch(name)
    }
    return {**own, **inner}


def _rates(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in rates.items())


def names_only_matrices(given: LoRA, fields: Mapping[str, Any]) -> bool:
    """Whether every name in an adapter section is known to exist, without building the model.

    The formulas know the matrices of a layer, the embedding and the head.
    """
    known = set[str]()  # of a family without formulas
    with contextlib.suppress(FinetuneError):
        shape = read(fields)
        known = {matrix.leaf for matrix in shape.matrices} | {shape.table, shape.head}
    asked = () if given.targets == "all-linear" else given.targets
    names: list[str] = []
    for each in (asked, given.exclude_modules, given.modules_to_save):
        names += [each] if isinstance(each, str) else each  # a regular expression is none of them
    return known.issuperset((*names, *given.rank_pattern, *given.alpha_pattern))


def against_parameters(given: LoRA) -> Iterator[str]:
    """Adapter settings that `ParamWrapper` of PEFT 0.21 does not support."""
    init = given.init_lora_weights
    whole = {
        f"adapter.dropout: {given.dropout} cannot be applied inside": given.dropout > 0,
        "adapter.use_dora: DoRA has no": given.use_dora,
        f"adapter.init_lora_weights: '{init}' has no": isinstance(init, str) and init != "gaussian",
    }
    instead = {"dropout": "0", "use_dora": "false", "init_lora_weights": "true"}
    for setting, is_asked in whole.items():
        if is_asked:
            field = setting.split(":")[0].removeprefix("adapter.")
            yield (
                f"{setting} {WITHOUT_3D}; use adapter.{field}={instead[field]}, or name modules of "
                "attention in adapter.targets and leave adapter.target_parameters empty"
            )


def layers(request: Request) -> Iterator[str]:
    """model.config, model.name: a number of layers that no model has; correct config.json."""
    text = cast("Mapping[str, Any]", request.fields.get("text_config") or {})
    for count in (request.fields.get("num_hidden_layers"), text.get("num_hidden_layers")):
        if isinstance(count, int | float) and count > MOST_LAYERS:
            yield (
                f"{_field(request.recipe)}: num_hidden_layers is above {MOST_LAYERS:,}, which no "
                "model has"
            )


def architecture(request: Request) -> Iterator[str]:
    """model.config, model.name: not a text decoder; use one, such as Qwen3, Llama or Gemma."""
    kind, reads = request.kind, request.recipe.model.reads
    if reads and request.fields and not family_of(kind).reads:
        known = ", ".join(name for name, each in FAMILIES.items() if each.reads)
        reason = UNREAD.get(str(kind), "is not known to read images")
        yield (
            f"model.reads: {kind} {reason}; use one of {known}, or reads=[] for a model that also "
            "reads text alone"
        )
    elif reason := unfit(request.recipe, request.fields):
        yield (
            f"{_field(request.recipe)}: {kind} {reason}; use a decoder such as Qwen3, Llama or "
            "Gemma"
        )


def unfit(recipe: Recipe, fields: Mapping[str, Any]) -> str:
    """Why a model is not a text decoder, as far as its config or its type says so; or ""."""
    if recipe.model.trust_remote_code and fields.get("auto_map"):
        return ""  # the code in the repository defines the architecture
    encodes = fields.get("is_encoder_decoder")
    family = family_of(fields)
    reason = ENCODER_DECODER if encodes else "" if recipe.model.reads else family.unfit
    return "" if encodes is False and reason == ENCODER_DECODER else reason


def recomputation(request: Request) -> Iterator[str]:
    """model.activation_checkpointing: transformers cannot recompute this model; use false."""
    kind = request.kind
    if request.recipe.model.activation_checkpointing and not family_of(kind).recomputes:
        yield (
            f"model.activation_checkpointing: transformers cannot recompute activations of {kind}; "
            "use false"
        )


def router_loss(request: Request) -> Iterator[str]:
    """model.router_aux_loss: no load-balancing loss is known for this model or method; use none."""
    recipe = request.recipe
    _, problem = coefficient(recipe.model, request.fields)
    if recipe.head.scored and isinstance(recipe.model.router_aux_loss, float):
        problem = (
            f"model.router_aux_loss: method '{recipe.method}' adds no load-balancing loss to its "
            "scores; use model or none"
        )
    if problem:
        yield problem


def sampling_dropout(request: Request) -> Iterator[str]:
    """model.config, model.name: dropout makes ratios of policies noise; set it to 0 in a copy."""
    rates = dropout(request.fields)
    if request.recipe.sampled is not None and rates:
        yield (
            f"{_field(request.recipe)}: its config has {_rates(rates)}, and completions are "
            "sampled without dropout, so that ratios of policies would be noise; set it to 0 in a "
            "copy of the model"
        )


def adapted_layers(request: Request) -> Iterator[str]:
    """adapter.layers_to_transform: no such layer, or no named module; name both."""
    given = request.recipe.adapter
    if given is None or not given.layers_to_transform:
        return
    if isinstance(given.targets, str):
        yield (
            f"adapter.layers_to_transform: PEFT selects layers only among modules given by name, "
            f"and adapter.targets is '{given.targets}'; name them, as in "
            "adapter.targets=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
        )
    count = request.fields.get("num_hidden_layers", request.fields.get("n_layer"))
    beyond = [str(n) for n in given.layers_to_transform if isinstance(count, int) and n >= count]
    if beyond:
        yield (
            f"adapter.layers_to_transform: got {', '.join(beyond)}, expected layers 0 to "
            f"{count - 1}"
        )


def adapter(request: Request) -> Iterator[str]:
    """adapter.r, adapter.init_lora_weights, adapter.targets: PEFT refuses it; use what is named."""
    given, fields, family = request.recipe.adapter, request.fields, family_of(request.fields)
    if given is None:
        return
    ranks = {"r": given.r} | {f"rank_pattern.{n}": r for n, r in given.rank_pattern.items()}
    for field, rank in ranks.items():
        if given.init_lora_weights == "orthogonal" and rank % 2:
            yield f"adapter.{field}: orthogonal needs an even rank, got {rank}; use {rank + 1}"
    if given.init_lora_weights == "olora" and family.transposed:
        yield (
            "adapter.init_lora_weights: PEFT's olora does not support the transposed matrices of "
            f"{request.kind}; use true, pissa or orthogonal"
        )
    targets = ["out_proj"] if given.targets == "all-linear" else given.targets
    if family.targets and not isinstance(targets, str):
        for name in targets:
            if name.rsplit(".", 1)[-1] in MAMBA_UNREACHED:
                yield (
                    f"adapter.targets: PEFT refuses {name} of {request.kind}, because "
                    "kernels of Mamba read its weights directly; use "
                    f"adapter.targets=[{family.targets}]"
                )
    experts = expert_count(fields) > 1 and given.targets == "all-linear"
    if experts or given.target_parameters:
        yield from against_parameters(given)


def stored_weights(request: Request) -> Iterator[str]:
    """model.name: its files are quantized in another way; use the model that it was made from."""
    name, fields = request.recipe.model.name, request.fields
    asked, kind = request.recipe.model.quantization, stored_kind(fields)
    if name is None or kind is None:
        return
    have = f"model.name: the weights of '{name}' are stored in {kind}"
    unquantised = "use the model that it was made from"
    if kind in BITSANDBYTES and asked != kind:
        yield (
            f"{have} ({BITSANDBYTES[kind]} of bitsandbytes), and model.quantization is "
            f"'{asked}'; set model.quantization={kind} and an adapter, or {unquantised}"
        )
    elif kind in BITSANDBYTES:
        packed = kind == "nf4" and "float" not in storage_of(fields)
        if packed and request.traits.floats_only:
            yield (
                f"{have} packed in {storage_of(fields)}, and {request.backend.name} shards "
                f"floating point tensors only; {unquantised}, or use a backend that keeps "
                "parameters unsharded (ddp, zero2)"
            )
    elif kind not in DEQUANTISED:
        yield f"{have}, which cannot be trained here; {unquantised}"
    elif asked != "none":
        yield (
            f"{have}, and model.quantization={asked} would quantize them again; set "
            f"model.quantization=none, which dequantizes them, or {unquantised}"
        )


def tuner(request: Request) -> Iterator[str]:
    """adapter.kind: only LoRA knows where layers are divided; use lora, ddp or fsdp_full_shard."""
    adapter, backend = request.recipe.adapter, request.backend
    if adapter is None or adapter.kind == "lora":
        return
    if backend.axes.any:
        yield (
            f"adapter.kind: {adapter.kind} reads complete weights of a layer, and {backend.name} "
            "divides layers; use lora, ddp or fsdp_full_shard"
        )


RULES: tuple[Rule, ...] = (
    layers, architecture, recomputation, adapted_layers, adapter, tuner, router_loss,
    sampling_dropout, stored_weights,
)  # fmt: skip
"""Rules of a recipe and its model's config alone."""
