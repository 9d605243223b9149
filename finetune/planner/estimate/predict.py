"""Predict memory, communication and time of a plan on a machine, and whether it fits."""

import contextlib
import dataclasses
import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from finetune.errors import FinetuneError, reading
from finetune.planner.estimate import (
    advice,
    communication,
    hardware,
    layout,
    memory,
    totals,
    traffic,
)
from finetune.planner.estimate.adapters import named_expert_size
from finetune.planner.estimate.head_losses import CHUNKED, LABELLED, OURS, SCORES
from finetune.planner.estimate.judges import leaving_room
from finetune.planner.estimate.row_counts import steps_of
from finetune.planner.estimate.sampling import sampling
from finetune.planner.estimate.sharding import nvme
from finetune.planner.estimate.timing import Times, forward_share
from finetune.planner.estimate.workload import Adapter, AttentionKind, Workload, lora
from finetune.planner.kernels import Choice
from finetune.planner.plan import Plan, synchronises_each
from finetune.planner.shapes import published
from finetune.planner.shapes.architecture import Architecture
from finetune.planner.shapes.config_files import config_paths
from finetune.planner.shapes.read_config import read
from finetune.recipe import Model, Recipe
from finetune.recipe.references import second_model

LOSSES_OF_HEADS = {"chunked": CHUNKED, "whole": OURS, "labelled": LABELLED, "scores": SCORES}
"""Memory model of the loss, by the value of the kernel option `head`."""
HUB_SECONDS = 5
"""Timeout of a request to the hub, in seconds."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The shape of a recipe's model, and where it was read from."""

    shape: Architecture
    where: str


def model_source(recipe: Recipe) -> Source:
    """The shape of a recipe's model.

    It is read from the recipe's config, a folder, the hub cache, `shapes.published`, or the hub.

    Raises:
        FinetuneError: none of them has it, or the architecture is unknown.
    """
    config, where = config_of(recipe)
    shape = read(config, where)
    if recipe.model.add_tokens:
        shape = dataclasses.replace(shape, vocab=max(shape.vocab, _rows_with_added(recipe, shape)))
    if recipe.scores is not None:  # without the head that predicts tokens
        shape = dataclasses.replace(shape, tied=True, scores=len(recipe.scores.names))
    return Source(shape, where)


def _rows_with_added(recipe: Recipe, shape: Architecture) -> int:
    """Embedding rows with `model.add_tokens`, as in `finetune.models.vocabulary`.

    A model often has more rows than its tokenizer has tokens, so that no rows are added. If the
    tokenizer is not on this machine, each token is counted as an additional row, an upper bound.
    """
    model = recipe.model
    name = model.tokenizer or model.name
    for config in config_paths(name, model.revision) if name else ():
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            file = config.with_name("tokenizer.json")
            stored = json.loads(file.read_text(encoding="utf-8"))
            known = {**stored["model"]["vocab"]}
            known |= {each["content"]: each["id"] for each in stored["added_tokens"]}
            return max(known.values()) + 1 + len(set(model.add_tokens) - known.keys())
    return shape.vocab + len(model.add_tokens)


def config_of(recipe: Recipe) -> tuple[Mapping[str, Any], str]:
    """The fields of a recipe's `config.json`, and where they were read from.

    Raises:
        FinetuneError: it is not on this machine, and the hub does not provide it.
    """
    model = recipe.model
    if model.config is not None:
        return model.config, "model.config"
    if model.name is None:
        raise FinetuneError("model: give model.name or model.config: its shape is not known")
    for path in config_paths(model.name, model.revision):
        if path.is_file():
            return _config(path), str(path)
    known = published.find(model.name)
    if known is not None:
        return known, published.source(model.name)
    return _download(model.name, model.revision), "the hub"


def _download(name: str, revision: str | None) -> Any:
    """Download only the config.json of a model from the hub, in a single request.

    `hf_hub_download` (huggingface_hub 1.x) retries six times, which takes 24 s without a network.

    Raises:
        FinetuneError: there is no such file, or no network.
    """
    # The import takes a third of a second and is only needed for names not found elsewhere.
    from huggingface_hub import constants, get_token, hf_hub_url
    from huggingface_hub.utils import validate_repo_id

    given = "give a folder with config.json, or a hub id"
    with reading(f"model.name: no such folder: {name}; {given}"):
        validate_repo_id(name)
    with reading(
        f"model.name: no config.json of '{name}' in a folder of that name or in the hub cache, it "
        "is not in the built-in table, and the hub did not provide it",
        "name a local folder that has one, or give model.config",
    ):
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        url = hf_hub_url(name, "config.json", revision=revision)
        request = urllib.request.Request(url)
        if token := get_token():  # not sent to a redirect target
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=HUB_SECONDS) as answer:
            return json.loads(answer.read())


