"""The board shows what runs write, starts what it shows, and changes nothing when it ends."""

import contextlib
import html
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import psutil
import pytest
from boards import Board, boarding
from conftest import Tiny, Train, copy_of, end_tree, losses, start, write_recipe, written

from finetune.board import access
from finetune.board.devices import Device, Need
from finetune.board.tasks import Tasks
from finetune.runs.progress import Watch
from finetune.runs.run import Run, write_json

MARKUP = '<b>"bold" & more</b>'
SHORT: dict[str, Any] = {"saving": {"every": 2}, "evaluation": {"every": 2}, "max_steps": 4}


@pytest.fixture(scope="module")
def board(
    tmp_path_factory: pytest.TempPathFactory, run_of: Train, session_cache: Path
) -> Iterator[Board]:
    folder = tmp_path_factory.mktemp("board")
    root = folder / "runs"
    run = run_of(adapter={"r": 4})
    for name in ("good", "inner/second", MARKUP.replace("/", "")):
        copy_of(run, root / name)
    damaged = copy_of(run, root / "damaged")
    damaged.recipe.write_text('{"method": ')
    damaged.metrics.write_bytes(damaged.metrics.read_bytes()[:-40] + b"\xff\x00")
    write_json(root / "strange" / "recipe.json", {"method": 3, "model": [], "adapter": "x"})
    (root / "strange" / "samples.json").write_text("[[]]")
    (root / "other_tool" / "logs").mkdir(parents=True)
    secret = written(folder / "secret.jsonl", [])
    (root / "link").symlink_to(secret.parent)
    with boarding(root, session_cache, FINETUNE_CACHE=str(session_cache)) as found:
        yield found


def runs(board: Board) -> list[str]:
    return re.findall(r'aria-label="compare ([^"]*)"', board.reader.get("/").text)


def test_the_list_has_every_run_and_no_folder_of_others(board: Board):
    names = sorted(map(html.unescape, runs(board)))
    plain = MARKUP.replace("/", "")
    assert names == sorted(["good", "inner/second", plain, "damaged", "strange"])
    page = board.reader.get("/").text
    assert "<b>" not in page
    assert "cannot be read as training writes it" in page
    good = Watch(Run(board.root / "good")).read()
    assert f"{good.loss:.4f}" in page
    assert "6 of 6" in page


def test_a_run_has_its_numbers_curves_samples_and_commands(board: Board):
    page = board.page("/run", run="good")
    good = Watch(Run(board.root / "good")).read()
    best = good.best
    assert best is not None
    for text in ("finished", f"{good.loss:.4f}", f"{best['loss']:.4f}", "finetune eval"):
        assert text in page
    assert page.count("<polyline") >= 5
    read = board.user.get("/curves.json", params={"run": "good"}).json()
    assert read["step"] == [1, 2, 3, 4, 5, 6]
    written_ = losses(Run(board.root / "good"))
    assert read["curves"]["loss"]["mean"] == pytest.approx(written_, rel=1e-5)
    assert [each["step"] for each in read["evaluations"]] == [3, 6]
    later = board.user.get("/curves.json", params={"run": "good", "since": 5}).json()
    assert later["step"] == [6]


def test_runs_are_compared(board: Board):
    page = board.page("/compare", run=["good", "inner/second"], x="tokens")
    assert "The recipes are the same" in page
    assert board.user.get("/compare", params={"run": ["good"]}).status_code == 400


@pytest.mark.parametrize("run", ["damaged", "strange"])
def test_what_cannot_be_read_is_a_card_and_the_server_goes_on(board: Board, run: str):
    assert "cannot be read" in board.page("/run", run=run)
    assert board.user.get("/curves.json", params={"run": run}).status_code == 200
    assert board.process.poll() is None


