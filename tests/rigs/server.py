"""A server in this process, and minimal clients over the memory transport.

A `Talker` writes messages and reads answers one by one; it does nothing by itself.
"""

import copy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
import pytest
import trio

from streams import Call, Server, StreamsError
from streams.backends import PatienceSettings
from streams.engine.events import Events
from streams.engine.hooks import Hooks
from streams.exchange import Channel
from streams.journal.contract import Journal
from streams.journal.memory import MemoryJournal
from streams.keys import Keyring
from streams.server.running import RunningServer
from transports.memory import Cable

Json = dict[str, Any]

STREAMS: Final[Json] = {"streams": {}}
EXTENDED: Final[Json] = {"experimental": {"mcp-streams/v1": {}}}  # Streams, by the extension
REQUESTS: Final[Json] = {"resumableRequests": {}}
POSITIONS: Final[Json] = {"experimental": {"mcp-streams/v1": {"positions": True}}}
PLAIN: Final[Json] = {}

RESUME_REQUEST: Final = "requests/resume"
STATUS_OF_REQUEST: Final = "requests/getStatus"

# Where ended streams are kept. Clients must not notice a difference.
RESIDENT_MAX: Final = [pytest.param(5_000, id="in memory"), pytest.param(0, id="evicted")]

PATIENCE_S: Final = 5 * 86_400  # of a mock clock mostly; a bound for a test that hangs


class Talker:
    """One connection of a client."""

    patience_s: float = PATIENCE_S  # for the next message

    def __init__(self, channel: Channel, cable: Cable) -> None:
        self.channel = channel
        self.cable = cable
        self.seen: list[Json] = []  # everything that was read
        self._waiting: list[Json] = []

    async def say(self, *said: Json) -> None:
        """Write messages in one piece."""
        lines = [msgspec.json.encode({"jsonrpc": "2.0"} | message) + b"\n" for message in said]
        await self.channel.send(b"".join(lines))

    async def ask(self, id: int | str, method: str, **params: Any) -> None:
        """Send a request, and do not wait for the answer."""
        await self.say({"id": id, "method": method, "params": params})

    async def tell(self, method: str, **params: Any) -> None:
        """Send a notification."""
        await self.say({"method": method, "params": params})

    async def call(self, id: int | str, tool: str, *, token: Any = None, **arguments: Any) -> None:
        """Send a `tools/call`, and do not wait for the answer."""
        meta = {} if token is None else {"_meta": {"progressToken": token}}
        await self.ask(id, "tools/call", name=tool, arguments=arguments, **meta)

    async def begin(self, id: int | str, tool: str, **arguments: Any) -> Json:
        """Call a tool; returns the stream as it was announced."""
        await self.call(id, tool, **arguments)
        return await self.announced()

    async def announced(self) -> Json:
        """The stream that is announced next."""
        created = await self.find(lambda m: m.get("method") == "notifications/stream/create")
        stream: Json = created["params"]["stream"]
        return stream

    async def question(self) -> Json:
        """The next question of a tool to the client."""
        return await self.find(lambda m: m.get("method") == "elicitation/create")

    async def policy(self) -> Json:
        """The next resume policy, in the words of `REQUESTS`."""
        told = await self.find(lambda m: m.get("method") == "notifications/requests/resumePolicy")
        policy: Json = told["params"]
        return policy

    async def page(
        self, id: int | str, tool: str, token: str | None = None, **arguments: Any
    ) -> Json:
        """A page of a tool, the first one or that of a page token: the result, or the error."""
        turn = {} if token is None else {"resumeToken": token}
        return await self.request(id, "tools/call", name=tool, arguments=arguments, **turn)

    async def read(self) -> Json:
        """The next message."""
        with trio.fail_after(self.patience_s):
            while not self._waiting:
                for line in await self.channel.receive():
                    assert isinstance(line, bytes)
                    self._waiting.append(msgspec.json.decode(line))
        message = self._waiting.pop(0)
        self.seen.append(message)
        return message

    async def find(self, is_it: Callable[[Json], object]) -> Json:
        """Read until a message fits; the messages before it are in `seen`."""
        while not is_it(message := await self.read()):
            pass
        return message

    async def answer(self, id: int | str) -> Json:
        """Read until the response under this id."""
        return await self.find(lambda m: m.get("id") == id and "method" not in m)

    async def request(self, id: int | str, method: str, **params: Any) -> Json:
        """Send a request and read until its answer: its result, or its error's data."""
        await self.ask(id, method, **params)
        answer = await self.answer(id)
        result: Json = answer["result"] if "result" in answer else answer["error"]
        return result

    async def resume(self, id: int | str, stream: Json | str, **more: Any) -> list[Json]:
        """Resume a stream; returns all messages up to the reply, which is last."""
        start = len(self.seen)
        await self.ask(id, "stream/resume", **named(stream), **more)
        await self.answer(id)
        return self.seen[start:]

    async def poll(self, id: int | str, stream: Json | str, **more: Any) -> Json:
        """The status of a stream, or the error."""
        return await self.request(id, "stream/poll", **named(stream), **more)

    async def end(self) -> list[Json]:
        """Read until the other end closes; returns all messages."""
        start = len(self.seen)
        try:
            while True:
                await self.read()
        except trio.EndOfChannel:
            return self.seen[start:]

    async def leave(self) -> None:
        """Close the connection, and wait until the server must have noticed."""
        await self.channel.aclose()
        await trio.sleep(1)


