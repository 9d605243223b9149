"""Attach an adapter to a base: PEFT's configuration, the modules it names, its initial values."""

import copy
import dataclasses
import re
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.config import PromptLearningConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora import LoraLayer
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.transformers_weight_conversion import (
    convert_peft_adapter_state_dict_for_transformers,
)
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from finetune.distributed import layers
from finetune.distributed.parameters import assign, partitioned
from finetune.errors import FinetuneError, did_you_mean, first_line, refuse
from finetune.models import targets, vocabulary
from finetune.recipe import LoRA


def reads_base(adapter: LoRA | None) -> bool:
    """Whether the adapter's initial values are a decomposition of the base weights."""
    plain = (None, "gaussian", "orthogonal")
    init = adapter.init_lora_weights if adapter is not None else None
    return isinstance(init, str) and init not in plain


def lora_config(adapter: LoRA, scores: bool = False) -> LoraConfig:
    """PEFT's configuration of an adapter; for `scores`, PEFT fully trains the score head too."""
    wanted = adapter.targets if isinstance(adapter.targets, str) else list(adapter.targets)
    excluded = adapter.exclude_modules
    return LoraConfig(
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        r=adapter.r,
        lora_alpha=adapter.scale_alpha,
        lora_dropout=adapter.dropout,
        target_modules=wanted,
        target_parameters=list(adapter.target_parameters) or None,
        modules_to_save=list(adapter.modules_to_save) or None,
        use_dora=adapter.use_dora,
        use_rslora=adapter.use_rslora,
        init_lora_weights=adapter.init_lora_weights,
        exclude_modules=(excluded if isinstance(excluded, str) else list(excluded)) or None,
        layers_to_transform=list(adapter.layers_to_transform) or None,
        rank_pattern=dict(adapter.rank_pattern),
        alpha_pattern=dict(adapter.alpha_pattern),
    )


