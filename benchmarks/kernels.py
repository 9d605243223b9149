"""Time each kernel against the code that it replaces, and on GPUs against Liger if installed."""

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks import liger
from benchmarks.record import Result
from finetune.data.rows.collate import MicroBatch
from finetune.kernels import activation, head, lora, pointwise, rotary
from finetune.methods.losses import labelled, token_loss_sum
from finetune.models.model import FUSED
from finetune.models.packed_attention import attend

Gradients = dict[str, torch.Tensor]

LABELLED = 0.62
"""Share of trained tokens, as in GSM8K."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Device, model shape and batch of the timings."""

    device: str
    model: str
    """Name of the model with this shape; the weights are random."""
    shape: dict[str, Any]
    rows: int
    length: int
    """Tokens of each of the `rows` rows of a micro-batch."""
    documents: tuple[int, ...]
    """Document lengths in tokens for the timing of attention."""

    @property
    def head_size(self) -> int:
        return self.shape["hidden_size"] // self.shape["num_attention_heads"]

    def random(self, *sizes: int) -> torch.Tensor:
        """Standard normal tensor in bf16 that requires a gradient."""
        return torch.randn(*sizes, device=self.device).bfloat16().requires_grad_()

    def heads(self, rows: int, length: int) -> Gradients:
        """Query, key and value with the strides of a model.  # (rows, heads, length, head size)"""
        shared = self.shape["num_key_value_heads"]
        counts = {"query": self.shape["num_attention_heads"], "key": shared, "value": shared}
        return {
            name: self.random(rows, length, count, self.head_size).detach().transpose(1, 2)
            .requires_grad_()
            for name, count in counts.items()
        }  # fmt: skip

    def clock(self) -> float:
        """CPU seconds, or on a GPU wall-clock seconds after a synchronization."""
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


