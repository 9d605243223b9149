"""Find trained parameters that get no gradient, by a pass of a model on `meta` tensors.

Meta tensors have shapes but no data, so a model of any size, partitioned by ZeRO-3 or packed in 4
bits, is checked within seconds and without memory.
"""

import contextlib
import re
import time
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributions import Distribution
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.distributed.parameters import partitioned, unsharded_shape
from finetune.kernels.quantised import Linear4bit, Linear8bitLt
from finetune.process.attributes import changed

ROWS = 2
"""Rows of the pass on `meta` tensors."""
SHORT = 8
"""Tokens of a row in the first pass on `meta` tensors."""
LONG = 288
"""Tokens of a row in the second pass: compressed attention begins after 128 (DeepSeek-V4)."""
SECONDS = 30.0
"""Seconds that longer rows may take: a recurrence written as a loop is slow for them."""
QUANTISED = ("_is_quantized", "_pre_quantization_dtype")
"""Configuration fields that mark a model as quantized (Jamba, transformers 5.23)."""
INDEXED_EXPERT = re.compile(r"^(.*?)\.?\bexperts?\.\d+(\.|$)")
"""Name of a tensor of one expert, if the experts are separate modules."""


def unreached(model: nn.Module, longest: int = LONG) -> list[str] | None:
    """Names of trained parameters that get no gradient from the logits of a text.

    An expert without tokens is not listed if the module that contains it was called: other rows may
    use it. A quantized layer counts as the plain layer that it replaces, because a result is also
    used on the plain base. None if neither `meta` nor real tensors can pass through the model.

    Args:
        model: Model before an engine wraps it; its weights may be partitioned by ZeRO-3.
        longest: Maximum tokens of a training row.
    """
    started = time.perf_counter()
    wanted = [name for name, p in model.named_parameters() if p.requires_grad]
    left: set[str] | None = None
    for length in sorted({min(length, longest) for length in (SHORT, LONG, 8 * LONG)}):
        if left is not None and time.perf_counter() - started > SECONDS / 4:
            break
        try:
            with _as_text(model), _seconds_left(model, started + SECONDS):
                found = _pass_on_meta(model, wanted, length)
        except Exception:  # an operation that needs data; which one depends on the model
            if left is not None:  # the shorter rows passed
                break
            found = _pass_of_numbers(model, wanted)
        if found is None:
            return None
        left = found if left is None else left & found
        if not left:
            return []
    return [name for name in wanted if name in (left or ())]


def _pass_on_meta(model: nn.Module, wanted: list[str], length: int) -> set[str] | None:
    """Parameters among `wanted` that get no gradient from rows of a length; None if unknown.

    If the model branches on values, parameters without a gradient are tried again with real values.
    """
    leaves = _leaves(model)
    # The argument validation of torch's distributions reads values.
    unread = changed(Distribution, _validate_args=False)
    with _entered() as entered, _plain_linear(model), unread, torch.device("meta"):
        pretended = _Pretended()
        with pretended, _Lists():
            ids = torch.ones(ROWS, length, dtype=torch.long)
            reached = _leaves_of(logits_of(_call(model, leaves, ids)))
    left = {name for name in wanted if leaves[name] not in reached}
    left -= {name for name in left if _may_get_a_token(name, model, entered)}
    packed = any(isinstance(each, Linear4bit | Linear8bitLt) for each in model.modules())
    if left and pretended.branches and not packed:  # packed weights are not the plain base
        measured = _pass_of_numbers(model, wanted)
        return None if measured is None else left & measured
    return left


def _leaves_of(output: torch.Tensor) -> set[torch.Tensor]:
    """Tensors that the backward pass of an output would give a gradient.

    Raises:
        RuntimeError: the output depends on none.
    """
    if output.grad_fn is None:
        raise RuntimeError("the output has no gradient")
    leaves, seen, left = set[torch.Tensor](), set[Any](), [output.grad_fn]
    while left:
        node: Any = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if node.name() == "torch::autograd::AccumulateGrad":
                leaves.add(node.variable)
            left += [each for each, _ in node.next_functions]
    return leaves


def _pass_of_numbers(model: nn.Module, wanted: list[str]) -> set[str] | None:
    """`_pass_on_meta` with the model's real weights; None if they are partitioned or it fails."""
    named = dict(model.named_parameters())
    if any(partitioned(p) or p.is_meta for p in named.values()):
        return None
    device = next(iter(named.values())).device
    try:
        with _entered() as entered, _as_text(model), _restored(model), _autocast(named, device):
            ids = torch.arange(3, 3 + SHORT, device=device).repeat(ROWS, 1)
            reached = _leaves_of(logits_of(model(input_ids=ids, use_cache=False)))
    except Exception:  # as above
        return None
    left = {name for name in wanted if named[name] not in reached}
    used = {_experts_of(name, model) for name in wanted if name not in left}
    idle = {name for name in left if _experts_of(name, model) in entered - used}
    return {name for name in left - idle if not _may_get_a_token(name, model, entered)}


def _experts_of(name: str, model: nn.Module) -> nn.Module | None:
    """The module of all experts of a layer that a parameter, or the layer it adapts, is part of.

    If none of its tensors is used, all tokens may have chosen experts without weights (LongCat).
    """
    parts = name.split(".")[:-1]
    paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    for module in map(model.get_submodule, paths):
        base = module.get_base_layer() if isinstance(module, LoraLayer) else module
        if "Experts" in type(base).__name__:
            return base
    return None


