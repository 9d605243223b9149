"""The one table of engines: name of the engine in a backend -> its class."""

import datetime
from pathlib import Path

from finetune.distributed.base import Engine
from finetune.distributed.deepspeed import DeepSpeed
from finetune.distributed.fsdp import Fsdp
from finetune.distributed.native import Ddp, Native
from finetune.planner import Plan

ENGINES: dict[str, type[Engine]] = {
    "single": Native,
    "ddp": Ddp,
    "fsdp": Fsdp,
    "deepspeed": DeepSpeed,
}


def build(plan: Plan, nvme_path: Path, timeout: datetime.timedelta) -> Engine:
    """The engine of this process; see `Engine`.

    Raises:
        FinetuneError: Accelerate built something else than the plan asks for.
    """
    return ENGINES[plan.backend.engine](plan, nvme_path, timeout)