@pytest.mark.parametrize(
    "name", ["..", "../runs/good", "/etc", "link", ".board", "good/../good", "", "nothing", "\0"]
)
def test_only_runs_in_the_folder_can_be_named(board: Board, name: str):
    for path in ("/run", "/curves.json", "/chat", "/evaluation"):
        answer = board.user.get(path, params={"run": name, "name": "x"})
        assert answer.status_code == 400, path
        assert "no such run" in answer.text
    assert board.user.post("/do", data={"run": name, "verb": "eval"}).status_code == 400
    answer = board.user.get("/new", params={"from": f"file:{name}"})
    assert answer.status_code == 400
    if name != "..":  # the client itself would shorten the address
        assert board.user.get(f"/static/{quote(name, safe='')}").status_code == 404


WRITES = ("/do", "/task", "/start", "/plan", "/row", "/chain", "/files", "/v1/files")


def test_writers_need_the_token_and_pages_of_other_sites_get_nothing(board: Board):
    for path in WRITES:
        assert board.reader.post(path, data={"run": "good", "verb": "eval"}).status_code == 401
        for origin in ("http://evil.example", "null", f"{board.url}0"):
            answer = board.user.post(path, data={}, headers={"Origin": origin})
            assert answer.status_code == 403
        crossing = {"Sec-Fetch-Site": "cross-site"}
        assert board.user.post(path, data={}, headers=crossing).status_code == 403
    assert board.reader.get("/v1/models").status_code == 401
    assert board.reader.get("/rows", params={"from": "run:good"}).status_code == 401
    rebound = board.user.get("/", headers={"Host": "evil.example:80"})
    assert rebound.status_code == 400
    assert not list((board.root / ".board").glob("tasks/*"))
    rules = board.reader.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in rules
    assert "unsafe" not in rules


def test_the_address_with_the_token_sets_a_cookie_that_scripts_and_others_cannot_use(board: Board):
    entered = httpx.get(f"{board.url}/run?run=good&token={board.token}")
    assert (entered.status_code, entered.headers["location"]) == (303, "/run?run=good")
    assert "HttpOnly" in entered.headers["set-cookie"]
    assert "SameSite=strict" in entered.headers["set-cookie"]
    name, _, value = entered.headers["set-cookie"].partition(";")[0].partition("=")
    assert (
        "disabled"
        not in httpx.get(f"{board.url}/run?run=good", headers={"Cookie": f"{name}={value}"})
        .text.split("Started")[0]
        .split("tiles")[1]
    )
    assert httpx.get(f"{board.url}/?token=wrong").status_code == 403
    place = httpx.get(f"{board.url}//evil.example/?token={board.token}").headers["location"]
    assert place == "/evil.example/"
    token = board.root / ".board" / "token"
    assert token.stat().st_mode & 0o077 == 0


def test_a_reader_on_another_host_needs_the_token(tmp_path: Path, session_cache: Path):
    env = {"FINETUNE_API_KEY": "k" * 20}
    process_words = ["board", str(tmp_path), "--host", "0.0.0.0", "--port", "0"]
    alone = start(process_words, session_cache)
    assert "set a key in FINETUNE_API_KEY" in alone.communicate()[1]
    process = start(process_words, session_cache, **env)
    try:
        assert process.stdout is not None
        port = re.search(r":(\d+)/", process.stdout.readline())
        assert port is not None
        url = f"http://127.0.0.1:{port[1]}/"
        assert httpx.get(url).status_code == 401
        bearer = {"Authorization": f"Bearer {'k' * 20}", "Host": "board.example"}
        assert httpx.get(url, headers=bearer).status_code == 200
    finally:
        end_tree(process.pid)
        process.communicate()


def test_bodies_have_limits(board: Board, monkeypatch: pytest.MonkeyPatch):
    large = b"x=" + b"y" * (access.LARGEST_BODY + 1)
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    assert board.user.post("/do", content=large, headers=kind).status_code == 413
    assert board.user.post("/do", json={}).status_code == 415
    for body in (b"", b"--x\r\n", b"--x\r\nContent-Disposition: form-data\r\n\r\n", b"--y--"):
        form = {"Content-Type": "multipart/form-data; boundary=x"}
        assert board.user.post("/files", content=body, headers=form).status_code == 400
    binary = {"file": ("weights.bin", b"\0" * 10)}
    answer = board.user.post("/files", files=binary)
    assert (answer.status_code, "not a file of data" in answer.text) == (400, True)


