"""The network of a recipe: loaded or built, quantised, and given its adapter."""

import contextlib
import functools
import pickle
from collections.abc import Callable
from typing import Any, Literal

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from finetune.checkpoints.pretrained import forget_stored_form, save_as_published
from finetune.distributed import layers
from finetune.distributed.base import Engine
from finetune.distributed.device import on_cpu
from finetune.errors import FinetuneError
from finetune.kernels.activation import FusedGate, fuse_activations
from finetune.kernels.balance import balance_of
from finetune.kernels.chains import Chain
from finetune.kernels.expert_products import compute_as_autocast
from finetune.kernels.head import give_loss
from finetune.kernels.lora import group_adapters, left_alone, reasons_against_tiles
from finetune.kernels.norm import FusedNorm, fuse_norms
from finetune.kernels.rotary import FusedRotation, fuse_rotations
from finetune.models import adapters, continued, vocabulary
from finetune.models.gradients import without_unreached
from finetune.models.load_checks import first_line, is_of_library, other_shapes, unfilled, unread
from finetune.models.packed_attention import (
    DOCUMENTS,
    attention_notes,
    check_layout,
    implementation,
)
from finetune.models.quantization import (
    compute_in,
    keep_unpacked,
    loading_arguments,
    placed_while_loading,
)
from finetune.models.recurrence import keep_apart
from finetune.models.soundness import (
    DECODER_ONLY,
    blame,
    cross_attention,
    explained,
    hold_in_fp32,
    not_finite,
)
from finetune.models.starting_adapter import tokenizer_of
from finetune.planner import Plan, division, limits
from finetune.planner.kernels import PARTS, choices
from finetune.planner.shapes import prequantised
from finetune.recipe import LoRA, Recipe

FUSED: dict[str, tuple[Callable[[nn.Module], None], type, str]] = {
    "norm": (fuse_norms, FusedNorm, PARTS["norm"]),
    "activation": (fuse_activations, FusedGate, PARTS["activation"]),
    "rotary": (fuse_rotations, FusedRotation, PARTS["rotary"]),
}
"""What makes each part of a model one operation, the class that it then has, and its name."""
ENDINGS = {"norm": ("Norm",), "activation": ("MLP", "Experts"), "rotary": ("Attention",)}
"""How transformers ends the names of the classes of each part."""

