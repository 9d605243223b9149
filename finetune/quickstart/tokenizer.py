"""Train the quickstart's byte-level tokenizer on its own texts."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from finetune.data.chat.chat_templates import TEMPLATES

JOINER = "\u2040"
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"


def train_tokenizer(texts: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Train a tokenizer on texts and save it to a folder, with a ChatML template.

    A word after a quotation mark is the same token as after a space (a joiner is inserted between
    them, and removed on decoding), so that a small model can copy a word from a sentence into a
    JSON string. A joiner without its word is removed too: servers decode one token after another.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.normalizer = normalizers.Replace(Regex(r'"(?=\p{L})'), f'"{JOINER} ')
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace(f"{JOINER} ", ""), decoders.Replace(JOINER, "")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (TEMPLATES / "chatml.jinja").read_text()
    fast.save_pretrained(folder)
