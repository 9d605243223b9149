"""The workload of one process: model, batch, numerics, adapter, loss and layout."""

import dataclasses
from typing import Literal

from finetune.planner.engines import Scheme
from finetune.planner.estimate.adapter_sizes import NO_ADAPTER, Adapter
from finetune.planner.estimate.head_losses import HF, Loss
from finetune.planner.estimate.layout import Layout
from finetune.planner.estimate.trained_share import Share
from finetune.planner.families import family_of
from finetune.planner.shapes.architecture import Architecture
from finetune.recipe.sections import Completions

AttentionKind = Literal["flash", "masked", "eager"]
"""Attention implementations. `flash`: no mask; groups of heads share keys. `masked`: SDPA with a
materialized mask, keys and values repeated for all heads. `eager`: materialized scores and
probabilities."""
Checkpointing = Literal["none", "full", "attention", "selective"]
"""What layers recompute: nothing, all, all but attention, or every second matrix product."""

# NF4 (arXiv:2305.14314): 4 bits per weight, one fp32 maximum per block of 64. Double quantization
# stores the maxima in 8 bits, with one fp32 maximum per 256 of them: 4 + 8/64 + 32/(64 x 256) bits.
NF4_BLOCK = 64
NF4_SECOND_BLOCK = 256
# bitsandbytes 8-bit optimizers (arXiv:2110.02861): two moments, each with one byte per element and
# one fp32 maximum per 256 elements; smaller tensors than 4096 keep fp32 moments (min_8bit_size).
ADAM8_BLOCK = 256
ADAM4_BLOCK = 128


def nf4_bits(double_quantised: bool = True, block: int = NF4_BLOCK) -> float:
    """Bits per weight in NF4, including scales."""
    if not double_quantised:
        return 4 + 32 / block
    return 4 + 8 / block + 32 / (block * NF4_SECOND_BLOCK)


def nf4_bytes(weights: float, double_quantised: bool = True) -> float:
    return weights * nf4_bits(double_quantised) / 8


