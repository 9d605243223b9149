"""The planner's rules of how a training steps and is evaluated."""

import fnmatch
from collections.abc import Iterator

from finetune.planner.request import Request, Rule
from finetune.recipe import Recipe

CUT = {
    "paged_adamw_8bit": "quantizes its moments in blocks of complete tensors",
    "adafactor": "has moments of complete rows and columns",
    "adamw_8bit": "stores its moments in blocks of rows",
    "adamw_4bit": "stores its moments in blocks of rows",
}
"""Optimizers with state that is cut into more than elements. All but the first know how FSDP2 cuts,
and all but the first two how tensor parallelism does."""


def optimizer(request: Request) -> Iterator[str]:
    """optim.name, optim.ema_decay: needs complete tensors, or unsaved state; use adamw or FSDP."""
    name, backend = request.recipe.optim.name, request.backend
    cuts = {
        "paged_adamw_8bit": backend.shard != "none" or backend.axes.any,
        "adafactor": backend.engine == "deepspeed" or backend.axes.tensor > 1,
    }.get(name, backend.engine == "deepspeed")
    if name in CUT and cuts:
        other = "ddp" if name == "paged_adamw_8bit" else "fsdp_full_shard"
        yield f"optim.name: {name} {CUT[name]}, which {backend.name} cuts; use adamw, or {other}"
    elif backend.device == "nvme" and (
        name != "adamw" or request.recipe.optim.ema_decay is not None
    ):
        what = "optim.ema_decay: an average" if name == "adamw" else f"optim.name: {name}"
        yield (
            f"{what} needs other state than the two moments of AdamW, which {backend.name} has on "
            "disk; use zero3_offload"
        )


def evaluation(request: Request) -> Iterator[str]:
    """evaluation, eval_rows: nothing is held out, or twice; give either eval_data or eval_rows."""
    recipe, asked = request.recipe, request.recipe.evaluation
    fields = (asked.every, asked.patience, asked.metrics or None)
    if not request.holds_out and any(each is not None for each in fields):
        yield "evaluation: there is nothing to evaluate on; give eval_data or eval_rows"
    if recipe.eval_data and recipe.eval_rows is not None:
        yield "eval_rows: rows are held out of `data` only if eval_data is not given; remove one"


def plateau(request: Request) -> Iterator[str]:
    """optim.schedule: there are no evaluations to look at; give rows and evaluation.every."""
    recipe = request.recipe
    evaluated = request.holds_out and recipe.evaluation.every is not None
    if recipe.optim.schedule == "reduce_lr_on_plateau" and not evaluated:
        yield (
            "optim.schedule: reduce_lr_on_plateau looks at the loss of each evaluation; give "
            "evaluation.every, and eval_data or eval_rows"
        )


def best_metric(request: Request) -> Iterator[str]:
    """evaluation.best: nothing is evaluated, or not this metric; use eval_rows, or one listed."""
    # Metrics of answers are not known before they are measured, and are not checked.
    recipe, best = request.recipe, request.recipe.evaluation.best
    known = _evaluated(recipe)
    if best != "loss" and not request.holds_out:
        yield f"evaluation.best: {best}, but nothing is evaluated; give eval_data or eval_rows"
    is_known = any(fnmatch.fnmatch(best.removeprefix("-"), each) for each in known)
    if best != "loss" and not is_known and not recipe.evaluation.metrics:
        yield (
            f"evaluation.best: {best} is not measured by method {recipe.method}; available are "
            f"{', '.join(['loss', *known])}"
        )


def _evaluated(recipe: Recipe) -> list[str]:
    """Names of the metrics of an evaluation other than its loss; `*` matches any name."""
    if recipe.takes == "prompts":
        lengths = [f"{each}_length" for each in ("mean", "min", "max", "mean_terminated")]
        rewards = (f"rewards/{name}/mean" for name in recipe.evaluated_rewards)
        return [
            "reward",
            *rewards,
            *(f"completions/{name}" for name in (*lengths, "clipped_ratio")),
        ]
    more = ["f1", "f1/*"] if recipe.head.scored and recipe.takes == "labelled" else []
    derived = recipe.derived(dict.fromkeys(recipe.metrics, 0.0))
    return [*dict.fromkeys([*recipe.metrics, *derived, *recipe.extremes, *more])]


RULES: tuple[Rule, ...] = (optimizer, evaluation, plateau, best_metric)