def _config(path: Path) -> Any:
    with reading(f"{path}: cannot be read"):
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise FinetuneError(f"{path}: got a {type(found).__name__}, expected an object with fields")
    return cast("dict[str, Any]", found)


def workload_of(plan: Plan, shape: Architecture) -> Workload:
    """The workload of one process of a plan."""
    recipe, backend = plan.recipe, plan.backend
    place = layout.of_backend(backend, plan.processes)
    kinds: dict[str, AttentionKind] = {"eager": "eager"}
    return Workload(
        shape=shape,
        rows=recipe.most_micro_rows * recipe.documents_per_row,
        length=recipe.batch.max_length,
        documents=recipe.documents_per_row,
        scheme=advice.scheme_of(place, backend.precision),
        fp16=backend.precision == "fp16",
        layout=place,
        adapter=_adapter(recipe, shape),
        quantization=recipe.model.quantization,
        checkpointing=recipe.model.checkpointing,
        activations_on_host=recipe.model.activation_checkpointing == "offload",
        state_copied=recipe.saving.background and recipe.saving.every is not None,
        attention=kinds.get(recipe.model.attention, "flash"),
        loss=LOSSES_OF_HEADS[next(k.value for k in plan.kernels if k.option == "head")],
        taught=recipe.teaches,
        teacher_shape=_shape_of(recipe, recipe.taught_by),
        teacher_quantization=recipe.taught_by.quantization if recipe.taught_by else "none",
        reference_shape=_shape_of(recipe, second_model(recipe)),
        reference_stays=recipe.needs_second_model,
        update=recipe.optim.name,
        accumulation=plan.accumulation,
        root_unit=place.axes.any,
        synchronise_each=synchronises_each(recipe),
        ahead=recipe.passes_before_step,
        wide_gradients=True,
        fused_norms=Choice("norm", "fused") in plan.kernels,
        fused_activations=Choice("activation", "fused") in plan.kernels,
        fused_rotations=Choice("rotary", "fused") in plan.kernels,
        grouped_adapters=Choice("lora", "grouped") in plan.kernels,
        compiled=recipe.kernels.blocks == "compiled",
    )


def _with_completions(plan: Plan, workload: Workload) -> Workload:
    """The workload with the memory of the completions that a divided model samples at once."""
    width = 2 if plan.backend.precision == "bf16" else 4
    sampled = sampling(plan.recipe, workload.shape, plan.processes, width)
    if sampled is None or not workload.layout.axes.any:
        return workload
    return dataclasses.replace(workload, completions=sampled.memory)


def _shape_of(recipe: Recipe, model: Model | None) -> Architecture | None:
    """The shape of a model other than the trained one; None for None."""
    if model is None:
        return None
    return model_source(dataclasses.replace(recipe, model=model, adapter=None)).shape


def _adapter(recipe: Recipe, shape: Architecture) -> Adapter | None:
    given = recipe.adapter
    if given is None:
        return None
    made = lora(
        shape,
        given.r,
        given.targets,
        width=4,  # PEFT keeps adapters in fp32
        dropout=given.dropout > 0,
        dora=given.use_dora,
        excluded=given.exclude_modules,
        only_layers=given.layers_to_transform,
        rank_pattern=given.rank_pattern,
        saved=given.modules_to_save,
    )
    rows = _rows(given.trainable_token_indices, shape)
    head = shape.scores * shape.hidden  # trained in full
    made = dataclasses.replace(
        made, parameters=made.parameters + rows + head, whole=made.whole + head
    )
    if shape.experts is None or not given.target_parameters or given.targets == "all-linear":
        return made
    layers = len(given.layers_to_transform) or shape.layers
    inner = layers * named_expert_size(shape, given.r, given.r, given.target_parameters)
    return dataclasses.replace(
        made, parameters=made.parameters + inner, experts=given.r if inner else 0
    )


Tokens = tuple[int | str, ...]


