"""The action of `bench`: measures any server.

It connects and pings. If a tool is named, it calls the tool and follows the call. Then it calls the
tool again, cuts the connection behind the first message, and resumes the call when its work is
done, if the server speaks a dialect for that.
"""

import statistics
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, Final, NamedTuple

import msgspec
import trio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from streams.cli.actions.call import CLIENT_NAME
from streams.cli.actions.output import as_json_text, harmless, say
from streams.cli.base import DONE, FAILED, USAGE, complain
from streams.client.call import RunningCall
from streams.client.client import Client
from streams.errors import CallFailed, CallLost, StreamGone
from streams.exchange import ClientChannel, Dialer
from streams.protocol.ticket import Ticket

POLL_EVERY_S: Final = 0.05
TOOLS_SHOWN_MAX: Final = 20
MS, RATE, COUNT = "ms", "messages/s", "messages"


class Wanted(msgspec.Struct, frozen=True):
    """The measurements: in each of `rounds` a connection, `pings`, and the tool if one is named.

    `timeout_s` limits one round. One more round comes first and does not count.
    """

    tool: str | None
    arguments: dict[str, Any]
    rounds: int
    pings: int
    timeout_s: float


class Figure(msgspec.Struct, frozen=True):
    """One measurement: its value in every round, and their median, lowest and highest."""

    name: str
    unit: str
    median: float
    lowest: float
    highest: float
    figures: Sequence[float]


class Report(msgspec.Struct, frozen=True, rename="camel"):
    """A server and its figures. `not_resumed` says why the tool's call was not resumed."""

    server: dict[str, Any]
    protocol_version: str
    figures: Sequence[Figure]
    not_resumed: str | None = None


class CannotBench(Exception):
    """The server cannot be measured; `code` is the exit code."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(why)
        self.code = code


class _CannotResume(Exception):
    """The call cannot be resumed; the message says why."""


async def bench(dialer: Dialer, wanted: Wanted, *, as_json: bool) -> int:
    """`mcp-streams bench`. Raises `ClientError`."""
    try:
        report, tools = await measure(dialer, wanted)
    except CannotBench as error:
        return complain(str(error), error.code)
    if as_json:
        print(as_json_text(report))
    else:
        _print(report)
    if wanted.tool is None:
        say(f"Name a tool to measure its messages, too. {_named(tools)}")
    elif report.not_resumed is not None:
        say(f"Not resumed: {report.not_resumed}")
    return DONE


async def measure(dialer: Dialer, wanted: Wanted) -> tuple[Report, Sequence[str]]:
    """Measure; return the report and the tools' names. Raises `CannotBench`, `ClientError`."""
    with _at_most(wanted.timeout_s):
        async with Client(dialer, name=CLIENT_NAME) as client:
            server, revision = client.server_info, client.protocol_version
            tools = await _tools(client)
    if wanted.tool is not None and tools and wanted.tool not in tools:
        raise CannotBench(f"There is no tool {wanted.tool}. {_named(tools)}", USAGE)
    rounds = _Rounds(dialer, wanted)
    for number in range(wanted.rounds + 1):
        with _at_most(wanted.timeout_s):
            await rounds.do(is_kept=number > 0)
    return Report(server, revision, rounds.found(), rounds.not_resumed), tools


@contextmanager
def _at_most(timeout_s: float) -> Iterator[None]:
    with trio.move_on_after(timeout_s) as waiting:
        yield
    if waiting.cancelled_caught:
        raise CannotBench(f"A round takes more than {timeout_s:g} seconds: see --timeout.", FAILED)


async def _tools(client: Client) -> list[str]:
    try:
        return [tool.name for tool in await client.list_tools()]
    except CallFailed:
        return []  # it has no tools, or does not list them


def _named(tools: Sequence[str]) -> str:
    if not tools:
        return "The server lists none."
    more = len(tools) - TOOLS_SHOWN_MAX
    shown = ", ".join(tools[:TOOLS_SHOWN_MAX])
    return f"There are: {shown}{f' and {more} more' if more > 0 else ''}."


# Measuring


