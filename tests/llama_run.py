"""A run on a Llama with a tokenizer as Llama 2's, whose answers often end."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny_run import SIZES, save_checkpoint, sign, start_run, trained_adapter
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from finetune import LoRA, Run

INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}"
    "{{ eos_token }}{% else %}[{{ m.role }}] {{ m.content }} [/{{ m.role }}]{% endif %}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}<|ask|>{{ m.content }}<|say|>{% endif %}{% endfor %}"
)
"""Special tokens that no role of the tokenizer names, and no BOS."""
WORDS = (
    "the cat and dog ran over a blue hill while rain fell on naïve houses in Zürich together they "
    "understand everything wonderful beautiful something another whatever remembered"
).split()
SPECIAL = ["<unk>", "<s>", "</s>", "<|ask|>", "<|say|>"]


def sentences(count: int) -> Iterator[str]:
    rng = random.Random(5)
    for number in range(count):
        words = rng.choices(WORDS, k=rng.randint(1, 12))
        yield f"{' '.join(words).capitalize()}:  {number}{rng.choice(['.', '?', ' 鳥', chr(10)])}"


def llama_tokenizer(template: str | None = INSTRUCT) -> PreTrainedTokenizerFast:
    """BPE over characters with bytes for the unknown ones, as Llama 2's and Mistral's."""
    space = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Sequence(space)
    learned.train_from_iterator(
        [text for text in sentences(300) if text.isascii()],
        trainers.BpeTrainer(vocab_size=150, show_progress=False),
    )
    model = json.loads(learned.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    first = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: id for id, word in enumerate([*first, *words])}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(space)
    bytes_ = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), *bytes_])
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    wrapped.chat_template = template
    return wrapped


def trained_run(
    tmp: Path, template: str = INSTRUCT, **sizes: Any
) -> tuple[Run, PreTrainedTokenizerBase]:
    """A run on a Llama whose answers often end."""
    tokenizer = llama_tokenizer(template)
    torch.manual_seed(1)
    ends = {"vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2}
    fields = {**SIZES, **ends, **sizes}
    base = LlamaForCausalLM(LlamaConfig(**{**fields, "max_position_embeddings": 512})).eval()
    base.lm_head.weight.data[2] *= 1.5
    base.save_pretrained(tmp / "base")
    tokenizer.save_pretrained(tmp / "base")
    run = start_run(tmp / "run", tmp / "base", LoRA(r=4))
    checkpoint = save_checkpoint(run, 10, trained_adapter(base))
    tokenizer.save_pretrained(checkpoint / "tokenizer")
    sign(checkpoint, 10)
    return run, tokenizer


def rows() -> Iterator[list[dict[str, str]]]:
    """Conversations of one and of several turns."""
    texts = list(sentences(400))
    for number in range(100):
        turns = [{"role": "system", "content": texts[number]}] * (number % 3 == 0)
        for turn in range(1 + number % 2):
            asked, said = texts[100 + 2 * number + turn], texts[200 + number + turn]
            turns.append({"role": "user", "content": asked})
            turns.append({"role": "assistant", "content": said})
        yield turns


def furthest(model: torch.nn.Module, prompt: list[int], said: list[int]) -> float:
    """How far a token of an answer is from the most likely one, relative to the largest logit."""
    with torch.inference_mode():
        found = model(input_ids=torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
    chosen = found.gather(1, torch.tensor(said)[:, None])[:, 0]
    return ((found.max(1).values - chosen).max() / found.abs().max()).item()
