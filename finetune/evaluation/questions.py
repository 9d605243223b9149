"""Questions with reference answers: of data sources, or of the rows that a run held out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune import catalog
from finetune.cache import cache
from finetune.checkpoints.resume import refuse_other_data
from finetune.data.audit import identity
from finetune.data.chat.render import load_chat
from finetune.data.formats import find_format, read_row
from finetune.data.prepare import Prepared, prepare
from finetune.data.samples import Completion, Conversation, Preference, Sample, Text, as_kind
from finetune.data.sources import SourceRow, find_source, find_sources
from finetune.data.values import RowProblem
from finetune.errors import FinetuneError
from finetune.models.model import load_tokenizer
from finetune.recipe import Data, Recipe
from finetune.runs.run import Run, open_run

Question = Conversation | Completion
"""A conversation that ends with the reference answer, or a prompt with its completion."""


@dataclass(frozen=True)
class Asked:
    """A row to evaluate on, and where it is from."""

    sample: Sample
    source: str = ""
    place: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)
    """Its columns, under the names of its format: tests of code, a schema, a database."""

    @property
    def question(self) -> Question:
        """What is asked, with its reference: of a pair, with the wanted answer."""
        sample = self.sample.chosen if isinstance(self.sample, Preference) else self.sample
        assert not isinstance(sample, Text), "a text is not asked"
        return sample

    @property
    def is_text(self) -> bool:
        """Whether there is nothing to ask: of a text the perplexity is measured alone."""
        return isinstance(self.sample, Text)

    @property
    def prompt(self) -> str:
        """The prompt, or the last message before the answer."""
        return asked_text(self.question)

    @property
    def expected(self) -> str:
        """The reference in words, without outer whitespace."""
        return expected_text(self.question)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Tool calls of the reference: objects with a name and arguments."""
        if isinstance(self.question, Completion):
            return []
        return [call["function"] for call in self.question.messages[-1].get("tool_calls", ())]


def asked_text(question: Question) -> str:
    """The prompt, or the last message before the answer."""
    if isinstance(question, Completion):
        return question.prompt
    return str(question.messages[-2].get("content") or "")


def expected_text(question: Question) -> str:
    """The reference in words, without outer whitespace."""
    if isinstance(question, Completion):
        return question.completion.strip()
    return str(question.messages[-1].get("content") or "").strip()


def references(data: Data) -> list[Question]:
    """Questions of a data source, each with an answer in words to compare with.

    Raises:
        FinetuneError: the source cannot be read, or a row has no such answer.
    """
    found = of_source(data)
    for each in found:
        problem = "a text has no answer to compare with"
        if not each.is_text:
            problem = unanswerable(each.question)
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
        asked = _read(data, row)
        if asked is None:
            continue
        found.append(asked)
        if data.first is not None and len(found) >= data.first:
            break
    if not found:
        raise FinetuneError(f"{data.source}: it has no rows to ask")
    return found


def of_run(run: Run | str | Path) -> list[Asked]:
    """What a run was evaluated on: every source of `eval_data`, else the rows that it held out.

    Raises:
        FinetuneError: there is nothing, it is not what it was, or a row has no answer.
    """
    run = run if isinstance(run, Run) else open_run(run)
    recipe = catalog.load(run.recipe)
    if not recipe.eval_data and not recipe.eval_rows:
        raise FinetuneError(
            f"{run.root}: its recipe has no eval_data and no eval_rows; give --data and --format"
        )
    return of_recipe(recipe, {} if recipe.eval_data else held_out(run, recipe))


def of_recipe(recipe: Recipe, left_out: dict[str, set[int]]) -> list[Asked]:
    """What a recipe is evaluated on: every source of `eval_data`, else the rows left out of `data`.

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
                asked = _read(source.data, row)
                if asked is not None:
                    yield asked


def held_out(run: Run, recipe: Recipe) -> dict[str, set[int]]:
    """Numbers of the rows that training left out, by file, found again as it chose them.

    Raises:
        FinetuneError: the data is not that of the run.
    """
    chosen = recipe.model
    chat = load_chat(load_tokenizer(recipe), chosen.chat_template, chosen.chat_template_kwargs)
    prepared = prepare(recipe, chat, cache("data"))
    newest = run.newest()
    if newest is not None:
        refuse_other_data(run, newest, identity(prepared.counts))
    return left_out_of(prepared)


def left_out_of(prepared: Prepared) -> dict[str, set[int]]:
    """Numbers of the rows that are evaluated, by file."""
    documents, files = prepared.eval.documents, prepared.counts["files"]
    wanted: dict[str, set[int]] = {}
    for number in prepared.eval.members:
        file, row = (int(part) for part in documents.origins[int(number)])
        wanted.setdefault(files[file], set()).add(row)
    return wanted


def _read(data: Data, row: SourceRow) -> Asked | None:
    """A row to evaluate on; None where the format leaves it out."""
    try:
        sample = read_row(data.format, row.value)
    except RowProblem as problem:
        if data.on_bad_row == "drop":
            return None
        raise FinetuneError(f"{row.place}: {problem}") from None
    if sample is None:
        return None
    if not isinstance(sample, Preference):
        sample = next(iter(as_kind(sample, "text")), None)  # of judged answers, those wanted
        if sample is None:
            return None
    asked = Asked(sample, data.source, row.place, row.value)
    problem = None if asked.is_text else unasked(asked.question)
    if problem is not None:
        raise FinetuneError(f"{row.place}: {problem}")
    return asked


def unasked(question: Question) -> str | None:
    """Why a question has no reference; None where it has one."""
    if isinstance(question, Completion):
        return None
    if len(question.messages) < 2 or question.messages[-1]["role"] != "assistant":
        return "needs a question and, at its end, an assistant message to compare with"
    if len(question.messages) - 1 in question.untrained:
        return "its last assistant message is context only by its weight or train"
    return None


def unanswerable(question: Question) -> str | None:
    """Why there is no reference in words to compare with; None where there is one."""
    if (problem := unasked(question)) is not None:
        return problem
    if isinstance(question, Conversation) and not question.messages[-1].get("content"):
        return "its last assistant message calls a tool and says nothing to compare with"
    return None


def spread(asked: Sequence[Asked], limit: int | None) -> list[Asked]:
    """At most `limit` questions, evenly spaced, so that every source has its share."""
    if limit is None or limit >= len(asked):
        return list(asked)
    return [asked[index * len(asked) // limit] for index in range(limit)]
