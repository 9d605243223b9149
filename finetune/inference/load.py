"""Verify and load models from checkpoints.

A checkpoint is checked against its manifest before it is used, and an adapter against its base:
neither PEFT nor transformers reports missing weights as an error.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils.other import transpose
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from finetune.checkpoints.base_weights import refuse_codes
from finetune.checkpoints.pretrained import forget_stored_form
from finetune.data.images.processor import has_processor
from finetune.errors import FinetuneError, reading, refuse
from finetune.models.load_checks import unfilled, unread, within_memory
from finetune.models.quantization import compute_in, keep_unpacked, loading_arguments
from finetune.models.scoring import auto_class, draw_head, without_new_head
from finetune.models.starting_adapter import CHANGES_BASE
from finetune.models.threads import settle_threads
from finetune.models.vocabulary import check_words, grow, rows_of_adapter, without_lost_pad
from finetune.planner.shapes.prequantised import DEQUANTISED, stored_kind
from finetune.process.progress import progress
from finetune.recipe import LANGUAGE, Head, Recipe
from finetune.runs.manifest import differing, read_manifest
from finetune.runs.run import Run, of_record

Step = int | Literal["best", "last"]

ADAPTER_WEIGHTS = "adapter_model.safetensors"

RECOMPUTED = ("pissa", "olora")
"""Initializations that change the base weights and can be recomputed from the base."""


# --- checkpoints -------------------------------------------------------------------------------


def find_checkpoint(run: Run, step: Step | None = None) -> Path:
    """Folder of a complete checkpoint: of a step, the best, the last, or (None) the best if any.

    Raises:
        FinetuneError: the checkpoint does not exist; for an unknown step, the message lists all.
    """
    steps = run.steps()
    if not steps:
        raise FinetuneError(f"{run.checkpoints}: no complete checkpoint; train the run first")
    best = run.best_step()
    if step == "best" and best is None:
        raise FinetuneError(f"{run.best}: no best checkpoint was kept; use the last one")
    if step is None or step == "best":
        return run.checkpoint(steps[-1] if best is None else best)
    if step == "last":
        return run.checkpoint(steps[-1])
    if step not in steps:
        there = ", ".join(map(str, steps))
        raise FinetuneError(f"{run.checkpoints}: no complete checkpoint of step {step}; {there}")
    return run.checkpoint(step)


def damage(checkpoint: Path, folders: Sequence[str]) -> list[str]:
    """Differences between these folders of a checkpoint and its manifest, one line per file."""
    try:
        files = read_manifest(checkpoint)["files"]
    except FinetuneError as error:
        return list(error.problems)
    inside = {name: known for name, known in files.items() if name.split("/")[0] in folders}
    return differing(checkpoint, inside)


def open_checkpoint(run: Run, step: Step | None = None) -> Path:
    """A checkpoint whose weights and tokenizer match its manifest.

    Raises:
        FinetuneError: files are damaged; the message has each file and the next older intact
            checkpoint.
    """
    checkpoint = find_checkpoint(run, step)
    weights = "adapter" if (checkpoint / "adapter").is_dir() else "model"
    folders = (weights, "tokenizer")
    problems = damage(checkpoint, folders)
    absent = [
        f"{checkpoint / name}: missing" for name in folders if not (checkpoint / name).is_dir()
    ]
    if not problems and not absent:
        return checkpoint
    at = int(checkpoint.name.removeprefix("step-"))
    older = (s for s in reversed(run.steps()) if s < at and not damage(run.checkpoint(s), folders))
    instead = next(older, None)
    advice = "no older intact checkpoint" if instead is None else f"use step {instead} instead"
    raise FinetuneError(*(f"{problem}; {advice}" for problem in problems + absent))


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    with reading(f"{name}: no tokenizer could be loaded"):
        return check_words(AutoTokenizer.from_pretrained(str(name)))


def media_of(name: str | Path, files: Path | None = None, revision: str | None = None) -> Any:
    """What a model reads beside text: images, if its config has a tower and it has a processor.

    Args:
        name: A folder or hub name.
        files: Folder with the files of its processor, if it is another one.
        revision: That of a hub name.
    """
    with reading(_unloadable(name)):
        fields, _ = PreTrainedConfig.get_config_dict(str(name), revision=revision or "main")
    sees = fields.get("model_type") in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return ("image",) if sees and has_processor(str(files or name), revision) else ()


def base_config(recipe: Recipe) -> PreTrainedConfig:
    """The model configuration of a recipe, from its model's name or from its `config`."""
    model, head = recipe.model, recipe.head
    if model.name is None:
        fields = dict(model.config or {})
        if "model_type" not in fields:
            raise FinetuneError("model: needs a `name`, or a `config` with its model_type")
        return AutoConfig.for_model(**fields, **head.config)
    with reading(_unloadable(model.name)):
        return _config(model.name, model.revision, model.trust_remote_code, head)


