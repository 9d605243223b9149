"""Start vLLM or llama.cpp as the server, with the options that an export needs."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from finetune.errors import FinetuneError, refuse
from finetune.exporters import vllm
from finetune.exporters.export import MARKER
from finetune.inference.load import ADAPTER_WEIGHTS, adapter_config, tensor_shapes, trained_dtype
from finetune.runs.run import Run, of_record


def start(engine: str, folder: Path, name: str, host: str, port: int, key: str | None) -> NoReturn:
    """Replace this process by a `vllm` or `llama.cpp` server.

    Args:
        engine: Name in `ENGINES`.
        folder: Folder of an export, or a run, whose `final/` is served.
        name: Name of the model in requests.
        host: Address to listen on.
        port: Port to listen on.
        key: API key that clients must send.

    Raises:
        FinetuneError: the engine is not installed, or does not support the model.
    """
    chosen = folder / "final" if (folder / "recipe.json").is_file() else folder
    words = ENGINES[engine](chosen, name, host, port)
    if shutil.which(words[0]) is None:
        raise FinetuneError(
            f"--engine {engine}: there is no {words[0]} on PATH; install it, or run where it is: "
            + " ".join(words)
        )
    keys = {"VLLM_API_KEY": key, "LLAMA_API_KEY": key} if key else {}
    os.execvpe(words[0], words, {**os.environ, **keys})


def vllm_words(folder: Path, name: str, host: str, port: int) -> list[str]:
    """The command of vLLM for an adapter with its base, or for a full model."""
    served = [*_dtype_words(folder), "--host", host, "--port", str(port)]
    if not (folder / "adapter_config.json").is_file():
        if not (folder / "config.json").is_file():
            raise FinetuneError(f"{folder}: neither a model (config.json) nor an adapter")
        return ["vllm", "serve", str(folder), "--served-model-name", name, *served]
    config = adapter_config(folder).to_dict()
    reasons = vllm.problems(config, tensor_shapes(folder / ADAPTER_WEIGHTS))
    refuse(f"{folder}: {each}; export it as merged" for each in reasons)
    base = str(config["base_model_name_or_path"])
    template = folder / "chat_template.jinja"
    chosen = ["--chat-template", str(template)] if template.is_file() else []
    return [
        "vllm", "serve", base, "--tokenizer", str(folder), "--served-model-name", f"{name}-base",
        "--enable-lora", "--max-lora-rank", str(vllm.served_rank(config)),
        "--lora-modules", f"{name}={folder}", *chosen, *vllm.image_words(folder), *served,
    ]  # fmt: skip


def _dtype_words(folder: Path) -> list[str]:
    """Options for the compute data type of the training, if the folder's record has it."""
    if (folder.parent / "recipe.json").is_file():
        return vllm.dtype_words(trained_dtype(Run(folder.parent)))
    if not (record := folder / MARKER).is_file():
        return []
    with of_record(record):
        about = json.loads(record.read_text(encoding="utf-8"))
        name = None if about["kind"] == "nf4" else about.get("trained_dtype")
        return [] if name is None else ["--dtype", str(name)]


def llama_words(folder: Path, name: str, host: str, port: int) -> list[str]:
    """The command of llama.cpp's server for the only GGUF file of a folder."""
    found = [folder] if folder.suffix == ".gguf" else sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise FinetuneError(
            f"{folder}: holds {len(found)} GGUF files, expected one; write it with `finetune "
            "export RUN --to FOLDER --format gguf`"
        )
    return [
        "llama-server", "-m", str(found[0]), "--alias", name, "--jinja", "--host", host,
        "--port", str(port),
    ]  # fmt: skip


ENGINES: Mapping[str, Callable[[Path, str, str, int], list[str]]] = {
    "vllm": vllm_words,
    "llama.cpp": llama_words,
}
