"""Load or create the network of a recipe, before adapters and kernels are added."""

import contextlib
import dataclasses
import pickle
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from finetune.checkpoints.base_weights import refuse_codes
from finetune.checkpoints.pretrained import forget_stored_form, save_as_published
from finetune.distributed.base import Engine
from finetune.errors import FinetuneError, first_line, problems_of, refuse
from finetune.models import adapters, image_parts, scoring, vocabulary
from finetune.models.load_checks import other_shapes, unfilled, unread
from finetune.models.packed_attention import implementation
from finetune.models.quantization import (
    compute_in,
    loading_arguments,
    placed_while_loading,
)
from finetune.models.soundness import DECODER_ONLY
from finetune.planner import Plan, mesh_rules
from finetune.planner.request import Request
from finetune.planner.rules import OF_CONFIG
from finetune.planner.shapes import prequantised
from finetune.planner.shapes.config_files import refuse_other_labels
from finetune.process.progress import progress
from finetune.recipe import Recipe


def compute_dtype(plan: Plan) -> torch.dtype:
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return kinds[plan.backend.precision]


def weight_dtype(plan: Plan) -> torch.dtype:
    """Data type of the weights: the compute type if they are frozen, fp32 if they are trained.

    An engine with its own fp32 master weights uses the compute type for both.
    """
    frozen = plan.recipe.adapter is not None
    return compute_dtype(plan) if frozen or plan.traits.masters else torch.float32


