"""A server of stdio behind `mcp-streams wrap` and behind other proxies, beside the bare server.

Short calls to a child that costs nothing, and to one made with the official SDK; and a stream of
messages while the child sends. Each proxy does all of a client's work between two sockets or pipes,
so one that loses, reorders or hangs has these words in place of a figure.
"""

import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import trio

from benchmarks import calls as driving
from benchmarks.calls import ECHO, HttpDriver, PipeDriver, Pipes, Took, WebSocketDriver
from benchmarks.harness import Batch, Role, Subject, unmeasured
from benchmarks.harness import Plan as WholePlan
from benchmarks.numbered import Lost, check_messages
from benchmarks.peers import Missing
from benchmarks.peers.children import running
from benchmarks.peers.echo import ECHOES
from benchmarks.peers.proxies import GATEWAYS, MCP_REMOTE, Proxy, mcp_remote
from benchmarks.servers import Served, end_owner, listening
from benchmarks.suites.calls import COLUMNS, HTTP, P50, P99, RATE, STDIO, WEBSOCKET, owner
from benchmarks.suites.live import followed
from streams.messages import request

# The children: by hand, so that the proxies are measured; and of the official SDK, which is what
# users wrap.
FAST, SDK = "child by hand", "Python SDK's child"
BARE: Final = "bare, stdio"
WRAPS: Final = {each: f"wrap, {each}" for each in (STDIO, WEBSOCKET, HTTP)}
MESSAGES: Final = "messages/s"
COLUMNS_SHOWN: Final = (RATE, P50, P99, MESSAGES)

SLOWNESS: Final = 20  # peers get so many times fewer messages, so that they do not take minutes
_ID: Final = 1  # of the call whose messages are followed
_FAST_CHILD: Final = (sys.executable, "-m", "benchmarks.wrapped_app")


class Amount(msgspec.Struct, frozen=True):
    """The amounts of the suite."""

    plan: driving.Plan = driving.Plan(clients=(1, 32))
    messages: int = 100_000
    size: int = 200


QUICK: Final = Amount(
    msgspec.structs.replace(driving.QUICK, clients=(1, 4)), messages=2_000, size=200
)

Calls = Callable[[int], Awaitable[Took]]
Follow = Callable[[int, int], Awaitable[float]]  # so many messages of a size: how many a second


class Way(NamedTuple):
    """A way to reach a child: short calls, and a stream of messages."""

    calls: Calls
    follow: Follow
    role: Role
    version: str = ""


def line(child: str, way: str, in_flight: int) -> str:
    """The name of a line of short calls."""
    return f"{child}, {way}, {in_flight} at once"


def row(child: str, way: str, in_flight: int, column: str) -> str:
    """The name of a row of short calls."""
    return f"{line(child, way, in_flight)}: {column}"


def live(way: str) -> str:
    """The name of the row of a stream."""
    return f"{way}, live: {MESSAGES}"


@asynccontextmanager
async def opened(plan: WholePlan, folder: Path) -> AsyncIterator[Sequence[Subject]]:
    """All wrapped servers, and clients of theirs that have initialized."""
    amount = QUICK if plan.is_quick else Amount()
    async with AsyncExitStack() as stack:
        ways = _Ways(stack, amount, folder)
        subjects: list[Subject] = []
        for child, command in ((FAST, _FAST_CHILD), (SDK, _sdk_child())):
            if isinstance(command, Subject):
                subjects.append(command)
                continue
            found = await ways.to(command)
            if plan.has_peers and child == FAST:
                found |= await ways.peers(command)
            subjects += _rows(child, found, amount)
        yield subjects


def _sdk_child() -> Sequence[str] | Subject:
    try:
        return ECHOES["Python SDK, stdio"]().command
    except Missing as error:
        return _absent(f"{SDK}, {BARE}", str(error))


def _absent(name: str, reason: str) -> Subject:
    return Subject(f"{name}: {RATE}", 0, unmeasured, role="peer", missing=reason)


def _rows(child: str, ways: dict[str, Way | Missing], amount: Amount) -> list[Subject]:
    subjects = []
    for in_flight in amount.plan.clients:
        for name, way in ways.items():
            if isinstance(way, Missing):
                if in_flight == amount.plan.clients[0]:
                    subjects.append(_absent(line(child, name, in_flight), str(way)))
                continue
            batch = Batch(partial(way.calls, in_flight))
            for column in (RATE, P50, P99):
                unit, read = COLUMNS[column]
                measure = batch.figure(read)
                each = row(child, name, in_flight, column)
                subjects.append(Subject(each, 0, measure, way.role, unit, version=way.version))
    if child == FAST:
        for name, way in ways.items():
            if isinstance(way, Way):
                count = amount.messages // (SLOWNESS if way.role == "peer" else 1)
                run = partial(way.follow, count, amount.size)
                subjects.append(Subject(live(name), 0, run, way.role, version=way.version))
    return subjects


