"""HTTP/1.1 from either side: the same requests and responses, however they are cut."""

from collections.abc import Iterable
from typing import Any, cast

import trio

from streams.exchange import HttpError, Request
from tests.fuzz.pieces import same_however_cut
from transports.http.connections import HttpConnection
from transports.http.requests import HEAD_BYTES_MAX, HEADERS_MAX, Requests
from transports.net.heads import plain_head
from transports.net.origins import Origins
from transports.websocket.client import _reason

LIMIT = 100
Seen = tuple[str, str, tuple[tuple[str, str], ...], bytes]


def requests(data: bytes) -> None:
    """A server reads the same requests however they are cut.

    It reads plain heads as h11 does, and holds no more of a body than the limit.
    """

    def read(pieces: Iterable[bytes]) -> list[Seen | int]:
        reading = Requests(Origins(is_loopback=True), LIMIT)
        seen: list[Seen | int] = []
        for piece in pieces:
            if piece:
                reading.feed(piece)
            try:
                while request := reading.next_request():
                    seen.append(_seen(request))
                    reading.whole(200, (), b"ok")
                    if not reading.next_cycle():
                        return seen
            except HttpError as refused:
                assert refused.status in (400, 403, 413, 431, 501, 505)
                return [*seen, refused.status]
            assert len(reading._body) <= LIMIT + 2
            reading.go_ahead()
        return seen

    for seen in same_however_cut(data, read):
        if not isinstance(seen, int):
            assert seen[1].startswith(("/", "*"))
            assert len(seen[3].rstrip(b"\r\n")) <= LIMIT


def _seen(request: Request) -> Seen:
    fields = tuple(sorted(request.headers.items()))
    return request.method, request.path, fields, request.body


class _Given(trio.abc.ReceiveStream):
    """The bytes that a server sends, then its end."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = [piece for piece in pieces if piece]

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    async def aclose(self) -> None:
        self._pieces.clear()


def response(data: bytes) -> None:
    """A client reads the same response however it is cut, or says why the response is invalid."""

    async def ask(pieces: Iterable[bytes]) -> tuple[Any, ...]:
        connection = HttpConnection(cast(Any, _Given(pieces)), cast(Any, None))
        try:
            head = await connection.read_head()
        except trio.BrokenResourceError as broken:
            return ("no head", bool(str(broken)))
        body = b""
        try:
            while more := await connection.read():
                body += b"".join(more)
        except trio.BrokenResourceError:
            # How much of a broken body was handed over before depends on the cuts.
            return (head.status, head.content_type, "broken")
        return (head.status, head.content_type, str(head), body)

    def read(pieces: Iterable[bytes]) -> tuple[Any, ...]:
        return trio.run(ask, pieces)

    same_however_cut(data, read)


def head(data: bytes) -> None:
    """A plain head ends with a blank line and has exactly one Host header."""
    found = plain_head(data, HEAD_BYTES_MAX, HEADERS_MAX)
    if found is None:
        return
    assert data[: found.size].endswith(b"\r\n\r\n")
    assert data.count(b"\r\n\r\n", 0, found.size) == 1
    assert len(found.fields["host"]) == 1
    assert found.target.startswith("/")
    assert 0 <= found.body_bytes < 10**9
    assert sum(map(len, found.fields.values())) <= HEADERS_MAX


def refusal(data: bytes) -> None:
    """The reason in a refusal is a short sentence or empty."""
    assert len(_reason(data)) <= 202
