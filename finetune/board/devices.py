"""The devices of this machine, and what a job needs of them by its plan."""

import dataclasses
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from finetune.errors import FinetuneError
from finetune.planner.estimate import memory
from finetune.planner.estimate.hardware import GPU
from finetune.planner.estimate.predict import model_source, workload_of
from finetune.planner.plan import Plan
from finetune.runs import limits, units

OF_LIBRARIES = 600 << 20
"""Bytes of a process on a CPU besides its tensors: of the libraries that it imports."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU, or the processors of this machine as one device."""

    kind: str
    """`cuda` or `cpu`."""
    number: int
    bytes: int
    """Memory in all."""
    used: int = dataclasses.field(default=0, compare=False)
    """Memory in use now, by whomever."""
    name: str = dataclasses.field(default="", compare=False)


def devices() -> list[Device]:
    """The GPUs that `nvidia-smi` lists; without one, the processors."""
    if shutil.which("nvidia-smi"):
        asked = "--query-gpu=index,memory.total,memory.used,name"
        try:
            answer = subprocess.run(
                ["nvidia-smi", asked, "--format=csv,noheader,nounits"],
                capture_output=True, text=True, timeout=10, check=True,
            ).stdout  # fmt: skip
            rows = [[part.strip() for part in line.split(",", 3)] for line in answer.splitlines()]
            found = [
                Device("cuda", int(number), int(total) << 20, int(used) << 20, name)
                for number, total, used, name in rows
            ]
            if found:
                return found
        except (OSError, ValueError, subprocess.SubprocessError):
            pass  # a driver without a GPU
    here = limits.memory()
    return [Device("cpu", 0, here.total, here.total - here.available, "the processors")]


@dataclasses.dataclass(frozen=True)
class Need:
    """What a task needs: a number of processes, and bytes for each. None waits for nothing."""

    processes: int = 0
    bytes: int = 0
    """0 if the plan does not know: the task then shares no device with another one."""

    def on(self, here: Sequence[Device], taken: Mapping[Device, int]) -> list[Device] | None:
        """The devices that a task gets, the emptiest first; None if it has to wait.

        Args:
            taken: bytes of the running tasks on their devices.
        """
        if not self.processes:
            return []
        each, count = self._share(here)
        full = {one: max(one.used, taken.get(one, 0)) for one in here}
        free = [
            one for one in here
            if (one not in taken if not self.bytes else full[one] + each <= one.bytes)
        ]  # fmt: skip
        free.sort(key=lambda one: (full[one], one.number))
        return free[:count] if len(free) >= count else None

    def problem(self, here: Sequence[Device]) -> str | None:
        """Why these devices never have room for it; None if they have."""
        each, count = self._share(here)
        if count > len(here):
            return f"needs {count} GPUs, and this machine has {len(here)}"
        room = sorted((one.bytes for one in here), reverse=True)[max(0, count - 1)]
        if each <= room:
            return None
        what = "this machine" if here[0].kind == "cpu" else "a GPU of this machine"
        return (
            f"the plan needs {units.size(each)}, and {what} has {units.size(room)}; "
            "`finetune plan --fit` shows what would make it fit"
        )

    def _share(self, here: Sequence[Device]) -> tuple[int, int]:
        """Bytes on each device, and the number of devices: processors are one for all processes."""
        is_cpu = here[0].kind == "cpu"
        return (self.bytes * self.processes, 1) if is_cpu else (self.bytes, self.processes)


def need_of(plan: Plan, here: Sequence[Device]) -> Need:
    """What a plan needs on these devices, with the memory of libraries."""
    is_cpu = here[0].kind == "cpu"
    try:
        work = workload_of(plan, model_source(plan.recipe).shape)
    except FinetuneError:  # a model without formulas
        return Need(plan.processes, 0)
    peak = memory.timeline(dataclasses.replace(work, cpu=is_cpu)).peak.total
    return Need(plan.processes, int(peak) + (OF_LIBRARIES if is_cpu else int(GPU.context)))
