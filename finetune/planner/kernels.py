"""Choose the kernel options of a run, each with the reason for a fallback."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

from finetune.backend import Backend
from finetune.planner.engines import TRAITS
from finetune.planner.families import family_of
from finetune.planner.shapes.config_files import fields_of
from finetune.planner.shapes.read_config import caps_scores
from finetune.recipe import Recipe

PARTS = {"norm": "norms", "activation": "feed-forward layers", "rotary": "attention layers"}

CHUNK_ENTRIES = 2**23
"""Logits per chunk of `kernels.head=chunked` on a CPU, 16 MiB in bf16: enough rows for a fast
matrix product."""
TILE_ENTRIES = 2**21
"""Logits per tile of the gradient computation on a CPU, 8 MiB in fp32: a tile fits in cache."""
GPU_CHUNK_ENTRIES = 2**27
"""Logits per chunk on a GPU, 256 MiB in bf16: 1,024 rows of 128,256 tokens. With few rows (fewer
than 300 on an H100) the product is bound by reading the head's matrix."""
TAUGHT_ENTRIES, GPU_TAUGHT_ENTRIES = 2**21, 2**24
"""Logits per chunk of the comparison with a teacher, which holds nine copies of them in fp32."""
GPU_TILE_ENTRIES = 2**25
"""Logits per tile of the gradient computation on a GPU, 128 MiB in fp32: enough to keep it busy;
copies of a complete chunk would take a GiB."""

SCORE_BLOCK = 384
"""Maximum number of queries whose scores CPU attention by matrix products holds at once."""
SCORE_ENTRIES = 2**23
"""Maximum number of elements in these scores, unless `SCORE_LEAST` queries need more."""
SCORE_LEAST = 64
"""Minimum number of queries per block."""

COMPILE_FROM = {"cpu": 10_000, "cuda": 3_000_000}
"""Tokens of a run from which `kernels.pointwise=auto` compiles. An estimate of where compiling
pays off: it takes two seconds of one core for a CPU, and about 20 with TorchInductor in torch
2.13. On an H100 it saves 5 microseconds per token of an 8B model with LoRA."""
POOL_FROM = COMPILE_FROM["cpu"]
"""Tokens of a run from which `kernels.allocator=auto` uses a pool, the same as for compiling."""

DeviceType = Literal["cpu", "cuda"]

POINTWISE_RULES: dict[str, dict[DeviceType, str]] = {
    "auto": {
        "cpu": f"compiled from {COMPILE_FROM['cpu']:,} tokens of the run on a CPU",
        "cuda": f"compiled from {COMPILE_FROM['cuda']:,} tokens of the run on a GPU",
    },
    "compiled": {
        "cpu": "by a C compiler on a CPU, eager without it",
        "cuda": "by TorchInductor on a GPU, eager without it",
    },
}
ALLOCATOR_RULES: dict[str, dict[DeviceType, str]] = {
    "auto": {"cpu": f"pooled from {POOL_FROM:,} tokens of the run on a CPU under Linux"},
    "pooled": {"cpu": "on a CPU under Linux, with a C++ compiler"},
}
BLOCKS_RULES: dict[DeviceType, str] = {
    "cpu": "each decoder block by TorchInductor, with a C++ compiler on a CPU",
    "cuda": "each decoder block by TorchInductor, with Triton on a GPU",
}
COMPILED = "kernels.blocks=compiled fuses it with the rest of a block"
"""Why the kernel options inside of blocks are not used."""
ONE_CALL: dict[DeviceType, tuple[str, str]] = {
    "cpu": ("a CPU with AMX or AVX-512 for bf16", "one pass where pointwise is compiled"),
    "cuda": ("a GPU from Ampere on", "one variable-length kernel"),
}
"""Devices that compute attention over concatenated documents in one call, and that call."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choice for one kernel option."""

    option: str
    """Field of `recipe.kernels`."""
    value: str
    """The chosen implementation."""
    fallback: str = ""
    """Why the value differs from the recipe's; empty if it does not."""
    rules: Mapping[DeviceType, str] = dataclasses.field(default_factory=dict[DeviceType, str])
    """How the run chooses on each type of device; empty if already decided."""

    def line(self) -> str:
        return f"kernels.{self.option}: {self.value}, because {self.fallback}"


def choices(recipe: Recipe, backend: Backend, kind: str | None) -> tuple[Choice, ...]:
    """Kernel options of a recipe on a backend; `kind` is the model type, None if not known yet."""
    adapted = (
        (_lora(recipe, backend),)
        if recipe.adapter is not None and recipe.adapter.kind == "lora"
        else ()
    )
    kernels = recipe.kernels
    whole = kernels.blocks == "compiled"
    return (
        _head(recipe, backend, kind),
        *adapted,
        *(_part(each, getattr(kernels, each), kind, whole) for each in PARTS),
        *([Choice("blocks", "compiled", rules=BLOCKS_RULES)] if whole else []),
        Choice("pointwise", kernels.pointwise, rules=POINTWISE_RULES.get(kernels.pointwise, {})),
        Choice("allocator", kernels.allocator, rules=ALLOCATOR_RULES.get(kernels.allocator, {})),
    )