def test_a_file_is_stored_under_a_plain_free_name(board: Board):
    for number in ("", "-2"):
        answer = board.user.post("/files", files={"file": ("../../a b.jsonl", b'{"x": 1}\r\n--x')})
        assert "name the model to train" in answer.text
        path = board.root / ".board" / "files" / f"a_b{number}.jsonl"
        assert path.read_bytes() == b'{"x": 1}\r\n--x'


def test_an_unread_stream_ends_and_says_what_changes(board: Board):
    with board.user.stream("GET", "/events", params={"run": "good"}) as stream:
        events = []
        for line in stream.iter_lines():
            events += [line] if line.startswith("event: ") else []
            if len(events) == 4:
                break
    assert events == ["event: head", "event: actions", "event: rows", "event: log"]


def test_a_run_that_is_deleted_under_the_page_is_a_card(board: Board):
    gone = copy_of(Run(board.root / "good"), board.root / "gone")
    board.page("/run", run="gone")
    shutil.rmtree(gone.root)
    answer = board.user.get("/run", params={"run": "gone"})
    assert (answer.status_code, "may have been deleted" in answer.text) == (400, True)
    assert "gone" not in runs(board)


def test_a_full_disk_is_a_card_and_the_server_goes_on(
    mounted: Callable[[str], Path], run_of: Train, session_cache: Path
):
    root = mounted("size=8m")
    copy_of(run_of(adapter={"r": 4}), root / "run")
    with boarding(root, session_cache) as board:
        with contextlib.suppress(OSError), (root / "filler").open("wb") as file:
            while True:
                file.write(b"x" * 4096)
                file.flush()
        for path, form in (
            ("/do", {"run": "run", "verb": "report"}),
            ("/start", {"from": "run:run", "output": "next"}),
        ):
            answer = board.user.post(path, data=form)
            assert answer.status_code >= 400
            assert "No space left" in answer.text
        sent = board.user.post("/v1/files", files={"file": ("a.jsonl", b"x" * 10**6)})
        assert (sent.status_code, "No space left" in sent.text) == (507, True)
        assert "6 of 6" in board.page("/")


def test_the_form_has_the_plan_and_puts_errors_at_their_fields(board: Board):
    page = board.page("/new", **{"from": "run:good", "set": ["optim.lr=0.5"]})
    assert 'name="f.optim.lr" value="0.5"' in page
    htmx = {"HX-Request": "true"}
    form = {"from": "run:good", "f.optim.lr": "0.5", "f.batch.rows": "16", "output": "next"}
    plan = board.user.post("/plan", data=form, headers=htmx)
    assert "fits" in plan.text
    assert "optim.lr=0.5 batch.rows=16" in html.unescape(plan.text).replace("\n", " ") or (
        "batch.rows=16 optim.lr=0.5" in html.unescape(plan.text)
    )
    assert "set=optim.lr%3D0.5" in plan.headers["hx-replace-url"]
    wrong = board.user.post("/plan", data={**form, "f.optim.lr": "fast"}, headers=htmx).text
    at = wrong.index('id="error-field-optim-lr"')
    assert "valid number" in wrong[at : at + 200]
    refused = board.user.post("/start", data={**form, "f.optim.lr": "fast"})
    assert (refused.status_code, "valid number" in refused.text) == (400, True)
    assert (
        "single on 1 x H100-80: fits"
        in board.user.post("/plan", data={**form, "gpu": "H100-80"}).text
    )


@pytest.mark.parametrize("name", ["../out", "/tmp/out", ".board/x", "a/b/c", "good", "a\0"])
def test_a_run_starts_only_under_a_free_name_in_the_folder(board: Board, name: str):
    answer = board.user.post("/start", data={"from": "run:good", "output": name})
    assert answer.status_code == 400
    assert "plain name" in answer.text or "exists already" in answer.text


