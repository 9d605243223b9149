"""Build the network of a recipe: load or create it, quantize it, attach its adapter and kernels."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from peft import LoraConfig
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from finetune.data.chat.render import Chat, load_chat
from finetune.data.images.processor import load_processor
from finetune.distributed import layers
from finetune.distributed.base import Engine
from finetune.distributed.device import on_cpu
from finetune.errors import FinetuneError, problems_of, reading, refuse
from finetune.kernels.activation import FusedGate, fuse_activations
from finetune.kernels.balance import balance_of
from finetune.kernels.expert_products import compute_as_autocast
from finetune.kernels.head import LabelledHead, give_loss
from finetune.kernels.lora import group_adapters, left_alone, reasons_against_tiles
from finetune.kernels.norm import FusedNorm, fuse_norms
from finetune.kernels.pointwise import Chain
from finetune.kernels.rotary import FusedRotation, fuse_rotations
from finetune.kernels.score_head import give_scores
from finetune.kernels.token_loss import TokenLoss
from finetune.models import adapters, image_parts, resume_adapter, teacher, vocabulary
from finetune.models.compiled_blocks import compile_blocks
from finetune.models.embedding_noise import add_noise
from finetune.models.gradients import without_unreached
from finetune.models.network import compute_dtype, from_scratch, pretrained, weight_dtype
from finetune.models.packed_attention import (
    DOCUMENTS,
    attention_notes,
    implementation,
    refuse_other_layout,
    use_flash_3,
)
from finetune.models.padded_masks import mask_without_reading
from finetune.models.quantization import keep_unpacked
from finetune.models.recurrence import separate_documents
from finetune.models.soundness import (
    DECODER_ONLY,
    blame,
    cross_attention,
    explained,
    hold_in_fp32,
    not_finite,
)
from finetune.models.starting_adapter import tokenizer_of
from finetune.models.threads import settle_threads
from finetune.models.trainable import freeze_others
from finetune.planner import Plan
from finetune.planner.kernels import PARTS, choices
from finetune.planner.request import Request
from finetune.planner.rules import LAYOUT
from finetune.recipe import LoRA, Model, Recipe

FUSED: dict[str, tuple[Callable[[nn.Module], None], type, str]] = {
    "norm": (fuse_norms, FusedNorm, PARTS["norm"]),
    "activation": (fuse_activations, FusedGate, PARTS["activation"]),
    "rotary": (fuse_rotations, FusedRotation, PARTS["rotary"]),
}
"""By kernel option: the function that fuses a model's modules, their class then, and their name."""
ENDINGS = {"norm": ("Norm",), "activation": ("MLP", "Experts"), "rotary": ("Attention",)}
"""By kernel option: endings of the class names that transformers gives to the modules."""

ATTENTION_OPERATIONS = ("_scaled_dot_product_", "flash_attn", "varlen_attn", "document_attention")
"""Parts of the names of operators that compute attention: torch's, and the one defined here."""


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a recipe, and add the recipe's tokens.

    Raises:
        FinetuneError: no tokenizer can be loaded.
    """
    model = recipe.model
    own = tokenizer_of(model.adapter) if model.adapter and not model.tokenizer else None
    name = model.tokenizer or own or model.name
    field = "model.tokenizer" if model.tokenizer else "model.adapter" if own else "model.name"
    instead = "name a folder with tokenizer.json, or set model.tokenizer"
    with reading(f"{field}: no tokenizer can be loaded from '{name}'", instead):
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            revision=None if own else model.revision,
            trust_remote_code=model.trust_remote_code,
        )
        vocabulary.check_words(tokenizer)
    vocabulary.add_tokens(tokenizer, model.add_tokens)
    vocabulary.set_special_tokens(tokenizer, model.special_tokens)
    return tokenizer


def load_chat_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None = None) -> Chat:
    """The chat of a recipe: its tokenizer, its template and, if it reads images, their processor.

    Raises:
        FinetuneError: one of them cannot be loaded.
    """
    tokenizer, model = tokenizer or load_tokenizer(recipe), recipe.model
    images = load_processor(model, tokenizer)
    return load_chat(tokenizer, model.chat_template, model.chat_template_kwargs, images)


def filler(recipe: Recipe) -> dict[str, torch.Tensor] | None:
    """The tensors of a small image for a recipe's model; None if it reads text only."""
    processor = load_processor(recipe.model, load_tokenizer(recipe)) if recipe.model.reads else None
    return None if processor is None else processor.filler[1]


