"""The HTTP listener against bare sockets: requests, responses, and how they end."""

import contextlib
import ssl

import pytest
import trio
import trio.testing
import trustme
from structlog.testing import capture_logs
from trio.testing import MockClock

from streams.exchange import Request, Responder
from streams.turns import TURN_UNITS
from tests.rigs.bare_http import (
    CHUNKED,
    CLOSE,
    LIMIT,
    PATIENT_S,
    Talk,
    all_turns_taken,
    answers,
    asking,
    echo,
    refused,
    serving,
    talking,
    tell,
    to_the_end,
)
from transports.net.listening import HANDSHAKE_S

# -- requests


@pytest.mark.parametrize("size", [1, 7, 1_000_000])
@pytest.mark.parametrize(
    ("fields", "body"),
    [
        (["Content-Length: 11"], b"hello world"),
        ([CHUNKED], b"5;name=value\r\nhello\r\n6\r\n world\r\n0\r\nX-Trailer: yes\r\n\r\n"),
    ],
)
async def test_a_request_is_whole_however_it_is_cut(
    size: int, fields: list[str], body: bytes
) -> None:
    wire = asking(*fields, CLOSE, start="POST /mcp?x=1 HTTP/1.1", body=body)
    async with serving() as port:
        answer = await tell(port, *[wire[at : at + size] for at in range(0, len(wire), size)])
    assert answers(answer, "POST") == [(200, b'["POST", "/mcp", "hello world"]')]


async def _asked(stream: trio.SocketStream, wire: bytes, times: int) -> None:
    """Send these requests so many times, each time once all of them are answered."""
    for _ in range(times):
        await stream.send_all(wire)
        answer = b""
        while answer.count(b"HTTP/1.1 200") < wire.count(b"HTTP/1.1") or answer[-1:] != b"]":
            data = await stream.receive_some()
            assert data
            answer += data


async def test_pipelined_requests_are_answered_in_turn() -> None:
    wire = asking("Content-Length: 3", start="POST /stream HTTP/1.1", body=b"one")
    wire += asking("Content-Length: 3", start="POST /404 HTTP/1.1", body=b"two")
    wire += asking(CLOSE, start="GET /stream HTTP/1.1")
    async with serving() as port:
        answer = await tell(port, wire)
    assert answers(answer, "POST", "POST", "GET") == [
        (200, b'["POST", "/stream", "one"]'),
        (404, b'["POST", "/404", "two"]'),
        (200, b'["GET", "/stream", ""]'),
    ]


@pytest.mark.parametrize(("requests", "size"), [(6, 0), (1, 40_000)])
async def test_a_client_that_sends_much_at_a_time_waits_for_other_busy_connections(
    requests: int, size: int, mock_clock: MockClock
) -> None:
    """It does so although it waits for all answers before it sends more."""
    wire = requests * asking(f"Content-Length: {size}", body=size * b"x")
    short = asking("Content-Length: 0")
    async with (
        serving() as port,
        await trio.open_tcp_stream("127.0.0.1", port) as one,
        await trio.open_tcp_stream("127.0.0.1", port) as other,
        all_turns_taken(),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_asked, one, wire, TURN_UNITS)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert nursery.child_tasks
        await _asked(other, short, 10 * TURN_UNITS)
        nursery.cancel_scope.cancel()


async def test_what_comes_while_a_response_is_under_way_is_answered_after_it() -> None:
    go_on = trio.Event()

    async def slow(request: Request, responder: Responder) -> None:
        await responder.start(200, (), request.path.encode())
        if request.path == "/first":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(responder.gone)
                await go_on.wait()
                nursery.cancel_scope.cancel()
        await responder.finish()

    async with serving(slow) as port, await trio.open_tcp_stream("127.0.0.1", port) as stream:
        with trio.fail_after(PATIENT_S):
            await stream.send_all(asking(start="GET /first HTTP/1.1"))
            answer = bytes(await stream.receive_some())
            await stream.send_all(asking(CLOSE, start="GET /second HTTP/1.1"))
            await trio.testing.wait_all_tasks_blocked(0.05)
            go_on.set()
            answer += await to_the_end(stream)
    assert answers(answer, "GET", "GET") == [(200, b"/first"), (200, b"/second")]


async def test_pieces_are_one_chunk() -> None:
    async def say(responder: Responder) -> None:
        await responder.start(200, (), b"first", b"", b"second")
        await responder.write(b"x" * 10, b"y" * 10)

    async with talking(say) as stream:
        came = b""
        while not came.endswith(b"\r\n0\r\n\r\n"):
            came += await stream.receive_some()
    _, _, body = came.partition(b"\r\n\r\n")
    chunks = [b"first" + b"second", b"x" * 10 + b"y" * 10, b""]
    assert body == b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)


