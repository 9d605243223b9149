"""How commands end where a folder, a stream, a file or a record is not as it should be."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, Finetune, build_tiny, end_tree, environment, start, wait_for
from small_tokenizer import small_tokenizer

from finetune.cache import cache
from finetune.data.chat import template_limits
from finetune.data.chat.turns import Turns
from finetune.data.formats import Conversation
from finetune.errors import FinetuneError, of_a_file
from finetune.runs.metrics import read_history
from finetune.runs.run import Run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, finetune: Finetune) -> tuple[Path, Path]:
    """A recipe of a tiny model, and a run of it."""
    folder = tmp_path_factory.mktemp("made")
    recipe = write_small_recipe(folder)
    run = folder / "run"
    done = finetune("train", recipe, "--precision", "fp32", "--output", run)
    assert done.status == 0, done.output
    return recipe, run


def write_small_recipe(folder: Path) -> Path:
    (folder / "tiny").mkdir()
    recipe = folder / "lora.json"
    fields = build_tiny(folder / "tiny").fields(adapter={"r": 4}, max_steps=4)
    recipe.write_text(json.dumps(fields))
    return recipe


# What runs is the toolkit.


@pytest.mark.parametrize("name", ["finetune", "tokenize", "queue"])
def test_a_module_of_the_working_folder_is_never_picked_up(tmp_path, made, name):
    (tmp_path / f"{name}.py").write_text("print('A STRANGER RUNS'); raise SystemExit(0)\n")
    # As the installed script does.
    code = "import sys; from finetune.cli import run; sys.argv[0] = 'finetune'; run()"
    words = ["launch", str(made[0]), "--precision", "fp32", "--no-plot", "--output", "run"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *words, "max_steps=1"],
        cwd=tmp_path, env=environment(tmp_path / "cache"), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "A STRANGER RUNS" not in done.stdout + done.stderr
    assert (tmp_path / "run/final/adapter_model.safetensors").is_file()


def test_a_module_next_to_a_manual_launch_does_not_shadow_the_standard_library(tmp_path):
    (tmp_path / "tokenize.py").write_text("print('A STRANGER RUNS')\n")
    (tmp_path / "yaml.py").write_text("print('A STRANGER RUNS')\n")
    done = subprocess.run(
        [sys.executable, "-m", "finetune", "list"],
        cwd=tmp_path, env=environment(tmp_path / "cache"), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "A STRANGER RUNS" not in done.stdout + done.stderr


# Streams and signals.


def test_training_continues_when_its_output_is_closed(tmp_path, made):
    reader, writer = os.pipe()
    os.close(reader)
    run = tmp_path / "run"
    words = ["train", str(made[0]), "--precision", "fp32", "--no-plot", "--output", str(run)]
    done = subprocess.run(
        [sys.executable, "-m", "finetune", *words], stdout=writer, stderr=subprocess.PIPE,
        env=environment(tmp_path), text=True, timeout=300, check=False,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert "standard output: Broken pipe; the work continues" in done.stderr
    assert (run / "final/adapter_model.safetensors").is_file()
    end = read_history(Run(run)).end
    assert end is not None
    assert end.reason == "finished"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.slow
def test_a_launch_continues_when_the_disk_of_its_log_is_full(tmp_path, made):
    run = tmp_path / "run"
    words = ["launch", str(made[0]), "--precision", "fp32", "--no-plot", "--output", str(run)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "finetune", *words], stdout=full, stderr=full,
            env=environment(tmp_path), timeout=300, check=False,
        )  # fmt: skip
    assert done.returncode == 0
    assert (run / "final/adapter_model.safetensors").is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_an_answer_that_could_not_be_written_is_a_failure(tmp_path):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "finetune", "list"], stdout=full, stderr=subprocess.PIPE,
            env=environment(tmp_path), text=True, timeout=300, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_terminal_saves_as_a_scheduler_does(tmp_path, made):
    run = Run(tmp_path / "run")
    words = ["train", str(made[0]), "max_steps=100000", "--precision", "fp32", "--no-plot"]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where tests run under nohup
    try:
        process = start([*words, "--output", str(run.root)], tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        wait_for(lambda: any(run.read_metrics("train")), process)
        process.send_signal(signal.SIGHUP)
        _, stderr = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            end_tree(process.pid)
    assert process.returncode == 75, stderr
    assert "interrupted by SIGHUP" in stderr
    end = read_history(run).end
    assert end is not None
    assert run.newest() == end.step


# Files and records.


def test_a_file_error_of_a_user_is_reported_and_a_bug_is_not_hidden(tmp_path):
    denied = PermissionError(13, "Permission denied", str(tmp_path / "a"))
    assert of_a_file(denied) == f"{tmp_path / 'a'}: Permission denied"
    assert of_a_file(FileNotFoundError(2, "No such file", str(ROOT / "finetune/x.json"))) is None
    assert of_a_file(OSError("of a library")) is None
    assert of_a_file(OSError(28, "No space left on device")) is not None


SHAPES = ["", "[", "[]", '"x"', "null", "5", "[5]", "[{}]", '{"a": 1}', "\ud800"]


def test_a_damaged_record_is_named_by_the_report(made):
    from finetune.reports.page import report

    run = Run(made[1])
    records = [run.recipe, run.plan, run.data, run.environment, run.realised]
    for path in [*records, run.samples, run.proof]:
        kept = path.read_bytes() if path.exists() else None
        for shape in SHAPES:
            path.write_bytes(shape.encode("utf-8", "surrogatepass"))
            if shape == ("[]" if path == run.samples else '{"a": 1}'):
                report(run)  # empty, or without the known names: the page leaves them out
                continue
            with pytest.raises(FinetuneError) as refused:
                report(run)
            assert str(refused.value).startswith(f"{path}: ")
        path.unlink()
        if kept is not None:
            path.write_bytes(kept)
    assert report(run).is_file()
    inner = json.loads(run.plan.read_text())
    run.plan.write_text(json.dumps(inner | {"prediction": 5}))
    with pytest.raises(FinetuneError, match=r"plan\.json: cannot be read"):
        report(run)
    run.plan.write_text(json.dumps(inner))


def test_a_page_that_cannot_be_written_leaves_nothing_behind(made):
    from finetune.reports.page import report

    run = Run(made[1])
    before = {path.name for path in run.root.iterdir()} - {"report.html"}
    run.report.unlink(missing_ok=True)
    run.report.mkdir()
    with pytest.raises(OSError, match=r"report\.html"):
        report(run)
    run.report.rmdir()
    assert {path.name for path in run.root.iterdir()} == before


def test_an_export_reports_an_unusable_target(tmp_path, made, monkeypatch):
    from finetune.exporters.export import export

    run = Run(made[1])
    (tmp_path / "x").mkdir()
    (tmp_path / "x/mine.txt").write_text("mine")
    for marker in ("{", "[]", '{"files": 5}', "\udfff"):
        (tmp_path / "x/export.json").write_bytes(marker.encode("utf-8", "surrogatepass"))
        with pytest.raises(FinetuneError, match="holds files not written by an export"):
            export(run, tmp_path / "x")
    with pytest.raises(OSError, match="File name too long") as long:
        export(run, tmp_path / ("a" * 300))
    assert of_a_file(long.value) is not None
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export(run, ".")
    assert (tmp_path / "here/adapter_model.safetensors").is_file()


def test_without_a_home_directory_the_error_names_the_cache_variable(monkeypatch):
    for name in ("FINETUNE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/.cache")
    with pytest.raises(FinetuneError, match="set FINETUNE_CACHE"):
        cache("data")


# Templates.

SAID = Conversation(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))


@pytest.mark.signals
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "did not finish within"),
        ("{{ 'x' * 10**12 }}", "too much memory"),
        ("{{ 'x' | center(10**12) }}", "too much memory"),
    ],
)  # fmt: skip
def test_a_template_has_limits(template, said, monkeypatch):
    monkeypatch.setattr(template_limits, "SECONDS", 0.3)
    turns = Turns(small_tokenizer(), template)
    for _ in range(4):
        with pytest.raises(FinetuneError, match=said):
            turns.render(SAID)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


# Ports.


def listening(process: "subprocess.Popen[str]") -> set[str]:
    """Addresses on which a process and those below it accept connections."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        pids = {root.pid, *(child.pid for child in root.children(recursive=True))}
        return {
            connection.laddr.ip
            for connection in psutil.net_connections("tcp")
            if connection.pid in pids and connection.status == psutil.CONN_LISTEN
        }
    return set()


@pytest.mark.parametrize("backend", ["ddp", pytest.param("zero2", marks=pytest.mark.slow)])
def test_a_launch_on_one_machine_listens_on_the_loopback_only(tmp_path, made, backend):
    run = Run(tmp_path / "run")
    words = ["launch", str(made[0]), "max_steps=100000", "--backend", backend, "--processes", "2"]
    words += ["--precision", "fp32", "--no-plot", "--output", str(run.root)]
    process = start(words, tmp_path)
    found: set[str] = set()
    try:

        def trains() -> bool:
            found.update(listening(process))
            return any(run.read_metrics("train"))

        wait_for(trains, process)
        found.update(listening(process))
    finally:
        if process.poll() is None:
            end_tree(process.pid)
        process.communicate()
    assert found
    assert all(address.startswith(("127.", "::1", "::ffff:127.")) for address in found), found
