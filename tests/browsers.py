"""Headless Chromium, driven over its debugging pipe."""

import base64
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SECONDS = 240.0
"""Seconds until an answer or a condition is overdue."""
KEYS = {"Tab": 9, "Enter": 13, " ": 32}


class Tab:
    """A page of a browser with its own cookies, and every address that it asked for."""

    def __init__(self, browser: "Browser") -> None:
        self._browser = browser
        self._context = browser.call("Target.createBrowserContext")["browserContextId"]
        made = browser.call(
            "Target.createTarget", url="about:blank", browserContextId=self._context
        )
        attached = browser.call("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self.asked = list[str]()
        """Addresses of all requests, in their order."""
        self.problems = list[str]()
        """Errors of scripts, and what the page's policy refused."""
        self._loaded = 0
        browser.listeners[self._session] = self._heard
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _heard(self, method: str, about: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.asked.append(about["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded += 1
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(about["exceptionDetails"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.problems.append(about["entry"]["text"])

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **given)

    def look(self, width: int, dark: bool = False, scripts: bool = True) -> None:
        """How the next pages are shown: width in pixels, colors, with or without scripts."""
        height = 844 if width < 500 else 900
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=width < 500,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)

    def open(self, url: str) -> None:
        """Open an address and wait until it is loaded."""
        self.loading(lambda: self.call("Page.navigate", url=url))

    def loading(self, do: Callable[[], Any]) -> None:
        """Do what loads a page, and wait until it is loaded."""
        before = self._loaded
        do()
        self._browser.until(lambda: self._loaded > before)

    def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        self._browser.until(lambda: self.value(script) is True)

    def until_asked(self, urls: set[str]) -> None:
        """Wait until the page has asked for some addresses."""
        self._browser.until(lambda: urls <= set(self.asked))

    def press(self, key: str) -> None:
        """Press and release a key: `Tab`, `Enter`, or a character."""
        code = KEYS.get(key, 0)
        text = {"text": "\r" if key == "Enter" else key} if key != "Tab" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode=code, **more)  # fmt: skip

    def picture(self, path: Path) -> None:
        """Store a picture of the whole page."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)


class Browser:
    """A running Chromium; commands and answers are JSON, ended by a zero byte."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._number, self._rest = 0, b""
        self._known: dict[int, dict[str, Any]] = {}
        self.listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}

    def call(self, method: str, session: str = "", **given: Any) -> dict[str, Any]:
        self._number += 1
        number, more = self._number, {"sessionId": session} if session else {}
        message = {"id": number, "method": method, "params": given, **more}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        self.until(lambda: number in self._known)
        answer = self._known.pop(number)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def until(self, holds: Callable[[], Any]) -> None:
        """Hear what the browser says until something holds."""
        end = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < end, "overdue"
            self._hear()

    def _hear(self) -> None:
        if not (read := _read(self._answers)):
            return
        *messages, self._rest = (self._rest + read).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._known[message["id"]] = message
            elif listener := self.listeners.get(message.get("sessionId", "")):
                listener(message["method"], message["params"])


def _read(place: int) -> bytes:
    try:
        return os.read(place, 1 << 20)
    except BlockingIOError:
        time.sleep(0.01)
        return b""


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser with its profile in a folder."""
    given, commands = os.pipe()
    answers, said = os.pipe()
    os.set_blocking(answers, False)
    words = (
        "chromium --headless=new --no-sandbox --disable-gpu --no-first-run --hide-scrollbars "
        f"--disable-background-networking --user-data-dir={folder} --remote-debugging-pipe"
    )
    process = subprocess.Popen(
        ["bash", "-c", f"exec {words} 3<&{given} 4>&{said}"],
        pass_fds=(given, said), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(given)
    os.close(said)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)  # the browser ends
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answers)
