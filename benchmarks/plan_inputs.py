"""Convert the inputs of a case to the planner's model, adapter, layout and optimizer."""

from collections.abc import Mapping
from typing import Any

from finetune.errors import FinetuneError
from finetune.planner.estimate.layout import Layout
from finetune.planner.shapes import published
from finetune.planner.shapes.architecture import Architecture
from finetune.planner.shapes.read_config import read

Inputs = Mapping[str, Any]


def config_of(short: Inputs) -> dict[str, Any]:
    """The `config.json` that a case abbreviates."""
    kind = short.get("arch", "mixtral" if "E" in short else "llama")
    if "E" in short and kind == "qwen3":
        kind = "qwen3_moe"
    heads = short.get("kv", short["a"])
    fields: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": short["h"],
        "num_hidden_layers": short["L"],
        "num_attention_heads": short["a"],
        "num_key_value_heads": heads,
        "intermediate_size": short["f"],
        "vocab_size": short["V"],
        "tie_word_embeddings": short.get("tied", kind.startswith(("gemma", "gpt2"))),
        "head_dim": short.get("hd", short["h"] // short["a"]),
    }
    if "E" in short:
        many = "num_local_experts" if kind == "mixtral" else "num_experts"
        width = short.get("moe_f", short["f"])
        fields |= {many: short["E"], "num_experts_per_tok": short["k"]}
        fields |= {"moe_intermediate_size": width}
    if kind == "gpt2":
        fields |= {"n_embd": short["h"], "n_layer": short["L"], "n_head": short["a"]}
        fields |= {"n_inner": short["f"], "n_positions": short.get("positions", 1024)}
    return fields


def shape_of(inputs: Inputs) -> Architecture:
    """The model of a case, from its configuration or its published name."""
    if "cfg" in inputs:
        return read(config_of(inputs["cfg"]))
    config = published.find(inputs["model"])
    if config is None:
        raise FinetuneError(f"model {inputs['model']}: not in the table of published shapes")
    return read(config, inputs["model"])


def targets_of(inputs: Inputs) -> str | tuple[str, ...]:
    """Adapter targets; some cases abbreviate q_proj as q."""
    given = inputs.get("targets", "all-linear")
    attention, feed = ("q", "k", "v", "o"), ("gate", "up", "down")
    groups = {"attn": attention, "attention": attention, "mlp": feed, "all": (*attention, *feed)}
    if isinstance(given, str):
        if given == "all-linear":
            return given
        initials = len(given) > 1 and set(given) <= set("qkvo")
        given = groups.get(given) or (given if initials else given.split(","))
    short = (*attention, *feed)
    names = [str(name).strip() for name in given]
    return tuple(f"{name}_proj" if name in short else name for name in names)


STRATEGIES: dict[str, tuple[Any, Any]] = {
    "single": ("single", "none"),
    "ddp": ("ddp", "none"),
    "zero1": ("deepspeed", "optimizer"),
    "zero2": ("deepspeed", "grads"),
    "zero3": ("deepspeed", "params"),
    "fsdp_grad": ("fsdp", "grads"),
    "fsdp_grad_op": ("fsdp", "grads"),
    "fsdp_full": ("fsdp", "params"),
    "fsdp2_full": ("fsdp", "params"),
    "hsdp": ("fsdp", "params"),
    "hsdp_grad_op": ("fsdp", "grads"),
}


def layout_of(inputs: Inputs) -> Layout:
    name, _, extra = inputs.get("strategy", "single").partition("+")
    engine, shard = STRATEGIES[name]
    given = [inputs[key] for key in ("shard", "shard_size", "dp_shard") if key in inputs]
    copies = inputs.get("replicas", inputs.get("dp_replicate", 1))
    count = inputs.get("dp", inputs.get("gpus", given[0] * copies if given else 1))
    group = given[0] if given else count // copies
    replicas = count // group if name.startswith("hsdp") else 1
    if not (extra or inputs.get("cpu_offload")):
        return Layout(engine, shard, count, replicas)
    offload: Any = "optimizer" if "optimizer" in extra else "all"
    device: Any = "nvme" if "nvme" in extra else "cpu"
    return Layout(engine, shard, count, replicas, offload, device)


def update_of(name: str) -> str:
    """The optimizer of a case, in any spelling of `AdamW8bit`."""
    plain = name.lower().replace("_", "").replace("-", "")
    return "paged_adamw_8bit" if "paged" in plain else "adamw_8bit" if "8bit" in plain else "adamw"
