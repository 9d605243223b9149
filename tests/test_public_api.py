"""The public API: its types as a type checker sees them, and its errors as a user gets them."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import api_page
import pytest
import refusals_page
from conftest import ROOT, problems_of, run_command

import finetune as ft
from finetune import catalog
from finetune.errors import FinetuneError
from finetune.methods import METHODS, find_method
from finetune.recipe.changes import Changes

USE = ROOT / "tests/typing"


@pytest.fixture(scope="module")
def checked() -> dict[str, set[int]]:
    """Lines that pyright in strict mode rejects, of each file of user code."""
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    report = json.loads(run_command([*command, "-p", str(USE / "pyrightconfig.json")], USE).stdout)
    lines: dict[str, set[int]] = {"right_use.py": set(), "wrong_use.py": set()}
    assert report["summary"]["filesAnalyzed"] == len(lines)
    for problem in report["generalDiagnostics"]:
        lines[Path(problem["file"]).name].add(problem["range"]["start"]["line"] + 1)
    return lines


@pytest.mark.slow
def test_a_type_checker_accepts_right_use_of_every_public_name(checked):
    assert checked["right_use.py"] == set()
    used = set(re.findall(r"\bft\.(\w+)", (USE / "right_use.py").read_text()))
    sections = {"LoRA", "Batch", "Optim", "Kernels", "Evaluation", "Saving", "Score"}
    assert used | sections >= {*ft.__all__}


@pytest.mark.slow
def test_a_type_checker_rejects_wrong_use_where_it_is(checked):
    lines = (USE / "wrong_use.py").read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
    assert len(marked) > 30
    assert checked["wrong_use.py"] == marked


def test_the_names_for_a_type_checker_are_those_that_load_on_use():
    tree = ast.parse((ROOT / "finetune/__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and len(node.body) > 3]
    declared: dict[str, Any] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        module = importlib.import_module(node.module or "")
        declared |= {name.asname or name.name: getattr(module, name.name) for name in node.names}
    assert {name: getattr(ft, name) for name in ft.HOMES} == declared
    assert ({*ft.HOMES, "__version__"}, set(dir(ft))) == ({*ft.__all__}, set(ft.__all__))


def test_fields_that_are_not_given_stay_and_an_adapter_starts_anew():
    recipe = ft.SFT().with_optim(lr=1e-3, warmup=5).with_optim(warmup=0.1).with_lora(4, alpha=1)
    assert recipe.optim == ft.Optim(lr=1e-3, warmup=0.1)
    assert recipe.with_lora(dropout=0.1).adapter == ft.LoRA(r=16, dropout=0.1)
    assert recipe.with_optim(ft.Optim(eps=1e-6)).optim == ft.Optim(eps=1e-6)
    quantised = recipe.with_qlora(ft.LoRA(r=8))
    assert (quantised.adapter, quantised.model.quantization) == (ft.LoRA(r=8), "nf4")
    assert recipe.model.quantization == "none"


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda: ft.SFT().with_optim(warmpu=3), "Optim: warmpu: unknown key; did you mean 'warmup"),
        (lambda: ft.Optim(warmpu=3), "Optim: warmpu: unknown key; did you mean 'warmup'?"),
        (
            lambda: ft.SFT().with_batch(overlong="truncat"),
            "Batch: overlong: got 'truncat', expected error or drop or truncate or split; did you "
            "mean 'truncate'?",
        ),
        (lambda: ft.SFT().with_qlora(8, dropuot=1), "LoRA: dropuot: unknown key; did you mean 'dr"),
        (lambda: ft.SFT().with_steps(0), "SFT: max_steps: Input should be greater than 0, got 0"),
        (lambda: ft.SFT(epoch=3), "SFT: epoch: unknown key; did you mean 'epochs'?"),
        (lambda: ft.SFT("m"), "SFT: model: Input should be a dictionary or an instance of Model,"),
        (lambda: ft.Data("d.jsonl"), "Data: format: Field required"),
        (
            lambda: ft.Model("m", config={}),
            "Model: give `name` (pretrained) or `config` (from scratch), not both",
        ),
    ],
)
def test_a_wrong_field_in_python_is_the_error_of_the_command_line(use, told):
    with pytest.raises(FinetuneError) as caught:
        use()
    assert str(caught.value).startswith(told)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_every_problem_of_a_value_is_reported_at_once():
    assert len(problems_of(ft.SFT().with_optim, lr=-1, warmpu=3)) == 2


@pytest.mark.parametrize(
    ("key", "use"),
    [("optim.lr=fast", lambda: ft.Optim(lr="fast")), ("optim.wd=1", lambda: ft.Optim(wd=1))],
)
def test_python_and_the_command_line_report_the_same(key, use):
    with pytest.raises(FinetuneError) as typed:
        catalog.override(ft.SFT(), [key])
    with pytest.raises(FinetuneError) as called:
        use()
    told = str(typed.value).removeprefix("override: optim.")
    assert told == str(called.value).removeprefix("Optim: ")


def public_functions() -> dict[str, Any]:
    """Every public function, class, method and property, each once."""
    found = {name: getattr(ft, name) for name in ft.HOMES}
    for name, value in list(found.items()):
        if inspect.isclass(value) and not issubclass(value, Exception) and value is not ft.Recipe:
            for inner, member in vars(value).items():
                known = inspect.isfunction(member) or isinstance(member, property)
                if known and not inner.startswith("_"):
                    found[f"{name}.{inner}"] = member
    changes = {name: each for name, each in vars(Changes).items() if name.startswith("with_")}
    return found | {f"Recipe.{name}": member for name, member in changes.items()}


def test_everything_public_has_a_docstring():
    functions = public_functions()
    assert len(functions) > len(ft.HOMES)
    texts = {name: inspect.getdoc(value) or "" for name, value in functions.items()}
    assert [n for n, text in texts.items() if not re.match(r"[`\w][^\n]{8,}", text)] == []
    made = [name for name, text in texts.items() if text.startswith(f"{name}(")]
    assert [name for name in made if dataclasses.is_dataclass(functions[name])] == []


def test_methods_have_typed_constructors_of_their_own():
    for kind in map(find_method, METHODS):
        assert dataclasses.is_dataclass(kind)
        with pytest.raises(FinetuneError, match="unknown key"):
            kind(no_such_field=1)


def test_the_version_is_one_everywhere_and_is_printed(finetune):
    assert f"version: {ft.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {ft.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    done = finetune("--version")
    assert (done.status, done.stdout) == (0, f"finetune {ft.__version__}\n")
    assert (ROOT / "finetune/py.typed").is_file()


def test_pages_of_the_api_and_the_index_have_every_name_and_document():
    written = (ROOT / "docs/api.md").read_text()
    assert written == api_page.page(), "write it anew: python -m tests.api_page"
    refusals = (ROOT / "docs/refusals.md").read_text()
    assert refusals == refusals_page.page(), "write it anew: python -m tests.refusals_page"
    headings = re.findall(r"^### `(\w+)`$", written, re.MULTILINE)
    assert sorted(headings) == sorted(ft.HOMES)
    named = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs/index.md").read_text()))
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
