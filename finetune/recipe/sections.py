"""The sections of a recipe, all of them frozen and validated values."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints
from pydantic.dataclasses import dataclass

from finetune.errors import Checked

STRICT = ConfigDict(
    extra="forbid", use_attribute_docstrings=True, str_strip_whitespace=True, allow_inf_nan=False
)

Positive = Annotated[int, Field(gt=0, le=10**12)]
Share = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


def one_name(names: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """`q_proj` as the name that is meant: PEFT takes a text for an expression of whole paths."""
    return (names,) if isinstance(names, str) and re.fullmatch(r"\w+", names) else names


Names = Annotated[str | tuple[str, ...], AfterValidator(one_name)]
"""Names of modules, or a regular expression; a word alone is a name."""
AnswerMetric = Literal["exact", "number", "labels", "f1", "rouge", "bleu", "chrf", "json", "tools"]
"""Metrics of answers that need nothing but the rows."""
Token = Annotated[str, StringConstraints(min_length=1, strip_whitespace=False)]


@dataclass(frozen=True, config=STRICT)
class Model(metaclass=Checked):
    """The network that is trained, and how it is held in memory."""

    name: Text | None = None
    """Hub id or local folder of a pretrained model."""
    config: dict[str, Any] | None = None
    """Architecture to build from scratch instead: the fields of a `config.json`."""
    tokenizer: Text | None = None
    """Hub id or folder of the tokenizer; by default that of `name`."""
    revision: Text | None = None
    """Branch, tag or commit of `name` on the hub."""
    quantization: Literal["none", "nf4", "int8"] = "none"
    """How frozen base weights are stored: as is, NF4 with double quantisation, LLM.int8."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    """Attention implementation, by its name in transformers."""
    activation_checkpointing: bool | Literal["attention", "offload"] = False
    """Recompute activations: all (true), all but those of `attention`, or from the host's copy."""
    chat_template: Text | None = None
    """A built-in template (`chatml`, `plain`), a file, or the name of one of the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Values of the chat template's variables, such as `enable_thinking`."""
    adapter: Text | None = None
    """LoRA to train further: a run, an export, a folder in PEFT's format, or a hub id."""
    add_tokens: tuple[Token, ...] = ()
    """Tokens to add to the tokenizer; new rows of the model's tables start as their mean."""
    trust_remote_code: bool = False
    """Run code that the model's repository ships. Never turned on by anything but this field."""
    router_aux_loss: Literal["model", "none"] | Annotated[float, Field(ge=0)] = "model"
    """Load-balancing loss of experts: as config.json asks (`model`), none, or with a factor."""
    pickle: bool = False
    """Load weights from a pickle (`pytorch_model.bin`) where there are no safetensors."""

    def __post_init__(self) -> None:
        if self.name is not None and self.config is not None:
            raise ValueError("give `name` (pretrained) or `config` (from scratch), not both")

    @property
    def checkpointing(self) -> Literal["none", "full", "attention"]:
        """What `activation_checkpointing` says, in one word."""
        if self.activation_checkpointing == "attention":
            return "attention"
        return "full" if self.activation_checkpointing else "none"


