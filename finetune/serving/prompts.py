"""Convert requests to token ids, with the code that renders training data."""

from collections.abc import Callable
from typing import Any

from finetune.data.chat.chat_templates import check_variables, fewest_tokens
from finetune.data.formats import read_row
from finetune.data.samples import Completion, Conversation
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError
from finetune.serving.models import Served
from finetune.serving.requests import ChatRequest, TextRequest


def chat_text(served: Served, asked: ChatRequest) -> str:
    """The conversation of a request as text, with the generation prompt.

    Raises:
        FinetuneError: a message is invalid, the template rejects the conversation, or does not read
            a variable.
    """
    chat = served.chat
    if chat.template is None:
        raise FinetuneError("the model has no chat template; ask /v1/completions")
    row: dict[str, Any] = {"messages": asked.messages}
    if asked.tools and asked.tool_choice != "none":
        row["tools"] = asked.tools
    if asked.chat_template_kwargs:
        row["chat_template_kwargs"] = asked.chat_template_kwargs
    try:
        sample = read_row("messages", row)
    except RowProblem as problem:
        raise FinetuneError(str(problem)) from None
    assert isinstance(sample, Conversation)
    if sample.messages[-1]["role"] == "assistant":
        raise FinetuneError(
            "messages: the last one is from the assistant; use /v1/completions to continue a text"
        )
    if sample.template_kwargs:
        used = chat.tool_template if sample.tools and chat.tool_template else chat.template
        check_variables([used], sample.template_kwargs, "chat_template_kwargs")
    characters = sum(len(message["content"]) for message in sample.messages)
    _refuse_long(served, int(characters * fewest_tokens(chat.tokenizer)))
    return chat.prompt_text(sample)


def prompt_of(served: Served, asked: ChatRequest | TextRequest) -> list[int]:
    """The token ids of a request's prompt; it may run in any thread.

    Raises:
        FinetuneError: the text cannot be rendered or tokenized, or has no room in the context.
    """
    if isinstance(asked, ChatRequest):
        return _ids(served, chat_text(served, asked), str)
    if isinstance(asked.prompt, str):
        return _ids(served, asked.prompt, lambda text: Completion(text, ""))
    return asked.prompt


def _ids(served: Served, text: str, kind: Callable[[str], str | Completion]) -> list[int]:
    """Token ids of a prompt; one that is too long is refused from the tokens of its beginning."""
    length = 16 * (served.loaded.context or len(text))
    while length < len(text):
        _refuse_long(served, len(served.chat.prompt(kind(text[:length]))) // 2)
        length *= 4
    return served.chat.prompt(kind(text))


def _refuse_long(served: Served, tokens: int) -> None:
    context = served.loaded.context
    if context is not None and tokens >= context:
        raise FinetuneError(f"at least {tokens} tokens leave no room in a context of {context}")
