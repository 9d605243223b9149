"""Every command and every line of Python in the documents works as it is written there."""

import argparse
import contextlib
import functools
import inspect
import io
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import method_matrix
import pytest
from accelerate.commands.launch import launch_command_parser
from conftest import (
    ROOT,
    Finished,
    copy_of,
    end_tree,
    run_command,
    start,
    warm_python,
    write_recipe,
    written,
)

import finetune as ft
from finetune import backend, catalog
from finetune.cli.main import build_parser, main
from finetune.errors import FinetuneError
from finetune.launchers import QUEUES
from finetune.planner import plan
from finetune.recipe import Recipe

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXTENDING = ROOT / "docs/extending.md"


def blocks(document: Path) -> Iterator[tuple[str, str]]:
    """Language and text of every fenced block."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.DOTALL | re.M):
        yield match[1], match[2]


def commands(document: Path) -> Iterator[str]:
    """Commands of the shell blocks: one a line, a backslash continues it."""
    for language, text in blocks(document):
        if language in {"sh", "bash", "console"}:
            for line in text.replace("\\\n", " ").splitlines():
                command = line.removeprefix("$ ").split("  #")[0].strip()
                if command and not command.startswith("#"):
                    yield " ".join(command.split())


COMMANDS = [(path.name, command) for path in DOCUMENTS for command in commands(path)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny) -> Path:
    """A working directory with what a checkout has and the commands name."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "recipes", "accelerate_configs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "data.jsonl").symlink_to(tiny.data)
    (folder / "my-model").symlink_to(tiny.model)
    rows = [{"ask": f"Say {word}. ", "say": word} for word in ("yes", "no", "maybe")]
    written(folder / "asks.jsonl", rows)
    (folder / "clusters").mkdir()
    for language, text in blocks(ROOT / "docs/clusters.md"):
        if language == "yaml":
            (folder / text.split()[1]).write_text(text)
    for name, kind in (("my_tuning.py", "python"), ("my_backend.yaml", "yaml")):
        texts = [text for language, text in blocks(EXTENDING) if language == kind]
        (folder / name).write_text("\n".join(texts))
    return folder


Do = Callable[..., Finished]


@pytest.fixture(scope="module")
def do(folder, finetune, session_cache) -> Iterator[Do]:
    """Run a command in that folder, each only once; those that compute are processes."""
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}

    @functools.cache
    def do(*words: str) -> Finished:
        if words[0] not in ("list", "show", "plan", "init"):
            return finetune(*words, cwd=folder, env=paths)
        if "--verify" in words:
            return run_command([warm_python(), "-m", "finetune", *words], session_cache, folder)
        out, err = io.StringIO(), io.StringIO()
        to_out, to_err = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        with contextlib.chdir(folder), to_out, to_err:
            status = main(list(words))
        return Finished(status, out.getvalue(), err.getvalue())

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield do


@pytest.fixture(scope="module")
def named(folder, tiny, run_of) -> dict[str, str]:
    """What stands for the names of the documents: runs, and a recipe."""
    run = run_of(adapter={"r": 8})
    places = {name: copy_of(run, folder / name.lower()).root for name in ("RUN", "OTHER")}
    return {
        **{name: str(place) for name, place in places.items()},
        "RECIPE": str(write_recipe(folder / "r.json", tiny.fields())),
    }


# How a command is checked: as it is where it is cheap, else by what it would do.


def as_it_is(words: list[str], folder: Path, do: Do, *more: str) -> None:
    assert do(*words[1:], *more).passed().stdout


