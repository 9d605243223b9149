"""Answers of models that read images: in a batch, in a chat, from a server and in an evaluation."""

import base64
import inspect
import io
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pictured
import pytest
import torch
from browsers import Tab, browsing
from conftest import launch, slow, write_recipe
from fastapi.testclient import TestClient
from PIL import Image
from served import running
from transformers import AutoModelForImageTextToText

import finetune as ft
from finetune import Run, catalog
from finetune.data.images.image_file import decode
from finetune.evaluation.contamination import overlap
from finetune.evaluation.evaluation import Request, evaluate
from finetune.evaluation.questions import of_run
from finetune.evaluation.results import results, rows_of
from finetune.inference.chat import chat
from finetune.inference.generate import Loaded, generate, load, load_folder
from finetune.reports import inspection
from finetune.reports.evaluation_page import page
from finetune.serving.app import build_app
from finetune.serving.models import open_models
from finetune.serving.requests import download
from finetune.training.run_options import Options

SIZES = ((48, 32), (40, 64), (33, 90))
COLOURS = ("red", "blue", "lime", "black")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tiny model that has learned the names of four colours; eight pictures are held out."""
    folder = tmp_path_factory.mktemp("colours")
    base = pictured.made(folder / "base")
    for name, count in (("train", 64), ("held", 8)):
        lines = []
        for number in range(count):
            colour = COLOURS[number % 4]
            width, height = SIZES[number % 3]
            path = folder / f"{name}{number}.png"
            wider = number % 5 + 8 * (name == "held" and number < 4)
            Image.new("RGB", (width + wider, height), colour).save(path)
            lines.append({"messages": [*asked("?", Path(path.name)),
                                       {"role": "assistant", "content": colour}]})  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    model = {"name": str(base), "reads": ["image"], "trains": ["language", "connector", "tower"]}
    recipe = catalog.from_fields({
        "method": "sft", "model": model, "epochs": 12, "seed": 0,
        "data": [{"source": str(folder / "train.jsonl"), "format": "messages"}],
        "eval_data": [{"source": str(folder / "held.jsonl"), "format": "messages"}],
        "batch": {"rows": 16, "micro_rows": 16, "max_length": 128},
        "optim": {"lr": 1e-2, "warmup": 5}, "evaluation": {"metrics": ["exact"]},
    })  # fmt: skip
    return ft.train(recipe, precision="fp32", options=Options(folder / "run", plot=False))


def picture(folder: Path, number: int) -> Path:
    path = folder / f"{number}.png"
    if not path.exists():
        generator = torch.Generator().manual_seed(number)
        width, height = SIZES[number % len(SIZES)]
        pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(path)
    return path


def asked(text: str, *pictures: Path) -> list[dict[str, Any]]:
    parts = [{"type": "image", "path": str(path)} for path in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def plain_model(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def plain_answer(model: Any, loaded: Loaded, question: Any, pictures: list[Path]) -> str:
    """The greedy answer of plain transformers to one question, without tokens of images."""
    assert loaded.images is not None
    processor = loaded.images.processor
    text = loaded.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, tokenize=False
    )
    images = [decode(path.read_bytes(), "")[0] for path in pictures]
    takes_types = "mm_token_type_ids" in inspect.signature(model.forward).parameters
    more = {"return_mm_token_type_ids": True} if takes_types else {}
    given = processor.whole(
        text=[text], images=[images] if images else None, return_tensors="pt", **more
    )
    found = model.generate(
        **given, max_new_tokens=12, do_sample=False, eos_token_id=list(loaded.stops),
        suppress_tokens=processor.token_ids.tolist(), pad_token_id=0,
    )  # fmt: skip
    new = found[0, given["input_ids"].shape[1] :]
    return str(loaded.tokenizer.decode(new, skip_special_tokens=True))


@pytest.mark.parametrize("kind", pictured.KINDS)
def test_answers_in_a_batch_are_those_of_plain_transformers(assets, shared, tmp_path, kind):
    """Pictures of three sizes, two at once, one twice with another question, and none."""
    folder = pictured.base(assets, kind, shared)
    loaded = load_folder(folder)
    one, two, three = (picture(tmp_path, number) for number in range(3))
    rows = [("a?", [one]), ("b?", [two, three]), ("c", []), ("a?", [three]), ("bb?", [one])]
    questions = [asked(text, *pictures) for text, pictures in rows]
    found = generate(loaded, questions, max_new_tokens=12, batch_rows=3)
    model = plain_model(folder)
    for answer, question, (_, pictures) in zip(found, questions, rows, strict=True):
        assert answer == plain_answer(model, loaded, question, pictures)
    assert len(set(found)) > 1


@pytest.fixture(scope="module")
def plain(run: Run) -> list[str]:
    """What plain transformers answers about each held-out picture, mostly its colour."""
    loaded = load(run)
    paths, model = [held(run, number) for number in range(8)], plain_model(run.final)
    found = [plain_answer(model, loaded, asked("?", path), [path]) for path in paths]
    assert sum(found[number] == COLOURS[number % 4] for number in range(8)) >= 6
    return found


def held(run: Run, number: int) -> Path:
    return run.root.parent / f"held{number}.png"


def test_an_evaluation_asks_about_the_pictures_and_shows_them(run, plain):
    share = sum(plain[number] == COLOURS[number % 4] for number in range(8)) / 8
    assert [record["metrics"]["exact"] for record in run.read_metrics("eval")][-1] == share
    found = evaluate(Request(str(run.root), against="base"))
    exact = found.measures["exact"]
    assert (exact.total, found.before_measures["exact"].total) == (share, 0)
    assert [answer.text for answer in found.after.answers] == plain
    # The loss of an evaluation is that of training, with its images.
    loss = list(run.read_metrics("eval"))[-1]["loss"]
    assert found.measures["loss"].total == pytest.approx(loss, rel=1e-5)
    rows = rows_of(found)
    text = page(results(found), rows)
    for number, row in enumerate(rows):
        shown = Image.open(as_file(row["images"][0]))
        with Image.open(held(run, number)) as whole:
            assert shown.getpixel((0, 0)) == whole.getpixel((0, 0))
            assert shown.size == whole.size
        assert text.count(f'src="{row["images"][0]}"') == 1


def test_a_server_is_evaluated_on_the_same_pictures(run, plain, url):
    found = evaluate(Request(url, rows_of=str(run.root), against="none"))
    assert [answer.text for answer in found.after.answers] == plain


def test_a_question_was_trained_if_its_picture_was(run):
    """Every row asks the same, so that only the files tell."""
    files = {path.read_bytes() for path in run.root.parent.glob("train*.png")}
    wanted = sum(held(run, number).read_bytes() in files for number in range(8))
    found = overlap(run, of_run(run))
    assert found is not None
    assert (found.prompts, found.rows) == (wanted, wanted)
    assert 0 < wanted < 8


def as_file(url: str) -> io.BytesIO:
    return io.BytesIO(base64.b64decode(url.partition("base64,")[2]))


def test_a_chat_shows_an_image_with_the_next_message(run, plain, finetune):
    lines = [f"/image {held(run, 1)}", "?", "/image nowhere.png", f"/image {held(run, 2)}", "?"]
    typed, written = iter([*lines, "/exit"]), list[str]()
    chat(load(run), lambda _: next(typed), written.append, max_new_tokens=8)
    shown = "".join(written).splitlines()
    assert shown[1] == plain[1]
    assert shown[2] == "image 'nowhere.png' cannot be read: No such file or directory"
    told = finetune("chat", run.root, "--prompt", "?", "--image", held(run, 2)).passed()
    assert told.stdout.strip() == plain[2]


def test_inspect_shows_a_picture_as_one_chip_in_its_place(run, finetune, tmp_path):
    recipe = str(run.recipe)
    told = finetune("inspect", recipe, "--rows", "1").passed().stdout
    (row,) = inspection.inspect(catalog.load(run.recipe), 1).rows
    (number,) = (piece for piece in row[0].pieces if piece.image)
    with Image.open(as_file(number.image)) as shown:
        tokens = max(4, round(shown.width / 16) * round(shown.height / 16))
        chip = f"[image {shown.width} x {shown.height}, {tokens} tokens]"
    assert f"<|vision_start|>{chip}<|vision_end|>?" in told
    assert "64 images; " in told
    assert "64 assistant, 64 images (user), 64 user" in told
    finetune("inspect", recipe, "--rows", "1", "--html", tmp_path / "rows.html").passed()
    assert (tmp_path / "rows.html").read_text().count(f'src="{number.image}"') == 1


@pytest.fixture(scope="module")
def url(run: Run) -> Iterator[str]:
    with running(run.root.parent, str(run.root)) as (url, _):
        yield url


def as_url(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def posted(url: str, *addresses: str, text: str = "?") -> httpx.Response:
    parts = [{"type": "image_url", "image_url": {"url": each}} for each in addresses]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    body = {"messages": [message], "max_tokens": 8, "logprobs": True}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def said(reply: httpx.Response) -> str:
    return reply.json()["choices"][0]["message"]["content"]


def test_a_server_answers_about_pictures_of_several_requests_at_once(run, plain, url):
    numbers = [0, 1, 2, 3, 4, 5]
    with ThreadPoolExecutor() as pool:
        replies = list(pool.map(lambda n: posted(url, as_url(held(run, n))), numbers))
    assert [said(reply) for reply in replies] == plain[:6]
    two = [held(run, 1), held(run, 2)]
    (wanted,) = generate(load(run), [asked("?", *two)], max_new_tokens=8)
    assert said(posted(url, *map(as_url, two))) == wanted
    (wanted,) = generate(load(run), [[{"role": "user", "content": "?"}]], max_new_tokens=8)
    assert said(posted(url)) == wanted


DROP = """(() => {
  const bytes = Uint8Array.from(atob("PICTURE"), (letter) => letter.charCodeAt(0));
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([bytes], "picture.png", {type: "image/png"}));
  const drop = new DragEvent("drop", {dataTransfer, bubbles: true, cancelable: true});
  document.querySelector("main").dispatchEvent(drop);
  return drop.defaultPrevented;
})()"""
ASK = """(() => {
  document.getElementById("prompt").value = "?";
  document.getElementById("max_tokens").value = "12";
  document.querySelector("form").requestSubmit();
})()"""


@pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium is installed")
def test_a_picture_dropped_into_the_chat_page_is_asked_about(run, plain, url, tmp_path):
    number = next(each for each in range(1, 8) if plain[each] == COLOURS[each % 4])
    with browsing(tmp_path) as browser:
        tab = Tab(browser)
        tab.open(url)
        tab.until('document.querySelector("section") !== null')
        bytes_ = base64.b64encode(held(run, number).read_bytes()).decode()
        assert tab.value(DROP.replace("PICTURE", bytes_)) is True  # the page itself stays
        tab.until('document.querySelector("#shown img")?.naturalWidth > 0')
        tab.value(ASK)
        tab.until('document.querySelector(".note, .error") !== null')
        texts = '[...document.querySelectorAll(".assistant, .error")].map((one) => one.textContent)'
        shown = 'document.querySelectorAll("PLACE img").length'
        assert tab.value(texts) == [plain[number]]
        assert tab.value(shown.replace("PLACE", ".user")) == 1
        assert tab.value(shown.replace("PLACE", "#shown")) == 0
        assert not tab.problems


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("https://pictures.example/1.png", "is a web address"),
        ("{file}", "a file of this machine, which a server does not open"),
        ("file://{file}", "a file of this machine, which a server does not open"),
        ("data:image/png;base64,bm9wZQ==", "Pillow does not know its format"),
        ("data:image/png;base64,@", "is not base64"),
    ],
)
def test_a_server_reads_no_image_that_is_not_in_the_request(run, url, address, problem):
    reply = posted(url, address.format(file=held(run, 0)))
    assert reply.status_code == 400
    assert problem in reply.json()["error"]["message"]


def test_a_text_cannot_name_the_place_of_an_image(run, url):
    reply = posted(url, as_url(held(run, 0)), text="<|image_pad|>")
    assert (reply.status_code, "for 1 images" in reply.text) == (400, True)


def test_a_server_reads_web_addresses_if_it_is_asked_to(run, plain):
    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(run.root.parent))

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as pictures:
        Thread(target=pictures.serve_forever, daemon=True).start()
        app = build_app(open_models(run.root), fetch=download)
        with TestClient(app, base_url="http://localhost") as client:
            there = f"http://127.0.0.1:{pictures.server_port}"
            for path, status in (("held2.png", 200), ("held99.png", 400)):
                part = {"type": "image_url", "image_url": {"url": f"{there}/{path}"}}
                content = [part, {"type": "text", "text": "?"}]
                body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8}
                reply = client.post("/v1/chat/completions", json=body)
                assert reply.status_code == status, reply.text
                assert said(reply) == plain[2] if status == 200 else "404" in reply.text
        pictures.shutdown()


@pytest.mark.parametrize("parts", [["language"], ["language", "connector", "tower"]])
def test_an_exported_adapter_says_what_a_server_needs(run, finetune, tmp_path, parts):
    fields = json.loads(run.recipe.read_text())
    del fields["epochs"]
    fields |= {"adapter": {"r": 2}, "max_steps": 1, "evaluation": {}}
    fields["model"] |= {"trains": parts}
    options = Options(tmp_path / "run", plot=False)
    adapted = ft.train(catalog.from_fields(fields), precision="fp32", options=options)
    folder = ft.export(adapted, tmp_path / "adapter")
    about = json.loads((folder / "export.json").read_text())
    (command,) = (words for words in about["serve"] if words.startswith("vllm"))
    assert ("--enable-tower-connector-lora" in command) == ("tower" in parts)
    assert about["check"]["answers_equal"] == about["check"]["rows"]
    (one,) = generate(load(adapted), [asked("?", held(run, 1))], max_new_tokens=8)
    (other,) = generate(load_folder(folder), [asked("?", held(run, 1))], max_new_tokens=8)
    assert one == other
    refused = finetune("export", adapted.root, "--to", tmp_path / "g", "--format", "gguf")
    assert (refused.status, "--mmproj" in refused.stderr) == (2, True)
    merged = ft.export(adapted, tmp_path / "merged", merge=True)
    model: Any = AutoModelForImageTextToText.from_pretrained(merged)
    again = model.get_encoder(modality="image").state_dict()
    base: Any = AutoModelForImageTextToText.from_pretrained(fields["model"]["name"])
    before = base.get_encoder(modality="image").state_dict()
    same = all(torch.equal(again[name], before[name]) for name in before)
    assert same == ("tower" not in parts)


def prompts(run: Run, method: str, **more: Any) -> dict[str, Any]:
    """Fields of a recipe that rewards the names of colours, from the model that knows most."""
    folder = run.root.parent
    for name in ("train", "held"):
        lines = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
        rows = ({"prompt": line["messages"]} for line in lines)  # the answer becomes a column
        (folder / f"{name}_prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    source = {name: str(folder / f"{name}_prompts.jsonl") for name in ("train", "held")}
    return {
        "method": method, "model": {"name": str(run.final), "reads": ["image"]}, "seed": 1,
        "data": [{"source": source["train"], "format": "prompts"}], "max_steps": 2,
        "eval_data": [{"source": source["held"], "format": "prompts"}],
        "reward_funcs": [{"function": "exact_match"}], "num_generations": 4, "beta": 0.1,
        "max_completion_length": 8, "temperature": 2.0, "optim": {"lr": 1e-4, "warmup": 0},
        "batch": {"rows": 16, "micro_rows": 8, "max_length": 128}, "evaluation": {"every": 1},
    } | more  # fmt: skip


@pytest.mark.parametrize("method", ["grpo", slow("rloo")])
def test_rewarded_completions_are_of_the_prompt_with_its_picture(run, plain, tmp_path, method):
    recipe = catalog.from_fields(prompts(run, method, optim={"lr": 1e-9, "warmup": 0}))
    done = ft.train(recipe, precision="fp32", options=Options(tmp_path / "run", plot=False))
    share = sum(plain[number] == COLOURS[number % 4] for number in range(8)) / 8
    assert next(done.read_metrics("eval"))["metrics"]["reward"] == share
    # The reference is the start: no difference, if both see the same pictures.
    first = next(done.read_metrics("train"))["metrics"]
    assert first["kl"] == pytest.approx(0, abs=1e-5)
    told = [json.loads(line) for line in done.completions.read_text().splitlines()]
    assert all(len(each["completion"]) <= 8 * 13 for each in told)
    assert not any("image_pad" in each["completion"] for each in told)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp_full_shard", "zero3"])
def test_sampling_with_pictures_is_the_same_on_every_backend(run, tmp_path, finetune, name):
    fields = prompts(run, "grpo", adapter={"r": 4})
    path = write_recipe(tmp_path / "r.json", fields)
    options = Options(tmp_path / "one", plot=False)
    one = ft.train(catalog.from_fields(fields), precision="fp32", options=options)
    launch(finetune, path, name, tmp_path / "two")
    found, wanted = (
        [record["loss"] for record in each.read_metrics("train")]
        for each in (Run(tmp_path / "two"), one)
    )
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
