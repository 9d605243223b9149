"""Export for Ollama: a GGUF file and a Modelfile with template, stop tokens and context."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from finetune.checkpoints.stop_tokens import all_ends
from finetune.data.chat.chat_templates import adds_bos, text_of_chat
from finetune.errors import FinetuneError
from finetune.exporters import gguf
from finetune.exporters.source import Source
from finetune.inference.load import base_config
from finetune.models.load_checks import context_length
from finetune.reports.card import Kind

Messages = Sequence[dict[str, str]]

USER, ANSWER, AGAIN, SYSTEM = (f"\u2042{word}\u2042" for word in ("ask", "say", "more", "rule"))
"""Message contents that no template contains."""

PROBES: tuple[Messages, ...] = (
    [{"role": "user", "content": "a b"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ],
)
"""Conversations that Ollama's template must render as in training."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """A chat template that only adds fixed text around each message."""

    opening: str
    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    header: str
    """Text before the content of an answer."""


def check(source: Source) -> None:
    """Reject models that Ollama cannot run.

    Raises:
        FinetuneError: as `gguf.check`, or the chat template is not a concatenation of messages,
            and cannot be written as an Ollama template.
    """
    go_template(source.tokenizer)
    gguf.check(source)


def write(source: Source, folder: Path) -> Kind:
    """Write a GGUF file and a `Modelfile`, after `check`."""
    tokenizer = source.tokenizer
    template = go_template(tokenizer)
    kind = gguf.write(source, folder)
    (weights,) = folder.glob("*.gguf")
    assert source.generation is not None, "a score head does not generate text"
    ids = all_ends(source.generation.eos_token_id)
    stops = [str(tokenizer.convert_ids_to_tokens(id)) for id in ids]
    text = modelfile(weights.name, template, stops, context_length(base_config(source.recipe)))
    (folder / "Modelfile").write_text(text, encoding="utf-8")
    return kind


def modelfile(weights: str, template: str | None, stops: Sequence[str], context: int | None) -> str:
    lines = [f"FROM ./{weights}"]
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    if context is not None:
        lines.append(f"PARAMETER num_ctx {context}")
    lines.append("PARAMETER temperature 0")
    return "\n".join(lines) + "\n"


def go_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The tokenizer's chat template as an Ollama (Go) template, checked by rendering both.

    The template has no BOS if the tokenizer adds it: llama.cpp then adds it too.

    Returns:
        None without a chat template.

    Raises:
        FinetuneError: the template does more than add text around each message.
    """
    if tokenizer.chat_template is None:
        return None
    problem = "--format ollama: the chat template does more than add text around each message"
    try:
        parts = _parts(tokenizer)
        template = None if parts is None else _written(parts)
        wrong = next((each for each in PROBES if not _same(tokenizer, template, each)), None)
    except FinetuneError as error:
        raise FinetuneError(f"{problem}: {error}; export it as gguf") from None
    if template is None or wrong is not None:
        raise FinetuneError(f"{problem}, and Ollama has no Jinja; export it as gguf")
    return template


def _parts(tokenizer: PreTrainedTokenizerBase) -> Parts | None:
    user = {"role": "user", "content": USER}
    answered = [user, {"role": "assistant", "content": ANSWER}]
    alone = _text(tokenizer, [user], header=False)
    asked = _text(tokenizer, [user], header=True)
    said = _text(tokenizer, answered, header=False)
    further = _text(tokenizer, [*answered, {"role": "user", "content": AGAIN}], header=False)
    ruled = _text(tokenizer, [{"role": "system", "content": SYSTEM}, user], header=False)
    before, after_user = _around(alone, USER)
    header = asked.removeprefix(alone)
    between, after_answer = _around(said.removeprefix(before + USER), ANSWER)
    next_user = _around(further.removeprefix(said), AGAIN)[0]
    opening = before.removesuffix(next_user)
    system = _around(ruled.removeprefix(opening), SYSTEM)
    after_system = _around(system[1], USER)[0].removesuffix(next_user)
    return Parts(
        opening=opening,
        system=(system[0], after_system),
        user=(next_user, after_user),
        assistant=(between.removeprefix(after_user), after_answer),
        header=header,
    )


def _around(text: str, word: str) -> tuple[str, str]:
    before, _, after = text.partition(word)
    return before, after


def _written(parts: Parts) -> str | None:
    """Parts as a Go template; None if a text contains template syntax."""
    pieces = [parts.opening, *parts.system, *parts.user, *parts.assistant, parts.header]
    if any("{{" in piece or '"""' in piece for piece in pieces):
        return None
    roles = {"system": parts.system, "user": parts.user, "assistant": parts.assistant}
    cases = [
        f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}{{{{ '
        for role, (before, after) in roles.items()
    ]
    inner = "{{ " + "else ".join(cases) + "end }}"
    return f"{parts.opening}{{{{ range .Messages }}}}{inner}{{{{ end }}}}{parts.header}"


def render(template: str, messages: Messages) -> str:
    """Render a template of `go_template` as Ollama does."""
    found = re.fullmatch(
        r"(.*)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}(.*)", template, re.DOTALL
    )
    assert found is not None
    opening, inner, header = found.groups()
    case = r'if eq \.Role "(\w+)" \}\}(.*?)\{\{ \.Content \}\}(.*?)\{\{ (?=else|end)'
    roles = {role: (before, after) for role, before, after in re.findall(case, inner, re.DOTALL)}
    texts = [roles[each["role"]][0] + each["content"] + roles[each["role"]][1] for each in messages]
    return opening + "".join(texts) + header


def _same(tokenizer: PreTrainedTokenizerBase, template: str | None, messages: Messages) -> bool:
    wanted = _text(tokenizer, messages, header=True)
    return template is not None and render(template, messages) == wanted


def _text(tokenizer: PreTrainedTokenizerBase, messages: Messages, header: bool) -> str:
    """Rendered messages, without the BOS if llama.cpp adds it."""
    text = text_of_chat(tokenizer, messages, header=header)
    return text.removeprefix(str(tokenizer.bos_token)) if adds_bos(tokenizer) else text
