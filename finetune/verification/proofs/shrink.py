"""Shrink an architecture to two narrow layers with the features that an engine can get wrong.

Grouped key heads, tied embeddings, several types of layers and routed experts are kept; widths and
counts become small.
"""

from typing import Any

import torch
from torch import nn

LAYERS = 2
WIDTH = 64
HEADS = 4
HEAD = 16
SHORTEST = 256
"""Tokens; minimum number of positions of a shrunk model."""

MOST: dict[str, int] = {
    # layers and widths
    "num_hidden_layers": LAYERS, "n_layer": LAYERS, "n_layers": LAYERS, "num_layers": LAYERS,
    "hidden_size": WIDTH, "n_embd": WIDTH, "d_model": WIDTH, "intermediate_size": 128,
    "n_inner": 128, "ffn_dim": 128, "ffn_hidden_size": 128, "head_dim": HEAD, "n_head": HEADS,
    "n_heads": HEADS, "attention_head_dim": HEAD, "global_head_dim": HEAD, "kv_channels": HEAD,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_layers": LAYERS,
    "decoder_layers": LAYERS, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "word_embed_proj_dim": WIDTH, "block_ff_dim": 128, "rotary_dim": 8,
    "hidden_size_per_layer_input": WIDTH, "laurel_rank": HEAD,
    "num_kv_shared_layers": 0,  # sharing needs a layer of each kind before those that share
    # experts
    "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH,
    "shared_intermediate_size": WIDTH, "intermediate_size_mlp": 128, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2, "top_k_experts": 2,
    "n_group": 1, "topk_group": 1, "zero_expert_num": 2, "expert_ffn_hidden_size": WIDTH,
    "moe_topk": 2,
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "first_k_dense_replace": 1, "moe_latent_size": WIDTH,
    # latent attention
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": HEAD, "qk_rope_head_dim": HEAD,
    "qk_head_dim": 2 * HEAD, "v_head_dim": HEAD,
    # recurrences
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": HEAD,
    "linear_value_head_dim": HEAD, "mamba_num_heads": 8, "mamba_n_heads": 8,
    "mamba_d_ssm": 2 * WIDTH, "mamba_d_head": HEAD, "mamba_head_dim": HEAD,
    "mamba_d_state": HEAD, "ssm_state_size": HEAD,
    "state_size": HEAD, "mamba_dt_rank": 8, "lru_width": WIDTH, "chunk_size": 16,
}  # fmt: skip
"""Fields of a config and their maximum in a shrunk model; attention heads are handled below."""

PARTS = ("text_config", "vision_config", "audio_config")
DROPPED = ("quantization_config", "dtype", "torch_dtype", "auto_map", "architectures")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def shrink(config: dict[str, Any], vocabulary: int, length: int) -> dict[str, Any]:
    """A config of the same architecture with two narrow layers.

    Args:
        config: Fields of a `config.json`, nested for a model of several parts.
        vocabulary: Rows of the token embedding.
        length: Maximum tokens of a row that the shrunk model must support.
    """
    fields = _shrunk(config, length)
    for name in PARTS:
        if isinstance(fields.get(name), dict):
            fields[name] = _shrunk(fields[name], length)
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # the tokenizer's
    text = fields["text_config"] if isinstance(fields.get("text_config"), dict) else fields
    text |= {"vocab_size": vocabulary}
    if "vocab_size_per_layer_input" in text:
        text["vocab_size_per_layer_input"] = vocabulary
    text |= special
    return fields | special


def fill_zeros(network: nn.Module) -> None:
    """Draw weights, except biases, that are initialized to zero.

    A scale of zero would hide what it multiplies, and stop its gradients.
    """
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if not name.endswith("bias") and not parameter.any():
                parameter.normal_(std=0.02)


def _shrunk(config: dict[str, Any], length: int) -> dict[str, Any]:
    fields = {k: v for k, v in config.items() if v is not None and k not in DROPPED}
    for name, most in MOST.items():
        if isinstance(fields.get(name), int) and not isinstance(fields[name], bool):
            fields[name] = min(fields[name], most)
    heads, keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads is not None:
        fields["num_attention_heads"] = HEADS
        if keys is not None:
            fields["num_key_value_heads"] = HEADS if keys == heads else min(keys, 2)
    if "expand" in fields and "num_heads" in fields:  # Mamba 2: heads add up to the inner width
        fields |= {"num_heads": WIDTH * fields["expand"] // HEAD}
    _cut_lists(config, fields)
    if isinstance(fields.get("block_types"), list):  # a pattern that the layers repeat
        fields["block_types"] = list(dict.fromkeys(fields["block_types"]))
    for name, value in fields.items():
        if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            fields[name] = {key: each for key, each in value.items() if int(key) < LAYERS}
    for name in ("rope_scaling", "rope_parameters"):  # their factors depend on the real head width
        rope = fields.get(name)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) == "longrope":
            del fields[name]
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        if isinstance(fields.get(name), int):
            most = max(min(length, 4 * SHORTEST), SHORTEST)
            fields[name] = max(min(fields[name], length), most)
    return fields


def _cut_lists(config: dict[str, Any], fields: dict[str, Any]) -> None:
    """Cut lists with one entry per layer to two entries, of different kinds if there are any."""
    name = next((n for n in LAYER_COUNTS if isinstance(config.get(n), int)), None)
    if name is None:
        return
    layers = config[name]
    lists = {k: v for k, v in fields.items() if isinstance(v, list) and len(v) == layers}
    kinds = lists.get("layer_types") or next(iter(lists.values()), [])
    first_other = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 1)
    kept = [0, first_other] if layers > 1 else [0]
    for key, values in lists.items():
        fields[key] = [values[i] for i in kept]
