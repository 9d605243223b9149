"""`finetune eval` of models behind URLs, with a judge: over real HTTP."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from conftest import written
from reference_server import Handler, listening

from finetune import FinetuneError
from finetune.cli import main as cli
from finetune.cli.eval import _line
from finetune.evaluation.judge import Judge, win_rate
from finetune.inference.endpoint import open_endpoint

ROWS = [("a", "right"), ("b", "right"), ("c", "other"), ("d", "right")]
SAID: dict[str, Any] = {
    **{"knows": "right", "cut": "rig", "nonsense": "I like both of them!"},
    **{"parts": [{"type": "text"}], "surrogate": "\ud83d"},
}


class Models(Handler):
    """Models by name: `knows` says "right", `cut` is cut, `judge` prefers "right", others fail."""

    seen: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        if self.path == "/elsewhere":
            self.seen.append({"key": self.headers["Authorization"]})
        self.reply({"data": [{"id": "knows"}]})

    def do_POST(self) -> None:
        body = json.loads(self.body())
        self.seen.append({"path": self.path, "key": self.headers["Authorization"], **body})
        match body["model"]:
            case "judge":
                self.complete(self.verdict(body["messages"][-1]["content"]))
            case "odd":
                self.reply({"error": None})
            case "closes":
                self.connection.shutdown(socket.SHUT_RDWR)
            case "moved":
                self.send_response(302)
                self.send_header(
                    "Location", f"http://localhost:{self.server.server_port}/elsewhere"
                )
                self.end_headers()
            case "breaks":
                self.send_response(500)
                self.send_header("Content-Length", "9")
                self.end_headers()
                self.connection.shutdown(socket.SHUT_RDWR)
            case "html" | "deep" as name:
                self.send(b"<html>Bad gateway</html>" if name == "html" else b"[" * 100_000)
            case str(name) if name in SAID:
                self.complete(SAID[name], "length" if name == "cut" else "stop")
            case _:
                self.send_error(404, "no such model")

    def verdict(self, text: str) -> str:
        """Whoever says "right" and not "rig"; the first of two equals, as biased judges do."""
        first = text.split("[Answer A]\n")[1].split("\n")[0]
        second = text.split("[Answer B]\n")[1].split("\n")[0]
        return f"Verdict: {'B' if second == 'right' != first else 'A'}"

    def complete(self, text: Any, finish: str = "stop") -> None:
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
        self.reply({"choices": [choice], "usage": {"completion_tokens": len(text)}})

    def send(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data)


@pytest.fixture
def url() -> Iterator[str]:
    Models.seen.clear()
    with listening(Models) as url:
        yield url


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    messages = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in ROWS
    ]
    return written(tmp_path / "rows.jsonl", ({"messages": each} for each in messages))


def test_served_models_are_asked_and_judged(url, data, capsys):
    Path("key").write_text("secret\n")
    words = ["--data", data, "--output", "out", "--json", "--key-file", "key"]
    assert cli.main(["eval", url, *map(str, words), "--require", "exact>=0.3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["subject"]["kind"], found["measures"]["exact"]["after"]) == ("url", 0.75)
    assert "loss" not in found["measures"]
    assert found["notes"] == [f"{url}: a server cannot give the loss of a reference answer"]
    first = Models.seen[0]
    assert (first["path"], first["key"], first["temperature"], first["max_tokens"]) == (
        "/v1/chat/completions", "Bearer secret", 0.0, 256,
    )  # fmt: skip
    assert first["messages"] == [{"role": "user", "content": "a"}]
    assert "secret" not in "".join(path.read_text() for path in Path("out").iterdir())
    words = ["--data", data, "--model-name", "cut", "--against", f"{url}/v1", "--json"]
    judge = ["--judge", url, "--judge-model", "judge"]
    assert cli.main(["eval", url, *map(str, words), *judge, "--name", "judged"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Both were asked as `cut`: equal answers, and a judge that prefers the first place, are ties.
    won = found["measures"]["win_rate"]
    assert won["after"] == 0.5
    assert won["after_detail"]["ties"] == won["after_detail"]["order_decided"] == 4
    assert (found["subject"]["cut"], found["measures"]["stopped"]["after"]) == (4, 0.0)
    assert Path("eval/judged/index.html").is_file()


def test_two_models_at_one_url_are_compared(url, data, capsys):
    words = ["--data", str(data), "--model-name", "knows", "--against-model-name", "cut", "--json"]
    assert cli.main(["eval", url, "--against", url, *words]) == 0
    exact = json.loads(capsys.readouterr().out)["measures"]["exact"]
    assert (exact["before"], exact["after"]) == (0.0, 0.75)
    assert {body["model"] for body in Models.seen} == {"knows", "cut"}


def test_half_characters_of_a_server_are_replaced_and_control_codes_are_not_printed(
    url, data, capsys
):
    words = ["--data", str(data), "--model-name", "surrogate"]
    assert cli.main(["eval", url, *words, "--output", "out"]) == 0
    assert "answer   \ufffd\n" in capsys.readouterr().out
    assert json.loads(Path("out/samples.jsonl").read_text().splitlines()[0])["after"] == "\ufffd"
    assert _line("\x1b[31mred\nblue") == r"\x1b[31mred\nblue"


def test_what_is_no_url_is_named():
    for name in ("x", "http://", "http://[::1", "ftp://host/v1"):
        with pytest.raises(FinetuneError, match="expected a URL such as"):
            open_endpoint(name)


def test_a_key_does_not_follow_a_redirect_and_a_broken_error_is_one_line(url):
    for model, told in (("moved", "not a completion"), ("breaks", "status 500 Internal Server")):
        with pytest.raises(FinetuneError, match=told):
            open_endpoint(url, model, "secret").chat([{"role": "user", "content": "a"}])
    assert [each["key"] for each in Models.seen] == ["Bearer secret", None, "Bearer secret"]


def test_a_judge_is_asked_in_both_orders(url):
    compared = [("q", "right", "rig"), ("q", "rig", "right"), ("q", "right", "right")]
    found = win_rate(Judge(open_endpoint(url, "judge")), compared)
    assert found.of_rows.tolist() == [1.0, 0.0, 0.5]
    assert (found.detail["wins"], found.detail["losses"], found.detail["ties"]) == (1, 1, 1)
    assert len(Models.seen) == 2 * len(compared)
    assert "{question}" in found.detail["prompt"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model-name", "missing"], "status 404 no such model"),
        (["--model-name", "html"], "the answer is not JSON"),
        (["--model-name", "deep"], "the answer is not JSON"),
        (["--model-name", "closes"], "no answer (Remote end closed connection"),
        (["--model-name", "parts"], "content is list, expected text"),
        (["--step", "3"], "is not a run; only a run has checkpoints"),
        (["--code-samples", "3"], "several answers are only for pass@k of code"),
        (["--judge-model", "html"], "the answer is not JSON"),
        (["--model-name", "odd"], "the reply is not a completion (KeyError: 'choices')"),
        (["--judge-model", "nonsense"], "4 of 4 rows have no readable verdict"),
        (["--judge-model", "missing"], "status 404 no such model"),
        (["--metrics", "json"], "rows.jsonl row 1: its answer is not JSON"),
    ],
)
def test_a_server_that_does_not_answer_is_named_and_nothing_is_written(
    url, data, capsys, tmp_path, words, told
):
    judge = ["--against", url, "--judge", url] if "--judge-model" in words else []
    assert cli.main(["eval", url, "--data", str(data), *judge, *words]) == 2
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
