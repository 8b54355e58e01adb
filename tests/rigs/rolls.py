"""Processes of one server that follow one another on one journal, behind a balancer."""

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import trio

from tests.rigs import ROOT
from tests.rigs.balancers import Ports
from tests.rigs.doc_pages import free_port
from tests.rigs.needing import needed
from tests.sdk.proxies import NGINX_FRAME, running

FOLDER: Final = ROOT / "docs" / "operate" / "rolling"
LOOK_EVERY_S: Final = 0.02
PATIENCE_S: Final = 60.0
LISTENERS: Final = 3  # HTTP, WebSocket and the operators'


class Rolling:
    """A server with two addresses: the process at one of them takes over from that at the other."""

    def __init__(self, folder: Path, app: str, *options: str) -> None:
        self.places = [Ports(free_port(), free_port(), free_port()) for _ in range(2)]
        self.journal = folder / "journal.db"
        self.rolls = 0
        self._folder = folder
        self._command = [sys.executable, "-m", "streams.cli", "serve", app, *options]
        self._process: trio.Process | None = None

    async def start(self) -> trio.Process:
        """Start the first process, and wait until it serves."""
        self._process = await self._begin(0)
        await self.says(0, "listening", times=LISTENERS)
        return self._process

    async def roll(self, number: signal.Signals = signal.SIGTERM) -> str:
        """Let the next process take over after this signal; returns the log of the former one."""
        former = self._process
        assert former is not None
        self.rolls += 1
        self._process = await self._begin(self.rolls)
        await self.says(self.rolls, "waiting for the owner")
        former.send_signal(number)
        with trio.fail_after(PATIENCE_S):
            assert await former.wait() == (-number if number == signal.SIGKILL else 0)
        await self.says(self.rolls, "listening", times=LISTENERS)
        return self.log(self.rolls - 1).read_text()

    async def stop(self) -> None:
        """End the process of the moment."""
        if self._process is not None:
            self._process.kill()
            await self._process.wait()

    async def _begin(self, number: int) -> trio.Process:
        place = self.places[number % 2]
        where = {"http": place.http, "ws": place.ws, "admin": place.admin}
        words = [word for key, port in where.items() for word in (f"--{key}", f"127.0.0.1:{port}")]
        words += ["--journal", str(self.journal), "--standby", str(PATIENCE_S)]
        with self.log(number).open("wb") as log:
            return await trio.lowlevel.open_process(
                [*self._command, *words], stdin=-3, stdout=log, stderr=log
            )

    async def says(self, number: int, what: str, times: int = 1) -> None:
        """Wait until the log of this process has these words."""
        with trio.fail_after(PATIENCE_S):
            while self.log(number).read_text().count(what) < times:
                await trio.sleep(LOOK_EVERY_S)

    def log(self, number: int) -> Path:
        """The log of a process; the first one is 0."""
        return self._folder / f"process-{number}.log"


@contextlib.contextmanager
def balancer(name: str, places: Sequence[Ports], folder: Path) -> Iterator[int]:
    """Run the documented balancer, without TLS, in front of two addresses; yields its port."""
    port = free_port()
    blue, green = places
    changes = {
        "127.0.0.1:8080": f"127.0.0.1:{blue.http}",
        "127.0.0.1:8081": f"127.0.0.1:{green.http}",
        "127.0.0.1:8765": f"127.0.0.1:{blue.ws}",
        "127.0.0.1:8766": f"127.0.0.1:{green.ws}",
    }
    program = needed(name, "serve behind it")
    configuration = folder / f"{name}.conf"
    if name == "haproxy":
        tls = "bind :443 ssl crt /etc/ssl/mcp.pem alpn http/1.1 ssl-min-ver TLSv1.2"
        text = _changed("haproxy.cfg", {**changes, tls: f"bind 127.0.0.1:{port}"})
        command = [program, "-db", "-f", str(configuration)]
    else:
        changes |= {
            "listen 443 ssl;": f"listen 127.0.0.1:{port};",
            "ssl_certificate /etc/ssl/mcp.pem;": "",
            "ssl_certificate_key /etc/ssl/mcp.key;": "",
        }
        documented = _changed("nginx.conf", changes)
        text = NGINX_FRAME.format(folder=folder, documented=documented)
        command = [program, "-e", "stderr", "-p", str(folder), "-c", str(configuration)]
    configuration.write_text(text)
    with running(command, port, folder / f"{name}.log"):
        yield port


def _changed(name: str, changes: dict[str, str]) -> str:
    text = (FOLDER / name).read_text()
    for written, meant in changes.items():
        assert written in text, f"{written} is to be in {name}"
        text = text.replace(written, meant)
    return text
