"""Tiny configs of families that read images, made from the defaults of transformers."""

from collections.abc import Callable
from typing import Any

import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

Made = tuple[Any, Any, str, dict[str, Any], dict[str, str]]
"""Config, image processor, class of the processor, its settings, and named tokens."""
SPECIAL = ["<image>", "<begin>", "<finish>", "<row>", "<video>"]
SPECIAL += ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
SPECIAL += ["<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
SPECIAL += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
IMAGE, BEGIN, END, _, VIDEO = range(260, 265)
ATOM = 260 + SPECIAL.index("<IMG_ATOM>")
VOCABULARY = 260 + len(SPECIAL)
TOKENS = {
    "image_token": "<image>", "video_token": "<video>", "context_image_token": "<image>",
    **dict.fromkeys(("boi_token", "image_start_token", "start_image_token"), "<begin>"),
    **dict.fromkeys(("eoi_token", "image_end_token", "end_image_token"), "<finish>"),
    "vision_start_token": "<begin>", "vision_end_token": "<finish>",
    "vision_bos_token": "<begin>", "vision_eos_token": "<finish>",
    "audio_token": "<row>", "audio_bos_token": "<begin>", "audio_eos_token": "<finish>",
    "boa_token": "<begin>", "eoa_token": "<finish>", "image_break_token": "<row>",
    "slice_start_token": "<IMG_COL>", "slice_end_token": "<IMG_ROW>",
    "image_id_start_token": "<IMG_START>", "image_id_end_token": "<IMG_END>",
}  # fmt: skip
"""Special tokens by the names under which processors look for them."""
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048,
    "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 257,
    "tie_word_embeddings": False, "sliding_window": 64, "query_pre_attn_scalar": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "embed_dim": 16, "intermediate_size": 24, "num_hidden_layers": 3, "depth": 2,
    "num_attention_heads": 2, "num_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "image_size": 32, "patch_size": 8, "num_patches": 16, "out_hidden_size": 32,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
    "projection_dim": 16, "window_size": 32, "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0], "vision_use_head": False, "num_channels": 3,
}  # fmt: skip
WHOLE: dict[str, Any] = {
    "image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": VIDEO,
    "video_token_index": VIDEO, "pad_token_id": 257, "tie_word_embeddings": False,
    "vision_start_token_id": BEGIN, "vision_end_token_id": END, "boi_token_id": BEGIN,
    "eoi_token_id": END, "image_start_token_id": BEGIN, "image_end_token_id": END,
}  # fmt: skip
"""Sizes and ids by their names in configs: of language models, of towers, and of neither."""