def as_a_plan(words: list[str], folder: Path, do: Do) -> None:
    """A training on models of the hub: the same recipe, overrides and backend are planned.

    Flags that are not `launch`'s own must be flags of `accelerate launch`.
    """
    arguments, unknown = build_parser().parse_known_args(words[1:])
    if getattr(arguments, "launcher", None) in QUEUES:
        as_it_is(words, folder, do, *({"--dry-run"} - {*words}))
        return
    flags = [word for word in unknown if word not in arguments.overrides]
    launch_command_parser().parse_args([*flags, "script.py"])
    chosen = ["--backend", arguments.backend] if arguments.backend else []
    chosen += ["--processes", str(arguments.processes)] if arguments.processes else []
    stages = [arguments.recipe]
    if getattr(arguments, "chain", None):
        stages += [word for word in arguments.overrides if "=" not in word]
    pairs = [word for word in arguments.overrides if word not in stages]
    for stage in stages:
        as_it_is(words[:1], folder, do, "plan", stage, *pairs, *chosen)


def as_a_plan_of_accelerate(words: list[str], folder: Path, do: Do) -> None:
    """`accelerate launch --config_file FILE -m finetune train ...`: read by its own parser."""
    given = launch_command_parser().parse_args(words[2:])
    assert (words[1], given.module, given.training_script) == ("launch", True, "finetune")
    verb, recipe, *overrides = given.training_script_args
    assert verb == "train"
    as_it_is(words[:1], folder, do, "plan", recipe, *overrides, "--backend", given.config_file)


def as_a_dry_run(words: list[str], folder: Path, do: Do) -> None:
    """A target of make: what it would run; `train` names a pair that can be planned."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "-n", *words[1:]],
        cwd=folder, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    last = done.stdout.splitlines()[-1]
    assert last.startswith(".venv/bin/") or words[1] == "setup"
    if words[1] == "train":
        as_a_plan(shlex.split(last.removeprefix(".venv/bin/")), folder, do)


def as_a_pair(words: list[str], folder: Path, do: Do) -> None:
    """A proof: its words are read, and the planner lets the recipe run on each of its backends."""
    arguments = build_parser().parse_args(words[1:])
    for name in arguments.backends.split(","):
        settled = plan(catalog.resolve(arguments.recipe, arguments.overrides), name, 2)
        assert settled.backend.name == name


def as_words(words: list[str], folder: Path, do: Do) -> None:
    """A command on a model of the hub: its words are read, and the recipe is one."""
    arguments = build_parser().parse_args(words[1:])
    catalog.resolve(arguments.recipe, arguments.overrides)


def as_it_is_but(flag: str, told: str, words: list[str], folder: Path, do: Do) -> None:
    """With a flag that names what is not there, that is said."""
    if flag not in words:
        as_it_is(words, folder, do)
        return
    assert told in do(*words[1:]).refused()


def shortly(*more: str) -> Callable[..., None]:
    """With short answers."""
    return lambda words, folder, do: as_it_is(words, folder, do, *more, "--max-new-tokens", "4")


def as_one_trial(words: list[str], folder: Path, do: Do) -> None:
    """A sweep, ended after its first trial."""
    words[words.index("--trials") + 1] = "1"
    as_it_is(words, folder, do, "--no-plot", "--precision", "fp32")
    assert "Trials" in (folder / "runs/r-sweep/index.html").read_text()


@contextlib.contextmanager
def started(words: list[str], folder: Path) -> Iterator[str]:
    """A command on a free port, by the first line that it prints; it is ended afterwards."""
    process = start([*words[1:], "--port", "0"], folder, warm=True)
    try:
        yield process.stdout.readline()
    finally:
        end_tree(process.pid)
        process.wait()


def as_a_server(words: list[str], folder: Path, do: Do) -> None:
    """Asked for its models."""
    with started(words, folder) as said:
        url = said.split(" at ")[1].split(",")[0]
        assert httpx.get(f"{url}/models").json()["data"][0]["id"] == "tuned"


def as_a_board(words: list[str], folder: Path, do: Do) -> None:
    """Opened at the address that it prints."""
    with started(words, folder) as said:
        address = said.split(": ", 1)[1].strip()
        assert httpx.get(address).status_code == 303
        assert httpx.get(address.partition("?")[0]).status_code == 200


def as_an_install(words: list[str], folder: Path, do: Do) -> None:
    """Of the checkout: it is not installed anew, but the parts that are named exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.fullmatch(r"\.(?:\[([\w,]+)\])?", words[2])
    assert named
    assert set((named[1] or "dev").split(",")) <= project["optional-dependencies"].keys()


