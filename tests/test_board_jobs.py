"""OpenAI's own client uploads a file, makes and changes jobs, and chats with the result."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from boards import Board, boarding
from conftest import ROOT, Tiny
from peft import PeftModel
from tiny_run import plain_model

from finetune import catalog
from finetune.runs.progress import Watch
from finetune.runs.run import Run

CODE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/board.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory, session_cache: Path) -> Iterator[Board]:
    root = tmp_path_factory.mktemp("jobs") / "runs"
    with boarding(root, session_cache, warm=True) as found:
        yield found


@pytest.fixture(scope="module")
def client(board: Board) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{board.url}/v1", api_key=board.token, max_retries=0)


def until(client: openai.OpenAI, id: str, *wanted: str, seconds: float = 240) -> Any:
    end = time.monotonic() + seconds
    while (job := client.fine_tuning.jobs.retrieve(id)).status not in wanted:
        assert job.status not in ("failed", "succeeded", "cancelled"), job
        assert time.monotonic() < end, job
        time.sleep(0.2)
    return job


@pytest.mark.slow
def test_the_code_of_the_page_makes_an_adapter_that_plain_peft_loads(
    board: Board, client: openai.OpenAI, tiny: Tiny, tmp_path: Path, monkeypatch: Any
):
    (tmp_path / "data.jsonl").write_bytes(tiny.data.read_bytes())
    (tmp_path / "my-model").symlink_to(tiny.model)
    monkeypatch.chdir(tmp_path)
    (code,) = CODE
    code = code.replace("http://127.0.0.1:7860", board.url)
    code = code.replace('"my-model"', repr(str(tmp_path / "my-model")))
    names: dict[str, Any] = {"TOKEN": board.token}
    exec(code, names)
    file, job = names["file"], names["job"]
    assert client.files.content(file.id).read() == tiny.data.read_bytes()
    assert file.id in [each.id for each in client.files.list()]
    done = until(client, job.id, "succeeded")
    run = Run(board.root / done.fine_tuned_model)
    recipe = catalog.load(run.recipe)
    assert (recipe.epochs, recipe.adapter and recipe.adapter.r) == (2, 8)
    assert done.trained_tokens == sum(r["real_tokens"] for r in run.read_metrics("train"))
    PeftModel.from_pretrained(plain_model(tiny.model), str(run.final))
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=3))
    assert "successfully completed" in events[0].message
    assert "Created" in events[-1].message
    seen = [e.data["step"] for e in events if e.data and "train_loss" in e.data]  # type: ignore[index]
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == Watch(run).read().step
    kept = list(client.fine_tuning.jobs.checkpoints.list(job.id))
    assert [each.step_number for each in kept] == run.steps()[::-1]
    asked: Any = {"messages": [{"role": "user", "content": "What is kept?"}], "max_tokens": 4}
    answer = client.chat.completions.create(model=done.fine_tuned_model, **asked)
    parts = client.chat.completions.create(model=done.fine_tuned_model, stream=True, **asked)
    streamed = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert streamed == answer.choices[0].message.content
    assert done.fine_tuned_model in [each.id for each in client.models.list()]
    client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


@pytest.mark.slow
def test_a_job_is_paused_resumed_and_cancelled(board: Board, client: openai.OpenAI, tiny: Tiny):
    file = client.files.create(file=tiny.data.open("rb"), purpose="fine-tune")
    parameters: Any = {"n_epochs": 500, "batch_size": 4, "saving.every": 2}
    job = client.fine_tuning.jobs.create(
        model=str(tiny.model), training_file=file.id, hyperparameters=parameters, suffix="long"
    )
    (folder,) = (board.root / ".board" / "jobs").glob(job.id)
    run = Run(board.root / f"long-{folder.name[-8:]}")
    until(client, job.id, "running")
    board.wait(lambda: Watch(run).read().step >= 3)
    with pytest.raises(openai.ConflictError):
        client.files.delete(file.id)
    client.fine_tuning.jobs.pause(job.id)
    until(client, job.id, "paused")
    stopped = Watch(run).read()
    assert stopped.state == "interrupted"
    client.fine_tuning.jobs.resume(job.id)
    board.wait(lambda: Watch(run).read().step > stopped.step)
    assert Watch(run).read().start["resumed_from"] == stopped.step
    client.fine_tuning.jobs.cancel(job.id)
    until(client, job.id, "cancelled")
    with pytest.raises(openai.ConflictError):
        client.fine_tuning.jobs.resume(job.id)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hyperparameters": {"n_epoch": 3}}, "did you mean 'n_epochs'"),
    ({"hyperparameters": {"learning_rate_multiplier": -1}}, "learning_rate_multiplier"),
    ({"hyperparameters": {"beta": 0.1}}, "hyperparameters.beta"),
    ({"hyperparameters": {"n_epochs": "many"}}, "valid number"),
    ({"hyperparameters": {"adapter.r": 0}}, "adapter.r"),
    ({"extra_body": {"integration": []}}, "no such field"),
    ({"suffix": "../x"}, "suffix"),
    ({"method": {"type": "reinforcement"}}, "method"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG)
def test_what_the_api_does_not_know_is_status_400(
    client: openai.OpenAI, tiny: Tiny, fields: dict[str, Any], said: str
):
    file = client.files.create(file=tiny.data.open("rb"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match=re.escape(said)):
        client.fine_tuning.jobs.create(model="m", training_file=file.id, **fields)


def test_a_file_that_is_no_data_fails_its_job_with_the_reason(client: openai.OpenAI, tiny: Tiny):
    with pytest.raises(openai.BadRequestError, match="not a file of data"):
        client.files.create(file=("x.exe", b"MZ"), purpose="fine-tune")
    with pytest.raises(openai.NotFoundError):
        client.fine_tuning.jobs.create(model=str(tiny.model), training_file="file-1")
    file = client.files.create(file=("x.jsonl", b'{"a": \n'), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(model=str(tiny.model), training_file=file.id)
    failed = until(client, job.id, "failed")
    assert failed.error.code == "invalid_file"
    assert "x.jsonl" in failed.error.message or file.id in failed.error.message