def build(engine: Engine, seed: int) -> nn.Module:
    """Build the model with its adapter on this rank, before the engine shards it.

    Every rank and every engine draws the same initial weights: weights from scratch with one
    generator, those of an adapter with a separate generator for each parameter name.

    Raises:
        FinetuneError: the model cannot be loaded, or the adapter does not fit it.
    """
    plan = engine.plan
    recipe = plan.recipe
    torch.manual_seed(seed)
    field = "model.name" if recipe.model.config is None else "model.config"
    with explained(field, "transformers cannot create a model from it", DECODER_ONLY):
        model = (
            from_scratch(engine)
            if recipe.model.config is not None
            else pretrained(engine, recipe, weight_dtype(plan))
        )
    asked = Request(recipe, plan.backend, plan.processes, model.config.to_dict())
    refuse(problems_of(LAYOUT, asked))
    keep_unpacked(model)
    _refuse_unfit(model, recipe)
    recipe = image_parts.within_parts(model, recipe)
    if recipe.head.scored and model.config.get_text_config().pad_token_id is None:
        # Required for several rows; `scoring.set_pad_token` chooses the one that is saved.
        model.config.get_text_config().pad_token_id = 0
    given = None if recipe.model.adapter is None else resume_adapter.prepare_base(model, recipe)
    by_rows = recipe.adapter is not None and recipe.adapter.trainable_token_indices
    tokenizer = load_tokenizer(recipe) if recipe.model.add_tokens or by_rows else None
    grown = range(0) if tokenizer is None else vocabulary.add_rows(model, recipe, tokenizer)

    def attach(base: Any, adapter: LoRA) -> nn.Module:
        return adapters.attach(base, adapter, tokenizer, grown, given, seed)

    with explained("adapter", f"PEFT cannot adapt a {type(model).__name__}", "change its targets"):
        adapted = as_trained(model, recipe, tokenizer, grown, given)
        trained, left_out = adapted, None
        # A pipeline stage, or a part of a row, has no complete path from tokens to logits.
        if plan.mesh.pipeline * plan.mesh.sequence == 1:
            trained, left_out = without_unreached(adapted, recipe, attach, filler(recipe))
    engine.notes += [left_out] if left_out is not None else []
    if given is not None:
        resume_adapter.load_adapter(trained, recipe)
    elif recipe.adapter is not None and recipe.adapter.drawn:
        adapters.draw_adapter(trained, recipe.adapter, seed)
    if plan.traits.masters:
        adapters.narrow(trained, compute_dtype(plan))
    elif not plan.widens_shards:
        hold_in_fp32(trained)
    install_kernels(model, plan)
    if recipe.teaches:
        teacher.give(engine, model, lambda each: install_fused(each, plan))
    settle_threads(trained)
    return trained


def frozen(engine: Engine, chosen: Model) -> PreTrainedModel:
    """Load a frozen model next to the trained one, in eval mode: unsharded, or divided like it.

    It computes losses like the trained model, in the same precision and with the same kernels.

    Args:
        engine: Engine whose plan is used.
        chosen: Model to load.

    Raises:
        FinetuneError: it cannot be loaded, or its architecture does not support the row layout.
    """
    plan = engine.plan
    chosen = dataclasses.replace(chosen, reads=plan.recipe.model.reads)
    recipe = dataclasses.replace(plan.recipe, model=chosen, adapter=None)
    try:
        with engine.without_partitioning():
            model = pretrained(engine, recipe, weight_dtype(plan))
    except FinetuneError as error:
        problems = (each.replace("model.name", "reference") for each in error.problems)
        raise FinetuneError(*problems) from None
    refuse_other_layout("reference", recipe, model.config, plan.padding.free)
    keep_unpacked(model)
    model.config.use_cache = False
    install_kernels(model, plan)
    model.requires_grad_(False).eval()
    return model if chosen.quantization != "none" else model.to(engine.device)  # type: ignore[arg-type]


def _refuse_unfit(model: PreTrainedModel, recipe: Recipe) -> None:
    """Refuse a model that is not a decoder-only language model, or has unusable weights.

    Weights are checked if the initial values of the adapter are computed from them.

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
    """Prepare a base for training: enable checkpointing; freeze it and attach the adapter, if any.

    Args:
        model: Base model.
        recipe: Recipe of the run.
        tokenizer: Needed if the recipe names tokens whose rows are trained.
        grown: Table rows that were added after the model was loaded.
        given: PEFT's configuration of an adapter that is trained further.

    Raises:
        FinetuneError: the adapter does not fit the model.
    """
    model.config.use_cache = False
    if recipe.model.reads:
        image_parts.ask_text_alone(model)
    if recipe.model.activation_checkpointing:
        recompute(model, recipe.model.activation_checkpointing, not recipe.model.trainable)
    if recipe.adapter is None:
        if recipe.model.trainable:
            freeze_others(model, recipe)
        image_parts.freeze_parts(model, recipe)
        return model
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return adapters.attach(model, recipe.adapter, tokenizer, grown, given, recipe.seed)


def install_kernels(model: PreTrainedModel, plan: Plan) -> None:
    """Install the plan's kernels in a base that already has its adapter."""
    kind, table = model.config.model_type, model.get_input_embeddings()
    chosen = {each.option: each.value for each in choices(plan.recipe, plan.backend, kind)}
    head = chosen["head"]
    if head == "scores":
        give_scores(model)
    else:
        balance = balance_of(model, plan.recipe.model)
        if layers.is_elsewhere(model.get_output_embeddings()):
            head = "labelled"
        temperature = plan.recipe.loss_temperature
        rule = None if plan.recipe.token_loss is None else TokenLoss(*plan.recipe.token_loss)
        give_loss(model, head == "chunked", balance, temperature, head == "labelled", rule)
        _give_loss_to_base_head(model)
    if chosen.get("lora") == "grouped":
        group_adapters(model)
    install_fused(model, plan)
    if plan.recipe.model.neftune_alpha is not None and not layers.is_elsewhere(table):
        add_noise(table)
    if "blocks" in chosen:
        compile_blocks(model)


