"""Export a full model: the trained weights, or an adapter merged into its base."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedModel

from finetune.checkpoints.pretrained import write_settings
from finetune.errors import FinetuneError, TrainingFailure, refuse
from finetune.exporters.base_tensors import Tensors, open_trained, rounded
from finetune.exporters.source import Source
from finetune.exporters.stream import Weights
from finetune.inference.load import tensor_shapes
from finetune.kernels import cpu
from finetune.process.progress import progress
from finetune.reports.card import Kind


def check(source: Source) -> None:
    """Reject a run that did not train all weights.

    Raises:
        FinetuneError: the run trained an adapter.
    """
    if source.adapter is not None:
        raise FinetuneError(
            "--format model: the run trained an adapter; export it as 'adapter' or 'merged'"
        )


def check_merged(source: Source) -> None:
    """Reject a run that cannot be merged, without reading the weights of the base.

    Raises:
        FinetuneError: the run has no adapter, the base is not the one of the training, or the
            adapter does not fit it.
    """
    _ = source.merge


def check_whole(source: Source) -> None:
    """Reject a run that `write_whole` cannot write.

    Raises:
        FinetuneError: as `check_merged`.
    """
    if source.adapter is not None:
        check_merged(source)


def write(source: Source, folder: Path) -> Kind:
    """Write a model whose weights were all trained.

    Raises:
        FinetuneError: the run trained an adapter.
        TrainingFailure: tensors are missing from the files.
    """
    check(source)
    base = open_trained(source.recipe, source.checkpoint / "model")
    dtype = source.result_dtype
    known = base.network.state_dict()
    like = {name: known[name] for unit in base.units for name in unit}
    tensors = (rounded(base.network, base.read(unit), dtype) for unit in base.units)
    _write_weights(source, folder, rounded(base.network, like, dtype), tensors)
    _write_rest(source, folder, base.network)
    return "model"


def write_merged(source: Source, folder: Path) -> Kind:
    """Write base and adapter as one model, merged in fp32 and rounded once.

    Raises:
        FinetuneError: as `check_merged`.
        TrainingFailure: a merged weight is not finite, or tensors are missing from the files.
    """
    merge = source.merge
    _write_weights(source, folder, merge.skeleton(), merge.tensors())
    _write_rest(source, folder, merge.network())
    return "merged"


def write_whole(source: Source, folder: Path) -> Kind:
    """Write the full model, after merging the adapter if there is one."""
    return write(source, folder) if source.adapter is None else write_merged(source, folder)


def _write_weights(
    source: Source, folder: Path, skeleton: Tensors, tensors: Iterable[Tensors]
) -> None:
    weights = Weights(folder, skeleton, source.shard_size)
    with contextlib.closing(weights), progress("writing", len(skeleton), "weights") as count:
        for each in tensors:
            weights.write(each)
            count(len(each))
            del each
            cpu.return_free_memory()
    weights.finish()
    _refuse_lost(folder, skeleton)


def _write_rest(source: Source, folder: Path, network: PreTrainedModel) -> None:
    network.generation_config = source.generation
    write_settings(network, folder, source.result_dtype)


def _refuse_lost(folder: Path, skeleton: Tensors) -> None:
    """Check in the file headers that every tensor is stored with its shape, and none is empty."""
    written = {
        name: shape
        for path in folder.glob("model*.safetensors")
        for name, shape in tensor_shapes(path).items()
    }
    problems = [
        f"{folder}: {name} is {written.get(name, 'missing')} instead of {list(tensor.shape)}"
        for name, tensor in skeleton.items()
        if written.get(name) != list(tensor.shape) or not tensor.numel()
    ]
    refuse(problems, TrainingFailure)
