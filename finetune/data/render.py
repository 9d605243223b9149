"""From a sample to token ids and which of them are trained.

A conversation is rendered by the chat template and tokenised once, as serving does. An assistant
turn is trained from behind the header that serving would put there (the generation prompt) up to
and with the token that ends the turn:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                          ^^^^^^^^^^^^^^^
"""

import itertools
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from finetune.data.chat_templates import BUILT_IN, adds_bos, choose
from finetune.data.formats import Completion, Conversation, Sample, Text
from finetune.data.marks import Span
from finetune.data.turns import ANSWER, QUESTION, Turns, excerpt
from finetune.errors import FinetuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TrainOn = Literal["assistant", "completion", "all"]

HEADER = 6
"""Characters of a header that no text holds by chance."""
HALF_CHARACTER = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Row:
    """Token ids of a row, and which of them the model is trained to say."""

    ids: list[int]
    trained: list[bool]
    notes: frozenset[str] = frozenset()
    """What is unusual about it: names of counts in `finetune.data.encode.Tally`."""


@dataclass(frozen=True)
class Chat:
    """A tokenizer with the chat template that it renders conversations with."""

    tokenizer: "PreTrainedTokenizerFast"
    template: str | None
    """Jinja source; None for a tokenizer without one, which renders text and completions only."""
    tool_template: str | None = None
    """Jinja source for conversations with tools, where it differs."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Values of the template's variables: `model.chat_template_kwargs`."""
    saved: str | dict[str, str] | None = None
    """What `tokenizer.chat_template` becomes where the tokenizer is saved."""

    def render(self, sample: Sample, train_on: TrainOn) -> Row:
        """Token ids of a sample, and the trained ones.

        Of a conversation: every assistant turn, the last one (`completion`), or everything. Of a
        prompt with its completion: the completion, or both for `all`. Of a text: everything.
        Raises FinetuneError where the template cannot say which tokens an assistant turn is.
        """
        match sample:
            case Conversation():
                return self._conversation(sample, train_on)
            case Completion():
                return self._completion(sample, train_on)
            case Text():
                ids, _ = self._encode(sample.text)
                ids = self._closed(self._opened(ids))
                return Row(ids, [True] * len(ids), self._bos_notes(ids))

    def prompt(self, sample: Conversation | Completion) -> list[int]:
        """Token ids that a model is given to answer: messages and the header of its turn."""
        if isinstance(sample, Completion):
            return self._opened(self._encode(sample.prompt)[0])
        return self._encode(self._turns(sample).mark(sample, add_generation_prompt=True).text)[0]

    @property
    def stop_ids(self) -> list[int]:
        """Tokens at which an answer ends: the EOS, and the one that ends a turn."""
        ends = {self._eos} if self._eos is not None else set[int]()
        if self.template is not None:
            row = self.render(Conversation((QUESTION, ANSWER)), "completion")
            ends.add([token for token, said in zip(row.ids, row.trained, strict=True) if said][-1])
        return sorted(ends)

    # Prompt and completion.

    def _completion(self, sample: Completion, train_on: TrainOn) -> Row:
        prompt, completion = self._split(sample)
        answer = self._closed(completion)
        start = self._opened(prompt)
        given = [train_on == "all"] * len(start)
        notes = self._bos_notes(start)
        return Row([*start, *answer], [*given, *[True] * len(answer)], notes)

    def _split(self, sample: Completion) -> tuple[list[int], list[int]]:
        """Ids of the prompt as serving tokenises it, and of what follows.

        Tokenised at once, a token may lie across the border. Then the completion is tokenised by
        itself: behind a newline where the tokenizer puts a space before every text, which does not
        belong here.
        """
        prompt, _ = self._encode(sample.prompt)
        whole, _ = self._encode(sample.prompt + sample.completion)
        if whole[: len(prompt)] == prompt:
            return prompt, whole[len(prompt) :]
        alone, _ = self._encode(sample.completion)
        newline, _ = self._encode("\n")
        behind_newline, _ = self._encode("\n" + sample.completion)
        text = self.tokenizer.decode(whole)
        for completion in (alone, behind_newline[len(newline) :]):
            if self.tokenizer.decode([*prompt, *completion]) == text:
                return prompt, completion
        raise FinetuneError(
            f"the prompt ends inside a token ({excerpt(sample.prompt[-20:])} before "
            f"{excerpt(sample.completion[:20])}); end it at a word"
        )

    def _opened(self, ids: list[int]) -> list[int]:
        """With the tokenizer's BOS in front, where it adds one and the text has none."""
        bos = self._bos
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def _closed(self, ids: list[int]) -> list[int]:
        eos = self._eos
        if eos is None:
            raise FinetuneError(
                "tokenizer: it has no end-of-sequence token, so a model could not learn to stop; "
                "set eos_token in its tokenizer_config.json"
            )
        return ids if ids[-1:] == [eos] else [*ids, eos]

    @cached_property
    def _bos(self) -> int | None:
        """The BOS that the tokenizer begins every text with; None where it does not."""
        bos = cast("int | None", self.tokenizer.bos_token_id)
        return bos if adds_bos(self.tokenizer) else None

    def _bos_notes(self, ids: list[int]) -> frozenset[str]:
        """Whether a row lacks the BOS that the tokenizer begins texts with, or has it twice."""
        bos = cast("int | None", self.tokenizer.bos_token_id)
        if bos is None:
            return frozenset()
        if ids[:2] == [bos, bos]:
            return frozenset({"two_bos"})
        return frozenset({"no_bos"} if self._bos is not None and ids[:1] != [bos] else ())

    @cached_property
    def _eos(self) -> int | None:
        return cast("int | None", self.tokenizer.eos_token_id)

    # Conversations.

    def _conversation(self, sample: Conversation, train_on: TrainOn) -> Row:
        turns = self._turns(sample)
        rendered = turns.render(sample)
        marked = rendered.marked
        ids, offsets = self._encode(marked.text)
        if train_on == "all":
            if sample.untrained:
                raise FinetuneError(
                    f"message {min(sample.untrained)} is context only by its weight or train, but "
                    "all tokens are trained; use method sft with train_on=assistant, or leave the "
                    "key out"
                )
            notes = self._bos_notes(ids) | rendered.notes
            return Row(ids, [True] * len(ids), notes)
        answers = [
            number
            for number, message in enumerate(sample.messages)
            if message["role"] == "assistant" and number >= sample.given
        ]
        chosen = answers[-1:] if train_on == "completion" else answers
        chosen = [number for number in chosen if number not in sample.untrained]
        spans = {number: turns.spans(rendered, number) for number in chosen}
        borders = sorted({start for each in spans.values() for start, _ in each})
        ids, offsets = self._cut(marked.text, ids, offsets, borders)
        trained = [False] * len(ids)
        starts = [start for start, _ in offsets]
        for number, said in spans.items():
            last = 0
            for start, end in said:
                first, behind = bisect_left(starts, start), bisect_left(starts, end)
                trained[first:behind] = [True] * (behind - first)
                last = ids[behind - 1]
            self._check_end(last, marked.written(number) or marked.text[slice(*said[-1])])
        return Row(ids, trained, self._bos_notes(ids) | rendered.notes)

    def _cut(
        self, text: str, ids: list[int], offsets: list[Span], borders: list[int]
    ) -> tuple[list[int], list[Span]]:
        """Tokens of which none lies across a border: serving puts the header there as it is.

        An answer that begins with a newline may share a token with the newline of its header. Then
        what lies before and behind the border is tokenised by itself.
        """
        starts = [start for start, _ in offsets]
        before = {border: bisect_left(starts, border) - 1 for border in borders}
        crossed = [b for b, token in before.items() if token >= 0 and offsets[token][1] > b]
        if not crossed:
            return ids, offsets
        apart, places = list[int](), list[Span]()
        for start, end in itertools.pairwise([0, *crossed, len(text)]):
            found, spans = self._encode(text[start:end])
            apart += found
            places += [(start + first, start + behind) for first, behind in spans]
        whole, joined = self.tokenizer.decode(ids), self.tokenizer.decode(apart)
        if whole != joined:
            raise FinetuneError(
                "chat template: the header of an assistant turn ends inside a token; tokenised at "
                f"once the chat is {excerpt(whole)}, cut behind the header {excerpt(joined)}; let "
                "the header end at a word"
            )
        return apart, places

    def _check_end(self, token: int, turn: str) -> None:
        """Refuse a template after whose turns a model could not learn to stop."""
        if token not in self.end_tokens:
            raise FinetuneError(
                f"chat template: the assistant turn {excerpt(turn)} closes with "
                f"{self.tokenizer.decode([token])!r}, which is no end token of this tokenizer, so "
                "a model could not learn to stop; end it with {{ eos_token }} (as the built-in "
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

    @property
    def reads_the_date(self) -> bool:
        """Whether a template writes the date of the day, which is fixed while training."""
        return any("strftime_now" in each for each in (self.template, self.tool_template) if each)

    def holds_markup(self, text: str) -> bool:
        """Whether a text holds special tokens, or the header of an assistant turn, as text."""
        return bool(self._markup.search(text))

    @cached_property
    def _markup(self) -> re.Pattern[str]:
        """Special tokens and end tokens of turns, which belong to the template."""
        added = self.tokenizer.added_tokens_decoder
        ends = set[int]()
        texts = set[str]()
        if self.template is not None:
            try:
                ends = set(self.stop_ids)
                header = self._turns(Conversation((QUESTION,))).header.strip()
                texts = {header} if len(header) >= HEADER else texts
            except FinetuneError:  # the rows say what is wrong with the template
                pass
        texts |= {token.content for id, token in added.items() if token.special or id in ends}
        texts = {text for text in texts if text.strip()}
        longest_first = sorted(texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def end_tokens(self) -> set[int | None]:
        """Tokens that can end a turn or a text: the EOS, and what the tokenizer never splits."""
        return {*self.tokenizer.added_tokens_decoder, self._eos}

    # Tokens.

    def _encode(self, text: str) -> tuple[list[int], list[Span]]:
        """Ids of a text without added special tokens, and the characters of each.

        Raises FinetuneError for half a surrogate pair, which JSON can escape and UTF-8 cannot hold.
        """
        half = HALF_CHARACTER.search(text)
        if half is not None:
            raise FinetuneError(
                f"the text holds half a character ({half[0]!r}), which no tokenizer can read; its "
                "other half was lost, perhaps where the text was cut"
            )
        encoding = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return encoding["input_ids"], encoding["offset_mapping"]


def load_chat(
    tokenizer: "PreTrainedTokenizerFast",
    chat_template: str | None,
    variables: Mapping[str, Any] | None = None,
) -> Chat:
    """A tokenizer with its own template (None), a named or built-in one, or one from a file.

    Args:
        tokenizer: A fast one.
        chat_template: The recipe's `model.chat_template`.
        variables: The recipe's `model.chat_template_kwargs`.

    Raises FinetuneError for a tokenizer that gives no offsets and for what `choose` refuses.
    """
    if not tokenizer.is_fast:
        raise FinetuneError(
            f"tokenizer: {type(tokenizer).__name__} cannot say which characters a token is; "
            "use a model with a tokenizer.json"
        )
    chosen = choose(tokenizer, chat_template, variables or {})
    return Chat(
        tokenizer, chosen.template, chosen.tool_template, dict(variables or {}), chosen.saved
    )
