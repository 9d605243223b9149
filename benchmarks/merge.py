"""Memory and time of a merge: `finetune export --merge` of a model, and a plan of a larger one."""

import dataclasses
import hashlib
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.record import ROOT, Result
from finetune import catalog
from finetune.checkpoints.pretrained import write_settings
from finetune.exporters import low_rank
from finetune.exporters.stream import Weights
from finetune.methods.sft import SFT
from finetune.quickstart.tokenizer import train_tokenizer
from finetune.recipe import LoRA, Model
from finetune.runs import units
from finetune.runs.manifest import FORMAT, sealed
from finetune.runs.run import Run, write_json

SHAPE = LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=16,
    num_key_value_heads=8, vocab_size=32_000, tie_word_embeddings=False,
)  # fmt: skip
"""1.64 billion parameters, 3.06 GiB in bf16."""
SHAPE_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128_256, tie_word_embeddings=False,
)  # fmt: skip
"""The shape of Llama-3.1-8B, 15 GiB in bf16: a run and its result need twice as much on disk."""
RANK, SHARD, DTYPE = 16, "500MB", torch.bfloat16
LARGE = "Llama-3-70B"
"""Folder of the configuration whose merge is only planned."""
POLL = 0.01
"""Seconds between two readings of a process's memory."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """Private memory of a merge with a plain LoRA on every linear layer, in bytes.

    The files of the base and of the adapter are mapped: their pages are shared with the page cache.
    """

    adapter: int
    """The adapter in fp32."""
    matrix: int
    """The largest merged matrix, and the two fp32 buffers in which its rows are summed."""

    @property
    def total(self) -> int:
        return self.adapter + self.matrix


def linear_layers(network: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that get an adapter, by name: all but the head."""
    named = network.named_modules()
    return {name: each for name, each in named if isinstance(each, nn.Linear) and name != "lm_head"}


def plan(network: nn.Module, r: int, dtype: torch.dtype) -> Planned:
    """Private memory of a merge, from the shapes of a model on the meta device."""
    shapes = [tuple(each.weight.shape) for each in linear_layers(network).values()]
    matrices = [
        rows * columns * dtype.itemsize + 2 * 4 * low_rank.piece_rows(rows, columns) * columns
        for rows, columns in shapes
    ]
    return Planned(sum(4 * r * (rows + columns) for rows, columns in shapes), max(matrices))


def measure(folder: Path, repeats: int, configs: Path | None, shape: LlamaConfig = SHAPE) -> Result:
    """Merge a model with random weights `repeats` times; plan a larger one from `configs`."""
    run, threads = write_run(folder, shape), os.environ.get("OMP_NUM_THREADS", os.cpu_count())
    network = _meta(shape)
    planned, files = plan(network, RANK, DTYPE), _bytes_of(network)
    idle = merge_command(run, folder / "out", only_import=True)
    found = [merge_command(run, folder / "out") for _ in range(repeats)]
    best = min(found, key=lambda each: each["wall_seconds"])
    most = max(each["private_bytes"] for each in found)
    own = most - idle["private_bytes"]
    parameters = sum(each.numel() for each in network.parameters())
    head = ["model", "files", "private memory", "of it the merge", "planned", "wall", "processor"]
    rows = [
        [
            f"{parameters / 1e9:.1f} billion parameters", units.size(files), units.size(most),
            units.size(own), units.size(planned.total), f"{best['wall_seconds']:.1f} s",
            f"{best['cpu_seconds']:.1f} s",
        ]
    ]  # fmt: skip
    values: dict[str, Any] = {
        "file_bytes": files, "merges": found, "imports": idle,
        "planned_bytes": dataclasses.asdict(planned),
    }  # fmt: skip
    remarks = list[str]()
    if configs is not None and (configs / LARGE).is_dir():
        large = _meta(AutoConfig.from_pretrained(configs / LARGE))
        wanted = plan(large, RANK, DTYPE)
        values["planned_large"] = {"name": LARGE, **dataclasses.asdict(wanted)}
        size = units.size(_bytes_of(large))
        rows.append([LARGE, size, "", "", units.size(wanted.total), "", ""])
        remarks.append(
            f"{LARGE} is planned, not run: {units.size(wanted.adapter)} for the adapter in fp32, "
            f"{units.size(wanted.matrix)} for the largest matrix; a shard of an export has 5 GB"
        )
    how = (
        f"`finetune export RUN --to DIR --merge --check-rows 0` of a Llama with random weights in "
        f"bf16 and a LoRA with r={RANK} on every linear layer, whose base has files of {SHARD}; "
        f"the best of {repeats}, OMP_NUM_THREADS={threads}. Private memory is the peak of RssAnon, "
        f"read every {1000 * POLL:.0f} ms; the merge has what exceeds the same process after "
        "its imports. The plan is the adapter in fp32, the largest merged matrix and two buffers."
    )
    return Result("Merging an adapter", how, values, [head, *rows], remarks)


