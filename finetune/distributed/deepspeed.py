"""DeepSpeed ZeRO: flat partitions that depend on the stage, with separate fp32 master weights."""

import contextlib
import datetime
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin, DistributedType, InitProcessGroupKwargs
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from finetune.backend.engine_options import ZERO_SHARDS
from finetune.distributed import deepspeed_nvme as nvme
from finetune.distributed.base import Engine
from finetune.distributed.device import on_cpu
from finetune.distributed.fragments import Fragment, scalar_state
from finetune.distributed.muon import Joined, Muon, Part, parts_of_flat
from finetune.distributed.plan_differences import Compare
from finetune.distributed.reader import Reader
from finetune.distributed.workarounds import without_deepspeed
from finetune.planner import Plan
from finetune.planner.estimate.sharding.zero import REDUCE_BUCKET
from finetune.process import rendezvous
from finetune.process.attributes import changed
from finetune.process.imports import collecting_later, compiling_later


class DeepSpeed(Engine):
    """ZeRO-1, 2 or 3, selected by the plan's `shard`."""

    kinds = frozenset({DistributedType.DEEPSPEED})

    def plugin(self, nvme_path: Path, timeout: datetime.timedelta) -> dict[str, Any]:
        cpu = on_cpu()
        # Without an explicit gloo, Accelerate 1.15 on CPU treats each rank as a single process.
        group = InitProcessGroupKwargs(backend="gloo" if cpu else None, timeout=timeout)
        plugin = _plugin(self.plan, nvme_path, cpu)
        return {"deepspeed_plugin": plugin, "kwargs_handlers": [group]}

    def prepare_libraries(self) -> None:
        without_deepspeed(False)

    def compare_built(self, compare: Compare) -> None:
        stage = ZERO_SHARDS[self.accelerator.state.deepspeed_plugin.zero_stage]
        compare("shard", self.plan.backend.shard, stage)

    def compare_wrapped(self, compare: Compare) -> None:
        backend, model = self.plan.backend, self._engine
        compare("shard", backend.shard, ZERO_SHARDS[model.zero_optimization_stage()])
        asked = {
            "optimizer": (backend.offload != "none", model.zero_offload_optimizer()),
            "parameters": (backend.offload == "all", model.zero_offload_param()),
        }
        for what, (offloads, built) in asked.items():
            device = "none" if built is None else built.device
            compare(f"offload of {what}", backend.device if offloads else "none", device)
        overlapping = _overlaps(self.plan, self.device.type == "cpu")
        if backend.shard != "params":  # ZeRO-3 has its own default
            compare("overlap_comm", overlapping, model.zero_overlap_comm())
        limit = self.plan.recipe.optim.max_grad_norm or 0.0
        compare("max_grad_norm", limit, model.gradient_clipping())

    @property
    def _engine(self) -> Any:
        """DeepSpeed's engine, which wraps the model."""
        return self.model

    @property
    def module(self) -> nn.Module:
        return self.model.module

    @contextlib.contextmanager
    def without_partitioning(self) -> Iterator[None]:
        """Context in which ZeRO-3 does not partition a model while it is built or loaded.

        Accelerate 1.15's `zero3_init_context_manager(enable=False)` does not suffice: it leaves
        transformers' own reference to the configuration in place.
        """
        from transformers.integrations import unset_hf_deepspeed_config

        plugin = self.accelerator.state.deepspeed_plugin
        plugin.dschf = None
        unset_hf_deepspeed_config()
        yield
        plugin.set_deepspeed_weakref()

    @contextlib.contextmanager
    def gathered(self, blank: nn.Module | None = None) -> Iterator[nn.Module]:
        """ZeRO-3 gathers all parameters once, without the hooks that would partition them again.

        DeepSpeed 0.19 has no other way to run a module's forward pass on a single rank.
        """
        if self._engine.zero_optimization_stage() < 3:
            yield self.module
            return
        import deepspeed

        offload = self._engine.optimizer.parameter_offload
        parameters = list(self.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            for parameter in parameters:
                parameter.ds_active_sub_modules.clear()
            for hook in (*offload.forward_hooks, *offload.backward_hooks):
                hook.remove()
            offload.forward_hooks, offload.backward_hooks = [], []
            try:
                yield self.module
            finally:
                offload._register_deepspeed_module(offload.module)

    def close(self) -> None:
        """End the process group by DeepSpeed, which forgets its own groups only then (0.19)."""
        importlib.import_module("deepspeed.comm").destroy_process_group()
        super().close()

    def wrap(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self._fit_buckets(model)
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        groups = [group["params"] for each in optimizers for group in each.param_groups]
        muons = [each for each in optimizers if isinstance(each, Muon)]
        with without_values():
            # Also a Muon alone: DeepSpeed 0.19 takes any class of this name for its own.
            super().wrap(model, [Joined(optimizers)] if muons else optimizers)
        for each in muons:
            for part in self._matrices(groups):
                each.flat.setdefault(id(part.parameter), []).append(part)
        adapter = self.plan.recipe.adapter
        if self.plan.backend.shard == "params" and adapter is not None and adapter.reads_layers:
            self._gather_with_layers()
        _restore_buffers(self.module, buffers)

    def _fit_buckets(self, model: nn.Module) -> None:
        """Limit the buckets of ZeRO-2 and 3 to the size of the trained parameters.

        DeepSpeed 0.19 otherwise allocates a complete bucket of 500 million elements, even for a
        tiny adapter. The other sizes are those of Accelerate 1.15, which reads the width only at
        the top of a config.
        """
        plugin = self.accelerator.state.deepspeed_plugin
        sizes = [getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad]
        zero = plugin.deepspeed_config["zero_optimization"]
        zero["reduce_bucket_size"] = min(REDUCE_BUCKET, sum(sizes))
        if zero["stage"] == 3:
            width = model.config.get_text_config().hidden_size
            zero["stage3_prefetch_bucket_size"] = int(0.9 * width * width)
            zero["stage3_param_persistence_threshold"] = 10 * width  # norms stay gathered

    def _matrices(self, groups: list[list[nn.Parameter]]) -> Iterator[Part]:
        """The matrices in the flat partitions of the groups of an optimizer."""
        zero = self._engine.optimizer
        if self.plan.backend.shard == "params":
            for flat, inside in zip(
                zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True
            ):
                begin = 0
                for parameter in inside:
                    size = parameter.ds_tensor.ds_numel
                    if len(parameter.ds_shape) > 1:
                        yield from parts_of_flat(flat, parameter.ds_shape, 0, size, begin)
                    begin += size
            return
        for group, inside in zip(self._base.param_groups, groups, strict=True):
            (flat,), start = group["params"], 0
            for parameter in inside:
                if parameter.dim() > 1:
                    yield from parts_of_flat(flat, parameter.shape, start, flat.numel())
                start += parameter.numel()

    def _gather_with_layers(self) -> None:
        """Let ZeRO-3 gather all weights of an adapted layer for the layer, not for their module."""
        import deepspeed

        for layer in self.module.modules():
            if isinstance(layer, BaseTunerLayer):
                own = {id(each) for each in layer.parameters(recurse=False)}
                for parameter in layer.parameters():
                    if id(parameter) not in own:
                        deepspeed.zero.register_external_parameter(layer, parameter)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Not `accelerator.backward`, which would also step the optimizer."""
        self._engine.set_gradient_accumulation_boundary(is_boundary=last)
        self._engine.backward(loss)

    def step(self, lr: float) -> tuple[float, bool]:
        """DeepSpeed 0.19 drops gradients that are not finite, in every stage and precision."""
        self.before_step(lr)
        self._engine.step()
        return float(self._engine.get_global_grad_norm()), not self._engine.optimizer.overflow

    def resident(self, parameter: nn.Parameter) -> int:
        partition = getattr(parameter, "ds_tensor", None)  # set by ZeRO-3 only
        if partition is None:
            return super().resident(parameter)
        return max(parameter.numel(), partition.numel())  # unsharded while persistent, else empty

    def stepped(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """The flat fp32 partitions of this rank."""
        for partition, state in self._base.state.items():
            yield partition.data, state

    def follow_masters(self) -> None:
        """As after a step (DeepSpeed 0.19): cast the partitions, and gather what is unsharded."""
        zero = self._engine.optimizer
        if self.plan.backend.shard != "params":
            zero.update_lp_params()
            return
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def gradient_elements(self) -> int:
        stage = self._engine.zero_optimization_stage()
        return super().gradient_elements() + _zero_gradient_elements(self._engine.optimizer, stage)

    def fragments(self) -> Iterator[Fragment]:
        cut = self.plan.backend.shard == "params"
        return self._slices() if cut else self._pieces()

    def restore(self, reader: Reader, extras: Callable[[str], Fragment]) -> None:
        if self.plan.backend.shard == "params":
            self._restore_slices(reader, extras)
        else:
            self._restore_pieces(reader, extras)

    # ZeRO-1 and ZeRO-2: pieces of one flat fp32 partition per parameter group ---------------------

    @property
    def _base(self) -> torch.optim.Optimizer:
        return self._engine.optimizer.optimizer

    def _partition(self, parameter: nn.Parameter) -> torch.Tensor:
        """The flat fp32 partition that holds this rank's piece of a parameter."""
        group = parameter._hp_mapping.param_group_index  # type: ignore[attr-defined]
        return self._base.param_groups[group]["params"][0]

    def _pieces(self) -> Iterator[Fragment]:
        for name, parameter in self.trained():
            mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:  # this rank has no piece of it
                continue
            state = self._base.state.get(self._partition(parameter), {})
            place = mapping.get_hp_fragment_address()
            values = {"weight": mapping.get_hp_fragment().detach()}
            cut, scalars = _divided(state)
            values |= {key: each.narrow(0, place.start, place.numel) for key, each in cut.items()}
            yield Fragment(name, mapping.lp_fragment_address.start, values, scalars=scalars)

    def _restore_pieces(self, reader: Reader, extras: Callable[[str], Fragment]) -> None:
        base = self._base
        for name, parameter in self.trained():
            mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                continue
            partition, place = self._partition(parameter), mapping.get_hp_fragment_address()
            start = mapping.lp_fragment_address.start
            mapping.get_hp_fragment().data.copy_(reader.range(name, "weight", start, place.numel))
            extra = extras(name)
            if partition not in base.state:
                base.state[partition] = _fresh_state(partition, extra)
            for key in extra.values:
                target = base.state[partition][key].narrow(0, place.start, place.numel)
                target.copy_(reader.range(name, key, start, place.numel))

    # ZeRO-3: a slice of each parameter, with padding on the last rank ---------------------------

    def _places(self) -> Iterator[tuple[str, nn.Parameter, int, int]]:
        """Name, parameter, first element and number of elements (unpadded) of each local slice."""
        for name, parameter in self.trained():
            zero: Any = parameter
            size = zero.ds_tensor.ds_numel
            start = self.rank * size
            yield name, parameter, start, max(0, min(size, zero.ds_numel - start))

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The optimizer's state of the partition that holds a slice of a parameter."""
        zero = self._engine.optimizer
        group, *_ = zero.grad_position[zero.get_param_id(parameter)]
        return self._base.state.get(zero.fp32_partitioned_groups_flat[group], {})

    def _slices(self) -> Iterator[Fragment]:
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        for name, parameter, start, size in self._places():
            values = {"weight": safe_get_local_fp32_param(parameter).detach()[:size].clone()}
            cut, scalars = _divided(self._state_of(parameter))
            for key in cut:
                state = safe_get_local_optimizer_state(parameter, key)
                values[key] = state.detach()[:size].clone()
            yield Fragment(name, start, values, scalars=scalars)

    def _restore_slices(self, reader: Reader, extras: Callable[[str], Fragment]) -> None:
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        known = {id(parameter): extras(name) for name, parameter, _, _ in self._places()}
        self._make_states(known)
        for name, parameter, start, size in self._places():
            padding = parameter.ds_tensor.ds_numel - size  # type: ignore[attr-defined]

            def partition(key: str, place=(name, start, size, padding)) -> torch.Tensor:
                name, start, size, padding = place
                values = reader.range(name, key, start, size) if size else torch.zeros(0)
                return nn.functional.pad(values, (0, padding)).to(self.device)

            safe_set_local_fp32_param(parameter, partition("weight"))
            for key in known[id(parameter)].values:
                safe_set_local_optimizer_state(parameter, partition(key), key)

    def _make_states(self, known: dict[int, Fragment]) -> None:
        """Create the state of every fp32 partition as the optimizer would at its first step."""
        zero = self._engine.optimizer
        for index, partition in enumerate(zero.fp32_partitioned_groups_flat):
            extra = known[id(zero.fp16_groups[index][0])]
            if not (extra.values or extra.scalars):
                continue  # saved before the optimizer's first step
            on_disk = zero._swappable_optimizer_subgroup(index)
            if on_disk:
                zero._optimizer_states_and_gradient_swap_in(index)
            zero.optimizer.state[partition] = _fresh_state(partition, extra)
            if on_disk:
                zero._optimizer_states_and_gradient_swap_out(index)


def _divided(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a partition's state, which are cut as it is, and its scalars."""
    cut = {key: each for key, each in state.items() if torch.is_tensor(each) and each.dim()}
    scalars = {key: each for key, each in state.items() if key not in cut}
    return cut, {
        key: float(each) if torch.is_tensor(each) else each for key, each in scalars.items()
    }


def _fresh_state(partition: torch.Tensor, extra: Fragment) -> dict[str, Any]:
    state: dict[str, Any] = {key: torch.zeros_like(partition.data) for key in extra.values}
    return state | scalar_state(extra.scalars, partition.device)


def _plugin(plan: Plan, nvme_path: Path, cpu: bool) -> DeepSpeedPlugin:
    backend, recipe = plan.backend, plan.recipe
    _load_deepspeed(cpu)
    stage = next(stage for stage, shard in ZERO_SHARDS.items() if shard == backend.shard)
    optimizer_device = backend.device if backend.offload != "none" else "none"
    plugin = DeepSpeedPlugin(
        zero_stage=stage,
        gradient_accumulation_steps=plan.accumulation,
        offload_optimizer_device=optimizer_device,
        offload_param_device=backend.device if backend.offload == "all" else "none",
        offload_optimizer_nvme_path=str(nvme_path),
        offload_param_nvme_path=str(nvme_path),
        zero3_init_flag=backend.zero_init,
        zero3_save_16bit_model=stage == 3,
    )
    config = plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = recipe.batch.micro_rows
    # Always set: Accelerate drops a clipping of 0, and DeepSpeed 0.19 then clips at 1.0.
    config["gradient_clipping"] = recipe.optim.max_grad_norm or 0.0
    config["data_types"] = {"grad_accum_dtype": "fp32"}
    config["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW: no compiler needed
    zero = config["zero_optimization"]
    if stage < 3:
        zero["overlap_comm"] = _overlaps(plan, cpu)
    if backend.device == "nvme":
        nvme.require_async_io(print if rendezvous.rank() == 0 else _silent)
        nvme.require_room(plan, nvme_path, rendezvous.neighbours())
        nvme.configure(config, plan)
    return plugin


def _overlaps(plan: Plan, cpu: bool) -> bool:
    """Whether ZeRO-2 reduces a bucket while the next one is filled, as ZeRO-3 does by default.

    Not ZeRO-1, which reduces once per step, and not if gradients go to the host.
    """
    backend = plan.backend
    return backend.shard == "grads" and backend.offload == "none" and not cpu and plan.processes > 1


def _silent(_: str) -> None:
    pass


def _load_deepspeed(cpu: bool) -> None:
    """Import DeepSpeed without compiling what training never uses.

    Version 0.19 builds `deepspeed_shm_comm`, which only inference uses, at startup on CPU, and
    passes the Muon optimizer, which each engine imports, to `torch.compile`.
    """
    with collecting_later(), compiling_later():
        import deepspeed

        with contextlib.suppress(ImportError):  # a version without it
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    if cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Context in which the `repr` of a parameter has no values.

    ZeRO-3 of DeepSpeed 0.19 reads and formats the values of every parameter for a message that it
    does not print.
    """
    with changed(nn.Parameter, __repr__=object.__repr__):
        yield


def _restore_buffers(module: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Undo the rounding of buffers, which DeepSpeed 0.19 casts to its compute type.

    Among them are the biases of expert routers, which transformers keeps in fp32.
    """
    for name, buffer in module.named_buffers():
        if buffer.dtype != before[name].dtype:
            buffer.data = before[name].to(buffer.device)


def _zero_gradient_elements(zero: Any, stage: int) -> int:
    """Elements of reduced gradients on this rank, wherever DeepSpeed 0.19 stores them.

    ZeRO-1 in bf16 accumulates unsharded gradients in fp32. Otherwise they are the gradients of the
    fp32 partitions if the optimizer is offloaded, or else a list per group.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    if isinstance(zero, BF16_Optimizer):  # ZeRO-1 in bf16 with fp32 accumulation
        return sum(flat.numel() for flat in zero.fp32_groups_gradients_flat)
    if stage == 3:
        partitions = zero.fp32_partitioned_groups_flat
    else:
        partitions = [p for group in zero.optimizer.param_groups for p in group["params"]]
    offloaded = sum(p.grad.numel() for p in partitions if p.grad is not None)
    if offloaded:
        return offloaded
    groups = [group for group in zero.averaged_gradients.values() if group is not None]
    return sum(grad.numel() for group in groups for grad in group)
