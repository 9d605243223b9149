"""Build the engine of a plan from the table of engines."""

import datetime
from pathlib import Path

from finetune.distributed import device
from finetune.distributed.base import Engine
from finetune.distributed.deepspeed import DeepSpeed
from finetune.distributed.fsdp import Fsdp
from finetune.distributed.mesh import MeshEngine
from finetune.distributed.pipeline import PipelineEngine
from finetune.distributed.unsharded import Ddp, Native
from finetune.errors import refuse
from finetune.planner import Plan
from finetune.process import rendezvous

ENGINES: dict[str, type[Engine]] = {
    "single": Native,
    "ddp": Ddp,
    "fsdp": Fsdp,
    "deepspeed": DeepSpeed,
    "mesh": MeshEngine,
}


def build(plan: Plan, nvme_path: Path, timeout: datetime.timedelta) -> Engine:
    """Build the engine of this process; see `Engine`.

    Raises:
        FinetuneError: the GPUs of this machine cannot be used as requested, or Accelerate built
            something different from the plan.
    """
    local_rank, here = rendezvous.local_rank(), rendezvous.neighbours()
    found = device.inspect_gpus(local_rank)
    problems = device.problems(found, plan.backend.precision, local_rank, here)
    refuse(problems)
    kind = PipelineEngine if plan.mesh.pipeline > 1 else ENGINES[plan.backend.engine]
    engine = kind(plan, nvme_path, timeout)
    engine.notes += device.unused_accelerator(found)
    if engine.device.type == "cuda" and engine.world > 1:
        unlike = device.different(engine.gather(device.described(engine.device)))
        engine.notes += [] if unlike is None else [unlike]
    return engine
