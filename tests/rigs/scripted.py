"""A scripted server of streams for the client's tests: small, in memory, and able to misbehave.

By default it speaks WIRE's protocol to a client with positions. On the test's order it speaks as a
plain MCP server, or as one that knows a proposal and no numbers. It shares no code with the real
server except the JSON-RPC envelope.
"""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio

from streams import messages
from streams.errors import Refusal, refusal
from streams.exchange import Channel
from transports.memory import MemoryServer

Tool = Callable[["Stream"], Awaitable[Any]]
Params = dict[str, Any]

CREATE = "notifications/stream/create"
POLICY = "notifications/requests/resumePolicy"


class Stream:
    """The messages that one call has sent. A tool gets it, sends on it, and returns its result."""

    def __init__(self, server: "Scripted", number: int, request: Params) -> None:
        self.server = server
        self.id = f"stream-{number}"
        self.token = f"token-{number}"
        self.request_id = request["id"]
        self.params: Params = request["params"]
        self.arguments: Params = self.params["arguments"]
        self.progress_token = self.params["_meta"].get("progressToken")
        self.entries: list[bytes] = []
        self.acked = 0
        self.is_ended = False
        self.is_cancelled = False
        self.open_requests: dict[str, int] = {}  # id → seq
        self.answers: dict[str, Any] = {}
        self.connection: Connection | None = None
        self.scope = trio.CancelScope()

    def notify(self, method: str, params: Params) -> None:
        self.send(messages.notification(method, params))

    def say(self, text: str) -> None:
        """Send a log message."""
        self.notify("notifications/message", {"level": "info", "data": text})

    async def ask(self, method: str, params: Params) -> Any:
        """Ask the client, and wait for its answer without a limit."""
        request_id = f"ask-{self.id}-{len(self.entries)}"
        self.open_requests[request_id] = len(self.entries) + 1
        self.send(messages.request(request_id, method, params))
        while request_id not in self.answers:
            await self.server.change()
        return self.answers[request_id]

    def finish(self, line: bytes) -> None:
        self.is_ended = True
        self.send(line)

    def send(self, line: bytes) -> None:
        """Send any line."""
        self.entries.append(line)
        self.server.stir()


class Connection:
    """A client's connection, as long as it is not cut."""

    def __init__(self, server: "Scripted", number: int, channel: Channel) -> None:
        self.server = server
        self.number = number
        self.channel = channel
        self.replies: list[bytes] = []
        self.following: dict[str, tuple[int, Any]] = {}  # stream → (position, id of the resume)
        self.has_positions = False

    def reply(self, line: bytes) -> None:
        self.replies.append(line)
        self.server.stir()

    def attach(self, stream: Stream, after: int, resume_id: Any) -> None:
        other = stream.connection
        if other is not None and stream.id in other.following:
            _, displaced = other.following.pop(stream.id)
            if displaced is not None:
                other.reply(_ended(displaced, "superseded"))
            else:
                other.reply(messages.error(stream.request_id, refusal("superseded")))
        stream.connection = self
        self.following[stream.id] = (after, resume_id)
        self.server.stir()

    async def write_forever(self) -> None:
        try:
            while True:
                changed = self.server.changed
                if lines := self._gather():
                    await self._write(lines)
                else:
                    await changed.wait()
        except trio.BrokenResourceError:
            pass  # cut

    async def _write(self, lines: list[bytes]) -> None:
        may_end = self.server.runs_may_end
        if may_end is None or len(lines) == 1:
            await self.channel.send(b"".join(lines))
            return
        half = len(lines) // 2
        await self.channel.send(b"".join(lines[:half]))
        await may_end.wait()
        await self.channel.send(b"".join(lines[half:]))

    def _gather(self) -> list[bytes]:
        lines, self.replies = self.replies, []
        for stream_id, (start, resume_id) in list(self.following.items()):
            position = start
            stream = self.server.streams[stream_id]
            run = stream.entries[position : position + self.server.run_lines_max]
            if run:
                lines += [self._header(stream, position + 1, len(run)), *run]
                position += len(run)
                self.following[stream_id] = (position, resume_id)
            if stream.is_ended and position == len(stream.entries):
                del self.following[stream_id]
                lines += self._coda(stream, resume_id)
        return lines

    def _header(self, stream: Stream, seq: int, count: int) -> bytes:
        if not (self.server.is_numbering and self.has_positions):
            return b""
        seq += self.number in self.server.skips_on
        params = {"streamId": stream.id, "seq": seq, "count": count}
        return messages.notification("notifications/stream/position", params)

    def _coda(self, stream: Stream, resume_id: Any) -> list[bytes]:
        if not self.server.is_numbering:
            return []
        lines = [messages.notification("notifications/stream/end", {"streamId": stream.id})]
        return lines if resume_id is None else [*lines, _ended(resume_id, "completed")]


def _ended(request_id: Any, why: str) -> bytes:
    return messages.result(request_id, {"_meta": {"mcp-streams/ended": why}})


