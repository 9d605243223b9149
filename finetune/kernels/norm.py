"""RMSNorm (arXiv:1910.07467) with a custom backward pass.

    y = w * x / rms(x)        rms(x)^2 = mean(x^2) + eps

transformers runs it as separate operations, and saves two fp32 copies of x and the result before
the weight. This version saves x, which the residual stream keeps anyway, and one number per row;
the backward pass recomputes the rest.
"""

from typing import Any

import torch
from torch import nn

from finetune.kernels.mixin import mix_in
from finetune.kernels.pointwise import Chain, chain
from finetune.planner.families import fused_classes

NORMS = {
    f"{name}RMSNorm": "eps" if family.gemma else "variance_epsilon"
    for name, family in fused_classes("norm")
}
"""Classes of transformers 5.23 with this formula, and their attribute for eps. Gemma's classes
multiply by 1 + w in fp32; the others round x / rms(x) first."""


def fuse_norms(model: nn.Module) -> None:
    """Fuse the supported norms of a model into one operation each."""
    for module in model.modules():
        if type(module).__name__ in NORMS:
            mix_in(module, FusedNorm)


class FusedNorm:
    """Mixin for a norm of transformers."""

    weight: nn.Parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = type(self).__name__.removeprefix("FSDP")  # fully_shard renames the class
        gemma = kind.startswith("Gemma")
        return RMSNorm.apply(x, self.weight, self.__dict__[NORMS[kind]], gemma)


class RMSNorm(torch.autograd.Function):
    """Norm of rows (..., hidden); saves them and one number per row."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool
    ) -> torch.Tensor:
        ctx.gemma, ctx.by_torch = gemma, _by_torch(x, weight, gemma)
        rows = x.flatten(0, -2)
        if ctx.by_torch:
            result, inverse = torch.ops.aten._fused_rms_norm(rows, weight.shape, weight, eps)
        else:
            result, inverse = normed(rows, weight, eps, gemma)
        ctx.save_for_backward(x, inverse, weight)
        return result.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, inverse, weight = ctx.saved_tensors
        rows, by_rows = (each.flatten(0, -2) for each in (x, grad))
        wanted = ctx.needs_input_grad[:2]
        if ctx.by_torch:
            given = by_rows.to(x.dtype), rows, weight.shape, inverse, weight
            by_x, by_weight = torch.ops.aten._fused_rms_norm_backward(*given, wanted)
        else:
            by_x, by_weight = norm_gradients(rows, by_rows, inverse, weight, ctx.gemma, *wanted)
        return None if by_x is None else by_x.view(x.shape), by_weight, None, None


def _by_torch(x: torch.Tensor, weight: torch.Tensor, gemma: bool) -> bool:
    """Whether PyTorch's fused kernels compute it: on GPUs, if chains are not compiled.

    They multiply by the weight, which has the same type, before rounding: a bf16 result is rounded
    once instead of twice.
    """
    return x.is_cuda and not gemma and not Chain.compiling and x.dtype == weight.dtype


@chain
def normed(
    x: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result (rows, hidden), and s = 1 / rms(x) (rows, 1) in fp32."""
    wide = x.to(torch.float32, copy=True)
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = torch.rsqrt(length.square() / x.shape[-1] + eps)
    result = wide.mul_(inverse)
    if gemma:
        return result.mul_(1.0 + weight.float()).to(x.dtype), inverse
    return weight * result.to(x.dtype), inverse


@chain
def norm_gradients(
    x: torch.Tensor,
    grad: torch.Tensor,
    inverse: torch.Tensor,
    weight: torch.Tensor,
    gemma: bool,
    of_x: bool,
    of_weight: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """With h = s x and g = w dL/dy:  dL/dx = s (g - h mean(g h)),  dL/dw = sum(h dL/dy)."""
    result = x.to(torch.float32, copy=True).mul_(inverse)
    by_weight = (grad.float() * result).sum(0).to(weight.dtype) if of_weight else None
    if not of_x:
        return None, by_weight
    wide = grad.to(torch.float32, copy=True).mul_(1.0 + weight.float() if gemma else weight.float())
    mean = torch.linalg.vecdot(wide, result)[..., None] / x.shape[-1]
    return wide.addcmul_(result, mean, value=-1).mul_(inverse).to(x.dtype), by_weight
