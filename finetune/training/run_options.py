"""Options of a run that do not change what is learned, from the command line or a notebook."""

import dataclasses
from pathlib import Path

from finetune.checkpoints.resume import Resume


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run; none of them changes what is learned."""

    output: str | Path
    """The run directory, or its address on an object store: see `finetune.checkpoints.store`."""
    resume: Resume = False
    """Continue from the newest intact checkpoint; with `auto`, only if there is one."""
    nvme_path: Path | None = None
    """Folder on a local disk for a backend that offloads to NVMe; by default in the run."""
    timeout_minutes: float = 30.0
    """Minutes that a rank waits for the others before it fails."""
    profile: bool = False
    """Trace one step with PyTorch's profiler and print a breakdown of its time."""
    plot: bool = True
    """Draw `loss.png` at the end."""
    end_by: float | None = None
    """Unix time in seconds by which the run saves and ends as if interrupted; None for never."""
