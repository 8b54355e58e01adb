"""The action of `demo`: a call that is cut three times and whose server is killed, over each
transport.

The tool reads a folder and reports every file. The connection is cut in the middle three times.
When the work is done and not all of it is delivered, the server is killed with SIGKILL and started
on the same journal. The messages that the client has received are compared with those that were
sent.
"""

import hashlib
import logging
import math
import sys
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

import msgspec
import trio
from rich.console import Console
from rich.table import Table

from streams import logs, messages
from streams.cli.base import DONE, FAILED, USAGE
from streams.cli.selftest.demo_server import digest_of, files_of
from streams.cli.selftest.rigs import APP, ListeningRig, Rig, StdioRig
from streams.client.call import RunningCall
from streams.client.client import Client
from streams.messages import Message
from streams.protocol.ticket import Ticket

# The connection is cut at these parts of all messages. After the last cut, the server is killed.
CUTS: Final = (0.1, 0.3, 0.6)
TIMEOUT_S: Final = 300.0


class Figures(msgspec.Struct):
    """The figures of one transport."""

    transport: str
    sent: int
    delivered: int
    lost: int
    seen_twice: int
    cuts: int
    kills: int
    is_digest_equal: bool

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, nothing seen twice, and the result is right."""
        return self.lost == 0 and self.seen_twice == 0 and self.is_digest_equal


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


def run(folder: Path | None, *, as_json: bool, app: str = APP) -> int:
    """Run the demo over each transport; returns 0 if nothing was lost or seen twice.

    `app` is the server: tests pass a faulty one, to show that the demo finds faults.
    """
    logs.log_to_stderr(logging.ERROR)
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    files = files_of(folder)
    if not files:
        print(f"{folder}: no files to read", file=sys.stderr)
        return USAGE
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{digest_of(path)}  {path.relative_to(folder)}\n".encode())
    folder = folder.resolve()
    figures = trio.run(_run_all, app, folder, 2 * len(files), whole.hexdigest(), as_json)
    if as_json:
        print(msgspec.json.encode(figures).decode())
    else:
        _print_table(figures)
    return DONE if all(one.is_good for one in figures) else FAILED


async def _run_all(
    app: str, folder: Path, expected: int, digest: str, is_quiet: bool
) -> list[Figures]:
    out = Console(stderr=True, quiet=is_quiet, highlight=False)
    out.print(f"{expected // 2} files in {folder}, {expected} messages over each transport")
    figures = []
    with trio.fail_after(TIMEOUT_S), tempfile.TemporaryDirectory() as place:
        async with trio.open_nursery() as nursery:
            rigs: dict[str, Rig] = {
                "stdio": StdioRig(app, Path(place) / "stdio.db"),
                "websocket": ListeningRig("ws", app, Path(place) / "websocket.db", nursery),
                "http": ListeningRig("http", app, Path(place) / "http.db", nursery),
            }
            for name, rig in rigs.items():
                try:
                    await rig.start()
                    figures.append(await _Story(name, rig, out, expected).tell(folder, digest))
                finally:
                    with trio.CancelScope(shield=True):
                        await rig.stop()
            nursery.cancel_scope.cancel()
    return figures


class _Story:
    """One call over one transport, and its failures."""

    def __init__(self, name: str, rig: Rig, out: Console, expected: int) -> None:
        self._name = name
        self._rig = rig
        self._out = out
        self._expected = expected
        self._viewer = Viewer()

    async def tell(self, folder: Path, digest: str) -> Figures:
        async with (
            Client(self._rig.dialer, name="demo") as client,
            client.call("digest", {"folder": str(folder)}) as call,
        ):
            for part in CUTS:
                await self._watch(call, until=int(part * self._expected))
                self._rig.cut()
                self._say(f"cut after {self._seen} messages")
            ticket = call.ticket
        assert ticket is not None
        await self._wait_for_the_work(ticket)
        await self._rig.kill()
        self._say(f"the work is done, {self._seen} messages are delivered: server killed")
        await self._rig.start()
        async with (
            Client(self._rig.dialer, name="demo") as client,
            client.resume(ticket) as call,
        ):
            await self._watch(call)
            result = await call.result()
        self._say(f"resumed: {self._seen} messages are delivered, and the result")
        # A tool that failed has no such content.
        return self._figures(result.get("structuredContent", {}), digest)

    async def _watch(self, call: RunningCall, until: float = math.inf) -> None:
        async for message in call:
            self._viewer.look(message)
            if self._seen >= until:
                break

    async def _wait_for_the_work(self, ticket: Ticket) -> None:
        async with Client(self._rig.dialer, name="demo") as client:
            while (await client.poll(ticket)).status == "live":
                await trio.sleep(0.1)

    @property
    def _seen(self) -> int:
        return self._viewer.seen.total()

    def _figures(self, result: dict[str, Any], digest: str) -> Figures:
        seen = self._viewer.seen
        sent = result.get("messages", self._expected)
        return Figures(
            transport=self._name,
            sent=sent,
            delivered=len(seen),
            lost=sent - len(seen),
            seen_twice=seen.total() - len(seen),
            cuts=len(CUTS),
            kills=1,
            is_digest_equal=result.get("digest") == digest,
        )

    def _say(self, what: str) -> None:
        self._out.print(f"  {self._name:10} {what}")


def _print_table(figures: list[Figures]) -> None:
    table = Table("transport", "sent", "delivered", "lost", "seen twice", "cuts", "kills", "digest")
    for one in figures:
        verdict = "equal" if one.is_digest_equal else "DIFFERENT"
        numbers = (one.sent, one.delivered, one.lost, one.seen_twice, one.cuts, one.kills)
        table.add_row(one.transport, *map(str, numbers), verdict)
    Console().print(table)
