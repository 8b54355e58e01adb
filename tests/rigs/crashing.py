"""Servers that are killed at an exact step of their work on the journal's files."""

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import pytest
import trio

from streams.limits import Durability
from tests.rigs.crashing_app import Life

SHIM: Final = Path(__file__).with_name("crashing.c")
PATIENT_S: Final = 60  # a bound for a test that hangs
_LISTENS: Final = re.compile(rb"ws://127\.0\.0\.1:(\d+)")
_ENDED: Final = re.compile(rb"^ended (-?\d+)$")


def built(folder: Path) -> Path:
    """The library that counts steps and kills; skips the test where it cannot be built."""
    compiler = shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        why = "a kill at an exact step takes Linux and gcc"
        if os.environ.get("SKIP_NOTHING") == "1":
            pytest.fail(why)
        pytest.skip(why)
    library = folder / "crashing.so"
    command = [compiler, "-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-o", library, SHIM]
    subprocess.run([*command, "-ldl"], check=True)
    return library


class Steps:
    """The steps that a server has taken, counted in a file that it maps into its memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reset()

    def reset(self) -> None:
        self.path.write_bytes(bytes(8))

    @property
    def taken(self) -> int:
        [count] = struct.unpack("l", self.path.read_bytes())
        return int(count)


class Lives:
    """Servers one after the other on one port, each in a process that is forked for it."""

    def __init__(self, process: trio.Process, folder: Path) -> None:
        assert process.stderr is not None
        self.steps = Steps(folder / "steps")
        self.port = 0
        self._process = process
        self._log = process.stderr
        self._unread = b""
        self.said: list[bytes] = []  # by this server, for a reader of the folder

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    async def begin(
        self, journal: Path, durability: Durability, at: int = 0, *, is_half: bool = False
    ) -> bool:
        """Start a server that dies at a step; returns whether it listened before that."""
        assert self._process.stdin is not None
        self.steps.reset()
        self.said.clear()
        life = Life(str(journal), durability, self.port, str(self.steps.path), at, is_half)
        await self._process.stdin.send_all(msgspec.json.encode(life) + b"\n")
        while True:
            line = await self._line()
            if listens := _LISTENS.search(line):
                self.port = int(listens[1])
                return True
            if ended := _ENDED.match(line):
                self._check(int(ended[1]))
                return False

    async def end(self) -> int:
        """Wait until the server has ended, by a kill or in good order; returns its exit code."""
        while not (ended := _ENDED.match(await self._line())):
            pass
        return self._check(int(ended[1]))

    def _check(self, code: int) -> int:
        assert code in (0, -signal.SIGKILL), b"\n".join(self.said).decode()
        return code

    def terminate(self) -> None:
        """SIGTERM to the server, unless it has died before."""
        self._process.terminate()

    async def _line(self) -> bytes:
        with trio.fail_after(PATIENT_S):
            while b"\n" not in self._unread:
                data = await self._log.receive_some()
                assert data, "the process that forks servers has ended"
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        self.said.append(line)
        return line


@asynccontextmanager
async def open_lives(library: Path, folder: Path) -> AsyncIterator[Lives]:
    """The process that forks servers; it is killed at the end."""
    async with trio.open_nursery() as nursery:
        fork = partial(
            trio.run_process,
            [sys.executable, "-m", "tests.rigs.crashing_app"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            check=False,
            env={**os.environ, "LD_PRELOAD": str(library)},
            cwd=SHIM.parent.parent,
        )
        process = await nursery.start(fork)
        try:
            yield Lives(process, folder)
        finally:
            process.kill()
