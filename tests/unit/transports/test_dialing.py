"""Why a connection failed: with the URL in it, and whether another attempt may help."""

import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trustme

from streams.errors import ServerRefused
from tests.rigs.scripted_http import http_server
from transports import dial
from transports.http.client import connect as connect_http
from transports.websocket.client import connect as connect_websocket


@asynccontextmanager
async def answering(answer: Callable[[trio.SocketStream], Any]) -> AsyncIterator[int]:
    async def serve(stream: trio.SocketStream) -> None:
        try:
            await answer(stream)
        except trio.BrokenResourceError:
            return  # the client has hung up

    async with trio.open_nursery() as nursery:
        serving = partial(trio.serve_tcp, serve, 0, host="127.0.0.1")
        (listener,) = await nursery.start(serving)
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def error_of(url: str) -> OSError:
    connect: Any = connect_http if url.startswith("http") else connect_websocket
    with trio.fail_after(30), pytest.raises(OSError, match=url) as raised:
        async with connect(url):
            pass
    return raised.value


every_scheme = pytest.mark.parametrize("scheme", ["https", "wss"])


@every_scheme
async def test_an_untrusted_certificate_is_not_tried_again(scheme: str) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)

    async def answer(stream: trio.SocketStream) -> None:
        await trio.SSLStream(stream, context, server_side=True).do_handshake()

    async with answering(answer) as port:
        error = await error_of(f"{scheme}://127.0.0.1:{port}")
    assert isinstance(error, ServerRefused)
    assert "SSL_CERT_FILE" in str(error)


@every_scheme
async def test_a_server_without_tls_is_not_tried_again(scheme: str) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    async with answering(answer) as port:
        error = await error_of(f"{scheme}://127.0.0.1:{port}")
        assert isinstance(error, ServerRefused)
        assert f"its URL is {scheme[:-1]}://127.0.0.1:{port}" in str(error)


@every_scheme
async def test_a_server_that_hangs_up_may_be_about_to_start(scheme: str) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()

    async with answering(answer) as port:
        error = await error_of(f"{scheme}://127.0.0.1:{port}")
    assert not isinstance(error, ServerRefused)


@pytest.mark.parametrize("status", [200, 301, 400, 403, 404, 408, 425, 429, 500, 503])
async def test_a_status_tells_whether_a_web_socket_may_come_later(status: int) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n".encode())

    async with answering(answer) as port:
        error = await error_of(f"ws://127.0.0.1:{port}")
    assert isinstance(error, ServerRefused) is (status in (200, 301, 400, 403, 404))
    assert f"HTTP {status}" in str(error)


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_the_reasons_of_the_system_are_told(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    error = await error_of(f"{scheme}://127.0.0.1:{port}")
    assert str(error).endswith(": Connection refused (no server listens there)")
    error = await error_of(f"{scheme}://nowhere.invalid:1")
    assert isinstance(error, socket.gaierror)
    assert "the host nowhere.invalid cannot be found" in str(error)


@pytest.mark.parametrize(
    ("url", "header", "why"),
    [
        ("http://127.0.0.1:1", ("X-Key", "a\r\nHost: b"), "no header"),
        ("http://127.0.0.1:1", ("X Key", "a"), "no header"),
        ("http://127.0.0.1:1", ("Mcp-Session-Id", "a"), "itself"),
        ("ws://127.0.0.1:1", ("Sec-WebSocket-Key", "a"), "itself"),
        ("http://example.com", ("X-Key", "secret"), "TLS"),
        ("ws://example.com", ("X-Key", "secret"), "TLS"),
    ],
)
def test_a_bad_header_is_refused(url: str, header: tuple[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        dial(url, headers=[header])
    assert "secret" not in str(raised.value)


def test_headers_are_no_dict() -> None:
    headers: Any = {"ab": "the name would be a, and the value b"}
    with pytest.raises(TypeError, match="headers: expected pairs"):
        dial("ws://127.0.0.1:1", headers=headers)


@pytest.mark.parametrize("url", ["ws://127.0.0.1:0", "http://127.0.0.1:0/mcp"])
async def test_port_0_is_not_taken_for_the_default_port(url: str) -> None:
    assert "failed" in str(await error_of(url))
    assert "127.0.0.1:80" not in str(await error_of(url))


async def test_a_websocket_handshake_has_the_headers() -> None:
    async with http_server(lambda asked: asked.respond("403 Forbidden")) as server:
        dialer = dial(server.url.replace("http", "ws"), headers=[("X-Key", "k")])
        with pytest.raises(OSError, match="403"):
            async with dialer():
                pass
        assert server.asked[0].headers["x-key"] == "k"


@pytest.mark.parametrize("scheme", ["ws", "http"])
@pytest.mark.parametrize(
    ("token", "why"),
    [
        (lambda: {}["vault"], "there is no bearer token: KeyError: 'vault'"),
        (lambda: None, "the bearer token is missing or invalid"),
        (lambda: b"bytes", "the bearer token is missing or invalid"),
    ],
)
async def test_a_token_that_cannot_be_had_now_is_a_failure_to_connect(
    scheme: str, token: Any, why: str
) -> None:
    url = f"{scheme}://127.0.0.1:1"
    with pytest.raises(ConnectionError, match=f"{url}: {why}"):
        async with dial(url, token=token)():
            pytest.fail("there is no token")
