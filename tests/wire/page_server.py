"""A server of Streams written from the proposal's page alone, and of page tokens from theirs.

It knows nothing of this project: no numbers, no tokens of streams, no extension, and its
announcements are the page's own example. It counts messages as delivered once they are written, and
cuts its connections where a test tells it to. WebSocket, HTTP and, by a small relay process, stdio.
"""

import contextlib
import json
import shlex
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Literal

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server, ServerConnection, serve
from websockets.typing import Subprotocol

Json = dict[str, Any]
Reply = Literal["last", "first", "never"]
CREATE: Final = "notifications/stream/create"
# Copies standard input and output to and from a socket, for as long as both last.
RELAY: Final = """
import os, socket, sys, threading
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def pour():
    while data := os.read(0, 65536):
        peer.sendall(data)
threading.Thread(target=pour, daemon=True).start()
try:
    while data := peer.recv(65536):
        os.write(1, data)
except OSError:
    pass  # the client has gone
"""


class Cut(Exception):
    """Cuts the connection now."""


class Mute(Exception):
    """Keeps the connection, but reads and writes nothing on it any more."""


class Stream:
    """One call: its messages, and how many of them were sent."""

    def __init__(self, name: str, entries: list[Json]) -> None:
        self.name = name
        self.entries = entries
        self.sent = 0


class PageServer:
    """The state of one server, shared by its transports. `asked` has all received messages."""

    def __init__(
        self,
        *,
        is_flat: bool = False,
        reply: Reply = "last",
        cuts: tuple[int, ...] = (),
        mutes: tuple[int, ...] = (),
        before: tuple[Json, ...] = (),
        token_place: Literal["params", "_meta"] = "params",
        is_waiting: bool = False,
    ) -> None:
        self.is_flat = is_flat  # as the proposal's schema has it
        self.reply = reply  # the page does not show one to `stream/resume`
        self.cuts = list(cuts)  # after which entries of a stream a connection is cut
        self.mutes = list(mutes)  # and after which it goes mute
        self.mute_calls = 0  # how many calls of `rows` are not answered any more, by their page
        self.is_over = threading.Event()
        self.before = before  # sent before each announcement
        self.token_place = token_place
        self.is_waiting = is_waiting  # no announcement and no message of a call before `announce`
        self.is_to_cut = False  # at the next message
        self.asked: list[Json] = []
        self.raw: list[bytes] = []
        self.urls: dict[str, str] = {}
        self._streams: dict[str, Stream] = {}
        self._waiting: list[Callable[[], None]] = []
        self._paged = ""

    def sent(self, stream: str) -> int:
        """How many messages of this stream were sent."""
        return self._streams[stream].sent

    def methods(self) -> list[str]:
        return [message.get("method", "") for message in self.asked]

    def take(self, raw: bytes, send: Callable[[Json], None]) -> None:
        """Handle one message; the answers go to `send`. Raises `Cut`."""
        if self.is_to_cut:
            self.is_to_cut = False
            raise Cut
        message = json.loads(raw)
        self.asked.append(message)
        self.raw.append(raw)
        if "id" not in message or "method" not in message:
            return
        answers = {
            "initialize": self._initialize,
            "tools/call": self._call,
            "stream/resume": self._resume,
            "stream/poll": self._poll,
        }
        answer = answers.get(message["method"], lambda asked, send: send(result(asked, {})))
        answer(message, send)

    def _initialize(self, asked: Json, send: Callable[[Json], None]) -> None:
        hello = {
            "protocolVersion": "2025-11-25",
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "page", "version": "0"},
        }
        send(result(asked, hello))

    def _call(self, asked: Json, send: Callable[[Json], None]) -> None:
        if asked["params"]["name"] == "rows":
            if self.mute_calls and "resumeToken" in asked["params"]:
                self.mute_calls -= 1
                raise Mute
            send(result(asked, self._page(asked["params"])))
            return
        count = asked["params"]["arguments"]["n"]
        notes = [note(number) for number in range(1, count + 1)]
        final = result(asked, text(f"counted {count}"))
        name = f"550e8400-e29b-41d4-a716-{len(self._streams):012}"
        stream = self._streams[name] = Stream(name, [*notes, final])
        told = {"streamId": name, "resumeInterval": {"min": 0, "max": 3600}}
        create = notification(CREATE, told if self.is_flat else {"stream": told})
        if self.is_waiting:
            self._waiting.append(lambda: send(create))
            return
        for garbage in self.before:
            send(garbage)
        send(create)
        self._deliver(stream, send)

    def announce(self) -> None:
        """Announce all calls that wait for it."""
        for announce in self._waiting:
            announce()

    def _deliver(self, stream: Stream, send: Callable[[Json], None]) -> None:
        """ "Send all unsent messages for the stream to the client"."""
        while stream.sent < len(stream.entries):
            if self.cuts and stream.sent == self.cuts[0]:
                del self.cuts[0]
                raise Cut
            if self.mutes and stream.sent == self.mutes[0]:
                del self.mutes[0]
                raise Mute
            send(stream.entries[stream.sent])
            stream.sent += 1
        send(notification("notifications/stream/end", {"streamId": stream.name}))

    def _resume(self, asked: Json, send: Callable[[Json], None]) -> None:
        stream = self._streams.get(asked["params"]["streamId"])
        if stream is None or "resumeToken" in asked["params"]:
            send({"jsonrpc": "2.0", "id": asked["id"], "error": {"code": 1, "message": "no"}})
            return
        if self.reply == "first":
            send(result(asked, {}))
        self._deliver(stream, send)
        if self.reply == "last":
            send(result(asked, {}))

    def _poll(self, asked: Json, send: Callable[[Json], None]) -> None:
        stream = self._streams[asked["params"]["streamId"]]
        has_more = stream.sent < len(stream.entries)
        status = {"streamId": stream.name, "status": "live" if has_more else "completed"}
        flags = {"pendingMessages": has_more, "hasRequest": False, "hasError": False}
        send(result(asked, status | flags))

    def _page(self, params: Json) -> Json:
        """Page after page, for a client that repeats all params of the first call except the page
        token.
        """
        meta = dict(params["_meta"])
        in_meta = meta.pop("mcp-streams/resumeToken", None)
        in_params = params.get("resumeToken")
        token = in_params if self.token_place == "params" else in_meta
        assert (in_params is None) or (in_meta is None), "the token stands in one place"
        bare = {**params, "_meta": meta}
        bare.pop("resumeToken", None)
        told = json.dumps(bare)
        if token is None:
            self._paged = told
        elif told != self._paged:
            return text("other params") | {"isError": True}
        number = 1 if token is None else int(token)
        following = {} if number == 4 else {"nextResumeToken": str(number + 1)}
        if self.token_place == "_meta" and following:
            following = {"_meta": {"mcp-streams/nextResumeToken": str(number + 1)}}
        return text(f"page {number}") | following

    # Ways to reach it

    @contextlib.contextmanager
    def serving(self) -> Iterator["PageServer"]:
        """Listen in threads of their own; `urls` says where, by transport."""
        with contextlib.ExitStack() as stack:
            websocket: Server = stack.enter_context(
                serve(self._over_websocket, "127.0.0.1", 0, subprotocols=[Subprotocol("mcp")])
            )
            lines = _LineServer(self)
            http = _HttpServer(self)
            stack.callback(lines.server_close)
            stack.callback(http.server_close)
            for server in (websocket, lines, http):
                thread = threading.Thread(target=server.serve_forever)
                thread.start()
                stack.callback(thread.join)
                stack.callback(server.shutdown)
            command = shlex.join([sys.executable, "-c", RELAY, str(lines.server_address[1])])
            self.urls = {
                "ws": f"ws://127.0.0.1:{websocket.socket.getsockname()[1]}",
                "http": f"http://127.0.0.1:{http.server_address[1]}/mcp",
                "stdio": f"stdio:{command}",
            }
            try:
                yield self
            finally:
                self.is_over.set()

    def _over_websocket(self, connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed, Cut):
            for frame in connection:
                assert isinstance(frame, str)
                try:
                    self.take(frame.encode(), lambda message: connection.send(json.dumps(message)))
                except Mute:
                    with connection.protocol_mutex:  # so no ping is answered
                        self.is_over.wait()


