"""Convert requests to token ids, with the code that renders training data."""

from typing import Any

from finetune.data.chat.chat_templates import check_variables
from finetune.data.formats import read_row
from finetune.data.samples import Completion, Conversation
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError
from finetune.serving.answer import Question
from finetune.serving.models import Served
from finetune.serving.requests import ChatRequest, TextRequest


def chat_text(served: Served, asked: ChatRequest) -> str:
    """The conversation of a request as text, with the generation prompt.

    The time of the chat template is limited in the main thread only.

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
    return chat.prompt_text(sample)


def question_of(
    served: Served, asked: ChatRequest | TextRequest, prompt: str | Completion | list[int]
) -> Question:
    """The question of a request.

    It may run in any thread: a megabyte of text takes a second to tokenize.

    Args:
        prompt: The rendered text, a completion's prompt, or token ids.

    Raises:
        FinetuneError: the text cannot be tokenized.
    """
    return Question(
        ids=prompt if isinstance(prompt, list) else served.chat.prompt(prompt),
        most=asked.most,
        temperature=asked.temperature,
        top_p=asked.top_p,
        seed=asked.seed,
        stops=asked.stop or (),
        likelihoods=asked.likelihoods,
    )
