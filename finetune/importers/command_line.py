"""Read a training command of TRL or ms-swift, given as words or saved in a script."""

import re
import shlex
from pathlib import PurePath
from typing import Any

from finetune import catalog
from finetune.errors import FinetuneError
from finetune.process.yaml_text import read_yaml

PROGRAMS = ("trl", "swift")
"""Programs whose second word is the method."""
OTHERS = ("export", "infer", "rollout", "deploy", "eval", "app", "sample", "env", "vllm-serve")
"""Second words that do not train."""
COMMAND, PROGRAM = "<command>", "<program>"
"""Keys of what was run, beside its options."""


def options_of(text: str, where: str) -> dict[str, Any]:
    """The options of the first training command of a text, with its program and method.

    Variables that the text sets, and divisions by `expr`, are replaced by their values.

    Raises:
        FinetuneError: the text has no such command.
    """
    lines = re.sub(r"\\\s*\n", " ", text).splitlines()
    known = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=([\w./-]+)", "\n".join(lines), re.M))
    for line in lines:
        try:
            words = shlex.split("" if line.lstrip().startswith("#") else _filled(line, known))
        except ValueError:  # a quote that another line closes
            continue
        for at, word in enumerate(words[:-1]):
            stem = PurePath(word).stem
            if stem in PROGRAMS and words[at + 1] not in OTHERS:
                return _options(words[at + 2 :]) | _named(words[:at], stem, words[at + 1])
            if word.endswith(".py") and words[at + 1].startswith("--"):
                return _options(words[at + 1 :]) | _named(words[:at], "trl", stem)
    raise FinetuneError(
        f"{where}: no training command: expected one such as trl sft --model_name_or_path ..., or "
        "swift sft --model ..."
    )


def _filled(line: str, known: dict[str, str]) -> str:
    line = re.sub(r"\$\{?(\w+)\}?", lambda name: known.get(name[1], name[0]), line)
    divided = r"\$\(expr (\d+) / (\d+)\)|\$\(\((\d+) ?/ ?(\d+)\)\)"
    return re.sub(divided, lambda m: str(int(m[1] or m[3]) // int(m[2] or m[4])), line)


def _named(before: list[str], program: str, command: str) -> dict[str, Any]:
    """The program and its method, with the number of processes that the line starts."""
    found = re.search(r"(?:NPROC_PER_NODE=|--num_processes[ =])(\d+)", " ".join(before))
    processes = {"num_processes": int(found[1])} if found else {}
    return {PROGRAM: program, COMMAND: command, **processes}


def _options(words: list[str]) -> dict[str, Any]:
    given = dict[str, list[str]]()
    key = ""
    for word in words:
        if word in ("&&", "||", ";", "|", ">", "2>&1") or word.startswith("#"):
            break
        if word.startswith("--"):
            key, equals, value = word[2:].replace("-", "_").partition("=")
            given[key] = [value] if equals else []
        elif key:
            given[key].append(word)
    found = dict[str, Any]()
    for name, texts in given.items():
        values = [_value(each) for each in texts]
        if name.startswith("no_") and not values:
            name, values = name.removeprefix("no_"), [False]
        found[name] = values[0] if len(values) == 1 else values or True
    return found


def _value(text: str) -> Any:
    try:
        return read_yaml(text, catalog.ExactNumbers)
    except ValueError:
        return text
