"""The sections of a recipe, as frozen, validated dataclasses."""

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints
from pydantic.dataclasses import dataclass

from finetune.errors import Checked
from finetune.recipe.field_types import (
    PART,
    SPECIAL_TOKENS,
    STRICT,
    AnswerMetric,
    Every,
    Names,
    Positive,
    Share,
    Text,
    Token,
    optimizer,
    pattern,
    split_of_rows,
)


@dataclass(frozen=True, config=STRICT)
class Model(metaclass=Checked):
    """The network to train, and how it is stored in memory."""

    name: Text | None = None
    """Hub id or local folder of a pretrained model, or a finished run."""
    config: dict[str, Any] | None = None
    """Train from scratch: the fields of a `config.json`, in place of `name`."""
    tokenizer: Text | None = None
    """Hub id or folder of the tokenizer; by default that of `name`."""
    revision: Text | None = None
    """Branch, tag or commit of `name` on the hub."""
    quantization: Literal["none", "nf4", "int8"] = "none"
    """Storage of the frozen base weights: as is, NF4 with double quantization, or LLM.int8."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    """Attention implementation, by its name in transformers."""
    activation_checkpointing: bool | Literal["attention", "offload"] = False
    """`true` recomputes blocks, `attention` saves its output, `offload` puts inputs on the host."""
    reads: tuple[Literal["image"], ...] = ()
    """Media that it reads beside text; its vision tower is then loaded too."""
    trains: tuple[Literal["language", "connector", "tower"], ...] = ("language",)
    """Parts of a model with `reads` that are trained, or that an adapter reaches."""
    processor_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of its image processor, such as `size`; they are saved with the result."""
    chat_template: Text | None = None
    """A built-in template (`chatml`, `plain`), a file, or one of the tokenizer's, by name."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Values of the chat template's variables, such as `enable_thinking`."""
    adapter: Text | None = None
    """LoRA to train further: a run, an export, a folder in PEFT's format, or a hub id."""
    add_tokens: tuple[Token, ...] = ()
    """Tokens to add; their new embedding rows are initialized with the mean of the old rows."""
    special_tokens: dict[str, Text] = Field(default_factory=dict)
    """Special tokens that differ from those of the tokenizer, by their names in transformers."""
    trust_remote_code: bool = False
    """Run the code in the model's repository. Only this field enables it."""
    trainable: tuple[Annotated[Text, AfterValidator(pattern)], ...] = ()
    """Without an adapter: regular expressions that a trained parameter's name begins with, such as
    `model.layers.2[0-9]`; the rest is frozen. Empty trains all weights."""
    neftune_alpha: Annotated[float, Field(gt=0)] | None = None
    """Noise on embeddings in training: uniform, up to alpha / sqrt(tokens of a row x width)
    (NEFTune, arXiv:2310.05914)."""
    router_aux_loss: Literal["model", "on", "none"] | Annotated[float, Field(ge=0)] = "model"
    """Load-balancing loss of experts: as in config.json (`model`), with its coefficient even if it
    is off there (`on`), `none`, or a coefficient."""
    pickle: bool = False
    """Load weights from a pickle (`pytorch_model.bin`) if there are no safetensors files."""

    def __post_init__(self) -> None:
        if self.name is not None and self.config is not None:
            raise ValueError("give `name` (pretrained) or `config` (from scratch), not both")
        for name in self.special_tokens.keys() - set(SPECIAL_TOKENS):
            raise ValueError(f"`special_tokens`: {name}: expected {', '.join(SPECIAL_TOKENS)}")

    @property
    def checkpointing(self) -> Literal["none", "full", "attention"]:
        """Activation checkpointing as a single word; `offload` is `full`."""
        if self.activation_checkpointing == "attention":
            return "attention"
        return "full" if self.activation_checkpointing else "none"


