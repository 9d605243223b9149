"""Entry point of the process that traces a step: reads a JSON request, writes a JSON answer.

It is started with the environment variables of a rank of the job, and without visible GPUs.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from finetune import catalog
from finetune.backend import Backend
from finetune.backend.axes import Axes
from finetune.checks.request import below_a_plan
from finetune.errors import FinetuneError
from finetune.planner import Plan
from finetune.planner.shapes.config_files import model_source
from finetune.process.quiet import quiet
from finetune.verification.memory.rehearsal import join, rehearse


def main(request: Path, answer: Path) -> int:
    """Trace the step of `request` as each of its ranks and write `answer`.

    Returns the exit status.
    """
    quiet()
    transformers_logging.set_verbosity_error()
    asked = json.loads(request.read_text(encoding="utf-8"))
    found: list[Any] = []
    for rank in asked["ranks"]:
        # A process can join one job as one rank; all of them have imported everything here.
        child = os.fork()
        if not child:
            os._exit(_as_rank(rank, asked, answer))
        _, waited = os.waitpid(child, 0)
        result = json.loads(answer.read_text()) if answer.exists() else {}
        if waited or "steps" not in result:
            return max(1, os.waitstatus_to_exitcode(waited))
        found.append(result["steps"])
    answer.write_text(json.dumps({"ranks": found}), encoding="utf-8")
    return 0


def _as_rank(rank: int, asked: dict[str, Any], answer: Path) -> int:
    recipe = catalog.from_fields(asked["recipe"])
    given = {**asked["backend"], "axes": Axes(**asked["backend"]["axes"])}
    plan = Plan(recipe, Backend(**given), asked["processes"])
    try:
        if asked["forward"]:  # all that a plan keeps of the model, where torch is imported anyway
            model_source(recipe)
            list(below_a_plan(recipe))
        join(rank, plan.processes)
        steps = rehearse(plan, asked["config"], asked["layers"], asked["forward"])
    except FinetuneError as error:
        answer.write_text(json.dumps({"problems": list(error.problems)}), encoding="utf-8")
        return error.exit_status
    except BaseException as error:  # a fork that returned would go on as the process it left
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return 1
    result = {"steps": [dataclasses.asdict(step) for step in steps]}
    answer.write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