def read_events(board: Board) -> None:
    """Read the events of a run until the board ends."""
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream(
            "GET", f"{board.url}/events", params={"run": "run"}, timeout=60, verify=False
        ) as stream,
    ):
        for _ in stream.iter_lines():
            pass


def test_a_board_that_is_killed_changes_no_run(
    tiny: Tiny, train: Train, tmp_path: Path, session_cache: Path
):
    """A run goes on while its board is killed twice, and ends as without one."""
    root, steps = tmp_path / "runs", 8
    sections = {**SHORT, "max_steps": steps, "model": {"name": str(tiny.model)}}
    write_recipe(root / ".board" / "recipes" / "mine.yaml", tiny.fields(**sections))
    with boarding(root, session_cache, warm=True, keeps=True) as first:
        first.do("/start", **{"from": "file:mine", "output": "run", "f.seed": "3"})
        run = Run(root / "run")
        first.wait(lambda: Watch(run).read().step >= 1)
        first.process.kill()
        first.process.wait()
    with boarding(root, session_cache, warm=True, keeps=True) as second:
        assert "run" in second.page("/")
        second.process.kill()
        second.process.wait()
    with boarding(root, session_cache, warm=True) as last:
        readers = [
            threading.Thread(target=read_events, args=(last,), daemon=True) for _ in range(10)
        ]
        for reader in readers:
            reader.start()
        last.wait(lambda: Watch(run).read().state == "finished")
        (task,) = last.wait(lambda: [t for t in Tasks(root).all() if t.ended])
        assert (task.state, task.run) == ("finished", "run")
        assert "finished" in last.page("/run", run="run")
    alone = train("alone", precision="bf16", **{**sections, "seed": 3})
    assert losses(run) == losses(alone)


@pytest.mark.slow
def test_a_run_is_saved_stopped_and_resumed_by_its_buttons(
    tiny: Tiny, train: Train, tmp_path: Path, session_cache: Path
):
    root = tmp_path / "runs"
    steps = 120  # more than it makes while `finetune stop` starts
    rarely = {"every": steps}
    fields = tiny.fields(saving=rarely, evaluation=rarely, max_steps=steps)
    write_recipe(root / ".board" / "recipes" / "mine.yaml", fields)
    with boarding(root, session_cache, warm=True) as board:
        board.do("/start", **{"from": "file:mine", "output": "run"})
        run = Run(root / "run")
        board.wait(lambda: Watch(run).read().step >= 2)
        board.do("/do", run="run", verb="stop")
        board.wait(lambda: Watch(run).read().state == "interrupted")
        stopped = Watch(run).read().step
        assert stopped < steps
        board.wait(lambda: not any(task.is_open for task in Tasks(root).all()))
        assert "Resume" in board.page("/run", run="run")
        board.do("/do", run="run", verb="launch")
        board.wait(lambda: Watch(run).read().state == "finished", 600)
    assert Watch(run).read().start["resumed_from"] == stopped
    assert losses(run) == losses(train("alone", precision="bf16", fields=fields))


