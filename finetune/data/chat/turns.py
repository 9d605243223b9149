"""Find the characters of a rendered conversation that the assistant writes, for any chat template.

A turn extends from the end of its header (the generation prompt of serving) to the token that ends
it. A template with `{% generation %}` blocks marks its turns itself. If a turn cannot be located
exactly, an error shows both texts. A template that leaves out parts of a message is refused.
"""

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2

from finetune.data.chat.call_forms import forms, writes_as_python
from finetune.data.chat.chat_templates import check_variables, text_of_chat
from finetune.data.chat.messages import Message, without_key
from finetune.data.chat.strings import THOUGHTS, has_thought, lost, lost_of_tool, text_name
from finetune.data.chat.template_limits import within_limits
from finetune.data.chat.template_spans import Marked, Span, mark
from finetune.data.images.image_file import as_parts
from finetune.data.samples import Conversation, cut_to, with_message
from finetune.errors import FinetuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROBE = "\ue000"
"""A private-use character, used as an answer when only the header of a turn is needed."""
QUESTION: Message = {"role": "user", "content": "Hello"}
ANSWER: Message = {"role": "assistant", "content": PROBE}
COMPARED = 16
"""Conversations of each shape that are compared with the output of transformers."""
EXCEEDED = 2
"""Conversations that may exceed the limits of time or memory before a template is given up."""
SHORT = 12
"""Maximum length, in characters, of a text that may occur in a chat by chance."""


@dataclass
class Rendered:
    """A conversation and its rendered text."""

    sample: Conversation
    """The conversation in the form that the template accepts (see `call_forms`)."""
    marked: Marked
    notes: set[str] = field(default_factory=set)
    """Unusual properties of the row, by the names in `finetune.data.tally.COUNTED`."""


