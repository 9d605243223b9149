"""Build optimizers and compute the learning rate, from the recipe and the step alone."""

import math

import torch
from torch import nn

from finetune.distributed.parameters import unsharded_shape
from finetune.errors import FinetuneError
from finetune.models.scoring import head_of
from finetune.recipe import Optim
from finetune.version import install


def learning_rate(step: int, steps: int, optim: Optim, peak: float) -> float:
    """Learning rate of optimizer step `step` (from 0) in a run of `steps`.

    Warmup is linear and ends at the peak; the schedule ends at `min_lr` x peak after the last step.
    """
    warmup = math.ceil(optim.warmup * steps) if optim.warmup < 1 else int(optim.warmup)
    if step < warmup:
        return peak * (step + 1) / warmup
    if optim.schedule == "constant":
        return peak
    done = (step - warmup) / max(1, steps - warmup)
    left = 1 - done if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (optim.min_lr + (1 - optim.min_lr) * left)


def dimensions(parameter: nn.Parameter) -> int:
    """Number of dimensions of the unsharded tensor; ZeRO-3 flattens the parameters it shards."""
    return len(unsharded_shape(parameter))


def build(model: nn.Module, optim: Optim, peak: float, device: torch.device) -> list[nn.Module]:
    """Optimizers that together hold each trainable parameter once.

    Raises:
        FinetuneError: the library of the optimizer is missing.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:  # a stage of a pipeline without adapters
        return []
    if optim.name == "muon":
        return _muon(model, optim, peak)
    groups = _decay_groups(trained, optim.weight_decay)
    if optim.name == "adamw":
        # `foreach` allocates a copy of the gradients; `fused` does not, and runs on CPU and CUDA.
        return [torch.optim.AdamW(groups, peak, optim.betas, optim.eps, fused=True)]
    if optim.name == "adafactor":
        return [torch.optim.Adafactor(groups, peak)]
    return [_bitsandbytes(groups, optim, peak)]


def _decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    matrices = [parameter for parameter in parameters if dimensions(parameter) >= 2]
    vectors = [parameter for parameter in parameters if dimensions(parameter) < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _muon(model: nn.Module, optim: Optim, peak: float) -> list[torch.optim.Optimizer]:
    """Muon (arXiv:2502.16982) for the matrices inside blocks, AdamW for all other parameters.

    Updates are scaled to the RMS of AdamW's, so that one learning rate fits both.
    """
    outer = {
        id(parameter)
        for module in (model.get_input_embeddings(), head_of(model))
        if module is not None
        for parameter in module.parameters()
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hidden = [p for p in trained if dimensions(p) == 2 and id(p) not in outer]
    rest = [p for p in trained if dimensions(p) != 2 or id(p) in outer]
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        optimizers.append(
            torch.optim.Muon(
                hidden, peak, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    if rest:
        groups = _decay_groups(rest, optim.weight_decay)
        optimizers.append(torch.optim.AdamW(groups, peak, optim.betas, optim.eps, fused=True))
    return optimizers


def _bitsandbytes(
    groups: list[dict[str, object]], optim: Optim, peak: float
) -> torch.optim.Optimizer:
    try:
        from bitsandbytes import optim as library  # optional: it needs a build for the machine
    except ImportError as error:
        raise FinetuneError(
            f"optim.name: {optim.name} needs bitsandbytes: {install('bitsandbytes')} ({error})"
        ) from None
    rules = {"adamw_8bit": library.AdamW8bit, "paged_adamw_8bit": library.PagedAdamW8bit}
    return rules[optim.name](groups, peak, optim.betas, optim.eps)
