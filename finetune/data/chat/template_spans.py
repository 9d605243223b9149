"""Find the characters of a rendered chat that belong to each message, for any chat template.

A chat template is a loop over messages. `MarkedTemplate` compiles the same template with a call at
the beginning of each iteration of each loop, and one after each loop. The calls write nothing: they
record the current length of the text, so the text is the one that transformers renders.

    template    {% for m in messages %}<|im_start|>{{ m.role }} ... {% endfor %}{% if add_gen...
    marked      {% for m in messages %}(0, m)<|im_start|>{{ m.role }} ... {% endfor %}(0){% if ...

A message is recognized by the identity of the loop's item or, if the loop runs over numbers, of the
object that the loop indexes with it (`messages[i]`). The text between two calls is what the
template wrote for that message. `{% generation %}` blocks are found in the same way. Loops in
macros and in `{% set %}` blocks are not marked, because their text is not written at that point.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Environment, meta, nodes

from finetune.errors import reading

Span = tuple[int, int]

TURN = "finetune_turn_mark"
FIXED_DATE = datetime(2024, 7, 26)
"""Date in every rendered chat, so that the same data gives the same bytes every day. It is the
default date of the Llama 3 templates."""
PROMPT = "add_generation_prompt"


@dataclass(frozen=True)
class Marked:
    """A rendered chat with the spans of its text, in characters."""

    text: str
    turns: dict[int, list[Span]]
    """Spans written for each message, by its index; messages without text are absent."""
    generations: list[Span]
    """Spans of the `{% generation %}` blocks."""
    nested: list[Span]
    """Spans written inside the span of another message, as results in the turn of their call."""
    has_generation: bool
    """Whether the template has `{% generation %}` blocks; False if one is inside a macro, whose
    text is not written at that point."""
    fixed_prompt: bool
    """Whether the template writes the same generation prompt after every question."""

    def own(self, spans: Iterable[Span]) -> list[Span]:
        """Parts of spans that are not written for another message inside them."""
        pieces = list[Span]()
        for span in spans:
            start, end = span
            for first, last in sorted(self.nested, key=lambda inside: (inside[0], -inside[1])):
                if start <= first and last <= end and (first, last) != span:
                    pieces.append((start, first))
                    start = last
            pieces.append((start, end))
        return [(start, end) for start, end in pieces if start < end]

    def written(self, message: int) -> str:
        """The text that the template wrote for a message and for no other one."""
        own = self.own(self.turns.get(message, ()))
        return "".join(self.text[start:end] for start, end in own)

    def outside(self, messages: Iterable[int]) -> str:
        """The text without what was written for these messages."""
        spans = sorted(span for number in messages for span in self.turns.get(number, ()))
        pieces, last = list[str](), 0
        for start, end in spans:
            pieces.append(self.text[last:start])
            last = max(last, end)
        return "\n".join([*pieces, self.text[last:]])

    @property
    def tail(self) -> str:
        """The text after the last message."""
        return self.text[
            max((end for spans in self.turns.values() for _, end in spans), default=0) :
        ]


def mark(
    template: str, messages: Sequence[dict[str, Any]], today: bool, variables: dict[str, Any]
) -> Marked:
    """Render a template with marks; see `MarkedTemplate.render`."""
    return _marked(template).render(messages, today=today, **variables)


@lru_cache(maxsize=16)
def _marked(template: str) -> "MarkedTemplate":
    return MarkedTemplate(template)


def compiled(template: str) -> Environment:
    """The sandbox in which transformers renders chats, with its filters and its generation tag.

    Uses a private function (transformers 5.17 to 5.23), so that templates have exactly the same
    restrictions as in transformers.

    Raises:
        FinetuneError: the template is not valid.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    with reading("chat template: it is not valid Jinja"):
        return _compile_jinja_template(template).environment


