"""The walks through the code in docs/inside/design.md, followed in a server at work."""

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from trio.testing import wait_all_tasks_blocked
from wsproto.connection import Connection
from wsproto.events import Message, TextMessage

from streams import Call, HttpEndpoint, Keyring, MemoryJournal, Server, open_sqlite_journal
from tests.rigs import ROOT
from tests.rigs.bare_http import asking
from tests.rigs.bare_websocket import open_bare_websocket
from tests.rigs.server import POSITIONS, STREAMS, Json, open_house
from tests.rigs.walks import Guide, Walk
from transports import http, websocket

PAGE: Final = ROOT / "docs/inside/design.md"
SETTLED_S: Final = 0.1  # nothing is under way any more
STEP: Final = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", re.MULTILINE)


def told(title: str) -> list[str]:
    """The steps that the page lists under a heading."""
    section = PAGE.read_text().partition(f"### {title}\n")[2].partition("\n#")[0]
    return [f"{file} {function}" for file, function in STEP.findall(section)]


class Tool:
    """A tool that sends progress whenever the test says so."""

    def __init__(self) -> None:
        self.server = Server("walked")
        self.server.tool(name="work")(self._work)
        self.server.tool(name="save", restart=True)(self._save)
        self._go, self._gone = trio.open_memory_channel[None](100)

    def go(self) -> None:
        """Send progress once more."""
        self._go.send_nowait(None)

    async def _work(self, call: Call) -> str:
        for done in range(1, 4):
            await self._gone.receive()
            await call.progress(done)
        return "done"

    async def _save(self, call: Call) -> str:
        for done in range((call.restored or 0) + 1, 4):
            await self._gone.receive()
            await call.progress(done)
            await call.checkpoint(done)
        return "saved"


class Socket:
    """A WebSocket to the server, with a session."""

    def __init__(self, stream: trio.SocketStream, protocol: Connection) -> None:
        self._stream = stream
        self._protocol = protocol
        self._came: list[Json] = []

    @classmethod
    async def open(cls, port: int, capabilities: Json) -> "Socket":
        socket = cls(*await open_bare_websocket(port, "mcp"))
        await socket.say(id="hello", method="initialize", params=hello(capabilities))
        await socket.read(lambda message: message.get("id") == "hello")
        await socket.say(method="notifications/initialized")
        return socket

    async def say(self, **message: Any) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message})
        await self._stream.send_all(self._protocol.send(TextMessage(data=data)))

    async def read(self, is_it: Callable[[Json], object]) -> Json:
        """The first message from here on that is wanted."""
        while True:
            while self._came:
                if is_it(message := self._came.pop(0)):
                    return message
            self._protocol.receive_data(bytes(await self._stream.receive_some()))
            events = self._protocol.events()
            self._came += [json.loads(each.data) for each in events if isinstance(each, Message)]

    async def close(self) -> None:
        await self._stream.aclose()


def hello(capabilities: Json) -> Json:
    info = {"name": "walker", "version": "1"}
    return {"protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": info}


def call(id: int) -> Json:
    params = {"name": "work", "arguments": {}, "_meta": {"progressToken": "p"}}
    return {"id": id, "method": "tools/call", "params": params}


def is_progress(message: Json) -> bool:
    return message.get("method") == "notifications/progress"


@asynccontextmanager
async def listening(tool: Tool, guide: Guide, folder: Path) -> AsyncIterator[tuple[int, int]]:
    """The ports of a server over WebSocket and HTTP, with a journal in a file."""
    async with trio.open_nursery() as nursery:
        with guide.ready():
            async with (
                open_sqlite_journal(folder / "walked.db") as journal,
                open_house(tool.server, journal=journal) as house,
            ):
                handler = house.running.serve
                over_ws = await nursery.start(partial(websocket.serve, handler, "127.0.0.1", 0))
                endpoint = HttpEndpoint(house.running, "/mcp")
                over_http = await nursery.start(partial(http.serve, endpoint, "127.0.0.1", 0))
                yield over_ws, over_http
                nursery.cancel_scope.cancel()


async def message_out(tool: Tool, guide: Guide, folder: Path) -> Walk:
    async with listening(tool, guide, folder) as (port, _):
        socket = await Socket.open(port, STREAMS)
        await socket.say(**call(1))
        for _ in range(2):  # what is done at the first time only is no part of the walk
            await wait_all_tasks_blocked(SETTLED_S)
            with guide.walk() as walk:
                tool.go()
                await socket.read(is_progress)
                await wait_all_tasks_blocked(SETTLED_S)
        await socket.close()
    return walk


