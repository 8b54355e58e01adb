"""Authentication at both listeners: by the head of a request, and again later."""

import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.lowlevel
import trio.testing
from wsproto.events import CloseConnection, TextMessage

from streams.errors import refusal
from streams.exchange import Caller, Channel, Head, HttpError, Request, Responder
from tests.rigs.bare_http import (
    CLOSE,
    PATIENT_S,
    answers,
    asking,
    refused,
    serving,
    tell,
    to_the_end,
)
from tests.rigs.bare_websocket import close_code, events_to_the_end, server, shake_hands
from tests.rigs.served import tls_contexts
from transports import websocket
from transports.http import client
from transports.net.listening import HANDSHAKE_S

TOKEN = "Authorization: Bearer good"
CHALLENGE = b"www-authenticate: Bearer"
HOUR_S = 3600.0


class Porter:
    """Lets in whoever says `good`, for as long as it is told."""

    def __init__(self, holds_for_s: Callable[[], float] = lambda: HOUR_S) -> None:
        self.heads: list[Head] = []
        self._holds_for_s = holds_for_s

    async def admit(self, head: Head) -> Caller | None:
        await trio.lowlevel.checkpoint()
        self.heads.append(head)
        if head.path == "/open":
            return None
        given = head.headers.get("authorization", "")
        if not given.startswith("Bearer good"):
            headers = (("www-authenticate", "Bearer"),)
            raise HttpError(401, refusal("unauthorized"), headers)
        return Caller(given.removeprefix("Bearer "), self._holds_for_s)


async def whoami(request: Request, responder: Responder) -> None:
    who = None if request.caller is None else request.caller.principal
    await responder.respond(200, (), json.dumps([who, len(request.body)]).encode())


# -- over HTTP


@pytest.mark.parametrize("fields", [(), ("Authorization: Bearer bad",), ("Authorization: good",)])
@pytest.mark.parametrize(
    "length", ["Content-Length: 90000", "Transfer-Encoding: chunked", "Content-Length: 2"]
)
async def test_the_body_of_a_stranger_is_not_waited_for(
    fields: tuple[str, ...], length: str
) -> None:
    async with serving(whoami, admit=Porter().admit) as port:
        with trio.fail_after(PATIENT_S):
            answer = await tell(port, asking(length, "Expect: 100-continue", *fields))
    status, error = refused(answer)
    assert (status, error["data"]["reason"]) == (401, "unauthorized")
    assert CHALLENGE in answer
    assert b"100 Continue" not in answer


@pytest.mark.parametrize("size", [1, 50, 100_000])
async def test_the_endpoint_is_told_who_asks(size: int) -> None:
    porter = Porter()
    wire = asking(TOKEN, "Content-Length: 3", body=b"one")
    wire += asking("Authorization: Bearer good too", CLOSE, "Content-Length: 4", body=b"four")
    async with serving(whoami, admit=porter.admit) as port:
        answer = await tell(port, *[wire[at : at + size] for at in range(0, len(wire), size)])
    assert answers(answer, "POST", "POST") == [(200, b'["good", 3]'), (200, b'["good too", 4]')]
    assert len(porter.heads) == 2, "each request is asked for once"


async def test_each_request_of_a_connection_is_asked_for() -> None:
    wire = asking(TOKEN, "Content-Length: 3", body=b"one") + asking(
        "Content-Length: 3", body=b"one"
    )
    async with serving(whoami, admit=Porter().admit) as port:
        answer = await tell(port, wire)
    assert answers(answer, "POST", "POST")[1][0] == 401


async def test_what_is_open_to_all_has_no_caller() -> None:
    async with serving(whoami, admit=Porter().admit) as port:
        answer = await tell(port, asking(CLOSE, start="GET /open?x=1 HTTP/1.1"))
    assert answers(answer, "GET") == [(200, b"[null, 0]")]


