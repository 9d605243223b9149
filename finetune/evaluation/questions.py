"""Read questions with reference answers from data sources, or from the held-out rows of a run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune import catalog
from finetune.cache import cache
from finetune.checkpoints.resume import refuse_other_data
from finetune.data.audit import identity
from finetune.data.formats import find_format, read_row
from finetune.data.images.image_file import thumbnail
from finetune.data.prepare import Prepared, prepare
from finetune.data.prompts import answered
from finetune.data.read.sources import SourceRow, find_source, find_sources
from finetune.data.samples import (
    Completion,
    Conversation,
    Labelled,
    Preference,
    Prompt,
    Sample,
    Several,
    Text,
    as_kind,
    with_files_in,
)
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError, reading
from finetune.models.model import load_chat_of
from finetune.recipe import Data, Recipe
from finetune.runs.run import Run, open_run

GENERAL_TEXT = Path(__file__).with_name("general.txt")
"""Paragraphs on everyday topics, written for measuring forgetting."""
Question = Conversation | Completion
"""A conversation that ends with the reference answer, or a prompt with its completion."""


@dataclass(frozen=True)
class Asked:
    """A row to evaluate on, and its location."""

    sample: Sample
    source: str = ""
    place: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the row, by their names in its format, such as tests, a schema or a database."""

    @property
    def question(self) -> Question:
        """The question with its reference, which is the chosen answer of a pair."""
        sample = self.sample.chosen if isinstance(self.sample, Preference) else self.sample
        assert not isinstance(sample, Text), "a text is not asked"
        return sample

    @property
    def is_text(self) -> bool:
        """Whether the row is plain text, for which only loss and perplexity are measured."""
        return isinstance(self.sample, Text)

    @property
    def prompt(self) -> str:
        """The prompt, or the last message before the answer."""
        if isinstance(self.question, Completion):
            return self.question.prompt
        return str(self.question.messages[-2].get("content") or "")

    @property
    def pictures(self) -> dict[str, list[str]]:
        """A column with thumbnails of the images in `prompt`; empty without images."""
        asked = self.question
        files = () if isinstance(asked, Completion) else asked.messages[-2].get("images", ())
        return {"images": list(map(thumbnail, files))} if files else {}

    @property
    def expected(self) -> str:
        """The text of the reference, stripped of whitespace."""
        if isinstance(self.question, Completion):
            return self.question.completion.strip()
        return str(self.question.messages[-1].get("content") or "").strip()

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Tool calls of the reference, objects with a name and arguments."""
        if isinstance(self.question, Completion):
            return []
        return [call["function"] for call in self.question.messages[-1].get("tool_calls", ())]


def references(data: Data) -> list[Question]:
    """Questions of a data source, each with a text answer as the reference.

    Raises:
        FinetuneError: the source cannot be read, or a row has no text answer.
    """
    found = of_source(data)
    for each in found:
        problem = "a text has no answer to compare with"
        if not each.is_text:
            problem = text_reference_problem(each.question)
        if problem is not None:
            raise FinetuneError(f"{each.place}: {problem}")
    return [each.question for each in found]


def of_source(data: Data) -> list[Asked]:
    """Rows of a data source.

    Raises:
        FinetuneError: the source cannot be read, or a row does not end with an answer.
    """
    find_format(data.format)
    found: list[Asked] = []
    for row in find_source(data).rows():
        found += _read(data, row)
    if not found:
        raise FinetuneError(f"{data.source}: it has no rows with questions")
    return found


def general_text(file: Path | None) -> list[Asked]:
    """Documents of general text from a file (paragraphs, or rows with `text`), or built-in ones.

    Raises:
        FinetuneError: the file cannot be read, or contains no text.
    """
    path = file or GENERAL_TEXT
    if path.suffix in ("", ".txt", ".md"):
        with reading(f"--general-text {path}: cannot be read"):
            text = path.read_text(encoding="utf-8")
        parts = [part.strip() for part in text.split("\n\n") if part.strip()]
        found = [
            Asked(Text(part), str(path), f"{path} paragraph {n + 1}")
            for n, part in enumerate(parts)
        ]
    else:
        found = of_source(Data(str(path), "text"))
    if not found:
        raise FinetuneError(f"--general-text {path}: contains no text")
    return found


def of_run(run: Run | str | Path) -> list[Asked]:
    """Evaluation rows of a run: all sources of `eval_data`, else the held-out rows.

    Raises:
        FinetuneError: there are no such rows, the data has changed, or a row has no answer.
    """
    run = run if isinstance(run, Run) else open_run(run)
    recipe = catalog.load(run.recipe)
    if not recipe.eval_data and not recipe.eval_rows:
        raise FinetuneError(
            f"{run.root}: its recipe has no eval_data and no eval_rows; give --data and --format"
        )
    return of_recipe(recipe, {} if recipe.eval_data else held_out(run, recipe))


def of_recipe(recipe: Recipe, left_out: dict[str, set[int]]) -> list[Asked]:
    """Evaluation rows of a recipe: all sources of `eval_data`, else the rows held out of `data`.

    Args:
        recipe: Recipe of the data.
        left_out: Row numbers of the held-out rows, by file.

    Raises:
        FinetuneError: a row cannot be read, or has no answer.
    """
    if recipe.eval_data:
        return [asked for data in recipe.eval_data for asked in of_source(data)]
    return list(_left_out(recipe, left_out))


def _left_out(recipe: Recipe, numbers: dict[str, set[int]]) -> Iterator[Asked]:
    wanted = {file: set(rows) for file, rows in numbers.items()}
    sources, _ = find_sources(recipe)
    for source in sources:
        for row in source.rows():
            if row.number in wanted.get(row.file, ()):
                wanted[row.file].discard(row.number)
                yield from _read(source.data, row)


def held_out(run: Run, recipe: Recipe) -> dict[str, set[int]]:
    """Row numbers of the held-out rows, by file, chosen as in training.

    Raises:
        FinetuneError: the data is not the data of the run.
    """
    chat = load_chat_of(recipe)
    prepared = prepare(recipe, chat, cache("data"))
    newest = run.newest()
    if newest is not None:
        refuse_other_data(run, newest, identity(prepared.counts))
    return left_out_of(prepared)


def left_out_of(prepared: Prepared) -> dict[str, set[int]]:
    """Row numbers of the evaluation rows, by file."""
    documents, files = prepared.eval.documents, prepared.counts["files"]
    wanted: dict[str, set[int]] = {}
    for number in prepared.eval.members:
        file, row = (int(part) for part in documents.origins[int(number)])
        wanted.setdefault(files[file], set()).add(row)
    return wanted


def _read(data: Data, row: SourceRow) -> list[Asked]:
    """The questions of a row, mostly one; none if the row is skipped.

    Several pairs of one row are asked once, with the first chosen answer.
    """
    try:
        sample = with_files_in(read_row(data.format, row.value), Path(row.file).parent)
        if isinstance(sample, Labelled):
            raise RowProblem(
                "a label is not an answer to compare with; a run that scores texts has its metrics "
                "of held-out rows in its report (eval_data, eval_rows)"
            )
        if isinstance(sample, Prompt):
            sample = answered(sample)
    except RowProblem as problem:
        if data.on_bad_row == "drop":
            return []
        raise FinetuneError(f"{row.place}: {problem}") from None
    if sample is None:
        return []
    samples = as_kind(sample, "text")  # only desirable answers
    if isinstance(sample, Several) and isinstance(sample.samples[0], Preference):
        samples = samples[:1]
    found = [Asked(each, data.source, row.place, row.value) for each in samples]
    for asked in found:
        problem = None if asked.is_text else reference_problem(asked.question)
        if problem is not None:
            raise FinetuneError(f"{row.place}: {problem}")
    return found


def reference_problem(question: Question) -> str | None:
    """Reason why a question has no reference; None if it has one."""
    if isinstance(question, Completion):
        return None
    if len(question.messages) < 2 or question.messages[-1]["role"] != "assistant":
        return "needs a question and a final assistant message to compare with"
    if len(question.messages) - 1 in question.untrained:
        return "its last assistant message is context only by its weight or train"
    return None


def text_reference_problem(question: Question) -> str | None:
    """Reason why a question has no text reference to compare with; None if it has one."""
    if (problem := reference_problem(question)) is not None:
        return problem
    if isinstance(question, Conversation) and not question.messages[-1].get("content"):
        return "its last assistant message calls a tool and has no text to compare with"
    return None


def spread(asked: Sequence[Asked], limit: int | None) -> list[Asked]:
    """At most `limit` evenly spaced questions, so that every source is represented."""
    if limit is None or limit >= len(asked):
        return list(asked)
    return [asked[index * len(asked) // limit] for index in range(limit)]
