"""Requests of OpenAI's API, and their prompts, rendered by the code that renders training data.

Unsupported fields are rejected, not ignored.
"""

import http.client
import urllib.request
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from finetune.data.chat.chat_templates import check_variables, fewest_tokens
from finetune.data.chat.tokens import Row as PromptRow
from finetune.data.formats import read_row
from finetune.data.samples import Completion, Conversation
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError
from finetune.serving.models import Served

Stops = Annotated[
    Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] | None,
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[Ids, Tag("ids")],
    Discriminator(lambda given: "ids" if isinstance(given, list) else "text"),
]
Fetch = Callable[[str], bytes]
LARGEST_IMAGE = 16 * 2**20
"""Maximum bytes of an image at a web address."""
STRICT = ConfigDict(extra="forbid", strict=True)
"""No unknown fields, and no conversions such as from `true` to 1."""


class StreamOptions(BaseModel):
    model_config = STRICT

    include_usage: bool = False


class Request(BaseModel):
    """Fields of both kinds of requests. Fields with one allowed value are not supported."""

    model_config = STRICT

    model: str | None = None
    """Name of a model; by default the trained model."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(0.0, ge=0, le=10)
    """Greedy by default; OpenAI's default is 1."""
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    """As in vLLM: 0 and -1 for all tokens; also the next two."""
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    return_token_ids: bool = False
    """As in vLLM, for the prompt: the answer then has `prompt_token_ids`."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: Stops = None
    """A text, or a list of texts."""
    n: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @property
    def most(self) -> int | None:
        """Maximum tokens of an answer; None for the rest of the context, or 512 without a limit."""
        return self.max_tokens

    @property
    def likelihoods(self) -> int | None:
        """Number of most likely tokens listed per position; None for no log-probabilities."""
        raise NotImplementedError


class ChatRequest(Request):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of `max_tokens`."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def likelihoods(self) -> int | None:
        return self.top_logprobs if self.logprobs or self.top_logprobs else None


class TextRequest(Request):
    prompt: Prompt
    """A text, or token ids."""
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def likelihoods(self) -> int | None:
        return self.logprobs


def chat_prompt(served: Served, asked: ChatRequest, fetch: Fetch | None) -> PromptRow:
    """The token ids of a conversation with the generation prompt, and its images among them.

    Raises:
        FinetuneError: a message is invalid, the template rejects the conversation, or does not read
            a variable; an image cannot be read.
    """
    chat = served.chat
    if chat.template is None:
        raise FinetuneError("the model has no chat template; ask /v1/completions")
    row: dict[str, Any] = {"messages": [_fetched(each, fetch) for each in asked.messages]}
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
    _refuse_long(served, sum(len(message["content"]) for message in sample.messages))
    try:
        if any(image.path is not None for image in sample.images):
            raise RowProblem("an image is a file of this machine, which a server does not open")
        return chat.prompt_row(sample)
    except RowProblem as problem:
        raise FinetuneError(f"messages: {problem}; send images as data: URLs") from None


def _fetched(message: dict[str, Any], fetch: Fetch | None) -> dict[str, Any]:
    """A message whose images from web addresses are downloaded, if the server may."""
    content = message.get("content")
    if fetch is None or not isinstance(content, list):
        return message
    parts = list[Any]()
    for part in content:
        url = part.get("image_url") if isinstance(part, dict) else None
        url = url.get("url") if isinstance(url, dict) else url
        is_web = isinstance(url, str) and url.startswith(("http://", "https://"))
        parts.append({"type": "image", "bytes": fetch(url)} if is_web else part)
    return {**message, "content": parts}


def download(url: str) -> bytes:
    """The bytes of an image at a web address, at most `LARGEST_IMAGE`.

    Raises:
        FinetuneError: no answer, or more bytes.
    """
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            found = answer.read(LARGEST_IMAGE + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise FinetuneError(f"messages: {url} cannot be read: {error}") from None
    if len(found) > LARGEST_IMAGE:
        raise FinetuneError(f"messages: {url} has more than {LARGEST_IMAGE:,} bytes")
    return found


def prompt_of(
    served: Served, asked: ChatRequest | TextRequest, fetch: Fetch | None = None
) -> PromptRow:
    """The token ids of a request's prompt, and its images; it may run in any thread.

    Args:
        fetch: Reads an image at a web address; None refuses web addresses.

    Raises:
        FinetuneError: the text cannot be rendered or tokenized, or has no room in the context.
    """
    if isinstance(asked, ChatRequest):
        return chat_prompt(served, asked, fetch)
    ids = asked.prompt
    if isinstance(ids, str):
        _refuse_long(served, len(ids))
        ids = served.chat.prompt(Completion(ids, ""))
    return PromptRow(ids, [False] * len(ids))


def _refuse_long(served: Served, characters: int) -> None:
    """Refuse a text that is too long for the context even if all its tokens are long."""
    tokens = int(characters * fewest_tokens(served.chat.tokenizer))
    context = served.loaded.context
    if context is not None and tokens >= context:
        raise FinetuneError(f"at least {tokens} tokens leave no room in a context of {context}")
