"""Reject what transformers or PEFT cannot train, by model type and adapter fields.

Model types are looked up in the tables of the installed transformers, which are read as text
because importing them takes seconds.
"""

import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from finetune.errors import FinetuneError
from finetune.planner.estimate.adapters import TABLES
from finetune.planner.experts import coefficient, expert_count
from finetune.planner.kernels import model_fields
from finetune.planner.shapes import published
from finetune.planner.shapes.read_config import read
from finetune.recipe import LoRA, Recipe

SEQ_TO_SEQ = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_SPEECH_SEQ_2_SEQ")
SCORED = "MODEL_FOR_SEQUENCE_CLASSIFICATION"
BESIDE_TEXT = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_MULTIMODAL_LM")
MAMBA = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
MAMBA_UNREACHED = ("out_proj", "conv1d")
"""Model types and modules that PEFT 0.21 refuses, as their kernels read the weights directly."""
MAMBA_TARGETS = {
    "mamba": "in_proj,x_proj", "falcon_mamba": "in_proj,x_proj", "mamba2": "in_proj",
    "falcon_h1": "q_proj,k_proj,v_proj,o_proj,in_proj,gate_proj,up_proj,down_proj",
    "nemotron_h": "q_proj,k_proj,v_proj,o_proj,in_proj,up_proj,down_proj",
}  # fmt: skip
"""Targets to use for these model types instead of `all-linear`."""
TRANSPOSED = ("gpt2", "openai-gpt")
"""Model types whose linear layers are `Conv1D` of transformers."""
KEEPING = (
    "cpmant", "ctrl", "gpt_neox_japanese", "jetmoe", "openai-gpt", "reformer", "xlm", "xlnet",
)  # fmt: skip
"""Model types without activation checkpointing in transformers 5.23."""
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MOST_LAYERS = 10_000
"""Layers of a model that is built at all; published models have at most a few hundred."""
DROPOUT = re.compile(r"(?!classifier_|summary_)(\w+_)?(dropout|pdrop|layerdrop)")
"""Names of dropout rates in configs, without those of heads that are not trained here."""
WITHOUT_3D = "adapters on expert tensors (three-dimensional parameters)"


def fields_of(recipe: Recipe) -> Mapping[str, Any]:
    """The config of a recipe's model, local or from `shapes.published`; empty if not known."""
    found = model_fields(recipe)
    if not found and recipe.model.name is not None:
        found = published.find(recipe.model.name) or {}
    return found


@functools.cache
def types(table: str) -> frozenset[str]:
    """Model types in a table of `transformers.models.auto`, such as `MODEL_FOR_CAUSAL_LM`.

    Empty if the table is not found; loading the model then reports the problem.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    path = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    found = re.search(rf"^{table}_MAPPING_NAMES = OrderedDict\((.*?)^\)", text, re.M | re.S)
    return frozenset(re.findall(r'^ +\(\s*"([^"]+)",', found[1], re.M)) if found else frozenset()


def problems(recipe: Recipe, fields: Mapping[str, Any]) -> Iterator[str]:
    """Every part of a recipe that transformers or PEFT cannot train, given the model's config."""
    field = "model.config" if recipe.model.config is not None else "model.name"
    yield from (f"{field}: {each}" for each in too_many_layers(fields))
    yield from architecture(recipe, fields)
    yield from _recomputation(recipe, fields)
    yield from adapter(recipe, fields)
    yield from router_loss(recipe, fields)
    rates = dropout(fields)
    if recipe.sampled is not None and rates:
        yield (
            f"{field}: its config has {_rates(rates)}, and completions are sampled without "
            "dropout, so that ratios of policies would be noise; set it to 0 in a copy of the model"
        )


def advice(recipe: Recipe, fields: Mapping[str, Any]) -> Iterator[str]:
    """Warnings about a model, given its config."""
    rates = dropout(fields)
    if recipe.reads_reference and rates:
        yield (
            f"model.name: its config has {_rates(rates)}, and the log-probabilities of the "
            "reference are computed without dropout, so each reward is noisy; 0 is usual"
        )


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


def too_many_layers(fields: Mapping[str, Any]) -> Iterator[str]:
    """Layer counts of a `config.json` that would take a model without end to build."""
    text = fields.get("text_config")
    parts = [fields, cast(Mapping[str, Any], text)] if isinstance(text, Mapping) else [fields]
    for part in parts:
        for name in LAYER_COUNTS:
            count = part.get(name)
            if isinstance(count, int | float) and count > MOST_LAYERS:
                got = f"{count:,}" if count < 10**12 else "beyond 10**12"
                yield f"{name} is {got}, and no model has more than {MOST_LAYERS:,} layers"


def architecture(recipe: Recipe, fields: Mapping[str, Any]) -> Iterator[str]:
    """Why a model is not a text decoder that `AutoModelForCausalLM` can build."""
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        return
    if recipe.model.trust_remote_code and fields.get("auto_map"):
        return  # the code in the repository defines the architecture
    field = "model.config" if recipe.model.config is not None else "model.name"
    causal = types("MODEL_FOR_CAUSAL_LM")
    both = any(kind in types(table) for table in SEQ_TO_SEQ) and not _reads_other_media(kind)
    if fields.get("is_encoder_decoder", both):
        yield (
            f"{field}: {kind} is an encoder-decoder model, and only decoders are trained here; "
            "use a decoder such as Qwen3, Llama or Gemma"
        )
    elif recipe.scores is not None and kind not in (scoring := types(SCORED)) and scoring:
        yield (
            f"{field}: {kind} has no sequence classification model in transformers, which method "
            f"'{recipe.method}' trains; use Qwen3, Llama, Mistral or Gemma"
        )
    elif causal and kind not in causal:
        reason = _not_causal(kind)
        if reason:
            yield f"{field}: {kind} {reason}; use a causal language model such as Qwen3 or Llama"


