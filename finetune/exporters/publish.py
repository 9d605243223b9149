"""Write the result of a run: its best or last checkpoint, loadable by other libraries."""

import importlib.util
import shutil

from finetune.checkpoints.resume import card
from finetune.errors import refuse
from finetune.exporters.export import export
from finetune.inference.load import open_checkpoint
from finetune.reports.card import write_card
from finetune.runs.manifest import differing, read_manifest
from finetune.runs.run import Run
from finetune.version import install


def publish(run: Run) -> None:
    """Write `final/`: the adapter or model of the best checkpoint, or of the last one.

    Raises:
        FinetuneError: the checkpoint or the copy of its model differs from what was saved.
    """
    step = run.best_step() or run.newest()
    if step is None:
        return
    source = run.checkpoint(step)
    if (source / "adapter").exists():
        export(run, run.final, step=step, check_rows=0)
        card(run).unlink()  # `describe` writes it when the record is complete
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
    shutil.rmtree(run.final, ignore_errors=True)
    scratch.rename(run.final)


def describe(run: Run, plot: bool) -> None:
    """Plot the losses of a completed run, then write the card of its result."""
    if plot and importlib.util.find_spec("matplotlib") is None:
        print(f"no loss.png: it needs matplotlib: {install('plots')}", flush=True)
    elif plot:
        from finetune.reports.plot import plot_loss  # matplotlib: on one rank, once

        plot_loss(run)
    if run.final.exists():
        write_card(run, run.final)
