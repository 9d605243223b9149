"""Hand over a trained run: a folder that plain transformers and PEFT load, whole or not at all."""

import contextlib
import copy
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from finetune import catalog
from finetune.checkpoints.base_weights import refuse_other_base
from finetune.checkpoints.handover import (
    base_reference,
    follow_umask,
    generation_config,
    saved_config,
    saved_tokenizer,
)
from finetune.checkpoints.pretrained import cast
from finetune.errors import FinetuneError, TrainingFailure
from finetune.inference.generate import stop_ids, turn
from finetune.inference.load import (
    ADAPTER_WEIGHTS,
    RECOMPUTED,
    Step,
    attach,
    base_config,
    base_model,
    changes_base,
    check_adapter,
    initial_adapter,
    load_tokenizer,
    load_weights,
    open_checkpoint,
    plain_lora,
    tensor_shapes,
)
from finetune.recipe import Recipe
from finetune.reports.card import Kind, write_card
from finetune.runs.run import Run, open_run, write_json

MARKER = "export.json"
"""Lists the files of an export, so that only a folder of nothing else is ever replaced."""

TOLERANCE = 1e-4
"""Largest difference between logits before and after a merge in fp32, relative to the largest
logit. Sums in another order gave up to 1.4e-5 over 32 layers; a merge rounded to bf16 gives 1e-3,
and a lost head or adapter more."""


def export(
    run: Run | str | Path,
    to: str | Path,
    merge: bool = False,
    step: Step | None = None,
    dtype: torch.dtype | None = None,
    shard_size: str = "5GB",
) -> Path:
    """Write the adapter, the adapter merged into its base, or the whole model, with its tokenizer.

    `dtype` is that of merged or whole weights; by default that of the base model's own files. A
    merge is computed in fp32 on the unquantised base and rounded once. Raises FinetuneError for a
    damaged checkpoint, an incomplete adapter, or a folder that is not an earlier export; raises
    TrainingFailure when writing fails, and then leaves nothing behind.
    """
    run = run if isinstance(run, Run) else open_run(run)
    to = Path(to)
    to = to if to.name not in ("", "..") else to.resolve()
    _refuse_foreign(to)
    recipe = catalog.load(run.recipe)
    checkpoint = open_checkpoint(run, step)
    adapter, model = checkpoint / "adapter", checkpoint / "model"
    tokenizer = load_tokenizer(checkpoint / "tokenizer")
    generation = _generation(recipe, tokenizer, adapter if adapter.is_dir() else model)
    at = int(checkpoint.name.removeprefix("step-"))
    with _replacing(to) as folder:
        kind: Kind = "adapter"
        if not adapter.is_dir():
            kind = "model"
            whole = load_weights(
                model,
                dtype or _stored_dtype(recipe),
                trust_remote_code=recipe.model.trust_remote_code,
                attention=recipe.model.attention,
                device="cpu",
            )
            _write_model(whole, recipe, generation, folder, shard_size)
        elif merge:
            kind = "merged"
            base = base_model(recipe, torch.float32, quantized=False, device="cpu")
            refuse_other_base(checkpoint, recipe.model)
            merged = _merge(base, adapter, initial_adapter(run), tokenizer)
            cast(merged, dtype or _stored_dtype(recipe))
            _write_model(merged, recipe, generation, folder, shard_size)
        else:
            _write_adapter(recipe, adapter, initial_adapter(run), folder)
            generation.save_pretrained(folder)
        saved_tokenizer(tokenizer, _turn_end(tokenizer)).save_pretrained(folder)
        write_card(run, folder, kind=kind, step=at)
        follow_umask(folder)
        files = sorted(path.name for path in folder.iterdir())
        source = {"run": run.root.resolve().name, "checkpoint": checkpoint.name, "kind": kind}
        write_json(folder / MARKER, {**source, "files": [*files, MARKER]})
    return to


# --- the folder --------------------------------------------------------------------------------