async def test_who_has_too_many_requests_under_way_is_told_so_and_nobody_else() -> None:
    begun, go_on = trio.Event(), trio.Event()

    async def slow(request: Request, responder: Responder) -> None:
        if request.path == "/slow":
            begun.set()
            await go_on.wait()
        await whoami(request, responder)

    def post(who: str, path: str = "/mcp") -> bytes:
        authorization = f"Authorization: Bearer {who}"
        return asking(authorization, CLOSE, start=f"GET {path} HTTP/1.1")

    async with serving(slow, admit=Porter().admit, per_principal_max=1) as port:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell, port, post("good", "/slow"))
            with trio.fail_after(PATIENT_S):
                await begun.wait()
            answer = await tell(port, post("good"))
            status, error = refused(answer)
            assert (status, error["data"]) == (429, {"reason": "too_many_connections", "limit": 1})
            assert b"Retry-After: 1" in answer
            assert (await tell(port, post("good other"))).startswith(b"HTTP/1.1 200")
            go_on.set()
        assert (await tell(port, post("good"))).startswith(b"HTTP/1.1 200")


async def test_who_has_too_many_requests_is_told_under_the_id_of_the_one_that_is_refused() -> None:
    body = b'{"jsonrpc":"2.0","id":7,"method":"ping"}'
    async with serving(whoami, admit=Porter().admit, per_principal_max=0) as port:
        answer = await tell(port, asking(TOKEN, f"Content-Length: {len(body)}", body=body))
    assert answer.startswith(b"HTTP/1.1 429")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["id"] == 7


# -- over WebSocket


def opening(port: int, *fields: str) -> bytes:
    return asking(
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        *fields,
        start="GET / HTTP/1.1",
        host=f"127.0.0.1:{port}",
    )


# The second is unusual, so that wsproto reads it.
@pytest.mark.parametrize("odd", [(), ("X-Odd: \xe4",), ("Expect: nothing",)])
@pytest.mark.parametrize("fields", [(), ("Authorization: Bearer bad",)])
async def test_a_stranger_gets_no_websocket(fields: tuple[str, ...], odd: tuple[str, ...]) -> None:
    async with server(admit=Porter().admit) as port:
        answer = await tell(port, opening(port, *fields, *odd))
    status, error = refused(answer)
    assert (status, error["data"]["reason"]) == (401, "unauthorized")
    assert CHALLENGE in answer


@pytest.mark.parametrize("odd", [(), ("Expect: nothing",)])
async def test_a_websocket_belongs_to_who_has_opened_it(odd: tuple[str, ...]) -> None:
    principals = []

    async def note(channel: Channel) -> None:
        await trio.lowlevel.checkpoint()
        principals.append(channel.principal)

    async with server(note, admit=Porter().admit) as port:
        answer = await tell(port, opening(port, TOKEN, *odd))
    assert answer.startswith(b"HTTP/1.1 101")
    assert principals == ["good"]


Until = Callable[[trio.abc.Stream], Awaitable[None]]


async def wait(stream: trio.abc.Stream) -> None:
    await trio.lowlevel.checkpoint()


async def talk_on(stream: trio.abc.Stream) -> None:
    """Not even who never is silent stays."""
    with contextlib.suppress(trio.BrokenResourceError):
        while True:
            await stream.send_all(b"\x89\x80\x00\x00\x00\x00")  # a ping
            await trio.sleep(7)


@pytest.mark.parametrize("meanwhile", [wait, talk_on])
async def test_a_websocket_ends_when_its_token_does(
    meanwhile: Until, autojump_clock: trio.testing.MockClock
) -> None:
    asked: list[float] = []

    def holds_for_s() -> float:
        asked.append(trio.current_time())
        return min(30.0, start + 100 - trio.current_time())

    autojump_clock.autojump_threshold = 0.02  # what is on its way in the kernel comes first
    start = trio.current_time()
    async with (
        server(admit=Porter(holds_for_s).admit) as port,
        await trio.open_tcp_stream("127.0.0.1", port) as stream,
        trio.open_nursery() as nursery,
    ):
        connection = await shake_hands(stream, port, "mcp", token="good")
        await stream.send_all(connection.send(TextMessage(data="1")))
        nursery.start_soon(meanwhile, stream)
        events = await events_to_the_end(stream, connection)
        nursery.cancel_scope.cancel()
    assert [event.data for event in events if isinstance(event, TextMessage)] == ["1"]
    (close,) = [event for event in events if isinstance(event, CloseConnection)]
    assert (int(close.code), close.reason) == (1008, "the bearer token has expired")
    assert [at - start for at in asked] == pytest.approx([0, 30, 60, 90, 100], abs=1)


