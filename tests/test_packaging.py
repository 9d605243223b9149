"""What is shipped: the wheel, the pins, the recipes, and the documents that describe them."""

import dataclasses
import json
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
from conftest import ROOT, environment, run_command, write_recipe
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import finetune as ft
from finetune import backend, catalog
from finetune.cli.main import main
from finetune.data.formats import FORMATS
from finetune.methods import METHODS
from finetune.methods.online import Online
from finetune.recipe.meanings import meanings
from finetune.version import DISTRIBUTION

RECIPES = sorted((ROOT / "recipes").glob("*.py"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = (
    ft.Recipe, ft.Model, ft.Data, ft.LoRA, ft.Batch, ft.Optim, ft.Evaluation, ft.Saving,
)  # fmt: skip
BACKENDS = [
    "single", "ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "fsdp_full_shard_offload",
    "fsdp_shard_grad_op_offload", "hsdp", "hsdp_shard_grad_op", "zero1", "zero2", "zero2_offload",
    "zero3", "zero3_offload", "zero3_nvme", "tp", "tp_fsdp", "pp", "pp_fsdp", "pp_tp",
    "pp_tp_fsdp", "sp", "sp_fsdp", "sp_tp", "cp", "ep_fsdp", "ep_tp",
]  # fmt: skip

each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling", reason="builds a wheel without a network")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--quiet", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_carries_the_package_the_recipes_and_the_backends(wheel):
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


def test_every_dependency_is_pinned_and_a_set_up_installs_every_optional_part():
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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    parts = project["optional-dependencies"]
    (whole,) = [r for r in map(Requirement, parts["dev"]) if r.name == DISTRIBUTION]
    apart = {"lm-eval"}  # a harness of many parts, whose test is skipped where it is not there
    assert whole.extras == parts.keys() - {"dev"} - apart


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """Python of a new environment: the wheel, and the packages of this one without the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv/bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    subprocess.run([*install, "--no-deps", "--no-index", "--quiet", str(wheel)], check=True)
    (site,) = (folder / "venv/lib").glob("*/site-packages")
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # no .pth of its own
    return python


def alone(python: Path, command: str, cwd: Path) -> str:
    """What `finetune` of the wheel prints in a folder, where nothing points at the checkout."""
    variables = {k: v for k, v in environment(cwd / "cache").items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(python.with_name("finetune")), *command.split()],
        cwd=cwd, capture_output=True, text=True, timeout=300, env=variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_wheel_works_in_an_empty_folder(installed, tiny, tmp_path):
    def do(command: str) -> str:
        return alone(installed, command, tmp_path)

    site = Path(sysconfig.get_path("purelib", vars={"base": str(installed.parent.parent)}))
    assert (site / "finetune/version.py").is_file()
    listed = json.loads(do("list --json"))
    assert set(listed["recipes"]) == {path.stem for path in RECIPES}
    assert sorted(listed["backends"]) == sorted(BACKENDS)
    assert do("--version") == f"finetune {ft.__version__}\n"
    do("init mine --from quickstart")
    write_recipe(tmp_path / "r.json", tiny.fields(max_steps=2, adapter={"r": 2}))
    words = "r.json model.chat_template=chatml"
    assert "zero2" in do(f"plan {words} --backend zero2 --processes 2")
    do(f"train {words} --precision fp32 --output run")
    do("report run")
    assert str(ROOT) not in do("doctor")
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if step["kind"] == "train"] == [1, 2]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"report.html", "loss.png", "final"} <= names


@pytest.mark.parametrize(
    ("package", "part", "words", "told"),
    [
        ("deepspeed", "deepspeed>=0.19", "launch --backend zero2 --processes 2",
         ["backend: zero2 needs DeepSpeed, which is not installed"]),
        ("bitsandbytes", "bitsandbytes>=0.49",
         "train adapter.r=2 model.quantization=nf4 optim.name=paged_adamw_8bit",
         ["model.quantization: nf4 needs bitsandbytes, which is not installed",
          "optim.name: paged_adamw_8bit needs bitsandbytes, which is not installed"]),
        ("tensorboard", "tensorboard>=2.20", "train trackers=tensorboard",
         ["trackers: 'tensorboard' is not installed; run"]),
    ],
)  # fmt: skip
def test_an_optional_part_that_is_missing_is_named(
    tiny, tmp_path, monkeypatch, capfd, package, part, words, told
):
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    verb, *more = words.split()
    recipe = write_recipe(tmp_path / "r.json", tiny.fields())
    assert main([verb, str(recipe), *more, "--output", str(tmp_path / "run")]) == 2
    lines = [f"error: {each}: pip install '{part}'" for each in told]
    assert capfd.readouterr().err.splitlines() == lines


WITHOUT = """
import sys
sys.modules["bitsandbytes"] = None  # as where it is not installed
from finetune.cli.main import main
sys.exit(main(["train", sys.argv[1], "--output", sys.argv[2], "--no-plot"])
         or main(["export", sys.argv[2], "--merge", "--to", sys.argv[3]]))
"""


@pytest.mark.slow
def test_adapters_are_trained_and_merged_without_bitsandbytes(tiny, tmp_path):
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(max_steps=1, adapter={"r": 2}))
    words = [str(recipe), str(tmp_path / "run"), str(tmp_path / "merged")]
    run_command([sys.executable, "-c", WITHOUT, *words], tmp_path / "cache", tmp_path).passed()
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_without_matplotlib_a_picture_names_what_installs_it(tmp_path):
    code = "import sys; sys.modules['matplotlib'] = None; import finetune; finetune.plot_loss"
    done = run_command([sys.executable, "-c", code], tmp_path)
    told = "a picture needs matplotlib: pip install 'matplotlib>=3.10'"
    assert done.stderr.splitlines()[-1].endswith(told)


@each_recipe
def test_a_recipe_file_defines_one_recipe_under_one_sentence_which_can_run_on_its_backend(path):
    defined = runpy.run_path(str(path))
    assert [name for name, value in defined.items() if isinstance(value, ft.Recipe)] == ["recipe"]
    assert re.fullmatch(r"[A-Z].{20,95}\.", (defined["__doc__"] or "").split("\n")[0])
    assert ft.plan(defined["recipe"]).backend.name == defined["recipe"].backend


@pytest.mark.parametrize("path", [p for p in RECIPES if "quickstart" not in p.stem], ids=str)
def test_the_name_of_a_recipe_states_how_it_trains(path):
    recipe = catalog.load(path)
    kinds = {(False, "none"): "full", (True, "none"): "lora", (True, "nf4"): "qlora"}
    how = kinds[recipe.adapter is not None, recipe.model.quantization]
    how = recipe.method if recipe.method not in ("sft", "pretrain") else how
    assert path.stem.rsplit("_", 1)[1] == how


def kind(hint: Any) -> str:
    """The values of a field as the reference writes them."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return kind(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        kinds = [kind(argument) for argument in arguments if argument is not type(None)]
        return " or ".join(
            "a list of these" if each == f"list of {kinds[0]}" and each[-1] == "`" else each
            for each in kinds
        )
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
        if meaning is None or name not in section.__annotations__:
            continue  # inherited, or a section of the recipe, which has a table of its own
        default = field.get_default(call_default_factory=True, validated_data={})
        shown = "required" if field.is_required() else f"`{json.dumps(default)}`"
        lines.append(f"| `{name}` | {kind(hints[name])} | {shown} | {meaning} |")
    return "\n".join(lines)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_reference_has_every_field_as_the_code_describes_it(section):
    assert reference(section) in (ROOT / "docs/recipes.md").read_text()


def test_the_reference_has_what_supervised_fine_tuning_adds():
    added = (
        {field.name for field in dataclasses.fields(ft.SFT)}
        - {field.name for field in dataclasses.fields(ft.Recipe)}
    )  # fmt: skip
    rows = {line.split("`")[1]: line for line in reference(ft.SFT).splitlines() if "`" in line}
    text = (ROOT / "docs/recipes.md").read_text()
    assert [name for name in sorted(added) if rows[name] not in text] == []


@pytest.mark.parametrize(
    ("page", "method"),
    [
        *(("recipes", each) for each in (ft.RewardModel, ft.Classifier, ft.Distill)),
        *(("methods", each) for each in (ft.DPO, ft.ORPO, ft.SimPO, ft.CPO, ft.KTO)),
        *(("online", each) for each in (Online, ft.GRPO, ft.RLOO)),
    ],
)
def test_a_page_has_what_a_method_adds(page, method):
    """Its own table, less the optimizer's section and what `sft` has, which have others."""
    others = [ft.Recipe, ft.SFT] if page == "recipes" else [ft.Recipe]
    common = {line for each in others for line in reference(each).splitlines()}
    own = [
        line
        for line in reference(method).split("\n")[2:]
        if line[:3] != "| `" or line not in common
    ]
    document = (ROOT / f"docs/{page}.md").read_text()
    assert "\n".join(own) in document
    if page == "methods":
        rows = document.splitlines()
        (row,) = [line for line in rows if line.startswith(f"| `{method.method}` |")]
        assert row.endswith(f"| {method().optim.lr:g} |")


def test_the_documents_name_every_backend_format_and_method():
    page = (ROOT / "docs/backends.md").read_text()
    named = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert [name for name in named if name not in METHODS] == BACKENDS
    assert sorted(BACKENDS) == backend.names()
    formats = (ROOT / "docs/formats.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", formats, re.MULTILINE) == list(FORMATS)
    methods = (ROOT / "docs/methods.md").read_text()
    assert all(f"`{method}`" in methods for method in METHODS)


@each_document
def test_links_lead_to_files_that_exist(document):
    links = re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@each_document
def test_documents_name_only_targets_and_recipes_that_exist(document):
    text = document.read_text()
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= set(targets.split())
    recipes = re.findall(r"(?:train|launch|plan|show) ([a-z]\w*_\w+)|RECIPE=(\w+)", text)
    assert {one or other for one, other in recipes} <= {path.stem for path in RECIPES}
