"""Write the result of a run: its best or last checkpoint, loadable by other libraries."""

import contextlib
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from finetune import catalog
from finetune.checkpoints.resume import card
from finetune.errors import refuse
from finetune.exporters.export import export
from finetune.inference.load import open_checkpoint
from finetune.reports.card import write_card
from finetune.runs.manifest import differing, read_manifest
from finetune.runs.run import Run, replacing
from finetune.version import install


def publish(run: Run) -> None:
    """Write `final/`: the adapter or model of the best checkpoint, or of the last one.

    With `saving.average`, it is the mean of the newest ones, each as it would be published.

    Raises:
        FinetuneError: the checkpoint or the copy of its model differs from what was saved.
    """
    count = catalog.load(run.recipe).saving.average
    steps = run.steps()[-count:]
    if not steps:
        return
    step = steps[-1] if count > 1 else run.best_step() or steps[-1]
    source = run.checkpoint(step)
    if (source / "adapter").exists():
        export(run, run.final, step=step, check_rows=0)
        card(run).unlink()  # `describe` writes it when the record is complete
        _average(run, steps, "adapter", run.final)
        return
    open_checkpoint(run, step)
    # A full model is copied: `export` may load all of it in fp32.
    scratch = run.final.with_name(".final.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source / "model", scratch)
    shutil.copytree(source / "tokenizer", scratch, dirs_exist_ok=True)
    copied = {
        name.partition("/")[2]: known
        for name, known in read_manifest(source)["files"].items()
        if name.startswith(("model/", "tokenizer/"))
    }
    wrong = differing(scratch, copied)
    refuse(wrong)
    _average(run, steps, "model", scratch)
    shutil.rmtree(run.final, ignore_errors=True)
    scratch.rename(run.final)


def _average(run: Run, steps: list[int], kind: str, folder: Path) -> None:
    """Replace weights in a folder by their means over checkpoints, computed in fp32.

    An adapter's factors are averaged one by one, as PEFT's file has them.
    """
    if len(steps) == 1:
        return
    sources = [open_checkpoint(run, step) / kind for step in steps]
    for path in folder.glob("*.safetensors"):
        with contextlib.ExitStack() as opened:
            files: list[Any] = [
                opened.enter_context(safe_open(source / path.name, framework="pt"))
                for source in sources
            ]
            means: dict[str, torch.Tensor] = {}
            for name in files[0].keys():  # noqa: SIM118 (not a dict)
                total = sum(file.get_tensor(name).double() for file in files)
                means[name] = (total / len(files)).to(files[0].get_tensor(name).dtype)
        with replacing(path) as written:
            save_file(means, written, metadata={"format": "pt"})


def describe(run: Run, plot: bool) -> None:
    """Plot the losses of a completed run, then write the card of its result."""
    if plot and importlib.util.find_spec("matplotlib") is None:
        print(f"no loss.png: it needs matplotlib: {install('plots')}", flush=True)
    elif plot:
        from finetune.reports.plot import plot_loss  # matplotlib: on one rank, once

        plot_loss(run)
    if run.final.exists():
        write_card(run, run.final)
