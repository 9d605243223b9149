"""Merge an adapter into its base one module at a time, without loading the complete model.

The base and the adapter are built on the meta device. Then each module in turn loads its weights,
in fp32 if the adapter changes them. PEFT's layers merge them, or `low_rank` for a plain LoRA. The
result is rounded once, written and freed.
"""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from finetune.checkpoints.pretrained import adapter_keys, persistent_buffers
from finetune.distributed.complete import put
from finetune.errors import FinetuneError, TrainingFailure, first_line, reading, refuse
from finetune.exporters.base_tensors import Base, Tensors, result_dtype, rounded
from finetune.exporters.low_rank import add_product, is_plain
from finetune.inference.load import (
    ADAPTER_WEIGHTS,
    RECOMPUTED,
    changes_base,
    check_adapter,
    needs_initial,
    plain_lora,
    subtract_initial,
)
from finetune.models.load_checks import token_rows
from finetune.models.soundness import is_finite

PREFIX = "base_model.model."
"""Prefix of every name in an adapter file."""

ADAPTER = "default"
"""PEFT's name for the only adapter of a model."""

Wrapper = BaseTunerLayer | AuxiliaryTrainingWrapper


class Merge:
    """Merges a base and an adapter into one model."""

    def __init__(self, base: Base, adapter: Path, initial: Path | None, dtype: torch.dtype) -> None:
        """Build the model with its adapter without reading the weights of the base.

        Args:
            base: Base model.
            adapter: Folder of the adapter in PEFT's format.
            initial: Folder of the adapter before its first step, if its initialization changed the
                base; if None, PEFT's initialization is recomputed.
            dtype: Data type of the merged weights.

        Raises:
            FinetuneError: the adapter does not fit its base, or cannot be merged.
        """
        self.base, self.dtype, self.adapter = base, dtype, adapter
        network = copy.deepcopy(base.network)
        self.aliases = _aliases(network)
        self.rows = token_rows(network) or 0
        self.config: Any = check_adapter(adapter, network)
        if not isinstance(self.config, LoraConfig):
            raise FinetuneError(
                f"{adapter}: only LoRA is merged here, not {self.config.peft_type.value}; load it "
                "with PEFT, and use its merge_and_unload()"
            )
        self.initial = _initial(adapter, self.config, initial)
        self.originals = dict(network.named_modules())
        grown = network.state_dict()
        self.shapes = {name: tensor.shape for name, tensor in grown.items()}
        self.kinds = {name: tensor.dtype for name, tensor in grown.items()}
        self.model, self.tables = _with_adapter(network, adapter, plain_lora(self.config))
        self.wrappers = dict(_wrappers(self.model.get_base_model()))
        changes = changes_base(self.config)
        self.plain = {
            path: wrapper
            for path, wrapper in self.wrappers.items()
            if not changes and is_plain(wrapper, ADAPTER)
        }
        if len(self.plain) < len(self.wrappers):
            _refuse_unmergeable(adapter, base.network, plain_lora(self.config))
        self.untied = [names for names in self.aliases.values() if not self._stay_tied(names)]

    def skeleton(self) -> Tensors:
        """All tensors of the files on the meta device."""
        found: Tensors = {}
        for unit in self.base.units:
            found |= self._stored({name: self._like(name) for name in self._written(unit)})
        return found

    def tensors(self) -> Iterator[Tensors]:
        """The merged weights in the format of the files, one unit of the model at a time.

        Raises:
            TrainingFailure: a merged weight is not finite.
        """
        for unit in self.base.units:
            merged = self._stored(self._merged(unit))
            broken = [name for name, value in merged.items() if not is_finite(value)]
            told = (f"{self.adapter}: {name} is not finite after merging" for name in broken)
            refuse(told, TrainingFailure)
            yield merged
            del merged  # before the next unit is allocated

    def network(self) -> PreTrainedModel:
        """The merged model without weights: its class and its configuration."""
        network = self.base.network
        network.config = copy.deepcopy(self.model.get_base_model().config)
        if self.untied:
            network.config.tie_word_embeddings = False
            network.config.get_text_config().tie_word_embeddings = False
        return network

    # --- one unit --------------------------------------------------------------------------------

    def _merged(self, unit: tuple[str, ...]) -> Tensors:
        read = self.base.read(unit)
        read |= {
            self._first(name): each
            for name, each in self.tables.items()
            if self._first(name) in read
        }
        changed: dict[str, Wrapper] = {}
        merged: Tensors = {}
        for name in self._named(unit):
            module, _, last = name.rpartition(".")
            path = self._wrapper(module)
            value = self._grown(name, read[self._first(name)])
            if path in self.plain:
                merged[name] = self._added(path, name, value)
                continue
            if path is not None:
                changed[path] = self.wrappers[path]
                if value.is_floating_point():
                    value = value.to(torch.float32, copy=True)
            put(self.originals[module], last, value)
        results = {path: self._unload(path, wrapper) for path, wrapper in changed.items()}
        written = self._written(unit)
        merged |= {name: self._result(name, results) for name in written if name not in merged}
        for name in self._named(unit):
            module, _, last = name.rpartition(".")
            put(self.originals[module], last, read[self._first(name)].to("meta"))
        return {name: merged[name] for name in written}

    def _added(self, path: str, name: str, value: torch.Tensor) -> torch.Tensor:
        """A merged tensor of a linear layer with a plain LoRA; the bias does not change."""
        if not name.endswith(".weight"):
            return value
        dtype = result_dtype(self.base.network, name, self.dtype)
        return add_product(value, self.plain[path], ADAPTER, dtype)

    def _unload(self, path: str, wrapper: Wrapper) -> nn.Module:
        """The merged module that replaces one with an adapter, as in PEFT's `merge_and_unload`."""
        any_wrapper: Any = wrapper
        if isinstance(wrapper, LoraLayer):
            self._restore_start(path, wrapper)
        if hasattr(wrapper, "unload_and_optionally_merge_module"):
            return any_wrapper.unload_and_optionally_merge_module(True, False, [ADAPTER])
        any_wrapper.merge(safe_merge=False, adapter_names=[ADAPTER])
        return any_wrapper.get_base_layer()

    def _restore_start(self, path: str, layer: LoraLayer) -> None:
        """Change a base weight as the initialization of the adapter did before training."""
        if not changes_base(self.config):
            return
        if self.initial is not None:
            subtract_initial(layer, f"{PREFIX}{path}", self.initial)
            return
        any_layer: Any = layer
        trained = any_layer.lora_A[ADAPTER].weight.data, any_layer.lora_B[ADAPTER].weight.data
        name = str(self.config.init_lora_weights)
        if name.lower() == "olora":
            any_layer.olora_init(ADAPTER)
        else:
            any_layer.pissa_init(ADAPTER, name)
        any_layer.lora_A[ADAPTER].weight.data, any_layer.lora_B[ADAPTER].weight.data = trained

    def _result(self, name: str, results: dict[str, nn.Module]) -> torch.Tensor:
        module, _, last = name.rpartition(".")
        path = self._wrapper(module)
        if path is None:
            owner = self.originals[module]
        else:
            owner = results[path].get_submodule(module.removeprefix(path).removeprefix("."))
        return getattr(owner, last).data

    def _stored(self, tensors: Tensors) -> Tensors:
        return rounded(self.base.network, tensors, self.dtype)

    # --- names -----------------------------------------------------------------------------------

    def _first(self, name: str) -> str:
        return next((one for one, names in self.aliases.items() if name in names), name)

    def _named(self, unit: tuple[str, ...]) -> list[str]:
        """All names of a unit's tensors, including tied ones."""
        return [each for name in unit for each in self.aliases.get(name, (name,))]

    def _written(self, unit: tuple[str, ...]) -> list[str]:
        """Stored names of a unit's tensors; tied tensors have all names only if they now differ."""
        return [
            each
            for name in unit
            for each in self.aliases.get(name, (name,))
            if each == name or self.aliases[name] in self.untied
        ]

    def _wrapper(self, module: str) -> str | None:
        """Path of the PEFT wrapper around a module or around a parent of it; None without one."""
        while module:
            if module in self.wrappers:
                return module
            module = module.rpartition(".")[0]
        return None

    def _stay_tied(self, names: tuple[str, ...]) -> bool:
        found = [self._wrapper(name.rpartition(".")[0]) for name in names]
        wrappers = [self.wrappers[path] for path in found if path is not None]
        if not wrappers:
            return True
        if len(wrappers) < len(names):
            return False
        if all(isinstance(each, TrainableTokensWrapper) for each in wrappers):
            return True
        if all(isinstance(each, ModulesToSaveWrapper) for each in wrappers):
            values = [self._saved(name) for name in names]
            return all(torch.equal(values[0], value) for value in values)
        return False

    def _saved(self, name: str) -> torch.Tensor:
        """A tensor of a module in `modules_to_save`."""
        module, _, last = name.rpartition(".")
        path = self._wrapper(module)
        assert path is not None
        wrapper: Any = self.wrappers[path]
        inner = module.removeprefix(path).removeprefix(".")
        return getattr(wrapper.modules_to_save[ADAPTER].get_submodule(inner), last).data

    # --- tensors ---------------------------------------------------------------------------------

    def _grown(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """An embedding table extended for tokens added in training, by the mean of its rows."""
        wanted = self.shapes[name]
        if value.shape == wanted or value.shape[0] != self.rows:
            return value
        mean = value.mean(0, dtype=torch.float32)
        more = mean.expand(wanted[0] - len(value), *mean.shape)
        return torch.cat([value.float(), more])

    def _like(self, name: str) -> torch.Tensor:
        module = name.rpartition(".")[0]
        path = self._wrapper(module)
        if path is not None and isinstance(self.wrappers[path], ModulesToSaveWrapper):
            return self._saved(name).to("meta")
        return torch.empty(self.shapes[name], dtype=self.kinds[name], device="meta")


def _with_adapter(
    network: PreTrainedModel, adapter: Path, config: LoraConfig
) -> tuple[PeftModel, Tensors]:
    """A base on the meta device with the loaded weights of its adapter, in fp32.

    PEFT (0.21) would move the adapter to the device of its base when loading.

    Returns:
        The model, and tensors of the base that are stored with the adapter, by name.
    """
    known = set(network.state_dict())
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    frozen = set(map(id, network.parameters()))
    with reading(f"{adapter}: PEFT cannot load it"), torch.device("meta"):
        model: Any = get_peft_model(network, config)
    named = [name for name, each in model.named_parameters() if id(each) not in frozen]
    named += [name for name, _ in persistent_buffers(model) if ".modules_to_save." in name]
    names = adapter_keys(model, named)
    others = {
        key: re.sub(r"\.(base_layer|original_module)\.", ".", key.removeprefix(PREFIX))
        for key in sorted(set(tensors) - set(names))
        if ".modules_to_save." not in key  # PEFT (0.21) writes grown tables a second time
    }
    unused = [key for key, name in others.items() if name not in known]
    refuse(f"{adapter}: the base has no module for {name}" for name in unused)
    trained = {name: tensors[key].float() for key, name in names.items() if key in tensors}
    tied = _aliases(model)
    for name, value in trained.items():
        first = next((one for one, others in tied.items() if name in others), name)
        for each in tied.get(first, (name,)):
            module, _, last = each.rpartition(".")
            put(model.get_submodule(module), last, trained.get(each, value))
    return model.eval(), {name: tensors[key] for key, name in others.items()}


def _aliases(network: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each tied tensor, by the first name."""
    found: dict[int, list[str]] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), []).append(name)
    return {names[0]: tuple(names) for names in found.values() if len(names) > 1}


def _wrappers(network: nn.Module) -> Iterator[tuple[str, Wrapper]]:
    """The outermost PEFT wrappers, with their paths."""
    inside: list[str] = []
    for path, module in network.named_modules():
        if isinstance(module, Wrapper) and not path.startswith(tuple(inside)):
            inside.append(f"{path}.")
            yield path, module


def _initial(adapter: Path, config: LoraConfig, initial: Path | None) -> Tensors | None:
    if initial is not None:
        return load_file(initial / ADAPTER_WEIGHTS)
    if changes_base(config) and str(config.init_lora_weights).lower() not in RECOMPUTED:
        raise needs_initial(adapter, config)
    return None


def _refuse_unmergeable(adapter: Path, network: PreTrainedModel, config: LoraConfig) -> None:
    """Merge with PEFT on the meta device, to reject adapters that PEFT cannot merge."""
    with torch.device("meta"):
        twin: Any = get_peft_model(copy.deepcopy(network), copy.deepcopy(config))
    try:
        twin.base_model.merge_and_unload()
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise FinetuneError(
            f"{adapter}: PEFT cannot merge it: {first_line(error)}; export it with --format adapter"
        ) from None
