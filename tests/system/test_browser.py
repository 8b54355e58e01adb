"""A page in a real browser as a client: fetch, event streams and WebSocket, from another origin."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.rigs.command import run
from tests.rigs.needing import needed
from tests.wire.process import Gate, ServerProcess, gate_in

PAGE = Path(__file__).with_name("page.html").read_bytes()
BROWSER_S = 100  # the time to start one on a busy machine
OPTIONS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run")


class Site:
    """Serves the page, and hears what it reports."""

    def __init__(self, on_release: Callable[[], None]) -> None:
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()
        reports = self.reports

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/release":
                    on_release()
                self._answer(PAGE)

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                reports.put(json.loads(self.rfile.read(length)))
                self._answer(b"")

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.origin = f"http://localhost:{self._server.server_port}"

    @contextlib.contextmanager
    def running(self) -> Iterator["Site"]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with gate_in(tmp_path / "gate") as gate:
        yield gate


@pytest.fixture
def site(gate: Gate) -> Iterator[Site]:
    with Site(gate.release).running() as site:
        yield site


@pytest.fixture
def browse(tmp_path: Path) -> Callable[[Site, dict[str, str]], dict[str, Any]]:
    browser = needed("chromium-headless-shell", "be a browser")

    def browse(site: Site, about: dict[str, str]) -> dict[str, Any]:
        """Show the page, and return its report."""
        url = f"{site.origin}/?{urlencode(about)}"
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        process = subprocess.Popen(
            [browser, *OPTIONS, profile, "--remote-debugging-port=0", url],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return site.reports.get(timeout=BROWSER_S)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # and the processes that it has started
            process.wait()

    return browse


def served(folder: Path, *options: str) -> ServerProcess:
    folder.mkdir()
    return ServerProcess(folder, options=options)


def http_url(server: ServerProcess) -> str:
    return f"http://127.0.0.1:{server.http_port}/mcp"


def test_a_page_of_an_allowed_origin_is_a_client(
    tmp_path: Path, site: Site, gate: Gate, browse: Callable[..., dict[str, Any]]
) -> None:
    tokens = tmp_path / "tokens.jsonl"
    assert run("token", "new", "page", "--file", str(tokens)).returncode == 0
    allowed = ("--allow-origin", site.origin)
    guarding = (*allowed, "--auth-tokens", str(tokens))
    with (
        served(tmp_path / "open", *allowed) as server,
        served(tmp_path / "a", *guarding) as guarded,
    ):
        about = {"http": http_url(server), "ws": server.url, "guarded": http_url(guarded)}
        seen = browse(site, {**about, "gate": gate.path})
    assert seen.pop("refused") == [
        401,
        'Bearer error="invalid_token", error_description="The token is unknown, expired or revoked,'
        ' or is not meant for this server."',
    ]
    assert seen == {
        "greeting": "wire-tests",
        "numbers": [1, 2, 3],
        "result": "counted 3",
        "ended": 200,
        "unknown": [404, "Unknown session: initialize again."],
        "webSocket": "wire-tests",
    }


def test_a_page_of_another_origin_sees_nothing(
    tmp_path: Path, site: Site, gate: Gate, browse: Callable[..., dict[str, Any]]
) -> None:
    with served(tmp_path / "open", "--allow-origin", "https://app.example") as server:
        url = http_url(server)
        seen = browse(site, {"http": url, "ws": server.url, "guarded": url, "gate": gate.path})
    assert seen["overHttp"] == seen["withoutToken"] == "TypeError: Failed to fetch"