def _refuse_foreign(to: Path) -> None:
    """Nothing but an empty folder or an earlier export, untouched since, may be in the way."""
    if not to.exists() and not to.is_symlink():
        return
    if not to.is_dir() or to.is_symlink():
        raise FinetuneError(f"{to}: exists and is not a folder; name another one")
    there = {path.name for path in to.iterdir()}
    marker = to / MARKER
    ours = _listed(marker)
    if there - ours:
        some = ", ".join(sorted(there - ours)[:3])
        raise FinetuneError(
            f"{to}: holds files that no export wrote ({some}); "
            "name another folder, or move them away"
        )


def _listed(marker: Path) -> set[str]:
    """Names of the files that an export wrote; none where that is not what the marker lists."""
    try:
        return set(map(str, json.loads(marker.read_text(encoding="utf-8"))["files"]))
    except (FileNotFoundError, ValueError, TypeError, LookupError, RecursionError):
        return set()


@contextlib.contextmanager
def _replacing(to: Path) -> Iterator[Path]:
    """A scratch folder beside `to` that becomes `to` when everything in it is on the disk."""
    scratch = to.with_name(f".{to.name}.{os.getpid()}")
    old = to.with_name(f".{to.name}.{os.getpid()}.old")
    try:
        scratch.mkdir(parents=True)
        yield scratch
        for path in [*scratch.iterdir(), scratch]:
            _sync(path)
        if to.exists():
            to.rename(old)
        scratch.rename(to)
    except (OSError, SafetensorError) as error:
        raise TrainingFailure(f"{to}: could not be written: {error}; nothing was left") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if old.exists():
            shutil.rmtree(old) if to.exists() else old.rename(to)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- adapters ----------------------------------------------------------------------------------


def _write_adapter(recipe: Recipe, adapter: Path, initial: Path | None, folder: Path) -> None:
    """The adapter in PEFT format; where its initialisation changed the base, as a plain LoRA."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(
            base_config(recipe), trust_remote_code=recipe.model.trust_remote_code
        )
    config = check_adapter(adapter, skeleton)
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    if changes_base(config):
        before = _initial_tensors(recipe, config, initial)
        tensors = _difference(tensors, before)
        config = _twice_the_rank(config)
    config.base_model_name_or_path, config.revision = base_reference(recipe.model)
    config.task_type = TaskType.CAUSAL_LM
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    written = tensor_shapes(folder / ADAPTER_WEIGHTS)
    if written != {name: list(tensor.shape) for name, tensor in tensors.items()}:
        raise TrainingFailure(f"{folder / ADAPTER_WEIGHTS}: read back other tensors than written")


def _initial_tensors(
    recipe: Recipe, config: LoraConfig, initial: Path | None
) -> dict[str, torch.Tensor]:
    """The adapter before its first step: as it was stored, or computed again from the base."""
    if initial is not None:
        return load_file(initial / ADAPTER_WEIGHTS)
    if str(config.init_lora_weights).lower() not in RECOMPUTED:
        raise FinetuneError(
            f"adapter.init_lora_weights: '{config.init_lora_weights}' cannot be computed "
            "again, and the run did not store it"
        )
    fresh = copy.deepcopy(config)
    model = get_peft_model(base_model(recipe, torch.float32, device="cpu"), fresh)
    return get_peft_model_state_dict(model, save_embedding_layers=False)


def _difference(
    tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """B A - B0 A0 as one product [B, -B0] [A; A0], which leaves the base as it was.

    W = (W - s B0 A0) + s B A  is trained;  W + s (B A - B0 A0)  is the same sum.
    """
    result = dict(tensors)
    for name in tensors:
        if name.endswith("lora_A.weight"):
            result[name] = torch.cat([tensors[name], before[name].to(tensors[name])], dim=0)
        elif name.endswith("lora_B.weight"):
            result[name] = torch.cat([tensors[name], -before[name].to(tensors[name])], dim=1)
    return result


def _twice_the_rank(config: LoraConfig) -> LoraConfig:
    """The configuration of a difference: twice every rank at the same scale."""
    growth: Any = math.sqrt(2) if config.use_rslora else 2  # PEFT's hint for alpha is int
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    twice = plain_lora(config)
    twice.r = 2 * config.r
    twice.lora_alpha = growth * config.lora_alpha
    twice.rank_pattern = {key: 2 * r for key, r in ranks.items()}
    twice.alpha_pattern = {key: growth * alpha for key, alpha in alphas.items()}
    return twice


# --- whole models ------------------------------------------------------------------------------


def _merge(
    base: PreTrainedModel, adapter: Path, initial: Path | None, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Base and adapter as one model in fp32, whose logits were compared with the adapter's."""
    model = attach(base, adapter, initial)
    ids = torch.tensor([tokenizer("Write one line about the sea.")["input_ids"]])  # (1, tokens)
    before = _logits(model, ids)
    _untie(model)
    tuner: Any = model.base_model  # PEFT's wrapper has no type for what it forwards
    merged = tuner.merge_and_unload(safe_merge=True)
    after = _logits(merged, ids)
    difference = ((after - before).abs().max() / before.abs().max()).item()
    if not difference <= TOLERANCE:
        raise TrainingFailure(
            f"{adapter}: the merged model's logits differ from the adapter's by "
            f"{difference:.1e} of the largest (at most {TOLERANCE:.0e} is rounding); export "
            "without merging"
        )
    return merged