@dataclass(frozen=True)
class Turns:
    """A chat template that locates each assistant turn in its output."""

    tokenizer: "PreTrainedTokenizerFast"
    template: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    _exceeded: list[FinetuneError] = field(default_factory=list, init=False, compare=False)
    """Errors of conversations that exceeded their limits."""
    _compared: dict[Any, int] = field(default_factory=dict, init=False, compare=False)
    """Number of conversations that were compared with transformers, by shape."""
    _read_keys: dict[tuple[str, ...], bool] = field(default_factory=dict, init=False, compare=False)
    _keeps_last: dict[Any, bool] = field(default_factory=dict, init=False, compare=False)
    """Whether the template writes thoughts in the last turn, by kind of thought."""

    def render(self, sample: Conversation) -> Rendered:
        """Render a conversation as transformers does; refuse a template that leaves parts out."""
        if sample.template_kwargs:
            check_variables([self.template], sample.template_kwargs, "chat_template_kwargs")
        rendered = self._render(sample)
        # First: what marks show is worth nothing if they change the text.
        self._compare(rendered)
        for tool in sample.tools:
            self._check_tool(rendered, tool)
        for number in range(len(sample.messages)):
            self._check_written(rendered, number)
        return rendered

    def mark(
        self, sample: Conversation, *, add_generation_prompt: bool = False, today: bool = False
    ) -> Marked:
        """Render a conversation with marks, on the fixed date or, with `today`, the current one."""
        return self._render(sample, add_generation_prompt, today).marked

    def _render(
        self, sample: Conversation, add_generation_prompt: bool = False, today: bool = False
    ) -> Rendered:
        """Render the conversation in the first form that the template accepts."""
        variables = {
            "tools": list(sample.tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
            **self.variables,
            **sample.template_kwargs,
        }
        # The first form that the template accepts is used. If it prints arguments as a Python dict,
        # the form with JSON text is used instead, if the template accepts that with the same ids.
        first: Rendered | None = None
        refusal: Exception | None = None
        for form, notes in forms(sample):
            try:
                marked = self._marked(form, today, variables)
            except jinja2.TemplateError as error:
                refusal = refusal or error
                continue
            if first is None:
                first = Rendered(form, marked, notes)
                if not writes_as_python(sample, marked.text):
                    return first
            elif not notes:
                return Rendered(form, marked, notes)
        if first is not None:
            return first
        roles = ", ".join(message["role"] for message in sample.messages)
        raise FinetuneError(
            f"chat template: it refuses this conversation ({roles}): {refusal}"
        ) from None

    def _marked(self, form: Conversation, today: bool, variables: dict[str, Any]) -> Marked:
        """Render within limits; after `EXCEEDED` conversations that exceed them, fail at once."""
        if len(self._exceeded) >= EXCEEDED:
            raise self._exceeded[-1]
        try:
            messages = self._given(form.messages)
            return within_limits(mark, self.template, messages, today, variables)
        except FinetuneError as error:
            self._exceeded.append(error)
            raise

    def _given(self, messages: tuple[Message, ...]) -> list[Message]:
        """Messages as the template reads them: content as parts for images, or always."""
        return [
            as_parts(each) if "images" in each or self._reads_parts_only else each
            for each in messages
        ]

    @cached_property
    def _reads_parts_only(self) -> bool:
        """Whether the template writes a text only if it is in a list of parts (SmolVLM)."""
        variables = {"add_generation_prompt": False, **self._special_tokens, **self.variables}
        written = list[bool]()
        for message in (QUESTION, as_parts(QUESTION)):
            try:
                text = within_limits(mark, self.template, [message], False, variables).text
            except (jinja2.TemplateError, FinetuneError):  # such as one that needs a system turn
                text = ""
            written.append(QUESTION["content"] in text)
        return written == [False, True]

    # What transformers renders.

    def _compare(self, rendered: Rendered) -> None:
        """Refuse a template whose marked text differs from the output of transformers.

        Marks add nothing to the text, so a few conversations of each shape are enough.
        """
        sample = rendered.sample
        kinds = {(message["role"], *message) for message in sample.messages}
        shape = (
            frozenset(kinds), sample.messages[0]["role"], sample.messages[-1]["role"],
            bool(sample.tools), frozenset(sample.template_kwargs),
        )  # fmt: skip
        seen = self._compared.get(shape, 0)
        if seen >= COMPARED:
            return
        self._compared[shape] = seen + 1
        ours = rendered.marked.text
        # Marked text has a fixed date, so that prepared rows do not change from day to day.
        if "strftime_now" in self.template:
            ours = self.mark(sample, today=True).text
        theirs = text_of_chat(
            self.tokenizer, self._given(sample.messages), sample.tools, self.template,
            {**self.variables, **sample.template_kwargs},
        )  # fmt: skip
        if ours != theirs:
            raise FinetuneError(
                "chat template: its assistant turns cannot be located; with marks it renders "
                f"{excerpt(ours)}, without {excerpt(theirs)}"
            )

    # What the template leaves out.

    def _check_tool(self, rendered: Rendered, tool: dict[str, Any]) -> None:
        """Refuse a template that leaves out a tool; note one that leaves out details of it."""
        text = rendered.marked.outside(_indices_by_role(rendered.sample, ("assistant", "tool")))
        missing, leaves_out_details = lost_of_tool(tool, text)
        if missing:
            raise FinetuneError(
                f"chat template: it leaves out the tools ({', '.join(missing)}); "
                "set model.chat_template to a template that writes them"
            )
        if leaves_out_details:
            rendered.notes.add("tool_details")

    def _check_written(self, rendered: Rendered, number: int) -> None:
        """Refuse a template that leaves out a string of a message.

        Thoughts of earlier turns may be left out if the template writes those of the last turn.
        """
        message, marked = rendered.sample.messages[number], rendered.marked
        role, content = message["role"], message["content"]
        written = marked.written(number)
        if role == "assistant":
            # The name of a role in a header is not text of the message.
            written = written.removeprefix(self._usual_header)
        missing = lost(message, written)
        # A short text, such as `4`, may stand in the arguments of a call.
        by_chance = "tool_calls" in message and len(content.strip()) <= SHORT
        if missing and (role != "assistant" or number not in marked.turns):
            # Text outside of the loops over messages has no marks: any that is not another's.
            others = ("tool",) if role == "tool" else ("assistant", "tool")
            text = marked.outside(_indices_by_role(rendered.sample, others, number))
            missing, by_chance = lost(message, text), True
        if by_chance and not self._writes(rendered.sample, number):
            missing = [text_name(message)]
        if not missing:
            return
        thoughts = all(name.startswith(THOUGHTS) for name in missing)
        if thoughts and self._is_history(rendered.sample, number):
            rendered.notes.add("history_thoughts")
            return
        what = " and ".join(missing).replace("{}", str(number))
        raise FinetuneError(
            f"chat template: it leaves out {what} ({role}: "
            f"{excerpt(content)}); take it out of the data, or set model.chat_template to a "
            "template that writes it"
        )

    def _writes(self, sample: Conversation, number: int) -> bool:
        """Whether the template writes the content of a message, which could occur by chance."""
        content = sample.messages[number]["content"].strip()
        others = (m["content"] for n, m in enumerate(sample.messages) if n != number)
        if not content or (len(content) > SHORT and not any(content in each for each in others)):
            return True
        message = {**sample.messages[number], "content": PROBE}
        return PROBE in self.mark(with_message(sample, number, message)).text

    def reads(self, sample: Conversation, number: int, key: str) -> bool:
        """Whether a key of a message changes what the template writes.

        Searching the template for the key is not enough: many templates read the `name` of a called
        function, but few read the `name` of a message. Tested once for each shape of message.
        """
        message = sample.messages[number]
        shape = (key, message["role"], *sorted(message))
        if shape not in self._read_keys:
            other = with_message(sample, number, without_key(message, key, PROBE))
            try:
                changed = self.mark(other).text
                self._read_keys[shape] = changed != self.mark(sample).text
            except FinetuneError:  # the template requires the key, or another value
                self._read_keys[shape] = True
        return self._read_keys[shape]

    def _is_history(self, sample: Conversation, number: int) -> bool:
        """Whether a message is an earlier turn whose thoughts would be written in the last turn."""
        message = sample.messages[number]
        if number + 1 == len(sample.messages):
            return False
        kind = (
            bool(message.get("reasoning_content")),
            has_thought(message),
            "tool_calls" in message,
        )
        if not self._keeps_last.get(kind):
            try:
                marked = self.mark(cut_to(sample, number + 1))
            except FinetuneError:
                return False
            self._keeps_last[kind] = not lost(message, marked.written(number) or marked.text)
        return self._keeps_last[kind]

    # Where the assistant's turns are.

    def spans(self, rendered: Rendered, number: int) -> list[Span]:
        """Trained character spans of an assistant message, in order."""
        marked, messages = rendered.marked, rendered.sample.messages
        written = marked.turns.get(number, [])
        answered = itertools.takewhile(lambda m: m["role"] == "tool", messages[number + 1 :])
        results = {n for n, each in enumerate(answered, number + 1) if each["content"].strip()}
        # Results without marks may be anywhere, also inside this turn.
        if len(written) != 1 or results - marked.turns.keys():
            return [self._found_by_prompt(rendered, number)]
        start, end = written[0]
        inside = [span for span in marked.generations if start <= span[0] and span[1] <= end]
        if not marked.has_generation:
            # Serving writes the header itself, so a model need not learn it.
            inside = [(start + self._header_length(rendered, number), end)]
        if not inside:
            raise FinetuneError(
                "chat template: it has {% generation %} marks, but none in the assistant turn "
                f"{excerpt(marked.text[start:end])}"
            )
        said = [span for span in marked.own(inside) if marked.text[slice(*span)].strip()]
        *others, (start, end) = said or inside
        # White space behind the end token is not trained: generation stops at that token.
        return [*others, (start, start + len(marked.text[start:end].rstrip()))]

    def _found_by_prompt(self, rendered: Rendered, number: int) -> Span:
        """Find the span of a turn that is not written by a loop over the messages.

        It begins at the end of the turn's prompt, and ends with the last end token in the part of
        the text that does not depend on later messages.
        """
        sample, text = rendered.sample, rendered.marked.text
        places = len(rendered.marked.turns.get(number, ()))
        reason = f"chat template: its assistant turns cannot be located in {excerpt(text)}: " + (
            f"it writes message {number}, or the results of its calls, in several places"
            if places
            else f"no loop over the messages writes message {number}"
        )
        try:
            prompt = self.mark(cut_to(sample, number), add_generation_prompt=True).text
            ended = self.mark(cut_to(sample, number + 1)).text
            last = number + 1 == len(sample.messages)
            following = self.mark(sample, add_generation_prompt=True).text if last else text
        except FinetuneError as error:
            raise FinetuneError(f"{reason}, and the messages before it alone: {error}") from None
        common = os.path.commonprefix([text, ended, following])  # noqa: RUF071, of characters
        ends = [m.end() for m in self._end_tokens.finditer(common, len(prompt))]
        if not common.startswith(prompt) or not ends:
            raise FinetuneError(
                f"{reason}, and the text does not begin with the prompt {excerpt(prompt)}; let the "
                "template loop over `messages` outside of macros and {% set %} blocks"
            )
        return len(prompt), ends[-1]

    def _header_length(self, rendered: Rendered, number: int) -> int:
        """Number of characters of an assistant turn's header.

        The header is the generation prompt. Some templates open a thought in the generation prompt
        but leave it out of earlier turns: then the header is the common prefix of the prompt and
        the turn, for any content of the turn.
        """
        sample, turn = rendered.sample, rendered.marked.written(number)
        header = self.header
        after_question = number > 0 and sample.messages[number - 1]["role"] == "user"
        # The usual prompt, unless what comes before this turn may change it.
        if not (after_question and rendered.marked.fixed_prompt) or sample.template_kwargs:
            header = self._served_header(sample, number)
        if not header:
            if self._hidden_header and turn.lstrip().startswith(self._hidden_header):
                raise FinetuneError(
                    f"chat template: it begins an assistant turn with {self._hidden_header!r} and "
                    "writes no generation prompt, so the turn cannot be marked: got "
                    f"{excerpt(turn)}; add {{% if add_generation_prompt %}} with that header"
                )
            return 0
        if turn.startswith(header):
            return len(header)
        other = self.mark(with_message(sample, number, ANSWER)).written(number)
        common = os.path.commonprefix([header, turn, other])  # noqa: RUF071, of characters
        for token in self._end_tokens.finditer(header):
            # An end token is one id, so a header cannot stop inside of it.
            if token.start() < len(common) < token.end():
                common = header[: token.start()]
        if not common.strip():
            raise FinetuneError(
                f"chat template: its generation prompt is {excerpt(header)}, but the "
                f"assistant turn is {excerpt(turn)}, so the turn cannot be marked"
            )
        rendered.notes.add("unserved")
        return len(common)

    def _served_header(self, sample: Conversation, number: int) -> str:
        """The generation prompt that serving writes before a turn, after the earlier messages."""
        if number == 0:
            return self.header
        try:
            found = self._prompt_header(cut_to(sample, number))
        except FinetuneError:  # some templates render no conversation that ends there
            return self.header
        return self.header if found is None else found

    def _prompt_header(self, sample: Conversation) -> str | None:
        """The generation prompt that the template writes after messages; None if not found."""
        asked = self.mark(sample, add_generation_prompt=True)
        if asked.tail.strip() and len(sample.messages) - 1 in asked.turns:
            return asked.tail
        # Some templates write it inside the turn of the last message, or none behind a result.
        text = self.mark(sample).text
        if asked.text.startswith(text):
            return asked.text[len(text) :]
        return asked.tail if len(sample.messages) - 1 in asked.turns else None

    @cached_property
    def _special_tokens(self) -> dict[str, Any]:
        return dict(self.tokenizer.special_tokens_map)

    @cached_property
    def _end_tokens(self) -> re.Pattern[str]:
        """Pattern of added tokens, which the tokenizer never splits."""
        tokens = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
        return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")

    @cached_property
    def header(self) -> str:
        """The generation prompt after a question."""
        return self._prompt_header(Conversation((QUESTION,))) or ""

    @cached_property
    def _usual_header(self) -> str:
        """The header; empty if the template refuses the test question."""
        try:
            return self.header
        except FinetuneError:
            return ""

    @cached_property
    def _hidden_header(self) -> str:
        """The text before an answer, for a template with an empty generation prompt."""
        written = self.mark(Conversation((QUESTION, ANSWER))).written(1)
        return written.partition(PROBE)[0].strip()


def _indices_by_role(sample: Conversation, roles: tuple[str, ...], but: int = -1) -> list[int]:
    """Indices of the messages with some roles, except message `but`."""
    return [n for n, m in enumerate(sample.messages) if m["role"] in roles and n != but]


def excerpt(text: str) -> str:
    """The repr of a text, shortened in the middle to 160 characters for error messages."""
    shown = repr(text)
    return shown if len(shown) <= 160 else f"{shown[:80]} ... {shown[-80:]}"
