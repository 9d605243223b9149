"""What is shipped: the wheel, the pins, the recipes, and the documents that describe them."""

import ast
import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
import types
import typing
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny, write_recipe
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import finetune as ft
from finetune import backend, catalog
from finetune import recipe as sections
from finetune.data.formats import FORMATS
from finetune.methods import METHODS
from finetune.methods.classifier import Classifier
from finetune.methods.cpo import CPO
from finetune.methods.distill import Distill
from finetune.methods.dpo import DPO
from finetune.methods.grpo import GRPO
from finetune.methods.kto import KTO
from finetune.methods.online import Online
from finetune.methods.orpo import ORPO
from finetune.methods.reward import RewardModel
from finetune.methods.rloo import RLOO
from finetune.methods.sft import SFT
from finetune.methods.simpo import SimPO
from finetune.planner import plan
from finetune.recipe import Recipe
from finetune.recipe.meanings import meanings
from finetune.version import DISTRIBUTION

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
SECTIONS = (
    sections.Recipe, sections.Model, sections.Data, sections.LoRA, sections.Batch, sections.Optim,
    sections.Evaluation, sections.Saving,
)  # fmt: skip
BACKENDS = [
    "single", "ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "fsdp_full_shard_offload",
    "fsdp_shard_grad_op_offload", "hsdp", "hsdp_shard_grad_op", "zero1", "zero2", "zero2_offload",
    "zero3", "zero3_offload", "zero3_nvme", "tp", "tp_fsdp", "pp", "pp_fsdp", "pp_tp",
    "pp_tp_fsdp", "sp", "sp_fsdp", "sp_tp", "cp", "ep_fsdp", "ep_tp",
]  # fmt: skip

