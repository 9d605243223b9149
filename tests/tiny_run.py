"""Runs of tiny real models, written as training writes them."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pydantic import TypeAdapter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from finetune import SFT, LoRA, Model, Recipe, Run
from finetune.runs.manifest import FORMAT, sealed
from finetune.runs.run import write_json

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 256 + len(SPECIAL)
SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"vocab_size": VOCABULARY, "initializer_range": 0.2},
    **{"bos_token_id": None, "eos_token_id": 256},
}


ROUNDING = 1e-5
"""Logits in fp32 where sums are in another order: 1e-6 of the largest was measured."""


def unreachable(step: int) -> None:
    raise AssertionError(f"step {step} is evaluated before everything else is checked")


def byte_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a byte, then the special ones; `<|end|>` (256) is eos."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>"
    )
    wrapped.chat_template = template
    return wrapped


def tiny_llama(dtype: torch.dtype = torch.float32, **sizes: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    config = LlamaConfig(**{**SIZES, **sizes}, tie_word_embeddings=False)
    return LlamaForCausalLM(config).to(dtype).eval()


def tiny_tied_qwen() -> PreTrainedModel:
    torch.manual_seed(2)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)).eval()


def tiny_gpt2() -> PreTrainedModel:
    """Its weights are transposed."""
    torch.manual_seed(5)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 260}
    return GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.2)).eval()


def tiny_experts(**sizes: Any) -> PreTrainedModel:
    torch.manual_seed(6)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**SIZES, **(experts | sizes), head_dim=16, tie_word_embeddings=False)
    return Qwen3MoeForCausalLM(config).eval()


def trained_adapter(base: PreTrainedModel, **fields: Any) -> PeftModel:
    """An adapter away from its initial values, as after some steps."""
    fields = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **fields}
    torch.manual_seed(3)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **fields))
    disturb(model)
    return model.eval()


def disturb(model: torch.nn.Module) -> None:
    """A step of training: every trainable number moves."""
    torch.manual_seed(4)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)


def plain_model(folder: Path, **fields: Any) -> PreTrainedModel:
    """What plain transformers loads, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **fields).eval()


def nf4_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """As training quantizes a base."""
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype=dtype)


def sample_ids() -> torch.Tensor:
    return torch.tensor([list(b"What is learned is kept.")])  # (1, tokens)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=sample_ids()).logits.float()


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


def save_base(model: PreTrainedModel, folder: Path, template: str | None = CHATML) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return folder


def start_run(root: Path, base: Path | None, adapter: LoRA | None = None, **model: Any) -> Run:
    recipe = SFT(model=Model(name=str(base) if base else None, **model), adapter=adapter)
    run = Run(root)
    write_json(run.recipe, {"method": "sft", **as_json(recipe)})
    return run


def as_json(recipe: Recipe) -> dict[str, Any]:
    return TypeAdapter(type(recipe)).dump_python(recipe, mode="json")


def save_checkpoint(
    run: Run, step: int, model: PeftModel | PreTrainedModel, template: str | None = CHATML
) -> Path:
    """A complete checkpoint: weights, tokenizer, and last the manifest."""
    folder = run.checkpoint(step)
    model.save_pretrained(folder / ("adapter" if isinstance(model, PeftModel) else "model"))
    byte_tokenizer(template).save_pretrained(folder / "tokenizer")
    sign(folder, step)
    return folder


def sign(folder: Path, step: int) -> None:
    """Write the manifest of what is there."""
    (folder / "manifest.json").unlink(missing_ok=True)
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {
        "format": FORMAT, "step": step, "progress": {"step": step}, "backend": "single",
        "processes": 1, "shapes": {}, "scalars": {}, "files": files,
    }  # fmt: skip
    write_json(folder / "manifest.json", sealed(manifest))


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run with one checkpoint, and the logits of the model that was saved in it."""

    run: Run
    base: Path
    logits: torch.Tensor


def lora_run(
    tmp: Path, base: PreTrainedModel | None = None, quantization: Any = "none", **fields: Any
) -> Trained:
    base = base or tiny_llama()
    folder = save_base(base, tmp / "base")
    run = start_run(tmp / "run", folder, LoRA(r=4), quantization=quantization)
    model = trained_adapter(base, **fields)
    save_checkpoint(run, 10, model)
    return Trained(run, folder, logits(model))
