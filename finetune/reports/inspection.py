"""Show rows as the model sees them, with trained tokens marked, in a terminal or on a page."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from finetune import catalog
from finetune.cache import cache
from finetune.data.audit import describe, mistakes
from finetune.data.formats import find_format
from finetune.data.images.image_file import PlacedImage, decode, thumbnail
from finetune.data.prepare import Prepared, prepare
from finetune.data.read.first_rows import fit, labels
from finetune.data.read.sources import find_source
from finetune.data.rows.order import permutation
from finetune.data.samples import READ_AS
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError
from finetune.methods import find_method
from finetune.models.model import load_chat_of, load_tokenizer
from finetune.recipe import Data, Kind, Recipe
from finetune.reports.tables import rendered
from finetune.runs.run import write_whole

BROKEN = "\ufffd"
"""Decoded text of an incomplete character."""
METHODS: dict[Kind, str] = {
    "text": "sft", "pairs": "dpo", "judged": "kto", "labelled": "classifier",
}  # fmt: skip
"""A method for each kind of sample, for data without a recipe."""
BARS = 24
"""Ranges of a histogram of lengths."""
ANY_LENGTH = 2**20
"""Maximum tokens of a row that is shown without a recipe: none is cut or refused."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A token, several that form complete characters only together, or those of an image."""

    text: str
    ids: list[int]
    trained: bool
    image: str = ""
    """A thumbnail of the image as a `data:` URL."""
    role: str = ""
    """Whose turn it is in, by the name that the template writes at the start of a turn."""


@dataclasses.dataclass(frozen=True)
class Document:
    """A tokenized row of the data."""

    place: str
    pieces: list[Piece]
    name: str = ""
    """Name of this sequence within its row, such as `chosen`."""
    label: str = ""
    """Its label, for classification and scoring."""
    scored: bool = False
    """Whether the model's score is read at its last token."""

    @property
    def counted(self) -> str:
        """Its numbers of tokens and trained tokens, and its label, as text."""
        learned = "scored at the last" if self.scored else f"{self.trained} trained"
        seen = [len(piece.ids) for piece in self.pieces if piece.image]
        images = f", {len(seen)} image{'s' * (len(seen) > 1)} with {sum(seen)}" if seen else ""
        label = f", label: {self.label}" if self.label else ""
        return f"{self.tokens} tokens{images}, {learned}{label}"

    @property
    def tokens(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces)

    @property
    def trained(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces if piece.trained)


