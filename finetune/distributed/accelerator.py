"""The Accelerator of a plan: built, and read back.

Everything here that works round a library names its version and reason. On a machine without an
accelerator every backend runs for real over gloo, with the same configuration files.
"""

import contextlib
import dataclasses
import datetime
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from finetune import backend as backends
from finetune.distributed import nvme
from finetune.errors import FinetuneError
from finetune.planner import Plan
from finetune.process.start import collecting_later, compiling_later

Compare = Callable[[str, object, object], None]
"""Notes a difference: what it is in, what the plan has, what was built."""

ENGINE_TYPES = {
    "single": {DistributedType.NO},
    "ddp": {DistributedType.MULTI_GPU, DistributedType.MULTI_CPU},
    "fsdp": {DistributedType.FSDP},
    "deepspeed": {DistributedType.DEEPSPEED},
}


def build(plan: Plan, nvme_path: Path, timeout: datetime.timedelta) -> Accelerator:
    """The Accelerator of this process.

    Args:
        nvme_path: folder for a backend that offloads to a disk.
        timeout: how long a collective waits for the other processes.

    Raises:
        FinetuneError: Accelerate built something else than the plan asks for.
    """
    if attempt := backends.restarts():
        _meet_apart_from_earlier_attempts(attempt)
    _let_other_engines_do_without_deepspeed(plan.backend.engine)
    backends.announce_wait()
    accelerator = _made(plan, nvme_path, timeout)
    _refuse_difference(plan, accelerator)
    return accelerator


def _meet_apart_from_earlier_attempts(attempt: int) -> None:
    """Give the processes of a restart keys of their own in the store of torch's agent.

    torch 2.13 counts on a new store for each restart, but the static rendezvous that Accelerate
    1.15 asks for keeps the first: a process may then read where one of the attempt before was
    listening, and both wait for ever.
    """
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function hides it
    create = rendezvous._create_c10d_store

    def apart(*words: Any, **named: Any) -> torch.distributed.Store:
        return torch.distributed.PrefixStore(f"attempt-{attempt}", create(*words, **named))

    rendezvous._create_c10d_store = apart


def _let_other_engines_do_without_deepspeed(engine: str) -> None:
    """Accelerate 1.15 loads DeepSpeed to see whether a model of another engine is one of its own.

    That takes half a second, and an installation of DeepSpeed that is broken ends a run of FSDP.
    """
    utilities = importlib.import_module("accelerate.utils.other")
    installed = importlib.import_module("accelerate.utils.imports").is_deepspeed_available
    asked = engine == "deepspeed"
    utilities.is_deepspeed_available = installed if asked else lambda: False


def _made(plan: Plan, nvme_path: Path, timeout: datetime.timedelta) -> Accelerator:
    cpu = not torch.accelerator.is_available()
    shared: dict[str, Any] = {
        # ACCELERATE_GRADIENT_ACCUMULATION_STEPS overrides the argument, not the plugin (1.15).
        "gradient_accumulation_plugin": GradientAccumulationPlugin(
            num_steps=plan.accumulation, sync_with_dataloader=False
        ),
        "mixed_precision": "bf16" if plan.backend.precision == "bf16" else "no",
    }
    if plan.backend.engine == "deepspeed":
        # Without gloo by name Accelerate 1.15 on CPU believes that each rank is alone.
        group = InitProcessGroupKwargs(backend="gloo" if cpu else None, timeout=timeout)
        plugin = _deepspeed_plugin(plan, nvme_path, cpu)
        return Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[group], **shared)
    group = InitProcessGroupKwargs(timeout=timeout)
    if plan.backend.engine == "fsdp":
        if cpu:
            select_fsdp_on_cpu(group)
        plugin = _fsdp_plugin(plan, cpu)
        return Accelerator(cpu=cpu, fsdp_plugin=plugin, kwargs_handlers=[group], **shared)
    # Buffers are tables that every rank computes alike: sent anew, they cost a collective a step.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False)
    return Accelerator(cpu=cpu, kwargs_handlers=[group, ddp], **shared)


def select_fsdp_on_cpu(group: InitProcessGroupKwargs) -> None:
    """Make Accelerate choose FSDP on a machine without an accelerator.

    Accelerate 1.15 promotes to FSDP from MULTI_GPU only, not from MULTI_CPU, and then trains plain
    DDP without a word. Told that it is MULTI_GPU, its own FSDP branch runs, over gloo.
    """
    state = PartialState(cpu=True, **group.to_kwargs())
    state.distributed_type = DistributedType.MULTI_GPU


