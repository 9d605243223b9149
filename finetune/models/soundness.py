"""Check a model as a causal language model: its attention, and its weights.

Each check is a plain function of a model, for any code that has one. The check of gradients is
`finetune.models.meta.unreached`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from finetune.data.collate import Boundaries, MicroBatch
from finetune.distributed.heartbeat import is_transport
from finetune.errors import FinetuneError
from finetune.kernels.quantised import Linear4bit, Linear8bitLt
from finetune.models.gradients import plain_name
from finetune.models.meta import logits_of

PREFIX, CHANGED, VARIANTS = 5, 3, 4
"""Tokens that rows share, tokens after them that differ, and how many rows are compared."""
LEAST = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}
"""Difference of logits, relative to their spread, that is a leak and not rounding."""
CROSS_ATTENTION = {"encoder_attn", "crossattention", "cross_attn", "EncDecAttention"}
"""Names that transformers gives to attention to the outputs of an encoder."""
DECODER_ONLY = "name a decoder-only language model (Llama, Qwen, Mistral, Gemma, ...)"
"""What to do instead with a model of another kind."""
MOST_NAMED = 5
"""Tensors that a message names."""


@dataclasses.dataclass(frozen=True)
class Causality:
    """What a forward pass of a few tokens shows."""

    finite: bool
    """Whether every logit is a finite number."""
    leak: float
    """How far later tokens move the logits of earlier ones, relative to their spread; 0 where they
    do not."""


def noncausal(
    model: nn.Module,
    vocabulary: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> str | None:
    """Why a model cannot be trained as a causal one, None where it can: see `causality`."""
    blocks = cross_attention(model)
    if blocks is not None:
        return blocks
    leak = causality(model, vocabulary, device, dtype).leak
    return described(leak) if leak else None


def described(leak: float) -> str:
    """A leak as a problem in words."""
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
    """Measure whether later tokens move the logits of earlier ones.

    Rows begin alike and end differently. What precedes the difference may not depend on it: of the
    differences between each two rows the smallest counts, because rounding, or an expert that is
    chosen by it, moves some rows, and a leak moves each. Works under any engine, where every rank
    takes part.

    Args:
        model: plain or wrapped; left in evaluation mode.
        vocabulary: rows of its table of tokens.
        device: where it computes.
        dtype: what it computes in.
        side_by_side: whether its attention is told where rows that are side by side end.
        scores: whether it is one that `finetune.kernels.scores.give_scores` was applied to.
    """
    model.eval()
    ids = _rows(vocabulary).to(device)
    given = _laid(ids) if side_by_side else {"input_ids": ids}
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
    """Rows of ordinary tokens that begin alike, and a copy of the first.  # (5, 8) int64

    Ids of special tokens are mostly the first and the last ones.
    """
    generator = torch.Generator().manual_seed(1)
    low = vocabulary // 8
    high = max(low + 1, vocabulary - vocabulary // 4)
    ids = torch.randint(low, high, (1, PREFIX + CHANGED), generator=generator)
    ids = ids.repeat(VARIANTS + 1, 1)
    for row in range(1, VARIANTS):
        ids[row, PREFIX:] = torch.randint(low, high, (CHANGED,), generator=generator)
    return ids


def _laid(ids: torch.Tensor) -> dict[str, Any]:
    """Rows of one length side by side, as a micro-batch hands them to a model."""
    rows, tokens = ids.shape
    numbers = tuple(range(0, ids.numel() + 1, tokens))
    ends = torch.tensor(numbers, dtype=torch.int32, device=ids.device)
    positions = torch.arange(tokens, device=ids.device).repeat(rows)[None]
    flat = ids.view(1, -1)
    boundaries = Boundaries(positions, ends, tokens, numbers)
    return MicroBatch(flat, flat, None, rows, 0, ids.numel(), boundaries).inputs()


def cross_attention(model: nn.Module) -> str | None:
    """Why a model is the decoder of an encoder-decoder: each of its blocks attends to an encoder.

    A model for images and text has a few such blocks among others, which a text passes by.
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
    """Weights of this rank's share of a model that hold NaN or infinity, by name in the base.

    Persistent buffers count where they hold NaN: a mask may be made of infinities.
    """
    found: list[str] = []
    packed = {id(each.weight) for each in model.modules() if isinstance(each, Linear4bit)}
    for name, parameter in model.named_parameters():
        if id(parameter) in packed:
            continue  # two weights a byte, which may look like any number: its scales are read
        values = getattr(parameter, "ds_tensor", parameter.detach())  # ds_tensor: ZeRO-3 only
        if not _is_finite(values):
            found.append(plain_name(name))
    for place, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=place, recurse=False):
            kept = name.rsplit(".", 1)[-1] not in module._non_persistent_buffers_set
            if kept and buffer.is_floating_point() and bool(buffer.isnan().any()):
                found.append(plain_name(name))
        if not all(map(_is_finite, _scales(module))):
            found.append(plain_name(f"{place}.weight"))
    return list(dict.fromkeys(found))


def _scales(layer: nn.Module) -> Iterator[torch.Tensor]:
    """What a quantised weight is multiplied by: there a value that is not finite is kept."""
    if isinstance(layer, Linear4bit):
        state: Any = getattr(layer.weight, "quant_state", None) or layer.quant_state
        inner = getattr(state, "state2", None)
        given = [getattr(state, "absmax", None), getattr(state, "offset", None)]
        yield from (each for each in [*given, getattr(inner, "absmax", None)] if each is not None)
    if isinstance(layer, Linear8bitLt):
        state = layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB
        yield from [state] if state is not None else []


def _is_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite: the least and the greatest show it."""
    here = values.to_local() if isinstance(values, DTensor) else values
    if not here.is_floating_point() or not here.numel() or here.dtype.itemsize == 1:
        return True
    least, greatest = torch.aminmax(here.detach())
    return bool(torch.isfinite(least) & torch.isfinite(greatest))


def blame(names: list[str], base: str) -> str:
    """The problem of weights that are not finite."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    tensors = "tensor" if len(names) == 1 else "tensors"
    return (
        f"model.name: {len(names)} {tensors} of '{base}' hold NaN or infinity: "
        f"{', '.join(names[:MOST_NAMED])}{more}; name a folder whose weights are intact"
    )


def hold_in_fp32(model: nn.Module) -> None:
    """Hold all that is trained in fp32, whose updates in bf16 would be rounded away.

    PEFT 0.21 casts the matrices of LoRA, not the copies that `modules_to_save` makes. What they
    compute keeps its type: a linear layer under autocast by itself, an embedding or a norm because
    its output is cast, as every engine that shards casts their weights.
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
    """Inside, an error of a library becomes a message about a field of the recipe.

    transformers and PEFT raise what the code of an architecture happens to raise: KeyError,
    AttributeError, AssertionError. What is not about the model (memory, a lost rank) is raised on.

    Args:
        field: of the recipe.
        doing: what failed.
        instead: what to do.
    """
    try:
        yield
    except (FinetuneError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        if is_transport(error) or "memory" in first:  # a CPU's is a bare RuntimeError
            raise
        raise FinetuneError(
            f"{field}: {doing} ({type(error).__name__}: {first}); {instead}"
        ) from error
