"""Whatever a file holds, it is read or refused by name, in time; never with another error.

A few cases of each subject run every day, and more are marked slow; with a number of cases and a
seed of one's own: `python -m benchmarks fuzz --cases 100000 --seed 0`.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT

from benchmarks.fuzz import cases, changes
from benchmarks.fuzz.command import shares
from benchmarks.fuzz.subjects import Subject, build, subjects
from finetune import backend, catalog
from finetune.cli.main import main
from finetune.data.read.files import read_file
from finetune.errors import LONGEST, FinetuneError, one_line
from finetune.process.yaml_text import MOST_VALUES, NotYAML, read_yaml
from finetune.runs.summary import base_model

NAMES = (
    "recipes", "overrides", "plans", "backends", "reports", "cards", "resumed", "manifests",
    "proofs", "data", "asked", "templates", "prepared", "models", "adapters", "exports", "starts",
)  # fmt: skip
QUICK, MANY = 300, 1_500
"""Cases of all subjects together."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def every(home: Path) -> Iterator[dict[str, Subject]]:
    before = dict(os.environ)
    os.environ |= {"FINETUNE_CACHE": str(home / "own"), "HF_HUB_OFFLINE": "1"}
    try:
        build(home)
        yield subjects(home)
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_every_subject_has_its_tests(every):
    assert tuple(every) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_not_changed_is_read(every, name):
    files = every[name].files
    for path in files[:1] if name == "starts" else files:  # each start reads all of them
        every[name].read(path)


@pytest.mark.signals
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("count", "seed"), [(QUICK, 1), pytest.param(MANY, 2, marks=pytest.mark.slow)]
)
def test_a_changed_file_is_read_or_refused(every, name, count, seed):
    number = max(3, shares(every, count)[name])
    found = cases.run_cases(name, every[name], seed, range(number))
    assert [str(fault) for fault in found.faults] == []


def test_a_case_is_made_again_from_its_number(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"b": [2, 3]}\n')
    content = path.read_bytes()
    made = [
        changes.change(cases.generator(0, "data", number), path.name, content)
        for number in (*range(40), *range(40))
    ]
    assert made[:40] == made[40:]
    assert len(set(made[:40])) > 30


def test_a_reader_that_fails_hangs_or_takes_memory_is_wrong(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')

    def hang(_: Path) -> None:
        while True:
            time.process_time()

    def leave(_: Path) -> None:
        raise SystemExit(0)

    readers = {
        "KeyError": lambda _: {}["a"],
        "Hung": hang,
        "MemoryError": lambda _: bytearray(1 << 33),
        "SystemExit": leave,
    }
    monkeypatch.setattr(cases, "SECONDS", 0.3)
    for kind, read in readers.items():
        found = cases.run_case(kind, Subject([path], read, 1), 0, 0)
        assert isinstance(found, cases.Fault)
        assert found.kind.startswith(f"{kind} at ")
        assert path.read_text() == '{"a": 1}'
    assert cases.run_case("read", Subject([path], lambda _: None, 1), 0, 0) == "read"


def doubled(levels: int, form: str) -> str:
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels):
        inner = ", ".join(form.format(number, level - 1) for number in range(9))
        lines.append(f"a{level}: &a{level} " + (f"{{{inner}}}" if ":" in form else f"[{inner}]"))
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: &a [*a]", "line 1: the value contains itself"),
        ("a: &a\n  b: {c: *a}", "the value contains itself"),
        (doubled(30, "*a{1}"), f"more than {MOST_VALUES:,} values"),
        (doubled(30, "k{0}: *a{1}"), f"more than {MOST_VALUES:,} values"),
        ("a: &a {b: 1}\nc: *b", "line 2 column 4: found undefined alias 'b'"),
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' occurs a second time"),
        ("a: [", "line "),
        ("[" * 10_000, "lists and maps are nested too deeply"),
        ("- " * 10_000, "lists and maps are nested too deeply"),
        ("a: !!timestamp x", "a value is not of the kind of its tag"),
        ("a: !!bool x", "a value is not of the kind of its tag"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor for the tag"),
        ("a: \x07", "characters are not allowed"),
    ],
)  # fmt: skip
def test_endless_or_invalid_yaml_is_refused_quickly(text, told):
    begun = time.process_time()
    with pytest.raises(NotYAML) as refused:
        read_yaml(text)
    assert time.process_time() - begun < 5
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_yaml_with_aliases_that_end_is_read():
    assert read_yaml("a: &a {x: 1, y: &y [2]}\nb: *a\nc: {<<: *a, x: 3}\nd: [*y, *y]") == {
        "a": {"x": 1, "y": [2]}, "b": {"x": 1, "y": [2]}, "c": {"x": 3, "y": [2]}, "d": [[2], [2]],
    }  # fmt: skip


