"""Build optimizers and compute the learning rate, from the recipe and the step alone."""

import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import SchedulerType, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from finetune import extensions
from finetune.distributed.adafactor import Adafactor
from finetune.distributed.averages import keep_average
from finetune.distributed.base import Engine
from finetune.distributed.muon import Muon
from finetune.distributed.parameters import unsharded_shape
from finetune.errors import FinetuneError, first_line, refuse
from finetune.models.scoring import head_of
from finetune.planner import Plan
from finetune.recipe import Optim
from finetune.training.narrow_adamw import AdamW4bit, AdamW8bit
from finetune.training.schedule_free import ScheduleFreeAdamW
from finetune.version import install

PLATEAU = "reduce_lr_on_plateau"
"""A schedule that depends on the losses of evaluations, by its name in transformers."""

OF_SCHEDULES = "optimizer num_warmup_steps num_training_steps last_epoch"
OF_OPTIMIZERS = "params lr betas eps weight_decay"
OF_RUNS = "dtype copies"
"""Arguments that other fields of a recipe give, and that the backend gives."""

Groups = list[dict[str, Any]]
"""Parameters, weight decay and share of the learning rate, as torch's optimizers take them."""


def learning_rate(step: int, steps: int, optim: Optim, peak: float) -> float:
    """Learning rate of optimizer step `step` (from 0) in a run of `steps`.

    Warmup is linear and ends at the peak; the schedule ends at `min_lr` x peak after the last step.
    """
    warmup = math.ceil(optim.warmup * steps) if optim.warmup < 1 else int(optim.warmup)
    if step < warmup:
        return peak * (step + 1) / warmup
    if optim.schedule in ("constant", PLATEAU):
        return peak
    done = (step - warmup) / max(1, steps - warmup)
    plain = "" if optim.schedule_arguments else optim.schedule
    if plain == "linear":
        left = 1 - done
    elif plain == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done))
    else:
        arguments = json.dumps(optim.schedule_arguments)
        left = _of_transformers(optim.schedule, warmup, steps, peak, arguments)(step)
    return peak * (optim.min_lr + (1 - optim.min_lr) * left)


def plateau(
    state: dict[str, float] | None, loss: float, optim: Optim, peak: float
) -> dict[str, float]:
    """State of torch's `ReduceLROnPlateau` after the loss of an evaluation; `lr` is the new peak.

    Raises:
        FinetuneError: it does not take the arguments.
    """
    before = state or {"lr": peak}
    nothing = torch.optim.SGD([torch.zeros(1)], lr=before["lr"])
    try:
        made = torch.optim.lr_scheduler.ReduceLROnPlateau(nothing, **optim.schedule_arguments)
    except (TypeError, ValueError) as error:
        raise FinetuneError(f"optim.schedule_arguments: {PLATEAU}: {first_line(error)}") from None
    vars(made).update({name: value for name, value in before.items() if name != "lr"})
    made.step(loss)
    kept = {name: vars(made)[name] for name in ("best", "num_bad_epochs", "cooldown_counter")}
    kept = {name: value for name, value in kept.items() if math.isfinite(value)}
    return kept | {"lr": nothing.param_groups[0]["lr"]}


@functools.cache
def _of_transformers(
    name: str, warmup: int, steps: int, peak: float, arguments: str
) -> Callable[[int], float]:
    """A schedule of transformers as a function of the step alone, relative to the peak.

    So a resumed run continues it exactly, without a state of its own.

    Raises:
        FinetuneError: the schedule does not take the arguments.
    """
    given: dict[str, Any] = json.loads(arguments)
    if name == "warmup_stable_decay" and not given.keys() & {"num_decay_steps"}:
        given["num_decay_steps"] = max(1, (steps - warmup) // 10)
    nothing = torch.optim.SGD([torch.zeros(1)], lr=peak)
    try:
        made: Any = get_scheduler(name, nothing, warmup, steps, given)
        (share,) = made.lr_lambdas
        share(warmup)
    except (TypeError, ValueError) as error:
        known = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters
        raise FinetuneError(
            f"optim.schedule_arguments: {name}: {first_line(error)}; {_takes(known, OF_SCHEDULES)}"
        ) from None
    return share


def _takes(parameters: Iterable[str], ours: str) -> str:
    """The arguments of a function that a recipe may give, without those that are given for it."""
    names = [name for name in parameters if name not in ours.split()]
    return f"it takes {', '.join(names)}" if names else "it takes none"


def dimensions(parameter: nn.Parameter) -> int:
    """Number of dimensions of the unsharded tensor; ZeRO-3 flattens the parameters it shards."""
    return len(unsharded_shape(parameter))


def build(
    model: nn.Module, optim: Optim, peak: float, plan: Plan | None = None
) -> list[torch.optim.Optimizer]:
    """Optimizers that together hold each trainable parameter once.

    Args:
        plan: Backend of the run; None for one process in fp32.

    Raises:
        FinetuneError: the library of the optimizer is missing.
    """
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    if not named:  # a stage of a pipeline without adapters
        return []
    if optim.name == "muon":
        made = _muon(model, named, optim, peak, plan)
    else:
        made = [_of_groups(groups_of(named, optim), optim, peak)]
    if optim.ema_decay is not None:
        for each in made:
            keep_average(each, optim.ema_decay)
    return made


def groups_of(named: Iterable[tuple[str, nn.Parameter]], optim: Optim) -> Groups:
    """Groups of parameters with equal weight decay and learning rate.

    `lr_share` is the learning rate relative to that of the recipe; see `Engine.before_step`.
    """
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        decay, share = optim.weight_decay, optim.loraplus_lr_ratio if "lora_B" in name else 1.0
        for group in optim.groups:
            if re.search(group.match, name):
                decay = decay if group.weight_decay is None else group.weight_decay
                share = share if group.lr is None else group.lr / optim.lr
                break
        decay = decay if dimensions(parameter) >= 2 else 0.0
        found.setdefault((decay, share), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "lr_share": share}
        for (decay, share), parameters in found.items()
    ]


