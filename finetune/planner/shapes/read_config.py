"""Read the shapes of a decoder from its `config.json`.

Only architectures whose parameters are all known here are read. Others are rejected, because a
guessed shape would silently make all derived numbers wrong.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from finetune.errors import FinetuneError, did_you_mean, refuse
from finetune.planner.families import FAMILIES, Shape, family_of
from finetune.planner.shapes.architecture import Activation, Architecture, Experts, Matrix


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Fields of a config; problems are collected instead of raised."""

    values: Mapping[str, Any]
    problems: list[str]

    def size(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1; a missing field without a default is a problem."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.problems.append(f"{name}: got {value!r}, expected a whole number of at least 1")
        return 1

    def one_of(self, *names: str) -> int:
        """The size of the first field that is given; of the first name if none is given."""
        given = [name for name in names if self.values.get(name) is not None]
        return self.size((given or [*names])[0])

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)

    def capped(self, name: str) -> bool:
        """Whether a cap is set. In transformers, a Gemma-2 config without the field has a cap."""
        return self.values.get(name, 1) is not None

    def activation(self, default: str) -> Activation:
        names: dict[str, Activation] = {
            "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_new",
            "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
        }  # fmt: skip
        # Gemma uses `hidden_activation` and ignores its older `hidden_act`.
        name = self.values.get("hidden_activation") or self.values.get("hidden_act") or default
        if str(name) not in names:
            known = ", ".join(names)
            self.problems.append(f"hidden_act: got {name!r}, the formulas know {known}")
        return names.get(str(name), "silu")


def _decoder(
    fields: _Fields, tied: bool = False, activation: str = "silu", context: int = 2048
) -> dict[str, Any]:
    """What the formulas read alike of every decoder; the arguments are defaults of its type."""
    h, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    return {
        "layers": fields.size("num_hidden_layers"), "hidden": h, "heads": heads, "kv_heads": heads,
        "head_dim": h // heads, "width": fields.size("intermediate_size"),
        "vocab": fields.size("vocab_size"), "tied": fields.flag("tie_word_embeddings", tied),
        "activation": fields.activation(activation),
        "context": fields.size("max_position_embeddings", context),
    }  # fmt: skip


def _llama(kind: str, fields: _Fields) -> Architecture:
    """Llama, and families that differ from it in biases, norms or the activation."""
    family = family_of(kind)
    gemma = family.gemma
    made = _decoder(fields, gemma, "gelu_pytorch_tanh" if gemma else "silu")
    h, heads, width = made["hidden"], made["heads"], made["width"]
    # transformers: Llama defaults to as many key heads as heads; other classes have other defaults
    kv = fields.size("num_key_value_heads", heads if kind == "llama" else None)
    implied = h // heads if not (gemma or kind == "qwen3") else None
    if implied is not None and fields.values.get("head_dim") is None and h % heads:
        fields.problems.append(f"hidden_size: {h} does not divide into {heads} heads")
    head_dim = fields.size("head_dim", implied)
    stated = fields.flag("attention_bias", False)
    bias, out_bias = family.qkv_bias or stated, stated and not family.qkv_bias
    q, k, inner = heads * head_dim, kv * head_dim, fields.flag("mlp_bias", False)
    experts = _experts(kind, fields, width)
    matrices = [Matrix("self_attn.q_proj", h, q, bias), Matrix("self_attn.k_proj", h, k, bias)]
    matrices += [Matrix("self_attn.v_proj", h, k, bias), Matrix("self_attn.o_proj", q, h, out_bias)]
    if experts is None:
        matrices += [Matrix(f"mlp.{name}_proj", h, width, inner) for name in ("gate", "up")]
        matrices.append(Matrix("mlp.down_proj", width, h, inner))
    made |= {
        "kv_heads": kv, "head_dim": head_dim, "matrices": tuple(matrices), "experts": experts,
        "norm": "gemma" if gemma or family.norms_after else "rms",  # both cast to 16 bits last
        "norms": family.norms, "qk_norm": family.qk_norm, "norms_after": family.norms_after,
        "capped_scores": caps_scores(fields.values),
        "capped_logits": family.capped and fields.capped("final_logit_softcapping"),
    }  # fmt: skip
    return Architecture(kind, **made)