class Scripted:
    """The server. `received` is every message that came, with the number of its connection."""

    def __init__(
        self,
        *,
        is_numbering: bool = True,
        min_s: float = 0.0,
        announces: tuple[str, ...] | None = None,
        key_memory: str = "",
    ) -> None:
        self.memory = MemoryServer()
        self.is_numbering = is_numbering
        self.announces = ((CREATE,) if is_numbering else ()) if announces is None else announces
        self.min_s = min_s
        self.key_memory = key_memory  # advertised, though keys are ignored
        self.run_lines_max = 1_000
        self.runs_may_end: trio.Event | None = None  # until then, half of a run is sent
        self.skips_on: set[int] = set()  # connections whose numbers have a gap
        self.plain: set[str] = set()  # tools whose calls are only answered: not announced, no seq
        self.tools: dict[str, Tool] = {}
        self.streams: dict[str, Stream] = {}
        self.received: list[tuple[int, Params]] = []
        self.resume_refusals: list[Refusal] = []  # errors for the next resumes
        self.resume_endings: list[str] = []  # sent at once to the next resumes
        self.received_at: list[float] = []
        self.connections: list[Connection] = []
        self.protocol_version = "2025-11-25"
        self.is_deaf = False  # to pings
        self.silent: set[str] = set()  # methods that are not answered
        self.capabilities: Params = {"tools": {}}
        self.results: dict[str, Params | list[Params]] = {}  # of other methods; a list: pages
        self.changed = trio.Event()
        self._numbers = itertools.count(1)
        self._nursery: trio.Nursery

    def stir(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def change(self) -> None:
        await self.changed.wait()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await self.change()

    def got(self, method: str) -> list[Params]:
        """The params of all messages of this method, in order."""
        return [m.get("params", {}) for _, m in self.received if m.get("method") == method]

    def cut(self) -> None:
        """Break the newest connection."""
        self.memory.cables[-1].cut()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Scripted"]:
        async with trio.open_nursery() as self._nursery:
            await self._nursery.start(self.memory.serve, self.serve)
            yield self
            self._nursery.cancel_scope.cancel()

    async def serve(self, channel: Channel) -> None:
        connection = Connection(self, len(self.connections), channel)
        self.connections.append(connection)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.write_forever)
            try:
                while True:
                    for line in await channel.receive():
                        assert isinstance(line, bytes)
                        self._take(connection, msgspec.json.decode(line))
            except trio.EndOfChannel:
                nursery.cancel_scope.cancel()
        connection.following.clear()
        self.stir()

    def _take(self, connection: Connection, message: Params) -> None:
        self.received.append((connection.number, message))
        self.received_at.append(trio.current_time())
        method, params = message.get("method"), message.get("params", {})
        if method is None:
            self._answered(message)
        elif method == "notifications/cancelled":
            self._cancelled(connection, params["requestId"])
        elif method == "notifications/stream/ack":
            stream = self.streams[params["streamId"]]
            assert stream.acked < params["seq"] <= len(stream.entries)
            stream.acked = params["seq"]
        elif "id" in message:
            try:
                self._asked(connection, message, method, params)
            except Refusal as refused:
                connection.reply(messages.error(message["id"], refused))
        self.stir()

    def _answered(self, message: Params) -> None:
        for stream in self.streams.values():
            if stream.open_requests.pop(message["id"], None):
                stream.answers[message["id"]] = message

    def _cancelled(self, connection: Connection, request_id: Any) -> None:
        for stream_id, (_, resume_id) in list(connection.following.items()):
            stream = self.streams[stream_id]
            if request_id == stream.request_id:
                stream.is_cancelled = True
                stream.scope.cancel()
            if request_id in (resume_id, stream.request_id):
                del connection.following[stream_id]

    def _asked(self, connection: Connection, message: Params, method: str, params: Params) -> None:
        match method:
            case _ if method in self.silent:
                pass
            case "initialize":
                wanted = params["capabilities"]["experimental"]["mcp-streams/v1"]
                connection.has_positions = wanted["positions"]
                connection.reply(messages.result(message["id"], self._hello()))
            case "ping" if self.is_deaf:
                pass
            case "ping" | "logging/setLevel":
                connection.reply(messages.result(message["id"], {}))
            case "tools/list":
                connection.reply(messages.result(message["id"], self._page(params)))
            case "tools/call":
                self._call(connection, message)
            case "stream/resume" | "requests/resume":
                takes_over = method == "requests/resume"
                self._resume(connection, message["id"], params, takes_over=takes_over)
            case "requests/getStatus":
                connection.reply(messages.result(message["id"], self._status(params)))
            case "stream/poll":
                connection.reply(messages.result(message["id"], self._standing(params)))
            case "stream/poll/all":
                statuses = [self._standing({"streamId": name}) for name in self.streams]
                page, cursor = _paged(statuses, params)
                connection.reply(messages.result(message["id"], {"statuses": page} | cursor))
            case _ if method in self.results:
                connection.reply(messages.result(message["id"], self._result(method, params)))
            case _:
                raise Refusal(-32601, f"There is no {method} here.")

    def _hello(self) -> Params:
        settings = {"positions": True, "idempotencyKeys": self.key_memory}
        extension = {"experimental": {"mcp-streams/v1": settings}}
        return {
            "protocolVersion": self.protocol_version,
            "capabilities": self.capabilities | (extension if self.is_numbering else {}),
            "serverInfo": {"name": "scripted", "version": "0"},
        }

    def _result(self, method: str, params: Params) -> Params:
        result = self.results[method]
        if isinstance(result, dict):
            return result
        at = int(params.get("cursor", 0))
        return result[at] | ({"nextCursor": str(at + 1)} if at + 1 < len(result) else {})

    def notify(self, method: str, params: Params) -> None:
        """Send a notification that belongs to no call, over the newest connection."""
        self.connections[-1].reply(messages.notification(method, params))

    def _page(self, params: Params) -> Params:
        tools = [{"name": name, "inputSchema": {"type": "object"}} for name in self.tools]
        page, cursor = _paged(tools, params)
        return {"tools": page} | cursor

    def _standing(self, params: Params) -> Params:
        stream = self.streams.get(params["streamId"])
        if stream is None:
            raise refusal("stream_not_found")
        return {
            "streamId": stream.id,
            "status": "completed" if stream.is_ended else "live",
            "pendingMessages": stream.acked < len(stream.entries),
            "hasRequest": bool(stream.open_requests),
            "hasError": False,
        }

    def _status(self, params: Params) -> Params:
        stream = self._named(params)
        if params["requestId"] != stream.request_id:
            raise refusal("stream_not_found")
        return {
            "requestId": stream.request_id,
            "status": "completed" if stream.is_ended else "processing",
            "hasPendingMessage": stream.acked < len(stream.entries),
            "hasInputRequest": bool(stream.open_requests),
        }

    def _named(self, params: Params) -> Stream:
        """The stream by its id and token; by its token alone in the proposal without ids."""
        for stream in self.streams.values():
            is_it = params.get("streamId", stream.id) == stream.id
            if is_it and params["resumeToken"] == stream.token:
                return stream
        raise refusal("stream_not_found")

    def _call(self, connection: Connection, message: Params) -> None:
        stream = Stream(self, next(self._numbers), message)
        tool = self.tools[message["params"]["name"]]
        if message["params"]["name"] in self.plain:
            self._nursery.start_soon(self._answer, connection, stream, tool)
            return
        self.streams[stream.id] = stream
        self._announce(connection, stream)
        connection.attach(stream, 0, None)
        self._nursery.start_soon(self._run, stream, tool)

    async def _answer(self, connection: Connection, stream: Stream, tool: Tool) -> None:
        connection.reply(messages.result(stream.request_id, await tool(stream)))

    def _announce(self, connection: Connection, stream: Stream) -> None:
        named = {"requestId": stream.request_id, "resumeToken": stream.token}
        interval = {"resumeInterval": {"min": self.min_s, "max": 3600}}
        announced = {
            CREATE: {"stream": {"streamId": stream.id} | named | interval},
            POLICY: named | {"minWait": self.min_s, "maxWait": 3600},
        }
        for method in self.announces:
            connection.reply(messages.notification(method, announced[method]))

    async def _run(self, stream: Stream, tool: Tool) -> None:
        with stream.scope:
            try:
                stream.finish(messages.result(stream.request_id, await tool(stream)))
            except Refusal as refused:
                stream.finish(messages.error(stream.request_id, refused))

    def _resume(
        self, connection: Connection, request_id: Any, params: Params, *, takes_over: bool
    ) -> None:
        if self.resume_refusals:
            raise self.resume_refusals.pop(0)
        if self.resume_endings:
            connection.reply(_ended(request_id, self.resume_endings.pop(0)))
            return
        stream = self._named(params)
        if stream.is_cancelled:
            raise refusal("cancelled")
        if not takes_over and connection.following.get(stream.id, (0, request_id))[1] is None:
            raise refusal("id_in_use")
        after = params.get("after", stream.acked)
        if after < stream.acked:
            raise refusal("messages_gone", earliestSeq=stream.acked + 1)
        if after > len(stream.entries):
            raise refusal("cursor_ahead", lastSeq=len(stream.entries))
        stream.acked = after
        if after == 0:
            self._announce(connection, stream)
        for seq in stream.open_requests.values():
            if seq <= after:
                connection.reply(stream.entries[seq - 1])
        # The final response goes under the original request's id, which our client chose.
        connection.attach(stream, after, None if takes_over else request_id)


def _paged(found: list[Params], params: Params) -> tuple[list[Params], Params]:
    """Two statuses a page."""
    start = int(params.get("cursor", 0))
    rest = {"nextCursor": str(start + 2)} if len(found) > start + 2 else {}
    return found[start : start + 2], rest