class _Ways:
    """Starts servers, proxies and clients, which end with `stack`."""

    def __init__(self, stack: AsyncExitStack, amount: Amount, folder: Path) -> None:
        self._stack = stack
        self._amount = amount
        self._folder = folder
        self._journals = 0
        self._url = ""  # of ours over HTTP

    async def to(self, child: Sequence[str]) -> dict[str, Way | Missing]:
        """The bare child, and ours in front of it."""
        found: dict[str, Way | Missing] = {BARE: await self._spawned(child, "bare")}
        journal = self._journal()
        relay = [*_wrap(journal), "--", *child]
        self._stack.push_async_callback(end_owner, journal)
        found[WRAPS[STDIO]] = await self._spawned(relay, "ours", partial(owner, journal))
        served = await self._wrapped("--ws", child)
        make = partial(WebSocketDriver, served.url, [served.pid])
        found[WRAPS[WEBSOCKET]] = await self._way(make, partial(followed, served, 1), "ours")
        served = await self._wrapped("--http", child)
        self._url = f"{served.url}/mcp"
        found[WRAPS[HTTP]] = await self._http(served.url, [served.pid], "ours")
        return found

    async def peers(self, child: Sequence[str]) -> dict[str, Way | Missing]:
        """Other proxies in front of it."""
        found: dict[str, Way | Missing] = {}
        for name, find in GATEWAYS.items():
            found[name] = await self._peer(partial(find, child))
        found[MCP_REMOTE] = await self._peer(partial(mcp_remote, self._url))
        return found

    async def _peer(self, find: Callable[[], Proxy]) -> Way | Missing:
        try:
            proxy = find()
            if not proxy.port:
                return await self._spawned(proxy.command, "peer", version=proxy.version)
            await self._running(proxy)
            url = f"http://127.0.0.1:{proxy.port}"
            return await self._http(url, [], "peer", proxy.version)
        except Missing as error:
            return error
        except (Lost, OSError) as error:  # it hangs or fails at `initialize`
            return Missing(f"it does not initialize: {error!r}")

    async def _running(self, proxy: Proxy) -> None:
        """Start a proxy that listens. Raises `Missing`."""
        context = ExitStack()

        async def close() -> None:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(context.close)

        self._stack.push_async_callback(close)
        start = partial(context.enter_context, running(proxy.command, proxy.port))
        await trio.to_thread.run_sync(start)

    def _journal(self) -> Path:
        self._journals += 1
        return self._folder / f"wrapped-{self._journals}.db"

    async def _wrapped(self, option: str, child: Sequence[str]) -> Served:
        command = [*_wrap(self._journal()), option, "127.0.0.1:0", "--", *child]
        return await self._stack.enter_async_context(listening(command))

    async def _spawned(
        self,
        command: Sequence[str],
        role: Role,
        more_pids: Callable[[], Sequence[int]] = tuple,
        version: str = "",
    ) -> Way:
        make = partial(PipeDriver, command, more_pids)
        return await self._way(make, _in_thread(partial(_over_pipes, command)), role, version)

    async def _http(self, url: str, pids: Sequence[int], role: Role, version: str = "") -> Way:
        make = partial(HttpDriver, url, pids, max(self._amount.plan.clients))
        return await self._way(make, _in_thread(partial(_over_http, url)), role, version)

    async def _way(
        self, make: Callable[[], driving.Driver], follow: Follow, role: Role, version: str = ""
    ) -> Way:
        driver = await trio.to_thread.run_sync(make)

        async def close() -> None:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(driver.close)

        self._stack.push_async_callback(close)

        async def calls(in_flight: int) -> Took:
            plan = self._amount.plan
            return await trio.to_thread.run_sync(driver.calls, in_flight, ECHO, plan)

        return Way(calls, follow, role, version)


def _wrap(journal: Path) -> list[str]:
    command = [sys.executable, "-m", "streams.cli", "wrap", "--journal", str(journal)]
    return [*command, "--children-max", "64"]


def _in_thread(follow: Callable[[int, int], float]) -> Follow:
    async def run(count: int, size: int) -> float:
        return await trio.to_thread.run_sync(follow, count, size)

    return run


# A stream of messages


def _filling(count: int, size: int) -> bytes:
    params = {"name": "fill", "arguments": {"count": count, "size": size}}
    return request(_ID, "tools/call", params)


def _over_pipes(command: Sequence[str], count: int, size: int) -> float:
    """Messages a second, from the call to its result. Raises `Lost` and `TimeoutError`."""
    with closing(Pipes(command)) as link:
        driving.introduce(link)
        began_at = time.perf_counter()
        link.send(_filling(count, size))
        came: list[bytes] = []
        while not came or not _is_response(came[-1]):
            came += link.receive()
        took_s = time.perf_counter() - began_at
    return _checked(came, count) / took_s


def _over_http(url: str, count: int, size: int) -> float:
    """Messages a second in the events of a response. Raises `Lost` and `TimeoutError`."""
    driver = HttpDriver(url, [], 1)
    began_at = time.perf_counter()
    came = driver.followed(_filling(count, size))
    took_s = time.perf_counter() - began_at
    return _checked(came, count) / took_s


def _is_response(line: bytes) -> bool:
    return b'"result"' in line or b'"error"' in line


def _checked(lines: Sequence[bytes], count: int) -> int:
    """The number of messages. Raises `Lost` unless all have come, in order, before the result."""
    answer = msgspec.json.decode(lines[-1]) if lines else {}
    content = answer.get("result", {}).get("content", [{}])
    if answer.get("id") != _ID or content[0].get("text") != str(count):
        raise Lost(f"the result was expected: {lines[-1:]!r}"[:300])
    return check_messages((each for each in lines[:-1] if driving.is_log(each)), 0, count)