def _config(
    name: str | Path, revision: str | None, trust_remote_code: bool, head: Head
) -> PreTrainedConfig:
    """A configuration whose pad token is removed if the embedding has no row for it."""
    config = AutoConfig.from_pretrained(
        str(name), revision=revision or "main", trust_remote_code=trust_remote_code
    )
    config.update(without_lost_pad(config))
    config.update(head.config)
    return config


def base_model(
    recipe: Recipe,
    dtype: torch.dtype | None = None,
    quantized: bool = True,
    device: str | None = None,
) -> PreTrainedModel:
    """The base model of training.

    With `quantized=False` weights are loaded without quantization, regardless of the recipe. A
    model from scratch is initialized from its seed.
    """
    model = recipe.model
    if model.name is None:
        torch.manual_seed(recipe.seed)
        config = base_config(recipe)
        built = auto_class(recipe.head, model.reads).from_config(
            config, dtype=dtype or torch.float32
        )
        draw_head(built, recipe.head, recipe.seed)
        return built.eval()
    loaded = load_weights(
        model.name,
        dtype,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        pickle=model.pickle,
        attention=model.attention,
        quantization=model.quantization if quantized else "none",
        device=device,
        head=recipe.head,
        seed=recipe.seed,
        reads=model.reads,
    )
    return loaded if quantized else _unquantised(loaded)


def _unquantised(model: PreTrainedModel) -> PreTrainedModel:
    """The dequantized model, if its files are quantized by bitsandbytes."""
    if getattr(model, "hf_quantizer", None) is None:
        return model
    quantised: Any = model
    dtype = model.dtype
    plain = quantised.dequantize(dtype)
    forget_stored_form(plain, dtype)
    return plain.eval()


def load_weights(
    name: str | Path,
    dtype: torch.dtype | None = None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    pickle: bool = False,
    attention: str | None = None,
    quantization: str = "none",
    device: str | None = None,
    head: Head = LANGUAGE,
    seed: int | None = None,
    reads: tuple[str, ...] = (),
) -> PreTrainedModel:
    """A causal language model for inference; by default in bf16 on GPUs and fp32 on CPUs.

    A score `head` is initialized from `seed` if the files have none. With `reads`, or if it has no
    class for text alone, the model is loaded with its vision tower.

    `attention` is the recipe's setting. If it is None, or needs a GPU that is not used,
    transformers chooses the implementation: SDPA, or eager for a model without SDPA.
    """
    device = device or ("auto" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.bfloat16 if device == "auto" else torch.float32)
    with progress(f"loading {name}"), within_memory(str(name)), reading(_unloadable(name)):
        fields, _ = PreTrainedConfig.get_config_dict(str(name), revision=revision or "main")
        config = _config(name, revision, trust_remote_code, head)
        loaded: Any = auto_class(head, reads, config).from_pretrained(
            str(name),
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            dtype=dtype,
            revision=revision or "main",
            trust_remote_code=trust_remote_code,
            use_safetensors=None if pickle else True,
            weights_only=True,
            attn_implementation=_attention(attention, device),
            **loading_arguments(fields, quantization, dtype),
            device_map=device if device == "auto" else {"": device},
        )
    model, info = loaded
    if seed is not None:
        info, is_new = without_new_head(info)
        if is_new:
            draw_head(model, head, seed)
    unused, _ = unread(info, model)
    refuse_codes("model.name", str(name), revision)
    problems = unfilled(info) + unused
    refuse(f"{name}: {problem}" for problem in problems)
    if stored_kind(fields) in DEQUANTISED and device != "meta":
        forget_stored_form(model, dtype)
    compute_in(model, dtype)
    keep_unpacked(model)
    settle_threads(model)
    return model.eval()


def _attention(asked: str | None, device: str) -> str | None:
    """The attention implementation to request; None leaves the choice to transformers.

    `sdpa` is not requested: it is the default of recipes, also for models without support for it.
    """
    on_gpu = device not in ("cpu", "meta")
    return asked if asked == "eager" or (asked != "sdpa" and on_gpu) else None


def _unloadable(name: str | Path) -> str:
    return f"model.name: '{name}' could not be loaded"


def trained_dtype(run: Run) -> torch.dtype | None:
    """Compute dtype of a run, from which its base was quantized; None before the run started."""
    if not run.realised.is_file():
        return None
    with of_record(run.realised):
        precision = json.loads(run.realised.read_text())["mixed_precision"]
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def initial_adapter(run: Run) -> Path | None:
    return run.initial_adapter if run.initial_adapter.is_dir() else None


def changes_base(config: PeftConfig) -> bool:
    """Whether the adapter's initialization subtracts its product from the base weights."""
    name = str(config.init_lora_weights).lower() if isinstance(config, LoraConfig) else ""
    return name.startswith(CHANGES_BASE)


