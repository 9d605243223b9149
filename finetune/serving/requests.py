"""Requests of OpenAI's API: unsupported fields are rejected, not ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

Stops = Annotated[
    Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] | None,
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[Ids, Tag("ids")],
    Discriminator(lambda given: "ids" if isinstance(given, list) else "text"),
]
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