CHECKS: dict[str, Callable[[list[str], Path, Do], None]] = {
    **dict.fromkeys(
        [
            f"finetune {verb}"
            for verb in "compare doctor import init inspect list plan show".split()
        ],
        as_it_is,
    ),
    **dict.fromkeys(
        [
            f"make {target}"
            for target in "quickstart quickstart-dpo quickstart-grpo quickstart-images setup test "
            "train".split()
        ],
        as_a_dry_run,
    ),
    "finetune sweep": as_one_trial,
    "finetune chat": shortly("--prompt", "hello"),
    "finetune eval": shortly(),
    "finetune export": functools.partial(as_it_is_but, "--llama-cpp", "git clone"),
    "finetune report": functools.partial(as_it_is_but, "--proof", "cannot be read as a proof"),
    "finetune prove": as_a_pair,
    "finetune board": as_a_board,
    "finetune serve": as_a_server,
    "finetune teach": as_words,
    "finetune launch": as_a_plan,
    "finetune train": as_a_plan,
    "accelerate launch": as_a_plan_of_accelerate,
    "pip install": as_an_install,
}
"""A command that begins with none of these fails the test: say here how it is checked."""


def test_there_are_commands_to_check():
    kinds = {" ".join(command.split()[:2]) for _, command in COMMANDS}
    assert kinds <= CHECKS.keys()
    assert {"make setup", "make test", "finetune launch"} <= kinds
    assert len(SHOWN.findall((ROOT / "docs/memory.md").read_text())) == 5


