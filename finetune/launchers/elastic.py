"""Choose the processes of a start for the machines that are there, with the same global batch."""

from finetune import backend as backends
from finetune.errors import FinetuneError
from finetune.launchers.job import machines, number_of
from finetune.planner import plan
from finetune.planner.estimate import hardware
from finetune.process.rendezvous import visible_gpus
from finetune.recipe import Recipe


def devices() -> int:
    """GPUs that this process may use; 1 without any, for the CPU."""
    visible = visible_gpus()
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip()]) or 1
    return len(hardware.listed()) or 1


def fit(
    recipe: Recipe,
    backend: str,
    flags: list[str],
    precision: backends.Precision | None,
    fewest: int = 1,
) -> tuple[str, int, list[str]] | None:
    """The backend, the processes and the flags of a start on as many devices as fit the batch.

    Every machine derives the same from the same numbers. On one process the backend is `single`.

    Args:
        flags: those of `accelerate launch`, with the number of machines and the rank of this one.
        fewest: machines below which the job does not start.

    Returns:
        None if this machine is not needed.

    Raises:
        FinetuneError: there are fewer machines, or the recipe fits no number of processes.
    """
    there, each = machines(flags), devices()
    if there < fewest:
        raise FinetuneError(f"--min-machines {fewest}: only {there} are there")
    sizes = [(m, d) for m in range(there, max(1, fewest) - 1, -1) for d in range(each, 0, -1)]
    first: FinetuneError | None = None
    for used, per in sorted(sizes, key=lambda size: (-size[0] * size[1], size[0])):
        name = "single" if used * per == 1 else backend
        try:
            found = plan(recipe, backends.sized(backends.load(name), used * per, used),
                         used * per, precision)  # fmt: skip
        except FinetuneError as error:
            first = first or error
            continue
        rank = number_of(flags, "machine_rank") or 0
        if rank == 0:
            print(
                f"elastic      {used} of {there} machines, {used * per} of {there * each} devices: "
                f"{recipe.batch.rows} rows a step as always, {found.accumulation} micro-batches on "
                f"each; backend {name}",
                flush=True,
            )
        changed = [*flags, "--num_machines", str(used)] if used != there else flags
        return (name, used * per, changed) if rank < used else None
    assert first is not None
    raise first