OF_ANY_TUNER = {
    "kind", "arguments", "targets", "modules_to_save", "exclude_modules", "layers_to_transform",
}  # fmt: skip
"""Fields of an adapter that tuners other than LoRA have too."""


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
    """Tensors outside linear modules that get an adapter, such as experts, by name or suffix."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained in full and saved with the adapter, such as `embed_tokens`."""
    trainable_token_indices: tuple[int | Token, ...] | dict[str, tuple[int | Token, ...]] = ()
    """Tokens or ids whose embedding and head rows are trained; a dict names other modules."""
    use_dora: bool = False
    """Weight-decomposed LoRA (arXiv:2402.09353)."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) (arXiv:2312.03732)."""
    init_lora_weights: bool | str = True
    """Initialization of A and B as in PEFT: true, `gaussian`, `pissa`, `olora`, `orthogonal`."""
    exclude_modules: Names = ()
    """Modules without an adapter even if `targets` matches them."""
    layers_to_transform: tuple[int, ...] = ()
    """Indices of the layers that get an adapter; empty for all."""
    rank_pattern: dict[str, Positive] = Field(default_factory=dict)
    """Ranks that differ from `r`, by module name or regular expression."""
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    """Alphas that differ from `alpha`, by module name or regular expression."""
    kind: Text = "lora"
    """PEFT's name of another tuner, such as `ia3`, `oft`, `boft`, `vera`, `loha`, `ln_tuning`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of another tuner's config, by their names in PEFT, such as `oft_block_size`."""

    def __post_init__(self) -> None:
        if self.kind == "lora" and self.arguments:
            raise ValueError("`arguments`: a LoRA has fields of its own; use them")
        for each in fields(self) if self.kind != "lora" else ():
            given = getattr(self, each.name)
            if each.name not in OF_ANY_TUNER and given not in (each.default, {}):
                raise ValueError(f"`{each.name}`: give {self.kind} its own in `arguments`")

    @property
    def title(self) -> str:
        """What is trained, in a few words."""
        return f"LoRA r={self.r}" if self.kind == "lora" else self.kind

    @property
    def drawn(self) -> bool:
        """Whether each A of a LoRA is drawn by the name of its parameter."""
        return self.kind == "lora" and self.init_lora_weights in (True, "gaussian")

    @property
    def reads_layers(self) -> bool:
        """Whether an adapted layer reads weights of its modules, besides calling them."""
        return self.kind != "lora" or self.use_dora

    @property
    def scale_alpha(self) -> float:
        """`alpha`, or its default of 2r."""
        return 2.0 * self.r if self.alpha is None else self.alpha


@dataclass(frozen=True, config=STRICT)
class Data(metaclass=Checked):
    """One source of rows. A mixture is a tuple of sources."""

    source: str
    """A file (JSONL, JSON, Parquet, Arrow, CSV, TSV, text), folder, glob, or hub data set."""
    format: str
    """How a row becomes a sample: `messages`, `sharegpt`, `alpaca`, `text`, ..."""
    subset: str | None = None
    """Configuration name of a hub data set, or of a folder whose README.md has `configs`."""
    revision: Text | None = None
    """Branch, tag or commit of a hub data set."""
    split: Annotated[str, AfterValidator(split_of_rows)] = "train"
    """Split of a hub data set, or of a folder by the hub's rules; or a part of it: `train[:5%]`."""
    columns: dict[str, str | None] = Field(default_factory=dict)
    """Maps columns of the source to fields of the format; null ignores a column explicitly. Keys of
    turns too: `{"talk": "messages", "talk[].speaker": "role", "talk[].said": "content"}`."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = Field(default_factory=dict)
    """Maps roles of the source's turns to those of the format: `{"bot": "assistant"}`."""
    system: Text | None = None
    """System prompt of conversations without one."""
    replace: dict[Text, str] = Field(default_factory=dict)
    """Texts to replace in every text of a row, such as `{"{{NAME}}": "Ada"}`."""
    on_bad_row: Literal["error", "drop"] = "error"
    """What happens to a row that cannot be read or rendered; `drop` counts it and lists it."""
    first: Positive | None = None
    """Maximum number of rows to read."""
    stream: bool = False
    """Read the source where it is instead of copying and preparing it all: rows are prepared while
    steps run, or before them up to `first`."""
    repeat: Positive = 1
    """How often each row occurs in one epoch."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Sampling weight in a mixture. An epoch ends before any row would repeat."""

    @property
    def split_name(self) -> str:
        """`split` without the part of it that is read."""
        return self.split.partition("[")[0]

    def part(self, rows: int) -> tuple[int, int]:
        """The first row of the part of the split that is read, and the one after its last.

        As in `datasets`: a percentage is rounded to the nearest row, a negative number counts from
        the end.
        """
        match = PART.fullmatch(self.split)
        assert match is not None
        ends = list[int]()
        for text, usual in zip(match.groups(), (0, rows), strict=True):
            share = text is not None and text.endswith("%")
            at = usual if not text else round(float(text[:-1]) * rows / 100) if share else int(text)
            ends.append(min(max(at + rows if at < 0 else at, 0), rows))
        return ends[0], ends[1]


