"""Choose the weights that an adapter trains, and report the weights that it leaves out.

transformers 5 stores the experts of a layer in three-dimensional parameters, which module names
cannot select. PEFT 0.21 adapts such a parameter by name (`target_parameters`). For a model type
whose experts were modules in transformers 4, it also rewrites names: `gate_proj`, `up_proj`,
`down_proj` and `gate` then select only parameters of experts and router, and a dense layer or a
shared expert of the same name is dropped. Here such a layer is adapted as the parameter
`NAME.weight`, which PEFT does not rewrite when it reads the configuration again.
"""

import copy
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator

from peft import LoraConfig
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import ModulesToSaveWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finetune.errors import FinetuneError, did_you_mean, refuse
from finetune.models.load_checks import full_shape
from finetune.models.scoring import head_of
from finetune.planner.library_limits import against_parameters
from finetune.recipe import LoRA

ALL = "all-linear"
GATE_AND_UP = "gate_up_proj"
"""Two matrices in one parameter; with `all-linear` each of them gets the rank of the adapter."""
LINEAR = (nn.Linear, Conv1D)
OLDER_NAMES = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Module names that PEFT rewrites in some model types."""
MOST_NAMED = 8


def resolve_names(model: PreTrainedModel, config: LoraConfig, adapter: LoRA) -> LoraConfig:
    """Resolve the names of a configuration, so that PEFT's rewriting of names cannot change them.

    `all-linear` selects every linear module except head and routers, and every expert tensor. For a
    model without experts whose names PEFT does not rewrite, the configuration is returned as it is.

    Raises:
        FinetuneError: a parameter does not exist, or PEFT cannot adapt it in this way.
    """
    parameters = [*_named(model, adapter)]
    rewritten = rewritten_names(model)
    if not parameters and not rewritten and not has_experts(model):
        return config
    ranks, alphas = dict(config.rank_pattern), dict(config.alpha_pattern)
    if adapter.targets == ALL:
        parameters += [name for name in _experts(model) if _is_plain(model, name)]
    else:
        parameters += _by_older_names(model, config, ranks, alphas)
    owners = {name.rpartition(".")[0] for name in parameters}
    modules = [name for name in _modules(model, config) if name not in owners]
    lost = [name for name in modules if name.rsplit(".", 1)[-1] in rewritten]
    modules = [name for name in modules if name not in set(lost)]
    parameters += [f"{name}.weight" for name in lost if _is_plain(model, f"{name}.weight")]
    parameters = [name for name in parameters if not _outside(name, adapter)]
    refuse(against_parameters(adapter) if parameters else ())
    if adapter.targets == ALL and any(name.endswith(GATE_AND_UP) for name in parameters):
        ranks.setdefault(GATE_AND_UP, 2 * adapter.r)
        scale = 2.0**0.5 if adapter.use_rslora else 2.0
        alphas.setdefault(GATE_AND_UP, scale * adapter.scale_alpha)
    resolved = copy.copy(config)
    every = [name for name, _ in model.named_modules() if name]
    resolved.target_modules = shortest(modules, every)
    resolved.target_parameters = sorted(shortest(parameters, _names(model), words=2)) or None
    resolved.rank_pattern, resolved.alpha_pattern = ranks, alphas
    resolved.layers_to_transform = None  # the names are those of the chosen layers
    return resolved


def _named(model: nn.Module, adapter: LoRA) -> list[str]:
    """Parameters that the recipe names in `target_parameters`.

    Raises:
        FinetuneError: a name matches no parameter, or one that PEFT cannot adapt.
    """
    names = _names(model)
    problems: list[str] = []
    chosen: list[str] = []
    for wanted in adapter.target_parameters:
        found = [name for name in names if name == wanted or name.endswith(f".{wanted}")]
        if not found:
            last = {name.rsplit(".", 1)[-1] for name in names}
            problems.append(
                f"adapter.target_parameters: no parameter is named '{wanted}'"
                f"{did_you_mean(wanted.rsplit('.', 1)[-1], last)}{expert_words(model)}"
            )
        odd = next((name for name in found if not _is_plain(model, name)), None)
        if odd is not None:
            shape = list(full_shape(model.get_parameter(odd)))
            problems.append(
                f"adapter.target_parameters: '{wanted}' names {odd} of shape {shape}, "
                f"and PEFT adapts unquantised matrices and tensors of matrices{expert_words(model)}"
            )
        chosen += found
    refuse(problems)
    return chosen


def expert_words(model: nn.Module) -> str:
    """Names of expert tensors for the end of a message; empty if there are none."""
    here = sorted({".".join(name.split(".")[-2:]) for name in _experts(model)})
    return f"; expert tensors here: {', '.join(here)}" if here else ""


def _modules(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Modules that the names of a configuration select, before PEFT rewrites names."""
    names = [name for name, _ in model.named_modules() if name]
    if config.target_modules != ALL:
        return [name for name in names if check_target_module_exists(config, name)]
    head = head_of(model)
    routers = tuple(f"{name}." for name in _routers(model))
    linear = copy.copy(config)
    linear.target_modules = {
        name
        for name in names
        if isinstance(module := model.get_submodule(name), LINEAR) and module is not head
        if not f"{name}.".startswith(routers)
    }
    return [name for name in names if check_target_module_exists(linear, name)]