class House:
    """A running server, and all its clients."""

    def __init__(self, running: RunningServer, journal: Journal, nursery: trio.Nursery) -> None:
        self.running = running
        self.journal = journal
        self.nursery = nursery  # it is cancelled when the test leaves the house

    def serve(self, channel: Channel) -> None:
        """Serve a channel until the test leaves the house."""
        self.nursery.start_soon(self.running.serve, channel)

    def cable(self, principal: str = "alice", *, capacity: int = 1 << 20) -> Cable:
        cable = Cable(principal=principal, capacity=capacity)
        self.serve(cable.far)
        return cable

    async def dial(
        self, capabilities: Json = STREAMS, principal: str = "alice", *, capacity: int = 1 << 20
    ) -> Talker:
        """A connection that is initialized."""
        cable = Cable(principal=principal, capacity=capacity)
        return await self.connect(cable, cable.far, capabilities)

    async def connect(self, cable: Cable, far: Channel, capabilities: Json = STREAMS) -> Talker:
        """An initialized connection whose server's end is `far`, a channel of the test's own."""
        self.serve(far)
        return await greeted(Talker(cable.near, cable), capabilities)

    def as_after_a_crash(self) -> MemoryJournal:
        """The journal's contents as a server that starts after a crash would find them."""
        assert isinstance(self.journal, MemoryJournal)
        return copy.deepcopy(self.journal)


async def greeted(talker: Talker, capabilities: Json = STREAMS) -> Talker:
    revision = "2025-11-25"
    hello = {"protocolVersion": revision, "capabilities": capabilities}
    info = {"clientInfo": {"name": "talker", "version": "0"}}
    answer = await talker.request("hello", "initialize", **hello, **info)
    assert answer["protocolVersion"] == revision
    await talker.tell("notifications/initialized")
    talker.seen.clear()
    return talker


async def requested(
    house: House, capabilities: Json = REQUESTS, id: int | str = 1
) -> tuple[Talker, Json]:
    """A client with a running call of `step`, and the resume token."""
    talker = await house.dial(capabilities)
    await talker.call(id, "step")
    policy = await talker.policy()
    talker.seen.clear()
    return talker, with_token(policy)