@dataclass(frozen=True, config=STRICT)
class Batch(metaclass=Checked):
    """Rows per optimizer step, and rows per forward pass on a device."""

    rows: Positive = 32
    """Rows, pairs or packs per optimizer step, over all processes and accumulation steps."""
    micro_rows: Positive = 1
    """Rows per forward pass on one device; affects memory and speed only."""
    max_length: Positive = 1024
    """Maximum document length in tokens; a pair has two documents."""
    overlong: Literal["error", "drop", "truncate", "split"] = "error"
    """How to treat rows longer than `max_length`; `split` cuts them into several rows."""
    packing: bool = False
    """Pack complete documents into rows of `max_length`; no document attends to another."""
    padding_free: bool | Literal["auto"] = "auto"
    """Concatenate rows in place of padding them: `auto` where exact, `true` or refuse to run."""
    share_prompts: bool | Literal["auto"] = "auto"
    """Compute a prompt of several answers once: `auto` where exact, `true` or refuse to run."""
    micro_tokens: Positive | None = None
    """Token slots per forward pass on one device, filled with rows; replaces `micro_rows`."""
    min_length: Positive = 1
    """Minimum document length in tokens: shorter rows are dropped and counted."""


@dataclass(frozen=True, config=STRICT)
class Group(metaclass=Checked):
    """Trained parameters with another learning rate or weight decay."""

    match: Annotated[str, AfterValidator(pattern)]
    """Regular expression that is searched in the names of parameters; the first group counts."""
    lr: Annotated[float, Field(ge=0)] | None = None
    """Peak learning rate, with the schedule of all; null for that of the others."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay of matrices; null for that of the others."""


@dataclass(frozen=True, config=STRICT)
class Optim(metaclass=Checked):
    """The optimizer and its schedule, in optimizer steps of the complete job."""

    name: Annotated[str, AfterValidator(optimizer)] = "adamw"
    """Optimizer: a built-in name, or `module:Class` of any `torch.optim.Optimizer`."""
    lr: Annotated[float, Field(gt=0)] = 2e-4
    """Peak learning rate."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply `lr` by the number of processes (`linear`), by its square root, or not at all."""
    schedule: Literal[
        "constant", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial",
        "inverse_sqrt", "warmup_stable_decay", "reduce_lr_on_plateau",
    ] = "cosine"  # fmt: skip
    """Learning rate schedule after warmup, by its name in transformers."""
    warmup: Annotated[float, Field(ge=0)] = 0.03
    """Warmup: a fraction of all steps if below 1, otherwise a number of steps."""
    min_lr: Share = 0.0
    """Final learning rate as a fraction of `lr`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay on matrices; vectors (biases, norms) are never decayed."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay rates of the first and second moments; for `lion`, usually [0.9, 0.99]."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Term added to the denominator for numerical stability."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Maximum norm of the gradient over all parameters and processes; null disables clipping."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """On a NaN or infinite loss or gradient: stop, or skip the step. The step is never applied."""
    max_skipped: Positive = 10
    """Maximum number of skipped steps in a run; one more stops it."""
    max_loss: Annotated[float, Field(gt=0)] | None = None
    """Stop when the loss of `max_loss_steps` steps in a row is above this."""
    max_loss_steps: Positive = 3
    """Steps in a row whose loss may be above `max_loss`; the last of them stops the run."""
    groups: tuple[Group, ...] = ()
    """Groups of parameters with their own learning rate or weight decay."""
    loraplus_lr_ratio: Annotated[float, Field(gt=0)] = 1.0
    """LoRA+ (arXiv:2402.12354): learning rate of the matrices B relative to that of A."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the optimizer besides the fields above, such as `momentum` of `sgd`."""
    schedule_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the schedule in transformers, such as `num_cycles`, `power`, `min_lr_rate`."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Evaluate and publish a moving average of the weights, such as 0.999; null for the weights."""

    def __post_init__(self) -> None:
        if self.schedule == "constant" and self.schedule_arguments:
            raise ValueError("`schedule_arguments`: constant takes none; remove them")
        if not self.schedule_free:
            return
        if self.schedule != "constant":
            raise ValueError(f"`schedule`: {self.name} averages instead; use schedule=constant")
        if self.ema_decay is not None:
            raise ValueError(f"`ema_decay`: {self.name} has an average of its own; remove it")
        if not self.betas[0]:
            raise ValueError(f"`betas`: {self.name} needs a first one above 0")
        if self.arguments:
            raise ValueError(f"`arguments`: {self.name} has only lr, betas, eps and weight_decay")

    @property
    def schedule_free(self) -> bool:
        """Whether the optimizer averages in place of a schedule."""
        return self.name.startswith("schedule_free")


