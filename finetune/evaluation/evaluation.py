"""`finetune eval`: ask a model the held-out rows of a run or a data file, and print the score."""

import argparse
import dataclasses
import json
import re
from pathlib import Path

from finetune import catalog
from finetune.evaluation.exact_match import Example, Score, score_asked, write_samples
from finetune.evaluation.questions import Asked, of_run, of_source, spread
from finetune.inference.generate import Loaded, load_base, open_model
from finetune.inference.load import load_tokenizer, open_checkpoint
from finetune.recipe import Data
from finetune.runs.run import Run, open_run

SHOWN = 3
"""Examples that are printed."""
WIDTH = 200
"""Characters of a printed text."""


def run(arguments: argparse.Namespace) -> None:
    """Evaluate as the command line says, and print the result.

    Raises:
        FinetuneError: there is no such model, or nothing to ask it.
    """
    is_run = (Path(arguments.model) / "recipe.json").is_file()
    rows_of = arguments.rows_of or (arguments.model if is_run else None)
    asked = spread(everything := _questions(arguments, rows_of), arguments.limit)
    score = score_asked(_model(arguments.model, rows_of), asked, arguments.max_new_tokens)
    path = arguments.samples or _samples(arguments.model, is_run)
    write_samples(score, path)
    if arguments.json:
        sources = {
            name: {"rows": part.rows, "matched": part.matched}
            for name, part in score.of_sources().items()
        }
        extra = {"share": score.share, "cut": score.cut, "of": len(everything)}
        print(json.dumps(
            dataclasses.asdict(score) | extra | {"sources": sources, "samples": str(path)},
            indent=2, ensure_ascii=False,
        ))  # fmt: skip
        return
    for line in report(score, len(everything), arguments.max_new_tokens):
        print(line)
    print(f"samples    {path}")


def _questions(arguments: argparse.Namespace, rows_of: str | None) -> list[Asked]:
    if arguments.data is not None:
        return of_source(Data(arguments.data, arguments.format))
    assert rows_of is not None, "the command line asks for one of the two"
    return of_run(rows_of)


def _model(name: str, rows_of: str | None) -> Loaded:
    """The model; the base of a run is asked in the words of that run."""
    if rows_of is not None and not (Path(name) / "recipe.json").is_file():
        run = open_run(rows_of)
        recipe = catalog.load(run.recipe)
        if recipe.model.name is not None and _same(recipe.model.name, name):
            return load_base(recipe, load_tokenizer(open_checkpoint(run) / "tokenizer"))
    return open_model(name)


def _same(one: str, other: str) -> bool:
    if Path(one).is_dir() and Path(other).is_dir():
        return Path(one).samefile(other)
    return one == other


def _samples(name: str, is_run: bool) -> Path:
    """Inside a run; not in a folder that is to be handed over."""
    if is_run:
        return Run(Path(name)).answers
    return Path(f"answers-{re.sub(r'[^A-Za-z0-9.-]+', '-', name).strip('-.')}.jsonl")


def report(score: Score, total: int, max_new_tokens: int) -> list[str]:
    """The score, each source's where there are several, and examples, wrong ones first."""
    of = f" of {total:,}, evenly spaced (--limit)" if total > score.rows else ""
    lines = [f"exact match {score.share:.1%}: {score.matched:,} of {score.rows:,} rows{of}"]
    parts = score.of_sources()
    for name, part in parts.items():
        if len(parts) > 1:
            lines.append(f"  {part.share:.1%}: {part.matched:,} of {part.rows:,} rows of {name}")
    if score.cut:
        lines.append(
            f"cut        {score.cut:,} answers were not complete after {max_new_tokens} tokens or "
            "the model's context (--max-new-tokens)"
        )
    for example in sorted(score.examples, key=lambda each: each.matched)[:SHOWN]:
        lines += _example(example)
    return lines


def _example(example: Example) -> list[str]:
    verdict = "right" if example.matched else "wrong"
    place = f" ({example.place})" if example.place else ""
    return [
        f"{verdict}{place}",
        f"  asked    {_line(example.prompt)}",
        f"  expected {_line(example.expected)}",
        f"  answer   {_line(example.answer)}{' [cut]' if example.cut else ''}",
    ]


def _line(text: str) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= WIDTH else f"{text[:WIDTH]} ..."