@pytest.mark.parametrize("text", ["a: &a [*a]", doubled(30, "*a{1}"), "method: !!bool x"])
def test_recipes_and_backends_of_such_yaml_are_refused_by_name(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    for read in (lambda: catalog.load(path), lambda: backend.load(str(path))):
        with pytest.raises(FinetuneError) as refused:
            read()
        assert str(refused.value).startswith(f"{path}: ")
    recipe = catalog.load(ROOT / "recipes/quickstart.py")
    with pytest.raises(FinetuneError, match=r"override: model\.config"):
        catalog.override(recipe, [f"model.config={{b: {text.splitlines()[0][3:]}, c: &b [*b]}}"])


def test_a_problem_is_one_line_that_a_terminal_shows_as_it_is():
    assert one_line("a: 'b' is wrong") == "a: 'b' is wrong"
    assert one_line("first\n  second\r\n\n\tthird\n") == "first second third"
    assert one_line("\x1b[2J\ud800\u202e\0") == "\\x1b[2J\\ud800\\u202e\\x00"
    long = one_line("x" * 100_000)
    assert len(long) < LONGEST + 50
    assert "[96,000 characters left out]" in long
    error = FinetuneError("a\nb", "c")
    assert (error.problems, str(error)) == (("a b", "c"), "a b\nc")


def test_an_arrow_file_whose_offsets_lead_out_of_it_is_refused(tmp_path):
    """pyarrow would end the process where it makes a text of them."""
    good = pyarrow.array(["ab", "cd"])
    offsets = pyarrow.array([0, -5, 4], pyarrow.int32()).buffers()[1]
    torn = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, good.buffers()[2]])
    beyond = pyarrow.array([0, 9, 2], pyarrow.int32()).buffers()[1]
    lists = pyarrow.Array.from_buffers(
        pyarrow.list_(pyarrow.string()), 2, [None, beyond], children=[good]
    )
    path = tmp_path / "a.arrow"
    for column in (torn, lists, pyarrow.StructArray.from_arrays([torn], ["x"])):
        batch = pyarrow.RecordBatch.from_arrays([column], ["text"])
        with pyarrow.ipc.new_stream(path, batch.schema) as stream:
            stream.write_batch(batch)
        with pytest.raises(FinetuneError, match="it is damaged in its column 'text'"):
            list(read_file(path))


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_a_column_whose_name_is_not_utf8_is_refused(tmp_path, suffix):
    path, table = tmp_path / f"a.{suffix}", pyarrow.table({"columnname": ["ab"]})
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    path.write_bytes(path.read_bytes().replace(b"columnname", b"columnn\xbame"))
    with pytest.raises(FinetuneError, match=r"it is not a complete (Arrow|Parquet) file"):
        list(read_file(path))


def test_a_recipe_that_ends_the_interpreter_is_a_mistake_of_the_recipe(tmp_path):
    path = tmp_path / "r.py"
    path.write_text("x = 1\nraise SystemExit(0)\n")
    with pytest.raises(FinetuneError, match=r"r\.py:2: SystemExit: 0"):
        catalog.load(path)