class _Rounds:
    """All rounds of a run, and their figures."""

    def __init__(self, dialer: Dialer, wanted: Wanted) -> None:
        self.not_resumed: str | None = None
        self._line = _Line(dialer)
        self._wanted = wanted
        self._kept: dict[tuple[str, str], list[float]] = {}
        self._is_kept = False

    def found(self) -> list[Figure]:
        """All figures, in the order in which they were measured."""
        return [
            Figure(name, unit, statistics.median(each), min(each), max(each), each)
            for (name, unit), each in self._kept.items()
        ]

    def _keep(self, name: str, unit: str, figure: float) -> None:
        if self._is_kept:
            self._kept.setdefault((name, unit), []).append(figure)

    async def do(self, *, is_kept: bool) -> None:
        self._is_kept = is_kept
        began_at = trio.current_time()
        async with Client(self._line, name=CLIENT_NAME) as client:
            self._keep("connect", MS, self._line.connecting_s * 1_000)
            took_s = trio.current_time() - began_at - self._line.connecting_s
            self._keep("initialize", MS, took_s * 1_000)
            await self._ping(client)
            if self._wanted.tool is not None:
                await self._follow(client, self._wanted.tool)
        if self._wanted.tool is not None and self.not_resumed is None:
            try:
                await self._resume(self._wanted.tool)
            except _CannotResume as error:
                self.not_resumed = str(error)

    async def _ping(self, client: Client) -> None:
        took_ms = []
        for _ in range(self._wanted.pings):
            began_at = trio.current_time()
            await client.ping()
            took_ms.append((trio.current_time() - began_at) * 1_000)
        took_ms.sort()
        for percent in (50, 99):
            place = min(len(took_ms) * percent // 100, len(took_ms) - 1)
            self._keep(f"ping, {percent} of 100 within", MS, took_ms[place])

    async def _follow(self, client: Client, tool: str) -> None:
        """Measure from the call to its result, at the tool's own pace."""
        async with client.call(tool, self._wanted.arguments) as call:
            came = await _to_the_end(call)
        first_s = came.first_s if came.messages else came.took_s
        self._keep("call to first answer", MS, first_s * 1_000)
        self._keep("call to result", MS, came.took_s * 1_000)
        self._keep("live", COUNT, came.messages)
        if came.messages:
            self._keep("live", RATE, came.messages / came.took_s)

    async def _resume(self, tool: str) -> None:
        """Measure from the resume to the result, with all messages sent before."""
        try:
            ticket = await self._cut_off(tool)
            async with Client(self._line, name=CLIENT_NAME) as client:
                await _until_done(client, ticket)
                async with client.resume(ticket) as call:
                    came = await _to_the_end(call)
        except (StreamGone, CallLost, CallFailed) as error:
            raise _CannotResume(str(error)) from None
        self._keep("resumed", COUNT, came.messages)
        if came.messages:
            self._keep("resumed", RATE, came.messages / came.took_s)

    async def _cut_off(self, tool: str) -> Ticket:
        """Call, and cut the connection behind the first message."""
        async with (
            Client(self._line, name=CLIENT_NAME) as client,
            client.call(tool, self._wanted.arguments) as call,
        ):
            async for _ in call:
                ticket = call.ticket
                if ticket is None:
                    raise _CannotResume("the server announces no ticket for a call.")
                await self._line.cut()
                return ticket
        raise _CannotResume("the tool sends no message behind which to cut.")


class _Line:
    """A dialer that measures how long connecting takes, and can cut its connection."""

    def __init__(self, dialer: Dialer) -> None:
        self.connecting_s = 0.0
        self._dialer = dialer
        self._channel: ClientChannel | None = None

    def __call__(self) -> AbstractAsyncContextManager[ClientChannel]:
        return self._connected()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[ClientChannel]:
        began_at = trio.current_time()
        async with self._dialer() as channel:
            self.connecting_s = trio.current_time() - began_at
            self._channel = channel
            yield channel

    async def cut(self) -> None:
        """Close the last connection, whatever it carries."""
        if self._channel is not None:
            await self._channel.aclose()


class _Came(NamedTuple):
    """The messages of a call, and the times of the first one and of the result."""

    messages: int
    first_s: float
    took_s: float


async def _to_the_end(call: RunningCall) -> _Came:
    messages, first_s, began_at = 0, 0.0, trio.current_time()
    async for _ in call:
        if not messages:
            first_s = trio.current_time() - began_at
        messages += 1
    result = await call.result()
    took_s = trio.current_time() - began_at
    if isinstance(result, dict) and result.get("isError"):
        raise CannotBench(f"The tool failed: {as_json_text(result.get('content'))}", FAILED)
    return _Came(messages, first_s, took_s)


async def _until_done(client: Client, ticket: Ticket) -> None:
    """Wait until the call has ended, so that a resume replays all of it."""
    while (await client.poll(ticket)).status == "live":
        await trio.sleep(POLL_EVERY_S)


# Printing


def _print(report: Report) -> None:
    name = report.server.get("name", "")
    title = Text(harmless(f"{name}, MCP {report.protocol_version}"), justify="left")
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for heading in ("median", "lowest", "highest"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for figure in report.figures:
        each = (figure.median, figure.lowest, figure.highest)
        table.add_row(figure.name, *map(_short, each), figure.unit)
    Console(highlight=False, markup=False, emoji=False).print(table)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
