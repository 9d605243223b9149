"""Prove that training is equivalent on every backend, and show progress."""

from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from finetune import backend as known
from finetune.cache import cache
from finetune.errors import FinetuneError
from finetune.recipe import Recipe
from finetune.reports.proof_page import KINDS
from finetune.verification.proofs.matrix import Crossings, Request
from finetune.verification.proofs.procedure import carry_out
from finetune.verification.proofs.proof import Proof
from finetune.verification.proofs.small_recipe import Kind, Shape


def prove(
    recipe: Recipe,
    backends: str | None = None,
    processes: int = 2,
    steps: int = 10,
    output: str | Path = "proofs/latest",
    *,
    bf16: bool = False,
    like_mine: bool = False,
    full: bool = False,
    kinds: str = "own",
    crossings: Crossings = "each",
    jobs: int = 1,
    console: Console | None = None,
) -> Proof:
    """Prove that training is equivalent on `backends` (comma-separated names or files, or `all`).

    The arguments are those of `finetune prove`; `proof.json` and `proof.html` go to `output`.

    Raises:
        FinetuneError: the request cannot be honoured; nothing was started.
    """
    shape = Shape(processes, steps, like_mine, full)
    request = Request(
        recipe=recipe,
        backends=named_backends(backends, recipe, shape),
        named=backends != "all",
        output=Path(output),
        kinds=named_kinds(kinds),
        shape=shape,
        precision="bf16" if bf16 else "fp32",
        crossings=crossings,
        jobs=jobs,
    )
    columns = (SpinnerColumn(), TextColumn("proving"), TimeElapsedColumn())
    with Progress(*columns, console=console or Console(), transient=True) as progress:
        progress.add_task("proving")
        return carry_out(
            request,
            cache("data"),
            lambda line: progress.console.print(line, highlight=False, soft_wrap=True),
        )


def named_backends(words: str | None, recipe: Recipe, shape: Shape) -> tuple[str, ...]:
    """Backends of `all` or of names and files; by default the recipe's (`ddp` for `single`)."""
    if words == "all":
        # Backends that divide the model must be named.
        return tuple(name for name in known.names() if not known.load(name).axes.any)
    if words is None:
        several = shape.processes > 1 and recipe.backend == "single"
        return ("ddp" if several else recipe.backend,)
    files = {known.find(word).resolve(): word for word in map(str.strip, words.split(",")) if word}
    if not files:
        raise FinetuneError(f"--backends: got '{words}', expected comma-separated names, or all")
    for path, word in files.items():
        others = [str(each) for each in files if each.stem == path.stem and each != path]
        if others:
            raise FinetuneError(
                f"--backends: {word} and {others[0]} are both named '{path.stem}', and a run is "
                "named after its backend; rename one of the files"
            )
    return tuple(files.values())


def named_kinds(words: str) -> tuple[Kind, ...]:
    """Kinds of `own`, or of a comma-separated list of lora, qlora and full."""
    chosen = tuple(dict.fromkeys(word.strip() for word in words.split(",")))
    unknown = [word for word in chosen if word not in KINDS]
    if unknown:
        raise FinetuneError(f"--kinds: got '{unknown[0]}', expected some of {', '.join(KINDS)}")
    return chosen  # type: ignore[return-value]