def _call(model: nn.Module, leaves: dict[str, torch.Tensor], ids: torch.Tensor) -> Any:
    """Run a forward pass with all parameters and buffers replaced.

    The tensors of each module are replaced once: torch 2.13 would not restore a module that two
    others share (the trained rows of tied tables) if it were replaced twice.
    """
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    other = dict[str, torch.Tensor]()
    for path, module in model.named_modules():
        at = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False):
            other[at + name] = leaves[named[id(parameter)]]
        for name, buffer in module.named_buffers(recurse=False):
            other[at + name] = _empty(buffer.shape, buffer.dtype, False)
    given = {"input_ids": ids, "use_cache": False}
    with _restored(model):
        return torch.func.functional_call(model, other, (), given, tie_weights=False)


@contextlib.contextmanager
def _restored(model: nn.Module) -> Generator[None]:
    """Keep the parameters and buffers of each module as they were.

    PEFT 0.21 registers a tensor that `target_parameters` names again after each forward pass, as a
    buffer if a plain tensor replaced it. Such a weight could not be adapted a second time.
    """
    before = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    try:
        yield
    finally:
        for module, parameters, buffers in before:
            module._parameters, module._buffers = parameters, buffers


def logits_of(output: Any) -> torch.Tensor:
    """The logits in an output, which is a tuple or an object.  # (rows, tokens, vocabulary)"""
    return output[0] if isinstance(output, tuple) else output.logits


def _leaves(model: nn.Module) -> dict[str, torch.Tensor]:
    """A meta tensor in fp32 for each parameter, with its unsharded and unpacked shape."""
    shapes = {
        f"{name}.weight" if name else "weight": torch.Size([layer.out_features, layer.in_features])
        for name, layer in model.named_modules()
        if isinstance(layer, Linear4bit | Linear8bitLt)
    }
    return {
        name: _empty(
            shapes.get(name) or unsharded_shape(p),
            torch.float32 if name in shapes else p.dtype,
            p.requires_grad,
        )
        for name, p in model.named_parameters()
    }


def _empty(shape: torch.Size, dtype: torch.dtype, trained: bool) -> torch.Tensor:
    wide = torch.float32 if dtype.is_floating_point else dtype
    return torch.empty(shape, dtype=wide, device="meta", requires_grad=trained)


def _may_get_a_token(name: str, model: nn.Module, entered: set[nn.Module]) -> bool:
    """Whether a parameter belongs to an expert that a called router may choose for other tokens."""
    found = INDEXED_EXPERT.match(name)
    return found is not None and model.get_submodule(found[1]) in entered


class _Pretended(TorchDispatchMode):
    """Returns fixed values where data is needed: booleans are False, numbers are 0, all nonzero.

    `branches` is whether a boolean was read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.branches = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, dict(kwargs or {})
        if name == "aten::_to_copy":
            kwargs["device"] = torch.device("meta")
        if name == "aten::_local_scalar_dense":
            self.branches |= args[0].dtype == torch.bool
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        if name == "aten::equal":
            self.branches = True
            return False
        if name == "aten::nonzero":
            shape = (args[0].numel(), args[0].dim())
            return torch.empty(shape, dtype=torch.long, device="meta")
        return func(*args, **kwargs)


class _Lists(TorchFunctionMode):
    """Makes `tolist` return zeros, since it bypasses the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist and args[0].is_meta:
            with torch._C.DisableTorchFunction():
                return torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu").tolist()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _as_text(model: nn.Module) -> Generator[None]:
    """Prepare a pass of a text as in training, on implementations that accept `meta` tensors.

    Modules are in training mode, because some read weights past their adapters only there (Gemma
    3n), except dropout and modules that would recompute their activations.
    """
    training = {module: module.training for module in model.modules()}
    chosen = {
        "_attn_implementation_internal": "eager",
        "_experts_implementation_internal": "batched_mm",
    }
    configs = {id(found): found for module in training for found in [vars(module).get("config")]}
    # Fields by their config, and as they were: a `PreTrainedConfig` keeps them in its `__dict__`.
    fields = [(vars(one), {**vars(one)}) for one in configs.values() if hasattr(one, "__dict__")]
    try:
        for module in training:
            recomputed = module.__dict__.get("gradient_checkpointing", False)
            module.training = not (recomputed or isinstance(module, nn.Dropout))
        for now, before in fields:
            now |= {name: value for name, value in chosen.items() if name in before}
            for name in QUANTISED:  # Jamba and Mamba check it for quantization
                now.pop(name, None)
        yield
    finally:
        for now, before in fields:
            now.clear()
            now |= before
        for module, mode in training.items():
            module.training = mode


@contextlib.contextmanager
def _plain_linear(model: nn.Module) -> Generator[None]:
    """Make quantized layers compute with a plain weight."""

    def plain(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: F.linear(x, layer.weight, layer.bias)

    layers = [each for each in model.modules() if isinstance(each, Linear4bit | Linear8bitLt)]
    before = [layer.__dict__.get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.forward = plain(layer)
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


@contextlib.contextmanager
def _entered() -> Generator[set[nn.Module]]:
    """Collect the modules whose forward pass begins inside the context."""
    seen = set[nn.Module]()
    with register_module_forward_pre_hook(lambda module, _: seen.add(module)):
        yield seen


@contextlib.contextmanager
def _seconds_left(model: nn.Module, until: float) -> Generator[None]:
    """Raise TimeoutError in a forward pass that is not done in time."""

    def check(*_: object) -> None:
        if time.perf_counter() > until:
            raise TimeoutError

    with register_module_forward_pre_hook(check):
        yield


def _autocast(
    named: dict[str, nn.Parameter], device: torch.device
) -> contextlib.AbstractContextManager[Any]:
    found = {p.dtype for p in named.values()} & {torch.bfloat16, torch.float16}
    return torch.autocast(device.type, found.pop()) if found else contextlib.nullcontext()
