"""Choose a chat template: the tokenizer's own, one of its named ones, a built-in one, or a file.

As in transformers, a tokenizer with named templates renders rows with tools with `tool_use`, if it
has that template, and all other rows with the chosen one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import meta, nodes

from finetune.data.chat.template_limits import within_limits
from finetune.data.chat.template_spans import compiled
from finetune.errors import FinetuneError, did_you_mean, reading, refuse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
NEEDED = {"chatml": ("<|im_start|>", "<|im_end|>"), "plain": ()}
"""Tokens that a built-in template needs."""
BUILT_IN = tuple(NEEDED)
TOOL_USE = "tool_use"
"""Name of the template that transformers uses for conversations with tools."""
FROM_THE_ROW = {"messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception"}
"""Template variables that a recipe cannot set."""


@dataclass(frozen=True)
class Chosen:
    """The templates of a tokenizer for conversations."""

    template: str | None
    """Jinja source; None for a tokenizer without a template."""
    tool_template: str | None
    """Template for conversations with tools, if the tokenizer has a separate one."""
    saved: str | dict[str, str] | None
    """Template of the saved tokenizer, with which transformers renders as in training."""


def choose(
    tokenizer: "PreTrainedTokenizerFast", name: str | None, variables: Mapping[str, Any]
) -> Chosen:
    """Choose templates for the recipe's `model.chat_template` and `model.chat_template_kwargs`.

    Raises FinetuneError for an unknown name, a file that cannot be read, a tokenizer without the
    tokens of a built-in template, and variables that no template reads.
    """
    own = tokenizer.chat_template or None
    named = dict(own) if isinstance(own, dict) else {}
    if name is None:
        template = _default(named) if named else own
    elif name in named:
        template = named[name]
    elif name in BUILT_IN:
        template, named = _built_in(tokenizer, name), {}
    else:
        template, named = _template_file(name, list(named)), {}
    assert template is None or isinstance(template, str)
    tool_template = named.get(TOOL_USE) if template is not None else None
    if variables:
        used = [each for each in (template, tool_template) if each is not None]
        check_variables(used, variables, "model.chat_template_kwargs")
    return Chosen(template, tool_template, _saved(template, named, variables))


def _default(named: dict[str, str]) -> str:
    if "default" in named:
        return named["default"]
    raise FinetuneError(
        f"model.chat_template: the tokenizer has the chat templates {_listed(named)} and none "
        f"called 'default'; choose one of them, such as model.chat_template={sorted(named)[0]}"
    )


def _saved(
    template: str | None, named: dict[str, str], variables: Mapping[str, Any]
) -> str | dict[str, str] | None:
    if template is None:
        return None
    if not named:
        return with_defaults(template, variables)
    saved = {**named, "default": template}
    return {name: with_defaults(each, variables) for name, each in saved.items()}


def adds_bos(tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Whether the tokenizer adds its BOS to every text."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("")["input_ids"][:1] == [bos]


def added_before(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Token ids that the tokenizer adds before every text, mostly its BOS; empty if none."""
    alone = tokenizer("a", add_special_tokens=False)["input_ids"]
    if not alone:  # a vocabulary without this letter
        return [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    ids = tokenizer("a")["input_ids"]
    starts = (at for at in range(len(ids)) if ids[at : at + len(alone)] == alone)
    return list(ids[: next(starts, 0)])


@lru_cache(maxsize=8)
def fewest_tokens(tokenizer: "PreTrainedTokenizerFast") -> float:
    """A lower bound for the tokens of each character of a text."""
    # Unicode normalization merges at most four characters into one.
    return 1 / (4 * max(map(len, tokenizer.get_vocab())))


def suitable(tokenizer: "PreTrainedTokenizerBase") -> str:
    """The built-in template for a tokenizer without one: the first whose tokens it has."""
    vocabulary = tokenizer.get_added_vocab()
    return next(name for name, needed in NEEDED.items() if vocabulary.keys() >= set(needed))


def _built_in(tokenizer: "PreTrainedTokenizerFast", name: str) -> str:
    vocabulary = tokenizer.get_added_vocab()
    missing = [token for token in NEEDED[name] if token not in vocabulary]
    if missing:
        raise FinetuneError(
            f"model.chat_template: '{name}' needs {' and '.join(missing)}, which the tokenizer "
            "does not have as tokens; use 'plain'"
        )
    if name == "plain" and tokenizer.eos_token is None:
        raise FinetuneError(
            "model.chat_template: 'plain' needs an end-of-sequence token, the tokenizer has none"
        )
    bos = "{{- bos_token }}" if adds_bos(tokenizer) else ""
    return bos + (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def _template_file(name: str, named: list[str]) -> str:
    """Read a template file, without a byte order mark."""
    with reading(f"model.chat_template: {name} cannot be read"):
        if Path(name).is_file():
            return Path(name).read_text(encoding="utf-8-sig")
    of_tokenizer = f", nor one of the tokenizer's ({_listed(named)})" if named else ""
    raise FinetuneError(
        f"model.chat_template: '{name}' is neither a file nor a built-in template"
        f"{of_tokenizer}{did_you_mean(name, (*BUILT_IN, *named))} "
        f"(built in: {', '.join(BUILT_IN)})"
    )


def _listed(names: Mapping[str, str] | list[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))


# Variables.


def check_variables(templates: list[str], variables: Mapping[str, Any], where: str) -> None:
    """Refuse variables that no template reads, and variables that the data sets.

    Args:
        templates: Templates that are rendered.
        variables: Variables of a recipe or a row.
        where: Field or column of the variables, for errors.
    """
    reserved = sorted(FROM_THE_ROW & set(variables))
    problems = [f"{where}: '{name}' is set by the data, not by a variable" for name in reserved]
    if not templates:
        problems.append(f"{where}: the tokenizer has no chat template to read them")
    else:
        read = set[str]().union(*(template_variables(each) for each in templates))
        listed = ", ".join(sorted(read)) or "none"
        problems += [
            f"{where}: the chat template does not read '{name}'{did_you_mean(name, read)}; the "
            f"variables that it reads: {listed}"
            for name in sorted(set(variables) - read - FROM_THE_ROW)
        ]
    refuse(problems)


def template_variables(template: str) -> set[str]:
    """Variables that a template reads and does not set itself, except those from the row."""
    return within_limits(_read_variables, template)


def _read_variables(template: str) -> set[str]:
    tree = compiled(template).parse(template)
    read = meta.find_undeclared_variables(tree) - FROM_THE_ROW
    # A variable that a template sets without a test for its existence is local.
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    asked = {
        test.node.name
        for test in tree.find_all((nodes.Test, nodes.Filter))
        if test.name in ("defined", "undefined", "none", "default", "d")
        and isinstance(test.node, nodes.Name)
    }
    return read - (stored - asked)


def text_of_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] = (),
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    *,
    header: bool = False,
) -> str:
    """A conversation as transformers renders it, by default with the tokenizer's own template.

    With `header`, the text ends with the generation prompt.

    Raises:
        FinetuneError: the template refuses the conversation, or exceeds its limits.
    """
    values = {**tokenizer.special_tokens_map, **(variables or {}), "add_generation_prompt": header}
    with reading("chat template: it refuses this conversation"):
        chosen = tokenizer.get_chat_template(template, list(tools) or None)
        return within_limits(_text_of_chat, chosen, list(messages), list(tools) or None, values)


def _text_of_chat(
    template: str, messages: list[Any], tools: list[Any] | None, values: dict[str, Any]
) -> str:
    from transformers import PreTrainedTokenizerBase

    tokenizer: Any = PreTrainedTokenizerBase()  # without a vocabulary, which no template reads
    return tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=template, tokenize=False, **values
    )


IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def with_defaults(template: str, variables: Mapping[str, Any]) -> str:
    """Add default values for variables to a template.

    transformers, vLLM and llama.cpp then render as in training, and callers can still set other
    values. Jinja, as configured by transformers, removes the newline after the comment, so the
    template still begins at the start of a line.
    """
    read = template_variables(template) if variables else set[str]()
    lines = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}"
        for name, value in variables.items()
        if name in read and IDENTIFIER.fullmatch(name)
    ]
    return "".join(lines) + "{#- values of the training #}\n" + template if lines else template


def _literal(value: Any) -> str:
    """A JSON value as a Jinja expression."""
    match value:
        case bool():
            return "true" if value else "false"
        case None:
            return "none"
        case list() | tuple():
            return f"[{', '.join(map(_literal, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{_literal(k)}: {_literal(v)}' for k, v in value.items())}}}"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case _:
            return repr(value)
