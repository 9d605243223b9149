"""LoRA layers with a custom backward pass; layers with the same input are computed as a group.

PEFT's modules and parameters stay: only their computation is replaced. The query, key and value
projections read the same tensor, and so do gate and up: the first layer of a group that is called
computes all outputs, and the other layers return theirs.

    group of n rows:  u = x [A_q; A_k; A_v]^T        one product, (n, 3r)
                      y_i = x W_i^T + s_i u_i B_i^T   the second term added in place

Only x and u are saved for the backward pass (PEFT 0.21 saves a copy of x for each adapter, in fp32
if adapters are stored in fp32). An NF4 base weight is dequantized once per pass and then freed.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch import nn

from finetune.kernels import cpu
from finetune.kernels.mixin import mix_in
from finetune.kernels.pointwise import Chain
from finetune.kernels.precision import compute_dtype
from finetune.kernels.quantised import (
    AdaptedLinear4bit,
    Linear4bit,
    Params4bit,
    QuantState,
    dequantize_4bit,
)

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling modules that read the same tensor, in the order of their calls."""


def group_adapters(model: nn.Module) -> None:
    """Group the adapted linear layers of a model, except those with a `reason_against`."""
    for parent in list(model.modules()):
        children = {
            name: child
            for name, child in parent.named_children()
            if isinstance(child, lora.LoraLayer) and reason_against(child) is None
        }
        for names in GROUPS:
            if all(name in children for name in names):
                _join([children.pop(name) for name in names])
        for child in children.values():
            _join([child])


def left_alone(model: nn.Module) -> dict[str, int]:
    """Number of adapted layers that PEFT still computes, by reason."""
    found: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, lora.LoraLayer) and not isinstance(module, Grouped):
            reason = reason_against(module) or "not grouped"
            found[reason] = found.get(reason, 0) + 1
    return found


def reasons_against_tiles(model: nn.Module) -> list[str]:
    """Reasons why gradients of grouped adapters are not computed in tiles on this machine."""
    layers = [each.get_base_layer() for each in model.modules() if isinstance(each, Grouped)]
    widths = {width for each in layers for width in (each.in_features, each.out_features)}
    reasons = {cpu.reason_against_adapter_tiles(width) for width in widths}
    return sorted(reason for reason in reasons if reason is not None)


def reason_against(layer: nn.Module) -> str | None:
    """Why an adapted layer cannot be grouped; None if it can."""
    if type(layer) not in (lora.Linear, AdaptedLinear4bit):
        return f"PEFT's {type(layer).__name__} computes another product"
    base = layer.get_base_layer()
    if type(base) not in (nn.Linear, Linear4bit):
        return f"the base is a {type(base).__name__}"
    if list(layer.lora_A) != list(layer.active_adapters) or len(layer.lora_A) != 1:
        return "several adapters"
    (name,) = layer.lora_A
    if not isinstance(layer.lora_dropout[name], nn.Identity):
        return "dropout"
    if layer.lora_variant or layer.lora_bias[name] or layer.fan_in_fan_out:
        return "a variant of LoRA"
    if base.weight.requires_grad:
        return "the base is trained"
    parts = (layer, base, layer.lora_A[name], layer.lora_B[name])
    if any(part._forward_hooks or part._forward_pre_hooks for part in parts):
        return "hooks"
    return None


def _join(layers: list[nn.Module]) -> None:
    group = Group(tuple(layers))
    for layer in layers:
        mix_in(layer, Grouped)
        layer.group = group


class Grouped:
    """Mixin for PEFT's adapted layer that takes its output from its group."""

    group: "Group"

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs or self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        return self.group.output(self, x)


