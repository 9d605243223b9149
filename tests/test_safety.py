"""Data is never code, names stay in their directory, secrets stay secret, nothing calls home."""

import json
import pickle
import shutil
import socket
import threading
from pathlib import Path

import pytest
from conftest import write_recipe

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


@pytest.mark.parametrize("asked", [False, True])
def test_a_pickle_is_refused_and_when_asked_for_runs_no_code(tiny, finetune, tmp_path, asked):
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    sections = {"model": {"name": str(model), "pickle": asked}}
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(**sections, **ONE_STEP))
    done = finetune("train", recipe, "--output", tmp_path / "run")
    assert done.status == 2, done.output
    assert "Traceback" not in done.output
    assert ("set model.pickle=true if you trust their author" in done.stderr) is not asked
    assert not (tmp_path / "ran").exists()


def test_chat_refuses_a_folder_with_a_pickle(tiny, finetune, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    done = finetune("chat", model, "--prompt", "Hello")
    assert done.status == 2
    assert not (tmp_path / "ran").exists()


def test_an_adapter_that_is_a_pickle_is_refused_with_a_reason(tiny, finetune, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(tiny.model)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    done = finetune("chat", adapter, "--prompt", "Hello")
    assert (done.status, done.stderr) == (
        2,
        f"error: {adapter}: has no adapter_model.safetensors; adapter_model.bin is a pickle, which "
        "is not loaded: save it as safetensors\n",
    )
    assert not (tmp_path / "ran").exists()


def test_custom_model_code_runs_only_if_the_recipe_allows_it(tiny, finetune, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    (model / "custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((model / "config.json").read_text())
    config["model_type"] = "custom"
    config["auto_map"] = {
        "AutoConfig": "custom.CustomConfig", "AutoModelForCausalLM": "custom.CustomModel"
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    fields = tiny.fields(model={"name": str(model)}, **ONE_STEP)
    recipe = write_recipe(tmp_path / "r.json", fields)
    done = finetune("train", recipe, "--output", tmp_path / "run")
    assert done.status == 2
    assert "trust_remote_code" in done.stderr
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


def test_secrets_of_the_environment_reach_no_file_and_no_line(tiny, finetune, tmp_path):
    run = tmp_path / "run"
    fields = tiny.fields(adapter={"r": 4}, trackers=["tensorboard"], **ONE_STEP)
    recipe = write_recipe(tmp_path / "r.json", fields)
    done = finetune("train", recipe, "--output", run, env=SECRETS)
    assert done.status == 0, done.output
    told = finetune("report", run, env=SECRETS)
    assert told.status == 0
    written = [path for path in run.rglob("*") if path.is_file()]
    assert {"environment.json", "metrics.jsonl", "README.md", "report.html"} <= {
        path.name for path in written
    }
    for secret in SECRETS.values():
        assert secret not in done.output + told.output
        assert [path for path in written if secret.encode() in path.read_bytes()] == []


def test_a_token_in_a_command_line_is_hidden():
    token = SECRETS["HF_TOKEN"]
    words = ["train", "--hf-token", token, f"tracker.api_key={token}", token, "--seed=1"]
    assert not any(token in word for word in without_secrets(words))
    assert without_secrets(words)[-1] == "--seed=1"


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


def test_training_opens_no_connection(tiny, finetune, tmp_path):
    """With the hub allowed and every request led to a proxy here, none comes."""
    came: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.2)
        done = threading.Event()

        def listen() -> None:
            while not done.is_set():
                try:
                    connection, address = proxy.accept()
                except TimeoutError:
                    continue
                came.append(address)
                connection.close()

        listener = threading.Thread(target=listen)
        listener.start()
        place = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        env = {"HTTPS_PROXY": place, "HTTP_PROXY": place, "ALL_PROXY": place, "HF_HUB_OFFLINE": "0"}
        recipe = write_recipe(tmp_path / "r.json", tiny.fields(adapter={"r": 4}, **ONE_STEP))
        ended = finetune("train", recipe, "--output", tmp_path / "run", env=env)
        done.set()
        listener.join()
    assert ended.status == 0, ended.output
    assert came == []
