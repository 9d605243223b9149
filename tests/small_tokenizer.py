"""A byte-level tokenizer of a few hundred words, for tests that must not need any file."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS = """
Hi Hello there Bye user assistant system tool User Assistant System Tools Tool What is two and
The answer four is 4 fast slow Name a colour red green blue Weather in Oslo rain cold sunny
"""
SPECIAL = ("<|im_start|>", "<|im_end|>")


def small_tokenizer(
    *,
    special: Sequence[str] = SPECIAL,
    adds_bos: bool = False,
    eos: str | None = "</s>",
    more: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """A tokenizer in which each of WORDS is one token, with or without a space; so is `more`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        min_frequency=1,
        special_tokens=["<s>", "</s>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS, *WORDS.split(), *more], trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos)
