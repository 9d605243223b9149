"""Every page of the board in a browser: its width, colors, keyboard, and what it asks for."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pictured
import pytest
from boards import Board, boarding
from browsers import Browser, Tab, browsing
from conftest import Tiny, Train, copy_of, slow, written
from PIL import Image
from transformers import AutoTokenizer

from finetune.runs.run import Run, write_json

pytestmark = pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium is installed")
WIDTHS = (390, 1440)
PAGES = (
    "/", "/run?run=good", "/run?run=good&x=tokens", "/run?run=failed", "/run?run=nothing",
    "/compare?run=good&run=second", "/new", "/new?from=run:good",
    "/new?from=qwen3_8b_lora&gpu=H100-80&gpus=8", "/data", "/data?from=run:good",
)  # fmt: skip
BACKGROUND = {False: "rgb(246, 247, 249)", True: "rgb(15, 20, 26)"}
"""Of a page in light and in dark colors."""
LIVE = {"/": {"/events"}, "/run?run=good": {"/events?run=good", "/curves.json?run=good&since=0"},
        "/new?from=run:good": {"/plan"}}  # fmt: skip
"""What the scripts of a page ask for."""


@pytest.fixture(scope="module")
def board(
    tmp_path_factory: pytest.TempPathFactory, run_of: Train, session_cache: Path
) -> Iterator[Board]:
    root = tmp_path_factory.mktemp("pages") / "runs"
    run = run_of(adapter={"r": 4})
    for name in ("good", "second", "failed"):
        copy_of(run, root / name)
    failed = Run(root / "failed")
    lines = failed.metrics.read_text().splitlines(keepends=True)
    failed.metrics.write_text("".join(line for line in lines if '"kind": "end"' not in line))
    failed.log.parent.mkdir(exist_ok=True)
    failed.log.write_text(f"error: out of memory{', much' * 60}\n")
    with boarding(root, session_cache, FINETUNE_CACHE=str(session_cache)) as found:
        yield found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def tab(browser: Browser, board: Board) -> Iterator[Tab]:
    found = Tab(browser)
    found.open(f"{board.url}/?token={board.token}")
    yield found
    assert [each for each in found.asked if not each.startswith((board.url, "data:"))] == []
    found.close()


@pytest.mark.parametrize("scripts", [slow(True), False])
def test_every_page_fits_its_screen_and_asks_no_other_host(board: Board, tab: Tab, scripts: bool):
    for path in PAGES:
        for width in WIDTHS:
            tab.look(width, dark := width < 500, scripts)
            tab.asked.clear()
            tab.problems.clear()
            tab.open(board.url + path)
            wanted = LIVE.get(path, set()) if scripts else set[str]()
            tab.until_asked({board.url + each for each in wanted})
            assert tab.value("document.documentElement.scrollWidth") <= width, path
            colour = tab.value("getComputedStyle(document.body).backgroundColor")
            assert colour == BACKGROUND[dark], path
            status = [] if "nothing" not in path else tab.problems  # it is a 400
            assert tab.problems == status, path
            assert all(each.startswith((board.url, "data:")) for each in tab.asked)


@pytest.mark.parametrize("scripts", [True, slow(False)])
def test_runs_are_compared_by_keyboard(board: Board, tab: Tab, scripts: bool):
    tab.look(1440, scripts=scripts)
    tab.open(board.url)
    focus = "document.activeElement.value || document.activeElement.textContent"
    ticked = list[str]()
    for _ in range(30):
        tab.press("Tab")
        here = tab.value(focus)
        if here in ("good", "second") and tab.value("document.activeElement.type") == "checkbox":
            tab.press(" ")
            ticked.append(here)
        if here == "Compare the ticked runs":
            assert tab.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            tab.loading(lambda: tab.press("Enter"))
            break
    assert sorted(ticked) == ["good", "second"]
    assert tab.value("document.querySelector('h1').textContent") == ", ".join(ticked)
    assert tab.value("document.querySelectorAll('polyline').length") >= 10


def test_a_form_without_scripts_shows_the_plan_and_errors_at_their_fields(board: Board, tab: Tab):
    tab.look(1440, scripts=False)
    tab.open(f"{board.url}/new?from=run:good")
    tab.value("document.getElementById('field-optim-lr').value = 'fast'")
    plan = "[...document.querySelectorAll('button')].find((b) => b.textContent === 'Plan').click()"
    tab.loading(lambda: tab.value(plan))
    error = "document.getElementById('error-field-optim-lr').textContent"
    assert "valid number" in tab.value(error)
    assert tab.value("document.getElementById('field-optim-lr').value") == "fast"


@pytest.fixture(scope="module")
def rows_with_images(board: Board) -> str:
    """The name of a recipe whose rows have an image of 32 x 48 pixels."""
    folder = board.root.parent
    Image.new("RGB", (32, 48), "red").save(folder / "red.png")
    user = [{"type": "image", "path": "red.png"}, {"type": "text", "text": "Say red."}]
    talk = [{"role": "user", "content": user}, {"role": "assistant", "content": "red"}]
    data = written(folder / "rows.jsonl", [{"messages": talk}] * 8)
    model = {"name": str(pictured.made(folder / "model", weights=False)), "reads": ["image"]}
    fields = {
        "method": "sft", "model": model, "data": [{"source": str(data), "format": "messages"}],
        "max_steps": 1, "batch": {"rows": 2, "micro_rows": 1, "max_length": 512},
    }  # fmt: skip
    path = board.root / ".board" / "recipes" / "pictures.json"
    write_json(path, fields)
    path.rename(path.with_suffix(".yaml"))
    return "file:pictures"


@pytest.mark.slow
def test_rows_show_their_images_and_the_ids_of_tokens(
    board: Board, tab: Tab, rows_with_images: str
):
    tab.look(390)
    tab.open(f"{board.url}/data?from={rows_with_images}&rows=2")
    tab.until("document.querySelector('.tokens') !== null")
    images = "[...document.querySelectorAll('.tokens img')]"
    tab.until(f"{images}.every((image) => image.complete)")
    assert tab.value(f"{images}.map((image) => image.naturalHeight > 0)") == [True, True]
    trained = "[...document.querySelectorAll('.tokens')[0].querySelectorAll('b')]"
    assert tab.value(f"{trained}.map((b) => b.textContent).join('')") == "red<|im_end|>"
    tokenizer = AutoTokenizer.from_pretrained(board.root.parent / "model")
    ids = tokenizer.encode("red<|im_end|>", add_special_tokens=False)
    assert tab.value(f"{trained}.map((b) => b.title)") == [f"assistant: {id}" for id in ids]
    assert tab.value("document.documentElement.scrollWidth") <= 390
    row = tab.value("document.querySelector('textarea').value").replace('"red"', '"blue"')
    edited: httpx.Response = board.user.post("/row", data={"from": rows_with_images, "row": row})
    assert edited.text.count("<img") == 1, edited.text  # its path begins at the folder of the data
    assert "blue" in re.sub("<[^>]*>", "", edited.text)


def test_the_file_for_a_cluster_is_that_of_a_dry_run(board: Board, tiny: Tiny):
    form = {"from": "run:good", "launcher": "slurm", "cluster": "cluster.nodes=2", "backend": "ddp"}
    answer: httpx.Response = board.user.post("/job", data=form)
    assert answer.status_code == 200, answer.text
    assert "#SBATCH --nodes=2" in answer.text
    assert "--launcher slurm" in answer.text
    for wrong in ({"launcher": "other"}, {"cluster": "../x"}, {"cluster": "cluster.node=2"}):
        refused = board.user.post("/job", data=form | wrong)
        assert refused.status_code == 400, refused.text
