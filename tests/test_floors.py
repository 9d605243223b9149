"""Imports go down the floors only; what has no torch stays so; modules stay small."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "finetune"
FLOORS: list[set[str]] = [
    {"errors", "quiet", "cache", "interpreter", "streams", "yaml_text"},
    {"recipe", "backend", "run", "planner"},
    {
        "methods", "catalog", "data", "attention", "model", "quantization", "losses", "optim",
        "accelerator", "engine", "fragments", "checkpoint", "memory", "nvme", "kernels", "rate",
        "integrity", "interruption", "heartbeat", "guard", "loading", "start", "shared_memory",
        "targets", "adapters", "serving", "pretrained", "experts", "vocabulary", "gradients",
        "meta", "soundness", "starting_adapter", "continued", "recurrence", "feed", "base",
        "loopback",
    },
    {
        "loop", "record", "recorder", "result", "preflight", "verifier", "claim", "readiness",
        "saver", "profile", "last_words",
    },
    {"worker", "quickstart"},
    {"cli", "launcher", "prover", "diagnosis", "options", "__init__", "__main__"},
]  # fmt: skip
"""A module imports only from lower floors; one in a package also from its own package."""

INNER_ORDER = {
    ("cache", "errors"), ("planner", "backend"), ("planner", "recipe"), ("catalog", "methods"),
    ("methods", "losses"),
    ("losses", "data"), ("checkpoint", "engine"), ("checkpoint", "fragments"),
    ("fragments", "engine"), ("serving", "data"), ("pretrained", "serving"),
    ("pretrained", "engine"), ("pretrained", "fragments"), ("checkpoint", "pretrained"),
    ("checkpoint", "serving"), ("checkpoint", "integrity"), ("heartbeat", "engine"),
    ("checkpoint", "catalog"), ("data", "integrity"),
    ("guard", "engine"), ("guard", "data"), ("result", "claim"), ("result", "record"),
    ("readiness", "record"), ("saver", "record"), ("recorder", "record"), ("recorder", "loop"),
    ("engine", "accelerator"), ("engine", "shared_memory"), ("accelerator", "nvme"),
    ("accelerator", "start"), ("model", "engine"), ("model", "attention"),
    ("model", "quantization"), ("model", "kernels"), ("model", "loading"),
    ("attention", "kernels"), ("memory", "kernels"), ("model", "pretrained"),
    ("targets", "loading"), ("experts", "targets"), ("experts", "model"), ("experts", "kernels"),
    ("experts", "quantization"), ("quantization", "loading"), ("model", "vocabulary"),
    ("vocabulary", "loading"), ("model", "gradients"), ("model", "soundness"),
    ("soundness", "gradients"), ("soundness", "data"), ("soundness", "meta"),
    ("soundness", "heartbeat"), ("gradients", "meta"), ("model", "continued"),
    ("model", "starting_adapter"), ("continued", "checkpoint"), ("continued", "starting_adapter"),
    ("continued", "vocabulary"), ("model", "recurrence"), ("quickstart", "worker"),
    ("prover", "launcher"), ("cli", "prover"), ("cli", "launcher"), ("cli", "diagnosis"),
    ("cli", "options"), ("diagnosis", "prover"), ("__main__", "cli"), ("adapters", "loading"),
    ("adapters", "targets"), ("adapters", "vocabulary"), ("continued", "pretrained"),
    ("model", "adapters"), ("base", "integrity"),
}  # fmt: skip
"""Pairs of one floor of which the first imports the second, and never the other way round."""

HEAVY = {"torch", "transformers", "accelerate", "peft", "datasets", "deepspeed", "bitsandbytes"}
LIGHT = [
    "errors", "quiet", "cache", "recipe", "backend", "run", "planner", "catalog", "methods",
    "preflight", "cli", "launcher", "__init__", "__main__", "claim", "integrity", "interruption",
    "last_words", "start", "options", "starting_adapter",
]  # fmt: skip
READS_ENVIRONMENT = {"backend", "cache", "last_words", "launcher", "quiet"}
WRITES_ENVIRONMENT = {"cache", "launcher", "quiet"}
MOST_LINES = 450

MODULES = sorted(PACKAGE.rglob("*.py"))
each_module = pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))


def top(path: Path) -> str:
    """The name on a floor that a file belongs to: a module or a package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor(name: str) -> int:
    (found,) = [number for number, names in enumerate(FLOORS) if name in names]
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that are imported anywhere, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(tree: ast.AST) -> set[str]:
    """Modules and packages of this project that are imported; its own name is `__init__`."""
    names = set[str]()
    for name in imported(tree):
        first, _, rest = name.partition(".")
        if first == "finetune":
            inner = rest.split(".")[0]
            names.add(inner if any(inner in each for each in FLOORS) else "__init__")
    return names


def without_typing(tree: ast.Module) -> ast.Module:
    """The module less its `if TYPE_CHECKING:` blocks, which import nothing when it runs."""

    class Drop(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | None:
            typing_only = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            return None if typing_only else self.generic_visit(node)

    return Drop().visit(tree)


def test_every_module_stands_on_one_floor() -> None:
    names = sorted(name for names in FLOORS for name in names)
    assert names == sorted({top(path) for path in MODULES})
    assert len(names) == len(set(names))


@each_module
def test_a_module_imports_only_from_lower_floors(path: Path) -> None:
    mine = top(path)
    wrong = {
        name
        for name in ours(without_typing(parse(path)))
        if name != mine and floor(name) >= floor(mine) and (mine, name) not in INNER_ORDER
    }
    assert wrong == set()


def test_the_order_within_a_floor_is_used_and_has_no_circle() -> None:
    used = {
        (top(path), name)
        for path in MODULES
        for name in ours(without_typing(parse(path)))
        if name != top(path) and floor(name) == floor(top(path))
    }
    assert used == INNER_ORDER
    left = set(INNER_ORDER)
    while left:  # take away what imports nothing that is left
        free = {below for _, below in left} - {above for above, _ in left}
        assert free, f"a circle: {left}"
        left = {(above, below) for above, below in left if below not in free}


@each_module
def test_the_package_itself_is_imported_by_nobody(path: Path) -> None:
    assert "__init__" not in ours(parse(path))


@each_module
def test_the_lowest_floors_never_import_torch(path: Path) -> None:
    if floor(top(path)) <= 1:
        roots = {name.split(".")[0] for name in imported(without_typing(parse(path)))}
        assert roots & HEAVY == set()


def test_light_modules_import_no_torch() -> None:
    names = ["finetune" if n == "__init__" else f"finetune.{n}" for n in LIGHT if n != "__main__"]
    code = f"import sys, {', '.join(names)}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def environment_use(tree: ast.Module) -> tuple[bool, bool]:
    """Whether variables of the environment are read, and whether they are changed."""
    stores, uses = list[ast.AST](), 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            uses += ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv")
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            stores += [node] if ast.unparse(node.value) == "os.environ" else []
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            changing = ("update", "setdefault", "pop", "clear", "popitem")
            writes = called in ("os.putenv", "os.unsetenv")
            writes = writes or called in {f"os.environ.{name}" for name in changing}
            stores += [node] if writes else []
    return uses > 0, bool(stores)


@each_module
def test_the_environment_is_read_and_written_in_few_modules(path: Path) -> None:
    reads, writes = environment_use(parse(path))
    assert not reads or top(path) in READS_ENVIRONMENT
    assert not writes or top(path) in WRITES_ENVIRONMENT


@each_module
def test_a_module_stays_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