async def test_http_1_0_is_answered_up_to_the_end_of_the_connection() -> None:
    async with serving() as port:
        for keep in ([], ["Connection: keep-alive"]):
            answer = await tell(port, asking(*keep, start="GET /stream HTTP/1.0"))
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"chunked" not in head
            assert body == b'["GET", "/stream", ""]'


async def test_head_is_answered_without_a_body_and_the_connection_goes_on() -> None:
    wire = asking(start="HEAD / HTTP/1.1") + asking(start="HEAD /stream HTTP/1.1")
    async with serving() as port:
        answer = await tell(port, wire + asking(CLOSE, start="DELETE / HTTP/1.1"))
    assert answers(answer, "HEAD", "HEAD", "DELETE") == [
        (200, b""),
        (200, b""),
        (200, b'["DELETE", "/", ""]'),
    ]


async def test_an_offer_to_upgrade_is_ignored() -> None:
    wire = asking("Upgrade: h2c", "Connection: Upgrade", start="GET / HTTP/1.1")
    async with serving() as port:
        answer = await tell(port, wire + asking(CLOSE, start="GET /2 HTTP/1.1"))
    assert [status for status, _ in answers(answer, "GET", "GET")] == [200, 200]


async def test_the_path_of_an_absolute_target_is_its_own() -> None:
    start = "GET http://localhost:1/a/b?c HTTP/1.1"
    async with serving() as port:
        assert b'"/a/b"' in await tell(port, asking(CLOSE, start=start))


async def test_a_client_that_waits_for_leave_gets_it() -> None:
    async with serving() as port, await trio.open_tcp_stream("127.0.0.1", port) as stream:
        with trio.fail_after(PATIENT_S):
            await stream.send_all(asking("Expect: 100-continue", "Content-Length: 2", CLOSE))
            assert await stream.receive_some() == b"HTTP/1.1 100 Continue\r\n\r\n"
            await stream.send_all(b"hi")
            assert (await to_the_end(stream)).endswith(b'["POST", "/mcp", "hi"]')


async def test_headers_that_came_twice_are_joined() -> None:
    async def tell_accept(request: Request, responder: Responder) -> None:
        await responder.respond(200, (), request.headers["accept"].encode())

    async with serving(tell_accept) as port:
        answer = await tell(port, asking("Accept: a", "ACCEPT: b", CLOSE))
    assert answers(answer, "POST") == [(200, b"a, b")]


# -- responses


async def test_the_head_and_what_comes_first_are_one_write() -> None:
    async def start(responder: Responder) -> None:
        await responder.start(200, [("Content-Type", "text/plain")], b"first")
        await responder.gone()

    async with talking(start) as stream:
        found = bytes(await stream.receive_some())
    assert found.startswith(b"HTTP/1.1 200 OK\r\n")
    assert found.endswith(b"\r\n\r\n5\r\nfirst\r\n")


@pytest.mark.parametrize("is_polite", [True, False])
async def test_a_hang_up_is_noticed_at_once(is_polite: bool) -> None:
    noticed = trio.Event()

    async def wait(responder: Responder) -> None:
        await responder.start(200, (), b"first")
        assert responder.is_open()
        await responder.gone()
        assert not responder.is_open()
        with pytest.raises(trio.BrokenResourceError):
            await responder.write(b"more")
        noticed.set()

    async with talking(wait) as stream:
        await stream.receive_some()
        await (stream.send_eof() if is_polite else stream.aclose())
        await noticed.wait()


async def test_a_hang_up_is_seen_by_who_only_asks() -> None:
    gone, noticed = trio.Event(), trio.Event()

    async def ask(responder: Responder) -> None:
        await responder.start(200, (), b"first")
        assert responder.is_open()
        await gone.wait()
        while responder.is_open():
            await trio.lowlevel.checkpoint()
        noticed.set()

    async with talking(ask) as stream:
        await stream.receive_some()
        await stream.send_eof()
        gone.set()
        await noticed.wait()


async def write_without_end(responder: Responder) -> None:
    await responder.start(200, (), b"")
    while True:
        await responder.write(b"x" * 65536)


async def test_a_hang_up_ends_a_stalled_write() -> None:
    ended = trio.Event()

    async def stall(responder: Responder) -> None:
        with pytest.raises(trio.BrokenResourceError):
            await write_without_end(responder)
        ended.set()

    async with talking(stall) as stream:
        await trio.testing.wait_all_tasks_blocked(0.1)
        await stream.send_eof()
        await ended.wait()


async def test_a_stalled_reader_is_bounded_and_does_not_hold_up_the_end() -> None:
    written: list[int] = []
    unsent: list[int | None] = []

    async def stall(responder: Responder) -> None:
        await responder.start(200, (), b"")
        while True:
            await responder.write(b"x" * 65536)
            written.append(65536)
            unsent.append(responder.unsent_bytes())

    async with talking(stall):
        while not written:
            await trio.testing.wait_all_tasks_blocked(0.1)
        before = -1
        while before != len(written):
            before = len(written)
            await trio.testing.wait_all_tasks_blocked(0.1)
        assert any(unsent)
    # Only as much as two kernels take. Leaving the block did not wait for the peer.
    assert sum(written) < 64 * 1024 * 1024