def _fsdp_plugin(plan: Plan, cpu: bool) -> FullyShardedDataParallelPlugin:
    policy = None
    if plan.backend.precision == "bf16":
        # Accelerate's default reduces gradients in bf16 and returns bf16 logits.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    offload = plan.backend.offload == "all"
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=plan.backend.shard == "params",
        # Pinned memory does not exist without an accelerator.
        cpu_offload=CPUOffloadPolicy(pin_memory=not cpu) if offload else False,
        mixed_precision_policy=policy,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
    )


def name_units(accelerator: Accelerator, model: nn.Module) -> None:
    """Let FSDP2 wrap the classes of blocks that the model has.

    Accelerate 1.15 ends with an error where transformers names one that it does not have: Gemma 3
    has the vision half of SigLIP, whose text half is named too.
    """
    there = {type(module).__name__ for module in model.modules()}
    named = set(getattr(model, "_no_split_modules", None) or ())
    if named & there and named - there:
        plugin = accelerator.state.fsdp_plugin
        plugin.transformer_cls_names_to_wrap = sorted(named & there)


def gather_frozen_units(model: nn.Module) -> None:
    """Gather once each unit of FSDP2 in which nothing is trained, on every rank together.

    A unit that no forward pass enters (the vision tower of a model that reads text) otherwise
    lacks what torch 2.13 looks at after a backward pass that accumulates.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            params = [] if group is None else group.fsdp_params
            if params and not any(each.sharded_param.requires_grad for each in params):
                module.unshard()
                module.reshard()


def keep_compute_type_between_units(model: nn.Module) -> None:
    """Let FSDP2's units hand on what they computed; only the model as a whole returns fp32.

    Accelerate 1.15 gives each unit the policy of the whole: a block's bf16 output goes to fp32, and
    the next block casts it back, with its gradient the other way round. No digit comes of that.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule) and module is not model:
            state = module._get_fsdp_state()
            state._mp_policy = dataclasses.replace(state._mp_policy, output_dtype=None)


