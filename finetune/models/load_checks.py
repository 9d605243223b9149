"""Check a loaded model: missing weights, vocabulary, context length."""

import contextlib
import re
from collections.abc import Generator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from finetune.distributed.parameters import unsharded_shape
from finetune.errors import FinetuneError, first_line

ON_CPU = "DefaultCPUAllocator"
"""Text in PyTorch's error when host memory runs out."""
MOST_NAMED = 5
"""Maximum number of tensors that a message names."""


def unfilled(info: dict[str, Any]) -> list[str]:
    """Problems with tensors that transformers 5.23 initializes randomly, with only a warning.

    Args:
        info: Loading info of `from_pretrained(..., output_loading_info=True)`. Tied weights and
            computed buffers are not among its missing keys.
    """
    problems = [f"the tensor {key} is missing" for key in sorted(info["missing_keys"])]
    for key, stored, wanted in sorted(info["mismatched_keys"]):
        problems.append(f"the tensor {key} is {list(stored)} instead of {list(wanted)}")
    return first_of(problems)


PACKED = re.compile(
    r"(weight_scale|_scale_inv|input_scale|weight_packed|weight_zero_point|qweight|qzeros|g_idx"
    r"|\.scales|\.SCB|absmax|quant_map|quant_state|_blocks|_scales|weight_format)"
)
"""Names of tensors that belong to quantized weights, whose codes are useless without them."""


def unread(info: dict[str, Any], model: nn.Module) -> tuple[list[str], list[str]]:
    """Tensors of the files that no module uses, as (problems, notes).

    A tensor is a problem if the model is wrong without it: if it is part of a quantized weight, of
    a module that the model has, or of a layer beyond those in config.json. Others, such as a vision
    tower or a multi-token prediction head, are notes.
    """
    config: Any = model.config
    fields = config.get_text_config().to_dict()
    further = {  # layers for multi-token prediction, which transformers does not build
        str(fields.get("num_hidden_layers", 0) + ahead)
        for ahead in range(fields.get("num_nextn_predict_layers") or 0)
    }
    modules = {name for name, _ in model.named_modules()}
    lists = {name for name, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    wrong: list[str] = []
    left: dict[str, int] = {}
    for key in sorted(info["unexpected_keys"]):
        owner = key.rpartition(".")[0]
        layer = re.match(r"(.*?)\.(\d+)\.", key)
        if PACKED.search(key):
            wrong.append(f"no module takes the tensor {key}: the weights are quantised")
        elif owner in modules or (layer and layer[1] in lists and layer[2] not in further):
            wrong.append(f"no module takes the tensor {key}")
        else:
            first = ".".join(key.split(".")[:2])
            left[first] = left.get(first, 0) + 1
    notes = [f"model.name: {count} tensors of {name} are not used" for name, count in left.items()]
    return first_of(wrong), first_of(notes)


def other_shapes(error: RuntimeError) -> list[str]:
    """Shape problems in an error of ZeRO-3's loading; empty for other errors."""
    lines = (line.strip() for line in str(error).splitlines())
    return first_of([line.rstrip(".") for line in lines if line.startswith("size mismatch for ")])


def first_of(problems: list[str]) -> list[str]:
    """The first problems, and the number of the others."""
    left = len(problems) - MOST_NAMED
    return [*problems[:MOST_NAMED], *([f"and {left} more like these"] if left > 0 else [])]


def context_length(config: PreTrainedConfig) -> int | None:
    """Maximum tokens of a row according to a configuration; None if it names no limit."""
    fields = config.get_text_config().to_dict()
    return fields.get("max_position_embeddings") or fields.get("n_positions")


def token_rows(model: nn.Module) -> int | None:
    """Rows of the token embedding, also inside an adapter's wrapper; None if there is none."""
    return min((table.num_embeddings for table in _token_tables(model)), default=None)


def has_learned_positions(model: nn.Module, context: int) -> bool:
    """Whether positions are stored in a table that ends at the context length.

    OPT and similar models have two rows before the first position; GPT-J and CodeGen store
    precomputed angles in a buffer of that length (transformers 5.23).
    """
    tokens = _token_tables(model)
    tables = (each for each in model.modules() if isinstance(each, nn.Embedding))
    learned = any(
        table.num_embeddings in (context, context + 2) for table in tables if table not in tokens
    )
    return learned or any(name.endswith("embed_positions") for name, _ in model.named_buffers())


def _token_tables(model: nn.Module) -> list[nn.Embedding]:
    table: nn.Module = model.get_input_embeddings()
    return [each for each in table.modules() if isinstance(each, nn.Embedding)]


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """A parameter's shape before ZeRO-3 partitioned it or bitsandbytes packed it in four bits."""
    state: Any = getattr(parameter, "quant_state", None)
    if state is not None:
        return state.shape
    return unsharded_shape(parameter)


@contextlib.contextmanager
def within_memory(what: str) -> Generator[None]:
    """Turn out-of-memory errors into an error of one line.

    Args:
        what: The model or file that is loaded.

    Raises:
        FinetuneError: memory ran out; with the first line of the error.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise FinetuneError(
            f"{what}: not enough memory to load it ({first_line(error)}); free memory, or use a "
            "machine with more"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host ran out of memory for tensors."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and ON_CPU in str(error)


def plain_name(name: str) -> str:
    """A tensor's name in the base, without the wrappers of adapters and engines."""
    name = re.sub(r"^(module\.)?(base_model\.model\.)?", "", name)
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.\w+)(?=\.)", "", name)