async def test_what_comes_after_the_end_of_a_token_is_not_heard(
    mock_clock: trio.testing.MockClock,
) -> None:
    heard: list[Any] = []

    async def listen(channel: Channel) -> None:
        with contextlib.suppress(trio.EndOfChannel):
            while True:
                heard.extend(await channel.receive())

    async with (
        server(listen, admit=Porter(lambda: 30 - trio.current_time()).admit) as port,
        await trio.open_tcp_stream("127.0.0.1", port) as stream,
    ):
        connection = await shake_hands(stream, port, "mcp", token="good")
        mock_clock.jump(31)
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(connection.send(TextMessage(data="late")))
        mock_clock.autojump_threshold = 0.01  # what comes after the end is read with pauses
        assert close_code(await events_to_the_end(stream, connection)) == 1008
    assert heard == []


async def first_of(port: int, wire: bytes) -> bytes:
    """How the answer begins."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(wire)
        return bytes(await stream.receive_some())


async def test_who_has_too_many_websockets_is_told_so_and_nobody_else() -> None:
    async with server(admit=Porter().admit, per_principal_max=2) as port:
        open_ones = []
        for _ in range(2):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await shake_hands(stream, port, "mcp", token="good")
            open_ones.append(stream)
        status, error = refused(await tell(port, opening(port, TOKEN)))
        assert (status, error["data"]) == (429, {"reason": "too_many_connections", "limit": 2})
        other = await trio.open_tcp_stream("127.0.0.1", port)
        await shake_hands(other, port, "mcp", token="good-other")
        await open_ones.pop().aclose()
        with trio.fail_after(PATIENT_S):
            while not (await first_of(port, opening(port, TOKEN))).startswith(b"HTTP/1.1 101"):
                await trio.lowlevel.checkpoint()  # the server may not know yet that one is gone
        for stream in (*open_ones, other):
            await stream.aclose()


# -- our own clients


async def test_a_client_shows_its_token_to_a_websocket_over_tls() -> None:
    theirs, ours = tls_contexts()
    tokens = iter(["bad", "good", ""])
    settings: Any = {"ssl_context": ours, "token": lambda: next(tokens)}
    async with server(host="localhost", admit=Porter().admit, ssl_context=theirs) as port:
        url = f"wss://localhost:{port}"
        with pytest.raises(PermissionError, match=r"HTTP 401: This server needs authentication"):
            async with websocket.connect(url, **settings):
                pytest.fail("it is in")
        async with websocket.connect(url, **settings) as channel:
            await channel.send(b'"hello"\n')
            assert await channel.receive() == [b'"hello"']
        with pytest.raises(ConnectionError, match="bearer token is missing"):
            async with websocket.connect(url, **settings):
                pytest.fail("it is in")


async def test_a_client_shows_its_token_over_http() -> None:
    porter = Porter()
    async with (
        serving(whoami, admit=porter.admit) as port,
        client.connect(f"http://127.0.0.1:{port}", token="good") as channel,
    ):
        await channel.send(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')
    assert {head.headers["authorization"] for head in porter.heads} == {"Bearer good"}


@pytest.mark.parametrize("connect", [websocket.connect, client.connect])
async def test_a_token_is_sent_nowhere_in_the_clear(connect: Callable[..., Any]) -> None:
    scheme = "ws" if connect is websocket.connect else "http"
    with pytest.raises(ValueError, match="others could read the bearer token"):
        async with connect(f"{scheme}://mcp.example.com", token="good"):
            pytest.fail("it was sent")


# -- TLS


async def test_a_listener_of_tls_speaks_nothing_else() -> None:
    theirs, _ = tls_contexts()
    async with server(host="localhost", ssl_context=theirs) as port:
        with contextlib.suppress(trio.BrokenResourceError):
            assert not (await tell(port, opening(port), host="localhost")).startswith(b"HTTP")


async def test_a_tls_handshake_of_a_websocket_is_not_waited_for(
    mock_clock: trio.testing.MockClock,
) -> None:
    theirs, _ = tls_contexts()
    secured = server(ssl_context=theirs)
    async with secured as port, await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await trio.testing.wait_all_tasks_blocked(0.05)
        mock_clock.jump(HANDSHAKE_S)
        assert await to_the_end(stream) == b""