def _deepspeed_plugin(plan: Plan, nvme_path: Path, cpu: bool) -> DeepSpeedPlugin:
    backend, recipe = plan.backend, plan.recipe
    _load_deepspeed(cpu)
    stage = next(stage for stage, shard in backends.ZERO_SHARDS.items() if shard == backend.shard)
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
    # Accelerate drops a clipping of 0 and DeepSpeed 0.19 then clips at 1.0: it is always written.
    config["gradient_clipping"] = recipe.optim.max_grad_norm or 0.0
    config["data_types"] = {"grad_accum_dtype": "fp32"}
    config["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW: no compiler needed
    zero = config["zero_optimization"]
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = "auto"  # 10 x hidden size: norms stay whole
        zero["stage3_prefetch_bucket_size"] = "auto"
    if backend.device == "nvme":
        nvme.require_async_io(print if backends.rank() == 0 else _silent)
        nvme.require_room(plan, nvme_path, backends.neighbours())
        nvme.configure(config, plan)
    return plugin


def _silent(_: str) -> None:
    pass


def _load_deepspeed(cpu: bool) -> None:
    """DeepSpeed, which only its own backends need, without compiling what training never uses.

    Version 0.19 builds `deepspeed_shm_comm` at start on CPU, used by inference only, and hands the
    Muon optimizer, which each engine asks for, to `torch.compile`.
    """
    with collecting_later(), compiling_later():
        import deepspeed

        with contextlib.suppress(ImportError):  # a version without it
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    if cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Inside, a parameter is described without its values.

    ZeRO-3 of DeepSpeed 0.19 reads and formats those of every parameter for a message that it does
    not print.
    """
    described = nn.Parameter.__repr__
    nn.Parameter.__repr__ = object.__repr__
    try:
        yield
    finally:
        nn.Parameter.__repr__ = described


def _refuse_difference(plan: Plan, accelerator: Accelerator) -> None:
    """Compare what Accelerate built with what the plan asked for.

    Raises:
        FinetuneError: with every difference; nothing must be trained on anything else.
    """
    expected = ENGINE_TYPES[plan.backend.engine]
    differences: list[str] = []
    compare = _comparing(differences)
    if accelerator.distributed_type not in expected:
        asked = " or ".join(sorted(kind.value for kind in expected))
        compare("distributed type", asked, accelerator.distributed_type.value)
    compare("processes", plan.processes, accelerator.num_processes)
    compare("processes", backends.world(), accelerator.num_processes)
    compare("accumulation", plan.accumulation, accelerator.gradient_accumulation_steps)
    compare("precision", plan.backend.precision, _precision(accelerator))
    if accelerator.distributed_type == DistributedType.FSDP:
        fsdp = accelerator.state.fsdp_plugin
        compare("fsdp_version", 2, fsdp.fsdp_version)
        compare("reshard_after_forward", plan.backend.shard == "params", fsdp.reshard_after_forward)
        offloaded = isinstance(fsdp.cpu_offload, CPUOffloadPolicy)
        compare("offload", plan.backend.offload == "all", offloaded)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        stage = backends.ZERO_SHARDS[accelerator.state.deepspeed_plugin.zero_stage]
        compare("shard", plan.backend.shard, stage)
    if differences:
        raise FinetuneError(*differences)


def refuse_other_engine(plan: Plan, model: nn.Module) -> None:
    """Compare what the model was wrapped in with what the plan asked for, on the wrapper itself.

    Raises:
        FinetuneError: with every difference.
    """
    differences: list[str] = []
    compare = _comparing(differences)
    compare("engine", plan.backend.engine, _wrapped_by(model))
    if not differences:
        if plan.backend.engine == "fsdp":
            _compare_fsdp(plan, model, compare)
        elif plan.backend.engine == "deepspeed":
            _compare_deepspeed(plan, model, compare)
    if differences:
        raise FinetuneError(*differences)


def _wrapped_by(model: nn.Module) -> str:
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    if isinstance(model, FSDPModule):
        return "fsdp"
    return "deepspeed" if type(model).__name__ == "DeepSpeedEngine" else "single"


def _compare_fsdp(plan: Plan, model: nn.Module, compare: Compare) -> None:
    """FSDP2's own state of each of its modules, which torch 2.13 keeps in private attributes.

    Accelerate 1.15 leaves the head, and what is in no block, whole from forward to backward.
    """
    blocks = {
        block for each in model.modules() if isinstance(each, nn.ModuleList) for block in each
    }
    whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    compare("parameters that are not sharded", [], whole[:3])
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        group = getattr(module._get_fsdp_state(), "_fsdp_param_group", None)
        if group is None:  # all of its parameters belong to modules within it
            continue
        place = f"of {name or 'the model'}"
        compare(f"processes {place}", plan.processes, group.mesh_info.mesh.size())
        reshards = group.post_forward_mesh_info is not None
        if module in blocks:
            compare(f"reshard_after_forward {place}", plan.backend.shard == "params", reshards)
        if module is not model:
            compare(f"output type {place}", None, module._get_fsdp_state()._mp_policy.output_dtype)
        offloaded = isinstance(group.offload_policy, CPUOffloadPolicy)
        compare(f"offload {place}", plan.backend.offload == "all", offloaded)


def _compare_deepspeed(plan: Plan, model: Any, compare: Compare) -> None:
    backend = plan.backend
    compare("shard", backend.shard, backends.ZERO_SHARDS[model.zero_optimization_stage()])
    asked = {
        "optimizer": (backend.offload != "none", model.zero_offload_optimizer()),
        "parameters": (backend.offload == "all", model.zero_offload_param()),
    }
    for what, (offloads, built) in asked.items():
        device = "none" if built is None else built.device
        compare(f"offload of {what}", backend.device if offloads else "none", device)
    compare("max_grad_norm", plan.recipe.optim.max_grad_norm or 0.0, model.gradient_clipping())


def _comparing(differences: list[str]) -> Compare:
    """What notes each difference between what the plan has and what was built."""

    def compare(what: str, asked: object, built: object) -> None:
        if asked != built:
            differences.append(f"{what}: the plan has {asked}, Accelerate built {built}")

    return compare


def _precision(accelerator: Accelerator) -> str:
    return {"bf16": "bf16", "no": "fp32"}.get(accelerator.mixed_precision, "unknown")