def group_notes(shapes: Mapping[str, tuple[int, ...]], optim: Optim) -> list[str]:
    """How many trained parameters each group of a recipe has, by their unsharded shapes.

    Raises:
        FinetuneError: a group has no parameter of its own, or there is no `lora_B`.
    """
    left, lines, empty = dict(shapes), list[str](), list[str]()
    rates = [(group.match, group.lr) for group in optim.groups]
    if optim.loraplus_lr_ratio != 1:
        rates.append(("lora_B", optim.lr * optim.loraplus_lr_ratio))
    for match, lr in rates:
        names = [name for name in left if re.search(match, name)]
        taken = sum(math.prod(left.pop(name)) for name in names)
        rate = "" if lr is None else f", lr {lr:g}"
        lines.append(f"optim: {match!r} has {taken:,} parameters in {len(names)} tensors{rate}")
        if not names:
            empty.append(
                f"optim: {match!r} matches no trained parameter that is not in an earlier group; "
                f"trained are {', '.join(sorted(shapes)[:3])}, ..."
            )
    if rates and not left and all(lr == 0 for _, lr in rates):
        empty.append("optim.groups: each parameter has lr 0, so nothing is trained; raise one")
    refuse(empty)
    return lines


def _of_groups(groups: Groups, optim: Optim, peak: float) -> Any:
    """The optimizer of a recipe for these groups of parameters.

    Raises:
        FinetuneError: it cannot be imported, is none, or does not take the arguments.
    """
    if optim.name == "paged_adamw_8bit":
        return _bitsandbytes(groups, optim, peak)
    given: dict[str, Any] = {"lr": peak, "betas": optim.betas, "eps": optim.eps}
    like = {"betas": tuple, "eps": float}  # Adafactor's `eps` is a pair, of something else
    kind = extensions.find("optim.name", optim.name, OPTIMIZERS)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise FinetuneError(f"optim.name: '{optim.name}' is not a torch.optim.Optimizer")
    if optim.name == "adamw":
        # `foreach` allocates a copy of the gradients; `fused` does not, and runs on CPU and CUDA.
        given["fused"] = True
    taken = inspect.signature(kind).parameters
    given = {
        name: value
        for name, value in given.items()
        if name in taken and isinstance(taken[name].default, like.get(name, object))
    }
    if "weight_decay" not in taken:  # else each group has its own
        groups = [{**group} for group in groups]
        for group in groups:
            del group["weight_decay"]
    made = _with_arguments(kind, groups, given, optim)
    for each in (p for group in made.param_groups for p in group["params"]):
        if isinstance(made, AdamW8bit):
            made.width(each)  # refuses a cut inside of a block, before a step
    return made


def _with_arguments(kind: Any, groups: Groups, given: dict[str, Any], optim: Optim) -> Any:
    """An optimizer with what the fields of a recipe give it, and with `optim.arguments`.

    Raises:
        FinetuneError: it does not take the arguments, or a field gives one of them.
    """
    refuse(
        f"optim.arguments: {name}={optim.arguments[name]!r}: write it as optim.{name}"
        for name in optim.arguments
        if name in {*given, "weight_decay"} & {*OF_OPTIMIZERS.split()}
    )
    try:
        return kind(groups, **given | optim.arguments)
    except (TypeError, ValueError) as error:
        known = _takes(inspect.signature(kind).parameters, f"{OF_OPTIMIZERS} {OF_RUNS}")
        raise FinetuneError(
            f"optim.arguments: {optim.name}: {first_line(error)}; {known}"
        ) from None


