"""The action of `demo`: calls that are cut, and whose servers are killed, over each transport.

The tool reads a folder and reports every file. The connection is cut in the middle two times. Then
the server is killed with SIGKILL while the tool works, and started on the same journal; a new
client resumes the call. The messages that the clients have received are compared with those that
were sent. One more call is of a tool without `restart=True`: its kill ends it.

With a store the servers are replicas of one journal in it, which is deleted at the end. A call goes
on at another one while its server is down.
"""

import logging
import math
import sysconfig
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import trio
from rich import box
from rich.console import Console
from rich.table import Table

from streams import logs, messages
from streams.cli.base import DETACHED, DONE, FAILED, complain
from streams.cli.interrupts import unless_interrupted
from streams.cli.selftest.demo_server import chained, digest_of, files_of
from streams.cli.selftest.rigs import APP, ListeningRig, NoServer, Rig, StdioRig, Stored
from streams.client.call import RunningCall
from streams.client.client import Client
from streams.errors import CallFailed, ClientError, JournalError, first_of
from streams.journal.redis import open_redis_journal
from streams.keys import new_id
from streams.messages import Message

# The connection is cut, and the server is killed, at these parts of all messages.
CUTS: Final = (0.1, 0.3)
KILL: Final = 0.6
TIMEOUT_S: Final = 300.0


End = Literal["equal", "different", "interrupted", "failed"]
"""The digest in the result, or the end of a call without one."""


class Figures(msgspec.Struct):
    """The figures of one call."""

    transport: str
    restart: bool
    sent: int
    delivered: int
    lost: int
    seen_twice: int
    cuts: int
    kills: int
    end: End

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, nothing seen twice, and the call ended as it must."""
        ends = {"equal"} if self.restart else {"equal", "interrupted"}
        return self.lost == 0 and self.seen_twice == 0 and self.end in ends


class Viewer:
    """The user of the client: counts the messages."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, int]] = Counter()

    def look(self, message: Message) -> None:
        """Count one message, by the number that the tool gave it."""
        params: Any = messages.decode(message.params, dict[str, Any])
        if message.method == "notifications/progress":
            self.seen["progress", params["progress"]] += 1
        else:
            self.seen["log", params["data"]["number"]] += 1


def run(folder: Path | None, *, as_json: bool, store: str | None = None, app: str = APP) -> int:
    """Run the demo over each transport; returns 0 if nothing was lost or seen twice.

    `store` is the URL of a store, in place of files. `app` is the server: tests pass a faulty one,
    to show that the demo finds faults.
    """
    logs.log_to_stderr(logging.ERROR)
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    whole = ""
    try:
        files = files_of(folder)
        if not files:
            return complain(f"{folder} has no files to read: name another folder.")
        for path in files:
            whole = chained(whole, digest_of(path), path.relative_to(folder))
    except OSError as error:
        return complain(f"{folder} cannot be read: {error}.")
    folder = folder.resolve()
    work = _Work(folder, 2 * len(files), whole)
    figures: list[Figures] | None = []
    refused: BaseException | None = None
    failed = ""
    try:
        main = partial(_run_all, None) if store is None else partial(_run_in_store, store)
        figures = trio.run(unless_interrupted, partial(main, app, work, as_json))
    except* JournalError as errors:
        refused = first_of(errors)
    except* (ClientError, NoServer) as errors:
        failed = str(first_of(errors))
    except* trio.TooSlowError:
        failed = f"The calls have not ended within {TIMEOUT_S:g} s."
    if refused is not None:
        return complain(refused)
    if failed:
        return complain(failed, FAILED)
    if figures is None:
        return complain("Interrupted.", DETACHED)
    if as_json:
        print(msgspec.json.encode(figures).decode())
    else:
        _print_table(figures)
    return DONE if all(one.is_good for one in figures) else FAILED


class _Work(NamedTuple):
    """The tool's work: the folder, its messages, and the digest that it must find."""

    folder: Path
    messages: int
    digest: str


async def _run_in_store(store: str, app: str, work: _Work, is_quiet: bool) -> list[Figures]:
    # Under this prefix no replica of another app takes a call of ours, nor we one of it.
    url = f"{store}{'&' if '?' in store else '?'}prefix=mcp-streams-demo-{new_id()}"
    async with open_redis_journal(url):
        pass  # an error of the store is told before servers are started
    try:
        return await _run_all(url, app, work, is_quiet)
    finally:
        with trio.CancelScope(shield=True):
            async with open_redis_journal(url) as journal:
                await journal.delete()