async def resume(tool: Tool, guide: Guide, folder: Path) -> Walk:
    async with listening(tool, guide, folder) as (port, _):
        socket = await Socket.open(port, STREAMS)
        await socket.say(**call(1))
        made = await socket.read(lambda message: "stream" in message.get("params", {}))
        tool.go()
        await socket.read(is_progress)
        await socket.close()
        stream = {key: made["params"]["stream"][key] for key in ("streamId", "resumeToken")}
        back = await Socket.open(port, STREAMS)
        await wait_all_tasks_blocked(SETTLED_S)
        with guide.walk() as walk:
            await back.say(id=2, method="stream/resume", params=stream)
            await back.read(is_progress)
            await wait_all_tasks_blocked(SETTLED_S)
        await back.close()
    return walk


class Post:
    """One HTTP request on a connection of its own."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._came = b""

    @classmethod
    async def send(cls, port: int, *fields: str, message: Json | None = None) -> "Post":
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        start = "GET /mcp HTTP/1.1"
        accept = "Accept: text/event-stream"
        body = b""
        if message is not None:
            start, accept = "POST /mcp HTTP/1.1", "Accept: application/json, text/event-stream"
            body = json.dumps({"jsonrpc": "2.0", **message}).encode()
            fields = (*fields, "Content-Type: application/json", f"Content-Length: {len(body)}")
        host = f"127.0.0.1:{port}"
        await stream.send_all(asking(accept, *fields, start=start, host=host, body=body))
        return cls(stream)

    async def find(self, pattern: bytes) -> str:
        """The first group of `pattern`, once it has come."""
        while (found := re.search(pattern, self._came)) is None:
            data = await self._stream.receive_some()
            assert data, self._came
            self._came += data
        return found[1].decode()

    async def cut(self) -> None:
        await self._stream.aclose()


async def http_cut(tool: Tool, guide: Guide, folder: Path) -> Walk:
    async with listening(tool, guide, folder) as (_, port):
        message = {"id": "hello", "method": "initialize", "params": hello(STREAMS)}
        post = await Post.send(port, message=message)
        session = "Mcp-Session-Id: " + await post.find(rb"(?i)mcp-session-id: (\S+)")
        await post.cut()
        post = await Post.send(port, session, message=call(1))
        tool.go()
        event_id = await post.find(rb"id: (\S+)\ndata: [^\n]*notifications/progress")
        await post.cut()
        tool.go()
        await wait_all_tasks_blocked(SETTLED_S)
        with guide.walk() as walk:
            get = await Post.send(port, session, f"Last-Event-ID: {event_id}")
            await get.find(rb"(notifications/progress)")
            await wait_all_tasks_blocked(SETTLED_S)
        await get.cut()
    return walk


async def restart(tool: Tool, guide: Guide, folder: Path) -> Walk:
    keyring = Keyring.load(None)
    async with open_house(tool.server, journal=MemoryJournal(), keyring=keyring) as house:
        talker = await house.dial(POSITIONS)
        await talker.call(1, "save", token="p")
        tool.go()
        await talker.find(is_progress)
        await wait_all_tasks_blocked(SETTLED_S)
        journal = house.as_after_a_crash()
    with guide.walk() as walk:
        async with open_house(tool.server, journal=journal, keyring=keyring) as house:
            tool.go()
            tool.go()
            await wait_all_tasks_blocked(SETTLED_S)
    return walk


WALKS: Final[dict[str, Callable[[Tool, Guide, Path], Awaitable[Walk]]]] = {
    "A message to a WebSocket": message_out,
    "A resume": resume,
    "A cut over HTTP and `Last-Event-ID`": http_cut,
    "A restart": restart,
}


@pytest.mark.parametrize("title", WALKS)
async def test_a_walk_is_as_the_page_tells(title: str, tmp_path: Path) -> None:
    walk = await WALKS[title](Tool(), Guide(), tmp_path)
    steps = told(title)
    assert steps
    rest = iter(walk.steps)
    missed = [step for step in steps if step not in rest]
    assert not missed, "\n".join(walk.steps)


async def test_a_message_passes_through_few_files(tmp_path: Path) -> None:
    """A reader has to follow each of these crossings."""
    walk = await message_out(Tool(), Guide(), tmp_path)
    assert len(walk.files) <= 20, sorted(walk.files)
    assert walk.crossings <= 70
