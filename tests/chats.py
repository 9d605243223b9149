"""What a chat template trains, and real templates on real tokenizers."""

import copy
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from finetune.data.chat.render import Chat, Row, load_chat
from finetune.data.formats import Conversation
from finetune.errors import FinetuneError

MARKS = {
    "google-gemma-2-2b-it": ("<start_of_turn>", "<end_of_turn>"),
    "meta-llama-Llama-3.1-8B-Instruct": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "meta-llama-Llama-3.2-3B-Instruct": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "microsoft-Phi-3.5-mini-instruct": ("<|user|>", "<|assistant|>", "<|end|>"),
    "Qwen-Qwen2.5-7B-Instruct": (),
    "mistralai-Mistral-Nemo-Instruct-2407": (),
    "qwen3": (),
    "chatml": (),
    "plain": (),
}
NO_TOOLS = {"google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct"}


@cache
def real_tokenizer(assets: Path, name: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(assets / "tokenizers" / name)


@cache
def real_chat(assets: Path, name: str) -> Chat:
    """A real template on the tokenizer it fits, or on one that is given its special tokens."""
    base = "mistral-v3" if name.startswith("mistral") else "qwen3"
    tokenizer = real_tokenizer(assets, base)
    if MARKS[name]:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.add_tokens([*MARKS[name], "<bos>"], special_tokens=True)
        tokenizer.bos_token = "<bos>"
    if name in ("qwen3", "chatml", "plain"):
        return load_chat(tokenizer, None if name == "qwen3" else name)
    return load_chat(tokenizer, str(assets / "configs/chat_templates" / f"{name}.jinja"))


def trained_runs(row: Row) -> list[list[int]]:
    """The trained tokens, each run of them by itself."""
    runs = groupby(zip(row.ids, row.trained, strict=True), key=lambda pair: pair[1])
    return [[token for token, _ in run] for said, run in runs if said]


def trained_texts(chat: Chat, row: Row) -> list[str]:
    return [chat.tokenizer.decode(run) for run in trained_runs(row)]


def load_error(tokenizer: Any, template: str | None) -> str:
    """Why a chat template is refused before it renders anything."""
    with pytest.raises(FinetuneError) as error:
        load_chat(tokenizer, template)
    return str(error.value)


def refusal(chat: Chat, sample: Conversation) -> str:
    with pytest.raises(FinetuneError) as error:
        chat.render(sample, "assistant")
    return str(error.value)