async def test_a_flood_during_a_response_is_not_kept() -> None:
    async def wait(responder: Responder) -> None:
        await responder.start(200, (), b"first")
        await responder.gone()

    async with talking(wait) as stream:
        await stream.receive_some()
        taken = trio.Event()

        async def flood() -> None:
            await stream.send_all(b"x" * 64 * 1024 * 1024)
            taken.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            await trio.testing.wait_all_tasks_blocked(0.1)
            assert not taken.is_set()
            nursery.cancel_scope.cancel()


async def test_a_cancelled_write_closes_the_connection() -> None:
    given_up = trio.Event()

    async def give_up(responder: Responder) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(write_without_end, responder)
                await trio.testing.wait_all_tasks_blocked(0.1)
                scope.cancel()
        assert not responder.is_open()
        given_up.set()

    async with talking(give_up) as stream:
        await given_up.wait()
        with contextlib.suppress(trio.BrokenResourceError):
            assert not (await to_the_end(stream)).endswith(b"0\r\n\r\n")


async def test_a_response_that_is_left_is_finished() -> None:
    async def leave(responder: Responder) -> None:
        await responder.start(200, [("Connection", "close")], b"all")

    async with talking(leave) as stream:
        assert answers(await to_the_end(stream), "POST") == [(200, b"all")]


async def fail(responder: Responder) -> None:
    raise ValueError("on purpose")


async def say_nothing(responder: Responder) -> None:
    await trio.lowlevel.checkpoint()


async def split_a_header(responder: Responder) -> None:
    await responder.respond(200, [("X", "a\r\nY: b")])


@pytest.mark.parametrize("talk", [fail, say_nothing, split_a_header])
async def test_an_endpoint_that_fails_is_a_500_and_a_line_in_the_log(talk: Talk) -> None:
    with capture_logs() as logs:
        async with talking(talk) as stream:
            status, error = refused(await to_the_end(stream))
    assert (status, error["code"]) == (500, -32603)
    assert [line["event"] for line in logs] == ["http.endpoint_failed"]


async def test_half_a_response_does_not_look_whole_and_others_go_on() -> None:
    async def endpoint(request: Request, responder: Responder) -> None:
        if request.path == "/fine":
            await echo(request, responder)
            return
        await responder.start(200, (), b"half")
        raise ValueError("on purpose")

    with capture_logs() as logs:
        async with serving(endpoint) as port:
            with contextlib.suppress(trio.BrokenResourceError):
                assert not (await tell(port, asking())).endswith(b"0\r\n\r\n")
            assert b" 200 " in await tell(port, asking(CLOSE, start="GET /fine HTTP/1.1"))
    assert [line["event"] for line in logs] == ["http.endpoint_failed"]


async def test_the_end_of_serve_is_the_end_of_every_connection() -> None:
    async with serving() as port:
        idle = await trio.open_tcp_stream("127.0.0.1", port)
        await idle.send_all(asking())
        await idle.receive_some()
    with trio.fail_after(PATIENT_S):
        assert await to_the_end(idle) == b""
    await idle.aclose()


# -- addresses and TLS


@pytest.mark.parametrize("host", ["::1", "localhost"])
async def test_every_address_of_a_host_is_served(host: str) -> None:
    async with serving(host=host) as port:
        assert b" 200 " in await tell(port, asking(CLOSE, host=f"[::1]:{port}"), host=host)


async def test_tls_is_spoken_to_its_end() -> None:
    authority = trustme.CA()
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(theirs)
    ours = ssl.create_default_context()
    authority.configure_trust(ours)
    body = b"x" * LIMIT
    async with serving(ssl_context=theirs) as port:
        tcp = await trio.open_tcp_stream("127.0.0.1", port)
        async with trio.SSLStream(tcp, ours, server_hostname="localhost") as stream:
            with trio.fail_after(PATIENT_S):
                await stream.send_all(asking(f"Content-Length: {LIMIT}", body=body))
                await stream.receive_some(1)
                # Not https_compatible: a connection cut without TLS's farewell would be an error.
                await stream.send_all(asking(start="GET /stream HTTP/1.0"))
                assert (await to_the_end(stream)).endswith(b'["GET", "/stream", ""]')
        with contextlib.suppress(trio.BrokenResourceError):  # TLS may end it with a reset
            assert not (await tell(port, asking())).startswith(b"HTTP")


async def test_a_tls_handshake_that_does_not_come_is_not_waited_for(
    mock_clock: trio.testing.MockClock,
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    secured = serving(ssl_context=context)
    async with secured as port, await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await trio.testing.wait_all_tasks_blocked(0.05)
        mock_clock.jump(HANDSHAKE_S)
        assert await to_the_end(stream) == b""
