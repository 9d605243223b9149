"""What is known of each architecture, by `model_type` of transformers 5.23.

A new architecture is one entry of `FAMILIES`, which states only what differs from the defaults of
`Family`. Tests compare the facts with transformers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Axis = Literal["tensor", "pipeline", "context", "sequence", "experts"]
Logits = Literal["plain", "softcapped", "divided", "multiplied"]
Shape = Literal["llama", "phi3", "gpt_neox", "gpt2"]

ENCODER_DECODER = "is an encoder-decoder model, and only decoders are trained here"
READS_IMAGES = "also reads images: set model.reads=[image]"
BOTH_WAYS = "attends to its prompt in both directions"
READS_AUDIO = "also reads audio, which is not supported"
MASKED = "is an encoder that predicts masked tokens, not the next token"


@dataclasses.dataclass(frozen=True)
class Family:
    """Facts about an architecture."""

    unfit: str = ""
    """Why it cannot be trained here, for types that are often tried; loading refuses others."""
    text_only: bool = False
    """Its config is that of a multimodal model, of which only the language model is loaded."""
    reads: tuple[str, ...] = ()
    """Media that tests show to be trained as by plain transformers, with `model.reads`."""
    scores: bool = False
    """Whether it has a class with a score head that reads images."""

    sdpa: bool = True
    """Whether transformers has SDPA for it; concatenated rows use the attention of this package."""
    recomputes: bool = True
    """Whether transformers can recompute its activations."""
    sinks: bool = False
    """Whether its attention adds a sink to the scores of each query."""
    transposed: bool = False
    """Whether its linear layers are `Conv1D` of transformers, with transposed weights."""
    targets: str = ""
    """Adapter targets to use instead of `all-linear`, if its kernels of Mamba read the weights of
    other modules directly, which PEFT 0.21 refuses."""

    concatenates: bool = True
    """Whether tests show that training on concatenated documents is exact. Others, and types
    without an entry, may carry a state across documents or use masks of their own."""
    recurrent: tuple[str, ...] = ()
    """Classes of layers with a recurrent state: each is run once per document."""
    forgetful: tuple[str, ...] = ()
    """Classes of attention to which transformers does not pass the document boundaries."""

    logits: Logits | None = None
    """Computation between backbone and loss: only the head, or the head followed by
    cap * tanh(x / cap) (`final_logit_softcapping`), a division (`logits_scaling`), or a
    multiplication (`logit_scale`). None if it is not known."""
    classes: str = ""
    """Beginning of the names of its classes in transformers, if `finetune/kernels` has kernels for
    them."""
    unfused: tuple[str, ...] = ()
    """Kernel options (`norm`, `activation`, `rotary`) without an implementation for them."""
    compiles: bool = False
    """Whether `kernels.blocks=compiled` is supported: blocks without experts."""

    balance: float | None = None
    """Default of `router_aux_loss_coef` in its config, if its loss is `load_balancing_loss_func` of
    transformers; else None."""
    divides: tuple[Axis, ...] = ()
    """Axes that may divide it. `tensor`: by columns and rows only, in contiguous blocks.
    `pipeline`: its layers use hidden states unchanged (Granite would rescale them per stage).
    `context`: plain causal attention, without window, cap or sink. `sequence`: rows of a mixture of
    experts, each process computing with all experts; models without experts need no mark.
    `experts`: divided by transformers, and trained as on one process."""
    gathers: bool = False
    """Whether divided attention gathers column outputs, which PEFT 0.21 does not support."""

    shape: Shape | None = None
    """Reader of its config in `shapes.read_config`, if all its parameters are known there."""
    gemma: bool = False
    """Gemma's norm (1 + w, in fp32), GELU, tied head, and a head size of its own."""
    norms: int = 2
    """Normalizations of the hidden state in one layer."""
    qk_norm: bool = False
    """Whether query and key are normalized."""
    norms_after: bool = False
    """Whether what a branch adds is normalized, not what it reads, and query and key over all heads
    (OLMo 2)."""
    qkv_bias: bool = False
    """Whether query, key and value have biases and the output has none."""
    capped: bool = False
    """Whether scores and logits are soft-capped if the config does not name the caps."""