async def _run_all(store: str | None, app: str, work: _Work, is_quiet: bool) -> list[Figures]:
    out = Console(stderr=True, quiet=is_quiet, highlight=False, soft_wrap=True)
    count = work.messages
    out.print(f"{count // 2} files of {work.folder}, {count} messages of each call")
    scenarios: list[_Scenario] = []
    with trio.fail_after(TIMEOUT_S), tempfile.TemporaryDirectory() as place:
        async with trio.open_nursery() as servers:

            def rig(scheme: str, name: str) -> Rig:
                path = Path(place) / name
                journal: Path | Stored = path
                if store is not None:
                    path.mkdir()
                    journal = Stored(store, path)
                if not scheme:
                    return StdioRig(app, journal)
                return ListeningRig(scheme, app, journal, servers)

            scenarios += [
                _Scenario("stdio", rig("", "stdio.db"), out, work, restart=True),
                _Scenario("websocket", rig("ws", "websocket.db"), out, work, restart=True),
                _Scenario("http", rig("http", "http.db"), out, work, restart=True),
                _Scenario("http", rig("http", "once.db"), out, work, restart=False),
            ]
            async with trio.open_nursery() as calls:
                for scenario in scenarios:
                    calls.start_soon(scenario.run)
            servers.cancel_scope.cancel()
    return [scenario.figures() for scenario in scenarios]


class _Scenario:
    """One call over one transport, and its failures."""

    def __init__(
        self, transport: str, rig: Rig, out: Console, work: _Work, *, restart: bool
    ) -> None:
        self._transport = transport
        self._rig = rig
        self._out = out
        self._work = work
        self._restart = restart
        self._viewer = Viewer()
        self._result: dict[str, Any] = {}
        self._end: End = "failed"

    async def run(self) -> None:
        try:
            await self._rig.start()
            await self._follow()
        finally:
            with trio.CancelScope(shield=True):
                await self._rig.stop()

    async def _follow(self) -> None:
        tool = "digest" if self._restart else "digest_once"
        async with (
            Client(self._rig.dialer, name="demo") as client,
            client.call(tool, {"folder": str(self._work.folder)}) as call,
        ):
            for part in CUTS:
                await self._watch(call, until=int(part * self._work.messages))
                self._rig.cut()
                self._say(f"cut after {self._seen} messages")
            await self._watch(call, until=int(KILL * self._work.messages))
            await self._rig.kill()
            self._say(f"server killed after {self._seen} messages")
            ticket = call.ticket
        assert ticket is not None
        await self._rig.start()
        async with (
            Client(self._rig.dialer, name="demo") as client,
            client.resume(ticket) as call,
        ):
            await self._watch(call)
            await self._finish(call)

    async def _finish(self, call: RunningCall) -> None:
        try:
            result = await call.result()
        except CallFailed as error:
            is_interrupted = (error.data or {}).get("reason") == "interrupted"
            self._end = "interrupted" if is_interrupted else "failed"
            self._say(f"resumed: {self._seen} messages, and the error: {error.message}")
            return
        # A tool that failed has no such content.
        self._result = result.get("structuredContent", {})
        self._end = "equal" if self._result.get("digest") == self._work.digest else "different"
        files = self._result.get("continued_at")
        how = "the work was done" if files is None else f"the tool continued after file {files}"
        self._say(f"resumed: {self._seen} messages, and the result; {how}")

    async def _watch(self, call: RunningCall, until: float = math.inf) -> None:
        async for message in call:
            self._viewer.look(message)
            if self._seen >= until:
                break

    @property
    def _seen(self) -> int:
        return self._viewer.seen.total()

    def figures(self) -> Figures:
        """The figures of the call, once it has ended."""
        seen = self._viewer.seen
        sent = self._result.get("messages", self._work.messages)
        if self._end == "interrupted":
            # The journal has the messages from the first to the last, whichever that was.
            sent = sum(max(n for kind, n in seen if kind == each) for each in {k for k, _ in seen})
        return Figures(
            transport=self._transport,
            restart=self._restart,
            sent=sent,
            delivered=len(seen),
            lost=sent - len(seen),
            seen_twice=seen.total() - len(seen),
            cuts=len(CUTS),
            kills=1,
            end=self._end,
        )

    def _say(self, what: str) -> None:
        self._out.print(f"  {_title(self._transport, self._restart):16} {what}")


def _title(transport: str, restart: bool) -> str:
    return transport if restart else f"{transport}, no restart"


def _print_table(figures: list[Figures]) -> None:
    columns = ("call", "sent", "received", "lost", "twice", "cuts", "kills", "end")
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    ends = {
        "equal": "result",
        "different": "WRONG RESULT",
        "interrupted": "interrupted",
        "failed": "FAILED",
    }
    for one in figures:
        numbers = (one.sent, one.delivered, one.lost, one.seen_twice, one.cuts, one.kills)
        table.add_row(_title(one.transport, one.restart), *map(str, numbers), ends[one.end])
    Console().print(table)
