"""Imports go down the floors only; what has no torch stays so; modules stay small."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import planted
from conftest import ROOT

import finetune
from finetune.cli.main import VERBS
from finetune.kernels import cpu

PACKAGE = ROOT / "finetune"
CPU = PACKAGE / "kernels" / "cpu"
FLOORS = [
    {"errors", "version"},
    {"recipe", "extensions"},
    {"cache", "runs"},
    {"process"},
    {"backend"},
    {"planner"},
    {"data", "kernels", "rewards"},
    {"distributed", "methods"},
    {"catalog"},
    {"checkpoints"},
    {"models"},
    {"checks"},
    {"inference", "reports"},
    {"evaluation", "exporters"},
    {"serving", "training"},
    {"importers", "launchers"},
    {"board", "quickstart"},
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
    "finetune.runs.environment", "finetune.runs.metrics", "finetune.runs.units",
    "finetune.planner", "finetune.planner.estimate.plan_api", "finetune.checkpoints.resume",
    "finetune.models.starting_adapter", "finetune.process.quiet", "finetune.process.signals",
    "finetune.process.error_report", "finetune.process.imports", "finetune.checks.request",
    "finetune.launchers.accelerate", "finetune.launchers.job",
    "finetune.verification.memory.traced_step", "finetune.cli.main",
    *(f"finetune.cli.{name}" for name in VERBS.values()),
]  # fmt: skip
INSIDE = "evaluation/metrics/inside.py"
"""A program of its own, around code of a model."""
READS_ENVIRONMENT = {
    INSIDE, "backend/__init__.py", "board/detached.py", "board/tasks.py", "cache.py",
    "cli/board.py", "cli/export.py", "cli/serve.py", "exporters/gguf.py",
    "launchers/accelerate.py", "launchers/submission.py", "launchers/variables.py",
    "serving/external.py",
    "process/error_report.py", "process/quiet.py", "process/rendezvous.py", "process/warm.py",
    "training/online/vllm_server.py", "training/uploads.py",
    "verification/memory/traced_step.py", "verification/memory/rehearsal.py",
}  # fmt: skip
WRITES_ENVIRONMENT = {
    INSIDE, "cache.py", "process/quiet.py", "process/warm.py",
    "verification/memory/rehearsal.py",
}  # fmt: skip
MOST_LINES = 450
ENGINE = re.compile(r"(?<!arguments)\.engine$")
"""An engine; `arguments.engine` is the program of `finetune serve`."""

MODULES = sorted(PACKAGE.rglob("*.py"))


def top(path: Path) -> str:
    """The name on a floor that a file belongs to: a module or a package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor(name: str) -> int:
    (found,) = [number for number, names in enumerate(FLOORS) if name in names]
    return found


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def imported(path: Path, typing: bool = False) -> set[str]:
    """Dotted names that are imported anywhere, also inside functions.

    Without `typing`, those of `if TYPE_CHECKING:` are left out: they are not imported when it runs.
    """
    names, left_out = set[str](), set[ast.AST]()
    for node in nodes_of(path):
        if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING" and not typing:
            left_out.update(ast.walk(node))
        elif isinstance(node, ast.Import) and node not in left_out:
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node not in left_out:
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


def ours(path: Path, typing: bool = False) -> set[str]:
    """Modules and packages of this project that are imported; its own name is `__init__`."""
    names = set[str]()
    for name in imported(path, typing):
        first, _, rest = name.partition(".")
        if first == "finetune":
            inner = rest.split(".")[0]
            names.add(inner if any(inner in each for each in FLOORS) else "__init__")
    return names


def wrong(rule: Callable[[Path], object]) -> dict[str, object]:
    """What a rule finds wrong, by the module."""
    found = {path.relative_to(PACKAGE).as_posix(): rule(path) for path in MODULES}
    return {path: what for path, what in found.items() if what}


