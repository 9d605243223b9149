"""The workload of one process in numbers: model, batch, numerics, adapter, loss, layout."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from finetune.planner.engines import Scheme
from finetune.planner.estimate.adapters import (
    HEADS,
    TABLES,
    adapted,
    adapter_size,
    expert_adapter_size,
    outer,
)
from finetune.planner.estimate.layout import Layout
from finetune.planner.estimate.numerics import AttentionKind, Numerics
from finetune.planner.estimate.states import adam_moments, nf4_bytes
from finetune.planner.shapes.architecture import Architecture, Matrix

Checkpointing = Literal["none", "full", "attention", "selective"]
"""What layers recompute: nothing, all, all but attention, or every second matrix product."""
"""How weights are held and computed with: all fp32; all bf16; fp32 weights under autocast; fp32
shards gathered in bf16; bf16 weights with fp32 masters in the optimizer."""
Update = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon"]


@dataclasses.dataclass(frozen=True)
class Loss:
    """Bytes per token and vocabulary entry around the loss."""

    name: str
    exact: bool = False
    """Run operation by operation (the profile of transformers >= 4.45 and of this toolkit)."""
    forward: float = 0.0
    """Most that the loss's forward pass holds besides the logits."""
    saved: float = 0.0
    """Kept from the forward to the backward pass."""
    backward: float = 0.0
    """Most that its backward pass holds, the gradient of the logits counted."""
    retained: float = 0.0
    """Held through the whole backward pass by whoever still refers to the output."""
    picked: bool = False
    """Logits of labelled rows are copied before they are made wide, and whole ones stay."""
    selected: bool = False
    """Hidden states of labelled rows alone enter the head."""
    logits: bool = True
    """Whether logits are ever whole in memory."""
    chunked: bool = False
    """As `kernels.head=chunked` computes it, whose memory is followed operation by operation."""


