"""A server that is killed at an exact step, and the process that restarts it.

`python -m tests.rigs.crashing_app` reads one line of JSON for each life of the server, forks the
server, so that modules are imported only once, and prints how it ended. The server is `mcp-streams
serve` with smaller sizes in its journal, so that a short scenario reaches every case.
"""

import ctypes
import mmap
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from streams import Call, Server, logs
from streams.journal.sqlite import JobThread, SQLiteJournal, SQLiteStore
from streams.journal.sqlite.log import Budget
from streams.limits import Durability
from streams.process import serve
from streams.process.options import Options

APP: Final = f"{Path(__file__)}:server"
SCHEMA: Final = {"type": "object", "properties": {}}
SMALL: Final = Budget(log_bytes=3_000, segment_bytes=600, direct_bytes=2_000, wal_bytes=300_000)

server = Server("crashing", version="1", resume_min_s=0)


@server.tool
async def work(call: Call, count: int, pad: int, ask_at: int, marks: str) -> str:
    """Send `count` numbers, and mark in a file which of them `flush` has confirmed."""
    for number in range(1, count + 1):
        await call.log("info", {"n": number, "pad": "x" * pad})
        if number % 4 == 0:
            await call.flush()
            _mark(marks, number)
        if number == ask_at:
            await call.request("elicitation/create", {"message": marks, "requestedSchema": SCHEMA})
    return f"worked {count}"


@server.tool
async def brief(name: str, pause_s: float, runs: str) -> str:
    """Write down the run, and end about when the record of the call is stored."""
    return await _be_brief(name, pause_s, runs)


@server.tool(annotations={"readOnlyHint": True})
async def reading(name: str, pause_s: float, runs: str) -> str:
    """As `brief`, for a client that may ask twice."""
    return await _be_brief(name, pause_s, runs)


async def _be_brief(name: str, pause_s: float, runs: str) -> str:
    _mark(runs, name)
    await trio.sleep(pause_s)
    return f"{name} is done"


def _mark(marks: str, what: object) -> None:
    with open(marks, "a") as file:
        file.write(f"{what}\n")


class Life(msgspec.Struct):
    """One life of the server; it dies at step `at` of its work on the journal's files."""

    journal: str
    durability: Durability
    port: int
    steps: str  # a file of 8 bytes that counts the steps
    at: int = 0  # never
    is_half: bool = False


@asynccontextmanager
async def _open_small(path: Path, **settings: Any) -> AsyncIterator[SQLiteJournal]:
    with closing(JobThread("journal")) as thread:
        store = await thread.run(lambda: SQLiteStore(path, budget=SMALL, **settings))
        journal = SQLiteJournal(store, thread)
        try:
            yield journal
        finally:
            await journal.aclose()


def _live(life: Life) -> None:
    with open(life.steps, "r+b") as file:
        shared = mmap.mmap(file.fileno(), ctypes.sizeof(ctypes.c_long))
    counter = ctypes.c_long.from_buffer(shared)
    arm: Any = ctypes.CDLL(None).crash_arm
    arm(os.fsencode(life.journal), ctypes.byref(counter), ctypes.c_long(life.at), life.is_half)
    serve.open_sqlite_journal = _open_small  # type: ignore[assignment]
    where = f"127.0.0.1:{life.port}"
    serve.run(Options(app=APP, journal=Path(life.journal), ws=where, durability=life.durability))


def main() -> None:
    """Fork a server for each line, and wait for its end. SIGTERM is passed on to it."""
    child = 0

    def pass_on(number: int, _: object) -> None:
        if child:
            with suppress(ProcessLookupError):  # it has ended just now
                os.kill(child, number)

    signal.signal(signal.SIGTERM, pass_on)
    logs.log_to_stderr()
    for line in sys.stdin:
        life = msgspec.json.decode(line, type=Life)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _live(life)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        child = 0
        print(f"ended {os.waitstatus_to_exitcode(status)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
