"""Each kernel alone against what it replaces, on the shapes of SmolLM2-135M, in CPU seconds."""

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

from benchmarks.record import Result
from finetune.data.batch import MicroBatch
from finetune.kernels import activation, attention, chains, head, lora, rotary
from finetune.losses import labelled, token_loss_sum
from finetune.model import FUSED

ROWS, LENGTH, LABELLED = 4, 160, 0.62
"""A micro-batch of short rows: the mean length of GSM8K rows, and their share of labels."""
LAYERS = 6
"""Of 30: the head weighs more here than in the whole model."""
SHAPE: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": LAYERS,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "tie_word_embeddings": True, "max_position_embeddings": 2048, "rope_theta": 100000.0,
}  # fmt: skip
DOCUMENTS = (64, LENGTH, 557, 2574)
"""Tokens of the documents of which attention is timed: short ones, and long ones as they come."""
WARMUP = 2

Gradients = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """The same mathematics twice; each runs forward and backward and returns its gradients."""

    name: str
    plain: Callable[[], Gradients]
    ours: Callable[[], Gradients]


def measure(repeats: int) -> Result:
    """Run every case `repeats` times after a warmup, plain and ours in turns, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    values = {}
    try:
        for case in cases():
            values[case.name] = timed(case, repeats)
            print(f"{case.name}: {values[case.name]['gain']:.2f}x", flush=True)
    finally:
        torch.set_num_threads(threads)
    how = (
        "Forward and backward pass in bf16 of what each lever replaces and of the lever, in turns, "
        f"on one thread; median CPU time of {repeats} after {WARMUP} others. {ROWS} rows of "
        f"{LENGTH} tokens, {LABELLED:.0%} labelled; LoRA r=16; random weights; a micro-batch has "
        f"{LAYERS} layers of 30. The last column is the difference of the gradients, relative to "
        "their norm."
    )
    rows = [["lever", "plain ms", "ours ms", "gain", "difference"]]
    for name, found in values.items():
        plain, ours = 1e3 * found["plain_seconds"], 1e3 * found["ours_seconds"]
        apart = found["difference"]
        rows.append([name, f"{plain:.1f}", f"{ours:.1f}", f"{found['gain']:.2f}x", f"{apart:.1e}"])
    return Result("Kernels", how, {"layers": LAYERS, "cases": values}, rows, [])


def timed(case: Case, repeats: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    for _ in range(WARMUP + repeats):
        for name, work in (("plain", case.plain), ("ours", case.ours)):
            begun = time.process_time()
            work()
            seconds[name].append(time.process_time() - begun)
    plain, ours = (statistics.median(each[WARMUP:]) for each in seconds.values())
    return {
        "plain_seconds": plain,
        "ours_seconds": ours,
        "gain": plain / ours,
        "difference": distance(case.plain(), case.ours()),
    }


def distance(first: Gradients, second: Gradients) -> float:
    """Norm of the difference of all gradients, relative to the norm of all."""
    assert first.keys() == second.keys()
    pairs = [(first[name].double(), second[name].double()) for name in first]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    return (apart / sum(float(a.square().sum()) for a, _ in pairs)) ** 0.5


def cases() -> list[Case]:
    plain, batch = network(), micro_batch()
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
    return [
        head_case(plain, chunked, batch),
        inputs_case("adapters of q, k, v", *(block.self_attn for block in blocks), lora.GROUPS[0]),
        inputs_case("adapters of gate, up", *(block.mlp for block in blocks), lora.GROUPS[1]),
        inputs_case("adapter of down", *(block.mlp for block in blocks), ("down_proj",)),
        norm_case(*(block.input_layernorm for block in other)),
        unit_case(),
        rotation_case(),
        *(attention_case(length) for length in DOCUMENTS),
        step_case("micro-batch, head", plain, chunked, batch),
        step_case("micro-batch, adapters", plain, grouped, batch),
        step_case("micro-batch, norm, activation, rotary", plain, fused, batch),
        step_case("micro-batch, all", plain, every, batch),
        compiled(norm_case(*(block.input_layernorm for block in other))),
        compiled(unit_case()),
        compiled(rotation_case()),
        compiled(step_case("micro-batch, all", plain, every, batch)),
    ]


def network() -> PeftModel:
    """LoRA on a base with random weights in bf16, its B not zero."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPE)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.config.use_cache = False
    settings = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    adapted = get_peft_model(base, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return adapted


def micro_batch() -> MicroBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SHAPE["vocab_size"], (ROWS, LENGTH), generator=generator)
    chosen = torch.rand(ids.shape, generator=generator) < LABELLED
    labels = torch.where(chosen, ids, -100)
    labels[:, 0] = -100
    return MicroBatch(ids, labels, None, ROWS, int((labels != -100).sum()), ids.numel())


