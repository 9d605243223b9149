"""Choose which kernels a run compiles, the same on every rank."""

from finetune.cache import keep_compiled
from finetune.data.prepare import Prepared
from finetune.distributed.base import Engine
from finetune.errors import FinetuneError
from finetune.kernels import cpu, pointwise
from finetune.models.model import compute_dtype
from finetune.training.recorder import tokens_of_run


def check_compiler(engine: Engine) -> None:
    """Compile and run one kernel if the blocks of the model will be compiled; collective.

    Raises:
        FinetuneError: on every rank, if one cannot compile.
    """
    if engine.plan.recipe.kernels.blocks == "eager":
        return
    keep_compiled(pointwise.usual_folder)
    reasons = engine.gather(pointwise.against_inductor(engine.device))
    for rank, reason in enumerate(reasons):
        if reason is not None:
            place = f"rank {rank}: " if engine.world > 1 else ""
            raise FinetuneError(f"kernels.blocks: {place}{reason}; use kernels.blocks=eager")


def choose_compiled(engine: Engine, data: Prepared, steps: int) -> list[str]:
    """Switch compiled pointwise chains and the memory pool on or off; returns notes for the log.

    If one rank cannot compile the chains, no rank uses them: a job is as fast as its slowest rank.
    """
    check_compiler(engine)
    keep_compiled(pointwise.usual_folder)
    kernels, device = engine.plan.recipe.kernels, engine.device
    tokens = tokens_of_run(engine.plan, data, steps)
    dtype = compute_dtype(engine.plan)
    chained, of_chains = pointwise.settle(kernels.pointwise, device, tokens, dtype)
    somewhere_eager = bool(engine.largest([int(not chained)])[0])
    if chained and somewhere_eager:
        chained, of_chains = False, "kernels.pointwise: eager, because another rank cannot compile"
    pointwise.compile_chains(chained)
    pooled, of_pool = cpu.settle_pool(kernels.allocator, device, tokens)
    cpu.use_pool(pooled)
    return [note for note in (of_chains, of_pool) if note is not None]
