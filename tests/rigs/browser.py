"""A real Chromium that a test drives by the DevTools protocol."""

import base64
import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from websockets.sync.client import ClientConnection, connect

from tests.rigs.needing import needed

START_S: Final = 100.0  # the time to start one on a busy machine
ANSWER_S: Final = 30.0
OPTIONS: Final = (
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
DESKTOP: Final = (1280, 800)
PHONE: Final = (390, 844)


class Tab:
    """One page of a browser, and all that it has asked for and complained of."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []  # errors and warnings of the console, and of the policy
        self.expected: tuple[str, ...] = ()  # words of complaints that a test expects
        self.asked: list[str] = []  # the URLs of requests
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """One command, and its result."""
        message = self._ask(method, params)
        assert "error" not in message, (method, message)
        result: dict[str, Any] = message["result"]
        return result

    def _ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message: dict[str, Any] = json.loads(self._socket.recv(ANSWER_S))
            if message.get("id") == number:
                return message
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])
            case "Log.entryAdded":
                if params["entry"]["level"] in ("error", "warning"):
                    self.complaints.append(str(params["entry"]["text"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                if params["type"] in ("error", "warning", "assert"):
                    self.complaints.append(json.dumps(params["args"]))

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.do(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, (script, found)
        return found["result"].get("value")

    def wait_for(self, script: str, within_s: float = ANSWER_S) -> float:
        """Wait until an expression is true; returns how long that took, in seconds."""
        began_at = time.monotonic()
        while not self._is_true(script):
            waited = time.monotonic() - began_at
            assert waited < within_s, f"{script}\n{self.text}"
            time.sleep(0.02)
        return time.monotonic() - began_at

    def _is_true(self, script: str) -> bool:
        wanted = {"expression": f"Boolean({script})", "returnByValue": True}
        found = self._ask("Runtime.evaluate", wanted)
        # While another page takes the place of this one, scripts may fail.
        return "result" in found and found["result"]["result"].get("value") is True

    @property
    def text(self) -> str:
        """The text that the page shows."""
        return str(self.run("document.body ? document.body.innerText : ''"))

    def open(self, url: str) -> None:
        """Load a page, and wait until it is there."""
        self.run("document.documentElement.dataset.old = '1'")
        self.do("Page.navigate", url=url)
        self.wait_for_page()

    def wait_for_page(self) -> None:
        """Wait until a page is loaded in the place of one that `open` or `leave` has marked."""
        self.wait_for("document.readyState === 'complete' && !document.documentElement.dataset.old")

    def click(self, selector: str) -> None:
        """Press a button or follow a link that leads to another page, and wait for that."""
        self.run("document.documentElement.dataset.old = '1'")
        self.run(f"document.querySelector({json.dumps(selector)}).click()")
        self.wait_for_page()

    def fill(self, selector: str, text: str) -> None:
        """Write in a field."""
        self.run(f"document.querySelector({json.dumps(selector)}).value = {json.dumps(text)}")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key."""
        about: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.do("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.do("Input.dispatchKeyEvent", type="keyUp", **about)

    def resize(self, size: tuple[int, int], *, is_dark: bool = False) -> None:
        """Be a window of this size."""
        width, height = size
        self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=size == PHONE,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[scheme])

    def photograph(self, file: Path, *, is_whole: bool = False) -> None:
        """Keep a picture of the page."""
        file.parent.mkdir(parents=True, exist_ok=True)
        taken = self.do("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        file.write_bytes(base64.b64decode(taken["data"]))


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Tab]:
    """A tab of a browser of its own."""
    browser = needed("chromium-headless-shell", "be a browser")
    process = subprocess.Popen(
        [browser, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        with connect(_place(process), max_size=None, open_timeout=ANSWER_S) as socket:
            yield Tab(socket)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # and the processes that it has started
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def _place(process: subprocess.Popen[str]) -> str:
    """The WebSocket of the first tab."""
    assert process.stderr is not None
    give_up_at = time.monotonic() + START_S
    for line in process.stderr:
        if "DevTools listening on " in line:
            root = line.split("DevTools listening on ")[1].strip()
            break
        assert time.monotonic() < give_up_at
    else:
        raise AssertionError("the browser has ended")
    with connect(root, max_size=None, open_timeout=ANSWER_S) as socket:
        socket.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
        while (answer := json.loads(socket.recv(ANSWER_S))).get("id") != 1:
            pass
    found = [each for each in answer["result"]["targetInfos"] if each["type"] == "page"]
    return f"{root.rpartition('/devtools/')[0]}/devtools/page/{found[0]['targetId']}"
