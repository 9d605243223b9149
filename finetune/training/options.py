"""How a run is carried out, from the command line or a notebook."""

import dataclasses
from pathlib import Path

from finetune.checkpoints.resume import Resume


@dataclasses.dataclass(frozen=True)
class Options:
    """How a run is carried out; none of it changes what is learned."""

    output: Path
    resume: Resume = False
    """Whether to go on from the newest intact checkpoint; `auto`: where there is one."""
    nvme_path: Path | None = None
    """Folder on a local disk for a backend that offloads to NVMe; by default inside the run."""
    timeout_minutes: float = 30.0
    """How long a rank waits for the others before it gives up."""
    profile: bool = False
    """Trace one step with torch's profiler, and say where its time went."""
    plot: bool = True
    """Draw `loss.png` at the end."""