def _give_loss_to_base_head(model: PreTrainedModel) -> None:
    """Make the base's head compute what its trained copy does, for when the adapter is disabled."""
    both = model.get_output_embeddings()
    if not isinstance(both, ModulesToSaveWrapper):
        return
    trained, base = both.modules_to_save[both.active_adapters[0]], both.original_module
    if type(trained) is LabelledHead:
        base.__class__ = LabelledHead
        base.scale, base.cap = trained.scale, trained.cap


def install_fused(model: PreTrainedModel, plan: Plan) -> None:
    """Install the plan's kernels for norms, activations and rotations in a model."""
    chosen = choices(plan.recipe, plan.backend, model.config.model_type)
    values = {each.option: each.value for each in chosen}
    for option, (fuse, _, _) in FUSED.items():
        if values[option] == "fused":
            fuse(model)
    compute_as_autocast()
    if plan.recipe.model.reads:
        image_parts.leave_documents_out(model)
    mask_without_reading(model)
    separate_documents(model)


def kernel_notes(model: nn.Module, plan: Plan) -> list[str]:
    """Notes on kernel options that could not be used in all modules of a loaded model."""
    chosen = {each.option: each.value for each in plan.kernels}
    left = left_alone(model) if chosen.get("lora") == "grouped" else {}
    notes = [
        f"kernels.lora: {count} adapted layers are computed separately: {reason}"
        for reason, count in left.items()
    ]
    if Chain.compiling and plan.backend.precision == "bf16" and on_cpu():
        notes += [
            "kernels.lora: adapter gradients use PyTorch's matrix products, not one pass over "
            f"tiles: {reason}"
            for reason in reasons_against_tiles(model)
        ]
    for option, (_, kind, parts) in FUSED.items():
        alike = [each for each in model.modules() if _is_part(each, option)]
        plain = sorted({type(each).__name__ for each in alike if not isinstance(each, kind)})
        if chosen[option] == "fused" and plain:
            some = any(isinstance(each, kind) for each in alike)
            which = f"fused, but plain in {', '.join(plain)}" if some else "plain"
            subject = f"those {parts} are" if some else f"the {parts} of this model are"
            notes.append(f"kernels.{option}: {which}, because {subject} not supported")
    place = torch.device("cpu" if on_cpu() else "cuda")
    newest = use_flash_3(place, bool(getattr(model.config, "attention_dropout", 0)))
    notes += [] if newest is None else [newest]
    if implementation(plan.recipe, model.config) == DOCUMENTS:
        config = model.config.get_text_config()
        notes += attention_notes(config, plan.backend.precision, plan.recipe.batch.max_length)
    return notes


def _is_part(module: nn.Module, option: str) -> bool:
    """Whether a kernel option applies to a module, judged by its class name.

    A module that contains all experts of a layer counts as one feed-forward layer.
    """
    return type(module).__name__.removeprefix("FSDP").endswith(ENDINGS[option])


def recompute(
    model: PreTrainedModel, how: Literal[True, "attention", "offload"], first: bool = True
) -> None:
    """Enable activation checkpointing of every block: save its input, with `offload` on the host.

    With `attention`, outputs of attention are saved too. Without an accelerator the input already
    is on the host, and transformers 5.23 would request pinned memory, which is not available.
    Unless the `first` block recomputes too, the backward pass ends at the first trained weight.
    """
    settings: dict[str, Any] = {"use_reentrant": False}
    if how == "attention":
        policy = functools.partial(create_selective_checkpoint_contexts, _attention_is_kept)
        settings["context_fn"] = policy
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs=settings,
        offload=how == "offload" and not on_cpu(),
    )
    if first:
        model.enable_input_require_grads()


def _attention_is_kept(_: Any, operation: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
    kept = any(part in str(operation) for part in ATTENTION_OPERATIONS)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