def _rows(tokens: Tokens | dict[str, Tokens], shape: Architecture) -> int:
    """Parameters of the rows that `adapter.trainable_token_indices` trains."""
    if isinstance(tokens, dict):
        return shape.hidden * sum(len(each) for each in tokens.values())
    return shape.hidden * len(tokens) * (1 if shape.tied else 2)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted memory, communication and time of a plan on a machine, in bytes and seconds."""

    plan: Plan
    machine: hardware.Machine
    source: Source
    workload: Workload
    timeline: memory.Timeline
    totals: totals.Totals
    usable: float
    status: advice.Status
    host: float
    """Bytes of host memory per node."""
    disk: float
    """Bytes on a node's disk, excluding checkpoints."""
    volume: communication.Volume
    times: Times
    steps: int | None
    """Optimizer steps of the run; None if the number of rows is unknown."""
    rows: int | None = None
    """Rows of the training set; None if unknown."""
    stages: tuple[memory.Timeline, ...] = ()
    """Timeline of each pipeline stage; a single one without a pipeline."""

    @property
    def links(self) -> list[traffic.Link]:
        """Bytes that a process sends along each axis per step, and their time."""
        return traffic.links(self.volume, self.workload, self.machine)

    @property
    def seconds(self) -> float | None:
        """Seconds of the complete run, including the pass of the reference; None if unknown."""
        if self.steps is None:
            return None
        return self.steps * self.times.step + (self.reference_seconds or 0.0)

    @property
    def reference_seconds(self) -> float | None:
        """Seconds of the reference model's pass over all rows before the first step.

        A method that reads the KL of a step adds one more row for each row of the run. None without
        a reference, or if the number of steps is unknown.
        """
        recipe = self.plan.recipe
        if not recipe.reads_reference or self.steps is None:
            return None
        rows = self.steps * recipe.batch.rows
        read = rows / recipe.epochs if self.rows is None else self.rows
        passes = (read + rows * recipe.passes_before_step) / recipe.batch.rows
        return passes * self.times.step * forward_share(self.workload)

    @property
    def gpu_hours(self) -> float | None:
        """GPU hours of the complete run; None if its length is unknown."""
        return None if self.seconds is None else self.seconds * self.machine.count / 3600

    @property
    def cost(self) -> float | None:
        """Cost of the run in the currency of the price; None if unknown."""
        if self.gpu_hours is None or self.machine.price is None:
            return None
        return self.gpu_hours * self.machine.price

    def page(self) -> str:
        """The prediction as text, as printed by `finetune plan`."""
        from finetune.planner.estimate import (
            changes,  # imports predictions
            page,  # imports predictions
        )

        safe = self.status == "safe"
        precision = self.plan.backend.precision
        found = [] if safe else changes.changes(self.workload, self.machine, precision)
        return page.page(self, found)

    def summary(self) -> dict[str, Any]:
        """Plain values, in bytes and seconds, for JSON."""
        times, volume = self.times, self.volume
        return {
            "machine": _machine_summary(self.machine),
            "model": {
                "source": self.source.where,
                "parameters": self.source.shape.parameters,
                "active_parameters": self.source.shape.active_parameters,
                "trained_parameters": self.workload.trained,
            },
            "memory": {
                "moments": [
                    {"name": moment.name, "bytes": moment.total, "parts": dict(moment.parts)}
                    for moment in self.timeline.moments
                ],
                "peak": self.timeline.peak.name,
                "stages": [found.peak.total for found in self.stages],
                **dataclasses.asdict(self.totals),
                "usable": self.usable,
                "status": self.status,
                "host_per_node": self.host,
                "disk_per_node": self.disk,
            },
            "communication": {
                **dataclasses.asdict(volume),
                "total": volume.total,
                "links": [dataclasses.asdict(link) for link in self.links],
            },
            "time": {
                **dataclasses.asdict(times),
                "tokens_per_second": times.tokens_per_second,
                "steps": self.steps,
                "seconds": self.seconds,
                "reference_seconds": self.reference_seconds,
                "gpu_hours": self.gpu_hours,
                "cost": self.cost,
            },
        }


def _machine_summary(machine: hardware.Machine) -> dict[str, Any]:
    fields = dataclasses.asdict(machine)
    fields["gpu"] = dataclasses.asdict(machine.gpu)
    return fields


def predict(
    plan: Plan,
    machine: hardware.Machine,
    rows: int | None = None,
    row_tokens: int | None = None,
) -> Prediction:
    """Predict memory, communication and time of a plan on a machine.

    Args:
        rows: rows of the training set, for the length of the complete run.
        row_tokens: average number of tokens per row, needed to count packs; by default looked up.

    Raises:
        FinetuneError: the model's shape is unknown, or the machine has a different number of GPUs
            than the plan has processes.
    """
    if machine.count != plan.processes:
        raise FinetuneError(
            f"--gpus {machine.count}: the plan runs {plan.processes} processes, one per GPU"
        )
    source = model_source(plan.recipe)
    machine = leaving_room(machine, plan.recipe, lambda recipe: model_source(recipe).shape)
    workload = _with_completions(plan, workload_of(plan, source.shape))
    option = advice.option(workload, machine)
    stages = memory.by_stage(workload)
    timeline = max(stages, key=lambda found: found.peak.total)
    return Prediction(
        plan,
        machine,
        source,
        workload,
        timeline,
        totals.of(timeline, workload, machine),
        option.usable,
        option.status,
        option.host,
        nvme.disk(workload) * machine.per_node,
        option.moved,
        option.times,
        steps_of(plan, rows, row_tokens),
        None if plan.recipe.batch.packing else rows,
        tuple(stages),
    )