@asynccontextmanager
async def open_house(
    server: Server,
    *,
    journal: Journal | None = None,
    keyring: Keyring | None = None,
    patience: PatienceSettings | None = None,
    events: Events | None = None,
    hooks: Hooks | None = None,
) -> AsyncIterator[House]:
    journal = MemoryJournal() if journal is None else journal
    keyring = keyring or Keyring.load(None)
    async with (
        server.open(journal, keyring, patience=patience, events=events, hooks=hooks) as running,
        trio.open_nursery() as nursery,
    ):
        yield House(running, journal, nursery)
        nursery.cancel_scope.cancel()


async def run(server: Server, tool: str, *, token: Any = None, **arguments: Any) -> list[Json]:
    """Call a tool as a plain client; returns all messages, the response last."""
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, tool, token=token, **arguments)
        await talker.answer(1)
        return talker.seen


async def flood(call: Call) -> StreamsError:
    """Log for ever, shielded from cancellation; returns the error that ends it."""
    with trio.CancelScope(shield=True):
        while True:
            try:
                await call.log("info", "more")
            except StreamsError as error:
                return error


class Steps:
    """Tools that follow the test's orders."""

    def __init__(self, server: Server, **settings: Any) -> None:
        self._send, self._receive = trio.open_memory_channel[Callable[[Call], Any]](10_000)
        self.is_over = trio.Event()
        self.was_cancelled = False
        self.answers: list[Any] = []
        self.call: Call
        plain = {"name": "step", "structured_output": False}  # the text comes once
        server.tool(**(plain | settings))(self.step)

    async def step(self, call: Call) -> str:
        """Follow the orders of the test."""
        self.call = call
        try:
            async for do in self._receive:
                if (result := await do(call)) is not None:
                    return str(result)
        except trio.Cancelled:
            self.was_cancelled = True
            raise
        finally:
            self.is_over.set()
        raise AssertionError("nobody closes the channel")

    def do(self, action: Callable[[Call], Any]) -> None:
        self._send.send_nowait(action)

    def log(self, *texts: str) -> None:
        """Have the tool log these."""
        for text in texts:

            async def log(call: Call, text: str = text) -> None:
                await call.log("info", text)

            self.do(log)

    def ask(self, method: str = "elicitation/create") -> None:
        """Have the tool ask the client, and keep the answer."""

        async def ask(call: Call) -> None:
            self.answers.append(await call.request(method, {"message": "?"}))

        self.do(ask)

    def finish(self, text: str = "done") -> None:
        """Have the tool return this."""

        async def finish(_: Call) -> str:
            return text

        self.do(finish)

    def fail(self) -> None:
        """Have the tool raise."""

        async def fail(_: Call) -> None:
            raise ValueError("as it was told")

        self.do(fail)


def named(stream: Json | str) -> Json:
    """The params that name a stream."""
    return {"streamId": stream if isinstance(stream, str) else stream["streamId"]}


def with_token(stream: Json) -> Json:
    return {"resumeToken": stream["resumeToken"]}


def said(messages: list[Json]) -> list[Any]:
    """The texts of the log messages among these."""
    return [m["params"]["data"] for m in messages if m.get("method") == "notifications/message"]


def methods(messages: list[Json]) -> list[str]:
    """The methods of these messages; `result` or `error` for responses."""
    return [m.get("method") or ("result" if "result" in m else "error") for m in messages]


def text_of(answer: Json) -> str:
    """The text of a tool's result."""
    return page_text(answer["result"])


def page_text(result: Json) -> str:
    """The text of a result or a page; "" where it is empty."""
    return "".join(block["text"] for block in result["content"])


def next_of(result: Json) -> str:
    """The page token for the next page."""
    token = str(result["nextResumeToken"])
    assert result["_meta"]["mcp-streams/nextResumeToken"] == token
    return token


def is_last(result: Json) -> bool:
    """Whether this is the last page: it has no page token."""
    assert ("nextResumeToken" in result) == ("_meta" in result)
    return "nextResumeToken" not in result


def reason(error: Json) -> str:
    """The `data.reason` of an error."""
    return str(error["data"]["reason"])