class Group:
    """Layers that read the same tensor, and outputs of layers that are not called yet."""

    def __init__(self, layers: tuple[nn.Module, ...]) -> None:
        self.layers = layers
        self.source: torch.Tensor | None = None
        self.waiting: dict[nn.Module, torch.Tensor] = {}

    def output(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x is not self.source or layer not in self.waiting:
            outputs = GroupedLoRA.apply(x, *_operands(self.layers))
            self.source, self.waiting = x, dict(zip(self.layers, outputs, strict=True))
        result = self.waiting.pop(layer)
        if not self.waiting:
            self.source = None
        return result


@dataclasses.dataclass(frozen=True)
class Shape:
    """Properties of a layer that are not tensors."""

    scaling: float
    quantised: QuantState | None

    def weight(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The base weight (out, in) in the compute type, dequantized if needed."""
        if self.quantised is None:
            return stored.to(dtype)
        return dequantize_4bit(stored.view(-1, 1), self.quantised).to(dtype)


def _quantisation(base: Linear4bit) -> QuantState:
    """Quantization state of a weight; FSDP2's new parameters lack it, but the layer keeps it."""
    weight = base.weight
    known = weight.quant_state if isinstance(weight, Params4bit) else None
    return base.quant_state if known is None else known


def _operands(layers: tuple[nn.Module, ...]) -> tuple[Any, ...]:
    """The `Shape` of every layer, then weight, bias, A and B of each."""
    shapes: list[Shape] = []
    tensors: list[torch.Tensor | None] = []
    for layer in layers:
        (name,) = layer.lora_A
        base = layer.get_base_layer()
        quantised = None
        if isinstance(base, Linear4bit):
            quantised = _quantisation(base)
        shapes.append(Shape(layer.scaling[name], quantised))
        tensors += [base.weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight]
    return tuple(shapes), *tensors


def multiply(
    wide: torch.Tensor,
    narrow: torch.Tensor,
    up: torch.Tensor | None = None,
    product: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `narrow.T @ wide` and, if given, write `wide @ up` into `product`.

    Args:
        wide: # (n, wide)
        narrow: # (n, r)
        up: # (wide, r)
        product: # (n, r)
    """
    if Chain.compiling and cpu.serves_adapter_tiles(wide):
        with torch.profiler.record_function("chain::adapter_gradients"):
            found, outer = cpu.adapter_products(wide, narrow, up)
        if found is not None and product is not None:
            product.copy_(found)
        return outer
    if up is not None and product is not None:
        torch.mm(wide, up, out=product)
    return narrow.T @ wide


class GroupedLoRA(torch.autograd.Function):
    """Outputs of adapted layers with the same input; gradients of the input and every A and B."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shapes: tuple[Shape, ...], *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """`x` is (..., in), the outputs are (..., out) each."""
        dtype = compute_dtype(x)
        weights, biases, downs, ups = (tensors[place::4] for place in range(4))
        with torch.autocast(x.device.type, enabled=False):
            rows = x.reshape(-1, x.shape[-1]).to(dtype)  # (n, in)
            down = torch.cat([each.to(dtype) for each in downs])  # (sum of r, in)
            narrow = rows @ down.T  # (n, sum of r)
            outputs: list[torch.Tensor] = []
            ranks = [each.shape[0] for each in downs]
            columns = narrow.split(ranks, 1)
            for place, of_layer in enumerate(shapes):
                weight = of_layer.weight(weights[place], dtype)
                bias = biases[place]
                output = F.linear(rows, weight, None if bias is None else bias.to(dtype))
                output.addmm_(columns[place], ups[place].to(dtype).T, alpha=of_layer.scaling)
                # Not a view: callers may add to it in place, as Llama 4 does with its experts.
                shape = (*x.shape[:-1], output.shape[-1])
                outputs.append(torch.ops.aten._unsafe_view(output, shape))
        ctx.save_for_backward(rows, narrow, *weights, *downs, *ups)
        ctx.shapes, ctx.source, ctx.dtype = shapes, (x.shape, x.dtype), dtype
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        rows, narrow, *saved = ctx.saved_tensors
        count, dtype = len(ctx.shapes), ctx.dtype
        weights, downs, ups = (saved[start : start + count] for start in range(0, 3 * count, count))
        ranks = [each.shape[0] for each in downs]
        by_narrow = torch.zeros_like(narrow)  # (n, sum of r)
        flat = [None if g is None else g.reshape(-1, g.shape[-1]).to(dtype) for g in grads]
        by_ups: list[torch.Tensor | None] = [None] * count
        parts = zip(by_narrow.split(ranks, 1), narrow.split(ranks, 1), strict=True)
        for place, (target, column) in enumerate(parts):
            grad, up, scaling = flat[place], ups[place], ctx.shapes[place].scaling
            if grad is not None:
                by_up = multiply(grad, column, up.to(dtype) * scaling, target)
                by_ups[place] = (by_up.T.contiguous() * scaling).to(up.dtype)
        by_down = multiply(rows, by_narrow).split(ranks)
        by_rows = None
        if ctx.needs_input_grad[0]:
            by_rows = by_narrow @ torch.cat([each.to(dtype) for each in downs])
            for grad, shape, weight in zip(flat, ctx.shapes, weights, strict=True):
                if grad is not None:
                    by_rows.addmm_(grad, shape.weight(weight, dtype))
            of_shape, of_dtype = ctx.source
            by_rows = by_rows.view(of_shape).to(of_dtype)
        of_layers: list[torch.Tensor | None] = []
        for place, down in enumerate(downs):
            of_layers += [None, None, by_down[place].to(down.dtype), by_ups[place]]
        return by_rows, None, *of_layers
