"""What a second process brings: two of them against one, each with one thread."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.job import DEEP, Shape, write_job
from benchmarks.record import Result
from benchmarks.training import WARMUP, fastest, share
from finetune.record import units

BACKENDS = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "zero2", "zero3")


def measure(
    folder: Path, backends: Sequence[str], steps: int, runs: int, shape: Shape = DEEP
) -> Result:
    """Train with LoRA in bf16 on one process, then on two under each backend, in turns."""
    recipe = write_job(folder / "job", shape, WARMUP + steps, lora=True)
    processes = {"single": 1} | dict.fromkeys(backends, 2)
    measured = fastest(folder, recipe, processes, "bf16", runs, threads=1)
    base = measured["single"]["tokens_per_second"]
    table = [["backend", "processes", "speed / one process", "tokens/s", "peak memory"]]
    for backend, values in measured.items():
        values["speedup"] = values["tokens_per_second"] / base
        table.append(
            [
                f"`{backend}`",
                str(values["processes"]),
                share(values["speedup"]),
                f"{values['tokens_per_second']:,.0f}",
                units.size(values["peak_memory_bytes"]),
            ]
        )
    how = (
        f"LoRA r=16 on every linear layer of a Llama with {shape.layers} layers of "
        f"{shape.hidden_size} and random weights, in bf16; {shape.rows} rows of {shape.length} "
        f"tokens a step, {shape.micro_rows} in a micro-batch, one thread in each process. Of each "
        f"backend the fastest of {runs} runs, which took turns: median of {steps} steps after "
        f"{WARMUP} others."
    )
    values = {"timed_steps": steps, "runs": runs, "backends": measured}
    return Result("Two processes against one", how, values, table, [])
