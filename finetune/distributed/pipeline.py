"""Pipeline parallelism with the schedules of `torch.distributed.pipelining`.

Every process of a pipeline reads the micro-batches of a step, so only hidden states and their
gradients are sent between stages. With a load-balancing loss, the sums over the routers of earlier
stages are sent next to them, and their gradients back.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.profiler import record_function
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from finetune.data.rows.collate import MicroBatch
from finetune.data.rows.embedding_noise import Noise
from finetune.distributed import layers
from finetune.distributed.filling import padded
from finetune.distributed.mesh import Block, MeshEngine
from finetune.distributed.parameters import local
from finetune.errors import TrainingFailure
from finetune.kernels.balance import documents_of
from finetune.planner import schedules
from finetune.process import rendezvous
from finetune.process.attributes import changed

LossOf = Callable[[int, nn.Module], torch.Tensor]
PASS = "stage pass"
"""Prefix of the profiler marks of passes, which torch 2.13 makes only for some schedules."""


class PipelineEngine(MeshEngine):
    """Engine in which processes along the pipeline axis hold consecutive layers."""

    widens = False  # the next stage gets what this one computes

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        self.stages: list[Stage] = []
        self.teacher: nn.Module | None = None
        """The part of a running teacher on this process."""
        self.teacher_stages: list[Stage] = []
        self.is_first = self.place["pipeline"] == 0
        axes = self.plan.backend.axes
        here = schedules.parts_of(self.place["pipeline"], axes)
        self.has_last = axes.pipeline * axes.chunks - 1 in here
        self.ends = _group_of_ends(self.mesh) if axes.pipeline > 1 else None

    @property
    def counts(self) -> bool:
        return super().counts and self.has_last

    # The model -----------------------------------------------------------------------------------

    def wrap(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        # Before the base shards: FSDP2 gets the stages, not the model, as its roots (`_roots`).
        self.stages = self._stages(model)
        network: Any = layers.network_of(model)
        self.teacher = network._modules.pop("teacher", None)
        if self.teacher is not None:
            # Its stages run separately, and FSDP2 allows one root for each module.
            vars(network)["teacher"] = self.teacher
            self.teacher_stages = self._stages(self.teacher)
        super().wrap(model, optimizers)

    def _stages(self, model: nn.Module) -> list["Stage"]:
        """The stages of a model on this process."""
        axes = self.plan.backend.axes
        network = layers.network_of(model)
        spans = schedules.spans(network.config.num_hidden_layers, axes)
        total = len(spans)
        return [
            Stage(network, spans[chunk], chunk, total, axes.chunks > 1)
            for chunk in schedules.parts_of(self.place["pipeline"], axes)
        ]

    @contextlib.contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        with changed(self, stages=self._stages(model)), super().running(model):
            yield

    @property
    def casts(self) -> bool:
        """Whether FSDP2's policy determines the compute type, and not autocast."""
        return any(isinstance(stage, FSDPModule) for stage in self.stages)

    def _autocast(self, model: nn.Module) -> nn.Module:
        return model  # `_run` applies autocast, because a stage does not call the model's forward

    def _shard(self, model: nn.Module) -> None:
        super()._shard(model)
        if self.teacher is not None:
            super()._shard(self.teacher)

    def _roots(self, model: nn.Module) -> list[nn.Module]:
        return [*self.teacher_stages] if model is self.teacher else [*self.stages]

    def counted_elsewhere(self, model: nn.Module) -> set[int]:
        """The last stage's copy of a tied embedding, which the first stage counts."""
        network = layers.network_of(model)
        if not network.config.tie_word_embeddings or self.is_first or not self.has_last:
            return set()
        return {id(p) for p in network.get_output_embeddings().parameters()}

    def over_stages(self, counts: list[int]) -> list[int]:
        mine = torch.tensor(counts, dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(mine, group=self.mesh.get_group("pp"))
        return mine.tolist()

    # A step --------------------------------------------------------------------------------------

    def local_batches(self, batches: list[MicroBatch], pad_id: int) -> list[MicroBatch]:
        return padded(batches, pad_id)

    def accumulate(
        self,
        batches: list[MicroBatch],
        seeds: list[int],
        loss_of: LossOf,
        before_last: Callable[[], object],
    ) -> None:
        # A schedule interleaves the micro-batches, so no moment is before the last one only.
        before_last()
        with self._taught(batches) as seen:
            self._run(batches, seeds, loss_of, training=True, seen=seen)
        # Once per step, when both ends have added up the gradients of all of their micro-batches.
        self._sum_tied()
        if self.held_gradients is None:
            self.held_gradients = self.gradient_elements()

    def forward_only(self, batch: MicroBatch, loss_of: LossOf) -> None:
        # A schedule with several chunks needs at least one micro-batch per stage.
        count = self.plan.mesh.pipeline if len(self.stages) > 1 else 1
        batches = [batch] * count
        with self._taught(batches) as seen:
            self._run(batches, [0] * count, _once(loss_of), training=False, seen=seen)

    @contextlib.contextmanager
    def _taught(self, batches: list[MicroBatch]) -> Iterator[dict[int, torch.Tensor]]:
        """Context with the teacher's hidden states on the last stage, (rows * tokens, hidden).

        Its head is gathered inside.
        """
        found: dict[int, torch.Tensor] = {}

        def keep(index: int, head: Any) -> torch.Tensor:
            # The schedule needs a loss of each micro-batch; only the hidden states are used.
            found[index] = head.hidden.flatten(0, 1)
            return torch.zeros(1)

        if self.teacher is not None:
            with changed(self, stages=self.teacher_stages), torch.no_grad():
                self._run(batches, [0] * len(batches), keep, training=False, seen={})
        # The student's loss calls the teacher's head itself, and not the forward pass of its
        # stage, in which FSDP2 would gather the head's weight.
        sharded = [each for each in self.teacher_stages if isinstance(each, FSDPModule)]
        for stage in sharded:
            stage.unshard()
        try:
            yield found
        finally:
            for stage in sharded:
                stage.reshard()

    def _run(
        self,
        batches: list[MicroBatch],
        seeds: list[int],
        loss_of: LossOf,
        training: bool,
        seen: dict[int, torch.Tensor],
    ) -> None:
        for stage in self.stages:
            # torch hands stages only the tensors that are sent; all else is found here by number.
            stage.step = Step(batches, seeds, loss_of, self._dtype(), training, seen)
        schedule = self._schedule(batches, training)
        numbers = torch.arange(len(batches))
        first = (numbers,) if any(stage.first for stage in self.stages) else ()
        run = schedule.step if training else schedule.eval
        with contextlib.nullcontext() if self.casts else self.accelerator.autocast():
            run(*first, target=numbers, losses=[] if self.has_last else None)
        for stage in self.stages:
            stage.step = None

    def _schedule(self, batches: list[MicroBatch], training: bool) -> Any:
        """The schedule of a step, for the shape of its micro-batches.

        Shapes are passed in: torch 2.13 would otherwise infer them by additional passes.
        """
        axes, shape = self.plan.backend.axes, batches[0].ids.shape
        network = self.stages[0].network
        meta = {"device": "meta", "requires_grad": training}
        width = network.config.get_text_config().hidden_size
        hidden = torch.empty(*shape, width, dtype=self._dtype(), **meta)
        between: Any = hidden
        if training and network.balance is not None:
            # A row for each document of the fullest micro-batch, and one for padding.
            size = (_most_documents(batches) + 1, 2 * network.balance.experts + 1)
            between = (hidden, torch.empty(*size, dtype=torch.float32, **meta))
        scalar = torch.empty(1, dtype=torch.float32, **meta)
        number = torch.empty(1, dtype=torch.int64, device="meta")
        built = [
            MarkedStage(
                stage,
                stage.index,
                stage.total,
                self.device,
                group=self.mesh.get_group("pp"),
                input_args=number if stage.first else between,
                output_args=scalar if stage.last else between,
            )
            for stage in self.stages
        ]
        # 1F1B needs at least as many micro-batches as stages; an evaluation has one.
        kind = get_schedule_class(axes.schedule if training or len(built) > 1 else "GPipe")
        given = built if len(built) > 1 else built[0]
        return kind(
            # `_divided_loss` has divided already.
            given,
            n_microbatches=len(batches),
            loss_fn=self._divided_loss,
            scale_grads=False,
        )

    def _divided_loss(self, output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """Divide by the micro-batches of a step, as Accelerate's `backward` does."""
        return output.sum() / self.plan.accumulation

    def _dtype(self) -> torch.dtype:
        """Type of hidden states between stages: the residual stream has the type of the norms."""
        if self.casts and self.plan.backend.precision == "bf16":
            return torch.bfloat16
        network = self.stages[0].network
        block = next(layers.blocks(network))
        return next(p.dtype for name, p in block.named_parameters() if "norm" in name)

    def _sum_tied(self) -> None:
        """Sum the gradients of a tied embedding, which the first and the last stage both hold."""
        network = self.stages[0].network
        tied = self.ends is not None and network.config.tie_word_embeddings
        # A stage between the ends has no copy. With a V schedule the first process holds both ends,
        # as one tensor, in which autograd has already added both gradients.
        if not tied or self.is_first == self.has_last:
            return
        holder: Any = network.get_input_embeddings()
        table = holder.weight
        if table.grad is None:
            return
        if isinstance(table.grad, DTensor) and table.grad.placements != table.data.placements:
            # The gradient of a tensor-parallel embedding is not sharded.
            table.grad = table.grad.redistribute(placements=table.data.placements)
        torch.distributed.all_reduce(local(table.grad), group=self.ends)

    def _square(self, parameters: list[nn.Parameter]) -> torch.Tensor:
        # After `_sum_tied` both copies of a tied embedding have the same gradient: one counts.
        twice = self.counted_elsewhere(self.model)
        square = super()._square([p for p in parameters if id(p) not in twice])
        torch.distributed.all_reduce(square, group=self.mesh.get_group("pp"))
        return square

    def block(self, parameter: nn.Parameter) -> Block:
        writes, offsets = super().block(parameter)
        return writes and id(parameter) not in self.counted_elsewhere(self.model), offsets


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise the error of a pass itself, which torch 2.13 wraps in a RuntimeError.

    Errors of memory, of a lost rank and of a user are recognized by their types and texts.
    """
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


class MarkedStage(PipelineStage):
    """A stage that marks its passes in a profile, without the waits before them."""

    def forward_one_chunk(self, fwd_chunk_id: int, *words: Any, **named: Any) -> Any:
        # torch does not pass the number on to the stage.
        self.submod.at = fwd_chunk_id
        with _unwrapped(), record_function(f"{PASS} {self.stage_index} forward {fwd_chunk_id}"):
            return super().forward_one_chunk(fwd_chunk_id, *words, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *words: Any, **named: Any) -> Any:
        with _unwrapped(), record_function(f"{PASS} {self.stage_index} backward {bwd_chunk_id}"):
            return super().backward_one_chunk(bwd_chunk_id, *words, **named)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *words: Any, **named: Any) -> Any:
        with _unwrapped(), record_function(f"{PASS} {self.stage_index} weights {bwd_chunk_id}"):
            return super().backward_weight_one_chunk(bwd_chunk_id, *words, **named)


@dataclasses.dataclass(frozen=True)
class Step:
    """Inputs of the stages of a process for one run of the schedule."""

    batches: list[MicroBatch]
    seeds: list[int]
    loss_of: LossOf
    dtype: torch.dtype
    training: bool
    seen: dict[int, torch.Tensor]
    """Hidden states of a running teacher on the last stage, by micro-batch."""


class Stage(nn.Module):
    """The part of a model between two transfers; the last stage computes the loss."""

    def __init__(
        self, network: PreTrainedModel, span: range, index: int, total: int, several: bool
    ) -> None:
        """`several`: whether `network` also contains layers of other stages."""
        super().__init__()
        self.network: Any = network
        self.span, self.several = span, several
        if self.network.balance is not None:
            # transformers would record only the routers of the stage that runs first.
            maybe_install_capturing_hooks(self.network.base_model)
        self.index, self.total = index, total
        self.first, self.last = index == 0, index == total - 1
        self.step: Step | None = None
        self.at = 0
        """Index of the micro-batch of the next forward pass."""

    def forward(
        self, given: torch.Tensor, tally: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Hidden states (rows, tokens, hidden) of micro-batch `at`, or its loss (1,) if last.

        In training with a load-balancing loss, `Balance.tally` of the layers so far is passed on.
        """
        step, at = self.step, self.at
        assert step is not None
        batch, balance = step.batches[at], self.network.balance if step.training else None
        # Set here, because a schedule interleaves micro-batches; another stage draws other dropout.
        torch.manual_seed(step.seeds[at] + self.index)
        Noise.current = batch.noise
        inputs = {k: v for k, v in batch.inputs().items() if v is not None and k != "input_ids"}
        source = {"input_ids": batch.ids} if self.first else {"inputs_embeds": given}
        routed = {} if balance is None else {"output_router_logits": True}
        with self._alone() as base:
            output = base(**source, **inputs, **routed, use_cache=False)
        hidden, balanced = output.last_hidden_state, None
        if balance is not None:
            ends = None if batch.boundaries is None else batch.boundaries.ends
            documents, number = documents_of(batch.ids, batch.unpadded, ends, batch.real_tokens)
            rows = _most_documents(step.batches)
            mine = balance.tally(output.get("router_logits") or (), documents, rows)
            tally = mine if tally is None else tally + mine
            balanced = balance.of_tally(tally, documents, number) if self.last else None
        if not self.last:
            if hidden.dtype != step.dtype:
                raise TrainingFailure(
                    f"stage {self.index} outputs {hidden.dtype}, but the next stage expects "
                    f"{step.dtype}; use a backend without a pipeline for this model"
                )
            return hidden if tally is None else (hidden, tally)
        # A method's loss calls its model. Here that call only applies the head: the rest has run.
        head = _Head(self.network, hidden, balanced, step.seen.get(at))
        return step.loss_of(at, head).float().reshape(1)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[Any]:
        """Context in which the backbone has only the layers of this stage, under their indices."""
        base: Any = self.network.base_model
        if not self.several:
            yield base
            return
        own = nn.ModuleList(
            layer if index in self.span else layers.PipelineIdentityLayer()
            for index, layer in enumerate(base.layers)
        )
        norm = base.norm if self.last else layers.PipelineIdentityLayer()
        with changed(base, layers=own, norm=norm):
            yield base


@dataclasses.dataclass(frozen=True)
class _Head:
    """Stands in for the model in a method's loss, with hidden states that are already computed."""

    network: Any
    hidden: torch.Tensor  # (rows, tokens, hidden)
    balance: torch.Tensor | None
    seen: torch.Tensor | None

    def __call__(
        self,
        *,
        places: torch.Tensor,
        targets: torch.Tensor,
        logps: bool = False,
        statistics: bool = False,
        taught: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        hidden = self.hidden.flatten(0, 1)[places]
        if taught is not None:
            seen = None if self.seen is None else self.seen[places]
            return self.network.taught_loss(hidden, targets, taught, seen)
        loss = self.network.loss_of_hidden(hidden, targets, logps, statistics)
        return loss if self.balance is None else torch.cat([loss.view(-1), self.balance.view(1)])


def _most_documents(batches: list[MicroBatch]) -> int:
    counts = [len(b.boundaries.numbers) - 1 for b in batches if b.boundaries is not None]
    return max([*counts, batches[0].ids.shape[0]])


def _once(loss_of: LossOf) -> LossOf:
    """Compute the loss for only the first of several equal micro-batches."""

    def forward(index: int, model: nn.Module) -> torch.Tensor:
        found = loss_of(0, model) if index == 0 else None
        return torch.zeros(1) if found is None else found

    return forward


def _group_of_ends(mesh: Any) -> Any:
    """Group of the first and last rank of this process's pipeline; every process creates all."""
    lines = mesh.mesh.reshape(mesh.mesh.shape[0], -1).T.tolist()
    mine = None
    for line in lines:
        ends = [line[0], line[-1]]
        group = torch.distributed.new_group(ends)
        if rendezvous.rank() in ends:
            mine = group
    return mine
