"""Run the same rows through this package's model and through plain transformers + PEFT."""

import contextlib
import copy
import dataclasses
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import nn

from finetune.data.rows.collate import collate
from finetune.data.rows.store import Rows
from finetune.distributed.base import Engine
from finetune.distributed.build import build
from finetune.models import model as models
from finetune.models.quantization import keep_unpacked, quantization_config
from finetune.models.scoring import auto_class
from finetune.planner import plan
from finetune.recipe import Recipe
from finetune.training import optim
from finetune.verification.model_checks.target import ROWS

B_DEVIATION = 0.05
"""Standard deviation of a non-zero LoRA B, so that every parameter gets a gradient."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Mean loss over the labelled tokens of some rows, and its gradient by parameter name."""

    loss: float
    gradients: dict[str, torch.Tensor]

    def apart(self, other: "Outcome") -> tuple[float, float]:
        """Relative differences of the losses and of all gradients together.

        The latter is the norm of the difference divided by the norm of `other`; a missing gradient
        counts as zero.
        """
        loss = abs(self.loss - other.loss) / abs(other.loss)
        difference = size = 0.0
        for name in self.gradients.keys() | other.gradients.keys():
            ours, theirs = self.gradients.get(name), other.gradients.get(name)
            gap = ours if theirs is None else theirs if ours is None else ours - theirs
            assert gap is not None
            difference += float(gap.square().sum())
            size += 0.0 if theirs is None else float(theirs.square().sum())
        return loss, (difference / size) ** 0.5 if size else float(difference > 0)


@contextlib.contextmanager
def ours(recipe: Recipe, folder: Path) -> Iterator[Engine]:
    """The model as `finetune train` builds it on one process in fp32, with a non-zero LoRA B.

    Raises:
        FinetuneError: the recipe cannot be planned, or its model cannot be built.
    """
    engine = build(plan(recipe, "single", 1, "fp32"), folder, datetime.timedelta(minutes=1))
    try:
        network = models.build(engine, recipe.seed)
        fill_lora_b(network)
        engine.prepare(network, optim.build(network, recipe.optim, recipe.optim.lr))
        yield engine
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def fill_lora_b(network: nn.Module) -> None:
    """Fill every LoRA B, which is initialized to zero, from one seeded generator."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if ".lora_B." in name or ".lora_embedding_A." in name:
                drawn = torch.randn(parameter.shape, generator=generator) * B_DEVIATION
                parameter.copy_(drawn)


def outcome(engine: Engine, recipe: Recipe, rows: Rows, pad_id: int) -> Outcome:
    """Loss and gradient of the first rows, in one micro-batch built as in training."""
    batch = collate(rows, np.arange(min(ROWS, len(rows))), pad_id, engine.device)
    engine.model.train()
    engine.model.zero_grad()
    loss = recipe.loss(engine.model, batch).sum / recipe.count(batch)
    loss.backward()
    return Outcome(loss.item(), _gradients(engine.module))


def plain_outcome(
    recipe: Recipe, rows: Rows, trained: dict[str, torch.Tensor], config: LoraConfig | None
) -> Outcome:
    """Loss and gradient by plain transformers and PEFT, one document at a time without padding.

    Args:
        trained: values of the trained parameters by name, copied into the plain model.
        config: PEFT's config, as training saves it with the adapter.
    """
    network = _plain(recipe, trained, config)
    network.train()
    picked_rows = range(min(ROWS, len(rows)))
    numbers = [int(number) for index in picked_rows for number in rows.numbers(index)]
    picked = [rows.documents.document(number) for number in numbers]
    terms = sum(int(is_trained[1:].sum()) for _, is_trained in picked)
    total = 0.0
    for number, (ids, is_trained) in zip(numbers, picked, strict=True):
        seen, images = rows.image_inputs, rows.documents.images_of(number)
        more = {} if seen is None else seen.of_row(ids.tolist(), images)
        more = {name: value.to(network.device) for name, value in more.items()}
        given = torch.from_numpy(ids.astype(np.int64))[None].to(network.device)
        labels = torch.from_numpy(np.where(is_trained, ids, -100).astype(np.int64))[1:]
        logits = (
            network(input_ids=given, **more, use_cache=False).logits[0, :-1].float()
        )  # (tokens - 1, vocabulary)
        loss = F.cross_entropy(logits, labels.to(logits.device), reduction="sum") / terms
        loss.backward()
        total += loss.item()
    return Outcome(total, _gradients(network))


def _plain(recipe: Recipe, trained: dict[str, torch.Tensor], config: LoraConfig | None) -> Any:
    stored = quantization_config(recipe.model.quantization, torch.float32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base: Any = auto_class(recipe.head, recipe.model.reads).from_pretrained(
        recipe.model.name,
        dtype=torch.float32,
        trust_remote_code=recipe.model.trust_remote_code,
        quantization_config=stored,
        device_map={"": device},
    )
    keep_unpacked(base)
    if config is None:
        for name, parameter in base.named_parameters():
            parameter.requires_grad_(name in trained)
        return base
    network = get_peft_model(base, copy.deepcopy(config))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name in trained:
                parameter.copy_(trained[name])
    return network


def _gradients(network: nn.Module) -> dict[str, torch.Tensor]:
    named = network.named_parameters()
    return {name: p.grad.detach().double().cpu() for name, p in named if p.grad is not None}


def values(network: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every trained parameter by name."""
    named = network.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}