class _LineServer(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, page: PageServer) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                def send(message: Json) -> None:
                    self.wfile.write(json.dumps(message).encode() + b"\n")

                try:
                    with contextlib.suppress(Cut, ConnectionError):
                        for line in self.rfile:
                            page.take(line.rstrip(b"\n"), send)
                except Mute:
                    page.is_over.wait()

        super().__init__(("127.0.0.1", 0), Handler)


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, page: PageServer) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if "id" not in json.loads(body):
                    page.take(body, lambda message: None)
                    self.send_response(202)
                    self.send_header("content-length", "0")
                    self.end_headers()
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                try:
                    with contextlib.suppress(Cut, ConnectionError):
                        page.take(body, self._event)
                except Mute:
                    page.is_over.wait()

            def _event(self, message: Json) -> None:
                self.wfile.write(b"data: " + json.dumps(message).encode() + b"\n\n")

            def do_GET(self) -> None:
                self.send_response(405)
                self.send_header("content-length", "0")
                self.end_headers()

            def do_DELETE(self) -> None:
                self.do_GET()

            def log_message(self, format: str, *args: object) -> None:
                """Standard error is the test's."""

        super().__init__(("127.0.0.1", 0), Handler)


def result(asked: Json, value: Json) -> Json:
    return {"jsonrpc": "2.0", "id": asked["id"], "result": value}


def notification(method: str, params: Any) -> Json:
    return {"jsonrpc": "2.0", "method": method, "params": params}


def note(number: int) -> Json:
    return notification("notifications/message", {"level": "info", "data": {"n": number}})


def text(words: str) -> Json:
    return {"content": [{"type": "text", "text": words}]}