def test_every_module_is_on_one_floor():
    names = sorted(name for names in FLOORS for name in names)
    assert names == sorted({top(path) for path in MODULES})
    assert len(names) == len(set(names))


def test_bitsandbytes_is_optional_and_quick_commands_import_no_torch():
    users = wrong(lambda path: "bitsandbytes" in roots(path)).keys()
    assert users <= {"kernels/quantised.py", "training/optim.py"}
    assert wrong(lambda path: roots(path) & HEAVY if top(path) in NO_TORCH else set()) == {}


def test_a_module_imports_only_from_lower_floors():
    def rule(path: Path) -> set[str]:
        mine = top(path)
        return {name for name in ours(path) - {mine} if floor(name) >= floor(mine)}

    assert wrong(rule) == {}


def test_few_modules_are_at_the_root_and_no_folder_has_the_name_of_a_public_function():
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_ROOT_MODULES
    assert {path.parent.name for path in MODULES} & set(finetune.__all__) == set()


def test_only_engines_and_the_planner_ask_which_engine_it_is():
    def rule(path: Path) -> list[str]:
        if top(path) in ("distributed", "planner"):
            return []
        compared = [node for node in nodes_of(path) if isinstance(node, ast.Compare)]
        return [
            ast.unparse(node)
            for node in compared
            for sides in [[node.left, *node.comparators]]
            if any(isinstance(side, ast.Constant) and side.value is not None for side in sides)
            and any(ENGINE.search(ast.unparse(side)) for side in sides)
        ]

    assert wrong(rule) == {}


def test_code_for_cpus_is_reached_through_its_folder_alone():
    public = {f"finetune.kernels.cpu.{name}" for name in cpu.__all__}

    def rule(path: Path) -> set[str]:
        if path.is_relative_to(CPU) or path == PACKAGE / INSIDE:
            return set()
        inside = {name for name in imported(path) if name.startswith("finetune.kernels.cpu.")}
        return inside - public | roots(path) & {"ctypes"}

    assert wrong(rule) == {}


def test_the_package_itself_is_imported_by_nobody():
    assert wrong(lambda path: "__init__" in ours(path, typing=True)) == {}


def test_light_modules_import_no_torch():
    code = f"import sys, {', '.join(LIGHT)}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def dotted(node: ast.AST) -> str:
    """A name with its attributes; of another expression its attributes only."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@functools.cache
def environment_use(path: Path) -> tuple[bool, bool]:
    """Whether variables of the environment are read, and whether they are changed."""
    nodes = nodes_of(path)
    named = {dotted(node) for node in nodes if isinstance(node, ast.Attribute)}
    stores = {
        dotted(node.value)
        for node in nodes
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    }
    calls = {dotted(node.func) for node in nodes if isinstance(node, ast.Call)}
    changing = {f"os.environ.{verb}" for verb in "update setdefault pop clear popitem".split()}
    writes = "os.environ" in stores or bool(calls & (changing | {"os.putenv", "os.unsetenv"}))
    return bool(named & {"os.environ", "os.getenv", "os.putenv"}), writes


def test_the_environment_is_read_and_written_in_few_modules():
    assert wrong(lambda path: environment_use(path)[0]).keys() <= READS_ENVIRONMENT
    assert wrong(lambda path: environment_use(path)[1]).keys() <= WRITES_ENVIRONMENT


def test_a_module_stays_small():
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert wrong(lambda path: sizes[path] * (sizes[path] > MOST_LINES)) == {}


def test_the_architecture_page_has_each_folder_on_its_floor():
    lines = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    found: list[set[str]] = []
    for line in lines:
        if row := re.match(r"\| (\d*) ?\| `([a-z]+)(?:/|\.py)`", line):
            found += [set()] if row[1] else []
            found[-1].add(row[2])
    assert found == [names - {"__init__"} for names in FLOORS if names != {"__main__"}]


def test_every_planted_fault_has_its_place_and_its_finders() -> None:
    assert planted.misplaced(planted.FAULTS) == []