def _experts(kind: str, fields: _Fields, width: int) -> Experts | None:
    if kind == "mixtral":
        count = fields.one_of("num_local_experts", "num_experts")
        return Experts(count, fields.size("num_experts_per_tok"), width, exact_routing=True)
    if kind == "qwen3_moe":
        if fields.values.get("mlp_only_layers") or fields.size("decoder_sparse_step", 1) != 1:
            fields.problems.append(
                "mlp_only_layers, decoder_sparse_step: the formulas know models whose every "
                "layer has experts"
            )
        # transformers 5 reads both names and writes the second.
        count = fields.one_of("num_experts", "num_local_experts")
        chosen = fields.size("num_experts_per_tok")
        return Experts(count, chosen, fields.size("moe_intermediate_size"))
    return None


def _phi3(kind: str, fields: _Fields) -> Architecture:
    """Phi-3: Llama with fused q, k, v and with fused gate and up matrices."""
    made = _decoder(fields, context=4096)
    h, heads, f = made["hidden"], made["heads"], made["width"]
    kv, head_dim = fields.size("num_key_value_heads", heads), fields.size("head_dim", h // heads)
    matrices = (
        Matrix("self_attn.qkv_proj", h, (heads + 2 * kv) * head_dim),
        Matrix("self_attn.o_proj", heads * head_dim, h),
        Matrix("mlp.gate_up_proj", h, 2 * f), Matrix("mlp.down_proj", f, h),
    )  # fmt: skip
    made |= {"kv_heads": kv, "head_dim": head_dim, "matrices": matrices}
    return Architecture(kind, **made)


def _gpt_neox(kind: str, fields: _Fields) -> Architecture:
    made, bias = _decoder(fields, activation="gelu"), fields.flag("attention_bias", True)
    h, f = made["hidden"], made["width"]
    matrices = (
        Matrix("attention.query_key_value", h, 3 * h, bias), Matrix("attention.dense", h, h, bias),
        Matrix("mlp.dense_h_to_4h", h, f, True), Matrix("mlp.dense_4h_to_h", f, h, True),
    )  # fmt: skip
    made |= {"matrices": matrices, "gated": False, "norm": "layer"}
    return Architecture(kind, **made, prefix="gpt_neox.layers", table="embed_in", head="embed_out")


def _gpt2(kind: str, fields: _Fields) -> Architecture:
    h, positions = fields.size("n_embd", 768), fields.size("n_positions", 1024)
    named = {
        "hidden_size": h, "intermediate_size": fields.size("n_inner", 4 * h),
        "num_hidden_layers": fields.size("n_layer", 12), "max_position_embeddings": positions,
        "num_attention_heads": fields.size("n_head", 12),
        "vocab_size": fields.size("vocab_size", 50257), "hidden_act": "gelu_new",
    }  # fmt: skip
    made = _decoder(_Fields({**fields.values, **named}, fields.problems), tied=True)
    f = made["width"]
    matrices = (
        Matrix("attn.c_attn", h, 3 * h, True), Matrix("attn.c_proj", h, h, True),
        Matrix("mlp.c_fc", h, f, True), Matrix("mlp.c_proj", f, h, True),
    )  # fmt: skip
    made |= {"matrices": matrices, "gated": False, "norm": "layer", "positions": positions}
    return Architecture(kind, **made, prefix="transformer.h", table="wte")


READERS: dict[Shape, Callable[[str, _Fields], Architecture]] = {
    "llama": _llama,
    "phi3": _phi3,
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
}
"""Readers of configs whose parameters are all known, checked against transformers 5.23."""


def caps_scores(config: Mapping[str, Any]) -> bool:
    """Whether attention scores are soft-capped; Gemma 2 does so by default in transformers."""
    default = 50.0 if family_of(config).capped else None
    return config.get("attn_logit_softcapping", default) is not None


def read(config: Mapping[str, Any], where: str = "config.json") -> Architecture:
    """The shape of a model from the fields of its `config.json`.

    Raises:
        FinetuneError: the architecture is unknown, or fields are missing or invalid; contains
            every problem.
    """
    kind = config.get("model_type")
    reader = family_of(config).shape
    if reader is None:
        known = sorted(kind for kind, family in FAMILIES.items() if family.shape)
        raise FinetuneError(
            f"{where}: model_type: got {kind!r}; the formulas know {', '.join(known)}"
            f"{did_you_mean(str(kind), known)}; `finetune plan` traces any other that "
            "transformers has"
        )
    if config.get("quantization_config"):
        raise FinetuneError(
            f"{where}: quantization_config: the weights are already quantised; name the original "
            "model and set model.quantization"
        )
    fields = _Fields(config, [])
    shape = READERS[reader](str(kind), fields)
    if shape.heads % shape.kv_heads:
        fields.problems.append(
            f"num_key_value_heads: {shape.heads} heads do not divide into groups of "
            f"{shape.kv_heads}"
        )
    refuse(f"{where}: {problem}" for problem in fields.problems)
    return shape
