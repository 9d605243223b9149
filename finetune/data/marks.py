"""Which characters of a rendered chat each message wrote, for any chat template.

A chat template is a loop over messages. `MarkedTemplate` compiles the same template with a marker
at the beginning of each turn of each loop and one behind each loop:

    template    {% for m in messages %}<|im_start|>{{ m.role }} ... {% endfor %}{% if add_gen...
    marked      {% for m in messages %}[0.i]<|im_start|>{{ m.role }} ... {% endfor %}[/0]{% if ...

where i is the number of the message, by the identity of the object that the loop holds. The text
between two markers is what the template wrote for message i. Marks of `{% generation %}` blocks are
found in the same way. Without its markers the text must equal what transformers renders: the
caller compares the two.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import Environment, nodes

Span = tuple[int, int]

# Noncharacters of Unicode: they are no text, so neither a template nor data should hold them.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
MARK = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
TURN = "finetune_turn_mark"
FIXED_DATE = datetime(2024, 7, 26)
"""The date of every rendered chat, so that the same data gives the same bytes on every day. It is
the one that the Llama 3 templates fall back to."""


@dataclass(frozen=True)
class Marked:
    """A rendered chat with the spans of its text, in characters."""

    text: str
    turns: dict[int, list[Span]]
    """What was written for each message, by its number; messages without text are absent."""
    generations: list[Span]
    """The `{% generation %}` blocks."""

    def written(self, message: int) -> str:
        """What the template wrote for a message."""
        return "".join(self.text[start:end] for start, end in self.turns.get(message, ()))

    @property
    def tail(self) -> str:
        """The text behind the last message."""
        return self.text[
            max((end for spans in self.turns.values() for _, end in spans), default=0) :
        ]


class MarkedTemplate:
    """A chat template that says which characters belong to which message."""

    def __init__(self, template: str) -> None:
        environment = _chat_environment(template)
        tree = environment.parse(template)
        _mark_loops(tree)
        self.has_generation = _mark_generations(tree)
        tree.set_environment(environment)
        self.reads_the_date = "strftime_now" in template
        self._template = environment.from_string(tree)

    def render(
        self, messages: Sequence[dict[str, Any]], *, today: bool = False, **variables: Any
    ) -> Marked:
        """Render with the template's variables; `today` takes the real date, as transformers does.

        Raises jinja2.TemplateError and TypeError as the template does.
        """
        numbers = {id(message): number for number, message in enumerate(messages)}
        date = datetime.now() if today else FIXED_DATE

        def turn_mark(loop: int, item: Any) -> str:
            return f"{OPEN}{loop}.{numbers.get(id(item), '')}{CLOSE}"

        variables[TURN] = turn_mark
        variables["strftime_now"] = date.strftime
        return _read_marks(self._template.render(messages=list(messages), **variables))


def _chat_environment(template: str) -> Environment:
    """The sandbox in which transformers renders chats, with its filters and its generation tag.

    It is reached through a private function (transformers 5.17 to 5.23), because a sandbox of our
    own would be a second answer to what a template may do.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(template).environment


def _mark_loops(tree: nodes.Template) -> None:
    """Put `[loop.message]` at the beginning of each turn of a loop, and `[/loop]` behind it."""
    loops = 0
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for field, children in list(parent.iter_fields()):
            if not isinstance(children, list):
                continue
            marked: list[Any] = []
            for child in children:
                marked.append(child)
                # `for key, value in ...` does not loop over messages.
                if isinstance(child, nodes.For) and isinstance(child.target, nodes.Name):
                    child.body.insert(0, _turn_mark(loops, child.target.name, child.lineno))
                    marked.append(_literal(f"/{loops}", child.lineno))
                    loops += 1
            setattr(parent, field, marked)


def _mark_generations(tree: nodes.Template) -> bool:
    """Put `[<]` and `[>]` round the text of each `{% generation %}` block; whether there is one."""
    blocks = [block for block in tree.find_all(nodes.CallBlock) if _is_generation(block)]
    for block in blocks:
        block.body = [_literal("<", block.lineno), *block.body, _literal(">", block.lineno)]
    return bool(blocks)


def _is_generation(block: nodes.CallBlock) -> bool:
    """A tag of an extension, unlike `{% call %}`; transformers has this one."""
    return isinstance(block.call.node, nodes.ExtensionAttribute)


def _turn_mark(loop: int, target: str, line: int) -> nodes.Output:
    function = nodes.Name(TURN, "load", lineno=line)
    arguments = [nodes.Const(loop, lineno=line), nodes.Name(target, "load", lineno=line)]
    return nodes.Output([nodes.Call(function, arguments, [], None, None, lineno=line)], lineno=line)


def _literal(mark: str, line: int) -> nodes.Output:
    return nodes.Output([nodes.TemplateData(f"{OPEN}{mark}{CLOSE}", lineno=line)], lineno=line)


def _read_marks(text: str) -> Marked:
    """Take the markers out of a text and turn them into spans of what is left."""
    pieces, position, last = list[str](), 0, 0
    turns: dict[int, list[Span]] = {}
    generations: list[Span] = []
    begun: dict[str, tuple[str, int]] = {}  # loop -> (message, where its text begins)
    for match in MARK.finditer(text):
        pieces.append(text[last : match.start()])
        position += len(pieces[-1])
        last = match.end()
        mark = match[1]
        if mark == "<":
            generations.append((position, position))
        elif mark == ">":
            generations[-1] = (generations[-1][0], position)
        else:
            loop, _, message = mark.removeprefix("/").partition(".")
            ended, start = begun.pop(loop, ("", position))
            if ended and start < position:
                turns.setdefault(int(ended), []).append((start, position))
            if not mark.startswith("/"):
                begun[loop] = (message, position)
    pieces.append(text[last:])
    return Marked("".join(pieces), turns, generations)
