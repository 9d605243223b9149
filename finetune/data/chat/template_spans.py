"""Find which characters of a rendered chat each message wrote, for any chat template.

A chat template is a loop over messages. `MarkedTemplate` compiles the same template with a call at
the beginning of each turn of each loop and one behind each loop. The calls write nothing: they note
how much of the text is there already, so the text is the one that transformers renders.

    template    {% for m in messages %}<|im_start|>{{ m.role }} ... {% endfor %}{% if add_gen...
    marked      {% for m in messages %}(0, m)<|im_start|>{{ m.role }} ... {% endfor %}(0){% if ...

The number of a message is found by the identity of the object that the loop holds, or, where the
loop counts numbers, of the object that the loop takes by this number (`messages[i]`). The text
between two calls is what the template wrote for a message. `{% generation %}` blocks are found in
the same way. Loops in macros and in `{% set %}` blocks are not marked: what they write goes
elsewhere first.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jinja2 import Environment, meta, nodes

Span = tuple[int, int]

TURN = "finetune_turn_mark"
FIXED_DATE = datetime(2024, 7, 26)
"""The date of every rendered chat, so that the same data gives the same bytes on every day. It is
the one that the Llama 3 templates fall back to."""
PROMPT = "add_generation_prompt"


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

    def outside(self, messages: Iterable[int]) -> str:
        """The text less what was written for these messages."""
        spans = sorted(span for number in messages for span in self.turns.get(number, ()))
        pieces, last = list[str](), 0
        for start, end in spans:
            pieces.append(self.text[last:start])
            last = max(last, end)
        return "\n".join([*pieces, self.text[last:]])

    @property
    def tail(self) -> str:
        """The text behind the last message."""
        return self.text[
            max((end for spans in self.turns.values() for _, end in spans), default=0) :
        ]


class MarkedTemplate:
    """A chat template that notes which characters belong to which message."""

    def __init__(self, template: str) -> None:
        environment = _chat_environment(template)
        tree = environment.parse(template)
        assert isinstance(tree, nodes.Template)
        self.fixed_prompt = _has_fixed_prompt(tree)
        blocks = sum(_is_generation(block) for block in tree.find_all(nodes.CallBlock))
        marker = _Marker()
        tree.body = marker.marked(tree.body)
        tree.set_environment(environment)
        self.has_generation = 0 < blocks == marker.generations
        """Blocks within macros are written elsewhere first: then none of them counts."""
        self.has_loops = marker.loops > 0
        self.reads_the_date = "strftime_now" in template
        self._template = environment.from_string(tree)

    def render(
        self, messages: Sequence[dict[str, Any]], *, today: bool = False, **variables: Any
    ) -> Marked:
        """Render with the template's variables; `today` takes the real date, as transformers does.

        Raises jinja2.TemplateError and TypeError as the template does.
        """
        notes = _Notes({id(message): number for number, message in enumerate(messages)})
        date = datetime.now() if today else FIXED_DATE
        variables[TURN] = notes
        variables["strftime_now"] = date.strftime
        pieces = list[str]()
        for piece in self._template.generate(messages=list(messages), **variables):
            pieces.append(piece)
            notes.length += len(piece)
        return Marked("".join(pieces), notes.turns, notes.generations)


@dataclass
class _Notes:
    """Where the text was when each call was made."""

    numbers: dict[int, int]
    """Numbers of the messages by their identity."""
    length: int = 0
    """Characters that are written so far."""
    turns: dict[int, list[Span]] = field(default_factory=dict)
    generations: list[Span] = field(default_factory=list)
    begun: dict[Any, tuple[int, int]] = field(default_factory=dict)
    """The message of each loop's present turn, and where its text begins."""

    def __call__(self, mark: Any, item: Any = None, *lists: Any) -> None:
        if mark == "<":
            self.generations.append((self.length, self.length))
            return
        if mark == ">":
            self.generations[-1] = (self.generations[-1][0], self.length)
            return
        number, start = self.begun.pop(mark, (-1, 0))
        if number >= 0 and start < self.length:
            self.turns.setdefault(number, []).append((start, self.length))
        message = self.numbers.get(id(item))
        if message is None and type(item) is int:
            found = (self.numbers.get(id(each[item])) for each in lists if _holds(each, item))
            message = next((number for number in found if number is not None), None)
        if message is not None:
            self.begun[mark] = (message, self.length)


