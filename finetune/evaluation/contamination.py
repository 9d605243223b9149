"""Count evaluation rows that are also in the training data."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune import catalog
from finetune.data.formats import read_row
from finetune.data.images.image_file import ImageFile, digest_of
from finetune.data.prompts import answered
from finetune.data.read.sources import find_sources
from finetune.data.samples import (
    Completion,
    Conversation,
    Judged,
    Labelled,
    Preference,
    Prompt,
    Sample,
    samples_of,
    with_files_in,
)
from finetune.data.values import RowProblem
from finetune.evaluation.questions import Asked, held_out
from finetune.recipe import Recipe
from finetune.runs.run import Run


@dataclass(frozen=True)
class Overlap:
    """Evaluation rows that are in the training data of a run."""

    rows: int
    """Number of rows equal to a trained row, including the reference."""
    prompts: int
    """Number of rows whose question was trained, with any answer."""
    first: str = ""
    """Location of the first such question."""


def digest(value: object) -> str:
    """A hash of a value as JSON, in which an image is the hash of its file."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=_as_text)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _as_text(value: object) -> str:
    try:
        return digest_of(value.read()) if isinstance(value, ImageFile) else str(value)
    except RowProblem:
        return str(value)


def keys_of(sample: Sample) -> tuple[str, str]:
    """Hashes of the question and of the complete sample."""
    match sample:
        case Preference():
            question, _ = keys_of(sample.chosen)
            return question, question + keys_of(sample.rejected)[1] + keys_of(sample.chosen)[1]
        case Conversation():
            messages, tools = sample.messages, sample.tools
            return digest([messages[:-1], tools]), digest([messages, tools])
        case Completion():
            return digest(sample.prompt), digest([sample.prompt, sample.completion])
        case Judged():
            return keys_of(sample.answer)
        case Labelled():
            return keys_of(sample.sequence)
        case Prompt():
            return _keys_of_prompt(sample)
        case _:
            return digest(sample.text), digest(sample.text)


def _keys_of_prompt(sample: Prompt) -> tuple[str, str]:
    """Keys of the prompt with its answer; without one, the key of the question twice."""
    try:
        return keys_of(answered(sample))
    except RowProblem:
        asked = sample.asked
    if isinstance(asked, Completion):
        question = digest(asked.prompt)
    else:
        question = digest([asked.messages, asked.tools])
    return question, question


def named(place: str) -> str:
    """A location without the folders of its file, which are private."""
    return place.rsplit("/", 1)[-1]


def overlap(run: Run, asked: Sequence[Asked]) -> Overlap | None:
    """Count the evaluation rows that the run trained on; None if its training data is streamed.

    Rows of `data` that were held out do not count as trained.
    """
    recipe = catalog.load(run.recipe)
    if any(data.stream for data in recipe.data):
        return None
    questions, rows = set[str](), set[str]()
    for sample in _trained(run, recipe):
        question, row = keys_of(sample)
        questions.add(question)
        rows.add(row)
    keys = [keys_of(each.sample) for each in asked]
    shared = [
        each for each, (question, _) in zip(asked, keys, strict=True) if question in questions
    ]
    return Overlap(
        rows=sum(row in rows for _, row in keys),
        prompts=len(shared),
        first=named(shared[0].place) if shared else "",
    )


def _trained(run: Run, recipe: Recipe) -> Iterator[Sample]:
    left_out = dict[str, set[int]]()
    if recipe.eval_rows and not recipe.eval_data:
        left_out = held_out(run, recipe)
    sources, _ = find_sources(recipe)
    for source in sources:
        for row in source.rows():
            if row.number in left_out.get(row.file, ()):
                continue
            try:
                sample = read_row(source.data.format, row.value)
                sample = with_files_in(sample, Path(row.file).parent)
            except RowProblem:
                continue
            if sample is not None:
                yield from samples_of(sample)