def tuner_config(adapter: LoRA, scores: bool = False) -> PeftConfig:
    """PEFT's configuration of a tuner other than LoRA.

    Raises:
        FinetuneError: PEFT has no such tuner, or its weights are not those of modules, or change
            in number; or it does not have an argument.
    """
    kinds = {each.value.lower(): each for each in PEFT_TYPE_TO_TUNER_MAPPING}
    kind = kinds.get(adapter.kind)
    if kind is None:
        known = did_you_mean(adapter.kind, kinds) or f"; it has {', '.join(sorted(kinds))}"
        raise FinetuneError(f"adapter.kind: PEFT has no tuner '{adapter.kind}' of modules{known}")
    made, tuner = PEFT_TYPE_TO_CONFIG_MAPPING[kind], PEFT_TYPE_TO_TUNER_MAPPING[kind]
    known = {each.name for each in dataclasses.fields(made)}
    reasons = {
        "adds tokens to each row, for which rows side by side have no place": (
            issubclass(made, PromptLearningConfig)
        ),
        "adds layers, not weights of modules": "target_modules" not in known,
        "changes its weights' number while it trains": hasattr(tuner, "update_and_allocate"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise FinetuneError(f"adapter.kind: {adapter.kind} {reason}; use another tuner")
    wanted = adapter.targets if isinstance(adapter.targets, str) else list(adapter.targets)
    if wanted == targets.ALL and adapter.kind == "ln_tuning":
        wanted = None  # PEFT's own: the norms
    excluded = adapter.exclude_modules
    given: dict[str, Any] = {
        "exclude_modules": (excluded if isinstance(excluded, str) else list(excluded)) or None,
        "layers_to_transform": list(adapter.layers_to_transform) or None,
        "modules_to_save": list(adapter.modules_to_save) or None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    problems = [
        f"adapter.{name}: {adapter.kind} has no such field" for name in given if name not in known
    ]
    problems += [
        f"adapter.arguments: {name}: {adapter.kind} has no such argument{did_you_mean(name, known)}"
        for name in adapter.arguments
        if name not in known
    ]
    refuse(problems)
    given |= {"task_type": "SEQ_CLS" if scores else "CAUSAL_LM", "target_modules": wanted}
    try:
        return made(**given, **adapter.arguments)
    except (TypeError, ValueError) as error:
        raise FinetuneError(f"adapter.arguments: {adapter.kind}: {first_line(error)}") from None


def attach_tuner(model: PreTrainedModel, adapter: LoRA, seed: int) -> PeftModel:
    """Attach a tuner other than LoRA, with the initial values that PEFT draws from the seed.

    Raises:
        FinetuneError: PEFT cannot attach it, or would not save all that it trains.
    """
    config = tuner_config(adapter, isinstance(getattr(model, "score", None), nn.Linear))
    refuse(misnamed(model, adapter))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the same on every rank and engine, which have complete layers
        try:
            adapted = get_peft_model(model, config)
            # As read from its file: PEFT 0.21 cannot read each config that it writes.
            PeftConfig.from_peft_type(**adapted.peft_config["default"].to_dict())
        except (TypeError, ValueError, NotImplementedError) as error:
            raise FinetuneError(f"adapter: {adapter.kind}: {first_line(error)}") from None
    names: dict[int, str] = {}
    for name, parameter in adapted.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and names.setdefault(id(parameter), name) != name:
            raise FinetuneError(
                f"adapter.kind: {adapter.kind} has weights that several layers share ({name}), "
                "which engines that shard layer by layer would divide; use another tuner"
            )
    return adapted


def attach(
    model: PreTrainedModel,
    adapter: LoRA,
    tokenizer: PreTrainedTokenizerBase | None,
    grown: range,
    given: LoraConfig | None,
    seed: int = 0,
) -> PeftModel:
    """Attach an adapter, and the trained rows of its tables, to a frozen base.

    Names of a `given` configuration are passed to PEFT unchanged.
    """
    if adapter.kind != "lora":
        return attach_tuner(model, adapter, seed)
    whole = layers.complete(model)
    config = given or lora_config(adapter, isinstance(getattr(model, "score", None), nn.Linear))
    if tokenizer is not None and given is None:
        config.trainable_token_indices = vocabulary.token_indices(model, adapter, tokenizer, grown)
        tied = model.config.tie_word_embeddings and bool(adapter.modules_to_save)
        config.ensure_weight_tying = bool(grown) and tied
    try:
        refuse(misnamed(whole, adapter))
        chosen = given or targets.resolve_names(whole, config, adapter)
        with warnings.catch_warnings():
            # PEFT 0.21 matches patterns with the names of modules only, not of parameters.
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not")
            adapted = get_peft_model(whole, chosen, low_cpu_mem_usage=whole is not model)
    except ValueError as error:
        raise FinetuneError(
            f"adapter.targets: {first_line(error)}{_linear_modules(whole)}"
        ) from None
    if lost := lost_when_loaded(adapted):
        every = [name for name, _ in whole.named_modules() if name]
        more = f" and {len(lost) - 1} more modules" if lost[1:] else ""
        raise FinetuneError(
            f"adapter.targets: PEFT would not load adapters on {lost[0]}{more} from a result, "
            f"because it changes their names by the rules of {model.config.model_type}'s "
            "checkpoints; use adapter.exclude_modules="
            f"[{','.join(sorted(targets.shortest(lost, every, words=2)))}]"
        )
    return with_whole_widths(adapted if whole is model else _of_stage(model, adapted))


def _of_stage(stage: PreTrainedModel, whole: PeftModel) -> PeftModel:
    """Attach the part of a complete model's adapter that belongs to a stage; it may be empty."""
    tuner: Any = whole.base_model
    here = {name for name, _ in (*stage.named_modules(), *stage.named_parameters())}
    config = copy.copy(tuner.peft_config["default"])
    config.target_modules = here.intersection(tuner.targeted_module_names) or DUMMY_TARGET_MODULES
    config.target_parameters = sorted(here.intersection(tuner.targeted_parameter_names)) or None
    config.layers_to_transform = config.exclude_modules = None  # the names are complete
    vars(stage)["_complete"] = whole
    return get_peft_model(stage, config)


def lost_when_loaded(model: PeftModel) -> list[str]:
    """Names of modules whose adapters PEFT would leave at their initial values when it loads them.

    PEFT 0.21 applies the renaming rules for a model type's checkpoints to the keys of an adapter
    too. These are regular expressions, and some also match the new name (Laguna's `shared_expert.`
    matches `shared_experts`).
    """
    keys = {
        name.replace(".default.", "."): torch.empty(0)
        for name, _ in model.named_parameters()
        if ".lora_" in name
    }
    loaded = convert_peft_adapter_state_dict_for_transformers(
        model, model.peft_config["default"], keys
    )
    found = {_inside(key).replace(".default.", ".") for key in loaded}
    lost = (_inside(key).split(".lora_")[0] for key in keys if _inside(key) not in found)
    return list(dict.fromkeys(name.replace(".base_layer", "") for name in lost))


def _inside(key: str) -> str:
    return key.removeprefix("base_model.model.")


def with_whole_widths(model: PeftModel) -> PeftModel:
    """Set the unsharded widths of adapters on layers that are divided between processes.

    PEFT 0.21 stores the width of the local shard if A is divided by columns.
    """
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for linear in (*layer.lora_A.values(), *layer.lora_B.values()):
                if isinstance(linear.weight, DTensor):
                    linear.out_features, linear.in_features = linear.weight.shape
    return model


def misnamed(model: PreTrainedModel, adapter: LoRA) -> Iterator[str]:
    """Problems with names that match no module; PEFT 0.21 ignores them if another name matches."""
    modules = [name for name, _ in model.named_modules() if name]
    older = targets.rewritten_names(model)
    tensors = [name for name, _ in model.named_parameters()]
    parameters = tensors if adapter.target_parameters else []
    last = {name.rsplit(".", 1)[-1] for name in modules}
    for field in ("targets", "modules_to_save", "exclude_modules"):
        given = getattr(adapter, field)
        is_pattern = isinstance(given, str) and given != targets.ALL
        if is_pattern and not any(re.fullmatch(given, name) for name in (*modules, *tensors)):
            yield (
                f"adapter.{field}: the regular expression '{given}' matches no module; it must "
                f"match a complete path such as {_linear(model)[0]}, or give names: "
                f"adapter.{field}=[q_proj,v_proj]"
            )
        for word in () if isinstance(given, str) else given:
            if field == "targets" and word.rsplit(".", 1)[-1] in older:
                continue  # experts were modules of this name in transformers 4
            end = word if field == "modules_to_save" else f".{word}"  # as in PEFT
            if not any(name == word or name.endswith(end) for name in modules):
                meant = did_you_mean(word.rsplit(".", 1)[-1], last)
                problem = f"adapter.{field}: no module is named '{word}'{meant}"
                here = _linear_modules(model) + targets.expert_words(model)
                yield problem + (here if field == "targets" else "")
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(adapter, field):
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in (*modules, *parameters)):
                problem = f"adapter.{field}: no module matches '{pattern}'"
                yield f"{problem}{did_you_mean(pattern, last)}"


def _linear_modules(model: nn.Module) -> str:
    names = sorted({name.rsplit(".", 1)[-1] for name in _linear(model)})
    return f"; linear modules here: {', '.join(names)}"


def _linear(model: nn.Module) -> list[str]:
    return [name for name, each in model.named_modules() if isinstance(each, targets.LINEAR)]


def draw_adapter(model: nn.Module, adapter: LoRA, seed: int) -> None:
    """Initialize every LoRA A as PEFT does, with a separate generator for each parameter.

    The distribution is Kaiming-uniform (He et al. 2015) with a = sqrt(5), or normal with standard
    deviation 1 / r (`gaussian`). PEFT draws in the order of construction, which differs between
    engines.
    """
    ranks = {
        f"{path}.{part}": rank  # an expert tensor has one A for all experts, with more than r rows
        for path, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
        for rank in layer.r.values()
        for part in ("lora_A", "lora_embedding_B")
    }
    for name, parameter in model.named_parameters():
        if (found := re.search(r"(.*\.lora_(A|embedding_B))\.", name)) is not None:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
            drawn = torch.empty(parameter.shape, dtype=torch.float32)
            if "lora_A" not in name:
                nn.init.normal_(drawn, generator=generator)
            elif adapter.init_lora_weights == "gaussian":
                nn.init.normal_(drawn, std=1 / ranks[found[1]], generator=generator)
            else:
                nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=generator)
            with torch.no_grad():
                assign(parameter, drawn)


def narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert an adapter to DeepSpeed's compute type; its fp32 master weights are a separate copy.

    DeepSpeed 0.19 does this itself, except under ZeRO-3 if the base was partitioned while it was
    loaded: each adapter would then save its input in fp32.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and not partitioned(parameter):
            parameter.data = parameter.data.to(dtype)