_OTHER = Family(concatenates=False)
"""Of a type without an entry."""
_DENSE: tuple[Axis, ...] = ("tensor", "pipeline")
_MIXTURE: tuple[Axis, ...] = ("pipeline", "context", "sequence", "experts")
_ALL = ("norm", "activation", "rotary")
_LLAMA = Family(logits="plain", compiles=True, divides=(*_DENSE, "context"), shape="llama")
_IMAGES = Family(reads=("image",), unfit=READS_IMAGES, logits="plain")
_GEMMA = dataclasses.replace(_LLAMA, divides=_DENSE, gemma=True)

FAMILIES: dict[str, Family] = {
    "llama": dataclasses.replace(_LLAMA, classes="Llama"),
    "mistral": dataclasses.replace(_LLAMA, classes="Mistral"),
    "qwen2": dataclasses.replace(_LLAMA, classes="Qwen2", qkv_bias=True),
    "qwen3": dataclasses.replace(_LLAMA, classes="Qwen3", qk_norm=True),
    "smollm3": dataclasses.replace(_LLAMA, classes="SmolLM3", divides=_DENSE),
    "gemma": dataclasses.replace(_GEMMA, classes="Gemma"),
    "gemma2": dataclasses.replace(
        _GEMMA, classes="Gemma2", logits="softcapped", sdpa=False, norms=4, capped=True
    ),
    "gemma3_text": dataclasses.replace(
        _GEMMA, classes="Gemma3", logits="softcapped", norms=4, qk_norm=True
    ),
    "granite": Family(
        classes="Granite", logits="divided", compiles=True, divides=("tensor",), shape="llama"
    ),
    "cohere": Family(logits="multiplied", unfused=_ALL, compiles=True, divides=_DENSE),
    "cohere2": Family(logits="multiplied", unfused=_ALL, divides=_DENSE),
    "phi3": Family(
        classes="Phi3", logits="plain", unfused=("activation", "rotary"), compiles=True,
        divides=("pipeline",), shape="phi3",
    ),
    "olmo2": Family(
        classes="Olmo2", logits="plain", unfused=("norm", "rotary"), compiles=True,
        divides=("pipeline",), shape="llama", qk_norm=True, norms_after=True,
    ),
    "olmo3": Family(shape="llama", qk_norm=True, norms_after=True),
    "gpt2": Family(transposed=True, shape="gpt2"),
    "gpt_neox": Family(shape="gpt_neox"),
    # Mixtures of experts.
    "mixtral": Family(
        classes="Mixtral", logits="plain", unfused=("activation",), balance=0.001,
        divides=_MIXTURE, shape="llama",
    ),
    "qwen3_moe": Family(
        classes="Qwen3Moe", logits="plain", unfused=("activation",), balance=0.001,
        divides=_MIXTURE, shape="llama", qk_norm=True,
    ),
    "qwen2_moe": Family(classes="Qwen2Moe", logits="plain", balance=0.001, divides=_MIXTURE[:3]),
    "olmoe": Family(balance=0.01, divides=_MIXTURE[1:], gathers=True),
    "flex_olmo": Family(balance=0.01),
    "gpt_oss": Family(balance=0.001, sdpa=False, sinks=True),
    **dict.fromkeys(("ernie4_5_moe", "granitemoe", "minimax_m2", "phimoe"), Family(balance=0.001)),
    **dict.fromkeys(("granitemoeshared", "minimax"), Family(balance=0.001, concatenates=False)),
    # Layers with a state.
    "qwen3_next": Family(balance=0.001, recurrent=("Qwen3NextGatedDeltaNet",)),
    "qwen3_5_text": Family(recurrent=("Qwen3_5GatedDeltaNet",)),
    "qwen3_5_moe_text": Family(balance=0.001, recurrent=("Qwen3_5MoeGatedDeltaNet",)),
    "olmo_hybrid": Family(recurrent=("OlmoHybridGatedDeltaNet",)),
    "lfm2": Family(recurrent=("Lfm2ShortConv",)),
    "lfm2_moe": Family(recurrent=("Lfm2MoeShortConv",)),
    "jamba": Family(balance=0.001, recurrent=("JambaMambaMixer",)),
    "bamba": Family(recurrent=("BambaMixer",)),
    "granitemoehybrid": Family(balance=0.001, recurrent=("GraniteMoeHybridMambaLayer",)),
    "zamba2": Family(recurrent=("Zamba2MambaMixer",)),
    "nemotron_h": Family(
        recurrent=("NemotronHMamba2Mixer",),
        targets="q_proj,k_proj,v_proj,o_proj,in_proj,up_proj,down_proj",
    ),
    "falcon_h1": Family(
        recurrent=("FalconH1Mixer",),
        targets="q_proj,k_proj,v_proj,o_proj,in_proj,gate_proj,up_proj,down_proj",
    ),
    "mamba": Family(recurrent=("MambaMixer",), sdpa=False, targets="in_proj,x_proj"),
    "mamba2": Family(recurrent=("Mamba2Mixer",), sdpa=False, targets="in_proj"),
    "falcon_mamba": Family(recurrent=("FalconMambaMixer",), sdpa=False, targets="in_proj,x_proj"),
    # Other decoders.
    "stablelm": Family(forgetful=("StableLmAttention",)),
    "nemotron": Family(forgetful=("NemotronAttention",)),
    "vaultgemma": Family(sdpa=False),
    **dict.fromkeys(
        (
            "apertus", "arcee", "biogpt", "bitnet", "deepseek_v2", "deepseek_v3", "diffllama",
            "dots1", "ernie4_5", "exaone4", "glm", "glm4", "glm4_moe", "gpt_bigcode", "helium",
            "hunyuan_v1_dense", "ministral", "ministral3", "olmo", "opt", "persimmon",
            "phi", "seed_oss", "starcoder2",
        ),
        Family(),
    ),
    # Models that read images.
    **dict.fromkeys(
        (
            "aria", "aya_vision", "cosmos3_edge", "cosmos3_omni", "deepseek_vl",
            "deepseek_vl_hybrid", "exaone4_5", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga",
            "idefics3", "internvl", "janus", "lighton_ocr", "llava", "llava_next",
            "llava_next_video", "llava_onevision", "mistral3", "ovis2", "paddleocr_vl",
            "qianfan_ocr", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
            "video_llama_3", "video_llava", "vipllava",
        ),
        _IMAGES,
    ),
    "granite_docling": dataclasses.replace(_IMAGES, logits="divided"),
    "mistral_large4": dataclasses.replace(_IMAGES, logits="softcapped", concatenates=False),
    "hyperclovax_vision_v2": dataclasses.replace(_IMAGES, logits=None),
    **dict.fromkeys(("glm5_next", "lfm3_vl"), dataclasses.replace(_IMAGES, concatenates=False)),
    # The tokens of an image see each other, which attention of documents does not know.
    "gemma3": Family(reads=("image",), scores=True, logits="plain", concatenates=False),
    "gemma4": Family(reads=("image",), logits="softcapped", concatenates=False),
    "qwen3_5": Family(
        reads=("image",), scores=True, text_only=True, logits="plain",
        recurrent=("Qwen3_5GatedDeltaNet",),
    ),
    "qwen3_5_moe": Family(
        reads=("image",), text_only=True, logits="plain", recurrent=("Qwen3_5MoeGatedDeltaNet",)
    ),
    "openai-gpt": dataclasses.replace(_OTHER, recomputes=False, sdpa=False, transposed=True),
    **dict.fromkeys(("ctrl", "jetmoe"), dataclasses.replace(_OTHER, recomputes=False)),
    **dict.fromkeys(
        ("cpmant", "gpt_neox_japanese", "reformer", "xlm", "xlnet"),
        dataclasses.replace(_OTHER, recomputes=False, sdpa=False),
    ),
    **dict.fromkeys(
        (
            "big_bird", "bloom", "codegen", "deepseek_v4", "flint", "git", "got_ocr2", "gpt_neo",
            "gptj", "granite_swa", "granitemoe_swa", "hy_v4", "inkling2_text", "megatron-bert",
            "mimo_v2_flash", "mpt", "rembert", "roformer", "rwkv", "trocr", "xglm", "xlstm",
        ),
        dataclasses.replace(_OTHER, sdpa=False),
    ),
    # Models of other kinds.
    **dict.fromkeys(
        ("bigbird_pegasus", "mvp", "prophetnet"),
        dataclasses.replace(_OTHER, unfit=ENCODER_DECODER, sdpa=False),
    ),
    **dict.fromkeys(
        (
            "bart", "blenderbot", "florence2", "led", "longt5", "m2m_100", "marian", "mbart", "mt5",
            "nllb-moe", "pegasus", "plbart", "t5", "umt5", "whisper",
        ),
        dataclasses.replace(_OTHER, unfit=ENCODER_DECODER),
    ),
    **dict.fromkeys(
        ("granite_speech", "qwen2_5_omni", "qwen2_audio", "voxtral"),
        dataclasses.replace(_OTHER, unfit=READS_AUDIO),
    ),
    "paligemma": dataclasses.replace(_OTHER, unfit=BOTH_WAYS),
    **dict.fromkeys(
        ("albert", "deberta", "deberta-v2", "distilbert", "longformer", "modernbert"),
        dataclasses.replace(_OTHER, unfit=MASKED),
    ),
}  # fmt: skip


