"""Render samples as token ids, and mark the trained tokens.

A conversation is rendered by the chat template and tokenized in one piece, as in serving. An
assistant turn is trained from the end of its header (the generation prompt of serving) through the
token that ends the turn:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                          ^^^^^^^^^^^^^^^
"""

import itertools
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from finetune.data.chat.chat_templates import BUILT_IN, added_before, choose
from finetune.data.chat.next_marks import ended_spans, with_last_end
from finetune.data.chat.template_spans import Span
from finetune.data.chat.tokens import Row, Tokens, half_character, placed_images
from finetune.data.chat.turns import ANSWER, QUESTION, Rendered, Turns, excerpt
from finetune.data.images.processor import Expanded, ImageProcessor, expanded
from finetune.data.samples import (
    Completion,
    Conversation,
    Judged,
    Labelled,
    Preference,
    Sample,
    Text,
    sequences_of,
)
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TrainOn = Literal["assistant", "completion", "all"]

HEADER = 6
"""Minimum length of a header, in characters, that is unlikely to occur in a text by chance."""


@dataclass(frozen=True)
class Chat:
    """A tokenizer and the chat template for conversations."""

    tokenizer: "PreTrainedTokenizerFast"
    template: str | None
    """Jinja source; None if the tokenizer has none and renders only texts and completions."""
    tool_template: str | None = None
    """Jinja source for conversations with tools, if it differs."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Values of the template's variables: `model.chat_template_kwargs`."""
    saved: str | dict[str, str] | None = None
    """Value of `tokenizer.chat_template` in the saved tokenizer."""
    images: ImageProcessor | None = None
    """The image processor of the model; None if it reads text only."""
    _rendered_ahead: dict[int, tuple[Rendered, Expanded]] = field(
        default_factory=dict, init=False, compare=False
    )
    """Rendered conversations, by the `id` of their samples."""
    _tokens_ahead: dict[str, Tokens] = field(default_factory=dict, init=False, compare=False)

    def render(self, sample: Sample, train_on: TrainOn) -> Row:
        """Token ids of a sample, and which of them are trained.

        Trained are, in a conversation: every assistant turn, the last one (`completion`), or all
        tokens; in a prompt with its completion: the completion, or both for `all`; in a text: all.
        Raises FinetuneError if the assistant turns cannot be located in the rendered template.
        """
        match sample:
            case Conversation():
                return self._conversation(sample, train_on)
            case Completion():
                return self._completion(sample, train_on)
            case Text():
                ids = self._closed(self._text(sample).ids)
                return Row(ids, [True] * len(ids), self._bos_notes(ids))
            case Preference() | Judged() | Labelled():
                raise FinetuneError("render the sequences of a sample, not what is said of them")

    def scored(self, sample: Sample) -> Row:
        """Ids that serving passes to a scoring model, with the last marked; no EOS after a text."""
        row = self._text(sample) if isinstance(sample, Text) else self.render(sample, "all")
        if not row.ids:
            raise FinetuneError("the text is empty, so it has no token to score")
        return Row(row.ids, [False] * (len(row.ids) - 1) + [True], row.notes, row.images)

    def prompt(self, sample: Conversation | Completion | str) -> list[int]:
        """Token ids of a prompt: the messages and the header of the model's turn, or their text."""
        if isinstance(sample, Completion):
            return self._opened(self._tokens(sample.prompt).ids)
        if isinstance(sample, Conversation):
            return self.prompt_row(sample).ids
        return self._tokens(sample).ids

    def prompt_row(self, sample: Conversation) -> Row:
        """`prompt` of a conversation with the images among its tokens, none of which is trained."""
        whole = self._expanded(self.prompt_text(sample), sample)
        tokens = self._tokens(whole.text)
        images = placed_images(sample.images, whole, tokens)
        return Row(tokens.ids, [False] * len(tokens.ids), images=images)

    def prompt_text(self, sample: Conversation) -> str:
        """The rendered text of a prompt, which `prompt` tokenizes."""
        return self._turns(sample).mark(sample, add_generation_prompt=True).text

    @property
    def stop_ids(self) -> list[int]:
        """Token ids that end an answer: the EOS, and the token that ends a turn."""
        ends = {self._eos} if self._eos is not None else set[int]()
        if self.template is not None:
            row = self.render(Conversation((QUESTION, ANSWER)), "completion")
            ends.add([id for id, trained in zip(row.ids, row.trained, strict=True) if trained][-1])
        return sorted(ends)

    def _text(self, sample: Text) -> Row:
        ids = self._opened(self._tokens(sample.text).ids)
        return Row(ids, [True] * len(ids), self._bos_notes(ids))

    # Prompt and completion.

    def _completion(self, sample: Completion, train_on: TrainOn) -> Row:
        prompt, completion = self._split(sample)
        answer = self._closed(completion)
        start = self._opened(prompt)
        given = [train_on == "all"] * len(start)
        notes = self._bos_notes(start) if start else frozenset({"unasked"})
        return Row([*start, *answer], [*given, *[True] * len(answer)], notes)

    def _split(self, sample: Completion) -> tuple[list[int], list[int]]:
        """Token ids of the prompt, as serving tokenizes it, and of the completion.

        If a token of the joined text crosses the border, the completion is tokenized separately;
        after a newline if the tokenizer prepends a space to every text, which would be wrong here.
        """
        prompt = self._tokens(sample.prompt).ids
        whole = self._tokens(sample.prompt + sample.completion).ids
        if whole[: len(prompt)] == prompt:
            return prompt, whole[len(prompt) :]
        alone = self._tokens(sample.completion).ids
        newline = self._tokens("\n").ids
        behind_newline = self._tokens("\n" + sample.completion).ids
        text = self.tokenizer.decode(whole)
        for completion in (alone, behind_newline[len(newline) :]):
            if self.tokenizer.decode([*prompt, *completion]) == text:
                return prompt, completion
        raise FinetuneError(
            f"the prompt ends inside a token ({excerpt(sample.prompt[-20:])} before "
            f"{excerpt(sample.completion[:20])}); end it at a word boundary"
        )

    def _opened(self, ids: list[int]) -> list[int]:
        """Prepend what the tokenizer adds before a text if the ids do not begin with it."""
        return ids if ids[: len(self._prefix)] == self._prefix else [*self._prefix, *ids]

    def _closed(self, ids: list[int]) -> list[int]:
        eos = self._eos
        if eos is None:
            raise FinetuneError(
                "tokenizer: it has no end-of-sequence token, so a model could not learn to stop; "
                "set eos_token in its tokenizer_config.json"
            )
        return ids if ids[-1:] == [eos] else [*ids, eos]

    @cached_property
    def _prefix(self) -> list[int]:
        """What the tokenizer adds before every text: its BOS, or tokens such as `[gMASK]<sop>`."""
        return added_before(self.tokenizer)

    def _bos_notes(self, ids: list[int]) -> frozenset[str]:
        """A note if a row lacks the BOS that the tokenizer adds to texts, or has it twice."""
        bos = cast("int | None", self.tokenizer.bos_token_id)
        if bos is not None and ids[:2] == [bos, bos]:
            return frozenset({"two_bos"})
        return frozenset({"no_bos"} if ids[: len(self._prefix)] != self._prefix else ())

    @cached_property
    def _eos(self) -> int | None:
        return cast("int | None", self.tokenizer.eos_token_id)

    # Conversations.

    def _conversation(self, sample: Conversation, train_on: TrainOn) -> Row:
        turns = self._turns(sample)
        rendered, whole = self._rendered(sample)
        text = whole.text
        if train_on != "all":
            length = len(rendered.marked.text)
            rendered = with_last_end(turns, rendered)
            text += rendered.marked.text[length:]
        tokens = self._tokens(text)
        if train_on == "all":
            if sample.untrained:
                raise FinetuneError(
                    f"message {min(sample.untrained)} is context only by its weight or train, but "
                    "all tokens are trained; use method sft with train_on=assistant, or leave the "
                    "key out"
                )
            ids = tokens.ids
            images = placed_images(sample.images, whole, tokens)
            notes = self._bos_notes(ids) | rendered.notes | whole.notes
            return Row(ids, [True] * len(ids), notes, images)
        answers = [
            number
            for number, message in enumerate(sample.messages)
            if message["role"] == "assistant" and number >= sample.given
        ]
        chosen = answers[-1:] if train_on == "completion" else answers
        chosen = [number for number in chosen if number not in sample.untrained]
        spans = {
            number: [whole.moved(span) for span in ended_spans(turns, rendered, number)]
            for number in chosen
        }
        every = [span for said in spans.values() for span in said]
        ids, places, apart = self._placed(text, tokens, every)
        trained = [False] * len(ids)
        for number, said in spans.items():
            last = 0
            for span in said:
                first, behind = places[span]
                trained[first:behind] = [True] * (behind - first)
                last = ids[behind - 1]
            self._check_end(last, rendered.marked.written(number) or text[slice(*said[-1])])
        images = placed_images(sample.images, whole, tokens, apart)
        notes = self._bos_notes(ids) | rendered.notes | whole.notes
        return Row(ids, trained, notes, images)

    def _placed(
        self, text: str, tokens: Tokens, spans: list[Span]
    ) -> tuple[list[int], dict[Span, Span], list[Span] | None]:
        """Ids of a text, and the token range (first, end) of each span of characters.

        Last are the character spans of the ids, if they are not those of `tokens`.
        """
        places = {span: tokens.place(span, self.end_tokens) for span in spans}
        found = {span: place for span, place in places.items() if place is not None}
        if len(found) == len(places):
            return tokens.ids, found, None
        borders = sorted({start for start, _ in spans})
        ids, offsets = self._cut(text, tokens.ids, tokens.offsets, borders)
        starts = [start for start, _ in offsets]
        return (
            ids,
            {
                (start, end): (bisect_left(starts, start), bisect_left(starts, end))
                for start, end in spans
            },
            offsets,
        )

    def _cut(
        self, text: str, ids: list[int], offsets: list[Span], borders: list[int]
    ) -> tuple[list[int], list[Span]]:
        """Tokenize again if a token crosses a border: in serving, a header's tokens are fixed.

        An answer that begins with a newline may share a token with the newline of its header. Then
        the texts before and after the border are tokenized separately.
        """
        starts = [start for start, _ in offsets]
        before = {border: bisect_left(starts, border) - 1 for border in borders}
        crossed = [b for b, token in before.items() if token >= 0 and offsets[token][1] > b]
        if not crossed:
            return ids, offsets
        apart, places = list[int](), list[Span]()
        for start, end in itertools.pairwise([0, *crossed, len(text)]):
            found = self._tokens(text[start:end])
            apart += found.ids
            places += [(start + first, start + behind) for first, behind in found.offsets]
        whole, joined = self.tokenizer.decode(ids), self.tokenizer.decode(apart)
        if whole != joined:
            raise FinetuneError(
                "chat template: the header of an assistant turn ends inside a token; tokenized as "
                f"one text the chat is {excerpt(whole)}, split after the header {excerpt(joined)}; "
                "end the header at a word boundary"
            )
        return apart, places

    def _check_end(self, token: int, turn: str) -> None:
        """Refuse a template whose turns do not end with an end token: models would not stop."""
        if token not in self.end_tokens:
            raise FinetuneError(
                f"chat template: the assistant turn {excerpt(turn)} closes with "
                f"{self.tokenizer.decode([token])!r}, which is not an end token of this tokenizer, "
                "so a model could not learn to stop; end it with {{ eos_token }} (as the built-in "
                "'plain' does) or add the token to the tokenizer"
            )

    def _turns(self, sample: Conversation) -> Turns:
        if sample.tools and self._tool_turns is not None:
            return self._tool_turns
        return self._plain_turns

    @cached_property
    def _tool_turns(self) -> Turns | None:
        if self.tool_template is None:
            return None
        return Turns(self.tokenizer, self.tool_template, self.variables)

    @cached_property
    def _plain_turns(self) -> Turns:
        if self.template is None:
            raise FinetuneError(
                "model.chat_template: the data has conversations and the tokenizer has no chat "
                f"template; set model.chat_template to a file or to one of {', '.join(BUILT_IN)}"
            )
        return Turns(self.tokenizer, self.template, self.variables)

    def reads_key(self, sample: Conversation, number: int, key: str) -> bool:
        """Whether a key of a message changes what the template writes."""
        return self._turns(sample).reads(sample, number, key)

    @property
    def reads_the_date(self) -> bool:
        """Whether a template writes the current date, which is fixed for training."""
        return any("strftime_now" in each for each in (self.template, self.tool_template) if each)

    def holds_markup(self, text: str) -> bool:
        """Whether a text contains special tokens, or the header of an assistant turn."""
        return bool(self._markup.search(text))

    @cached_property
    def _markup(self) -> re.Pattern[str]:
        """Pattern of special tokens, end tokens of turns, and the header of an assistant turn."""
        added = self.tokenizer.added_tokens_decoder
        ends = set[int]()
        texts = set[str]()
        if self.template is not None:
            try:
                ends = set(self.stop_ids)
                header = self._turns(Conversation((QUESTION,))).header.strip()
                texts = {header} if len(header) >= HEADER else texts
            except FinetuneError:  # reported when rows are rendered
                pass
        texts |= {token.content for id, token in added.items() if token.special or id in ends}
        texts = {text for text in texts if text.strip()}
        longest_first = sorted(texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def end_tokens(self) -> set[int | None]:
        """Token ids that can end a turn or a text: the EOS and all added tokens."""
        return {*self.tokenizer.added_tokens_decoder, self._eos}

    # Tokens.

    @contextmanager
    def ahead(self, samples: Iterable[Sample]) -> Iterator[None]:
        """Render and tokenize samples as a batch, which is faster than one by one.

        Inside the context, `render` uses the results for these sample objects.
        """
        texts: dict[str, None] = {}
        for part in (part for sample in samples for part in sequences_of(sample)):
            match part:
                case Conversation():
                    try:
                        rendered = self._turns(part).render(part)
                        whole = self._expanded(rendered.marked.text, part)
                    except (FinetuneError, RowProblem):  # raised again when the row is rendered
                        continue
                    self._rendered_ahead[id(part)] = rendered, whole
                    texts[whole.text] = None
                case Completion():
                    texts |= {part.prompt: None, part.prompt + part.completion: None}
                case Text():
                    texts[part.text] = None
        sound = [text for text in texts if not half_character(text)]
        if sound:
            for text, tokens in zip(sound, self._tokenised(sound), strict=True):
                self._tokens_ahead[text] = tokens
        try:
            yield
        finally:
            self._rendered_ahead.clear()
            self._tokens_ahead.clear()

    def _rendered(self, sample: Conversation) -> tuple[Rendered, Expanded]:
        """A conversation as rendered, and its text with expanded images."""
        if id(sample) in self._rendered_ahead:
            return self._rendered_ahead[id(sample)]
        rendered = self._turns(sample).render(sample)
        return rendered, self._expanded(rendered.marked.text, sample)

    def _expanded(self, text: str, sample: Conversation) -> Expanded:
        return expanded(self.images, text, sample.images)

    def _tokens(self, text: str) -> Tokens:
        """Tokenize a text without adding special tokens.

        Raises FinetuneError for an unpaired surrogate, which JSON can escape but UTF-8 cannot
        encode.
        """
        ahead = self._tokens_ahead.get(text)
        if ahead is not None:
            return ahead
        if half := half_character(text):
            raise FinetuneError(
                f"the text contains an unpaired surrogate ({half!r}), which tokenizers cannot "
                "encode; the text may have been cut inside a character"
            )
        return self._tokenised([text])[0]

    def _tokenised(self, texts: list[str]) -> list[Tokens]:
        found = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False,
            return_token_type_ids=False, verbose=False,
        )  # fmt: skip
        assert found.encodings is not None  # it is a fast tokenizer
        return list(map(Tokens, found["input_ids"], found.encodings))


def load_chat(
    tokenizer: "PreTrainedTokenizerFast",
    chat_template: str | None,
    variables: Mapping[str, Any] | None = None,
    images: ImageProcessor | None = None,
) -> Chat:
    """Combine a tokenizer with a chat template: its own (None), a named or built-in one, or a file.

    Args:
        tokenizer: A fast tokenizer.
        chat_template: The recipe's `model.chat_template`.
        variables: The recipe's `model.chat_template_kwargs`.
        images: The image processor of the model, if it reads images.

    Raises FinetuneError for a tokenizer without offsets, and the errors of `choose`.
    """
    if not tokenizer.is_fast:
        raise FinetuneError(
            f"tokenizer: {type(tokenizer).__name__} does not report the characters of a token; "
            "use a model with a tokenizer.json"
        )
    # Dates from YAML become text, as in JSON and in the printed recipe.
    values = json.loads(json.dumps(dict(variables or {}), default=str))
    chosen = choose(tokenizer, chat_template, values)
    return Chat(tokenizer, chosen.template, chosen.tool_template, values, chosen.saved, images)