@dataclasses.dataclass(frozen=True)
class Scored:
    """A completion by the initial model, and its rewards."""

    text: str
    tokens: int
    ended: bool
    """Whether it ended with a stop token, not at the length limit."""
    reward: float | None
    rewards: dict[str, float | None]
    """Score by reward function; None for no score."""

    @property
    def counted(self) -> str:
        """Its reward and length, as text."""
        total = "no reward" if self.reward is None else f"reward {self.reward:g}"
        apart = [f"{name} {value}" for name, value in self.rewards.items() if value is not None]
        parts = f" ({', '.join(apart)})" * (len(self.rewards) > 1)
        return f"{total}{parts}, {self.tokens} tokens{', cut off' * (not self.ended)}"


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A few rows, and counts over all rows."""

    counts: dict[str, Any]
    """{"train": ..., "eval": ...}"""
    mistakes: list[str]
    notes: list[str]
    rows: list[list[Document]]
    """Rows in training order, each with its documents: one, both of a pair, or all documents of a
    packed row."""
    lengths: list[tuple[int, int, int]]
    """How long the sequences are: (fewest tokens, most tokens, sequences of this length)."""
    completions: list[list[Scored]] = dataclasses.field(default_factory=list[list[Scored]])
    """Completions by the initial model for each row shown; empty unless requested."""


def recipe_of_data(
    source: str, model: str | None, overrides: Sequence[str] = (), method: str | None = None
) -> Recipe:
    """A recipe with the defaults for data: a format that reads its first rows, and a method.

    Args:
        source: A file, folder, glob or hub data set.
        model: Name or folder of the model.
        overrides: `key=value` words, which come last: `data.0.format=ranked_all` replaces the
            format that was found.
        method: Name of the method; by default one for the kind of samples in the data.

    Raises:
        FinetuneError: there is no such data, no format reads it, or an override is wrong.
    """
    fields: dict[str, Any] = {
        "model": {"name": model}, "batch": {"max_length": ANY_LENGTH},
        "data": [{"source": source, "format": "messages"}],
    }  # fmt: skip

    def of_data() -> Data:
        return catalog.with_words(fields | {"method": "sft"}, words_of_data).data[0]

    words_of_data = [word for word in overrides if word.startswith("data.0.")]
    if not any(word.startswith("data.0.format=") for word in overrides):
        kinds = METHODS if method is None else READ_AS[find_method(method).takes]
        found = fit(find_source(of_data()).rows(), kinds)
        fields["data"][0] |= {"format": found.format, "columns": found.columns}
    data = of_data()
    name = method or METHODS.get(find_format(data.format).gives, "sft")
    if name == "classifier" and not any(word.startswith("labels=") for word in overrides):
        fields |= labels(find_source(data).rows())
    return catalog.with_words(fields | {"method": name}, overrides)


def inspect(recipe: Recipe, rows: int = 3) -> Inspection:
    """The first training rows of a recipe as its model sees them, and counts over all rows.

    Raises:
        FinetuneError: the data cannot be prepared.
    """
    tokenizer = load_tokenizer(recipe)
    chat = load_chat_of(recipe, tokenizer)
    return inspect_rows(recipe, prepare(recipe, chat, cache("data")), tokenizer, rows)


def inspect_rows(
    recipe: Recipe, prepared: Prepared, tokenizer: PreTrainedTokenizerBase, rows: int
) -> Inspection:
    """The first `rows` training rows of prepared data, and counts over all rows."""
    counts = {name: prepared.counts[name] for name in ("train", "eval")}
    notes: list[str] = []
    if prepared.counts["pad_is_eos"]:
        notes.append(
            "the padding token is the end token: padding is masked by position here, so the end is "
            "trained; a collator that masks by id would never train it"
        )
    notes += recipe.data_advice(counts["train"]) if counts["train"]["documents"] else []
    if prepared.bad_rows is not None:
        notes.append(f"the bad rows that were dropped are listed in {prepared.bad_rows}")
    train = prepared.train
    chosen = permutation(len(train), recipe.seed, 0)[:rows] if len(train) else np.empty(0, int)
    shown = [
        [
            _document(recipe, prepared, tokenizer, int(number), name)
            for number, name in zip(
                train.numbers(int(index)), itertools.cycle(recipe.document_names), strict=False
            )
        ]
        for index in chosen
    ]
    lengths = histogram(train.documents.lengths)
    return Inspection(counts, list(mistakes(counts["train"])), notes, shown, lengths)


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """Counts of lengths in `BARS` ranges of whole numbers, as (first, last, count)."""
    if not len(lengths):
        return []
    wide = max(1, -(-int(lengths.max()) // BARS))
    counts = np.bincount((lengths - 1).clip(0) // wide)
    return [(at * wide + 1, (at + 1) * wide, int(n)) for at, n in enumerate(counts)]


def _document(
    recipe: Recipe, prepared: Prepared, tokenizer: PreTrainedTokenizerBase, number: int, name: str
) -> Document:
    documents = prepared.train.documents
    ids, trained = (each.tolist() for each in documents.document(number))
    found, last = list[Piece](), 0
    for image in documents.images_of(number):
        found += pieces(tokenizer, ids[last : image.start], trained[last : image.start])
        found.append(_chip(image, ids[image.start : image.end]))
        last = image.end
    found += pieces(tokenizer, ids[last:], trained[last:])
    found = list(_with_roles(found, prepared.counts["train"]["roles"], tokenizer))
    columns = {each: float(values[number]) for each, values in documents.columns.items()}
    if "wanted" in columns:
        name = "wanted" if columns["wanted"] else "unwanted"
    label, scored = recipe.label_of(columns), recipe.head.scored
    return Document(prepared.place(number), found, name, label, scored)


def _with_roles(
    found: list[Piece], roles: Iterable[str], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Piece]:
    """Pieces with the roles that stand in a special token or directly behind one.

    `<|im_start|>user`, `<|start_header_id|>user` and `<|user|>` begin a turn of the user.
    """
    names = {"model": "assistant"} | {role: role for role in roles}
    marks, owners = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}, list[str]()
    role, first, header = "", 0, None
    for place, piece in enumerate(found):
        if not marks.isdisjoint(piece.ids):
            own = piece.text.strip("<|>")
            first, header = place, own if own in names else ""
        elif header is not None:
            header += piece.text
        if header is not None and header.rstrip() in names:
            role, header = names[header.rstrip()], None
            owners[first:] = [role] * (place - first)
        elif header is not None and header.strip() != header:
            header = None  # not the name of a role
        owners.append(role)
    return map(lambda piece, role: dataclasses.replace(piece, role=role), found, owners)


def _chip(image: PlacedImage, ids: list[int]) -> Piece:
    """An image in the place of its tokens."""
    try:
        width, height = decode(image.file.read(), image.file.name)[0].size
        text = f"[image {width} x {height}, {len(ids)} tokens]"
        return Piece(text, ids, False, thumbnail(image.file))
    except RowProblem as problem:
        raise FinetuneError(f"data: {problem}") from None


def pieces(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], trained: list[bool]
) -> Iterator[Piece]:
    """Tokens with their texts, which add up to the text of the sequence.

    Each token is decoded after the previous one, because some tokenizers drop the leading space of
    a single token.
    """
    before, pending = list[int](), list[int]()
    for place, token in enumerate(ids):
        pending.append(token)
        lead = _decode(tokenizer, before)
        text = _decode(tokenizer, [*before, *pending]).removeprefix(lead)
        last = place + 1 == len(ids) or trained[place + 1] != trained[place]
        if text.endswith(BROKEN) and not last and len(pending) < 4:
            continue
        yield Piece(text, pending, trained[place])
        before, pending = pending, []


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


# Output for users.


def show(inspection: Inspection, console: Console) -> None:
    """Print rows with trained tokens in green, or in double brackets without colors."""
    for number, row in enumerate(inspection.rows, 1):
        for document in row:
            named = f" [bold cyan]{document.name}[/]" if document.name else ""
            console.print(
                f"[bold]row {number}[/]{named}  {escape(document.place)}  "
                f"[dim]{escape(document.counted)}[/]",
                soft_wrap=True,
            )
            console.print(_coloured(document, console.is_terminal), soft_wrap=True)
            console.print()
        for each in inspection.completions[number - 1 : number]:
            _show_completions(each, console)
    for name, counts in inspection.counts.items():
        for line in describe(counts):
            console.print(f"{name:<6} {line}", markup=False, highlight=False, soft_wrap=True)
        roles = ", ".join(f"{count:,} {role}" for role, count in counts["roles"].items())
        if roles:
            console.print(f"{'':<6} {roles}", markup=False, highlight=False, soft_wrap=True)
    for note in inspection.notes:
        console.print(f"note   {note}", markup=False, highlight=False, soft_wrap=True)
    for mistake in inspection.mistakes:
        console.print(f"[bold red]mistake[/] {escape(mistake)}", highlight=False, soft_wrap=True)


def _show_completions(completions: list[Scored], console: Console) -> None:
    for each in completions:
        console.print(f"[bold]completion[/]  [dim]{escape(each.counted)}[/]", soft_wrap=True)
        console.print(Text(visible(each.text)), soft_wrap=True)
        console.print()


def _coloured(document: Document, colours: bool) -> Text:
    text, inside = Text(), False
    for piece in document.pieces:
        if piece.trained != inside and not colours:
            text.append("⟦" if piece.trained else "⟧")
        inside = piece.trained
        style = "bold green" if piece.trained else "reverse" if piece.image else "dim"
        text.append(visible(piece.text), style=style)
    return text.append("⟧") if inside and not colours else text


def visible(text: str) -> str:
    """Text with control characters, which a terminal would execute, replaced by visible symbols."""
    return "".join(
        chr(0x2400 + ord(each)) if ord(each) < 0x20 and each not in "\n\t"
        else BROKEN if 0x7F <= ord(each) < 0xA0 else each
        for each in text
    )  # fmt: skip


def write_page(inspection: Inspection, title: str, path: Path) -> None:
    """Write a self-contained HTML page."""
    summary = {name: describe(counts) for name, counts in inspection.counts.items()}
    about = {"title": title, "inspection": inspection, "summary": summary}
    write_whole(path, rendered("inspection.html.jinja", **about))