def test_a_task_starts_once_when_several_boards_look(tmp_path: Path):
    tasks = [Tasks(tmp_path) for _ in range(4)]
    added = tasks[0].add("list", ["list"], "")
    threads = [threading.Thread(target=each.advance) for each in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until = time.monotonic() + 60
    while not added.ended and time.monotonic() < until:
        time.sleep(0.05)
    assert added.state == "finished"
    assert added.log.read_text().count("quickstart_base") == 1


def test_a_task_waits_for_room_and_none_overtakes_it():
    first, second = (Device("cuda", number, 80 << 30) for number in range(2))
    here = [first, second]
    assert Need(1, 50 << 30).on(here, {}) == [first]
    assert Need(1, 50 << 30).on(here, {first: 50 << 30}) == [second]
    assert Need(1, 50 << 30).on(here, {first: 50 << 30, second: 50 << 30}) is None
    assert Need(1, 20 << 30).on(here, {first: 50 << 30, second: 40 << 30}) == [second]
    assert Need(2, 40 << 30).on(here, {first: 50 << 30}) is None
    assert Need(1, 0).on(here, {first: 1}) == [second]  # an unknown model has a GPU alone
    others = Device("cuda", 0, 80 << 30, used=79 << 30)
    assert Need(1, 50 << 30).on([others, second], {}) == [second]
    assert "needs 3 GPUs" in (Need(3, 1).problem(here) or "")
    assert "the plan needs 90.0 GiB" in (Need(1, 90 << 30).problem(here) or "")
    cpu = [Device("cpu", 0, 8 << 30)]
    assert Need(2, 3 << 30).on(cpu, {}) == cpu
    assert "6.00 GiB" not in (Need(2, 3 << 30).problem(cpu) or "")
    assert "10.0 GiB" in (Need(2, 5 << 30).problem(cpu) or "")


def test_a_board_is_small_and_imports_no_torch(tmp_path: Path, session_cache: Path):
    with boarding(tmp_path, session_cache) as board:
        for path in ("/", "/new", "/new?from=qwen3_8b_lora", "/data"):
            assert board.user.get(path).status_code == 200
        form = {"from": "qwen3_8b_lora", "gpu": "H100-80", "gpus": "8"}
        board.do("/plan", **form)
        process = psutil.Process(board.process.pid)
        assert process.memory_info().rss < 80 << 20
        assert not any("torch" in each.path for each in process.memory_maps())


@pytest.mark.slow
def test_200_runs_and_a_million_steps_are_answered_at_once(
    run_of: Train, tmp_path: Path, session_cache: Path
):
    """In processor time, which other work on the machine does not change."""
    root = tmp_path / "runs"
    run = run_of(adapter={"r": 4})
    names = ("recipe.json", "plan.json", "environment.json", "data.json", "metrics.jsonl")
    for number in range(200):
        (root / f"run{number}").mkdir(parents=True)
        for name in names:
            shutil.copy(run.root / name, root / f"run{number}" / name)
    long = Run(root / "run0")
    (line,) = [each for each in long.metrics.read_text().splitlines() if '"step": 1,' in each]
    low, high = 0.125, 77.5
    # With a template, because a million calls of json.dumps take many seconds.
    record = json.dumps(json.loads(line) | {"step": "%d", "loss": "%g"}).replace('"%d"', "%d")
    record = record.replace('"%g"', "%g") + "\n"
    special = {400_000: low, 800_000: high}
    with long.metrics.open("a") as file:
        for step in range(7, 1_000_001):
            file.write(record % (step, special.get(step, 1 + step % 7)))
    with boarding(root, session_cache) as board:
        process = psutil.Process(board.process.pid)
        read: dict[str, Any] = {"whole": False}
        while not read["whole"]:
            read = board.user.get("/curves.json", params={"run": "run0"}).json()
        assert read["rows"] == 1_000_000
        losses_ = read["curves"]["loss"]
        assert (min(losses_["low"]), max(losses_["high"])) == (low, high)
        for path, query in (
            ("/", {}),
            ("/run", {"run": "run0"}),
            ("/curves.json", {"run": "run0"}),
        ):
            assert board.user.get(path, params=query).status_code == 200  # warm
            before = process.cpu_times()
            for _ in range(5):
                board.user.get(path, params=query)
            after = process.cpu_times()
            spent = (after.user + after.system - before.user - before.system) / 5
            print(f"{path}: {1000 * spent:.0f} ms")
            assert spent < 0.3
        print(f"resident memory: {process.memory_info().rss / 2**20:.0f} MiB")
        assert process.memory_info().rss < 80 << 20


@pytest.mark.parametrize("kept", [True, False])
def test_two_boards_share_a_token_and_a_port_in_use_is_named(
    board: Board, session_cache: Path, kept: bool
):
    port = board.url.rpartition(":")[2]
    second = start(["board", str(board.root), "--port", port if kept else "0"], session_cache)
    if kept:
        assert f"--port {port}" in second.communicate(timeout=60)[1]
        return
    assert second.stdout is not None
    assert board.token in second.stdout.readline()
    os.kill(second.pid, signal.SIGINT)
    assert "Traceback" not in second.communicate(timeout=30)[1]