def head_case(plain: PeftModel, ours: PeftModel, batch: MicroBatch) -> Case:
    """Head and loss: all rows as transformers does, against labelled rows in chunks."""
    full, chunked = (model.get_base_model().lm_head for model in (plain, ours))
    width = SHAPE["hidden_size"]
    hidden = torch.randn(ROWS, LENGTH, width).bfloat16().requires_grad_()
    places, targets = labelled(batch)

    def whole() -> Gradients:
        logits = full(hidden).float()
        shifted = F.pad(batch.labels, (0, 1), value=-100)[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum")
        return {"hidden": torch.autograd.grad(loss, hidden)[0]}

    def rows() -> Gradients:
        loss = chunked(hidden.flatten(0, 1)[places], targets)
        return {"hidden": torch.autograd.grad(loss, hidden)[0]}

    return Case("head and loss", whole, rows)


def inputs_case(name: str, plain: nn.Module, ours: nn.Module, layers: tuple[str, ...]) -> Case:
    """Adapted layers of one parent that read one tensor."""
    width = plain.get_submodule(layers[0]).in_features
    given = torch.randn(ROWS, LENGTH, width).bfloat16().requires_grad_()

    def work(parent: nn.Module) -> Gradients:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = [parent.get_submodule(layer)(given) for layer in layers]
        trained = {n: p for n, p in parent.named_parameters() if p.requires_grad}
        used = {n: p for n, p in trained.items() if n.split(".")[0] in layers} | {"input": given}
        ones = [torch.ones_like(output) for output in outputs]
        grads = torch.autograd.grad(outputs, list(used.values()), ones)
        return dict(zip(used, grads, strict=True))

    return Case(name, lambda: work(plain), lambda: work(ours))


def norm_case(plain: nn.Module, ours: nn.Module) -> Case:
    given = torch.randn(ROWS, LENGTH, SHAPE["hidden_size"]).bfloat16().requires_grad_()

    def work(layer: nn.Module) -> Gradients:
        output = layer(given)
        return {"input": torch.autograd.grad(output, given, torch.ones_like(output))[0]}

    return Case("norm", lambda: work(plain), lambda: work(ours))


def unit_case() -> Case:
    """The gated unit of a feed-forward layer."""
    shape = (ROWS, LENGTH, SHAPE["intermediate_size"])
    given = {name: torch.randn(shape).bfloat16().requires_grad_() for name in ("gate", "up")}
    return operation_case(
        "gated unit",
        given,
        lambda gate, up: F.silu(gate) * up,
        lambda gate, up: activation.GatedUnit.apply(gate, up, False),
    )


def rotation_case() -> Case:
    """Query and key of one layer."""
    counts = {"query": SHAPE["num_attention_heads"], "key": SHAPE["num_key_value_heads"]}
    size = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
    given = {
        name: torch.randn(ROWS, LENGTH, count, size).bfloat16().transpose(1, 2).requires_grad_()
        for name, count in counts.items()
    }
    tables = [torch.randn(1, LENGTH, size).bfloat16() for _ in range(2)]
    return operation_case(
        "rotation of query, key",
        given,
        lambda query, key: apply_rotary_pos_emb(query, key, *tables),
        lambda query, key: rotary.rotate(query, key, *tables),
    )


def operation_case(
    name: str, given: Gradients, plain: Callable[..., Any], ours: Callable[..., Any]
) -> Case:
    """An operation of some tensors."""

    def work(compute: Callable[..., Any]) -> Gradients:
        made = compute(*given.values())
        outputs = made if isinstance(made, tuple) else (made,)
        ones = [torch.ones_like(output) for output in outputs]
        return dict(
            zip(given, torch.autograd.grad(outputs, list(given.values()), ones), strict=True)
        )

    return Case(name, lambda: work(plain), lambda: work(ours))


def compiled(case: Case) -> Case:
    """The same, with chains compiled."""

    def ours() -> Gradients:
        chains.compile_chains(True)
        try:
            return case.ours()
        finally:
            chains.compile_chains(False)

    return Case(f"{case.name}, compiled", case.plain, ours)


def attention_case(length: int) -> Case:
    """One document through PyTorch's fused kernel, and with a backward pass of products."""
    heads, shared = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    size = SHAPE["hidden_size"] // heads
    names = {"query": heads, "key": shared, "value": shared}
    given = {
        name: torch.randn(1, length, count, size).bfloat16().transpose(1, 2).requires_grad_()
        for name, count in names.items()
    }

    def fused(*inputs: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

    def products(*inputs: torch.Tensor) -> torch.Tensor:
        return attention.DocumentAttention.apply(*inputs, [0, length], size**-0.5)

    return operation_case(f"attention of {length} tokens", given, fused, products)


def step_case(name: str, plain: PeftModel, ours: PeftModel, batch: MicroBatch) -> Case:
    """A whole forward and backward pass."""

    def work(model: PeftModel) -> Gradients:
        with torch.autocast("cpu", torch.bfloat16):
            loss = token_loss_sum(model, batch)
        (loss / batch.trained_tokens).backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return grads

    return Case(name, lambda: work(plain), lambda: work(ours))