def _holds(value: Any, index: int) -> bool:
    return isinstance(value, list) and -len(value) <= index < len(value)


def _chat_environment(template: str) -> Environment:
    """The sandbox in which transformers renders chats, with its filters and its generation tag.

    It is reached through a private function (transformers 5.17 to 5.23), because a sandbox of our
    own would be a second answer to what a template may do.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(template).environment


class _Marker:
    """Puts calls into the statements whose text goes straight to the end of the chat."""

    def __init__(self) -> None:
        self.loops = 0
        self.generations = 0

    def marked(self, body: list[Any]) -> list[Any]:
        result: list[Any] = []
        for node in body:
            result += self._marked(node)
        return result

    def _marked(self, node: Any) -> list[Any]:
        match node:
            case nodes.For(recursive=False):
                node.body, node.else_ = self.marked(node.body), self.marked(node.else_)
                # `for key, value in ...` does not loop over messages.
                if isinstance(node.target, nodes.Name):
                    number, line = self.loops, node.lineno
                    self.loops += 1
                    lists = [nodes.Name(name, "load") for name in _taken_by(node)]
                    target = nodes.Name(node.target.name, "load")
                    node.body.insert(0, _call(line, nodes.Const(number), target, *lists))
                    return [node, _call(line, nodes.Const(number))]
            case nodes.If():
                node.body, node.else_ = self.marked(node.body), self.marked(node.else_)
                for other in node.elif_:
                    other.body = self.marked(other.body)
            case nodes.With() | nodes.Scope() | nodes.ScopedEvalContextModifier():
                node.body = self.marked(node.body)
            case nodes.CallBlock() if _is_generation(node):
                self.generations += 1
                line = node.lineno
                return [_call(line, nodes.Const("<")), node, _call(line, nodes.Const(">"))]
            case _:
                pass
        return [node]


def _is_generation(block: nodes.CallBlock) -> bool:
    """A tag of an extension, unlike `{% call %}`; transformers has this one."""
    return isinstance(block.call.node, nodes.ExtensionAttribute)


def _call(line: int, *arguments: nodes.Expr) -> nodes.ExprStmt:
    function = nodes.Name(TURN, "load")
    call = nodes.Call(function, list(arguments), [], None, None)
    statement = nodes.ExprStmt(call)
    for node in (statement, call, function, *arguments):
        node.set_lineno(line)
    return statement


def _taken_by(loop: nodes.For) -> list[str]:
    """Names of the lists from which a loop takes an element by its own variable."""
    assert isinstance(loop.target, nodes.Name)
    variable = loop.target.name
    stored = {each.name for each in loop.find_all(nodes.Name) if each.ctx == "store"}
    taken = {
        item.node.name: None
        for item in loop.find_all(nodes.Getitem)
        if isinstance(item.node, nodes.Name)
        and isinstance(item.arg, nodes.Name)
        and item.arg.name == variable
    }
    return [name for name in taken if name not in stored]


# The generation prompt.


def _has_fixed_prompt(tree: nodes.Template) -> bool:
    """Whether the generation prompt is the same text behind every question.

    It is where each part of the template that looks at `add_generation_prompt` reads nothing else
    but variables which the template does not set.
    """
    free = meta.find_undeclared_variables(tree) - {"messages", "tools", "documents"}
    stored = {each.name for each in tree.find_all(nodes.Name) if each.ctx == "store"}
    allowed = (free - stored) | {PROMPT}
    parts = list(_parts_with_prompt(tree))
    inside = sum(_looks_at_prompt(each) for part in parts for each in part.find_all(nodes.Name))
    everywhere = sum(_looks_at_prompt(each) for each in tree.find_all(nodes.Name))
    names = {each.name for part in parts for each in part.find_all(nodes.Name)}
    return inside == everywhere and names <= allowed


def _parts_with_prompt(node: nodes.Node) -> Iterator[nodes.Node]:
    """The outermost statements that contain `add_generation_prompt`."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.If | nodes.CondExpr | nodes.For):
            if any(_looks_at_prompt(each) for each in child.find_all(nodes.Name)):
                yield child
        else:
            yield from _parts_with_prompt(child)


def _looks_at_prompt(name: nodes.Name) -> bool:
    return name.name == PROMPT and name.ctx == "load"