@dataclass(frozen=True, config=STRICT)
class Kernels(metaclass=Checked):
    """How the computation is implemented; nothing here changes what is learned."""

    head: Literal["chunked", "whole"] = "chunked"
    """Head and loss: in chunks over labelled positions only, or with all logits at once."""
    lora: Literal["grouped", "separate"] = "grouped"
    """LoRA: adapters that share an input (q, k, v; gate, up) as one operation, or one by one."""
    norm: Literal["fused", "plain"] = "fused"
    """RMSNorm: one operation that saves only its input, or the implementation of transformers."""
    activation: Literal["fused", "plain"] = "fused"
    """SwiGLU, GeGLU: one operation that saves only gate and up, or that of transformers."""
    rotary: Literal["fused", "plain"] = "fused"
    """Rotary embeddings: query and key in one operation, or as in transformers."""
    blocks: Literal["eager", "compiled"] = "eager"
    """Decoder blocks in training: as they are, or each compiled by `torch.compile`."""
    pointwise: Literal["auto", "compiled", "eager"] = "auto"
    """Pointwise operations in the other kernels and in attention: compiled, or one by one."""
    allocator: Literal["auto", "pooled", "plain"] = "auto"
    """CPU only: reuse a memory pool for large tensors instead of calling `malloc`."""


@dataclass(frozen=True, config=STRICT)
class Evaluation(metaclass=Checked):
    """Evaluation on `eval_data` during training."""

    every: Every | None = None
    """Between evaluations: steps, a fraction of the run, or `0.5 epochs`; by default at the end."""
    micro_rows: Positive | None = None
    """Rows per forward pass; by default `batch.micro_rows`."""
    best: Text = "loss"
    """Criterion of the best checkpoint: lowest `loss`, or highest metric (`-NAME` for lowest)."""
    patience: Positive | None = None
    """Stop early after this many evaluations without improvement; null never stops early."""
    metrics: tuple[AnswerMetric, ...] = ()
    """Metrics of greedy answers to held-out rows at each evaluation, as in `finetune eval`."""
    metric_rows: Positive = 64
    """Maximum number of rows to answer, evenly spaced."""
    max_new_tokens: Positive = 128
    """Maximum length of an answer in tokens."""


@dataclass(frozen=True, config=STRICT)
class Saving(metaclass=Checked):
    """When checkpoints are written, and how many are kept."""

    every: Every | None = None
    """Between checkpoints: steps, a fraction of the run, or `0.5 epochs`; by default at the end."""
    keep: Positive = 2
    """Number of newest checkpoints to keep, in addition to the best one."""
    background: bool = False
    """Write checkpoints while training continues; needs a copy of the state in host memory."""
    rehearse: bool = False
    """Before the first step, write a checkpoint of the actual state and read it back."""
    push_to: Annotated[str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    """Hub repository OWNER/NAME to which each best checkpoint, and the result, is uploaded."""
    average: Positive = 1
    """Number of newest checkpoints whose mean is the result, `final/`; with 1, the best or last."""

    def __post_init__(self) -> None:
        if self.average > self.keep:
            raise ValueError(f"`keep`: {self.keep}, but `average` needs {self.average} checkpoints")


@dataclass(frozen=True, config=STRICT)
class Teacher(metaclass=Checked):
    """A teacher model: frozen, in inference mode, sharded like the student."""

    name: Text
    """Hub id or local folder."""
    revision: Text | None = None
    """Branch, tag or commit of `name` on the hub."""
    quantization: Literal["none", "nf4", "int8"] = "none"
    """Storage of the weights: as is, NF4 with double quantization, or LLM.int8."""
    trust_remote_code: bool = False
    """Run the code in the teacher's repository. Only this field enables it."""
    pickle: bool = False
    """Load weights from a pickle (`pytorch_model.bin`) if there are no safetensors files."""


@dataclass(frozen=True, config=STRICT)
class Completions:
    """Completions that an online method samples."""

    count: int
    """Completions of a sampling phase."""
    at_once: int
    """Completions that a device samples at once."""
    longest: int
    """Maximum number of tokens in a completion."""
    of_prompt: int
    """Completions of a prompt."""
    updates: int
    """Optimizer steps on the completions of a sampling phase."""
    elsewhere: bool = False
    """Whether another program samples them."""
