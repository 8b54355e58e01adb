"""Responses that a client's HTTP connection accepts, and after which it serves another request."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import trio

from transports.http.connections import HEAD_BYTES_MAX, PIECES_MAX, HttpConnection

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


class Given(trio.abc.ReceiveStream):
    """The bytes that a server sends, then its end."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = list(pieces)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._pieces.pop(0) if self._pieces else b""

    async def aclose(self) -> None:
        self._pieces.clear()


def answering(*pieces: bytes) -> HttpConnection:
    return HttpConnection(cast(Any, Given(pieces)), cast(Any, None))


async def body_of(connection: HttpConnection) -> bytes:
    await connection.read_head()
    return await rest_of(connection)


async def rest_of(connection: HttpConnection) -> bytes:
    body = b""
    while pieces := await connection.read():
        assert len(pieces) <= PIECES_MAX
        body += b"".join(pieces)
    assert connection.has_ended
    return body


@pytest.mark.parametrize(
    ("response", "body"),
    [
        (OK + b"Content-Length: 5\r\n\r\nhello", b"hello"),
        (CHUNKED + b"5\r\nhello\r\n0\r\nA-Trailer: x\r\n\r\n", b"hello"),
        (CHUNKED + 1_000 * b"1;a=b\r\nx\r\n" + b"0\r\n\r\n", 1_000 * b"x"),
        (b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n" + OK + b"Content-Length: 0\r\n\r\n", b""),
    ],
)
async def test_a_response_with_a_length_of_its_own_leaves_room_for_the_next(
    response: bytes, body: bytes
) -> None:
    connection = answering(response, response)
    for _ in range(2):
        assert await body_of(connection) == body
        assert connection.begin_again()


@pytest.mark.parametrize(
    "response",
    [
        OK + b"\r\nto the end",  # no length: ends with the connection
        OK + b"Connection: close\r\nContent-Length: 10\r\n\r\nto the end",
        OK + b"Content-Length: 10\r\n\r\nto the endHTTP/1.1 200 OK\r\n",
        OK + b"Content-Length: 10\r\n\r\nto the endbabble",
    ],
)
async def test_after_other_responses_the_connection_is_not_used_again(response: bytes) -> None:
    connection = answering(response)
    assert await body_of(connection) == b"to the end"
    assert not connection.begin_again()


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n", "gzip"),
        (CHUNKED + b"zz\r\n", "chunk size"),
        (CHUNKED + b"5\r\nhe", "hung up"),
        (OK + b"Content-Length: 5\r\n\r\nhe", "hung up"),
    ],
)
async def test_a_broken_body_is_an_error(response: bytes, why: str) -> None:
    for pieces in ([response], [response[at : at + 1] for at in range(len(response))]):
        connection = answering(*pieces)
        await connection.read_head()
        with pytest.raises(trio.BrokenResourceError, match=why):
            await rest_of(connection)
        assert not connection.begin_again()


@pytest.mark.parametrize("start", [OK + b"X: ", CHUNKED + b"5;x=", CHUNKED + b"0\r\nX: "])
async def test_no_head_chunk_head_or_trailer_is_endless(start: bytes) -> None:
    pieces = [start, *([b"x" * 1_000] * (HEAD_BYTES_MAX // 1_000 + 1))]
    connection = answering(*pieces)
    with pytest.raises(trio.BrokenResourceError, match="a head above"):
        await body_of(connection)