def _by_older_names(
    model: PreTrainedModel, config: LoraConfig, ranks: dict[str, int], alphas: dict[str, float]
) -> list[str]:
    """Expert tensors that PEFT selects for module names of transformers 4; adds their ranks."""
    if isinstance(config.target_modules, str):
        pattern = config.target_modules
        return [name for name in _names(model) if re.fullmatch(pattern, name)]
    probe = copy.deepcopy(config)
    try:
        convert_peft_config_for_transformers(probe, model, conversions=None)
    except ValueError:  # gate_proj without up_proj
        if any(
            name.rpartition(".")[2] in config.target_modules for name in _modules(model, config)
        ):
            return []  # the names select modules, not experts
        raise FinetuneError(
            "adapter.targets: gate_proj and up_proj of the experts are one tensor; name both, or "
            f"use adapter.target_parameters=[experts.{GATE_AND_UP}]"
        ) from None
    ranks |= {name: r for name, r in probe.rank_pattern.items() if name not in ranks}
    alphas |= {name: a for name, a in probe.alpha_pattern.items() if name not in alphas}
    ends = tuple(f".{name}" for name in probe.target_parameters or ())
    return [name for name in _names(model) if ends and name.endswith(ends)]


def _outside(name: str, adapter: LoRA) -> bool:
    """Whether a parameter is excluded, fully trained, or in a layer that is not selected."""
    excluded = adapter.exclude_modules
    for each in (name, name.rpartition(".")[0]):
        if isinstance(excluded, str):
            if re.fullmatch(excluded, each):
                return True
        elif any(each == word or each.endswith(f".{word}") for word in excluded):
            return True
    if any(re.match(rf"(^|.*\.){word}($|\..*)", name) for word in adapter.modules_to_save):
        return True
    layer = re.match(r".*?\.(\d+)\.", name)
    chosen = adapter.layers_to_transform
    return bool(chosen) and (layer is None or int(layer[1]) not in chosen)


def rewritten_names(model: PreTrainedModel) -> set[str]:
    """Last parts of module names that PEFT rewrites to expert parameters in this model type."""
    found: set[str] = set()
    for name in OLDER_NAMES:
        probe = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(probe, model, conversions=None)
        except ValueError:  # PEFT requires gate_proj and up_proj together
            found.add(name)
        else:
            found |= {name} - set(probe.target_modules or ())
    return found


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def _is_plain(model: nn.Module, name: str) -> bool:
    """Whether PEFT can adapt a parameter: unquantized, with two or three dimensions."""
    parameter = model.get_parameter(name)
    packed = hasattr(parameter, "quant_state") or hasattr(parameter, "SCB")  # bitsandbytes
    return parameter.is_floating_point() and not packed and len(full_shape(parameter)) in (2, 3)