ATTENTION_OPERATIONS = ("_scaled_dot_product_", "flash_attn", "varlen_attn", "document_attention")
"""Parts of the names of operations that are a whole attention: torch's, and one of ours."""


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer of a recipe, with the tokens that the recipe adds.

    Raises:
        FinetuneError: there is none where the recipe says.
    """
    model = recipe.model
    own = tokenizer_of(model.adapter) if model.adapter and not model.tokenizer else None
    name = model.tokenizer or own or model.name
    field = "model.tokenizer" if model.tokenizer else "model.adapter" if own else "model.name"
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            revision=None if own else model.revision,
            trust_remote_code=model.trust_remote_code,
        )
        vocabulary.check_words(tokenizer)
    except FinetuneError:
        raise
    except BaseException as error:  # tokenizers has no type for a file that it cannot read
        if not is_of_library(error):
            raise
        raise FinetuneError(
            f"{field}: no tokenizer can be loaded from '{name}' ({first_line(error)}); "
            "name a folder with tokenizer.json, or set model.tokenizer"
        ) from None
    vocabulary.add_tokens(tokenizer, model.add_tokens)
    return tokenizer


def build(engine: Engine, seed: int) -> nn.Module:
    """Model with its adapter, on this rank, before the engine shards it.

    Every rank draws the same initial weights, whatever the engine: weights from scratch with one
    generator, an adapter's with a generator of its own for each parameter name.

    Raises:
        FinetuneError: the model cannot be loaded, or the adapter does not fit it.
    """
    plan = engine.plan
    recipe = plan.recipe
    if recipe.model.attention == "flex_attention" and engine.device.type == "cpu":
        raise FinetuneError(
            "model.attention: flex_attention of PyTorch cannot train on a CPU; use sdpa"
        )
    torch.manual_seed(seed)
    field = "model.name" if recipe.model.config is None else "model.config"
    with explained(field, "transformers cannot make a model of it", DECODER_ONLY):
        model = _from_scratch(engine) if recipe.model.config is not None else _pretrained(engine)
    check_layout(recipe, model.config)
    keep_unpacked(model)
    _refuse_unfit(model, recipe)
    given = None if recipe.model.adapter is None else continued.prepare_base(model, recipe)
    by_rows = recipe.adapter is not None and recipe.adapter.trainable_token_indices
    tokenizer = load_tokenizer(recipe) if recipe.model.add_tokens or by_rows else None
    grown = range(0) if tokenizer is None else vocabulary.give_rows(model, recipe, tokenizer)

    def attach(base: Any, adapter: LoRA) -> nn.Module:
        return adapters.attach(base, adapter, tokenizer, grown, given)

    with explained("adapter", f"PEFT cannot adapt a {type(model).__name__}", "change its targets"):
        adapted = as_trained(model, recipe, tokenizer, grown, given)
        trained, left_out = adapted, None
        # A stage has no path from tokens to logits, and a part of a row none without the others.
        if plan.mesh.pipeline * plan.mesh.sequence == 1:
            trained, left_out = without_unreached(adapted, recipe, attach)
    engine.notes += [left_out] if left_out is not None else []
    if given is not None:
        continued.load_adapter(trained, recipe)
    elif recipe.adapter is not None and recipe.adapter.init_lora_weights in (True, "gaussian"):
        adapters.draw_adapter(trained, recipe.adapter, seed)
    if plan.traits.masters:
        adapters.narrow(trained, compute_dtype(plan))
    else:
        hold_in_fp32(trained)
    install_kernels(model, plan)
    return trained


def _refuse_unfit(model: PreTrainedModel, recipe: Recipe) -> None:
    """Refuse a model that transformers loads as a causal language model, and that is another kind.

    Raises:
        FinetuneError: with the reason.
    """
    problem = cross_attention(model)
    if problem is not None:
        kind = model.config.model_type
        raise FinetuneError(f"model: '{kind}' cannot be trained here: {problem}; {DECODER_ONLY}")
    if adapters.reads_base(recipe.adapter) and (names := not_finite(model)):
        raise FinetuneError(blame(names, recipe.model.name or "model.config"))


def as_trained(
    model: PreTrainedModel,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase | None = None,
    grown: range = range(0),
    given: LoraConfig | None = None,
) -> nn.Module:
    """The base as the recipe trains it: checkpointed, and frozen beside an adapter.

    Args:
        tokenizer: where tokens are named whose rows are trained.
        grown: rows that the model's tables did not have when it was loaded.
        given: PEFT's configuration of an adapter that is trained further.

    Raises:
        FinetuneError: the adapter does not fit the model.
    """
    model.config.use_cache = False
    if recipe.model.activation_checkpointing:
        recompute(model, recipe.model.activation_checkpointing)
    if recipe.adapter is None:
        return model
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return adapters.attach(model, recipe.adapter, tokenizer, grown, given)


def install_kernels(model: PreTrainedModel, plan: Plan) -> None:
    """Let a base, whose adapter is in it, compute as the plan says."""
    kind = model.config.model_type
    chosen = {each.option: each.value for each in choices(plan.recipe, plan.backend, kind)}
    balance = balance_of(model, plan.recipe.model)
    head = chosen["head"]
    if layers.is_elsewhere(model.get_output_embeddings()):
        head = "labelled"
    give_loss(model, head == "chunked", balance, labelled=head == "labelled")
    if chosen.get("lora") == "grouped":
        group_adapters(model)
    for option, (fuse, _, _) in FUSED.items():
        if chosen[option] == "fused":
            fuse(model)
    compute_as_autocast()
    keep_apart(model)


def kernel_notes(model: nn.Module, plan: Plan) -> list[str]:
    """What a loaded model shows of options that could not be used everywhere."""
    chosen = {each.option: each.value for each in plan.kernels}
    left = left_alone(model) if chosen.get("lora") == "grouped" else {}
    notes = [
        f"kernels.lora: {count} adapted layers are computed separately, because of {reason}"
        for reason, count in left.items()
    ]
    if Chain.compiling and plan.backend.precision == "bf16" and on_cpu():
        notes += [
            "kernels.lora: gradients of adapters by products of PyTorch, not in one pass over "
            f"tiles: {reason}"
            for reason in reasons_against_tiles(model)
        ]
    for option, (_, kind, parts) in FUSED.items():
        alike = [each for each in model.modules() if _is_part(each, option)]
        plain = sorted({type(each).__name__ for each in alike if not isinstance(each, kind)})
        if chosen[option] == "fused" and plain:
            some = any(isinstance(each, kind) for each in alike)
            which = f"fused, but plain in {', '.join(plain)}" if some else "plain"
            told = f"those {parts} are" if some else f"the {parts} of this model are"
            notes.append(f"kernels.{option}: {which}, because {told} not known here")
    if implementation(plan.recipe, model.config) == DOCUMENTS:
        config = model.config.get_text_config()
        notes += attention_notes(config, plan.backend.precision, plan.recipe.batch.max_length)
    return notes


def _is_part(module: nn.Module, option: str) -> bool:
    """Whether a option is made for such a module, by the name that transformers gives to its class.

    A feed-forward layer of experts is one that holds all of them.
    """
    return type(module).__name__.removeprefix("FSDP").endswith(ENDINGS[option])


def recompute(model: PreTrainedModel, how: Literal[True, "attention", "offload"]) -> None:
    """Checkpoint every block: keep its input, on the host with `offload`.

    With `attention` what attention gave is kept besides. Without an accelerator the input lies on
    the host already, and transformers 5.23 would ask for pinned memory that is not there.
    """
    settings: dict[str, Any] = {"use_reentrant": False}
    if how == "attention":
        policy = functools.partial(create_selective_checkpoint_contexts, _attention_is_kept)
        settings["context_fn"] = policy
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs=settings,
        offload=how == "offload" and not on_cpu(),
    )
    model.enable_input_require_grads()


def _attention_is_kept(_: Any, operation: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
    kept = any(part in str(operation) for part in ATTENTION_OPERATIONS)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def compute_dtype(plan: Plan) -> torch.dtype:
    return torch.bfloat16 if plan.backend.precision == "bf16" else torch.float32


def weight_dtype(plan: Plan) -> torch.dtype:
    """Frozen weights are held as they are computed with; trained ones in fp32.

    An engine with fp32 masters of its own holds what it computes with.
    """
    frozen = plan.recipe.adapter is not None
    return compute_dtype(plan) if frozen or plan.traits.masters else torch.float32


def causal(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config that the causal language model of a config will have: of some only the text's."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    text = config.sub_configs.get("text_config")
    alone = text is not None and kind is not None and kind.config_class == text
    return config.get_text_config() if alone else config


def _from_scratch(engine: Engine) -> PreTrainedModel:
    fields = dict(engine.plan.recipe.model.config or {})
    kind = fields.pop("model_type", None)
    if kind is None:
        raise FinetuneError("model.config: `model_type` is missing (llama, qwen3, mistral, ...)")
    try:
        config = AutoConfig.for_model(kind, **fields)
        with engine.whole_weights():
            model = AutoModelForCausalLM.from_config(
                config,
                attn_implementation=engine.attention(
                    causal(config), implementation(engine.plan.recipe, causal(config))
                ),
                dtype=torch.float32,
            )
            save_as_published(model)
        return engine.divide(model)  # type: ignore[return-value]
    except (ValueError, TypeError, ImportError) as error:
        raise FinetuneError(f"model.config: {first_line(error)}{advice(error)}") from None


def _pretrained(engine: Engine) -> PreTrainedModel:
    plan = engine.plan
    model = plan.recipe.model
    fields = _stored_fields(plan)
    stored = prequantised.stored_kind(fields)
    dequantising = stored in prequantised.DEQUANTISED
    packed = stored is not None or model.quantization != "none"
    # A decomposition of the base weights must see them whole, and so must the mean of a table.
    whole = (
        not plan.backend.zero_init
        or adapters.reads_base(plan.recipe.adapter)
        or bool(model.add_tokens)
        or model.adapter is not None
        or dequantising
    )
    loaded: Any = None
    notes: list[str] = []
    try:
        config = AutoConfig.from_pretrained(
            model.name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        unsharded = engine.whole_weights() if whole else contextlib.nullcontext()
        with engine.loading() as words, unsharded:
            loaded = AutoModelForCausalLM.from_pretrained(
                model.name,
                **words,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                revision=model.revision,
                dtype=weight_dtype(plan),
                attn_implementation=engine.attention(
                    causal(config), implementation(plan.recipe, causal(config))
                ),
                trust_remote_code=model.trust_remote_code,
                use_safetensors=None if model.pickle else True,  # a pickle can run code
                weights_only=True,
                **vocabulary.without_lost_pad(config),
                **placed_while_loading(packed, plan.traits.shards_all),
                **loading_arguments(
                    fields,
                    model.quantization,
                    compute_dtype(plan),
                    getattr(torch, plan.quant_storage),
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
        unused, notes = unread(info, loaded)
        problems = unfilled(info) + unused
    if not whole and engine.world > 1:  # under ZeRO-3 shapes are seen by the first rank alone
        problems = engine.from_first(problems)
    if problems:
        raise FinetuneError(
            f"model.name: the weights of '{model.name}' do not fit its config.json: "
            f"{'; '.join(problems)}; fix config.json, or name a folder whose weights are complete"
        )
    engine.notes += notes
    if dequantising:
        forget_stored_form(loaded, weight_dtype(plan))
    compute_in(loaded, compute_dtype(plan))
    return loaded


def _stored_fields(plan: Plan) -> dict[str, Any]:
    """The `config.json` of a recipe's model.

    Raises:
        FinetuneError: it is quantised, or of a type, that cannot be trained as the recipe asks.
    """
    model = plan.recipe.model
    try:
        fields, _ = PreTrainedConfig.get_config_dict(model.name, revision=model.revision)
    except (OSError, ValueError):
        return {}  # loading the model says what is wrong
    name = model.name or ""
    found = list(prequantised.problems(name, fields, model.quantization, plan.backend))
    # A plan knows no config that is on the hub only.
    found += limits.problems(plan.recipe, fields)
    found += division.of_model(plan.backend.axes, fields)
    if found:
        raise FinetuneError(*found)
    return fields


def advice(error: Exception) -> str:
    """What to do where transformers would have to run somebody's code, as the end of a message."""
    if "Unrecognized configuration class" in str(error):
        return f"; {DECODER_ONLY}"
    if "custom code" in str(error):
        return "; that code runs only with model.trust_remote_code=true"
    if "model.safetensors" in str(error):
        return (
            "; weights in a pickle are refused, because one can run code: convert them to "
            "safetensors, or set model.pickle=true where you trust who made them"
        )
    return ""
