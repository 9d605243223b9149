"""Tiny configurations of the architectures whose documents are shown to stay apart side by side."""

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 128, "head_dim": 8,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    "attention_dropout": 0.0,
}  # fmt: skip
WINDOW: dict[str, Any] = {
    "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
FOUR: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip
GPT: dict[str, Any] = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "query_pre_attn_scalar": 8, "sliding_window": 6, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "vaultgemma": {
        "query_pre_attn_scalar": 8, "sliding_window": 6, "attn_logit_softcapping": 2.0,
    },
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": 8},
    "cohere2": WINDOW,
    "exaone4": WINDOW | {"sliding_window_pattern": 2},
    "olmo3": WINDOW,
    "mistral": {"sliding_window": 6},
    "starcoder2": {"sliding_window": 6, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "qwen3": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": {"hidden_dropout": 0.0},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "phi": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "seed_oss": {"residual_dropout": 0.0},
    "persimmon": {"hidden_dropout": 0.0},
    "biogpt": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "mixtral": LOCAL | {"sliding_window": None},
    "phimoe": LOCAL
    | {"sliding_window": None, "input_jitter_noise": 0.0, "router_jitter_noise": 0.0},
    "granitemoe": LOCAL,
    "minimax_m2": LOCAL,
    "gpt_oss": LOCAL | WINDOW,
    "qwen2_moe": FOUR | {"shared_expert_intermediate_size": 24},
    "qwen3_moe": FOUR,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24,
        "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
    },
    "glm4_moe": ROUTED,
    "dots1": ROUTED,
    "deepseek_v2": ROUTED | LATENT,
    "deepseek_v3": ROUTED | LATENT,
    "qwen3_next": DELTA | FOUR | {"shared_expert_intermediate_size": 24},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | FOUR | {"shared_expert_intermediate_size": 24},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": FOUR | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2,
        "chunk_size": 8,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8,
        "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "granitemoehybrid": MAMBA | {
        "layer_types": ["mamba", "attention"], "layers_block_type": ["mamba", "attention"],
        "num_local_experts": 0, "shared_intermediate_size": 48,
    },
    "zamba2": {
        "layer_types": ["mamba", "hybrid"], "layers_block_type": ["mamba", "hybrid"],
        "mamba_d_state": 8, "mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_headdim": 8,
        "chunk_size": 8, "attention_head_dim": 16, "num_mem_blocks": 1, "num_key_value_heads": 4,
    },
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "falcon_mamba": {"state_size": 8},
}  # fmt: skip
