"""Trace a step of a plan in a separate process, and compare the formulas with it."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.planner import Plan
from finetune.planner.estimate.predict import config_of
from finetune.planner.estimate.workload import Workload
from finetune.process import interpreter
from finetune.process.quiet import OF_A_LAUNCH
from finetune.runs.run import write_json
from finetune.verification.memory import comparison
from finetune.verification.memory.comparison import Verification


def verify(settled: Plan, workload: Workload | None = None) -> Verification:
    """Trace a step of the real model with fake tensors, and compare the formulas with it.

    The trace runs as rank 0 of the job if the engine supports it, otherwise as the same work on one
    device.

    Args:
        workload: input of the formulas; None for a model without formulas.

    Raises:
        FinetuneError: the model cannot be traced, with the reason.
    """
    backend = settled.backend
    if backend.shard_size is not None:
        raise FinetuneError(
            f"--verify: only one copy of {backend.name} could be traced; verify fsdp_full_shard or "
            "fsdp_shard_grad_op on the processes of a copy"
        )
    sharded = settled.traits.traced and settled.processes > 1
    traced = settled if sharded else comparison.alone(settled)
    steps = _rehearse(traced)
    layers = comparison.layers_of(config_of(settled.recipe)[0])
    offload = sharded and backend.offload != "none"
    found = comparison.extrapolate(steps, layers, settled.accumulation, offload)
    if workload is not None:
        workload = comparison.as_traced(settled, workload, sharded)
    how = comparison.how(settled, sharded)
    return comparison.compare(
        found, workload, settled.processes, how, comparison.notes(settled, sharded)
    )


def _rehearse(settled: Plan) -> list[comparison.Step]:
    """The traced steps, from a process that runs as rank 0 of the plan's job."""
    count = str(settled.processes)
    environment = {key: value for key, value in os.environ.items() if not _of_a_launch(key)}
    # Fake tensors are on the CPU; with a visible GPU, Accelerate would place some of them there.
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if settled.processes > 1:
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": count}
        environment |= {"LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1"}
    with tempfile.TemporaryDirectory(prefix="finetune-") as scratch:
        request, answer = Path(scratch) / "request.json", Path(scratch) / "answer.json"
        write_json(request, comparison.request(settled))
        command = interpreter.python(
            "-m", "finetune.verification.memory", str(request), str(answer)
        )
        done = subprocess.run(
            command,
            env=interpreter.environment(environment),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        told = json.loads(answer.read_text()) if answer.exists() else {}
    if "problems" in told:
        raise FinetuneError(*told["problems"])
    if "steps" not in told:
        last = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise FinetuneError(f"--verify: the model cannot be traced: {last}")
    return told["steps"]


def _of_a_launch(key: str) -> bool:
    return key.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_")) or key in OF_A_LAUNCH