def adam_moments(width: float, narrow: bool) -> float:
    """Bytes per parameter of the two AdamW moments of `width` bytes, with scales if `narrow`."""
    return 2 * (width + narrow * 4 / (ADAM8_BLOCK if width == 1 else ADAM4_BLOCK))


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work of one process: everything that its memory, communication and time depend on."""

    shape: Architecture
    rows: int
    """Sequences per forward pass."""
    length: int
    """Tokens per sequence."""
    scheme: Scheme = "autocast"
    layout: Layout = dataclasses.field(default_factory=Layout)
    adapter: Adapter | None = None
    share: Share | None = None
    """What is trained without an adapter; None for all weights."""
    quantization: Literal["none", "nf4", "nf4_single", "int8"] = "none"
    kbit_prepared: bool = False
    """Embedding, head and norms in fp32, as after PEFT's `prepare_model_for_kbit_training`."""
    checkpointing: Checkpointing = "none"
    attention: AttentionKind = "flash"
    loss: Loss = HF
    update: str = "adamw"
    state: float | None = None
    """Bytes of optimizer state per weight in fp32, if it is not known by `update`."""
    ema: bool = False
    """Whether the optimizer keeps a moving average of the weights."""
    accumulation: int = 1
    stepping: Literal["fused", "foreach", "loop"] = "fused"
    """Optimizer step: `foreach` copies all gradients, `loop` copies one tensor at a time twice."""
    root_unit: bool = False
    """FSDP: embedding, final norm and head are one unit that stays gathered, instead of two."""
    fp16: bool = False
    """Whether the 16-bit data type is fp16, as on GPUs older than Ampere."""
    cpu: bool = False
    """Trained without an accelerator, where dropout keeps wider masks."""
    compiled: bool = False
    """Chains of pointwise operations are one kernel. It keeps its inputs and the values that the
    gradient of a weight multiplies: the partitioner of torch 2.13 does not recompute values that
    the backward pass must hold."""
    immediate: bool = False
    """Each tensor is updated as soon as its gradient exists, so gradients are freed one by one."""
    activations_on_host: bool = False
    """Activations that layers keep for the backward pass are stored in host memory."""
    reduce_width: int = 4
    """Bytes per gradient element in FSDP's reductions."""
    inputs_kept: bool = False
    """4-bit products keep their inputs, as in bitsandbytes releases of 2023 (not in 0.50)."""
    synchronise_each: bool = False
    """FSDP reduces gradients after every micro-batch and keeps only its shard."""
    ahead: int = 0
    """Forward passes without gradient before each step, each over as many tokens as the step."""
    wide_gradients: bool = False
    """DeepSpeed accumulates gradients in fp32, as configured by the engine here."""
    fused_norms: bool = False
    """`kernels.norm`: RMSNorm in one operation."""
    fused_activations: bool = False
    """`kernels.activation`: gated activation in one operation."""
    fused_rotations: bool = False
    """`kernels.rotary`: query and key are rotated in one operation."""
    chained: bool = False
    """`kernels.pointwise`: pointwise operations are compiled from C, as on CPUs."""
    labelled: float = 1.0
    """Upper bound on the fraction of tokens with a label; the first of each row never has one."""
    grouped_adapters: bool = False
    """`kernels.lora`: adapters that share an input run in one operation, except with ZeRO-3."""
    teacher_shape: Architecture | None = None
    """Shape of a teacher that runs before the student and stays in memory; None for no teacher."""
    teacher_quantization: Literal["none", "nf4", "nf4_single", "int8"] = "none"
    reference_shape: Architecture | None = None
    """Shape of a reference model that each process holds unsharded; None for no such model."""
    reference_stays: bool = False
    """Whether the reference stays in memory during training, or only before the first step."""
    taught: bool = False
    """The loss compares the head with that of a teacher, whether running or stored."""
    apart: bool = False
    """Each document attends in a separate call, as on CPUs in fp32."""
    repeated: float = 1.0
    """Tokens in attention for each token elsewhere, if documents share prompts."""
    scored: int = 0
    """Tokens of the longest document whose scores attention holds, on CPUs in 16 bits; else 0."""
    sampled: Completions | None = None
    """Completions that the processes sample; None if they sample none."""
    documents: int = 1
    """Sequences of a row of `batch.micro_rows`: a pair has two."""
    mean_length: float = 1.0
    """Average length of a row, as a share of the maximum."""
    padded: bool = False
    """Whether rows are padded to the longest of their micro-batch."""
    document: float = 0.0
    """Average tokens of a document, for the time of attention; 0 if all rows are full."""
    image_bytes: float | None = None
    """Bytes of the images of a micro-batch; None if all tokens may be those of images."""

    @property
    def teacher(self) -> "Workload | None":
        """The workload of the teacher, of which nothing is trained; None for no teacher."""
        if self.teacher_shape is None:
            return None
        return dataclasses.replace(
            self, shape=self.teacher_shape, quantization=self.teacher_quantization,
            adapter=NO_ADAPTER, checkpointing="none", teacher_shape=None,
        )  # fmt: skip

    @property
    def teacher_bytes(self) -> float:
        """Bytes of the teacher's weights that stay on one process between steps."""
        teacher = self.teacher
        if teacher is None:
            return 0.0
        scales = teacher.scale_bytes
        on_host = self.layout.offload == "all" and not self.cpu
        own = 0.0 if on_host else teacher.frozen_bytes - scales
        return scales + own / self.layout.share("params")

    @property
    def reference_bytes(self) -> float:
        """Bytes of the reference model's weights, stored like those of the trained model."""
        shape = self.reference_shape
        if shape is None:
            return 0.0
        if self.adapter is None and self.quantization == "none":
            return float(shape.parameters * (4 if self.scheme == "fsdp" else self.trained_width))
        held = dataclasses.replace(self, shape=shape, adapter=NO_ADAPTER, reference_shape=None)
        return held.frozen_bytes

    @property
    def waiting_activations(self) -> float:
        """Bytes of block inputs that are stored in host memory for the backward pass."""
        if not self.activations_on_host:
            return 0.0
        return float(self.shape.layers * self.tokens * self.shape.hidden * self.residual)

    @property
    def filled(self) -> float:
        """Average share of the slots of full rows that are computed, including padding.

        The longest of n rows, whose lengths are assumed to be spread exponentially, is on average
        1 + 1/2 + ... + 1/n times as long as their mean.
        """
        longest = sum(1 / n for n in range(1, self.micro_rows + 1)) if self.padded else 1.0
        return min(1.0, self.mean_length * longest)

    @property
    def micro_rows(self) -> int:
        """Rows per forward pass, as `batch.micro_rows` counts them."""
        return self.rows // self.documents

    def with_micro_rows(self, micro_rows: int, accumulation: int | None = None) -> "Workload":
        """The workload with micro-batches of `micro_rows` rows."""
        steps = self.accumulation if accumulation is None else accumulation
        return dataclasses.replace(self, rows=micro_rows * self.documents, accumulation=steps)

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def image_tokens(self) -> int:
        """Tokens of images in a micro-batch of a model that reads images."""
        tower = self.shape.tower
        if tower is None or self.image_bytes is None:
            return self.tokens
        return round(self.image_bytes / tower.pixels)

    @property
    def labelled_tokens(self) -> int:
        """Number of tokens with a label."""
        return max(1, round(self.tokens * self.labelled))

    @property
    def trained(self) -> int:
        """Number of parameters with gradients."""
        if self.adapter is not None:
            return self.adapter.parameters
        return round(self.trained_inner) + self.trained_outer

    @property
    def trained_inner(self) -> float:
        """Without an adapter: parameters with gradients inside layers."""
        shape, share = self.shape, self.share
        return shape.layers * shape.held_layer if share is None else share.inner(shape)

    @property
    def trained_outer(self) -> int:
        """Without an adapter: parameters with gradients outside layers."""
        return self.shape.outer_parameters if self.share is None else self.share.outer(self.shape)

    def trains(self, part: Literal["embedding", "head"]) -> bool:
        """Whether all weights of the embedding or the head get gradients."""
        if self.adapter is not None:
            return part in self.adapter.saved
        return self.share is None or getattr(self.share, part)

    @property
    def tied(self) -> bool:
        """Whether head and embedding are trained as one tensor; `Adapter.saved` copies are not."""
        return self.shape.tied and self.adapter is None

    @property
    def sharded(self) -> int:
        """Trained parameters in the shards of all processes, including FSDP2's padding."""
        layout = self.layout
        if self.adapter is None or not layout.traits.shards_all or layout.group == 1:
            return self.trained
        return self.adapter.padded(layout.group)

    @property
    def compute(self) -> int:
        """Bytes per element of the compute data type, and per frozen, unquantized weight."""
        return 4 if self.scheme == "fp32" else 2

    @property
    def trained_width(self) -> int:
        """Bytes per trained weight in the layer."""
        if self.adapter is not None:
            return self.adapter.width
        return 4 if self.scheme in ("fp32", "autocast") else 2

    @property
    def gradient_width(self) -> int:
        if self.scheme == "fsdp":
            return 4  # sharded gradients have the data type of the shards
        return self.trained_width

    @property
    def recomputes(self) -> bool:
        """Whether a layer's forward pass runs again in the backward pass, from its kept input."""
        return self.checkpointing in ("full", "attention")

    @property
    def trains_all(self) -> bool:
        """Whether the layer's own weights get gradients."""
        return self.adapter is None

    @property
    def autocast(self) -> bool:
        """Whether each matrix product casts its inputs separately."""
        return self.scheme == "autocast"

    @property
    def residual(self) -> int:
        """Bytes per element of the hidden state between layers."""
        # Hidden states have the data type of the embedding, which autocast does not change.
        wide = self.scheme == "fp32" or self.kbit_prepared
        return 4 if wide or (self.autocast and self.trains("embedding")) else 2

    @property
    def stored_width(self) -> int:
        """Bytes per element of the layer's stored weights."""
        return self.trained_width if self.adapter is None else self.compute

    @property
    def widens_inputs(self) -> bool:
        """Whether PEFT 0.21, under autocast, first casts an adapter's input to the adapter's fp32.

        Its bitsandbytes layers leave casting to autocast on CUDA.
        """
        return self.cpu or self.quantization == "none"

    @property
    def dequantizes(self) -> bool:
        """Whether weights are stored in 4 bits and dequantized for each product."""
        return self.quantization.startswith("nf4")

    @property
    def groups_adapters(self) -> bool:
        """Whether adapters are grouped: ZeRO-3 gathers each module, and GPT-2's are transposed."""
        transposed = family_of(self.shape.kind).transposed
        return self.grouped_adapters and not (self.layout.for_own_module or transposed)

    @property
    def rearranged(self) -> int:
        """Number of additional saved copies of attention's output in another order.

        Concatenated documents that attended in separate calls, or heads exchanged for tokens. Ring
        attention makes none.
        """
        axes = self.layout.axes
        return (max(self.apart, axes.context > 1) + (axes.sequence > 1)) * (axes.ring == 1)

    @property
    def gathered(self) -> int:
        """Processes whose keys and values are gathered before attention (context parallel)."""
        return self.layout.axes.context // self.layout.axes.ring

    @property
    def paged(self) -> bool:
        """Whether the moments of the optimizer are in memory that moves between GPU and host."""
        return self.update == "paged_adamw_8bit"

    @property
    def moments(self) -> float:
        """Optimizer bytes per trained parameter before sharding."""
        width = 4 if self.scheme == "fsdp" else self.trained_width
        return self._moments + self.ema * width

    @property
    def _moments(self) -> float:
        if self.update in ("adamw_8bit", "paged_adamw_8bit"):
            return adam_moments(1, narrow=True)
        if self.update == "adamw_4bit":
            return adam_moments(0.5, narrow=True)
        if self.update == "adafactor":
            return 0.0  # rows and columns of second moments: under a thousandth of the weights
        width = 4 if self.scheme in ("fsdp", "deepspeed") else self.trained_width
        masters = 4 if self.scheme == "deepspeed" else 0
        if self.state is not None:
            return masters + self.state * width / 4
        if self.update == "lion":
            return width
        if self.update != "muon":
            return masters + adam_moments(width, False)
        # One moment for matrices inside layers, and the two of AdamW for everything else.
        full = self.adapter is None
        single = self.shape.layers * self.shape.linear_weights if full else self.trained
        return masters + width * (2 - single / self.trained)

    @property
    def frozen_bytes(self) -> float:
        """Bytes of all frozen weights as stored, unsharded."""
        if self.adapter is None:  # stored like those that are trained
            width = 4 if self.scheme == "fsdp" else self.trained_width
            return float((self.shape.parameters - self.trained) * width)
        elsewhere = (self.shape.held_layer - self.shape.layer_parameters) * self.compute
        inside = self.shape.layers * (self.frozen_layer_bytes + elsewhere)
        return inside + self.outer_bytes

    @property
    def frozen_layer_bytes(self) -> float:
        shape, inside = self.shape, self.shape.linear_weights
        small = shape.layer_parameters - inside - shape.expert_parameters
        return (
            self._stored(inside) + small * self.outer_width + shape.expert_parameters * self.compute
        )

    def _stored(self, weights: float) -> float:
        if self.quantization == "none":
            return weights * self.compute
        if self.quantization == "int8":
            return weights * 1.0  # and one fp32 scale per output row, under a thousandth
        return nf4_bytes(weights, double_quantised=self.quantization == "nf4")

    @property
    def scale_bytes(self) -> float:
        """Bytes of the scales of all 4-bit weights, which no engine shards."""
        if not self.quantization.startswith("nf4"):
            return 0.0
        weights = self.shape.layers * self.shape.linear_weights
        return self._stored(weights) - weights / 2

    @property
    def unit_bytes(self) -> float:
        """Bytes of one gathered layer in the compute data type."""
        if self.adapter is None:
            return self.shape.layer_parameters * self.compute
        adapters = self.sharded / self.shape.layers
        width = self.compute if self.scheme in ("fsdp", "deepspeed") else self.adapter.width
        return self.frozen_layer_bytes - self.scale_bytes / self.shape.layers + adapters * width

    @property
    def divided_experts(self) -> float:
        """Elements of a layer's experts on this process if FSDP2 shards them as a separate unit."""
        experts = self.shape.experts
        if experts is None or self.layout.axes.experts == 1:
            return 0.0
        return float(experts.count * experts.weights(self.shape.hidden))

    @property
    def outer_width(self) -> int:
        """Bytes per frozen weight of a norm, embedding or head."""
        return 4 if self.kbit_prepared else self.compute

    @property
    def outer_bytes(self) -> float:
        """Bytes of the gathered embedding, norm and head."""
        return float(self.shape.outer_parameters * self.outer_width)