@dataclass(frozen=True, config=STRICT)
class LoRA(metaclass=Checked):
    """A low-rank adapter (Hu et al. 2021, arXiv:2106.09685); the rest of the model is frozen."""

    r: Positive = 16
    """Rank of the update."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Scale: the update is multiplied by alpha / r. By default 2r."""
    dropout: Share = 0.0
    """Dropout on the adapter's input."""
    targets: Names = "all-linear"
    """Modules that get an adapter: names, a regular expression, or `all-linear`."""
    target_parameters: tuple[str, ...] = ()
    """Parameters that get one although no module is theirs: expert tensors, by name or its end."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole and saved with the adapter, such as `embed_tokens`."""
    trainable_token_indices: tuple[int | Token, ...] | dict[str, tuple[int | Token, ...]] = ()
    """Tokens (or ids) whose rows of embedding and head are trained; a dict names other tables."""
    use_dora: bool = False
    """Weight-decomposed LoRA (arXiv:2402.09353)."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) (arXiv:2312.03732)."""
    init_lora_weights: bool | str = True
    """Initial A and B by PEFT's name: true, `gaussian`, `pissa`, `olora`, `orthogonal`, ..."""
    exclude_modules: Names = ()
    """Modules that get no adapter although `targets` matches them."""
    layers_to_transform: tuple[int, ...] = ()
    """Indices of the only layers that get an adapter; empty for all."""
    rank_pattern: dict[str, Positive] = Field(default_factory=dict)
    """Ranks that differ from `r`, by module name or regular expression."""
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    """Alphas that differ from `alpha`, by module name or regular expression."""

    @property
    def scale_alpha(self) -> float:
        """`alpha`, or its default of 2r."""
        return 2.0 * self.r if self.alpha is None else self.alpha


@dataclass(frozen=True, config=STRICT)
class Data(metaclass=Checked):
    """One source of rows. A mixture is a tuple of these."""

    source: str
    """A file (JSONL, JSON, Parquet, Arrow, CSV, TSV, text), a folder or glob, or a hub name."""
    format: str
    """How a row becomes a sample: `messages`, `sharegpt`, `alpaca`, `text`, ..."""
    subset: str | None = None
    """Configuration name of a hub data set, or of a folder whose README.md has `configs`."""
    split: str = "train"
    """Split of a hub data set, or of a folder by the hub's naming rules."""
    columns: dict[str, str | None] = Field(default_factory=dict)
    """Names of the source's columns in the format; null leaves a column out knowingly."""
    on_bad_row: Literal["error", "drop"] = "error"
    """What happens to a row that cannot be read or rendered; `drop` counts it and lists it."""
    first: Positive | None = None
    """Maximum number of rows to read."""
    stream: bool = False
    """Read a hub data set without a copy of it on the disk, and no further than `first`."""
    repeat: Positive = 1
    """How often each row occurs in one epoch."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of this source among those of a mixture; an epoch is as long as no row comes twice."""


@dataclass(frozen=True, config=STRICT)
class Batch(metaclass=Checked):
    """How many rows make a step, and how many of them a device sees at once."""

    rows: Positive = 32
    """Rows, pairs or packs per optimizer step, over all processes and accumulation steps."""
    micro_rows: Positive = 1
    """Rows per forward pass on one device: a fact about memory."""
    max_length: Positive = 1024
    """Longest document in tokens; a pair is two documents."""
    overlong: Literal["error", "drop", "truncate", "split"] = "error"
    """What happens to a row longer than `max_length`; `split` makes several rows of it."""
    packing: bool = False
    """Fill rows of `max_length` with whole documents, each of which sees only itself."""
    padding_free: bool | Literal["auto"] = "auto"
    """Rows of a micro-batch side by side, none padded; `auto`: where exact, true: or refuse."""
    micro_tokens: Positive | None = None
    """Token slots per forward pass on one device, instead of `micro_rows`: as many rows as fit."""


