"""Check that a model is a valid causal language model: causal attention, finite weights.

Each check is a function of a model that can be used on its own. The check of gradients is
`finetune.models.reachable.unreached`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from finetune.data.rows.collate import Boundaries, MicroBatch
from finetune.distributed.heartbeat import is_transport
from finetune.errors import FinetuneError
from finetune.kernels.quantised import Linear4bit, Linear8bitLt
from finetune.models.load_checks import plain_name
from finetune.models.reachable import logits_of

PREFIX, CHANGED, VARIANTS = 5, 3, 4
"""Number of tokens that rows share, of tokens after them that differ, and of rows to compare."""
LEAST = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}
"""Minimum difference of logits, relative to their spread, that is a leak rather than rounding."""
CROSS_ATTENTION = {"encoder_attn", "crossattention", "cross_attn", "EncDecAttention"}
"""Names in transformers of attention to the outputs of an encoder."""
DECODER_ONLY = "name a decoder-only language model (Llama, Qwen, Mistral, Gemma, ...)"
"""Advice for a model of another kind."""
TEACHER = "teacher."
"""Beginning of the names of a teacher's weights, which is a submodule of its student."""
MOST_NAMED = 5
"""Maximum number of tensors that a message names."""


@dataclasses.dataclass(frozen=True)
class Causality:
    """Result of a test forward pass over a few tokens."""

    finite: bool
    """Whether all logits are finite."""
    leak: float
    """Change of the logits of earlier tokens by later ones, relative to their spread; 0 if the
    model is causal."""


def described(leak: float) -> str:
    """The error message for a leak."""
    return (
        "its attention is not causal: later tokens change the logits of earlier ones (by "
        f"{leak:.2g} of their spread), so that it would learn to predict tokens that it sees"
    )


@torch.no_grad()
def causality(
    model: nn.Module,
    vocabulary: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    side_by_side: bool = False,
    scores: bool = False,
) -> Causality:
    """Measure whether later tokens change the logits of earlier ones.

    Rows begin with the same tokens and end with different ones; logits of the common tokens must be
    equal. The smallest difference of all pairs of rows counts: rounding, or an expert that is
    chosen because of it, changes some rows, but a leak changes all. Works under any engine if every
    rank takes part.

    Args:
        model: Plain or wrapped model, which is left in eval mode.
        vocabulary: Rows of its token embedding.
        device: Device of the inputs.
        dtype: Compute data type.
        side_by_side: Concatenate the rows, and pass their boundaries to the attention.
        scores: Whether `finetune.kernels.score_head.give_scores` was applied to the model.
    """
    model.eval()
    ids = _rows(vocabulary).to(device)
    given = _concatenated(ids) if side_by_side else {"input_ids": ids}
    if scores:
        places = torch.arange(ids.numel(), device=device)
        logits = model(**given, use_cache=False, places=places)
    else:
        logits = logits_of(model(**given, use_cache=False)).float()
    logits = logits.view(*ids.shape, -1)  # (rows, tokens, vocabulary or labels)
    if not bool(torch.isfinite(logits).all()):
        return Causality(finite=False, leak=0.0)
    first, copy = logits[:VARIANTS], logits[VARIANTS]
    pairs = [(a, b) for a in range(VARIANTS) for b in range(a)]
    apart = torch.stack([(first[a] - first[b]).abs().mean(-1) for a, b in pairs])  # (pairs, tokens)
    spread = first.std() if scores else first.std(-1).mean()
    leak = float(apart[:, :PREFIX].amin(0).max() / spread)
    noise = float((copy - first[0]).abs().mean(-1).max() / spread)
    least = max(LEAST.get(dtype, LEAST[torch.bfloat16]), 3 * noise)
    return Causality(finite=True, leak=leak if leak > least else 0.0)