def _meta(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=DTYPE)


def _bytes_of(network: nn.Module) -> int:
    return sum(each.nbytes for each in network.state_dict().values())


def write_run(folder: Path, shape: LlamaConfig = SHAPE) -> Run:
    """A run with one checkpoint: base, adapter, tokenizer and manifest, all with random numbers."""
    base, run = folder / "base", Run(folder / "run")
    base.mkdir(parents=True)
    network = _meta(shape)
    train_tokenizer(["a b"], 300, base)
    weights = Weights(base, network.state_dict(), SHARD)
    torch.manual_seed(0)
    for name, each in network.state_dict().items():
        weights.write({name: torch.empty_like(each, device="cpu").normal_(0, 0.02)})
    weights.close()
    weights.finish()
    write_settings(network, base, DTYPE)
    recipe = SFT(model=Model(name=str(base)), adapter=LoRA(r=RANK))
    write_json(run.recipe, catalog.to_fields(recipe))
    step = run.checkpoint(1)
    train_tokenizer(["a b"], 300, step / "tokenizer")
    adapter = step / "adapter"
    adapter.mkdir()
    layers = linear_layers(network)
    targets = sorted({name.rpartition(".")[2] for name in layers})
    LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=targets, task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
    ).save_pretrained(adapter)  # fmt: skip
    save_file(dict(_factors(layers)), adapter / "adapter_model.safetensors")
    paths = sorted(path for path in step.rglob("*") if path.is_file())
    files = {
        path.relative_to(step).as_posix(): {
            "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in paths
    }  # fmt: skip
    manifest = {
        "format": FORMAT, "step": 1, "progress": {"step": 1}, "backend": "single", "processes": 1,
        "shapes": {}, "scalars": {}, "files": files,
    }  # fmt: skip
    write_json(step / "manifest.json", sealed(manifest))
    return run


def _factors(layers: dict[str, nn.Linear]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, layer in layers.items():
        rows, columns = layer.weight.shape
        prefix = f"base_model.model.{name}"
        yield f"{prefix}.lora_A.weight", torch.randn(RANK, columns) / columns**0.5
        yield f"{prefix}.lora_B.weight", torch.randn(rows, RANK) / rows**0.5


def merge_command(run: Run, to: Path, only_import: bool = False) -> dict[str, float]:
    """Private memory, wall and processor time of an export in its own process.

    With `only_import` the process ends after its imports.
    """
    words = ["-m", "finetune", "export", str(run.root), "--to", str(to), "--merge"]
    words += ["--check-rows", "0"]
    code = "import finetune.cli.export, finetune.exporters.export, finetune.exporters.share"
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", code] if only_import else [sys.executable, *words],
        cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    peak = 0
    while process.poll() is None:
        peak = max(peak, _private(process.pid))
        time.sleep(POLL)
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise RuntimeError(process.communicate()[1][-2_000:])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = {"private_bytes": peak, "wall_seconds": wall, "cpu_seconds": cpu}
    print(found, flush=True)
    return found


def _private(pid: int) -> int:
    """Anonymous memory of a process in bytes; 0 if it has ended. Linux only."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    return 1024 * int(found[1]) if found else 0