class MarkedTemplate:
    """A chat template that records which characters belong to which message."""

    def __init__(self, template: str) -> None:
        environment = compiled(template)
        tree = environment.parse(template)
        assert isinstance(tree, nodes.Template)
        self.fixed_prompt = _has_fixed_prompt(tree)
        blocks = sum(_is_generation(block) for block in tree.find_all(nodes.CallBlock))
        marker = _Marker()
        tree.body = marker.marked(tree.body)
        tree.set_environment(environment)
        self.has_generation = 0 < blocks == marker.generations
        self._template = environment.from_string(tree)

    def render(
        self, messages: Sequence[dict[str, Any]], *, today: bool = False, **variables: Any
    ) -> Marked:
        """Render with the template's variables; `today` uses the real date, as transformers does.

        Raises the template's jinja2.TemplateError and TypeError.
        """
        # Gemma's native form has results inside a message of the assistant.
        given = (message.get("tool_responses") for message in messages)
        results = [each for inside in given if isinstance(inside, list) for each in inside]
        notes = _Notes({id(item): number for number, item in enumerate([*messages, *results])})
        date = datetime.now() if today else FIXED_DATE
        variables[TURN] = notes
        variables["strftime_now"] = date.strftime
        pieces = list[str]()
        for piece in self._template.generate(messages=list(messages), **variables):
            pieces.append(piece)
            notes.length += len(piece)
        return Marked(
            "".join(pieces), notes.turns, notes.generations, notes.nested, self.has_generation,
            self.fixed_prompt,
        )  # fmt: skip


@dataclass
class _Notes:
    """Records the length of the text at each call."""

    numbers: dict[int, int]
    """Message index by the `id` of the message; higher ones for results inside messages."""
    length: int = 0
    """Characters written so far."""
    turns: dict[int, list[Span]] = field(default_factory=dict)
    generations: list[Span] = field(default_factory=list)
    nested: list[Span] = field(default_factory=list)
    begun: dict[Any, tuple[int, int]] = field(default_factory=dict)
    """Message of each loop's current iteration, and the start of its text."""

    def __mod__(self, noted: tuple[Any, ...]) -> None:
        mark, item, *lists = noted
        if mark == "<":
            self.generations.append((self.length, self.length))
            return
        if mark == ">":
            self.generations[-1] = (self.generations[-1][0], self.length)
            return
        number, start = self.begun.pop(mark, (-1, 0))
        if number >= 0 and start < self.length:
            self.turns.setdefault(number, []).append((start, self.length))
            if any(outer != number for outer, _ in self.begun.values()):
                self.nested.append((start, self.length))
        message = self.numbers.get(id(item))
        if message is None and type(item) is int:
            found = (self.numbers.get(id(each[item])) for each in lists if _holds(each, item))
            message = next((number for number in found if number is not None), None)
        if message is not None:
            self.begun[mark] = (message, self.length)


def _holds(value: Any, index: int) -> bool:
    return isinstance(value, list) and -len(value) <= index < len(value)


class _Marker:
    """Inserts calls into the statements that write directly to the output."""

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
    """Whether a block is a tag of an extension, unlike `{% call %}`; transformers has only one."""
    return isinstance(block.call.node, nodes.ExtensionAttribute)


def _call(line: int, *arguments: nodes.Expr) -> nodes.ExprStmt:
    """A call as `notes % arguments`, because the sandbox checks each call and takes its time."""
    item = () if arguments[1:] else (nodes.Const(None),)
    noted = nodes.Tuple([*arguments, *item], "load")
    statement = nodes.ExprStmt(nodes.Mod(nodes.Name(TURN, "load"), noted))
    return statement.set_lineno(line, override=True)


def _taken_by(loop: nodes.For) -> list[str]:
    """Names of the lists that a loop indexes with its own variable."""
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
    """Whether the generation prompt is the same text after every question.

    True if the parts of the template that read `add_generation_prompt` read no other variables
    except those that the template does not set.
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
