"""The result of a run: its best or last checkpoint as something that loads everywhere."""

import shutil

from finetune.result.exporter import export
from finetune.run import Run


def publish(run: Run) -> None:
    """Put the result into `final/`: adapter or model of the best checkpoint, else the last one."""
    step = run.best_step() or run.newest()
    if step is None:
        return
    source = run.checkpoint(step)
    if (source / "adapter").exists():
        export(run, run.final, step=step)
        return
    # A whole model is copied: `export` would hold all of it in fp32.
    scratch = run.final.with_name(".final.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source / "model", scratch)
    shutil.copytree(source / "tokenizer", scratch, dirs_exist_ok=True)
    shutil.rmtree(run.final, ignore_errors=True)
    scratch.rename(run.final)