def attention_rules(recipe: Recipe, backend: Backend) -> dict[DeviceType, str]:
    """How attention over concatenated documents is computed, by type of device."""
    fields = fields_of(recipe)
    traits = (
        bool(fields.get("attention_dropout")),
        caps_scores(fields),
        family_of(fields).sinks,
    )
    rules: dict[DeviceType, str] = {}
    for device, (where, call) in ONE_CALL.items():
        reasons = against_one_call(device, backend.precision, *traits)
        alone = f"each by itself, not in {call}: {' and '.join(reasons)}"
        rules[device] = f"on {where} {alone if reasons else f'in {call}'}"
    return rules


def against_one_call(
    device: str, precision: str, dropped: bool, capped: bool, sinks: bool = False
) -> list[str]:
    """Why attention over concatenated documents is not computed in one call on a device type.

    Args:
        device: `cpu` or `cuda`.
        precision: Precision of the run.
        dropped: Whether attention has dropout.
        capped: Whether the scores are soft-capped.
        sinks: Whether the scores of each query include a sink.
    """
    reasons = {
        "fp32 has none": precision == "fp32",
        "it does not drop weights": dropped,
        "it does not cap scores": capped and device == "cuda",
        "it has no sinks": sinks,
    }
    return [reason for reason, holds in reasons.items() if holds]


def _head(recipe: Recipe, backend: Backend, kind: str | None) -> Choice:
    if recipe.head.scored:
        return Choice("head", "scores")
    if recipe.kernels.head == "whole" and backend.axes.pipeline > 1:
        return Choice("head", "labelled", "stages pass on hidden states, not logits")
    if recipe.kernels.head == "whole":
        return Choice("head", "whole")
    if recipe.adapter is not None and _on_head(recipe.adapter.targets):
        return Choice("head", "whole", "the head has an adapter (adapter.targets)")
    if recipe.adapter is not None and recipe.adapter.trainable_token_indices:
        return Choice("head", "whole", "its rows are trained (adapter.trainable_token_indices)")
    if kind is not None and family_of(kind).logits is None:
        return Choice("head", "whole", f"the steps from head to loss of {kind} are not known here")
    if backend.axes.tensor > 1:
        return Choice("head", "labelled", f"{backend.name} divides the head over processes")
    if backend.axes.schedule == "ZBVZeroBubble" and backend.axes.pipeline > 1:
        return Choice("head", "labelled", "ZBVZeroBubble passes backwards through it twice")
    return Choice("head", "chunked")


def _on_head(targets: str | tuple[str, ...]) -> bool:
    """Whether PEFT adds an adapter to the head; it matches a string as a regular expression."""
    if not isinstance(targets, str):
        return any(target.split(".")[-1] == "lm_head" for target in targets)
    try:
        return re.fullmatch(targets, "lm_head") is not None
    except re.error:
        return False  # PEFT reports the error


def _part(option: str, asked: str, kind: str | None, compiled: bool) -> Choice:
    if asked == "fused" and compiled:
        return Choice(option, "plain", COMPILED)
    if asked == "fused" and option in family_of(kind).unfused:
        return Choice(option, "plain", f"the {PARTS[option]} of {kind} are not known here")
    return Choice(option, asked)


def _lora(recipe: Recipe, backend: Backend) -> Choice:
    adapter = recipe.adapter
    if adapter is None or recipe.kernels.lora == "separate":
        return Choice("lora", "separate")
    reasons = {
        "adapter.dropout masks each input separately": adapter.dropout > 0,
        "adapter.use_dora needs the norm of complete weights": adapter.use_dora,
        f"{backend.name} divides the products of a layer": backend.axes.tensor > 1,
        "model.quantization=int8 has its own products": recipe.model.quantization == "int8",
        f"{backend.name} gathers each module separately": TRAITS[backend.engine].for_own_module
        and backend.shard == "params",
    }
    reasons[COMPILED] = recipe.kernels.blocks == "compiled"
    found = [reason for reason, holds in reasons.items() if holds]
    return Choice("lora", "separate", " and ".join(found)) if found else Choice("lora", "grouped")


def model_type(recipe: Recipe) -> str | None:
    """The model type of a recipe; None if its config is not known."""
    return fields_of(recipe).get("model_type")


def score_block(heads: int, length: int) -> int:
    """Queries per block of attention by matrix products, for a document of `length` tokens."""
    return min(length, SCORE_BLOCK, max(SCORE_LEAST, SCORE_ENTRIES // (heads * length)))
