"""The commands of operators survive servers that are none."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio

from streams.cli.actions.admin_client import AdminClient, CannotAsk


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers every request with these bytes; its address, and what it was sent."""
    sent: list[bytes] = []

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            sent.append(await stream.receive_some(65536))
            await stream.send_all(answer)

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}", sent
        nursery.cancel_scope.cancel()


def response(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def test_the_token_is_sent_and_the_answer_decoded() -> None:
    async with answering(response("200 OK", b'{"running":1}')) as (url, sent):
        client = AdminClient(url, "secret-token")
        found = await client.get(
            "calls", "a/b c", "messages", kind=dict[str, int], after=3, text=""
        )
        assert found == {"running": 1}
        assert sent[0].startswith(b"GET /api/calls/a%2Fb%20c/messages?after=3 HTTP/1.1\r\n")
        assert b"Bearer secret-token" in sent[0]
        await client.post("calls", "x", "answer", value={"a": 1})
        assert sent[1].endswith(b'{"a":1}')


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            response("401 Unauthorized", b'{"error":{"message":"Send the token."}}'),
            "needs the operator's token: .*--token-file.*MCP_STREAMS_ADMIN_TOKEN",
        ),
        (
            response(
                "503 Service Unavailable",
                b'{"jsonrpc":"2.0","id":null,"error":{"code":-32603,"message":"Too many."}}',
            ),
            "^Too many.$",
        ),
        (response("404 Not Found", b"<html>"), "not as an operator's endpoint"),
        (response("200 OK", b"<html>"), "cannot be read"),
        (response("200 OK", b"[" * 100_000), "cannot be read"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "cannot be asked"),
        (b"SSH-2.0-OpenSSH\r\n", "cannot be asked"),
        (b"", "cannot be asked"),
    ],
)
async def test_other_answers_are_explained(answer: bytes, says: str) -> None:
    async with answering(answer) as (url, _):
        with pytest.raises(CannotAsk, match=says):
            await AdminClient(url).get("stats", kind=dict[str, Any])


@pytest.mark.parametrize(
    "address", ["ftp://x", "http://", "https:///x", "..", "http://a..b:1", "x" * 64, "\udcff"]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="write http"):
        AdminClient(address)


def test_a_password_in_an_address_is_neither_sent_nor_shown() -> None:
    with pytest.raises(ValueError, match="must not have a password") as refused:
        AdminClient("http://ada:secret@127.0.0.1:9090")
    assert "secret" not in str(refused.value)


def test_a_token_that_would_be_more_headers_is_refused() -> None:
    with pytest.raises(ValueError, match="one line"):
        AdminClient("http://127.0.0.1:1", "a\r\nx: y")