def _recomputation(recipe: Recipe, fields: Mapping[str, Any]) -> Iterator[str]:
    kind = fields.get("model_type")
    if recipe.model.activation_checkpointing and kind in KEEPING:
        yield (
            f"model.activation_checkpointing: transformers cannot recompute activations of {kind}; "
            "use false"
        )


def router_loss(recipe: Recipe, fields: Mapping[str, Any]) -> Iterator[str]:
    """Why a requested load-balancing loss cannot be added."""
    _, problem = coefficient(recipe.model, fields)
    if recipe.scores is not None and isinstance(recipe.model.router_aux_loss, float):
        problem = (
            f"model.router_aux_loss: method '{recipe.method}' adds no load-balancing loss to its "
            "scores; use model or none"
        )
    if problem:
        yield problem


def _reads_other_media(kind: str) -> bool:
    """Whether a model type is a decoder that also reads images or audio."""
    return any(kind in types(table) for table in BESIDE_TEXT)


def _not_causal(kind: str) -> str:
    """Description of a model type without a causal language model; empty for unknown types."""
    if _reads_other_media(kind):
        return "also reads images or audio, which are not supported"
    if kind in types("MODEL_FOR_MASKED_LM"):
        return "is an encoder that predicts masked tokens, not the next token"
    return "has no causal language model in transformers" if kind in types("MODEL") else ""


def adapter(recipe: Recipe, fields: Mapping[str, Any]) -> Iterator[str]:
    """Adapter settings that PEFT 0.21 refuses; some checks need the model's config."""
    given = recipe.adapter
    if given is None:
        return
    yield from _layers(given, fields)
    yield from _orthogonal(given)
    if given.init_lora_weights == "olora" and fields.get("model_type") in TRANSPOSED:
        yield (
            "adapter.init_lora_weights: PEFT's olora does not support the transposed matrices of "
            f"{fields['model_type']}; use true, pissa or orthogonal"
        )
    yield from _mamba(given, str(fields.get("model_type")))
    experts = expert_count(fields) > 1 and given.targets == "all-linear"
    if experts or given.target_parameters:
        yield from against_parameters(given)


def _layers(given: LoRA, fields: Mapping[str, Any]) -> Iterator[str]:
    if not given.layers_to_transform:
        return
    if isinstance(given.targets, str):
        yield (
            f"adapter.layers_to_transform: PEFT selects layers only among modules given by name, "
            f"and adapter.targets is '{given.targets}'; name them, as in "
            "adapter.targets=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
        )
    layers = fields.get("num_hidden_layers", fields.get("n_layer"))
    beyond = [str(n) for n in given.layers_to_transform if isinstance(layers, int) and n >= layers]
    beyond += [str(n) for n in given.layers_to_transform if n < 0]
    if beyond:
        last = f"0 to {layers - 1}" if isinstance(layers, int) else "0 and more"
        yield f"adapter.layers_to_transform: got {', '.join(beyond)}, expected layers {last}"


def names_only_matrices(given: LoRA, fields: Mapping[str, Any]) -> bool:
    """Whether every name in an adapter section is known to exist, without building the model.

    The formulas know the matrices of a layer, the embedding and the head.
    """
    try:
        shape = read(fields)
    except FinetuneError:
        return False  # a family without formulas
    known = {matrix.leaf for matrix in shape.matrices}
    known |= {TABLES.get(shape.kind, "embed_tokens"), shape.head.rsplit(".", 1)[-1]}
    asked = () if given.targets == "all-linear" else given.targets
    names: list[str] = []
    for each in (asked, given.exclude_modules, given.modules_to_save):
        names += [each] if isinstance(each, str) else each  # a regular expression is none of them
    return known.issuperset((*names, *given.rank_pattern, *given.alpha_pattern))


def _orthogonal(given: LoRA) -> Iterator[str]:
    if given.init_lora_weights != "orthogonal":
        return
    ranks = {"adapter.r": given.r, **{f"adapter.rank_pattern.{n}": r for n, r in
                                      given.rank_pattern.items()}}  # fmt: skip
    for field, rank in ranks.items():
        if rank % 2:
            yield f"{field}: orthogonal needs an even rank, got {rank}; use {rank + 1}"


def _mamba(given: LoRA, kind: str) -> Iterator[str]:
    if kind not in MAMBA:
        return
    use = f"use adapter.targets=[{MAMBA_TARGETS[kind]}]"
    if given.targets == "all-linear":
        yield (
            f"adapter.targets: all-linear reaches out_proj of {kind}, which PEFT refuses, because "
            f"kernels of Mamba read its weights directly; {use}"
        )
    elif not isinstance(given.targets, str):
        for name in given.targets:
            if name.rsplit(".", 1)[-1] in MAMBA_UNREACHED:
                yield (
                    f"adapter.targets: PEFT refuses {name} of {kind}, because kernels of Mamba "
                    f"read its weights directly; {use}"
                )


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
