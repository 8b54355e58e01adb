"""Reads the documentation's pages, and runs the examples of one in a folder of its own."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from streams.journal.ownership import owner_of
from tests.rigs import ROOT

PAGES: Final = (
    *(ROOT / name for name in ("README.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "figures.md",
)

# The addresses that the pages name; free ports take their place.
DOCUMENTED: Final = {"ws": "127.0.0.1:8765", "http": "127.0.0.1:8080"}
COMMAND_S: Final = 60.0
LOOK_EVERY_S: Final = 0.02

_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE: Final = re.compile(r"# (\w+\.py)\n")
_JOURNAL: Final = re.compile(r"--journal ([^\s\"]+)")
_KILL: Final = re.compile(r"kill (-9 )?\"")
_LISTENING: Final = re.compile(r"(?:listening|unning on).*\b(ws|http)://([0-9.:]+)")
_ASGI: Final = re.compile(r"(?:uvicorn|hypercorn) .*?(--port 8080|--bind 127\.0\.0\.1:8080)")


class Block(msgspec.Struct, frozen=True):
    """A fenced block of a page."""

    language: str
    text: str


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = [Block(*match.groups()) for match in _FENCE.finditer(page.read_text())]
    return [block for block in found if language in (None, block.language)]


def sessions(block: Block) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with its output below it."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _end_owner(journal: Path) -> None:
    owner = owner_of(journal)
    assert owner is not None, f"{journal.name}: its server has ended"
    os.kill(owner, signal.SIGTERM)
    deadline = time.monotonic() + COMMAND_S
    while owner_of(journal) is not None:
        assert time.monotonic() < deadline
        time.sleep(LOOK_EVERY_S)


class Stage:
    """Runs the examples of one page as a reader would; `close` ends the servers that still run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._addresses = dict(DOCUMENTED)
        self._servers: list[subprocess.Popen[str]] = []
        self._pasted: set[Path] = set()  # journals of servers that a pasted block has started
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        state = str(folder / "state")  # journals of wrapped commands
        self._environment = {**os.environ, "PATH": path, "XDG_STATE_HOME": state}

    def close(self) -> None:
        """End the servers, which must exit with 0; uvicorn passes the signal on to itself."""
        for journal in self._pasted:
            _end_owner(journal)
        for server in self._servers:
            server.terminate()
            _, log = server.communicate(timeout=COMMAND_S)
            assert server.returncode in self._ends(server, 0), log

    @staticmethod
    def _ends(server: subprocess.Popen[str], code: int) -> tuple[int, ...]:
        is_uvicorn = "uvicorn" in str(server.args)
        return (code, -signal.SIGTERM) if is_uvicorn else (code,)

    def play(self, block: Block) -> None:
        """Run an example; other blocks are skipped."""
        if block.language == "python":
            self._python(block.text)
        elif block.language == "sh" and "mcp-streams serve " in block.text:
            self.paste(block)
        elif block.language == "console":
            for command, output in sessions(block):
                self._command(command, output)
        elif block.language == "text" and "^C" in block.text:
            for command, output in sessions(block):
                self._interrupted(command, output)

    def paste(self, block: Block) -> str:
        """Give a whole block to a shell at once, and return what it printed.

        The server that it leaves behind serves the blocks that follow.
        """
        self._addresses = {scheme: f"127.0.0.1:{free_port()}" for scheme in DOCUMENTED}
        self._pasted |= {self._folder / name for name in _JOURNAL.findall(block.text)}
        with (self._folder / "pasted").open("w+") as printed:
            done = subprocess.run(
                ["bash"],
                input=self._here(block.text),
                check=False,
                cwd=self._folder,
                env=self._environment,
                stdout=printed,  # a file, since a server that stays would hold a pipe open
                stderr=printed,
                text=True,
                timeout=COMMAND_S,
            )
            printed.seek(0)
            text = printed.read()
        assert done.returncode == 0, text
        return text

    def _python(self, text: str) -> None:
        named = _FILE.match(text)
        assert named, "an example in Python begins with a comment that names its file"
        (self._folder / named[1]).write_text(self._here(text))
        if "Server(" not in text:  # the next command serves those
            self._run(f"python {named[1]}")

    def _command(self, command: str, output: str) -> None:
        if command.endswith(" &"):
            self._serve(command.removesuffix(" &"))
            return
        printed = self._run(command)
        if ended := _KILL.match(command):
            self._await_end(-signal.SIGKILL if ended[1] else 0)
        if output:
            pattern = ".*".join(map(re.escape, output.split("…")))
            assert re.fullmatch(pattern, printed, re.DOTALL), printed

    def _run(self, command: str) -> str:
        done = subprocess.run(
            self._here(command),
            shell=True,
            check=False,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _serve(self, command: str) -> None:
        awaited = {scheme for scheme in DOCUMENTED if f"--{scheme} " in command}
        for scheme in awaited:
            # A server that is started again has its old address, by which clients come back.
            is_new = self._addresses[scheme] == DOCUMENTED[scheme] or self._servers
            here = "127.0.0.1:0" if is_new else self._addresses[scheme]
            command = command.replace(DOCUMENTED[scheme], here)
        if asgi := _ASGI.match(command):
            awaited = {"http"}
            command = command.replace(asgi[1], asgi[1].replace("8080", "0"))
        server = self._start(command)
        self._servers.append(server)
        assert server.stderr is not None
        while awaited:
            line = server.stderr.readline()
            assert line, f"{command}: ended without listening"
            if listening := _LISTENING.search(line):
                self._addresses[listening[1]] = listening[2]
                awaited.remove(listening[1])

    def _await_end(self, code: int) -> None:
        """Wait for the page's one server, to which the page has sent a signal."""
        server = self._servers.pop()
        assert not self._servers, "a page that ends a server has one"
        _, log = server.communicate(timeout=COMMAND_S)
        assert server.returncode in self._ends(server, code), log

    def _interrupted(self, command: str, output: str) -> None:
        """Press Ctrl-C once the call prints a message, and keep the ticket."""
        process = self._start(command)
        assert process.stderr is not None
        shown = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        shown += process.communicate(timeout=COMMAND_S)[1]
        farewell = self._here(output.partition("^C\n")[2]).replace("…\n", "")
        before, _, ticket_begins = farewell.rpartition(" ")
        assert process.returncode == 130, shown
        assert before in shown
        self._environment["TICKET"] = shown.split()[-1]
        assert self._environment["TICKET"].startswith(ticket_begins)

    def _start(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            shlex.split(self._here(command)),
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _here(self, text: str) -> str:
        for scheme, address in self._addresses.items():
            text = text.replace(DOCUMENTED[scheme], address)
        return text
