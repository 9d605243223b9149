"""Build the plan: every derived number, or every reason why a recipe cannot run on a backend."""

import dataclasses
import math

from finetune import backend as backends
from finetune.backend import Backend
from finetune.errors import FinetuneError, refuse
from finetune.planner import library_limits, schedules
from finetune.planner.engines import TRAITS, Traits
from finetune.planner.kernels import Choice, DeviceType, attention_rules, choices, model_type
from finetune.planner.mesh import Mesh, mesh_of
from finetune.planner.padding import Padding, padding
from finetune.planner.prompt_sharing import SharedPrompts, shared_prompts
from finetune.planner.request import requested
from finetune.planner.rules import incompatibilities
from finetune.planner.shapes.config_files import decoder_fields, fields_of
from finetune.planner.shapes.read_config import read
from finetune.recipe import Recipe
from finetune.recipe.field_types import Every


@dataclasses.dataclass(frozen=True)
class Plan:
    """A recipe on a backend with a number of processes, and the values derived from them."""

    recipe: Recipe
    backend: Backend
    processes: int

    @property
    def mesh(self) -> Mesh:
        """The device mesh: the number of processes along each axis of the backend."""
        return mesh_of(self.backend, self.processes)

    @property
    def traits(self) -> Traits:
        """Properties of the engine."""
        return TRAITS[self.backend.engine]

    @property
    def accumulation(self) -> int:
        """Micro-batches per process and optimizer step; an upper bound with `micro_tokens`."""
        batch = self.recipe.batch
        return math.ceil(math.ceil(batch.rows / self.recipe.most_micro_rows) / self.mesh.data)

    @property
    def synchronises_each(self) -> bool:
        """Whether gradients are reduced after every micro-batch, if the engine has a choice."""
        return self.traits.chooses_reduction and synchronises_each(self.recipe)

    @property
    def widens_shards(self) -> bool:
        """Whether trained weights are cast to fp32 after sharding instead of during loading.

        No process then needs an fp32 copy of all weights; 16-bit weights in a file stay mapped.
        Not with added tokens, whose rows are means that 16 bits would round, and not with a
        teacher, which stays in 16 bits.
        """
        model = self.recipe.model
        loaded = model.name is not None and not model.add_tokens and not self.recipe.teaches
        return self.traits.shards_all and self.recipe.adapter is None and loaded

    @property
    def lr(self) -> float:
        """Peak learning rate, scaled as the recipe requests."""
        data = self.mesh.data
        scale = {"none": 1.0, "linear": float(data), "sqrt": math.sqrt(data)}
        return self.recipe.optim.lr * scale[self.recipe.optim.lr_scaling]

    @property
    def quant_storage(self) -> str:
        """Storage data type of packed NF4 weights.

        An engine that shards only floating point tensors needs the compute data type: FSDP would
        cast any other to it and corrupt the packed values.
        """
        floats = "float16" if self.backend.precision == "fp16" else "bfloat16"
        return floats if self.traits.floats_only else "uint8"

    @property
    def kernels(self) -> tuple[Choice, ...]:
        """The choice for each kernel option, as far as the model is known before loading."""
        return choices(self.recipe, self.backend, model_type(self.recipe))

    @property
    def padding(self) -> Padding:
        """The layout of rows, as far as the model is known before loading."""
        return padding(self.recipe, decoder_fields(fields_of(self.recipe)))

    @property
    def prompts(self) -> SharedPrompts:
        """Whether documents share prompts, as far as the model is known before loading."""
        return shared_prompts(self.recipe, self.backend, decoder_fields(fields_of(self.recipe)))

    def steps(self, rows: int) -> int:
        """Optimizer steps of the complete run on a training set of `rows` rows."""
        if self.recipe.max_steps is not None:
            return self.recipe.max_steps
        rows *= self.recipe.rows_per_sample
        return max(1, math.ceil(self.recipe.epochs * rows / self.recipe.batch.rows))

    def interval(self, every: Every | None, rows: int) -> int | None:
        """Optimizer steps of a cadence in the recipe, on a training set of `rows` rows."""
        if every is None or isinstance(every, int):
            return every
        if isinstance(every, float):
            steps = every * self.steps(rows)
        else:
            epoch = rows * self.recipe.rows_per_sample / self.recipe.batch.rows
            steps = float(every.split()[0]) * epoch
        return max(1, math.ceil(round(steps, 6)))

    def notes(self) -> list[str]:
        """Warnings that do not prevent the run."""
        notes: list[str] = []
        optim = self.recipe.optim
        if optim.lr_scaling != "none" and self.processes > 1:
            notes.append(
                f"optim.lr_scaling={optim.lr_scaling}: the learning rate is {self.lr:.3g} on "
                f"{self.processes} processes ({optim.lr:.3g} on one)"
            )
        notes += self.recipe.advice()
        notes += library_limits.advice(self.recipe, fields_of(self.recipe))
        return notes + [choice.line() for choice in self.kernels if choice.fallback]

    def summary(self) -> dict[str, object]:
        """The plan as plain values, for `plan.json`."""
        backend = self.backend
        return {
            "backend": backend.name,
            "engine": backend.engine,
            "shard": backend.shard,
            "offload": backend.offload,
            "device": backend.device,
            "precision": backend.precision,
            "processes": self.processes,
            "mesh": self.mesh.summary(),
            "rows_per_step": self.recipe.batch.rows,
            "micro_rows": self.recipe.batch.micro_rows,
            "micro_tokens": self.recipe.batch.micro_tokens,
            "packing": self.recipe.batch.packing,
            "padding": self.prompts.line(self.padding),
            "accumulation": self.accumulation,
            "lr": self.lr,
            **self._order_summary(),
            "kernels": {choice.option: choice.value for choice in self.kernels},
            "notes": self.notes(),
        }

    def _order_summary(self) -> dict[str, object]:
        """The order of micro-batches in a pipeline, and the exchange of keys and values."""
        axes = self.backend.axes
        found: dict[str, object] = {"rotation": axes.rotation} if axes.context > 1 else {}
        return found | (
            {"schedule": axes.schedule, "bubble": self.bubble} if self.mesh.pipeline > 1 else {}
        )

    def explain(self, device: DeviceType | None = None) -> str:
        """The plan as text, one line per topic.

        Args:
            device: type of the devices that the plan is for; None describes both.
        """
        recipe, backend = self.recipe, self.backend
        some = recipe.model.trainable
        whole = f"weights named {', '.join(some)}" if some else "all weights"
        trained = recipe.adapter.title if recipe.adapter else whole
        base = recipe.model.name or f"{(recipe.model.config or {}).get('model_type')} from scratch"
        stored = f", {self._stored()}" if recipe.model.quantization != "none" else ""
        offload = (
            ""
            if backend.offload == "none"
            else f", {backend.offload} offloaded to {backend.device}"
        )
        kernels = [each for each in self.kernels if device in (None, *(each.rules or (device,)))]
        lines = [
            f"model        {base}: {trained}{stored}",
            f"backend      {backend.name}: {backend.engine}, sharded: {backend.shard}"
            f"{self._copies()}{offload}, {backend.precision}",
            f"batch        {self._batch()}",
            f"rows         {self.prompts.line(self.padding)}",
            f"optimizer    {recipe.optim.name}, lr {self.lr:.3g}, {recipe.optim.schedule}, "
            f"clip {recipe.optim.max_grad_norm}{self._rates()}",
            f"kernels      {', '.join(f'{each.option} {each.value}' for each in kernels)}",
        ]
        rules = {f"{each.option}:": each.rules for each in kernels}
        if recipe.model.attention == "sdpa" and self.padding.free:
            rules["attention: documents apart,"] = attention_rules(recipe, backend)
        lines += [f"pipeline     {self.pipeline_words()}"] if self.mesh.pipeline > 1 else []
        for option, of_devices in rules.items():
            found = [rule for kind, rule in of_devices.items() if device in (None, kind)]
            lines += [f"             {option} {'; '.join(found)}"] if found else []
        return "\n".join(lines + [f"note         {note}" for note in self.notes()])

    def _rates(self) -> str:
        """The learning rates of groups of parameters; empty if all have the same."""
        optim = self.recipe.optim
        rates = [(group.match, (group.lr or 0.0) / optim.lr) for group in optim.groups
                 if group.lr is not None]  # fmt: skip
        rates += [("lora_B", optim.loraplus_lr_ratio)] if optim.loraplus_lr_ratio != 1 else []
        return "".join(f"; lr {self.lr * share:.3g} for {match}" for match, share in rates)

    def _copies(self) -> str:
        """The mesh, or the number of copies under hybrid sharding; empty otherwise."""
        if self.backend.axes.any:
            ring = ", ring attention" if self.backend.axes.ring > 1 else ""
            return f", {self.mesh.words()}{ring}"
        if self.backend.shard_size is None:
            return ""
        return f" in {self.mesh.replicate} copies over {self.mesh.shard} processes each"

    @property
    def bubble(self) -> float:
        """Fraction of a step in which a pipeline stage is idle; 0 without a pipeline."""
        return schedules.bubble(self.backend.axes, self.accumulation)

    def pipeline_words(self) -> str:
        """The pipeline bubble as text, with the number of micro-batches that would reduce it."""
        axes, count = self.backend.axes, self.accumulation
        enough = schedules.enough(axes)
        more = f"; below 10 % from {enough} on" if count < enough else ""
        return (
            f"{axes.pipeline} stages, {axes.schedule}: a stage is idle for {self.bubble:.1%} of a "
            f"step with {count} micro-batches{more}"
        )

    def _stored(self) -> str:
        """The share of the base model that bitsandbytes packs, as text.

        It packs linear layers, without the embeddings, the head, and the tensors of experts.
        """
        kind = self.recipe.model.quantization
        try:
            shape = read(fields_of(self.recipe))
        except FinetuneError:
            return f"linear layers of the base in {kind}, embeddings and head not"
        share = shape.layers * shape.linear_weights / shape.parameters
        return f"{share:.1%} of the base in {kind} (linear layers, without the head)"

    def _batch(self) -> str:
        batch = self.recipe.batch
        unit = "packs" if batch.packing else self.recipe.rows_are
        filled = "of whole documents, filled to" if batch.packing else "up to"
        length = self.recipe.row_length if batch.packing else batch.max_length
        what = "document" if self.recipe.documents_per_row > 1 and not batch.packing else unit[:-1]
        shares = f"{batch.micro_rows} micro x {self.accumulation} accumulation"
        if batch.micro_tokens is not None:
            shares = f"micro of {batch.micro_tokens} tokens x at most {self.accumulation}"
        groups = f"{self.processes} processes"
        if self.backend.axes.any:
            several = "s" * (self.mesh.data > 1)
            groups = f"{self.mesh.data} group{several} of {self.backend.axes.processes} processes"
        return f"{batch.rows} {unit} = {shares} x {groups}, {filled} {length} tokens a {what}"


def synchronises_each(recipe: Recipe) -> bool:
    """Whether FSDP reduces gradients after every micro-batch and keeps only its shard.

    Without this, every process would keep unsharded gradients of all weights until the last
    micro-batch of the step. The gradients of an adapter are small and are reduced once per step.
    """
    return recipe.adapter is None


def plan(
    recipe: Recipe,
    backend: Backend | str | None = None,
    processes: int | None = None,
    precision: backends.Precision | None = None,
) -> Plan:
    """Derive the plan of a recipe on a backend.

    Raises:
        FinetuneError: the recipe cannot run on the backend; contains every reason and what to
            use instead.
    """
    machine = backend if isinstance(backend, Backend) else backends.load(backend or recipe.backend)
    if precision is not None:
        machine = dataclasses.replace(machine, precision=precision)
    count = machine.processes if processes is None else processes
    refuse(incompatibilities(requested(recipe, machine, count)))
    return Plan(recipe, machine, count)