each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def test_the_wheel_carries_the_package_the_recipes_and_the_backends(tmp_path: Path):
    pytest.importorskip("hatchling", reason="builds a wheel without a network")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--quiet", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    carried = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    homes = {"finetune": "finetune/"}
    homes |= {name: f"finetune/{name}/" for name in ("recipes", "accelerate_configs")}
    assert carried == {
        home + path.relative_to(ROOT / folder).as_posix()
        for folder, home in homes.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "finetune/data/chat/templates/chatml.jinja" in carried


def test_every_dependency_is_pinned_within_its_range():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}
    assert all(re.fullmatch(r"==[\w.]+", version) for version in versions.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    given = map(Requirement, [*project["dependencies"], *(w for e in extras for w in e)])
    for wanted in (each for each in given if each.name != project["name"]):
        version = versions[canonicalize_name(wanted.name)].removeprefix("==")
        assert wanted.specifier.contains(version), f"{wanted} but {version} is pinned"


def test_a_set_up_installs_every_optional_part():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    parts = project["optional-dependencies"]
    (whole,) = [r for r in map(Requirement, parts["dev"]) if r.name == DISTRIBUTION]
    apart = {"lm-eval"}  # a harness of many parts, whose test is skipped where it is not there
    assert whole.extras == parts.keys() - {"dev"} - apart


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment: the wheel, and the packages of this one without the checkout."""
    pytest.importorskip("hatchling", reason="builds a wheel without a network")
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*wheel, "--wheel-dir", str(folder), str(ROOT)], check=True)
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv/bin/python"
    (built,) = folder.glob("*.whl")
    install = [*pip, "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, str(built)], check=True)
    (site,) = (folder / "venv/lib").glob("*/site-packages")
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # no .pth of its own
    return python


def alone(python: Path, *words: str, cwd: Path) -> str:
    """What `finetune` of the wheel prints in a folder, where nothing points at the checkout."""
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "FINETUNE_CACHE")}
    done = subprocess.run(
        [str(python.with_name("finetune")), *words],
        cwd=cwd, capture_output=True, text=True, timeout=300,
        env={**variables, "FINETUNE_CACHE": str(cwd / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_wheel_works_in_an_empty_folder(
    installed: Path, tiny: Tiny, tmp_path: Path
) -> None:
    site = Path(sysconfig.get_path("purelib", vars={"base": str(installed.parent.parent)}))
    assert (site / "finetune/version.py").is_file()
    listed = json.loads(alone(installed, "list", "--json", cwd=tmp_path))
    assert set(listed["recipes"]) == {path.stem for path in RECIPES}
    assert sorted(listed["backends"]) == sorted(BACKENDS)
    assert alone(installed, "--version", cwd=tmp_path) == f"finetune {ft.__version__}\n"
    alone(installed, "init", "mine", "--from", "quickstart", cwd=tmp_path)
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=2, adapter={"r": 2}))
    words = [str(recipe), "model.chat_template=chatml"]
    assert "zero2" in alone(
        installed, "plan", *words, "--backend", "zero2", "--processes", "2", cwd=tmp_path
    )
    alone(installed, "train", *words, "--precision", "fp32", "--output", "run", cwd=tmp_path)
    alone(installed, "report", "run", cwd=tmp_path)
    system = alone(installed, "doctor", cwd=tmp_path)
    assert str(ROOT) not in system
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if step["kind"] == "train"] == [1, 2]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"report.html", "loss.png", "final"} <= names


WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None  # as where it is not installed
from finetune.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("package", "words", "told"),
    [
        (
            "deepspeed",
            ["launch", "RECIPE", "--backend", "zero2", "--processes", "2"],
            "error: backend: zero2 needs DeepSpeed, which is not installed: "
            "pip install 'deepspeed>=0.19'\n",
        ),
        (
            "bitsandbytes",
            ["train", "RECIPE", "adapter.r=2", "model.quantization=nf4", "optim.name=adamw_8bit"],
            "error: model.quantization: nf4 needs bitsandbytes, which is not installed: "
            "pip install 'bitsandbytes>=0.49'\n"
            "error: optim.name: adamw_8bit needs bitsandbytes, which is not installed: "
            "pip install 'bitsandbytes>=0.49'\n",
        ),
        (
            "tensorboard",
            ["train", "RECIPE", "trackers=tensorboard"],
            "error: trackers: 'tensorboard' is not installed; run: "
            "pip install 'tensorboard>=2.20'\n",
        ),
    ],
)
def test_an_optional_part_that_is_missing_is_named(
    tiny: Tiny, tmp_path: Path, package: str, words: list[str], told: str
) -> None:
    recipe = write_recipe(tmp_path / "r.json", tiny.fields())
    given = [str(recipe) if word == "RECIPE" else word for word in words]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, package, *given],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, told)


def test_adapters_are_trained_and_merged_without_bitsandbytes(tiny: Tiny, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=1, adapter={"r": 2}))
    run = tmp_path / "run"
    for words in (
        ["train", recipe, "--output", run, "--no-plot"],
        ["export", run, "--merge", "--to", tmp_path / "merged"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT, "bitsandbytes", *map(str, words)],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_without_matplotlib_a_picture_names_what_installs_it() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import finetune; finetune.plot_loss"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    told = "a picture needs matplotlib: pip install 'matplotlib>=3.10'"
    assert done.stderr.splitlines()[-1].endswith(told)


@each_recipe
def test_a_recipe_file_defines_exactly_one_recipe(path: Path):
    defined = runpy.run_path(str(path))
    assert [name for name, value in defined.items() if isinstance(value, Recipe)] == ["recipe"]


@each_recipe
def test_a_recipe_docstring_starts_with_one_sentence(path: Path):
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
    assert re.fullmatch(r"[A-Z].{20,95}\.", first)


@each_recipe
def test_a_recipe_is_the_same_after_a_round_trip_through_json(path: Path):
    recipe = catalog.load(path)
    assert catalog.from_fields(json.loads(json.dumps(catalog.to_fields(recipe)))) == recipe


@each_recipe
def test_a_recipe_can_run_on_the_backend_that_it_names(path: Path):
    recipe = catalog.load(path)
    assert plan(recipe).backend.name == recipe.backend


@pytest.mark.parametrize("path", [p for p in RECIPES if "quickstart" not in p.stem], ids=str)
def test_the_name_of_a_recipe_states_how_it_trains(path: Path):
    recipe = catalog.load(path)
    kinds = {(False, "none"): "full", (True, "none"): "lora", (True, "nf4"): "qlora"}
    how = kinds[recipe.adapter is not None, recipe.model.quantization]
    how = recipe.method if recipe.method not in ("sft", "pretrain") else how
    assert path.stem.rsplit("_", 1)[1] == how


# The documents.


def kind(hint: Any) -> str:
    """The values of a field as the reference writes them."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return kind(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        kinds = [kind(argument) for argument in arguments if argument is not type(None)]
        return " or ".join(kinds)
    if origin is tuple:
        of = ", ".join(dict.fromkeys(kind(a) for a in arguments if a is not Ellipsis))
        return f"list of {of}s" if of.endswith("number") else f"list of {of}"
    if origin is dict:
        return "keys and values"
    if dataclasses.is_dataclass(hint):
        return typing.cast(type, hint).__name__
    return {int: "whole number", float: "number", bool: "true, false", str: "text"}[hint]


def reference(section: Any) -> str:
    """A section in `docs/recipes.md`: what it is, and each field with its sentence in the code."""
    hints = typing.get_type_hints(section, include_extras=True)
    lines = [section.__doc__, "", "| field | values | default | meaning |", "|---|---|---|---|"]
    for name, field in section.__pydantic_fields__.items():
        meaning = meanings(section).get(name)
        if (
            meaning is None or name not in section.__annotations__
        ):  # inherited, or a section of the recipe, which has a table of its own
            continue
        default = field.get_default(call_default_factory=True, validated_data={})
        shown = "required" if field.is_required() else f"`{json.dumps(default)}`"
        lines.append(f"| `{name}` | {kind(hints[name])} | {shown} | {meaning} |")
    return "\n".join(lines)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_reference_has_every_field_as_the_code_describes_it(section: type):
    assert reference(section) in (ROOT / "docs/recipes.md").read_text()


def test_the_reference_has_what_supervised_fine_tuning_adds():
    (added,) = {f.name for f in dataclasses.fields(SFT)} - {
        f.name for f in dataclasses.fields(Recipe)
    }
    row = next(line for line in reference(SFT).splitlines() if line.startswith(f"| `{added}` |"))
    assert row in (ROOT / "docs/recipes.md").read_text()


@pytest.mark.parametrize("method", [RewardModel, Classifier, Distill])
def test_the_reference_has_what_a_method_adds(method: type):
    """Its own table, less the optimizer's section and what `sft` has, which have others."""
    table = reference(method).split("\n", 2)[2]
    others = [*reference(Recipe).splitlines(), *reference(SFT).splitlines()]
    common = {line for line in others if line.startswith("| `")}
    own = [line for line in table.splitlines() if line not in common]
    assert "\n".join(own) in (ROOT / "docs/recipes.md").read_text()


@pytest.mark.parametrize("method", [DPO, ORPO, SimPO, CPO, KTO])
def test_the_reference_has_what_a_method_of_preferences_adds(method: type[Recipe]):
    """Its own table, less the optimizer's section, which has one."""
    table = reference(method).split("\n", 2)[2]
    common = {line for line in reference(Recipe).splitlines() if line.startswith("| `")}
    own = [line for line in table.splitlines() if line not in common]
    document = (ROOT / "docs/methods.md").read_text()
    assert "\n".join(own) in document
    (row,) = [line for line in document.splitlines() if line.startswith(f"| `{method.method}` |")]
    assert row.endswith(f"| {method().optim.lr:g} |")


@pytest.mark.parametrize("method", [Online, GRPO, RLOO])
def test_the_page_on_online_methods_has_what_each_adds(method: type):
    common = {line for line in reference(Recipe).splitlines() if line.startswith("| `")}
    table = reference(method).split("\n", 2)[2].splitlines()
    own = [line for line in table if line not in common]
    assert "\n".join(own) in (ROOT / "docs/online.md").read_text()


def test_the_documents_name_every_backend_format_and_method():
    readme, backends = ((ROOT / name).read_text() for name in ("README.md", "docs/backends.md"))
    for document in (readme, backends):
        cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", document, re.MULTILINE)
        named = re.findall(r"`(\w+)`", " ".join(cells))
        assert [name for name in named if name not in METHODS] == BACKENDS
    assert sorted(BACKENDS) == backend.names()
    formats = (ROOT / "docs/data.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", formats, re.MULTILINE) == list(FORMATS)
    methods = (ROOT / "docs/methods.md").read_text()
    assert all(f"`{method}`" in methods for method in METHODS)


@pytest.mark.parametrize("document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_links_lead_to_files_that_exist(document: Path):
    links = re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_readme_shows_a_recipe_as_it_is():
    code = (ROOT / "recipes/smollm2_135m_lora.py").read_text().split('"""\n\n', 1)[1]
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_documents_name_only_targets_and_recipes_that_exist(document: Path):
    text = document.read_text()
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    assert named <= set(targets.split())
    recipes = re.findall(r"(?:train|launch|plan|show) ([a-z]\w*_\w+)|RECIPE=(\w+)", text)
    assert {one or other for one, other in recipes} <= {path.stem for path in RECIPES}