@dataclass(frozen=True, config=STRICT)
class Optim(metaclass=Checked):
    """The optimizer and its schedule, both counted in optimizer steps of the whole job."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon"] = "adamw"
    """Update rule."""
    lr: Annotated[float, Field(gt=0)] = 2e-4
    """Peak learning rate."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply `lr` by the number of processes, by its square root, or not at all."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after warmup."""
    warmup: Annotated[float, Field(ge=0)] = 0.03
    """Warmup: a share of all steps when below 1, else a number of steps."""
    min_lr: Share = 0.0
    """Share of `lr` at which the schedule ends."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay on matrices; vectors (biases, norms) are never decayed."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay rates of the running moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Term that keeps the denominator from zero."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip the gradient to this norm over all parameters of all processes; null for no clipping."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a NaN or infinite loss or gradient does; the step is never taken. `skip` goes on."""
    max_skipped: Positive = 10
    """Steps of the whole run that `skip` may leave out; one more stops the run."""


@dataclass(frozen=True, config=STRICT)
class Kernels(metaclass=Checked):
    """How the same mathematics is computed: nothing here changes what is learned."""

    head: Literal["chunked", "whole"] = "chunked"
    """Head and loss: on labelled rows in chunks that never hold all logits, or on every row."""
    lora: Literal["grouped", "separate"] = "grouped"
    """Adapters: those of one input (q, k, v; gate, up) as one operation, or each as PEFT does."""
    norm: Literal["fused", "plain"] = "fused"
    """RMSNorm: one operation that keeps its input only, or as transformers computes it."""
    activation: Literal["fused", "plain"] = "fused"
    """SwiGLU, GeGLU: one operation that keeps gate and up only, or as transformers computes it."""
    rotary: Literal["fused", "plain"] = "fused"
    """Rotary positions: query and key in one operation, or as transformers computes them."""
    pointwise: Literal["auto", "compiled", "eager"] = "auto"
    """Cheap operations within the others and attention: compiled, or one by one."""
    allocator: Literal["auto", "pooled", "plain"] = "auto"
    """CPU only: reuse a memory pool for large tensors instead of calling `malloc`."""


@dataclass(frozen=True, config=STRICT)
class Evaluation(metaclass=Checked):
    """What is measured on `eval_data` while training."""

    every: Positive | None = None
    """Optimizer steps between evaluations; by default once, at the end."""
    micro_rows: Positive | None = None
    """Rows per forward pass; by default that of the batch."""
    best: Text = "loss"
    """What the best checkpoint has: lowest `loss`, or the highest (`-NAME`: lowest) of a metric."""
    patience: Positive | None = None
    """Stop after so many evaluations in a row that are not better; null to never stop early."""
    metrics: tuple[AnswerMetric, ...] = ()
    """Metrics of greedy answers to held-out rows at each evaluation, by `finetune eval`'s names."""
    metric_rows: Positive = 64
    """Maximum number of rows that are answered, evenly spaced."""
    max_new_tokens: Positive = 128
    """Longest answer in tokens."""


@dataclass(frozen=True, config=STRICT)
class Saving(metaclass=Checked):
    """When checkpoints are written, and how many stay."""

    every: Positive | None = None
    """Optimizer steps between checkpoints; by default once, at the end."""
    keep: Positive = 2
    """Newest checkpoints that stay; the one with the best evaluation stays besides."""
    background: bool = False
    """Write checkpoints while training goes on: for a copy of the state in host memory."""
    rehearse: bool = False
    """Before the first step, write a checkpoint of the real state and read it back."""


@dataclass(frozen=True, config=STRICT)
class Teacher(metaclass=Checked):
    """A model that teaches: frozen, in inference mode, sharded as its student is."""

    name: Text
    """Hub id or local folder."""
    revision: Text | None = None
    """Branch, tag or commit of `name` on the hub."""
    quantization: Literal["none", "nf4", "int8"] = "none"
    """How its weights are stored: as is, NF4 with double quantisation, LLM.int8."""
    trust_remote_code: bool = False
    """Run code that the teacher's repository ships. Never turned on by anything but this field."""
    pickle: bool = False
    """Load weights from a pickle (`pytorch_model.bin`) where there are no safetensors."""


@dataclass(frozen=True, config=STRICT)
class Scores:
    """A score head: numbers read at the last token of a sequence, in place of next-token logits."""

    names: tuple[str, ...]
    """What each number is, as `id2label` of the result's config.json."""
    problem_type: str | None = None
    """What the numbers mean, by its name in transformers."""

    @property
    def config(self) -> dict[str, Any]:
        """Fields of a config.json."""
        named = dict(enumerate(self.names))
        numbers = {name: number for number, name in named.items()}
        return {"id2label": named, "label2id": numbers, "problem_type": self.problem_type}