# Logits in bf16 (2) become fp32 (4), log-probabilities (4), and two gradients of 4 each.
HF = Loss("hf", exact=True)
# This toolkit's `kernels.head=whole`: the same operations on labelled rows.
OURS = Loss("finetune", exact=True, picked=True)
# `kernels.head=labelled`: hidden states of labelled tokens alone go through the head.
LABELLED = Loss("finetune_labelled", exact=True, selected=True)
# The bf16 logits stay referenced by the model's output while the backward pass runs.
HF_OUTPUT_KEPT = Loss("hf_output_kept", exact=True, retained=2)
# Accelerate's autocast returns fp32 logits, which the caller's output holds: 4 more, 16 in all.
HF_AUTOCAST = Loss("hf_autocast", exact=True, retained=4)
# transformers < 4.45: fp32 logits returned, shifted copy, log-probabilities, two gradients: 20.
HF_BEFORE_4_45 = Loss("hf_pre_4.45", forward=12, saved=8, backward=16, retained=4)
# Chunked cross-entropy in 8 pieces over bf16 logits: an eager chunk holds 12 bytes, a compiled 4.
CHUNKED_8 = Loss("chunked8", forward=12 / 8, saved=2, backward=2 + 12 / 8)
CHUNKED_8_COMPILED = Loss("chunked8_compiled", forward=4 / 8, saved=2, backward=2 + 4 / 8)
# litgpt computes fp32 cross-entropy over chunks of 128 rows: log-probabilities stay, 10 at most.
LITGPT = Loss("litgpt_chunked", forward=8, saved=6, backward=10)
# Cut or Liger cross-entropy never holds the logits (arXiv:2411.09009).
LINEAR = Loss("linear_cut", logits=False)
# This toolkit's `kernels.head=chunked`.
CHUNKED = Loss("finetune_chunked", logits=False, chunked=True)
# This toolkit's score head: at the last token of each sequence alone.
SCORES = Loss("finetune_scores", logits=False)
LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        HF, OURS, HF_OUTPUT_KEPT, HF_AUTOCAST, HF_BEFORE_4_45, CHUNKED_8, CHUNKED_8_COMPILED,
        LITGPT, LINEAR, CHUNKED, LABELLED, SCORES,
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Adapter:
    """LoRA on chosen matrices."""

    ranks: Mapping[str, int]
    """Rank by the matrix's last name, for the tape of one layer."""
    parameters: int
    width: int = 2
    """Bytes per adapter weight."""
    dropout: bool = False
    """Whether its input is thinned at random."""
    dora: bool = False
    """Whether weights are decomposed: a norm of each whole matrix, and a product more of each."""
    saved: frozenset[str] = frozenset()
    """Which of `embedding` and `head` is trained whole beside the adapter (`modules_to_save`): an
    fp32 copy under the name of the frozen one, which stays."""
    whole: int = 0
    """Parameters of those, which are among `parameters`."""
    experts: int = 0
    """Rank on experts, 0 where they have no adapter."""
    rows: Mapping[int, int] = dataclasses.field(default_factory=dict[int, int])
    """Parameters by the first dimension of their tensor, along which FSDP2 cuts it."""

    def padded(self, group: int) -> int:
        """Parameters that `group` shards hold together: each has as many rows as the largest."""
        more = sum(n // rows * (-rows % group) for rows, n in self.rows.items())
        return self.parameters + more


@dataclasses.dataclass(frozen=True)
class Workload:
    """One process's share of training, as far as memory, bytes and time depend on it."""

    shape: Architecture
    rows: int
    """Rows per forward pass."""
    length: int
    """Tokens per row."""
    scheme: Scheme = "autocast"
    layout: Layout = dataclasses.field(default_factory=Layout)
    adapter: Adapter | None = None
    quantization: Literal["none", "nf4", "nf4_single", "int8"] = "none"
    kbit_prepared: bool = False
    """Embedding, head and norms in fp32: what PEFT's `prepare_model_for_kbit_training` leaves."""
    checkpointing: Checkpointing = "none"
    attention: AttentionKind = "flash"
    loss: Loss = HF
    update: Update = "adamw"
    accumulation: int = 1
    stepping: Literal["fused", "foreach", "loop"] = "fused"
    """How the optimizer walks over parameters: `foreach` copies all gradients, `loop` makes two
    temporary copies of one tensor at a time."""
    root_unit: bool = False
    """FSDP: embedding, last norm and head are one unit that stays gathered, instead of two."""
    fp16: bool = False
    """Whether 16 bits are those that GPUs of before Ampere multiply in."""
    cpu: bool = False
    """Trained without an accelerator: dropout keeps wider masks."""
    compiled: bool = False
    """Layers run through torch.compile, which keeps the inputs of fused operations only."""
    immediate: bool = False
    """Each tensor is updated as soon as its gradient exists: gradients are never all alive."""
    activations_on_host: bool = False
    """What layers keep for the backward pass waits in host memory."""
    reduce_width: int = 4
    """Bytes per gradient element in FSDP's reductions."""
    inputs_kept: bool = False
    """Releases of bitsandbytes from 2023: 4-bit products keep their inputs (0.50 keeps none)."""
    synchronise_each: bool = False
    """FSDP reduces gradients after every micro-batch, and so keeps its own share only."""
    ahead: int = 0
    """Forward passes without gradient before each step, each over as many tokens as the step."""
    wide_gradients: bool = False
    """DeepSpeed adds gradients up in fp32, as the engine here tells it to."""
    fused_norms: bool = False
    """`kernels.norm`: RMSNorm in one operation."""
    fused_activations: bool = False
    """`kernels.activation`: the unit of a gated feed-forward layer in one operation."""
    fused_rotations: bool = False
    """`kernels.rotary`: query and key are rotated in one operation."""
    chained: bool = False
    """`kernels.pointwise`: cheap operations are compiled from C, as on CPUs."""
    labelled: float = 1.0
    """Share of the tokens that have a label, at most: all but the first of each row may have."""
    grouped_adapters: bool = False
    """`kernels.lora`: adapters of one input in one operation. ZeRO-3 leaves it."""
    teacher_shape: Architecture | None = None
    """Of a frozen model that runs before the student and stays in memory; None for none."""
    teacher_quantization: Literal["none", "nf4", "nf4_single", "int8"] = "none"
    reference_shape: Architecture | None = None
    """Of a frozen model that each process holds unsharded as the reference; None for none."""
    reference_stays: bool = False
    """Whether it stays for all of the run, and not for a pass before the first step."""
    taught: bool = False
    """The loss compares the head with a teacher's, that runs or is stored."""
    apart: bool = False
    """Each document attends in a call of its own, on CPUs in fp32."""
    scored: int = 0
    """Tokens of the longest document whose scores the backward pass of attention holds: on CPUs in
    16 bits, where attention is by products; 0 elsewhere."""

    @property
    def teacher(self) -> "Workload | None":
        """What the teacher is, as a model of which nothing is trained; None for none."""
        if self.teacher_shape is None:
            return None
        return dataclasses.replace(
            self, shape=self.teacher_shape, quantization=self.teacher_quantization,
            adapter=Adapter({}, 0), checkpointing="none", teacher_shape=None,
        )  # fmt: skip

    @property
    def teacher_bytes(self) -> float:
        """Of the teacher's weights, as one process holds them from step to step."""
        teacher = self.teacher
        if teacher is None:
            return 0.0
        scales = teacher.scale_bytes
        on_host = self.layout.offload == "all" and not self.cpu
        whole = teacher.frozen_bytes - scales
        return scales + (0.0 if on_host else whole / self.layout.share("params"))

    @property
    def reference_bytes(self) -> float:
        """Of the reference's weights: stored as those of the model that is trained."""
        shape = self.reference_shape
        if shape is None:
            return 0.0
        if self.adapter is None and self.quantization == "none":
            return float(shape.parameters * (4 if self.scheme == "fsdp" else self.trained_width))
        held = dataclasses.replace(self, shape=shape, adapter=Adapter({}, 0), reference_shape=None)
        return held.frozen_bytes

    @property
    def waiting_activations(self) -> float:
        """Bytes of blocks' inputs that wait in host memory for the backward pass."""
        if not self.activations_on_host:
            return 0.0
        return float(self.shape.layers * self.tokens * self.shape.hidden * self.numerics.residual)

    @property
    def scores(self) -> int:
        """`scored`, where the scores are not capped: those of Gemma 2 are written out."""
        return 0 if self.shape.capped_scores else self.scored

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def labelled_tokens(self) -> int:
        """Tokens that have a label."""
        return max(1, round(self.tokens * self.labelled))

    @property
    def trained(self) -> int:
        """Parameters that get gradients."""
        return self.shape.parameters if self.adapter is None else self.adapter.parameters

    def trains(self, part: Literal["embedding", "head"]) -> bool:
        """Whether all weights of a part outside the layers get gradients."""
        return self.adapter is None or part in self.adapter.saved

    @property
    def tied(self) -> bool:
        """Whether head and embedding are trained as one: copies of them are two."""
        return self.shape.tied and not self.shape.scores and self.adapter is None

    @property
    def sharded(self) -> int:
        """Trained parameters as the shards of all processes hold them, FSDP2's padding counted."""
        layout = self.layout
        if self.adapter is None or not layout.traits.shards_all or layout.group == 1:
            return self.trained
        return self.adapter.padded(layout.group)

    @property
    def compute(self) -> int:
        """Bytes of an element that matrices are multiplied in."""
        return 4 if self.scheme == "fp32" else 2

    @property
    def frozen_width(self) -> int:
        """Bytes per frozen weight that is not quantised: as it is computed with."""
        return self.compute

    @property
    def trained_width(self) -> int:
        """Bytes per trained weight as the layer holds it."""
        if self.adapter is not None:
            return self.adapter.width
        return 4 if self.scheme in ("fp32", "autocast") else 2

    @property
    def gradient_width(self) -> int:
        if self.scheme == "fsdp":
            return 4  # sharded gradients have the shards' type
        return self.trained_width

    @property
    def numerics(self) -> Numerics:
        full, axes = self.adapter is None, self.layout.axes
        autocast = self.scheme == "autocast"
        # The embedding's type is that of the hidden states, which autocast leaves as they are.
        wide = self.scheme == "fp32" or self.kbit_prepared
        wide = wide or (autocast and self.trains("embedding"))
        return Numerics(
            residual=4 if wide else 2,
            compute=self.compute,
            weights=self.trained_width if full else self.frozen_width,
            autocast=autocast,
            trained=full,
            adapters=0 if self.adapter is None else self.adapter.width,
            expert_rank=0 if self.adapter is None else self.adapter.experts,
            dropout=self.adapter is not None and self.adapter.dropout,
            dora=self.adapter is not None and self.adapter.dora,
            widened=self.cpu or self.quantization == "none",
            wide_masks=self.cpu,
            inputs_kept=self.inputs_kept,
            compiled=self.compiled,
            dequantised=self.quantization.startswith("nf4"),
            fused_norms=self.fused_norms,
            fused_activations=self.fused_activations,
            fused_rotations=self.fused_rotations,
            chained=self.chained,
            grouped_adapters=self.grouped_adapters and self._groups,
            rearranged=max(self.apart, axes.context > 1) + (axes.sequence > 1),
            gathered=axes.context,
            dispatched=axes.experts > 1,
        )

    @property
    def _groups(self) -> bool:
        """Whether adapters can be grouped here: ZeRO-3 gathers each layer for itself, and the
        matrices of GPT-2 lie the other way round."""
        return not self.layout.for_own_module and self.shape.kind != "gpt2"

    @property
    def paged(self) -> bool:
        """Whether the optimizer's moments are in memory that moves between GPU and host."""
        return self.update == "paged_adamw_8bit"

    @property
    def moments(self) -> float:
        """Optimizer bytes per trained parameter before sharding."""
        if self.update in ("adamw_8bit", "paged_adamw_8bit"):
            return adam_moments(1, eight_bit=True)
        if self.update == "adafactor":
            return 0.0  # rows and columns of second moments: under a thousandth of the weights
        width = 4 if self.scheme in ("fsdp", "deepspeed") else self.trained_width
        masters = 4 if self.scheme == "deepspeed" else 0
        if self.update != "muon":
            return masters + adam_moments(width, False)
        # One moment for matrices inside layers, AdamW's two for all else.
        full = self.adapter is None
        single = self.shape.layers * self.shape.linear_weights if full else self.trained
        return masters + width * (2 - single / self.trained)

    @property
    def frozen_bytes(self) -> float:
        """All frozen weights as they lie in memory, unsharded."""
        if self.adapter is None:
            return 0.0
        elsewhere = (self.shape.held_layer - self.shape.layer_parameters) * self.frozen_width
        inside = self.shape.layers * (self.frozen_layer_bytes + elsewhere)
        return inside + self.frozen_outer_bytes

    @property
    def frozen_layer_bytes(self) -> float:
        shape, inside = self.shape, self.shape.linear_weights
        small = shape.layer_parameters - inside - shape.expert_parameters
        width = 4 if self.kbit_prepared else self.frozen_width
        experts = shape.expert_parameters * self.frozen_width
        return self._stored(inside) + small * width + experts

    def _stored(self, weights: float) -> float:
        if self.quantization == "none":
            return weights * self.frozen_width
        if self.quantization == "int8":
            return weights * 1.0  # and one fp32 scale per output row, under a thousandth
        return nf4_bytes(weights, double_quantised=self.quantization == "nf4")

    @property
    def scale_bytes(self) -> float:
        """Scales of all 4-bit weights: every process holds them whole, for no engine knows them."""
        if not self.quantization.startswith("nf4"):
            return 0.0
        weights = self.shape.layers * self.shape.linear_weights
        return self._stored(weights) - weights / 2

    @property
    def frozen_outer_bytes(self) -> float:
        return self.shape.outer_parameters * (4 if self.kbit_prepared else self.frozen_width)

    @property
    def unit_bytes(self) -> float:
        """One layer gathered whole, as it is computed with."""
        if self.adapter is None:
            return self.shape.layer_parameters * self.compute
        adapters = self.sharded / self.shape.layers
        width = self.compute if self.scheme in ("fsdp", "deepspeed") else self.adapter.width
        scales = self.scale_bytes / self.shape.layers
        return self.frozen_layer_bytes - scales + adapters * width

    @property
    def outer_width(self) -> int:
        """Bytes per weight of a gathered embedding or head."""
        return 4 if self.kbit_prepared else self.compute

    @property
    def outer_bytes(self) -> float:
        """Embedding, norm and head gathered whole."""
        if self.adapter is None:
            return self.shape.outer_parameters * self.compute
        return self.frozen_outer_bytes


def lora(
    shape: Architecture,
    rank: int,
    targets: str | tuple[str, ...] = "all-linear",
    width: int = 4,
    dropout: bool = False,
    dora: bool = False,
    excluded: str | tuple[str, ...] = (),
    only_layers: tuple[int, ...] = (),
    rank_pattern: Mapping[str, int] | None = None,
    saved: Iterable[str] = (),
) -> Adapter:
    """The adapter that these settings make; `saved` are names of `modules_to_save`."""
    chosen = adapted(shape, targets, excluded, only_layers)
    patterns = rank_pattern or {}

    def rank_of(matrix: Matrix) -> int:
        return next((r for name, r in patterns.items() if matrix.name.endswith(name)), rank)

    outside = [] if only_layers else outer(shape, targets, excluded)
    wrapped = [*(matrix for _, matrix in chosen), *outside]
    parameters = sum(adapter_size(matrix, rank_of(matrix), dora) for matrix in wrapped)
    rows: dict[int, int] = {}
    for matrix in wrapped:
        r = rank_of(matrix)
        rows[r] = rows.get(r, 0) + r * matrix.inputs
        rows[matrix.outputs] = rows.get(matrix.outputs, 0) + r * matrix.outputs
    ranks = {matrix.leaf: rank_of(matrix) for _, matrix in chosen}
    experts = rank if targets == "all-linear" and shape.experts is not None else 0
    layers = len({layer for layer, _ in chosen})
    parameters += layers * expert_adapter_size(shape, experts)
    names = frozenset(name.rsplit(".", 1)[-1] for name in saved)
    tables = {
        TABLES.get(shape.kind, "embed_tokens"): "embedding",
        HEADS.get(shape.kind, "lm_head"): "head",
    }
    parts = frozenset(part for name, part in tables.items() if name in names)
    whole = shape.embedding * len(parts)
    return Adapter(ranks, parameters + whole, width, dropout, dora, parts, whole, experts, rows)
