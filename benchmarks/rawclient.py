"""Clients that read as fast as they can, and check the bytes afterwards.

They measure the server: blocking sockets and pipes, read into memory that is already allocated, and
no other work while the clock runs. Then every message is checked: it must be there, once, in order,
byte for byte. Each function calls `fill`, hangs up after the first message, waits until the call is
done, and resumes it over a connection that is already open.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec

from benchmarks.numbered import Lost, lines_of
from benchmarks.rawcheck import (
    check_events,
    check_lines,
    check_messages,
    check_runs,
    chunks_of,
    frames_of,
)
from benchmarks.rawpeers import ENDED, PIECE_BYTES, Child, Http, Kept, Peer, WebSocket, hello_of
from streams.messages import notification, request

POLL_EVERY_S: Final = 0.05
CALL, POLL, RESUME, DROP = 1, 2, 3, 4  # ids of our requests

_LINES: Final = "application/x-ndjson, application/json"
_EVENTS: Final = "application/json, text/event-stream"
_decode: Final = msgspec.json.decode


class Resumed(NamedTuple):
    """The figures of a resume: so many messages, of so many bytes without framing."""

    messages: int
    bytes: int
    seconds: float


class Left(NamedTuple):
    """A call that its client left after the first message."""

    stream: str
    token: str
    last_event: str = ""


def stdio(command: Sequence[str], count: int, size: int) -> Resumed:
    """Over the pipes of a child: `command` is spawned twice. Raises `Lost`."""
    with contextlib.closing(Child(command)) as child:
        _introduce(child, positions=True)
        left = _leave(child, count, size)
    with contextlib.closing(Child(command)) as child:
        _introduce(child, positions=True)
        kept, seconds = _resume(child, left, Kept(count, size), b"}\n")
        came = check_lines(kept.all().splitlines(keepends=True), count, size)
        _drop(child, left, count + 1)
    return Resumed(*came, seconds)


def websocket_lines(url: str, count: int, size: int, at: str = "") -> Resumed:
    """Over a WebSocket with our own subprotocol, many messages a frame. Raises `Lost`.

    `at` is the URL of another replica, where the call is resumed.
    """
    return _over_websocket(url, "mcp-streams.v1", count, size, at)


def websocket_messages(url: str, count: int, size: int) -> Resumed:
    """Over a WebSocket with the subprotocol `mcp`, one message a frame. Raises `Lost`."""
    return _over_websocket(url, "mcp", count, size)


def _over_websocket(url: str, subprotocol: str, count: int, size: int, at: str = "") -> Resumed:
    is_numbered = subprotocol != "mcp"
    with contextlib.closing(WebSocket(url, subprotocol)) as peer:
        _introduce(peer, positions=is_numbered)
        left = _leave(peer, count, size)
    with contextlib.closing(WebSocket(at or url, subprotocol)) as peer:
        _introduce(peer, positions=is_numbered)
        end = b"}\n" if is_numbered else b"}}}"
        kept, seconds = _resume(peer, left, Kept(count, size), end)
        frames, _ = frames_of(kept.all())
        if is_numbered:
            came = check_lines(b"".join(frames).splitlines(keepends=True), count, size)
        else:
            came = check_messages([frame + b"\n" for frame in frames], count, size)
        _drop(peer, left, count + 1)
    return Resumed(*came, seconds)


def websocket_again(url: str, count: int, size: int) -> Iterator[Resumed]:
    """Resume one call again and again, each time over a new connection; never ends.

    No message is acknowledged, so each resume has all of them. Raises `Lost`.
    """
    subprotocol = "mcp-streams.v1"
    with contextlib.closing(WebSocket(url, subprotocol)) as peer:
        _introduce(peer, positions=True)
        left = _leave(peer, count, size)
    whole = b"".join(islice(lines_of(count, size), 1, None))
    kept = Kept(count, size)
    while True:
        kept.end = 0
        with contextlib.closing(WebSocket(url, subprotocol)) as peer:
            _introduce(peer, positions=True)
            _, seconds = _resume(peer, left, kept, b"}\n")
        frames, _ = frames_of(kept.all())
        check_runs(b"".join(frames), whole, size)
        yield Resumed(count, len(whole), seconds)


def http_lines(url: str, count: int, size: int) -> Resumed:
    """Over HTTP in our own framing, with the POST of a resume. Raises `Lost`."""
    with contextlib.closing(Http(url, positions=True)) as session:
        left = _leave_http(session, _LINES, count, size)
        _wait_http(session, left)
        kept = Kept(count, size)
        body = request(RESUME, "stream/resume", _named(left, after=1))
        began_at = time.perf_counter()
        session.begin("POST", _LINES, body)
        while not kept.is_ended(b"}\n"):
            kept.end += _some(session.socket.recv_into(kept.room))
        seconds = time.perf_counter() - began_at
        head, _, body = kept.all().partition(b"\r\n\r\n")
        if b"chunked" in head.lower():
            body = b"".join(chunks_of(body))
        lines = body.splitlines(keepends=True)
        came = check_lines([line for line in lines if line.strip()], count, size, is_embedded=True)
        _drop_http(session, left, count + 1)
    return Resumed(*came, seconds)


def sse(url: str, count: int, size: int) -> Resumed:
    """Server-sent events, with a GET and the id of the last event. Raises `Lost`."""
    with contextlib.closing(Http(url, positions=False)) as session:
        left = _leave_http(session, _EVENTS, count, size)
        _wait_http(session, left)
        kept = Kept(count, size)
        last_event = f"Last-Event-ID: {left.last_event}\r\n"
        began_at = time.perf_counter()
        session.begin("GET", "text/event-stream", fields=last_event)
        while got := session.socket.recv_into(kept.room):
            kept.end += got
        seconds = time.perf_counter() - began_at
        _, _, body = kept.all().partition(b"\r\n\r\n")
        came = check_events(body, left.last_event, count, size)
        _drop_http(session, left, count + 1)
    return Resumed(*came, seconds)


def _leave_http(session: Http, accept: str, count: int, size: int) -> Left:
    session.begin("POST", accept, _call(count, size))
    said = b""
    while b'"n":' not in said:
        data = session.socket.recv(PIECE_BYTES)
        if not data:
            raise Lost(f"the server hung up: {said!r}")
        said += data
    session.reconnect()
    at = said.index(b'{"stream')
    created = msgspec.json.decode(said[at : said.index(b"\n", at) - 1])["stream"]
    event = said[said.rfind(b"id: ", 0, said.index(b'"n":')) :].split(b"\n")[0]
    return Left(created["streamId"], created["resumeToken"], event.removeprefix(b"id: ").decode())


def _wait_http(session: Http, left: Left) -> None:
    while True:
        _, body = session.post(request(POLL, "stream/poll", _named(left)))
        if _result(body)["status"] == "completed":
            break
        time.sleep(POLL_EVERY_S)


def _drop_http(session: Http, left: Left, last: int) -> None:
    """As `_drop`, over another connection: the first may have more of its response to come."""
    session.reconnect()
    session.post(request(DROP, "stream/resume", _named(left, after=last)))


# -- shared helpers


def _introduce(peer: Peer, *, positions: bool) -> None:
    peer.say(request(0, "initialize", hello_of(positions=positions)))
    _result(peer.hear())
    peer.say(notification("notifications/initialized"))


def _leave(peer: Peer, count: int, size: int) -> Left:
    peer.say(_call(count, size))
    created = _decode(peer.hear())["params"]["stream"]
    while b'"n":' not in peer.hear():
        pass
    return Left(created["streamId"], created["resumeToken"])


def _resume(peer: Peer, left: Left, kept: Kept, by: bytes) -> tuple[Kept, float]:
    while True:
        peer.say(request(POLL, "stream/poll", _named(left)))
        if _result(peer.hear())["status"] == "completed":
            break
        time.sleep(POLL_EVERY_S)
    resume = request(RESUME, "stream/resume", _named(left, after=1))
    began_at = time.perf_counter()
    peer.say(resume)
    while not kept.is_ended(by):
        kept.end += _some(peer.read_into(kept.room))
    return kept, time.perf_counter() - began_at


def _drop(peer: Peer, left: Left, last: int) -> None:
    """Acknowledge all of it, so that the server keeps none."""
    peer.say(request(DROP, "stream/resume", _named(left, after=last)))
    while ENDED not in peer.hear():
        pass


def _named(left: Left, *, after: int | None = None) -> dict[str, Any]:
    named: dict[str, Any] = {"streamId": left.stream, "resumeToken": left.token}
    return named if after is None else {**named, "after": after}


def _call(count: int, size: int) -> bytes:
    params = {"name": "fill", "arguments": {"count": count, "size": size}}
    return request(CALL, "tools/call", params)


def _result(line: bytes) -> Any:
    message = _decode(line)
    if "result" not in message:
        raise Lost(f"a result was expected: {line!r}")
    return message["result"]


def _some(count: int) -> int:
    if not count:
        raise Lost("the server hung up during the resume")
    return count
