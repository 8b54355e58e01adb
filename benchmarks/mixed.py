"""Short calls while other clients keep the same server busy: the others are in other processes.

    python -m benchmarks.mixed crowd       clients whose streams are idle, and ones that read live
    python -m benchmarks.mixed resume      a client that resumes the same call again and again

Each reads its `Work` from the first line of standard input, and writes a line when it is ready.
Then the crowd answers each line with the number of messages so far. The other client begins to
resume with a line, which it answers at once, and ends with the next one, which it answers with
`Resumed`. Both check every message.
"""

import select
import subprocess
import sys
import time
from typing import Final

import msgspec
import trio

from benchmarks import rawclient
from benchmarks.numbered import FIRST, Lost
from benchmarks.servers import ROOT, STOP_S
from streams import Client
from transports import dial

OPENED_AT_ONCE: Final = 20


class Work(msgspec.Struct, frozen=True):
    """The load of a process on the server at `url`, a WebSocket."""

    url: str = ""
    idle: int = 1_000  # streams that have sent one message
    live: int = 50
    per_second: int = 10  # messages of a live stream
    resumed: int = 100_000  # messages of a resume
    size: int = 200


class Resumed(msgspec.Struct, frozen=True):
    """The messages of all resumes, and the seconds in which they came."""

    messages: int
    seconds: float


# On the side of the benchmark


class Process:
    """One of the processes above, which is ready."""

    def __init__(self, kind: str, work: Work) -> None:
        self._process = subprocess.Popen(  # nosec B603 # our own program
            [sys.executable, "-m", "benchmarks.mixed", kind],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self.ask(msgspec.json.encode(work))
        except BaseException:
            self.close()
            raise

    def ask(self, line: bytes) -> bytes:
        """Write a line and read one.

        Raises `Lost` where the process has ended: its traceback is on stderr.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            raise Lost("a client of the mixed load has ended; the text above says why")
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()  # nothing of it is needed
        self._process.communicate(timeout=STOP_S)


# In the process of the crowd


async def _crowd(work: Work) -> None:
    attached = trio.CapacityLimiter(OPENED_AT_ONCE)
    came = [0] * work.live

    async def idle(task_status: trio.TaskStatus[None]) -> None:
        async with Client(dial(work.url)) as client, client.call("wait") as call:
            await anext(call)
            task_status.started()
            async for _ in call:
                raise Lost("an idle stream has sent a second message")
            raise Lost("an idle stream has ended")

    async def live(place: int, task_status: trio.TaskStatus[None]) -> None:
        arguments = {"count": 10**9, "size": work.size, "per_second": work.per_second}
        async with Client(dial(work.url)) as client, client.call("pace", arguments) as call:
            async for message in call:
                data = msgspec.json.decode(message.params)["data"]
                if data["n"] != FIRST + came[place]:
                    raise Lost(f"message {came[place]} was expected: {message.params!r}")
                came[place] += 1
                if came[place] == 1:
                    task_status.started()
            raise Lost("a live stream has ended")

    async with trio.open_nursery() as clients:

        async def attach(number: int) -> None:
            async with attached:
                if number < work.live:
                    await clients.start(live, number)
                else:
                    await clients.start(idle)

        async with trio.open_nursery() as starting:
            for number in range(work.live + work.idle):
                starting.start_soon(attach, number)
        _say(b"ready")
        while await trio.to_thread.run_sync(sys.stdin.buffer.readline, abandon_on_cancel=True):
            _say(b"%d" % sum(came))
        clients.cancel_scope.cancel()


# In the process that resumes


def _resume(work: Work) -> None:
    resumes = rawclient.websocket_again(work.url, work.resumed, work.size)
    next(resumes)
    _say(b"ready")
    while sys.stdin.buffer.readline():
        began_at, messages = time.perf_counter(), 0
        _say(b"resuming")
        while not (messages and select.select([sys.stdin], [], [], 0)[0]):
            messages += next(resumes).messages
        seconds = time.perf_counter() - began_at
        sys.stdin.buffer.readline()
        _say(msgspec.json.encode(Resumed(messages, seconds)))


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    given = msgspec.json.decode(sys.stdin.buffer.readline(), type=Work)
    if sys.argv[1] == "crowd":
        trio.run(_crowd, given)
    else:
        _resume(given)