UNREAD: dict[str, str] = {
    **dict.fromkeys(
        (
            "cohere2_vision", "gemma4_unified", "inkling2", "inkling_mm_model", "kimi_k25",
            "lfm2_vl", "llama4", "minicpm_ocr", "minimax_m3_vl", "molmo2", "muse_glimmer",
            "muse_spark", "nemotron_h_omni", "perception_lm", "step3p7", "unlimited_ocr",
        ),
        "has an image processor for torchvision only, and Pillow resizes images here",
    ),
    **dict.fromkeys(
        ("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder"),
        ENCODER_DECODER,
    ),
    **dict.fromkeys(
        (
            "blip", "blip-2", "git", "idefics2", "instructblip", "instructblipvideo", "kosmos-2",
            "kosmos-2.5", "pp_chart2table",
        ),
        "has a processor that rewrites a complete prompt, where images are no tokens of their own",
    ),
    **dict.fromkeys(
        ("idefics", "mllama"), "reads images by cross attention, not as tokens of a row"
    ),
    **dict.fromkeys(
        ("fast_vlm", "gemma3n"), "has a tower of the package timm, which is not needed otherwise"
    ),
    **dict.fromkeys(
        ("minicpmv4_6", "minicpmv4_7"),
        "has a processor that reads settings of videos, which need torchvision",
    ),
    **dict.fromkeys(("fuyu", "got_ocr2", "shieldgemma2"), "has a prompt of its own for one image"),
    **dict.fromkeys(("chameleon", "emu3"), "reads images as ids that a frozen encoder computes"),
    **dict.fromkeys(
        (
            "cohere_compass", "deepseek_ocr2", "dots3_note", "ernie4_5_vl_moe", "hunyuan_vl",
            "qwen4_exp",
        ),
        "has not been compared with plain transformers",
    ),
    "granite4_vision": "makes no cache of keys and values, without which no answer is generated",
    "diffusion_gemma": "is trained to remove noise of blocks, not to predict the next token",
    "evolla": "reads proteins",
    "mistral4": "reads text alone",
    **dict.fromkeys(
        ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
        "counts positions with values of its modules, not of its config",
    ),
    "paligemma": BOTH_WAYS,
    "pi0": "predicts movements of a robot",
}  # fmt: skip
"""Why `model.reads` is refused, for types that transformers loads as models of images and text."""


def family_of(model: Mapping[str, Any] | str | None) -> Family:
    """What is known of a model, by its config or its `model_type`."""
    kind = model.get("model_type") if isinstance(model, Mapping) else model
    return FAMILIES.get(str(kind), _OTHER)


def fused_classes(option: str) -> list[tuple[str, Family]]:
    """Beginnings of class names for which a kernel option is implemented, with their families."""
    known = [family for family in FAMILIES.values() if option not in family.unfused]
    return [(family.classes, family) for family in known if family.classes]


def dividing(axis: Axis) -> list[str]:
    """The model types that an axis may divide."""
    return [kind for kind, family in FAMILIES.items() if axis in family.divides]
