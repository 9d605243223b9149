"""Convert requests to token ids, with the code that renders training data."""

from typing import Any

from finetune.data.formats import read_row
from finetune.data.samples import Completion, Conversation
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError
from finetune.serving.answer import Question
from finetune.serving.models import Served
from finetune.serving.requests import ChatRequest, TextRequest


def chat_question(served: Served, asked: ChatRequest) -> Question:
    """The conversation of a request as token ids, with the generation prompt.

    Raises:
        FinetuneError: a message is invalid, or the template rejects the conversation.
    """
    if served.chat.template is None:
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
            "messages: the last one is the assistant's; /v1/completions continues a text"
        )
    return _question(asked, served.chat.prompt(sample))


def text_question(served: Served, asked: TextRequest) -> Question:
    if isinstance(asked.prompt, list):
        return _question(asked, asked.prompt)
    return _question(asked, served.chat.prompt(Completion(asked.prompt, "")))


def _question(asked: ChatRequest | TextRequest, ids: list[int]) -> Question:
    return Question(
        ids=ids,
        most=asked.most,
        temperature=asked.temperature,
        top_p=asked.top_p,
        seed=asked.seed,
        stops=asked.stops,
        likelihoods=asked.likelihoods,
    )