@torch.inference_mode()
def _logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits  # (1, tokens, vocabulary)


def _untie(model: PeftModel) -> None:
    """Give an adapted embedding or head its own weight, so that a merge changes only that one.

    PEFT (0.21) adds the product to the weight that both share; afterwards it sees by itself that
    they differ, and says so in the model's config.
    """
    base: Any = model.get_base_model()
    if not base.config.tie_word_embeddings:
        return
    for layer in (base.get_output_embeddings(), base.get_input_embeddings()):
        if isinstance(layer, LoraLayer):
            inner = layer.get_base_layer()
            inner.weight = torch.nn.Parameter(inner.weight.detach().clone(), requires_grad=False)


def _write_model(
    model: PreTrainedModel,
    recipe: Recipe,
    generation: GenerationConfig,
    folder: Path,
    shard_size: str,
) -> None:
    model.generation_config = generation
    model.config = saved_config(model, model.config.dtype)
    model.save_pretrained(folder, max_shard_size=shard_size)
    _refuse_lost(folder, recipe)


def _refuse_lost(folder: Path, recipe: Recipe) -> None:
    """Read the files back: they give every tensor of the model its shape, and none is empty."""
    load_weights(
        folder,
        trust_remote_code=recipe.model.trust_remote_code,
        attention=recipe.model.attention,
        device="meta",
    )
    for path in folder.glob("model*.safetensors"):
        empty = [name for name, shape in tensor_shapes(path).items() if 0 in shape]
        if empty:
            raise TrainingFailure(*(f"{path}: {name} is empty" for name in empty))


def _stored_dtype(recipe: Recipe) -> torch.dtype:
    """Of the base model's files; fp32 for a model from scratch that names none."""
    dtype = base_config(recipe).dtype
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32


def _generation(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, saved: Path
) -> GenerationConfig:
    """The settings that the checkpoint was saved with, else the base's with the stop tokens."""
    own = GenerationConfig.from_model_config(base_config(recipe))
    if (saved / "generation_config.json").is_file():
        own = GenerationConfig.from_pretrained(saved)
    elif recipe.model.name is not None:
        with contextlib.suppress(OSError):  # it ships none
            own = GenerationConfig.from_pretrained(
                recipe.model.name, revision=recipe.model.revision or "main"
            )
    return generation_config(own, stop_ids(own, tokenizer), tokenizer.pad_token_id)


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    return turn(tokenizer).end if tokenizer.chat_template is not None else None