def _experts(model: nn.Module) -> list[str]:
    """Names of expert tensors, recognized by the class names of their modules."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if "Expert" in type(module).__name__
        for name, parameter in module.named_parameters(recurse=False)
        if len(full_shape(parameter)) == 3
    ]


def has_experts(model: nn.Module) -> bool:
    """Whether a model has experts."""
    return bool(_experts(model) or _routers(model))


def _routers(model: nn.Module) -> list[str]:
    """Names of modules that choose experts, recognized by their class names."""
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__.endswith(("Router", "TopKGate", "MoEGate"))
    ]


def shortest(chosen: Iterable[str], every: Iterable[str], words: int = 1) -> set[str]:
    """Shortest suffixes, of at least `words` parts, that match all chosen names and no others.

    PEFT matches names by suffix: `q_proj` matches `model.layers.0.self_attn.q_proj`.
    """
    chosen = set(chosen)
    means: dict[str, set[str]] = {}
    for name in every:
        for end in _ends(name, words):
            means.setdefault(end, set()).add(name)
    named: set[str] = set()
    covered: set[str] = set()
    for name in sorted(chosen):
        if name not in covered:
            end = next(end for end in _ends(name, words) if means[end] <= chosen)
            named.add(end)
            covered |= means[end]
    return named


def _ends(name: str, words: int) -> list[str]:
    """Suffixes of a dotted name, the shortest first and the complete name last."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(max(0, len(parts) - words), -1, -1)]


@dataclasses.dataclass(frozen=True)
class Reach:
    """How much of a model's matrices an adapter trains, not counting embeddings and head."""

    share: float
    """Share of the weights in matrices and stacks of matrices that have an adapter."""
    left: tuple[str, ...]
    """Names inside a layer of the weights without an adapter, the largest first."""

    def line(self) -> str:
        more = len(self.left) - MOST_NAMED
        named = ", ".join(self.left[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        share = math.floor(self.share * 1000) / 10
        return (
            f"adapter.targets: all-linear reaches {share:g} % of the weights in matrices "
            f"(embedding and head aside); left out: {named or 'none'}"
        )


def reach(model: nn.Module, base: PreTrainedModel) -> Reach:
    """Measure what the adapter in a model trains of its `base`, before the engine shards it."""
    reached = {id(parameter) for parameter in reached_by(model)}
    head = head_of(base)
    aside = [module for module in base.modules() if isinstance(module, nn.Embedding)]
    aside += [] if head is None else [head]
    outer = {id(parameter) for module in aside for parameter in module.parameters()}
    total = hit = 0
    left: dict[str, int] = {}
    for name, parameter in base.named_parameters():
        small = len(full_shape(parameter)) < 2 or name.endswith("bias")
        if small or "lora_" in name or id(parameter) in outer:
            continue
        total += (size := full_shape(parameter).numel())
        if id(parameter) in reached:
            hit += size
        else:
            inner = re.sub(r"^.*?\.\d+\.", "", name).replace(".base_layer", "")
            inner = re.sub(r"\.\d+(?=\.|$)", "", inner).removesuffix(".weight")
            left[inner] = left.get(inner, 0) + size
    ordered = sorted(left, key=lambda inner: (-left[inner], inner))
    return Reach(hit / total if total else 1.0, tuple(ordered))


def reached_by(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of a base that have an adapter, or are fully trained."""
    for layer in model.modules():
        if isinstance(layer, ParamWrapper):
            yield layer.get_param()
        elif isinstance(layer, LoraLayer):
            yield from layer.get_base_layer().parameters()
        elif isinstance(layer, ModulesToSaveWrapper):  # fully trained
            yield from layer.parameters()
