"""Shell commands that serve an export."""

from pathlib import Path

from finetune.exporters import vllm
from finetune.exporters.source import Source, is_loadable
from finetune.inference.load import ADAPTER_WEIGHTS, tensor_shapes
from finetune.reports.card import Kind


def serve_commands(source: Source, folder: Path, kind: Kind) -> list[str]:
    """Shell commands to run in the folder of an export; none for a model that generates no text."""
    if kind == "gguf":
        (weights,) = folder.glob("*.gguf")
        made = ["ollama create tuned -f Modelfile"] if (folder / "Modelfile").is_file() else []
        return [*made, f"llama-server -m {weights.name} --jinja"]
    if source.recipe.scores is not None or not is_loadable(folder):
        return []
    own = "finetune serve ."
    if kind != "adapter":
        return [own, "vllm serve ."]
    config = vllm.read_config(folder)
    if vllm.problems(config, tensor_shapes(folder / ADAPTER_WEIGHTS)):
        return [own]
    base, _ = source.base_name
    named = "BASE" if Path(base).is_absolute() else base
    return [own, vllm.command(folder, named, config)]