SLOW = re.compile(
    r"finetune (board|eval|export|report|serve|sweep|"
    r"doctor (\w+_lora|quickstart_base)|plan .*--verify)"
)
"""They compute for long; the tests of these commands have quick ones."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] if SLOW.match(command) else [])
        for command in dict.fromkeys(command for _, command in COMMANDS)
    ],
)
def test_a_command_of_the_documents_works(command, folder, do, request):
    words = shlex.split(command)
    if re.search(r"\b(RUN|OTHER|RECIPE)\b", command):
        named = request.getfixturevalue("named")
        name = re.compile(r"\b(RUN|OTHER)\b|^RECIPE$")
        words = [name.sub(lambda found: named[found[0]], word) for word in words]
    CHECKS[" ".join(words[:2])](words, folder, do)


SHOWN = re.compile(r"^```sh\n(finetune plan [^\n]+)\n```\n```text\n(.*?)^```$", re.DOTALL | re.M)

PLANS = SHOWN.findall((ROOT / "docs/memory.md").read_text())


@pytest.mark.parametrize(("command", "shown"), PLANS)
def test_a_plan_prints_the_numbers_that_a_document_shows(command, shown, do):
    done = do(*shlex.split(command)[1:]).passed()
    printed = [line.split("  <-")[0].rstrip() for line in done.stdout.splitlines()]
    assert set(shown.splitlines()) <= set(printed)


def test_the_table_of_methods_is_what_the_planner_decides_and_what_tests_train():
    assert method_matrix.table() in (ROOT / "docs/backends.md").read_text()
    assert method_matrix.exceptions() == []
    for tests in method_matrix.RUN.values():
        for test in tests.values():
            file, _, name = test.partition("::")
            assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), test


FITS = re.compile(r"^\| (\S+) \| ([\w ]+) \| ([\d,]+) GB \| (\w+) \| (\w+) \| (\w+) \|$", re.M)


def test_the_table_of_what_fits_is_what_the_planner_decides():
    found = FITS.findall((ROOT / "docs/memory.md").read_text())
    homes = {"Qwen3": "Qwen/", "Llama-3.1": "meta-llama/", "Llama-3.3": "meta-llama/"}
    ends = {"Llama-3.3-70B": "-Instruct"}
    assert len(found) == 12
    for title, kind, size, *cells in found:
        name = f"{homes[title.rsplit('-', 1)[0]]}{title}{ends.get(title, '')}"
        bare = ft.SFT(ft.Model(name, activation_checkpointing=True)).with_batch(
            rows=8, micro_rows=1, max_length=2048
        )
        bare = bare.with_data(ft.Data("rows.jsonl", "messages"))
        recipe = {"LoRA": bare.with_lora(), "QLoRA": bare.with_qlora()}.get(kind, bare)
        gpus = ("RTX4090", "L40S", "H100-80")
        memory = [ft.plan(recipe, "single", gpu=gpu).summary()["memory"] for gpu in gpus]
        assert f"{memory[0]['process'] / 1e9:,.0f}" == size
        words = {"safe": "yes", "tight": "tight", "no": "no"}
        assert [words[each["status"]] for each in memory] == cells


def test_the_readme_shows_lines_of_a_plan(do):
    """Those that a small model in place of `my-model` changes are compared up to their numbers."""
    (command, shown) = re.findall(
        r"^```sh\n(finetune plan [^\n]*)\n```\n\n```text\n(.*?)^```$",
        (ROOT / "README.md").read_text(), re.DOTALL | re.M,
    )[0]  # fmt: skip
    printed = do(*shlex.split(command)[1:]).passed().stdout.splitlines()
    kinds = {line[:13] for line in printed}
    for line in shown.splitlines():
        assert line in printed if line.startswith(("model", "batch")) else line[:13] in kinds


def verbs() -> dict[str, argparse.ArgumentParser]:
    actions = build_parser()._actions
    (verbs,) = [each for each in actions if isinstance(each, argparse._SubParsersAction)]
    return verbs.choices


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_running_text_have_verbs_and_flags_that_exist(document):
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.M)
    known = verbs()
    for line in re.findall(r"`finetune ([^`]+)`", text):
        verb, *words = line.split()
        assert verb in known, line
        flags = {word for word in words if word.startswith("--")}
        assert flags <= set(known[verb]._option_string_actions), line
    every_flag = {flag for parser in known.values() for flag in parser._option_string_actions}
    named = set(re.findall(r"`(--[a-z][a-z-]*)(?: [A-Z]\w*)?`", text))
    assert named <= every_flag | {"--config_file", "--rows-file"}


def python_blocks(name: str) -> list[str]:
    return [text for language, text in blocks(ROOT / name) if language == "python"]


def run_python(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, "document", "exec"), names)
    return names


def test_the_readme_notebook_code_runs_up_to_the_training(capsys):
    """All of it but `ft.launch`, which would train on a model of the hub: its call is read."""
    (code,) = python_blocks("README.md")
    body, call = code.split("run = ft.launch", 1)
    names = run_python(body)
    assert capsys.readouterr().out.startswith("model        Qwen/Qwen3-0.6B: LoRA r=16")
    bound = eval(f"bind{call}", names | {"bind": inspect.signature(ft.launch).bind})
    machine = backend.load(bound.arguments["backend"])
    assert plan(bound.arguments["recipe"], machine, bound.arguments["processes"]).processes == 2


def test_recipes_of_the_reference_and_of_the_data_page_are_recipes(tmp_path):
    (code,) = python_blocks("docs/recipes.md")
    (text,) = [text for language, text in blocks(ROOT / "docs/recipes.md") if language == "yaml"]
    (tmp_path / "r.yaml").write_text(text)
    assert run_python(code)["recipe"] == catalog.load(tmp_path / "r.yaml")
    pairs = re.findall(r"`((?:[\w.]+=[\w.-]+ ?){2,})`", (ROOT / "docs/recipes.md").read_text())
    for each in pairs:
        catalog.resolve("qwen3_0_6b_lora", each.split())
    recipe = catalog.resolve("qwen3_0_6b_lora", pairs[0].split())
    assert (recipe.optim.lr, recipe.data[0].first) == (1e-4, 1000)
    (code,) = python_blocks("docs/images.md")
    recipe = run_python(code)["recipe"]
    assert (recipe.model.reads, recipe.model.quantization) == (("image",), "nf4")
    code, _ = python_blocks("docs/data.md")
    recipe: Recipe = run_python(f"from finetune import SFT, Data\nrecipe = (SFT(){code})")["recipe"]
    assert [data.format for data in recipe.data] == ["messages", "alpaca", "question_answer"]
    assert (recipe.data[1].first, recipe.data[2].repeat) == (5000, 3)


@pytest.mark.slow
def test_rows_that_are_nearly_alike_are_left_out_as_the_data_page_says(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", tmp_path / "p"]
    if subprocess.run([*install, "datasketch==2.0.0", "scipy"], capture_output=True).returncode:
        pytest.skip("datasketch cannot be installed here")
    drawn, words = random.Random(0), [f"{n:b}" for n in range(500)]
    asked = [" ".join(drawn.choices(words, k=60)) for _ in range(20)]
    nearly = [text + " please" for text in asked[:5]]
    rows = [{"question": text, "answer": "Yes"} for text in (*asked, *nearly, *asked[:2])]
    written(tmp_path / "data.jsonl", rows)
    _, code = python_blocks("docs/data.md")
    env = os.environ | {"PYTHONPATH": str(tmp_path / "p")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "7 of 27 rows dropped\n", done.stderr
    kept = (tmp_path / "different.jsonl").read_text().splitlines()
    assert [json.loads(row) for row in kept] == rows[:20]


def test_no_block_of_python_is_left_out():
    counts = {path.name: len(python_blocks(str(path))) for path in DOCUMENTS}
    assert {name: n for name, n in counts.items() if n} == {
        "README.md": 1, "board.md": 1, "clusters.md": 1, "data.md": 2, "extending.md": 9,
        "images.md": 1, "online.md": 1, "recipes.md": 1,
    }  # fmt: skip


def test_the_reward_of_the_page_scores_completions():
    (code,) = python_blocks("docs/online.md")
    completions = [[{"content": "It is 4."}], [{"content": "It is 5."}]]
    score = run_python(code)["short_and_right"]
    assert score(["2+2?"] * 2, completions, answer=["4", "4"]) == [1.0, 0.0]


def test_the_fields_that_a_continued_run_may_change_are_listed():
    text = " ".join((ROOT / "docs/checkpoints.md").read_text().split())
    (listed,) = re.findall(r"computes from its rows \(([^)]*)\)", text)
    assert re.findall(r"`([\w.]+)`", listed) == sorted(catalog.FREE_TO_CHANGE)


BASE = ft.SFT(ft.Model("m")).with_data(ft.Data("d.jsonl", "messages"))
COLUMNS: dict[str, Recipe] = {
    "full": BASE,
    "LoRA": BASE.with_lora(),
    "NF4": BASE.with_qlora(),
    "int8": BASE.with_model(ft.Model("m", quantization="int8")).with_lora(),
    "DoRA": BASE.with_lora(use_dora=True),
    "8-bit AdamW": BASE.with_optim(name="adamw_8bit"),
    "Adafactor": BASE.with_optim(name="adafactor"),
    "Muon": BASE.with_optim(name="muon"),
}


def works(recipe: Recipe, name: str) -> bool:
    try:
        plan(recipe, name)
    except FinetuneError:
        return False
    return True


def compatibility() -> str:
    """The table of `docs/backends.md`, from the planner's rules."""
    text = (ROOT / "docs/backends.md").read_text()
    names = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)[: len(backend.names())]
    rows = [["", *COLUMNS], ["---", *(":-:" for _ in COLUMNS)]]
    for name in names:
        cells = ["yes" if works(recipe, name) else "no" for recipe in COLUMNS.values()]
        rows.append([f"{name}", *cells])
    return "\n".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in row)}|" for row in rows)


def test_the_table_of_what_works_where_is_what_the_planner_decides():
    assert compatibility() in (ROOT / "docs/backends.md").read_text()


if __name__ == "__main__":  # print the table, to be pasted
    sys.stdout.write(compatibility() + "\n")