def _rows(vocabulary: int) -> torch.Tensor:
    """Rows that begin with the same tokens, and a copy of the first row.  # (5, 8) int64

    The first and the last ids of the vocabulary are avoided: these are mostly special tokens.
    """
    generator = torch.Generator().manual_seed(1)
    low = vocabulary // 8
    high = max(low + 1, vocabulary - vocabulary // 4)
    ids = torch.randint(low, high, (1, PREFIX + CHANGED), generator=generator)
    ids = ids.repeat(VARIANTS + 1, 1)
    for row in range(1, VARIANTS):
        ids[row, PREFIX:] = torch.randint(low, high, (CHANGED,), generator=generator)
    return ids


def _concatenated(ids: torch.Tensor) -> dict[str, Any]:
    """Model inputs of a micro-batch in which rows of one length are concatenated."""
    rows, tokens = ids.shape
    numbers = tuple(range(0, ids.numel() + 1, tokens))
    ends = torch.tensor(numbers, dtype=torch.int32, device=ids.device)
    positions = torch.arange(tokens, device=ids.device).repeat(rows)[None]
    flat = ids.view(1, -1)
    boundaries = Boundaries(positions, ends, tokens, numbers)
    return MicroBatch(flat, flat, None, rows, 0, ids.numel(), boundaries).inputs()


def cross_attention(model: nn.Module) -> str | None:
    """A problem if every block of a model attends to an encoder; None otherwise.

    A model for images and text has such blocks only among others, and skips them for a text.
    """
    for name, blocks in model.named_modules():
        if isinstance(blocks, nn.ModuleList) and len(blocks):
            inner = [{child for child, _ in block.named_children()} for block in blocks]
            found = [sorted(children & CROSS_ATTENTION) for children in inner]
            if all(found):
                return (
                    "it is the decoder of an encoder-decoder: every block has cross attention "
                    f"({plain_name(name)}.N.{found[0][0]}) to an encoder's output, which a text "
                    "alone does not have"
                )
    return None


def not_finite(model: nn.Module) -> list[str]:
    """Names in the base of weights with NaN or infinity, in this rank's shard of a model.

    Persistent buffers are checked for NaN only, because a mask may contain infinities.
    """
    found: list[str] = []
    packed = {id(each.weight) for each in model.modules() if isinstance(each, Linear4bit)}
    for name, parameter in model.named_parameters():
        if id(parameter) in packed:
            continue  # two weights per byte, which may look like any number: check its scales
        values = getattr(parameter, "ds_tensor", parameter.detach())  # ds_tensor: ZeRO-3 only
        if not is_finite(values):
            found.append(plain_name(name))
    for place, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=place, recurse=False):
            kept = name.rsplit(".", 1)[-1] not in module._non_persistent_buffers_set
            if kept and buffer.is_floating_point() and bool(buffer.isnan().any()):
                found.append(plain_name(name))
        if not all(map(is_finite, _scales(module))):
            found.append(plain_name(f"{place}.weight"))
    return list(dict.fromkeys(found))


def _scales(layer: nn.Module) -> Iterator[torch.Tensor]:
    """Scales of a quantized weight, which preserve values that are not finite."""
    if isinstance(layer, Linear4bit):
        state: Any = getattr(layer.weight, "quant_state", None) or layer.quant_state
        inner = getattr(state, "state2", None)
        given = [getattr(state, "absmax", None), getattr(state, "offset", None)]
        yield from (each for each in [*given, getattr(inner, "absmax", None)] if each is not None)
    if isinstance(layer, Linear8bitLt):
        state = layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB
        yield from [state] if state is not None else []


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, judged by the minimum and the maximum."""
    here = values.to_local() if isinstance(values, DTensor) else values
    if not here.is_floating_point() or not here.numel() or here.dtype.itemsize == 1:
        return True
    least, greatest = torch.aminmax(here.detach())
    return bool(torch.isfinite(least) & torch.isfinite(greatest))


def blame(names: list[str], base: str, teacher: str | None = None) -> str:
    """The error message for weights that are not finite: the teacher's, if there are such."""
    given = [each.removeprefix(TEACHER) for each in names if each.startswith(TEACHER)]
    field, names, base = ("teacher", given, str(teacher)) if given else ("model", names, base)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    tensors, contain = ("tensor", "contains") if len(names) == 1 else ("tensors", "contain")
    return (
        f"{field}.name: {len(names)} {tensors} of '{base}' {contain} NaN or infinity: "
        f"{', '.join(names[:MOST_NAMED])}{more}; name a folder whose weights are intact"
    )


def hold_in_fp32(model: nn.Module) -> None:
    """Convert all trained parameters to fp32, because small updates would be lost in bf16.

    PEFT 0.21 converts LoRA's matrices, but not the copies of `modules_to_save`. Outputs keep their
    type: those of linear layers by autocast, those of embeddings and norms by a cast of the output,
    where sharding engines cast the weights.
    """
    narrow = {
        parameter: parameter.dtype
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.dtype != torch.float32
    }
    for parameter in narrow:
        parameter.data = parameter.data.float()
    for module in model.modules():
        own = [narrow[each] for each in module.parameters(recurse=False) if each in narrow]
        if own and not isinstance(module, nn.Linear):
            module.register_forward_hook(functools.partial(_cast, own[0]))


def _cast(dtype: torch.dtype, _: nn.Module, inputs: Any, output: Any) -> Any:
    return output.to(dtype) if isinstance(output, torch.Tensor) else output


@contextlib.contextmanager
def explained(field: str, doing: str, instead: str) -> Generator[None]:
    """Turn errors of libraries into messages about a field of the recipe.

    transformers and PEFT raise whatever the code of an architecture happens to raise: KeyError,
    AttributeError, AssertionError. Errors that are not about the model (memory, a lost rank) are
    raised unchanged.

    Args:
        field: Field of the recipe.
        doing: What failed.
        instead: What to do instead.
    """
    try:
        yield
    except (FinetuneError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        if is_transport(error) or "memory" in first:  # on a CPU a plain RuntimeError
            raise
        raise FinetuneError(
            f"{field}: {doing} ({type(error).__name__}: {first}); {instead}"
        ) from error