ON_CPU = Setting(
    "cpu",
    "SmolLM2-135M",
    {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 6,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "tie_word_embeddings": True, "max_position_embeddings": 2048, "rope_theta": 100000.0,
    },
    rows=4,
    length=160,
    documents=(64, 160, 557, 2574),
)  # fmt: skip
"""A few rows of GSM8K's mean length. 6 of 30 layers: the head has a larger share than usual."""
ON_GPU = Setting(
    "cuda",
    "Llama-3.1-8B",
    {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 6,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": False, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    },
    rows=16,
    length=256,
    documents=(128, 256, 1024, 4096),
)  # fmt: skip
"""As many tokens as a pack. 6 of 32 layers."""
WARMUP = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """Equivalent implementations; each runs forward and backward, and returns its gradients."""

    name: str
    plain: Callable[[], Gradients]
    ours: Callable[[], Gradients]
    liger: Callable[[], Gradients] | None = None
    """Liger's kernel, if it is installed and has one."""

    @property
    def works(self) -> dict[str, Callable[[], Gradients]]:
        both = {"plain": self.plain, "ours": self.ours}
        return both if self.liger is None else both | {"liger": self.liger}


def measure(repeats: int, gpu: bool, publish: Callable[[Result], object]) -> Result:
    """Run every case `repeats` times after a warmup, alternating implementations, on one thread.

    The results are published after each case.
    """
    setting = ON_GPU if gpu else ON_CPU
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    timings: dict[str, dict[str, float]] = {}
    try:
        for case in cases(setting):
            timings[case.name] = timed(case, repeats, setting.clock)
            print(f"{case.name}: {timings[case.name]['gain']:.2f}x", flush=True)
            publish(_result(setting, repeats, timings))
    finally:
        torch.set_num_threads(threads)
    return _result(setting, repeats, timings)


def _result(setting: Setting, repeats: int, timings: dict[str, dict[str, float]]) -> Result:
    where = "CPU time on one thread" if setting.device == "cpu" else "time of one GPU"
    how = (
        "Forward and backward pass in bf16 of what each lever replaces and of the lever, in turns: "
        f"median {where} of {repeats} after {WARMUP} others. {setting.rows} rows of "
        f"{setting.length} tokens, {LABELLED:.0%} labelled; LoRA r=16 on a model of "
        f"{setting.model}'s shape, its weights random; a micro-batch has "
        f"{setting.shape['num_hidden_layers']} of its layers. The difference is that of the "
        "gradients, relative to their norm."
    )
    remarks = [f"Liger {liger.version()}"] if liger.here(setting.device) else []
    return Result("Kernels", how, {"cases": dict(timings)}, tabulate(timings), remarks)


def tabulate(values: dict[str, dict[str, float]]) -> list[list[str]]:
    raced = any("liger_seconds" in found for found in values.values())
    theirs = ["Liger ms", "its difference"] if raced else []
    rows = [["lever", "plain ms", "ours ms", "gain", "difference", *theirs]]
    for name, found in values.items():
        plain, ours = 1e3 * found["plain_seconds"], 1e3 * found["ours_seconds"]
        row = [name, f"{plain:.1f}", f"{ours:.1f}", f"{found['gain']:.2f}x"]
        row.append(f"{found['difference']:.1e}")
        if "liger_seconds" in found:
            row += [f"{1e3 * found['liger_seconds']:.1f}", f"{found['liger_difference']:.1e}"]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    return rows


def timed(
    case: Case, repeats: int, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in case.works}
    for _ in range(WARMUP + repeats):
        for name, work in case.works.items():
            begun = clock()
            work()
            seconds[name].append(clock() - begun)
    found = {f"{name}_seconds": statistics.median(s[WARMUP:]) for name, s in seconds.items()}
    found["gain"] = found["plain_seconds"] / found["ours_seconds"]
    found["difference"] = distance(case.plain(), case.ours())
    if case.liger is not None:
        found["liger_difference"] = distance(case.plain(), case.liger())
    return found


def distance(first: Gradients, second: Gradients) -> float:
    """Norm of the difference of all gradients, relative to the norm of the first ones."""
    assert first.keys() == second.keys()
    pairs = [(first[name].double(), second[name].double()) for name in first]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    return (apart / sum(float(a.square().sum()) for a, _ in pairs)) ** 0.5


def cases(setting: Setting) -> list[Case]:
    plain, batch = network(setting), micro_batch(setting)
    chunked, grouped, fused, every = (copy.deepcopy(plain) for _ in range(4))
    for model in (plain, chunked, grouped, fused, every):
        head.give_loss(model.get_base_model(), chunked=model in (chunked, every))
    for model in (grouped, every):
        lora.group_adapters(model)
    for model in (fused, every):
        for fuse, _, _ in FUSED.values():
            fuse(model)
    blocks, other = (
        [model.get_base_model().model.layers[1] for model in (plain, ours)]
        for ours in (grouped, fused)
    )
    norms = [block.input_layernorm for block in other]
    small = (norm_case(setting, *norms), unit_case(setting), rotation_case(setting))
    whole = step_case(setting, "micro-batch, all", plain, every, batch)
    adapters = (
        inputs_case(setting, "adapters of q, k, v", *(b.self_attn for b in blocks), lora.GROUPS[0]),
        inputs_case(setting, "adapters of gate, up", *(b.mlp for b in blocks), lora.GROUPS[1]),
        inputs_case(setting, "adapter of down", *(b.mlp for b in blocks), ("down_proj",)),
    )
    longest = setting.documents[-1]
    apart = [attention_case(setting, length) for length in setting.documents]
    windowed = attention_case(setting, longest, window=longest // 4)
    on_cpu = setting.device == "cpu"  # on a GPU these are always compiled
    # Without compilation, a window uses a mask on CPUs, as in PyTorch.
    in_passes = (*adapters, *apart, windowed) if on_cpu else ()
    return [
        head_case(setting, plain, chunked, batch),
        *adapters,
        *small,
        *apart,
        *([] if on_cpu else [windowed]),
        step_case(setting, "micro-batch, head", plain, chunked, batch),
        step_case(setting, "micro-batch, adapters", plain, grouped, batch),
        step_case(setting, "micro-batch, norm, activation, rotary", plain, fused, batch),
        whole,
        *(compiled(case) for case in (*small, *in_passes, whole)),
    ]


def network(setting: Setting) -> PeftModel:
    """LoRA with nonzero B on a base with random weights in bf16."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **setting.shape)
    with torch.device(setting.device):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.config.use_cache = False
    settings = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    adapted = get_peft_model(base, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return adapted


def micro_batch(setting: Setting) -> MicroBatch:
    rows, length = setting.rows, setting.length
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, setting.shape["vocab_size"], (rows, length), generator=generator)
    chosen = torch.rand(ids.shape, generator=generator) < LABELLED
    labels = torch.where(chosen, ids, -100)
    labels[:, 0] = -100
    trained = int((labels != -100).sum())
    there = [each.to(setting.device) for each in (ids, labels)]
    return MicroBatch(*there, None, rows, trained, ids.numel())


def head_case(setting: Setting, plain: PeftModel, ours: PeftModel, batch: MicroBatch) -> Case:
    """Head and loss: all rows as in transformers, against labeled rows in chunks."""
    full, chunked = (model.get_base_model().lm_head for model in (plain, ours))
    hidden = setting.random(setting.rows, setting.length, setting.shape["hidden_size"])
    places, targets = labelled(batch)
    shifted = F.pad(batch.labels, (0, 1), value=-100)[:, 1:].flatten()

    def gradient(loss: torch.Tensor) -> Gradients:
        return {"hidden": torch.autograd.grad(loss, hidden)[0]}

    def whole() -> Gradients:
        logits = full(hidden).float()
        return gradient(F.cross_entropy(logits.flatten(0, 1), shifted, reduction="sum"))

    def rows() -> Gradients:
        return gradient(chunked(hidden.flatten(0, 1)[places], targets))

    theirs = liger.loss_of_head(setting.device)
    return Case(
        "head and loss",
        whole,
        rows,
        theirs and (lambda: gradient(theirs(full.weight, hidden.flatten(0, 1), shifted))),
    )


def inputs_case(
    setting: Setting, name: str, plain: nn.Module, ours: nn.Module, layers: tuple[str, ...]
) -> Case:
    """Adapted layers of one parent module with the same input."""
    width = plain.get_submodule(layers[0]).in_features
    given = setting.random(setting.rows, setting.length, width)

    def work(parent: nn.Module) -> Gradients:
        with torch.autocast(setting.device, torch.bfloat16):
            outputs = [parent.get_submodule(layer)(given) for layer in layers]
        trained = {n: p for n, p in parent.named_parameters() if p.requires_grad}
        used = {n: p for n, p in trained.items() if n.split(".")[0] in layers} | {"input": given}
        ones = [torch.ones_like(output) for output in outputs]
        grads = torch.autograd.grad(outputs, list(used.values()), ones)
        return dict(zip(used, grads, strict=True))

    return Case(name, lambda: work(plain), lambda: work(ours))


def norm_case(setting: Setting, plain: nn.Module, ours: nn.Module) -> Case:
    given = setting.random(setting.rows, setting.length, setting.shape["hidden_size"])
    return operation_case("norm", {"input": given}, plain, ours, liger.norm(setting.device, plain))


def unit_case(setting: Setting) -> Case:
    """The gated unit of a feed-forward layer."""
    shape = (setting.rows, setting.length, setting.shape["intermediate_size"])
    return operation_case(
        "gated unit",
        {name: setting.random(*shape) for name in ("gate", "up")},
        lambda gate, up: F.silu(gate) * up,
        lambda gate, up: activation.GatedUnit.apply(gate, up, False),
        liger.gated_unit(setting.device),
    )


def rotation_case(setting: Setting) -> Case:
    """Query and key of one layer."""
    given = setting.heads(setting.rows, setting.length)
    del given["value"]
    tables = [setting.random(1, setting.length, setting.head_size).detach() for _ in ("cos", "sin")]
    theirs = liger.rotation(setting.device)
    return operation_case(
        "rotation of query, key",
        given,
        lambda query, key: apply_rotary_pos_emb(query, key, *tables),
        lambda query, key: rotary.rotate(query, key, *tables),
        theirs and (lambda query, key: theirs(query, key, *tables)),
    )


def operation_case(
    name: str,
    given: Gradients,
    plain: Callable[..., Any],
    ours: Callable[..., Any],
    theirs: Callable[..., Any] | None = None,
) -> Case:
    """A case for an operation on tensors."""

    def work(compute: Callable[..., Any]) -> Gradients:
        made = compute(*given.values())
        outputs = made if isinstance(made, tuple) else (made,)
        ones = [torch.ones_like(output) for output in outputs]
        return dict(
            zip(given, torch.autograd.grad(outputs, list(given.values()), ones), strict=True)
        )

    return Case(name, lambda: work(plain), lambda: work(ours), theirs and (lambda: work(theirs)))


def compiled(case: Case) -> Case:
    """The same case with compiled chains."""
    ours = switched(pointwise.compile_chains, case.ours)
    return dataclasses.replace(case, name=f"{case.name}, compiled", ours=ours)


def switched(switch: Callable[[bool], None], work: Callable[[], Gradients]) -> Callable[[], Any]:
    """A function that calls `work` while a setting is enabled."""

    def done() -> Gradients:
        switch(True)
        try:
            return work()
        finally:
            switch(False)

    return done


def attention_case(setting: Setting, length: int, window: int | None = None) -> Case:
    """Attention over one document by PyTorch and by ours; on a GPU over a pack, masked in PyTorch.

    Args:
        setting: Device, model shape and batch.
        length: Tokens of a document.
        window: Size of the sliding window in tokens, including the token itself; None without.
    """
    count = 1 if setting.device == "cpu" else setting.rows * setting.length // length
    given = setting.heads(1, count * length)
    ends = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=setting.device)
    mask = None
    if count > 1:
        document = torch.arange(count, device=setting.device).repeat_interleave(length)
        mask = (document[:, None] == document).tril()
    if window is not None:
        every = torch.ones(count * length, count * length, dtype=torch.bool, device=setting.device)
        mask = (every if mask is None else mask).tril().triu(1 - window)

    def fused(*inputs: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            *inputs, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )

    def apart(*inputs: torch.Tensor) -> torch.Tensor:
        mixed, _ = attend(
            nn.Module(), *inputs, None, cu_seq_lens_q=ends, max_length_q=length,
            sliding_window=window,
        )  # fmt: skip
        return mixed

    name = f"attention of {length} tokens" + (f", window of {window}" if window else "")
    return operation_case(name, given, fused, apart)


def step_case(
    setting: Setting, name: str, plain: PeftModel, ours: PeftModel, batch: MicroBatch
) -> Case:
    """A complete forward and backward pass."""
    return Case(name, lambda: step(setting, plain, batch), lambda: step(setting, ours, batch))


def step(setting: Setting, model: PeftModel, batch: MicroBatch) -> Gradients:
    with torch.autocast(setting.device, torch.bfloat16):
        loss = token_loss_sum(model, batch)
    (loss / batch.trained_tokens).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads
