"""Shell commands that serve an export."""

from pathlib import Path

from finetune.exporters import vllm
from finetune.exporters.source import Source, is_loadable
from finetune.inference.load import ADAPTER_WEIGHTS, tensor_shapes, trained_dtype
from finetune.reports.card import Kind


def serve_commands(source: Source, folder: Path, kind: Kind) -> list[str]:
    """Shell commands to run in the folder of an export; none for a model that generates no text."""
    if kind == "gguf":
        (weights,) = folder.glob("*.gguf")
        made = ["ollama create tuned -f Modelfile"] if (folder / "Modelfile").is_file() else []
        return [*made, f"llama-server -m {weights.name} --jinja"]
    if source.recipe.scores is not None or not is_loadable(folder):
        return []
    own, dtype = "finetune serve .", trained_dtype(source.run)
    if kind == "nf4":
        return [own, "vllm serve ."]
    if kind != "adapter":
        return [own, " ".join(["vllm serve .", *vllm.dtype_words(dtype)])]
    config = vllm.read_config(folder)
    if vllm.problems(config, tensor_shapes(folder / ADAPTER_WEIGHTS)):
        return [own]
    base, _ = source.base_name
    named = "BASE" if Path(base).is_absolute() else base
    return [own, vllm.command(folder, named, config, dtype)]
