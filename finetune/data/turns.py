"""Which characters of a rendered conversation are what the assistant says, for any chat template.

A turn goes from behind its header (the generation prompt, which serving puts there) to the token
that ends it. A template with `{% generation %}` blocks says so itself. Whatever cannot be
established exactly is refused with both texts.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import jinja2

from finetune.data.formats import Conversation
from finetune.data.marks import Marked, MarkedTemplate, Span
from finetune.data.messages import Message
from finetune.errors import FinetuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError,
    RecursionError,
)  # fmt: skip
"""What a template raises: Jinja's own errors, and those of the expressions that it holds."""

PROBE = "\ue000"
"""A private-use character: the answer of a turn of which only the header is looked for."""
QUESTION: Message = {"role": "user", "content": "Hello"}
ANSWER: Message = {"role": "assistant", "content": PROBE}


@dataclass(frozen=True)
class Turns:
    """A chat template that says where each assistant turn is."""

    tokenizer: "PreTrainedTokenizerFast"
    template: str

    def render(self, sample: Conversation) -> Marked:
        """The conversation as transformers renders it; refused where that leaves something out."""
        marked = self.mark(sample)
        ours = self.mark(sample, today=True) if self._marks.reads_the_date else marked
        theirs = self.tokenizer.apply_chat_template(
            list(sample.messages),
            tools=list(sample.tools) or None,
            chat_template=self.template,
            tokenize=False,
        )
        assert isinstance(theirs, str)
        if ours.text != theirs:
            raise FinetuneError(
                "chat template: its assistant turns cannot be marked; with marks it renders "
                f"{excerpt(ours.text)}, without {excerpt(theirs)}"
            )
        for number, message in enumerate(sample.messages):
            _check_written(marked, number, message)
        for tool in sample.tools:
            if tool["function"].get("name", "") not in marked.text:
                raise FinetuneError(
                    f"chat template: it leaves out the tools ({tool['function'].get('name')}); "
                    "set model.chat_template to a template that writes them"
                )
        return marked

    def mark(
        self, sample: Conversation, *, add_generation_prompt: bool = False, today: bool = False
    ) -> Marked:
        """The conversation with its marks, as it is rendered on a fixed date."""
        try:
            return self._marks.render(
                sample.messages,
                today=today,
                tools=list(sample.tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.tokenizer.special_tokens_map,
            )
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(message["role"] for message in sample.messages)
            raise FinetuneError(
                f"chat template: it refuses this conversation ({roles}): {error}"
            ) from None

    def spans(self, sample: Conversation, marked: Marked, number: int) -> list[Span]:
        """The characters of an assistant message that are trained, in order."""
        written = marked.turns[number]
        if len(written) != 1:
            raise FinetuneError(
                f"chat template: it writes message {number} in {len(written)} places of "
                f"{excerpt(marked.text)}, so its assistant turns cannot be marked"
            )
        start, end = written[0]
        if not self._marks.has_generation:
            start += self._header_length(sample, marked, number)
            return [(start, _without_space(marked.text, start, end))]
        inside = [span for span in marked.generations if start <= span[0] and span[1] <= end]
        if not inside:
            raise FinetuneError(
                "chat template: it has {% generation %} marks, but none in the assistant turn "
                f"{excerpt(marked.text[start:end])}"
            )
        last_start, last_end = inside[-1]
        return [*inside[:-1], (last_start, _without_space(marked.text, last_start, last_end))]

    def _header_length(self, sample: Conversation, marked: Marked, number: int) -> int:
        """How many characters of an assistant turn its header is.

        The header is the generation prompt. Some templates open a thought in it which they leave
        out of earlier turns: there it is what the prompt and the turn have in common, whatever
        the turn says.
        """
        turn = marked.written(number)
        if not self._header:
            if self._hidden_header:
                raise FinetuneError(
                    f"chat template: it begins an assistant turn with {self._hidden_header!r} and "
                    "writes no generation prompt, so the turn cannot be marked: got "
                    f"{excerpt(turn)}; add {{% if add_generation_prompt %}} with that header"
                )
            return 0
        if turn.startswith(self._header):
            return len(self._header)
        messages = list(sample.messages)
        messages[number] = ANSWER
        other = self.mark(Conversation(tuple(messages), sample.tools)).written(number)
        common = _common_prefix(self._header, turn, other)
        if not common.strip():
            raise FinetuneError(
                f"chat template: its generation prompt is {excerpt(self._header)}, but the "
                f"assistant turn is {excerpt(turn)}, so the turn cannot be marked"
            )
        return len(common)

    @cached_property
    def _marks(self) -> MarkedTemplate:
        try:
            return MarkedTemplate(self.template)
        except TEMPLATE_ERRORS as error:
            raise FinetuneError(f"chat template: it is not valid Jinja: {error}") from None

    @cached_property
    def _header(self) -> str:
        """What the template writes behind a question for the answer to follow."""
        return self.mark(Conversation((QUESTION,)), add_generation_prompt=True).tail

    @cached_property
    def _hidden_header(self) -> str:
        """What stands before an answer of a template whose generation prompt is empty."""
        written = self.mark(Conversation((QUESTION, ANSWER))).written(1)
        return written.partition(PROBE)[0].strip()


def _check_written(marked: Marked, number: int, message: Message) -> None:
    """Refuse a template that leaves out what the data says."""
    written = marked.written(number)
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    match message["role"]:
        case "assistant":  # some templates leave out earlier thoughts
            lost = not written or any(name not in written for name in calls)
        case "tool":  # some templates quote it as JSON
            lost = not written
        case _:
            lost = message["content"].strip() not in marked.text
    if lost:
        what = f"the tool calls of message {number}" if calls else f"message {number}"
        raise FinetuneError(
            f"chat template: it leaves out {what} ({message['role']}: "
            f"{excerpt(message['content'])}); take it out of the data, or set "
            "model.chat_template to a template that writes it"
        )


def _without_space(text: str, start: int, end: int) -> int:
    """The end of a span without the white space that closes it."""
    return start + len(text[start:end].rstrip())


def _common_prefix(first: str, *others: str) -> str:
    length = 0
    while length < len(first) and all(o.startswith(first[: length + 1]) for o in others):
        length += 1
    return first[:length]


def excerpt(text: str, most: int = 160) -> str:
    """A text short enough for an error message, its middle left out."""
    shown = repr(text)
    return shown if len(shown) <= most else f"{shown[: most // 2]} ... {shown[-most // 2 :]}"
