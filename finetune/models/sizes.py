"""Count the parameters of a model over all pipeline stages."""

from torch import nn

from finetune.checkpoints.pretrained import is_of_teacher
from finetune.distributed.base import Engine
from finetune.distributed.layers import complete
from finetune.distributed.parameters import unsharded_numel
from finetune.models.load_checks import full_shape


def counts(model: nn.Module) -> tuple[int, int]:
    """Number of trainable and of all parameters; packed 4-bit weights count unpacked."""
    trained = total = 0
    for name, parameter in complete(model).named_parameters():
        elements = 0 if is_of_teacher(name) else full_shape(parameter).numel()
        total += elements
        trained += elements if parameter.requires_grad else 0
    return trained, total


def stored(engine: Engine, model: nn.Module) -> dict[str, int]:
    """Element counts of the unsharded model; packed weights count as stored.

    A teacher inside the model is included, because each process stores its share of it. `small`
    counts tensors of at most 10 x hidden size, which ZeRO-3 does not partition.
    """
    elsewhere = engine.counted_elsewhere(model)
    here = [p for p in model.parameters() if id(p) not in elsewhere]
    sizes = [(unsharded_numel(p), p.requires_grad) for p in here]
    limit = 10 * model.config.get_text_config().hidden_size
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {id(p): p for end in ends if end is not None for p in end.parameters()}
    counts = [
        sum(unsharded_numel(p) for p in tables.values() if id(p) not in elsewhere),
        sum(size for size, _ in sizes),
        sum(size for size, trained in sizes if trained),
        sum(size for size, _ in sizes if size <= limit),
    ]
    names = ("tables", "parameters", "trained", "small")
    return dict(zip(names, engine.over_stages(counts), strict=True))
