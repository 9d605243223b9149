"""Entry point of the process that traces a step: reads a JSON request, writes a JSON answer.

It is started with the environment variables of rank 0 of the job, and without visible GPUs.
"""

import dataclasses
import json
import sys
from pathlib import Path

from transformers.utils import logging as transformers_logging

from finetune import catalog
from finetune.backend import Backend
from finetune.backend.axes import Axes
from finetune.errors import FinetuneError
from finetune.planner import Plan
from finetune.process.quiet import quiet
from finetune.verification.memory.trace import join, rehearse


def main(request: Path, answer: Path) -> int:
    """Trace the step of `request` and write `answer`; returns the exit status."""
    quiet()
    transformers_logging.set_verbosity_error()
    asked = json.loads(request.read_text(encoding="utf-8"))
    recipe = catalog.from_fields(asked["recipe"])
    given = {**asked["backend"], "axes": Axes(**asked["backend"]["axes"])}
    plan = Plan(recipe, Backend(**given), asked["processes"])
    try:
        join(plan.processes)
        found = rehearse(plan, asked["config"], asked["layers"])
    except FinetuneError as error:
        answer.write_text(json.dumps({"problems": list(error.problems)}), encoding="utf-8")
        return error.exit_status
    steps = [dataclasses.asdict(step) for step in found]
    answer.write_text(json.dumps({"steps": steps}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