def test_a_recipe_or_backend_that_cannot_be_read_does_not_hide_the_others(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name, content in (
        ("recipes/broken.py", b"x = (\n"), ("recipes/bytes.yaml", b"# \xff\n"),
        ("accelerate_configs/bytes2.yaml", b"# \xff\n"),
    ):  # fmt: skip
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    assert main(["list"]) == 0
    told = capsys.readouterr().out
    assert "(cannot be read: '(' was never closed" in told
    assert told.count("(cannot be read: 'utf-8' codec") == 2
    assert "quickstart" in told


NOBODY = {"FINETUNE_CACHE": "~nobody-of-this-name/cache"}
ASKED = "eval HOME/run --limit 1 --max-new-tokens 1"
LONG = "long" * 100
"""A name that no file system takes."""
PLACES: list[tuple[str, int, str, dict[str, str]]] = [
    ("inspect RECIPE --html /dev/full", 2, "No space left on device", {}),
    ("inspect RECIPE --html HOME/data.jsonl/x.html", 2, "Not a directory", {}),
    ("inspect RECIPE", 2, "there is no place for the cache", NOBODY),
    ("inspect RECIPE", 2, "cannot write the prepared data", {"FINETUNE_CACHE": "/proc/x"}),
    (f"{ASKED} --output /proc/x", 2, "No such file or directory", {}),
    (f"{ASKED} --output HOME/data.jsonl", 2, "exists and was not written by an evaluation", {}),
    (ASKED, 2, "there is no place for the cache", NOBODY),
    ("eval HOME/run --data HOME/none.jsonl", 2, "no such file or folder", {}),
    ("export HOME/run --to /proc/x", 1, "could not be written", {}),
    ("export HOME/run --to HOME/data.jsonl/x", 1, "could not be written", {}),
    ("export HOME/run --to HOME/data.jsonl", 2, "exists and is not a folder", {}),
    ("chat HOME/data.jsonl --prompt a", 2, "no such folder", {}),
    ("chat HOME/data --prompt a", 2, "neither a model", {}),
    ("report HOME/model", 2, "not a run directory", {}),
    (f"chat {LONG} --prompt a", 2, "no such folder", {}),
    (f"plan RECIPE model.name={LONG}", 2, LONG, {}),
    (f"plan RECIPE --backend {LONG}", 2, "backend 'longlong", {}),
    (f"doctor {LONG}", 2, LONG, {}),
    (f"eval {LONG}", 2, LONG, {}),
    (f"serve {LONG}", 2, LONG, {}),
    (f"train RECIPE data.0.source={LONG}", 2, LONG, {}),
    (f"train RECIPE model.adapter={LONG}", 2, LONG, {}),
    ("report HOME/run --proof HOME/model", 2, "cannot be read as a proof", {}),
    ("prove RECIPE --backends single --output /proc/x", 2, "No such file or directory", {}),
    ("prove RECIPE --backends single --output HOME/data.jsonl", 2, "data.jsonl: File exists", {}),
]


def test_a_config_that_is_nested_too_deeply_is_named(every, home, tmp_path, capsys):
    assert every
    (tmp_path / "config.json").write_text("[" * 10**6)
    assert main(["plan", str(home / "recipes/recipe.json"), f"model.name={tmp_path}"]) == 0
    told = capsys.readouterr().out
    assert f"not predicted: {tmp_path}/config.json: cannot be read: maximum recursion" in told


def test_a_card_of_a_model_with_a_long_name_is_written():
    assert base_model({"model": {"name": LONG}}) == LONG


@pytest.mark.parametrize(("words", "status", "told", "variables"), PLACES)
def test_an_unusable_path_is_reported_in_one_line(
    every, home, words, status, told, variables, monkeypatch, capsys
):
    assert every
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    named = words.replace("RECIPE", "HOME/recipes/recipe.json").replace("HOME", str(home))
    assert main(named.split()) == status
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert told in errors[0]