def attach(model: PreTrainedModel, adapter: Path, initial: Path | None = None) -> PeftModel:
    """Attach an adapter to its base, with the change that the adapter's initialization made to it.

    With `initial` (the adapter before its first step), the base is changed exactly as when training
    began; otherwise PEFT recomputes the initialization, if that is possible.

    Raises:
        FinetuneError: adapter tensors are missing or empty, or the initialization cannot be
            recomputed.
    """
    config = check_adapter(adapter, model)
    recompute = not changes_base(config)
    if isinstance(config, LoraConfig) and str(config.init_lora_weights).lower() in RECOMPUTED:
        recompute = initial is None or "quantization_config" in model.config.to_dict()
    if not recompute and initial is None:
        raise needs_initial(adapter, config)
    if not recompute:
        config = plain_lora(config)
    with reading(f"{adapter}: PEFT cannot load it"):
        peft_model = PeftModel.from_pretrained(model, str(adapter), config=config)
    if not recompute and initial is not None:
        tensors = load_file(initial / ADAPTER_WEIGHTS)
        for name, layer in peft_model.named_modules():
            if isinstance(layer, LoraLayer):
                subtract_initial(layer, name, tensors)
    return peft_model.eval()


def needs_initial(adapter: Path, config: Any) -> FinetuneError:
    """The error for an initialization that changed the base and cannot be recomputed."""
    return FinetuneError(
        f"{adapter}: the initialization '{config.init_lora_weights}' changed the base weights "
        f"and cannot be recomputed; the run lacks initial_adapter/"
    )


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Shapes of all tensors in a safetensors file."""
    with reading(f"{path}: cannot be read"), safe_open(path, "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def check_adapter(adapter: Path, base: PreTrainedModel) -> PeftConfig:
    """Check the tensors of an adapter against its configuration; returns the configuration.

    PEFT (0.21) loads an adapter without tensors, which then has no effect. Resizes the vocabulary
    of `base` for an adapter that was trained with added tokens.

    Raises:
        FinetuneError: tensors are missing, empty, or have other shapes than the base needs.
    """
    config = adapter_config(adapter)
    stored = tensor_shapes(adapter / ADAPTER_WEIGHTS)
    grow(base, rows_of_adapter(base, config, stored))
    does_not_fit = f"{adapter}: PEFT cannot attach it to its base"
    with reading(does_not_fit), torch.device("meta"):  # names and shapes without values
        twin = type(base)(copy.deepcopy(base.config))
    # Other tuners compute with what they draw.
    place = torch.device("meta" if isinstance(config, LoraConfig) else "cpu")
    with reading(does_not_fit), place:
        twin = get_peft_model(twin, plain_lora(config))
    wanted = get_peft_model_state_dict(twin, save_embedding_layers=False)
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    for name, shape in stored.items():
        if 0 in shape:
            problems.append(f"{name} is empty")
        elif name in wanted and shape != list(wanted[name].shape):
            problems.append(f"{name} is {shape}, but the base needs {list(wanted[name].shape)}")
    if not wanted:
        problems.append("its configuration matches no module of the base")
    refuse(f"{adapter}: {problem}" for problem in problems)
    return config


def adapter_config(adapter: Path) -> PeftConfig:
    if not (adapter / ADAPTER_WEIGHTS).is_file():
        pickled = (adapter / "adapter_model.bin").is_file()
        instead = "; adapter_model.bin is a pickle, which is not loaded: save it as safetensors"
        raise FinetuneError(f"{adapter}: has no {ADAPTER_WEIGHTS}{instead if pickled else ''}")
    with reading(f"{adapter / 'adapter_config.json'}: cannot be read"):
        return PeftConfig.from_pretrained(str(adapter))


def plain_lora(config: PeftConfig) -> PeftConfig:
    """A copy of the configuration with an initialization that does not depend on the base."""
    plain = copy.deepcopy(config)
    if isinstance(plain, LoraConfig):
        plain.init_lora_weights = True
    return plain


def subtract_initial(layer: LoraLayer, name: str, initial: dict[str, torch.Tensor]) -> None:
    """W <- W - scale B0 A0 for a layer with an adapter, in fp32, rounded once as in PEFT.

    Args:
        layer: LoRA layer, whose base weight is changed in place.
        name: Name of the layer in `initial`.
        initial: Tensors of the adapter before its first step.
    """
    if f"{name}.lora_A.weight" not in initial:
        return
    base: Any = layer.get_base_layer()
    weight = base.weight
    down = initial[f"{name}.lora_A.weight"].to(weight.device, torch.float32)  # (r, in)
    up = initial[f"{name}.lora_B.weight"].to(weight.device, torch.float32)  # (out, r)
    lost = transpose(layer.scaling["default"] * up @ down, isinstance(base, Conv1D))
    weight.data = (weight.data.float() - lost).to(weight.dtype)