def _fitting(default: Any, pool: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """What a config knows of a pool, and what is given."""
    fields = default.to_dict()
    known = {
        name: value for name, value in pool.items() if name in {*fields, *default.attribute_map}
    }
    kind = {"model_type": fields["model_type"]} if fields.get("model_type") else {}
    return kind | known | given


def shrunk(kind: str, **given: Any) -> Any:
    """A tiny config of a `model_type`.

    Args:
        kind: The type.
        given: Fields that differ; those of its parts by the names of these.
    """
    made = CONFIG_MAPPING[kind]
    default = made()
    parts = {name: given.pop(name, None) for name in made.sub_configs}
    fields = _fitting(default, WHOLE, given)
    del fields["model_type"]
    for name, own in parts.items():
        part = getattr(default, name)
        pool = TEXT if name == "text_config" else VISION
        if own is not None or name in ("text_config", "vision_config"):
            fields[name] = own if part is None else _fitting(part, pool, own or {})
    return made(**fields)


def family(
    kind: str,
    pixels: dict[str, Any],
    settings: dict[str, Any] | None = None,
    images: str = "",
    processor: str = "",
    **given: Any,
) -> Made:
    """A tiny model of a `model_type` and its processor.

    Args:
        kind: The type.
        pixels: Settings of its image processor.
        settings: Those of its processor.
        images: Class of the image processor, if transformers has none for the type.
        processor: Class of the processor, if transformers has none for the type.
        given: As in `shrunk`.
    """
    images = images or IMAGE_PROCESSOR_MAPPING_NAMES[kind]["pil"]
    name = processor or str(PROCESSOR_MAPPING_NAMES[kind])
    return shrunk(kind, **given), getattr(tf, images)(**pixels), name, settings or {}, TOKENS


SQUARE = {"size": {"height": 32, "width": 32}}
TILES = {**SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}
CUT = {"size": {"shortest_edge": 32}, "crop_size": SQUARE["size"]}
AREA = {"shortest_edge": 1024, "longest_edge": 9216}
QWEN = {"size": AREA, "patch_size": 8, "merge_size": 2}
GLM = {"size": {"shortest_edge": 2048, "longest_edge": 18432}, "patch_size": 8, "merge_size": 2}
PIXTRAL = {"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}}
OF_PIXTRAL = {"patch_size": 8, "spatial_merge_size": 2, "image_token": "<image>",
              "image_break_token": "<row>", "image_end_token": "<finish>"}  # fmt: skip
OF_CLIP = {"patch_size": 8, "vision_feature_select_strategy": "default",
           "num_additional_image_tokens": 1}  # fmt: skip
POINTS = [[32, 64], [64, 32], [64, 64]]
ROPE = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {**ROPE, "mrope_section": [1, 1, 2]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
HYBRID = {
    "head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
}  # fmt: skip
OF_GLM = {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}
AXIAL = {"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}


def pixtral() -> Made:
    made = tf.LlavaConfig(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config={**VISION, "model_type": "pixtral"}, image_token_id=IMAGE,
        image_token_index=IMAGE, vision_feature_layer=-1, vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )  # fmt: skip
    settings = {**OF_PIXTRAL, "spatial_merge_size": 1}
    return made, tf.PixtralImageProcessorPil(**PIXTRAL), "PixtralProcessor", settings, TOKENS


MADE: dict[str, Callable[[], Made]] = {
    "pixtral": pixtral,
    "aria": lambda: family(
        "aria", {"max_image_size": 980}, {"size_conversion": {980: 4}},
        vision_config={"image_size": 980, "patch_size": 70},
        projector_patch_to_query_dict={196: 4},
    ),
    "aya_vision": lambda: family(
        "aya_vision", TILES,
        {"patch_size": 8, "img_size": 32, "downsample_factor": 2, "image_token": "<image>",
         "start_of_img_token": "<begin>", "end_of_img_token": "<finish>",
         "img_patch_token": "<image>", "tile_token": "<row>", "tile_global_token": "<global-img>"},
        text_config=SLIDING,
    ),
    "cosmos3_edge": lambda: family(
        "cosmos3_edge", QWEN, text_config={"rope_parameters": MROPE}, projector_hidden_size=64
    ),
    "cosmos3_omni": lambda: family(
        "cosmos3_omni", QWEN, processor="Qwen3VLProcessor", text_config={"rope_parameters": MROPE}
    ),
    "deepseek_vl": lambda: family(
        "deepseek_vl", {**SQUARE, "min_size": 8}, {"num_image_tokens": 16}
    ),
    "deepseek_vl_hybrid": lambda: family(
        "deepseek_vl_hybrid",
        {**SQUARE, "min_size": 8, "high_res_size": {"height": 64, "width": 64}},
        {"num_image_tokens": 16},
        high_res_vision_config={"image_size": 64, "output_channels": 8, "window_size": 2,
            "global_attn_indexes": [1], "mlp_dim": 24, "num_pos_feats": 8, "scale": 1},
    ),
    "exaone4_5": lambda: family(
        "exaone4_5", QWEN, text_config={**SLIDING, "sliding_window_pattern": 2}
    ),
    "gemma4": lambda: family(
        "gemma4", {"patch_size": 8, "max_soft_tokens": 70, "pooling_kernel_size": 2},
        {"image_seq_length": 70},
        vision_config={"model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "head_dim": 8, "patch_size": 8, "pooling_kernel_size": 2,
            "position_embedding_size": 64},
        text_config={**SLIDING, "global_head_dim": 8, "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8, "final_logit_softcapping": 2.0,
            "use_bidirectional_attention": "vision"},
    ),
    "glm46v": lambda: family("glm46v", GLM, text_config=OF_GLM),
    "glm_ocr": lambda: family(
        "glm_ocr", GLM, images="Glm46VImageProcessorPil", processor="Glm46VProcessor",
        text_config=OF_GLM,
    ),
    "glm5_next": lambda: family(
        "glm5_next", GLM,
        text_config={"num_key_value_heads": 4, "qk_rope_head_dim": 0, "linear_head_dim": 8,
            "linear_num_heads": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "granite_docling": lambda: family(
        "granite_docling", {**SQUARE, "max_patches": 4}, {"image_seq_len": 4},
        vision_config={"scale_factor": 2, "use_fine_route": False,
            "deepstack_visual_indexes": [0, 1]},
        text_config={"logits_scaling": 2.0},
    ),
    "glmga": lambda: family("glmga", GLM, processor="Glm46VProcessor", text_config=OF_GLM),
    "hyperclovax_vision_v2": lambda: family(
        "hyperclovax_vision_v2", QWEN, text_config={"logits_scaling": 0.5}
    ),
    "janus": lambda: family(
        "janus", {**SQUARE, "min_size": 8}, {"num_image_tokens": 16},
        vision_config={"mlp_ratio": 2, "projection_dim": 32, "num_image_tokens": 16},
        vq_config={"base_channels": 32, "latent_channels": 32, "channel_multiplier": [1, 1],
            "num_patches": 4, "projection_dim": 32, "image_token_embed_dim": 32,
            "num_embeddings": 16},
    ),
    "lfm3_vl": lambda: family(
        "lfm3_vl", QWEN, text_config={"layer_types": ["conv", "full_attention"]}
    ),
    "lighton_ocr": lambda: family(
        "lighton_ocr", PIXTRAL, {"patch_size": 8, "spatial_merge_size": 2}, vision_config=AXIAL
    ),
    "llava_next_video": lambda: family(
        "llava_next_video", {**CUT, "image_grid_pinpoints": POINTS}, OF_CLIP,
        image_grid_pinpoints=POINTS, vision_feature_layer=-2,
    ),
    "mistral3": lambda: family("mistral3", PIXTRAL, OF_PIXTRAL, vision_config=AXIAL),
    "mistral_large4": lambda: family("mistral_large4", PIXTRAL, OF_PIXTRAL, vision_config=AXIAL, 
        text_config={"num_key_value_heads": 4, "final_logit_softcapping": 2.0}),
    "ovis2": lambda: family(
        "ovis2", TILES, {"image_seq_length": 16},
        vision_config={"vocab_size": 32, "num_visual_indicator_tokens": 5}, image_token_id=ATOM,
        visual_indicator_token_ids=[ATOM + n for n in range(1, 6)], vocab_size=VOCABULARY,
        hidden_size=32,
    ),
    "paddleocr_vl": lambda: family(
        "paddleocr_vl", {"min_pixels": 1024, "max_pixels": 9216, "patch_size": 8, "merge_size": 2},
        text_config={"rope_parameters": MROPE},
    ),
    "qianfan_ocr": lambda: family(
        "qianfan_ocr", TILES, {"image_seq_length": 4}, image_seq_length=4,
        vision_config={"image_size": [32, 32], "patch_size": [8, 8], "drop_path_rate": 0.0},
        text_config={"layer_types": ["full_attention"] * 2},
    ),
    "qwen3_5": lambda: family("qwen3_5", QWEN, text_config=HYBRID),
    "qwen3_5_moe": lambda: family("qwen3_5_moe", QWEN, text_config=HYBRID),
    "video_llava": lambda: family(
        "video_llava", CUT, OF_CLIP, images="VideoLlavaImageProcessor"
    ),
    "video_llama_3": lambda: family(
        "video_llama_3", {"min_pixels": 1024, "max_pixels": 9216, "patch_size": 8, "merge_size": 1}
    ),
    "vipllava": lambda: family("vipllava", CUT, OF_CLIP, vision_feature_layer=[-2, -3]),
}  # fmt: skip
"""By name; that of Pixtral is no `model_type`."""
