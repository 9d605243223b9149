"""How commands end where a folder, a stream, a file or a record is not as it should be."""

import json
import os
import pwd
import resource
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import (
    ROOT,
    Tiny,
    copy_of,
    end_tree,
    environment,
    slow,
    start,
    wait_for,
    warm_python,
    write_recipe,
)
from small_tokenizer import small_tokenizer

from finetune.cache import cache, hub_cache
from finetune.data.chat import template_limits
from finetune.data.chat.turns import Turns
from finetune.data.samples import Conversation
from finetune.errors import FinetuneError, of_a_file
from finetune.exporters.export import export
from finetune.reports.page import report
from finetune.runs.metrics import read_history
from finetune.runs.run import Run
from finetune.verification.proofs.runs import family_of

WEIGHTS = "final/adapter_model.safetensors"
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")


@pytest.fixture
def made(run_of, tmp_path: Path) -> Run:
    """A finished run, which a test may change."""
    return copy_of(run_of("single", adapter={"r": 8}), tmp_path / "made")


@pytest.fixture
def words(tiny: Tiny, tmp_path: Path) -> list[str]:
    """What trains one step of a tiny model into tmp_path/run, after its verb."""
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(adapter={"r": 4}, max_steps=1))
    return [str(recipe), "--precision", "fp32", "--no-plot", "--output", str(tmp_path / "run")]


def ended(
    command: list[str], folder: Path, **streams: object
) -> "subprocess.CompletedProcess[str]":
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run(
        command, cwd=folder, env=environment(folder / "cache"), text=True, timeout=300, **streams
    )


@pytest.mark.parametrize("verb", [slow("launch"), "list"])
def test_a_module_of_the_working_folder_is_never_picked_up(tmp_path, words, verb):
    """By the installed script, and by `python -m`, which looks for the toolkit there."""
    code = "import sys; from finetune.cli import run; sys.argv[0] = 'finetune'; run()"
    command, names = [sys.executable, "-P", "-c", code, "launch", *words], ("finetune", "queue")
    if verb == "list":
        command, names = [sys.executable, "-m", "finetune", "list"], ("yaml",)
    for name in (*names, "tokenize"):
        (tmp_path / f"{name}.py").write_text("print('A STRANGER RUNS'); raise SystemExit(0)\n")
    done = ended(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "A STRANGER RUNS" not in done.stdout + done.stderr
    assert (tmp_path / "run" / WEIGHTS).is_file() == (verb == "launch")


def test_training_continues_when_its_output_is_closed(tmp_path, words):
    reader, writer = os.pipe()
    os.close(reader)
    done = ended([warm_python(), "-m", "finetune", "train", *words], tmp_path, stdout=writer)
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert "standard output: Broken pipe; the work continues" in done.stderr
    assert (tmp_path / "run" / WEIGHTS).is_file()
    end = read_history(Run(tmp_path / "run")).end
    assert end.reason == "finished"


@FULL
@pytest.mark.slow
def test_a_launch_continues_when_the_disk_of_its_log_is_full(tmp_path, words):
    command = [warm_python(), "-m", "finetune", "launch", *words]
    with Path("/dev/full").open("w") as full:
        assert ended(command, tmp_path, stdout=full, stderr=full).returncode == 0
    assert (tmp_path / "run" / WEIGHTS).is_file()


@FULL
def test_an_answer_that_could_not_be_written_is_a_failure(tmp_path):
    with Path("/dev/full").open("w") as full:
        done = ended([sys.executable, "-m", "finetune", "list"], tmp_path, stdout=full)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_error_of_a_user_is_reported_and_a_bug_is_not_hidden(tmp_path):
    denied = PermissionError(13, "Permission denied", str(tmp_path / "a"))
    assert of_a_file(denied) == f"{tmp_path / 'a'}: Permission denied"
    assert of_a_file(FileNotFoundError(2, "No such file", str(ROOT / "finetune/x.json"))) is None
    assert of_a_file(OSError("of a library")) is None
    assert of_a_file(OSError(28, "No space left on device")) is not None


def test_a_damaged_record_is_named_by_the_report(made):
    run = made
    records = [run.recipe, run.plan, run.data, run.environment, run.realised]
    for path in [*records, run.samples, run.proof]:
        kept = path.read_bytes() if path.exists() else None
        for shape in ["", "[", "[]", '"x"', "null", "5", "[5]", "[{}]", '{"a": 1}', "\ud800"]:
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
    run = made
    before = {path.name for path in run.root.iterdir()} - {"report.html"}
    run.report.unlink(missing_ok=True)
    run.report.mkdir()
    with pytest.raises(OSError, match=r"report\.html"):
        report(run)
    run.report.rmdir()
    assert {path.name for path in run.root.iterdir()} == before


def test_an_export_reports_an_unusable_target(tmp_path, made, monkeypatch):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/mine.txt").write_text("mine")
    for marker in ("{", "[]", '{"files": 5}', "\udfff"):
        (tmp_path / "x/export.json").write_bytes(marker.encode("utf-8", "surrogatepass"))
        with pytest.raises(FinetuneError, match="holds files not written by an export"):
            export(made, tmp_path / "x")
    with pytest.raises(OSError, match="File name too long") as long:
        export(made, tmp_path / ("a" * 300))
    assert of_a_file(long.value) is not None
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export(made, ".")
    assert (tmp_path / "here/adapter_model.safetensors").is_file()


def test_without_a_home_folder_caches_are_in_temporary_files(monkeypatch, tmp_path):
    for name in ("FINETUNE_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "unset")  # restored at the end
    monkeypatch.delenv("HOME")
    monkeypatch.delattr(pwd, "getpwuid")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    home = tmp_path / f"finetune-{os.getuid()}" / ".cache"
    assert (cache("data"), hub_cache()) == (home / "finetune/data", home / "huggingface/hub")
    os.environ.pop("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "finetune-12345").mkdir()
    with pytest.raises(FinetuneError, match="belongs to another user; set HOME"):
        cache("data")


@pytest.mark.signals
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "did not finish within"),
        ("{{ 10 ** (10 ** 9) }}", "did not finish"),  # one operation, which no signal interrupts
        ("{{ 'x' * 10**12 }}", "too much memory"),
        ("{{ 'x' | center(10**12) }}", "too much memory"),
    ],
)  # fmt: skip
def test_a_template_has_limits_and_other_threads_have_none(template, said, monkeypatch):
    template_limits._templates(os.getpid()).end()
    monkeypatch.setattr(template_limits, "SECONDS", 0.3)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    turns = Turns(small_tokenizer(), template)
    talk = Conversation(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))
    with ThreadPoolExecutor(2) as pool:
        rendered = [pool.submit(turns.render, talk) for _ in range(4)]
        while not all(each.done() for each in rendered):
            now = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
            assert now == before
    for each in rendered:
        with pytest.raises(FinetuneError, match=said):
            each.result()
    sound = Turns(small_tokenizer(), "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert sound.mark(talk).text == "ab"


def listening(process: "subprocess.Popen[str]") -> set[str]:
    """Addresses on which a process and those below it accept connections."""
    pids = {each.pid for each in family_of(process.pid)}
    return {
        connection.laddr.ip
        for connection in psutil.net_connections("tcp")
        if connection.pid in pids and connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.slow
def test_a_launch_on_one_machine_listens_on_the_loopback_only(tmp_path, words):
    run = Run(tmp_path / "run")
    more = ["max_steps=100000", "--backend", "zero2", "--processes", "2"]
    process = start(["launch", *words, *more], tmp_path, warm=True)
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
