"""Imports go down the floors only; what has no torch stays so; modules stay small."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

import finetune
from finetune.cli.main import VERBS
from finetune.kernels import cpu

PACKAGE = ROOT / "finetune"
CPU = PACKAGE / "kernels" / "cpu"
FLOORS = [
    {"errors", "version"},
    {"changes"},
    {"recipe"},
    {"cache", "extensions", "runs"},
    {"process"},
    {"backend"},
    {"planner"},
    {"data", "kernels", "rewards"},
    {"distributed", "methods"},
    {"catalog"},
    {"checkpoints"},
    {"models"},
    {"inference", "reports"},
    {"evaluation", "exporters"},
    {"serving", "training"},
    {"importers", "launchers"},
    {"quickstart"},
    {"verification"},
    {"cli", "__init__"},
    {"__main__"},
]
"""Folders, and modules that lie beside them: each imports from lower floors and from itself."""

MOST_ROOT_MODULES = 10
NO_TORCH = {"errors", "recipe", "backend", "cache", "planner", "catalog"}
HEAVY = {"torch", "transformers", "accelerate", "peft", "datasets", "deepspeed", "bitsandbytes"}
LIGHT = [
    "finetune", "finetune.errors", "finetune.cache", "finetune.recipe", "finetune.backend",
    "finetune.catalog", "finetune.methods", "finetune.runs.run", "finetune.runs.manifest",
    "finetune.planner", "finetune.planner.estimate.answers", "finetune.checkpoints.resume",
    "finetune.models.starting_adapter", "finetune.process.quiet", "finetune.process.signals",
    "finetune.process.error_report", "finetune.process.start", "finetune.training.preflight",
    "finetune.launchers.accelerate", "finetune.launchers.job",
    "finetune.verification.memory.launch", "finetune.cli.main",
    *(f"finetune.cli.{name}" for name in VERBS.values()),
]  # fmt: skip
READS_ENVIRONMENT = {
    "backend/__init__.py", "cache.py", "cli/export.py", "cli/serve.py", "exporters/gguf.py",
    "launchers/accelerate.py", "serving/engines.py", "process/error_report.py",
    "process/quiet.py", "process/rendezvous.py", "process/warm.py", "training/vllm_server.py",
    "verification/memory/launch.py", "verification/memory/rehearsal.py",
}  # fmt: skip
WRITES_ENVIRONMENT = {
    "cache.py", "process/quiet.py", "process/warm.py", "verification/memory/rehearsal.py",
}  # fmt: skip
MOST_LINES = 450
ENGINE = re.compile(r"(?<!arguments)\.engine$")
"""An engine; `arguments.engine` is the program of `finetune serve`."""

MODULES = sorted(PACKAGE.rglob("*.py"))
each_module = pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))


def top(path: Path) -> str:
    """The name on a floor that a file belongs to: a module or a package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor(name: str) -> int:
    (found,) = [number for number, names in enumerate(FLOORS) if name in names]
    return found


@functools.cache
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


@functools.cache
def without_typing(path: Path) -> ast.Module:
    """The module less its `if TYPE_CHECKING:` blocks, which import nothing when it runs."""

    class Drop(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | None:
            typing_only = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            return None if typing_only else self.generic_visit(node)

    return Drop().visit(ast.parse(path.read_text(encoding="utf-8")))


def test_every_module_is_on_one_floor() -> None:
    names = sorted(name for names in FLOORS for name in names)
    assert names == sorted({top(path) for path in MODULES})
    assert len(names) == len(set(names))


@each_module
def test_bitsandbytes_is_optional(path: Path) -> None:
    if path not in (PACKAGE / "kernels/quantised.py", PACKAGE / "training/optim.py"):
        names = {name.split(".")[0] for name in imported(without_typing(path))}
        assert "bitsandbytes" not in names


@each_module
def test_a_module_imports_only_from_lower_floors(path: Path) -> None:
    mine = top(path)
    wrong = {
        name for name in ours(without_typing(path)) if name != mine and floor(name) >= floor(mine)
    }
    assert wrong == set()


def test_few_modules_are_at_the_root() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_ROOT_MODULES


def test_no_folder_has_the_name_of_a_public_function() -> None:
    folders = {path.parent.name for path in MODULES}
    assert folders & set(finetune.__all__) == set()


@each_module
def test_only_engines_and_the_planner_ask_which_engine_it_is(path: Path) -> None:
    compared = [
        [node.left, *node.comparators]
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Compare)
    ]
    asked = [
        [ast.unparse(side) for side in sides]
        for sides in compared
        if any(ENGINE.search(ast.unparse(side)) for side in sides)
        and any(isinstance(side, ast.Constant) and side.value is not None for side in sides)
    ]
    assert top(path) in ("distributed", "planner") or asked == []


@each_module
def test_code_for_cpus_is_reached_through_its_folder_alone(path: Path) -> None:
    if not path.is_relative_to(CPU):
        names = set(imported(without_typing(path)))
        inside = {name for name in names if name.startswith("finetune.kernels.cpu.")}
        assert inside <= {f"finetune.kernels.cpu.{name}" for name in cpu.__all__}
        assert not any(name.split(".")[0] == "ctypes" for name in names)


@each_module
def test_the_package_itself_is_imported_by_nobody(path: Path) -> None:
    assert "__init__" not in ours(parse(path))


@each_module
def test_quick_commands_never_import_torch(path: Path) -> None:
    if top(path) in NO_TORCH:
        roots = {name.split(".")[0] for name in imported(without_typing(path))}
        assert roots & HEAVY == set()


def test_light_modules_import_no_torch() -> None:
    code = f"import sys, {', '.join(LIGHT)}; print(sorted({HEAVY!r} & set(sys.modules)))"
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
    assert not reads or path.relative_to(PACKAGE).as_posix() in READS_ENVIRONMENT
    assert not writes or path.relative_to(PACKAGE).as_posix() in WRITES_ENVIRONMENT


@each_module
def test_a_module_stays_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_the_architecture_page_has_each_folder_on_its_floor() -> None:
    lines = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    found: list[set[str]] = []
    for line in lines:
        if row := re.match(r"\| (\d*) ?\| `([a-z]+)(?:/|\.py)`", line):
            found += [set()] if row[1] else []
            found[-1].add(row[2])
    assert found == [names - {"__init__"} for names in FLOORS if names != {"__main__"}]