def check(optim: Optim, sharded: bool) -> None:
    """Refuse an optimizer that cannot be used, before a model is loaded.

    Sharded, each process updates its part of a tensor, which equals one process only if elements
    do not affect each other: two steps on a tensor and on its halves are compared.

    Raises:
        FinetuneError: as `_of_groups`; it needs a closure; or it is not element-wise, and sharded.
    """
    if optim.schedule == PLATEAU:
        plateau(None, 0.0, optim, optim.lr)
    if optim.name in BY_PLAN:
        return
    whole = torch.linspace(-1, 1, 130 * 64).view(130, 64)  # 8-bit optimizers begin at 4096
    halves = whole.split(65)
    parts = [[nn.Parameter(whole.clone())], [nn.Parameter(half.clone()) for half in halves]]
    for parameters in parts:
        made = _of_groups([{"params": parameters, "weight_decay": 0.1}], optim, 1e-2)
        if callable(getattr(made, "eval", None)):  # of an unknown class
            raise FinetuneError(
                f"optim.name: {optim.name} has other weights for evaluation than for training "
                "(schedule-free), and evaluations and checkpoints here would have those of "
                "training; use schedule_free_adamw with optim.schedule=constant"
            )
        for group in made.param_groups:
            group["lr"] = 1e-2  # a number, as the engine sets it
        for step in (1, 2):
            torch.cat([*parameters]).mul(whole * step).square().sum().backward()
            try:
                made.step()
            except (TypeError, RuntimeError) as error:
                raise FinetuneError(
                    f"optim.name: {optim.name} cannot take a step from gradients alone "
                    f"({first_line(error)}); use one that takes dense gradients and no closure"
                ) from None
            made.zero_grad()
    (one,), halves = parts
    if sharded and not torch.equal(one, torch.cat([*halves])):
        raise FinetuneError(
            f"optim.name: {optim.name} does not update each element by itself, and this backend "
            "shards tensors, so the result would depend on the number of processes; use ddp"
        )
    state = [each for values in made.state.values() for each in values.values()]
    if sharded and any(
        torch.is_tensor(each) and each.shape not in ((), (65, 64)) for each in state
    ):
        raise FinetuneError(
            f"optim.name: {optim.name} has state that is not of the shape of its tensor, and this "
            "backend shards tensors with their state; use ddp"
        )


def take_over(engine: Engine) -> None:
    """Convert restored state that another library wrote; see `AdamW8bit.take_over`."""
    for inner in (each.optimizer for each in engine.optimizers):  # type: ignore[attr-defined]
        if isinstance(inner, AdamW8bit):
            for parameter, state in inner.state.items():
                inner.take_over(parameter, state)


def _muon(
    model: nn.Module,
    named: list[tuple[str, nn.Parameter]],
    optim: Optim,
    peak: float,
    plan: Plan | None,
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks, also of experts, and AdamW for all other parameters.

    It iterates in bf16 where the run computes in 16 bits, as its authors do, and else in fp32.
    """
    outside = {
        id(parameter)
        for module in model.modules()
        if module in (model.get_input_embeddings(), head_of(model))
        or isinstance(module, nn.modules.conv._ConvNd)
        for parameter in module.parameters()
    }
    hidden, rest = list[tuple[str, nn.Parameter]](), list[tuple[str, nn.Parameter]]()
    for name, parameter in named:
        matrix = dimensions(parameter) in (2, 3) and not name.endswith("bias")
        (hidden if matrix and id(parameter) not in outside else rest).append((name, parameter))
    narrow = plan is not None and plan.backend.precision != "fp32"
    backend = None if plan is None else plan.backend
    copied = backend is not None and backend.shard == "none" and not backend.axes.any
    copies = torch.distributed.group.WORLD if copied and plan and plan.processes > 1 else None
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        dtype = torch.bfloat16 if narrow else torch.float32
        given = {"lr": peak, "dtype": dtype, "copies": copies}
        optimizers.append(_with_arguments(Muon, groups_of(hidden, optim), given, optim))
    if rest:
        groups = groups_of(rest, optim)
        optimizers.append(torch.optim.AdamW(groups, peak, optim.betas, optim.eps, fused=True))
    return optimizers


def _bitsandbytes(groups: Groups, optim: Optim, peak: float) -> torch.optim.Optimizer:
    try:
        from bitsandbytes import optim as library  # optional: it needs a build for the machine
    except ImportError as error:
        raise FinetuneError(
            f"optim.name: {optim.name} needs bitsandbytes: {install('bitsandbytes')} ({error})"
        ) from None
    given = {"lr": peak, "betas": optim.betas, "eps": optim.eps}
    return _with_arguments(library.PagedAdamW8bit, groups, given, optim)


class Lion(torch.optim.Optimizer):
    """Lion (arXiv:2302.06675, algorithm 2): the sign of an interpolated momentum."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            (now, later), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                moment = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(moment.lerp(parameter.grad, 1 - now).sign_(), alpha=-lr)
                moment.lerp_(parameter.grad, 1 - later)


OPTIMIZERS = {
    "adamw": torch.optim.AdamW, "adafactor": Adafactor, "sgd": torch.optim.SGD,
    "lion": Lion, "adamw_8bit": AdamW8bit, "adamw_4bit": AdamW4bit,
    "schedule_free_adamw": ScheduleFreeAdamW,
}  # fmt: skip
BY_PLAN = (
    "adamw",
    "schedule_free_adamw",
    "adamw_8bit",
    "adamw_4bit",
    "paged_adamw_8bit",
    "adafactor",
    "muon",
)
"""Optimizers whose backends the plan knows (`finetune.planner.rules`)."""
