"""Data is never code, names stay in their directory, secrets stay secret, nothing calls home."""

import contextlib
import json
import pickle
import shutil
import socket
import threading
from pathlib import Path

import pytest
from conftest import Tiny, write_recipe

from finetune import catalog
from finetune.errors import FinetuneError
from finetune.runs.environment import hide, without_secrets

SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz012345",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
}
ONE_STEP = {"max_steps": 1, "saving": {"every": 1}, "evaluation": {"every": 1}}


class Bomb:
    """Unpickled, it makes a file: as a hostile model would run a program."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.place,)


@pytest.fixture
def bomb(tmp_path: Path) -> bytes:
    """A pickle that makes a file tmp_path/ran."""
    return pickle.dumps(Bomb(tmp_path / "ran"))


@pytest.fixture
def model(tiny: Tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.model, tmp_path / "model"))


@pytest.mark.parametrize(
    ("words", "told"),
    [("train r.json", True), ("train r.json model.pickle=true", False), ("chat model", False)],
)
def test_a_pickle_is_refused_and_when_asked_for_runs_no_code(
    tiny, finetune, tmp_path, model, bomb, words, told
):
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(bomb)
    write_recipe(tmp_path / "r.json", tiny.fields(model={"name": str(model)}, **ONE_STEP))
    more = ["--prompt", "Hello"] if "chat" in words else ["--output", "run"]
    said = finetune(*words.split(), *more, cwd=tmp_path).refused()
    assert told is ("set model.pickle=true if you trust their author" in said)
    assert not (tmp_path / "ran").exists()


def test_an_adapter_that_is_a_pickle_is_refused_with_a_reason(tiny, finetune, tmp_path, bomb):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(tiny.model)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.bin").write_bytes(bomb)
    done = finetune("chat", adapter, "--prompt", "Hello")
    assert (done.status, done.stderr) == (
        2,
        f"error: {adapter}: has no adapter_model.safetensors; adapter_model.bin is a pickle, which "
        "is not loaded: save it as safetensors\n",
    )
    assert not (tmp_path / "ran").exists()


def test_custom_model_code_runs_only_if_the_recipe_allows_it(tiny, finetune, tmp_path, model):
    (model / "custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((model / "config.json").read_text())
    config["model_type"] = "custom"
    config["auto_map"] = {
        "AutoConfig": "custom.CustomConfig", "AutoModelForCausalLM": "custom.CustomModel"
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(model={"name": str(model)}, **ONE_STEP))
    assert "trust_remote_code" in finetune("train", recipe, "--output", tmp_path / "run").refused()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "method: sft\nmodel: !!python/object/apply:os.system ['touch ran']\n",
        "method: !!python/name:os.system sft\n",
        "!!python/object/new:os.system ['touch ran']\n",
    ],
)
def test_a_recipe_in_yaml_runs_no_code(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(FinetuneError, match="could not determine a constructor"):
        catalog.load(path)
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def watched(tiny, finetune, tmp_path_factory) -> tuple[Path, str, list[object]]:
    """A run with secrets in its environment, what it said, and who connected to its proxy."""
    root = tmp_path_factory.mktemp("watched")
    fields = tiny.fields(adapter={"r": 4}, trackers=["tensorboard"], **ONE_STEP)
    recipe = write_recipe(root / "r.json", fields)
    came: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.2)
        over = threading.Event()

        def listen() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, address = proxy.accept()
                    came.append(address)
                    connection.close()

        listener = threading.Thread(target=listen)
        listener.start()
        place = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        env = {"HTTPS_PROXY": place, "HTTP_PROXY": place, "ALL_PROXY": place, "HF_HUB_OFFLINE": "0"}
        done = finetune("train", recipe, "--output", root / "run", env=SECRETS | env)
        over.set()
        listener.join()
    told = finetune("report", root / "run", env=SECRETS).passed()
    return root / "run", done.passed().output + told.output, came


def test_secrets_of_the_environment_reach_no_file_and_no_line(watched):
    run, said, _ = watched
    written = [path for path in run.rglob("*") if path.is_file()]
    names = {path.name for path in written}
    assert {"environment.json", "metrics.jsonl", "README.md", "report.html"} <= names
    for secret in SECRETS.values():
        assert secret not in said
        assert [path for path in written if secret.encode() in path.read_bytes()] == []


def test_training_opens_no_connection(watched):
    """With the hub allowed and every request led to a proxy here, none comes."""
    assert watched[2] == []


TOKENS = [
    "hf_abcdefghijklmnopqrstuvwxyz", "sk-ant-api03-abcdefghijklmnop", "sk-proj-abcdefghijklmnop",
    "github_pat_11ABCDEFG0abcdefghijkl_mnop", "ghp_abcdefghijklmnopqrstuvwx",
    "glpat-abcdefgh12345678", "xoxb-123456789012-abcdefghij", "AKIAIOSFODNN7EXAMPLE",
    "AIzaSyA1234567890abcdefghijklmnopqrstu", "nvapi-abcdefghijklmnopqrstuvwx",
    "gsk_abcdefghijklmnopqrstuv", "npm_abcdefghijklmnopqrstuvwxyz",
    "dapi0123456789abcdef0123456789abcdef", "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2QT4",
]  # fmt: skip


@pytest.mark.parametrize("token", TOKENS)
def test_common_token_formats_are_hidden_everywhere(token):
    told = hide(f"--url=https://host/x?a=1 {token} data.source='{token}'")
    assert token not in told
    assert told.startswith("--url=https://host/x?a=1 *** ")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:pa55@host/x", "https://me:***@host/x"),
        ("https://0123456789abcdef0123@host/x", "https://***@host/x"),
        ("https://0123456789abcdef0123:x-oauth-basic@host/x", "https://***:***@host/x"),
        ("s3://b/x?X-Amz-Signature=abc&n=1", "s3://b/x?X-Amz-Signature=***&n=1"),
        ("https://host/x?access_token=abc#L1", "https://host/x?access_token=***#L1"),
        ("Authorization: Bearer abcdefgh12", "Authorization: Bearer ***"),
        ("https://host:8080/a@b?n=1", "https://host:8080/a@b?n=1"),
        ("/data/sk-1/0123456789abcdef0123456789abcdef01234567.jsonl",) * 2,
    ],
)
def test_passwords_in_urls_are_hidden_and_other_text_stays(url, shown):
    assert hide(url) == shown
    assert without_secrets([f"data.0.source={url}"]) == [f"data.0.source={shown}"]
