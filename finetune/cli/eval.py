"""`finetune eval`: evaluate a model, and compare it with another one."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.cli import options
from finetune.errors import FinetuneError, one_line, refuse

if TYPE_CHECKING:
    from finetune.evaluation.evaluation import Request

SUMMARY = "evaluate a model on held-out rows, against its base or another model"
SHOWN = 3
"""Number of printed examples."""
WIDTH = 200
"""Maximum characters of a printed text."""
PASSED, FAILED = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    table = """
    model RUN  run directory, folder with a model, hub name, or URL
    --against RUN  base, another run, folder or URL, or none; by default an adapter's base
    --step STEP  of a run: a checkpoint's step, best or last
    --model-name NAME  for a URL: the model's name there
    --against-model-name NAME  the same for --against
    --key-file PATH  file with the API key of the URLs
    --require BOUNDS  bounds, such as 'exact>=0.8,forgetting<=0.02'
    --name NAME  name of the folder eval/NAME to write
    --output PATH  folder to write instead of eval/NAME
    --json  print results.json
    """
    rows = """
    --rows-of RUN  run whose held-out rows are used
    --data DATA  data file, instead of held-out rows of a run
    --format NAME=messages  format of --data
    --limit N  rows, evenly spaced; by default 200 are answered
    """
    measures = """
    --metrics NAMES  comma-separated names; by default those that fit
    --max-new-tokens N=256  most tokens of an answer
    --batch-rows N=8  rows that are answered at once
    --schema PATH  JSON schema of the answers
    --database PATH  SQLite file of the queries
    --run-code  run code in answers, with limits
    --code-samples N=1  for pass@k
    --general-text PATH  text file to measure forgetting on
    --judge URL  URL of a model that judges which answer is better
    --judge-model NAME  name of the judge there; by default the first
    --rewards NAMES  score answers with runs of reward models, built-in ones or module:function
    --tasks NAMES  tasks of lm-evaluation-harness: comma-separated names or YAML files
    """
    options.add(parser, table)
    options.add(parser.add_argument_group("rows"), rows)
    options.add(parser.add_argument_group("measures"), measures)


def run(arguments: argparse.Namespace) -> int:
    request = _request(arguments)
    from finetune.checkpoints.copies import share
    from finetune.evaluation import results
    from finetune.evaluation.evaluation import evaluate
    from finetune.runs.run import Run

    options.without_bars()
    if arguments.output is not None:
        results.refuse_foreign(arguments.output)
    found = evaluate(request)
    folder = arguments.output or results.folder_of(found, arguments.name)
    written = results.write(found, folder)
    if (Path(arguments.model) / "recipe.json").is_file():
        share(Run(Path(arguments.model)))
    if arguments.json:
        print(json.dumps(written, indent=2, ensure_ascii=False))
    else:
        _print_results(written, results.rows_of(found), folder)
    return PASSED if all(each["passed"] for each in written["gate"]) else FAILED


def _request(arguments: argparse.Namespace) -> "Request":
    _check(arguments)
    from finetune.evaluation import gate
    from finetune.evaluation.evaluation import Request
    from finetune.evaluation.generations import Asking
    from finetune.evaluation.judge import Judge
    from finetune.evaluation.metrics.metric import Settings
    from finetune.evaluation.tasks import find_tasks
    from finetune.inference.endpoint import open_endpoint
    from finetune.recipe import Data
    from finetune.rewards import Reward

    key = _key(arguments.key_file)
    judged = None
    if arguments.judge is not None:
        judged = Judge(open_endpoint(arguments.judge, arguments.judge_model, key))
    tasks = None
    if arguments.tasks:
        asked = (arguments.limit, arguments.max_new_tokens, arguments.batch_rows)
        tasks = find_tasks(_words(arguments.tasks), *asked)
    return Request(
        subject=arguments.model,
        against=arguments.against,
        rows_of=arguments.rows_of,
        data=None if arguments.data is None else Data(arguments.data, arguments.format),
        limit=arguments.limit,
        step=_step(arguments.step),
        metrics=_words(arguments.metrics),
        settings=Settings(arguments.run_code, arguments.database, arguments.schema),
        asking=Asking(arguments.max_new_tokens, arguments.batch_rows),
        code_samples=arguments.code_samples,
        served=arguments.model_name,
        against_served=arguments.against_model_name,
        key=key,
        general_text=arguments.general_text,
        judge=judged,
        rewards=tuple(Reward(name) for name in _words(arguments.rewards)),
        tasks=tasks,
        require=tuple(gate.bounds(arguments.require)) if arguments.require else (),
    )


def _check(arguments: argparse.Namespace) -> None:
    """Refuse mistakes that can be found before slow imports."""
    from finetune.checkpoints.copies import bring
    from finetune.runs.run import Run, open_run

    if arguments.rows_of is not None:
        open_run(arguments.rows_of)
    problems = [
        f"--{name.replace('_', '-')} {path}: no such file"
        for name in ("schema", "database", "general_text", "key_file")
        if (path := getattr(arguments, name)) is not None and not path.is_file()
    ]
    is_run = (Path(arguments.model) / "recipe.json").is_file()
    if is_run and (arguments.step or "").isdecimal():
        bring(Run(Path(arguments.model)), int(arguments.step))
    has_rows = arguments.rows_of or arguments.data or arguments.tasks
    if not has_rows and not is_run:
        problems.append(
            f"{arguments.model}: not a run directory (it has no recipe.json); for another model "
            "give --rows-of RUN, or --data FILE and --format"
        )
    refuse(problems)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (text or "").split(",")))


def _step(word: str | None) -> Any:
    if word is None or word in ("best", "last"):
        return word
    if not word.isdecimal():
        raise FinetuneError(f"--step: got '{word}', expected a number, best or last")
    return int(word)


def _key(file: Path | None) -> str | None:
    return None if file is None else file.read_text(encoding="utf-8").strip()


def _print_results(results: dict[str, Any], samples: list[dict[str, Any]], folder: Path) -> None:
    from finetune.reports.evaluation_page import ORDER, terminal

    for line in terminal(results):
        print(line)
    by_change = sorted(samples, key=lambda row: ORDER.index(row["change"]))
    for row in by_change[:SHOWN]:
        print("\n".join(_example(row)))
    for each in results["gate"]:
        print(f"{'passed' if each['passed'] else 'FAILED'}     {each['said']}")
    print(f"page       {folder / 'index.html'}")


def _example(row: dict[str, Any]) -> list[str]:
    place = f" ({row['place']})" if row["place"] else ""
    lines = [f"{row['change'] or 'answer'}{place}", f"  asked    {_line(row['prompt'])}"]
    lines.append(f"  expected {_line(row['expected'])}")
    for side, label in (("before", "before"), ("after", "after" if "before" in row else "answer")):
        if side in row:
            cut = " [cut]" if row[f"{side}_finish"] == "length" else ""
            lines.append(f"  {label:<8} {_line(row[side])}{cut}")
    return lines


def _line(text: str) -> str:
    text = one_line(text.replace("\n", "\\n"))  # models write control characters, too
    return text if len(text) <= WIDTH else f"{text[:WIDTH]} ..."