def causal(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the causal language model for a config; for some, this is the text config."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    text = config.sub_configs.get("text_config")
    alone = text is not None and kind is not None and kind.config_class == text
    return config.get_text_config() if alone else config


def attention_of(engine: Engine, recipe: Recipe, config: PreTrainedConfig) -> Any:
    """The attention implementation of a model, or of each of its parts, for transformers."""
    if recipe.model.reads:
        chosen = implementation(recipe, config)
        return image_parts.attention_by_part(config, chosen, recipe.model.attention)
    config = causal(config)
    return engine.attention(config, implementation(recipe, config))


def from_scratch(engine: Engine) -> PreTrainedModel:
    """Create the model of `model.config`, with weights from torch's global generator.

    Raises:
        FinetuneError: transformers cannot create a model from the config.
    """
    recipe = engine.plan.recipe
    fields = {**(recipe.model.config or {}), **recipe.head.config}
    kind = fields.pop("model_type", None)
    if kind is None:
        raise FinetuneError("model.config: `model_type` is missing (llama, qwen3, mistral, ...)")
    try:
        config = AutoConfig.for_model(kind, **fields)
        with engine.without_partitioning():
            model = scoring.auto_class(recipe.head, recipe.model.reads).from_config(
                config,
                attn_implementation=attention_of(engine, recipe, config),
                dtype=torch.float32,
            )
            scoring.refuse_other_head(model, recipe.head)
            scoring.draw_head(model, recipe.head, recipe.seed)
            save_as_published(model)
        return engine.divide(model)  # type: ignore[return-value]
    except (ValueError, TypeError, ImportError) as error:
        raise FinetuneError(f"model.config: {first_line(error)}{advice(error)}") from None


def pretrained(engine: Engine, recipe: Recipe, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model of `model.name`.

    Args:
        engine: Engine, which may partition the model while it is loaded.
        recipe: Recipe that names the model.
        dtype: Data type of weights that are not quantized.

    Raises:
        FinetuneError: the model cannot be loaded, or its weights do not fit its config.json.
    """
    plan = engine.plan
    model, head = recipe.model, recipe.head
    fields = _stored_fields(plan, recipe)
    stored = prequantised.stored_kind(fields)
    dequantising = stored in prequantised.DEQUANTISED
    packed = stored is not None or model.quantization != "none"
    # Decomposing base weights needs them unsharded; so do the mean of a table, and a copied layer.
    adapter = recipe.adapter
    whole = (
        not plan.backend.zero_init
        or adapters.reads_base(adapter)
        or bool(model.add_tokens)
        or model.adapter is not None
        or (adapter is not None and adapter.kind != "lora")
        or dequantising
    )
    # Weights that are converted to fp32 shard by shard need not be read in fp32.
    widened = plan.widens_shards and not dequantising
    loaded: Any = None
    notes: list[str] = []
    new_head = False
    try:
        config = AutoConfig.from_pretrained(
            model.name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        refuse_other_labels(config.to_dict(), head, f"model.name: '{model.name}'")
        kept = None
        if model.reads and model.quantization != "none":
            with engine.without_partitioning():
                kept = image_parts.unquantised(config)
        unsharded = engine.without_partitioning() if whole else contextlib.nullcontext()
        with progress(f"loading {model.name}"), engine.loading(config) as words, unsharded:
            loaded = scoring.auto_class(head, model.reads).from_pretrained(
                model.name,
                **words,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                revision=model.revision,
                dtype="auto" if widened else dtype,
                attn_implementation=attention_of(engine, recipe, config),
                trust_remote_code=model.trust_remote_code,
                use_safetensors=None if model.pickle else True,  # a pickle can run code
                weights_only=True,
                **vocabulary.without_lost_pad(config),
                **head.config,
                **placed_while_loading(packed, plan.traits.shards_all),
                **loading_arguments(
                    fields,
                    model.quantization,
                    compute_dtype(plan),
                    getattr(torch, plan.quant_storage),
                    kept,
                ),
            )
    except (OSError, ValueError, ImportError, pickle.UnpicklingError, SafetensorError) as error:
        raise FinetuneError(
            f"model.name: '{model.name}' cannot be loaded: {first_line(error)}{advice(error)}"
        ) from None
    except RuntimeError as error:
        problems = other_shapes(error)
        if not problems:
            raise
    else:
        loaded, info = loaded
        scoring.refuse_other_head(loaded, head)
        info, new_head = scoring.without_new_head(info)
        unused, notes = unread(info, loaded)
        problems = unfilled(info) + unused
    if not whole and engine.world > 1:  # under ZeRO-3, only rank 0 sees shapes
        problems = engine.from_first(problems)
    # Asked again: a hub model is only here by now, and a second model was not asked about.
    refuse_codes("model.name", str(model.name), model.revision)
    if problems:
        raise FinetuneError(
            f"model.name: the weights of '{model.name}' do not fit its config.json: "
            f"{'; '.join(problems)}; fix config.json, or name a folder whose weights are complete"
        )
    engine.notes += notes
    if dequantising:
        forget_stored_form(loaded, dtype)
    compute_in(loaded, compute_dtype(plan))
    if head.scored and (new_head if engine.world == 1 else engine.from_first(new_head)):
        scoring.draw_head(loaded, head, recipe.seed)
    return loaded


def _stored_fields(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """The `config.json` of a recipe's model; empty if it cannot be read.

    Raises:
        FinetuneError: the model's type or quantization cannot be trained as the recipe requests.
    """
    model = recipe.model
    try:
        fields, _ = PreTrainedConfig.get_config_dict(model.name, revision=model.revision)
    except (OSError, ValueError):
        return {}  # reported when the model is loaded
    axes = plan.backend.axes
    if model != plan.recipe.model:  # a teacher or a reference, which may have no experts to divide
        axes = mesh_rules.axes_of(axes, fields)
    backend = dataclasses.replace(plan.backend, axes=axes)
    # Asked again: the plan cannot read a config that is only on the hub.
    refuse(problems_of(OF_CONFIG, Request(recipe, backend, plan.processes, fields)))
    return fields


def advice(error: Exception) -> str:
    """Advice at the end of a loading error, on other models, code, attention and pickles."""
    if "Unrecognized configuration class" in str(error):
        scores = "SequenceClassification" in str(error)
        return f"; {'use Qwen3, Llama, Mistral or Gemma' if scores else DECODER_ONLY}"
    if "custom code" in str(error):
        return "; that code runs only with model.trust_remote_code=true"
    if "FlashAttention" in str(error):
        return "; install it, or set model.attention=sdpa, which computes the same"
    if "model.safetensors" in str(error):
        return (
            "; weights in a pickle are refused, because one can run code: convert them to "
            "safetensors, or set model.pickle=true if you trust their author"
        )
    return ""
