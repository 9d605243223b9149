"""Tiny models of the families that read images, with their processors, and plain transformers."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from pictured import drawn
from PIL import Image
from shrunk_families import (
    BEGIN,
    END,
    IMAGE,
    MADE,
    MROPE,
    OF_CLIP,
    SPECIAL,
    SQUARE,
    VIDEO,
    VOCABULARY,
    Made,
)
from tiny_run import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}PLACE{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "vocab_size": VOCABULARY,
    "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 257, "tie_word_embeddings": False,
}  # fmt: skip
SIGHT: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
GRID: dict[str, Any] = {
    "depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO,
          "vision_start_token_id": BEGIN, "vision_end_token_id": END}  # fmt: skip
PIXELS = {"size": {"shortest_edge": 1024, "longest_edge": 9216}, "patch_size": 8, "merge_size": 2}
NAMED = {"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<finish>"}


def qwen(config: str, kind: str, vision: dict[str, Any], **text: Any) -> Made:
    made = getattr(tf, config)(
        text_config={**SIZES, "rope_parameters": MROPE, **text}, vision_config=vision, **TOKENS
    )
    qwen_tokens = {"image_token": "<image>", "video_token": "<video>"}
    return made, tf.Qwen2VLImageProcessorPil(**PIXELS), kind, {}, qwen_tokens


def qwen2_vl() -> Made:
    vision = {**GRID, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    return qwen("Qwen2VLConfig", "Qwen2VLProcessor", vision)


def qwen2_5_vl() -> Made:
    vision = {**GRID, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32,
              "window_size": 32, "fullatt_block_indexes": [1]}  # fmt: skip
    return qwen("Qwen2_5_VLConfig", "Qwen2_5_VLProcessor", vision)


QWEN3 = {**GRID, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32,
         "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip


def qwen3_vl() -> Made:
    return qwen("Qwen3VLConfig", "Qwen3VLProcessor", QWEN3, head_dim=8)


def qwen3_vl_moe() -> Made:
    return qwen("Qwen3VLMoeConfig", "Qwen3VLProcessor", QWEN3, head_dim=8, **EXPERTS)


def glm4v(config: str = "Glm4vConfig", **text: Any) -> Made:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    vision = {"depth": 2, "num_heads": 2, "hidden_size": 16, "intermediate_size": 24,
              "out_hidden_size": 32, "image_size": 32, "patch_size": 8, "spatial_merge_size": 2,
              "temporal_patch_size": 2}  # fmt: skip
    made = getattr(tf, config)(
        text_config={**SIZES, "rope_parameters": rope | {"mrope_section": [1, 1, 2]}, **text},
        vision_config=vision, image_token_id=IMAGE, image_start_token_id=BEGIN,
        image_end_token_id=END, video_token_id=VIDEO,
    )  # fmt: skip
    size = {"shortest_edge": 2048, "longest_edge": 18432}
    images = tf.Glm4vImageProcessorPil(size=size, patch_size=8, merge_size=2)
    return made, images, "Glm4vProcessor", {}, {"image_token": "<image>", "video_token": "<video>"}


def glm4v_moe() -> Made:
    more = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    more |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
    return glm4v("Glm4vMoeConfig", **more)


def idefics3(config: str = "Idefics3Config", kind: str = "Idefics3") -> Made:
    made = getattr(tf, config)(
        text_config={**SIZES, "model_type": "llama"}, vision_config=SIGHT, scale_factor=2,
        image_token_id=IMAGE, pad_token_id=257, tie_word_embeddings=False,
    )  # fmt: skip
    images = getattr(tf, f"{kind}ImageProcessorPil")(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    tokens = {
        "image_token": "<image>",
        "fake_image_token": "<begin>",
        "global_image_token": "<row>",
    }
    return made, images, f"{kind}Processor", {"image_seq_len": 4}, tokens


def smolvlm() -> Made:
    return idefics3("SmolVLMConfig", "SmolVLM")


def clip(config: str, **more: Any) -> Any:
    return getattr(tf, config)(
        text_config={**SIZES, "model_type": "llama"},
        vision_config={**SIGHT, "model_type": "clip_vision_model"},
        image_token_id=IMAGE, image_token_index=IMAGE, tie_word_embeddings=False, **more,
    )  # fmt: skip


def llava() -> Made:
    made = clip("LlavaConfig", vision_feature_layer=-2)
    images = tf.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=SQUARE["size"])
    return made, images, "LlavaProcessor", OF_CLIP, {"image_token": "<image>"}


def llava_next() -> Made:
    points = [[32, 64], [64, 32], [64, 64]]
    made = clip("LlavaNextConfig", vision_feature_layer=-2, image_grid_pinpoints=points)
    images = tf.LlavaNextImageProcessorPil(
        size={"shortest_edge": 32}, crop_size=SQUARE["size"], image_grid_pinpoints=points
    )
    return made, images, "LlavaNextProcessor", OF_CLIP, {"image_token": "<image>"}


def llava_onevision() -> Made:
    points = [[32, 64], [64, 32], [64, 64]]
    made = tf.LlavaOnevisionConfig(
        text_config={**SIZES, "model_type": "qwen2"},
        vision_config={**SIGHT, "model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_id=IMAGE, image_token_index=IMAGE, video_token_index=VIDEO,
        image_grid_pinpoints=points, vision_feature_layer=-1, vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )  # fmt: skip
    images = tf.LlavaOnevisionImageProcessorPil(**SQUARE, image_grid_pinpoints=points)
    settings = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    tokens = {"image_token": "<image>", "video_token": "<video>"}
    return made, images, "LlavaOnevisionProcessor", settings, tokens


def gemma3() -> Made:
    made = tf.Gemma3Config(
        text_config={**SIZES, "head_dim": 8, "sliding_window": 64, "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={**SIGHT, "vision_use_head": False}, mm_tokens_per_image=4,
        boi_token_index=BEGIN, eoi_token_index=END, image_token_index=IMAGE, image_token_id=IMAGE,
        tie_word_embeddings=False,
    )  # fmt: skip
    images = tf.Gemma3ImageProcessorPil(**SQUARE)
    return made, images, "Gemma3Processor", {"image_seq_length": 4}, NAMED


def internvl() -> Made:
    made = tf.InternVLConfig(
        text_config={**SIZES, "model_type": "qwen2"},
        vision_config={**SIGHT, "image_size": [32, 32], "patch_size": [8, 8]},
        image_token_id=IMAGE, image_seq_length=4, tie_word_embeddings=False,
    )  # fmt: skip
    images = tf.GotOcr2ImageProcessorPil(
        **SQUARE, crop_to_patches=True, min_patches=1, max_patches=4
    )
    tokens = {"start_image_token": "<begin>", "end_image_token": "<finish>",
              "context_image_token": "<image>", "video_token": "<video>"}  # fmt: skip
    return made, images, "InternVLProcessor", {"image_seq_length": 4}, tokens


RIGHT: dict[str, Callable[[], Made]] = {
    each.__name__: each
    for each in (
        qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, glm4v, glm4v_moe, idefics3, smolvlm, llava,
        llava_next, llava_onevision, gemma3, internvl,
    )
} | MADE  # fmt: skip
"""Families whose losses are those of plain transformers."""


def saved(name: str, folder: Path, **vision: int) -> Path:
    """The folder of a model with its processor, all weights drawn.

    Args:
        vision: Changed fields of its vision config.
    """
    config, images, kind, settings, named = RIGHT[name]()
    if vision:
        config.vision_config.update(vision)
    tokenizer = byte_tokenizer(None)
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    place = "<begin>" if name == "gemma3" else "<image>"
    if images.valid_kwargs.__annotations__.keys() & {"merge_size"}:  # else two would be one
        place = "<begin><image><finish>"
    tokenizer.chat_template = TEMPLATE.replace("PLACE", place)
    tokenizer.save_pretrained(folder)
    about = folder / "tokenizer_config.json"
    fields = json.loads(about.read_text()) | {"extra_special_tokens": named}
    about.write_text(json.dumps(fields))
    config.save_pretrained(folder)
    images.save_pretrained(folder)
    fields = {"processor_class": kind, **settings}
    (folder / "processor_config.json").write_text(json.dumps(fields))
    torch.manual_seed(0)
    model = tf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    drawn(model).save_pretrained(folder)
    return folder


def plain_steps(
    folder: Path, rows: Path, processor: Any, documents: Any, chosen: list[list[int]], lr: float
) -> list[tuple[float, float]]:
    """Losses and gradient norms of AdamW by plain transformers, one unpadded row at a time.

    Args:
        folder: The model.
        rows: Its rows, with images relative to them.
        processor: The complete processor of the model.
        documents: The prepared documents, whose tokens have to be those of the processor.
        chosen: Row numbers of each step.
        lr: Learning rate.
    """
    model = tf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    accepted = inspect.signature(model.forward).parameters
    lines, found = [json.loads(line) for line in rows.read_text().splitlines()], []
    for numbers in chosen:
        total = sum(int(documents.document(number)[1][1:].sum()) for number in numbers)
        summed = 0.0
        for number in numbers:
            messages = lines[number]["messages"]
            names = [part["path"] for part in messages[0]["content"] if part["type"] == "image"]
            images = [Image.open(rows.parent / name) for name in names]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            given = {"images": [images]} if images else {}
            if "mm_token_type_ids" in accepted:  # Cosmos needs it, and makes it on request
                given["return_mm_token_type_ids"] = True
            given = processor(**given, text=[text], return_tensors="pt")
            ids, trained = documents.document(number)
            assert given["input_ids"][0].tolist() == ids.tolist()
            logits = model(**given, use_cache=False).logits[0, :-1].float()
            labels = torch.from_numpy(ids.astype("int64"))[1:]
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            loss = losses[torch.from_numpy(trained.copy())[1:]].sum() / total
            loss.backward()
            summed += loss.item()
        tower = model.get_encoder(modality="image").parameters()
        assert any(weight.grad is not None and weight.grad.any() for weight in tower)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        found.append((summed, norm))
    return found
