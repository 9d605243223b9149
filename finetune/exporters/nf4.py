"""Export the full model quantized to NF4, for transformers and vLLM."""

import tempfile
from pathlib import Path

import torch

from finetune.exporters import whole_model
from finetune.exporters.source import Source
from finetune.inference.load import load_weights
from finetune.reports.card import Kind


def write(source: Source, folder: Path) -> Kind:
    """Merge the adapter if there is one, and quantize with bitsandbytes.

    Raises:
        FinetuneError: the model cannot be merged or quantized.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".whole") as name:
        whole = Path(name)
        whole_model.write_whole(source, whole)
        dtype = source.dtype or torch.bfloat16
        quantised = load_weights(
            whole,
            dtype,
            trust_remote_code=source.recipe.model.trust_remote_code,
            quantization="nf4",
            reads=source.recipe.model.reads,
        )
        quantised.generation_config = source.generation
        quantised.config.use_cache = True
        quantised.save_pretrained(folder, max_shard_size=source.shard_size)
    return "nf4"
