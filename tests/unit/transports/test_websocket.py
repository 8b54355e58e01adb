"""Opening a WebSocket: which requests are accepted, subprotocols, and errors of a client."""

import contextlib
import json
import ssl
from functools import partial

import pytest
import trio
import trio.testing
import trustme
from wsproto.connection import Connection, ConnectionType
from wsproto.events import TextMessage

from streams.exchange import Channel
from tests.rigs.bare_websocket import open_bare_websocket, server
from transports import dial, websocket
from transports.net.origins import Origins
from transports.websocket import client
from transports.websocket import server as wsserver
from transports.websocket.frames import MCP, MCP_STREAMS

PATIENCE_S = 60.0


def handshake(port: int, *fields: str, start: str = "GET / HTTP/1.1") -> bytes:
    usual = {
        "Host": f"127.0.0.1:{port}",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
    }
    for field in fields:
        name, _, value = field.partition(": ")
        if value:
            usual[name] = value
        else:
            usual.pop(name)
    lines = [start, *(f"{name}: {value}" for name, value in usual.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


async def knock(port: int, request: bytes) -> str:
    """The head of the answer to `request`; of a refusal, all of it."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        await stream.send_all(request)
        answer = b""
        while not answer.startswith(b"HTTP/1.1 101") or b"\r\n\r\n" not in answer:
            data = await stream.receive_some()
            if not data:
                break
            answer += data
        return answer.decode()


# -- the handshake


@pytest.mark.parametrize(
    ("offered", "agreed"),
    [
        ("mcp, mcp-streams.v1", MCP_STREAMS),
        ("mcp-streams.v1, mcp", MCP_STREAMS),
        ("chat, mcp", MCP),
        ("", None),
    ],
)
async def test_our_subprotocol_is_preferred_and_none_is_fine(
    offered: str, agreed: str | None
) -> None:
    async with server() as port:
        fields = [f"Sec-WebSocket-Protocol: {offered}"] if offered else []
        answer = await knock(port, handshake(port, *fields))
    assert answer.startswith("HTTP/1.1 101 ")
    found = [line for line in answer.lower().splitlines() if "sec-websocket-protocol" in line]
    assert found == ([f"sec-websocket-protocol: {agreed}"] if agreed else [])


async def test_compression_is_never_agreed_on() -> None:
    async with server() as port:
        offer = "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits"
        answer = await knock(port, handshake(port, offer))
    assert answer.startswith("HTTP/1.1 101 ")
    assert "extensions" not in answer.lower()


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (["Sec-WebSocket-Protocol: chat"], 400),
        (["Upgrade: "], 400),
        (["Sec-WebSocket-Key: "], 400),
        (["Sec-WebSocket-Version: 8"], 426),
        (["Host: "], 400),
        (["Host: \xff\xfe"], 400),
        (["Host: evil.example"], 403),
        (["Host: localhost@evil.example"], 403),
        (["Origin: https://evil.example"], 403),
        (["Origin: null"], 403),
        (["Origin: http://[::1"], 403),
        (["Origin: http://localhost.evil.example"], 403),
        (["X-Padding: " + "x" * 20_000], 431),
    ],
)
async def test_a_refusal_is_an_http_error_with_a_json_rpc_error_in_it(
    fields: list[str], status: int
) -> None:
    async with server() as port:
        answer = await knock(port, handshake(port, *fields))
        assert answer.startswith(f"HTTP/1.1 {status} ")
        error = json.loads(answer.partition("\r\n\r\n")[2])
        assert error["jsonrpc"] == "2.0"
        assert error["error"]["message"]


@pytest.mark.parametrize(
    "request_", [b"\x16\x03\x01\r\n\r\n", b"\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n"]
)
async def test_what_is_no_handshake_gets_400(request_: bytes) -> None:
    async with server() as port:
        assert (await knock(port, request_)).startswith("HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "fields",
    [
        ["Host: localhost"],
        ["Host: LOCALHOST:1234"],
        ["Host: [::1]:80"],
        ["Host: 127.0.0.1"],
        ["Origin: http://localhost:3000"],
        ["Origin: https://127.0.0.1"],
        ["Origin: http://[::1]:3000"],
    ],
)
async def test_loopback_is_let_in_under_all_its_names(fields: list[str]) -> None:
    async with server() as port:
        assert (await knock(port, handshake(port, *fields))).startswith("HTTP/1.1 101 ")


async def test_what_is_allowed_besides_is_let_in() -> None:
    hosts, origins = ["Mine.example"], ["https://App.example"]
    fields = ["Host: mine.example:99", "Origin: https://app.example"]
    async with server(allowed_hosts=hosts, allowed_origins=origins) as port:
        assert (await knock(port, handshake(port, *fields))).startswith("HTTP/1.1 101 ")
        for strange in ("Host: other.example", "Origin: http://app.example"):
            answer = await knock(port, handshake(port, *fields, strange))
            assert answer.startswith("HTTP/1.1 403 ")


def test_beyond_loopback_any_host_will_do_but_an_origin_must_be_listed() -> None:
    public = Origins(is_loopback=False)
    assert public.why_refused("any.example:80", []) is None
    assert public.why_refused("any.example", ["https://any.example"])
    assert public.why_refused("localhost", ["http://localhost"])
    listed = Origins(
        is_loopback=False,
        hosts=frozenset(["any.example"]),
        origins=frozenset(["https://app.example"]),
    )
    assert listed.why_refused("any.example:80", ["https://app.example"]) is None
    assert listed.why_refused("other.example", [])
    assert listed.why_refused("any.example", ["https://app.example", "https://evil.example"])


async def test_a_handshake_that_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wsserver, "HANDSHAKE_S", 0.05)
    async with server() as port:
        assert await knock(port, b"GET / HT") == ""


async def test_one_connection_too_many_is_told_so() -> None:
    async with server(connections_max=1) as port:
        async with websocket.connect(f"ws://127.0.0.1:{port}") as channel:
            with pytest.raises(ConnectionRefusedError, match=r"503.*Too many connections"):
                async with websocket.connect(f"ws://127.0.0.1:{port}"):
                    pytest.fail("there was room for one")
            await channel.send(b'"still here"\n')
            assert await channel.receive() == [b'"still here"']
        async with websocket.connect(f"ws://127.0.0.1:{port}") as channel:
            await channel.send(b'"again"\n')
            assert await channel.receive() == [b'"again"']


async def test_what_comes_with_the_handshake_is_not_lost() -> None:
    async with server() as port:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        early = Connection(ConnectionType.CLIENT).send(TextMessage(data='"early"'))
        await stream.send_all(handshake(port) + early)
        answer = b""
        while not answer.endswith(b'"early"'):
            answer += await stream.receive_some()
        await stream.aclose()


async def test_a_peer_that_has_hung_up_is_known_before_all_of_it_is_read() -> None:
    """A handler that is busy with a message must not work on for a client that is gone."""
    seen = []

    async def busy(channel: Channel) -> None:
        await channel.receive()
        seen.append(channel.is_writable())
        is_read.set()
        with trio.fail_after(PATIENCE_S):
            while channel.is_writable():
                await trio.sleep(0.01)
        seen.append(channel.is_writable())
        is_over.set()

    is_read, is_over = trio.Event(), trio.Event()
    async with server(busy) as port:
        stream, connection = await open_bare_websocket(port, MCP)
        await stream.send_all(connection.send(TextMessage(data='"one"')))
        await is_read.wait()
        await stream.send_all(connection.send(TextMessage(data='"two"')))
        await stream.aclose()
        await is_over.wait()
    assert seen == [True, False]


async def test_every_address_of_a_host_has_the_same_port() -> None:
    async with server(host="localhost") as port, server(host="::1") as other_port:
        for url in (f"ws://127.0.0.1:{port}", f"ws://localhost:{port}", f"ws://[::1]:{other_port}"):
            async with websocket.connect(url) as channel:
                await channel.send(b'"hello"\n')
                assert await channel.receive() == [b'"hello"']


async def test_each_client_is_someone_else() -> None:
    principals: list[str] = []

    async def note(channel: Channel) -> None:
        principals.append(channel.principal)

    async with server(note) as port:
        for _ in range(2):
            async with websocket.connect(f"ws://127.0.0.1:{port}") as channel:
                with pytest.raises(trio.EndOfChannel):
                    await channel.receive()
    assert len(set(principals)) == 2
    assert all(len(principal) == len("conn()") + 43 for principal in principals)


# -- connecting


async def test_nobody_there_is_an_os_error() -> None:
    async with server() as port:
        pass
    with pytest.raises(OSError, match=str(port)):
        async with dial(f"ws://127.0.0.1:{port}/mcp?x=1")():
            pytest.fail("nobody listens")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 7\r\n\r\nNot you", "HTTP 403: Not you"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "HTTP 404"),
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 6\r\n\r\n<html>", "HTTP 403$"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\nOops", "HTTP 502: Oops"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "does not speak WebSocket"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\n\r\n", "does not speak WebSocket"),
        (b"", "hung up"),
    ],
)
async def test_a_server_that_will_not_have_us_is_an_os_error(answer: bytes, error: str) -> None:
    async def answers(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(answer)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, answers, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises(OSError, match=error):
            async with websocket.connect(f"ws://127.0.0.1:{port}"):
                pytest.fail("that was no welcome")
        nursery.cancel_scope.cancel()


async def keep_silent(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


async def test_a_server_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 0.05)
    async with trio.open_nursery() as nursery:
        silent = partial(trio.serve_tcp, keep_silent, 0, host="127.0.0.1")
        port = (await nursery.start(silent))[0].socket.getsockname()[1]
        with pytest.raises(TimeoutError, match="no answer"):
            async with websocket.connect(f"ws://127.0.0.1:{port}"):
                pytest.fail("nobody answered")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "url", ["ws://", "http://x", "ws://host:99999", "ws://host/a b", "ws://a..b", "ws://a:b@host"]
)
async def test_what_is_no_url_is_a_value_error(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        async with websocket.connect(url):
            pytest.fail("there is nowhere to go")


async def test_a_body_s_own_error_comes_out_as_it_is() -> None:
    async with server() as port:
        with pytest.raises(KeyError):
            async with websocket.connect(f"ws://127.0.0.1:{port}"):
                raise KeyError


async def test_tls_is_a_matter_of_the_url() -> None:
    authority = trustme.CA()
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(theirs)
    ours = ssl.create_default_context()
    authority.configure_trust(ours)

    async with server() as port, trio.open_nursery() as nursery:

        async def proxy(outer: trio.SSLStream[trio.SocketStream]) -> None:
            inner = await trio.open_tcp_stream("127.0.0.1", port)
            async with outer, inner, trio.open_nursery() as both:
                both.start_soon(copy, outer, inner)
                await copy(inner, outer)
                both.cancel_scope.cancel()

        front = partial(
            trio.serve_ssl_over_tcp, proxy, 0, theirs, host="127.0.0.1", https_compatible=True
        )
        listener = (await nursery.start(front))[0].transport_listener
        url = f"wss://localhost:{listener.socket.getsockname()[1]}"
        async with websocket.connect(url, ssl_context=ours) as channel:
            await channel.send(b'"in private"\n')
            assert await channel.receive() == [b'"in private"']
            assert channel.unsent_bytes() is not None
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            async with websocket.connect(url):
                pytest.fail("nobody vouched for it")
        nursery.cancel_scope.cancel()


async def copy(source: trio.abc.Stream, sink: trio.abc.Stream) -> None:
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while data := await source.receive_some():
            await sink.send_all(data)
