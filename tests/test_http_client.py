"""Streamable HTTP from the client's side: lines as POSTs, responses as lines, and every bad end."""

import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
import trustme

from streams import messages
from streams.dialects import POSITION
from streams.errors import Refusal
from streams.messages import Channel, Incoming, TooLarge
from tests.scripted_http import (
    EVENTS,
    JSON,
    NDJSON,
    Asked,
    HttpServer,
    Script,
    accept,
    chunk,
    http_server,
)
from transports import dial, httpclient, httpinbox, httpwire
from transports.httpclient import CANCELLED_S, ORDER_S

LIMIT = 64 * 1024
HELLO = messages.request(0, "initialize", {"protocolVersion": "2025-11-25"})
WELCOME = messages.result(0, {"protocolVersion": "2025-06-18", "capabilities": {}})


@asynccontextmanager
async def connected(
    script: Script = accept, *, limit: int = LIMIT
) -> AsyncIterator[tuple[HttpServer, Channel]]:
    with trio.fail_after(100):  # only if something hangs
        async with (
            http_server(script) as server,
            httpclient.connect(server.url, message_bytes_max=limit) as channel,
        ):
            yield server, channel


def call(request_id: int | str) -> bytes:
    return messages.request(request_id, "tools/call", {})


def answer(request_id: int | str) -> bytes:
    return messages.result(request_id, {})


def cancelling(request_id: int | str) -> bytes:
    return messages.notification("notifications/cancelled", {"requestId": request_id})


def header(count: int, stream: str) -> bytes:
    return messages.notification(POSITION, {"streamId": stream, "seq": 1, "count": count})


async def receive(channel: Channel, count: int) -> list[Incoming]:
    received: list[Incoming] = []
    while len(received) < count:
        received += await channel.receive()
    return received


async def receive_all(channel: Channel) -> list[Incoming]:
    received: list[Incoming] = []
    with contextlib.suppress(trio.EndOfChannel):
        while True:
            received += await channel.receive()
    return received


async def assert_over(channel: Channel, received: Sequence[Incoming] = ()) -> None:
    assert await receive_all(channel) == list(received)
    assert not channel.is_writable()
    with pytest.raises(trio.BrokenResourceError):
        await channel.send(b"{}\n")


async def assert_alive(channel: Channel) -> None:
    """It still carries lines, in a POST of their own, whatever the server answers."""
    assert channel.is_writable()
    await channel.send(messages.notification("still/here"))
    assert channel.is_writable()


def answering(body: bytes, kind: str = NDJSON, status: str = "200 OK") -> Script:
    """Answer calls with `body`, everything else with 202."""

    async def script(asked: Asked) -> None:
        if b"tools/call" in asked.body:
            await asked.respond(status, body, kind)
        else:
            await asked.respond()

    return script


# -- what is sent


async def test_each_line_is_a_post_in_order_that_says_what_may_be_answered() -> None:
    lines = [messages.notification(f"n{n}") for n in range(50)]
    async with connected() as (server, channel):
        await channel.send(b"".join(lines[:40]))
        await channel.send(b"".join(lines[40:]))
        assert server.posted == [line.rstrip() for line in lines]
        asked = server.asked[0]
        assert asked.target == "/mcp"
        assert asked.headers["host"] == server.url.removeprefix("http://")
        assert asked.headers["accept"] == f"{NDJSON}, {JSON}, {EVENTS}"
        assert asked.headers["content-type"] == JSON
        assert "mcp-session-id" not in asked.headers
        assert "mcp-protocol-version" not in asked.headers


async def test_connections_are_used_again_the_first_one_too() -> None:
    async with connected() as (server, channel):
        for _ in range(20):
            await channel.send(b"{}\n")
        assert server.connections == 1


async def test_the_session_and_the_version_are_told_from_then_on() -> None:
    async def script(asked: Asked) -> None:
        if b"initialize" in asked.body:
            await asked.start(extra="Mcp-Session-Id: abc\r\n")
            await asked.write(WELCOME)
            await asked.finish()
        else:
            await asked.respond()

    async with connected(script) as (server, channel):
        await channel.send(HELLO + b"{}\n")
        assert await receive(channel, 1) == [WELCOME.rstrip()]
    hello, later, farewell = server.asked
    assert "mcp-session-id" not in hello.headers
    assert "mcp-protocol-version" not in hello.headers
    for asked in (later, farewell):
        assert asked.headers["mcp-session-id"] == "abc"
        assert asked.headers["mcp-protocol-version"] == "2025-06-18"
    assert farewell.method == "DELETE"


async def test_the_next_line_waits_until_the_response_to_the_one_before_begins() -> None:
    may_begin = trio.Event()

    async def script(asked: Asked) -> None:
        if asked.body == call(1).rstrip():
            await may_begin.wait()
            await asked.start()
        else:
            await asked.respond()

    async with connected(script) as (server, channel), trio.open_nursery() as nursery:
        nursery.start_soon(channel.send, call(1) + b"{}\n")
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert server.posted == [call(1).rstrip()]
        may_begin.set()
        await wait_until(lambda: len(server.posted) == 2)


async def test_a_server_that_answers_only_when_it_is_done_does_not_hold_up_the_others(
    mock_clock: trio.testing.MockClock,
) -> None:
    done = trio.Event()

    async def script(asked: Asked) -> None:
        if asked.body == call(1).rstrip():
            await done.wait()
            await asked.respond("200 OK", answer(1))
        else:
            await asked.respond()

    async with connected(script) as (server, channel), trio.open_nursery() as nursery:
        nursery.start_soon(channel.send, call(1) + b"{}\n")
        await wait_until(lambda: len(server.posted) == 1)
        await trio.testing.wait_all_tasks_blocked(0.05)
        mock_clock.jump(ORDER_S + 0.1)
        await wait_until(lambda: len(server.posted) == 2)
        done.set()
        assert await receive(channel, 1) == [answer(1).rstrip()]


async def test_a_cancelled_send_ends_the_channel() -> None:
    async def script(asked: Asked) -> None:
        await trio.sleep_forever()

    async with connected(script) as (server, channel):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(channel.send, call(1))
            await wait_until(lambda: bool(server.posted))
            nursery.cancel_scope.cancel()
        await assert_over(channel)


async def wait_until(is_so: Any) -> None:
    while not is_so():
        await trio.testing.wait_all_tasks_blocked()


# -- what is received


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (NDJSON, b'\n{"jsonrpc":"2.0","method":"a"}\n\n{"jsonrpc":"2.0","id":1,"result":{}}\n\n'),
        (
            EVENTS,
            b'id: 0\ndata:\n\nevent: message\ndata: {"jsonrpc":"2.0",\ndata: "method":"a"}\n\n'
            b'data: {"jsonrpc":"2.0","id":1,"result":{}}\n\n',
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_messages_come_as_the_server_likes_to_frame_them(
    kind: str, body: bytes, size: int
) -> None:
    async def script(asked: Asked) -> None:
        await asked.start(kind)
        for at in range(0, len(body), size):
            await asked.write(body[at : at + size])
        await asked.finish()

    async with connected(script) as (_, channel):
        await channel.send(call(1))
        expected = [b'{"jsonrpc":"2.0","method":"a"}', b'{"jsonrpc":"2.0","id":1,"result":{}}']
        assert await receive(channel, 2) == expected
        await assert_alive(channel)


async def test_a_plain_json_answer_is_one_line() -> None:
    pretty = b'{\n  "jsonrpc": "2.0",\n  "id": 1,\n  "result": {}\n}\n'
    async with connected(answering(pretty, JSON)) as (_, channel):
        await channel.send(call(1))
        assert await receive(channel, 1) == [b'{"jsonrpc":"2.0","id":1,"result":{}}']
        await assert_alive(channel)


@pytest.mark.parametrize("kind", [NDJSON, JSON, EVENTS])
async def test_a_message_above_the_limit_is_too_large_and_ends_nothing(kind: str) -> None:
    line = messages.result(1, "x" * LIMIT)
    body = b"data: " + line + b"\n" if kind == EVENTS else line
    async with connected(answering(body, kind)) as (_, channel):
        await channel.send(call(1))
        assert await receive(channel, 1) == [TooLarge(LIMIT)]
        await assert_alive(channel)


async def test_runs_of_two_bodies_that_come_byte_by_byte_are_never_mixed() -> None:
    bodies = {
        b"1": b"".join(header(3, "1") + b'{"of":1}\n' * 3 for _ in range(20)) + answer(1),
        b"2": b"".join(header(5, "2") + b'{"of":2}\n' * 5 for _ in range(20)) + answer(2),
    }
    both = trio.Event()
    turns = {b"1": trio.Event(), b"2": trio.Event()}

    async def script(asked: Asked) -> None:
        mine, other = (b"1", b"2") if asked.body == call(1).rstrip() else (b"2", b"1")
        await asked.start()
        if mine == b"2":
            both.set()
            turns[b"1"].set()
        await both.wait()
        for byte in bodies[mine]:
            await turns[mine].wait()
            turns[mine] = trio.Event()
            await asked.write(bytes([byte]))
            turns[other].set()
        turns[other].set()
        turns[other].set = lambda: None  # type: ignore[method-assign]
        await asked.finish()

    async with connected(script) as (_, channel):
        await channel.send(call(1) + call(2))
        received = await receive(channel, 20 * 4 + 20 * 6 + 2)
    whole = [line.splitlines() for line in (header(3, "1") + b'{"of":1}\n' * 3,)]
    whole += [(header(5, "2") + b'{"of":2}\n' * 5).splitlines()]
    runs = {run[0]: run for run in whole}
    at = 0
    while at < len(received):
        line = received[at]
        assert isinstance(line, bytes)
        run = runs.get(line, [line])
        assert received[at : at + len(run)] == run
        assert line in runs or line in (answer(1).rstrip(), answer(2).rstrip())
        at += len(run)


async def test_1_000_calls_run_at_once() -> None:
    all_here = trio.Event()

    async def script(asked: Asked) -> None:
        if b"tools/call" not in asked.body:
            await asked.respond()
            return
        await asked.start()
        await all_here.wait()
        request_id = messages.parse(asked.body).id
        assert isinstance(request_id, int)
        await asked.write(header(2, "s") + b'{"n":1}\n{"n":2}\n' + answer(request_id))
        await asked.finish()

    async with connected(script) as (server, channel):
        await channel.send(b"".join(call(n) for n in range(1000)))
        assert len(server.posted) == 1000
        await assert_alive(channel)
        all_here.set()
        received = await receive(channel, 4000)
        assert sorted(set(received)) == sorted(  # type: ignore[type-var]
            {header(2, "s").rstrip(), b'{"n":1}', b'{"n":2}'}
            | {answer(n).rstrip() for n in range(1000)}
        )


async def test_nobody_receives_so_the_server_must_wait() -> None:
    written = 0
    line = messages.notification("x", "x" * 1000)

    async def script(asked: Asked) -> None:
        nonlocal written
        await asked.start()
        for _ in range(64):
            await asked.write(line * 1000)
            written += 1000
        await asked.write(answer(1))
        await asked.finish()

    async with connected(script) as (_, channel):
        await channel.send(call(1))
        before = -1
        while before != written:
            before = written
            await trio.testing.wait_all_tasks_blocked(0.1)
        assert written < 64_000
        # Sent and answered all the same: nobody but the body waits.
        lines = await receive(channel, 64_001)
        assert lines == [line.rstrip()] * 64_000 + [answer(1).rstrip()]


async def test_what_waits_to_be_received_is_bounded() -> None:
    inbox = httpinbox.Inbox()
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(inbox.put, [b"x"], httpinbox.INBOX_BYTES_MAX // 2)
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 18
        assert await inbox.take() == [b"x"]
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 17
        inbox.end("over", [b"last"])
    assert [await inbox.take() for _ in range(3)] == [[b"x"], [b"x"], [b"last"]]
    with pytest.raises(trio.EndOfChannel, match="over"):
        await inbox.take()


# -- refusals


async def test_an_error_status_is_the_answer_to_the_request_it_refuses() -> None:
    refused = messages.error(None, Refusal(-32600, "No.", {"reason": "x"}))
    async with connected(answering(refused, JSON, "400 Bad Request")) as (_, channel):
        await channel.send(call("1"))
        expected = messages.error("1", Refusal(-32600, "No.", {"reason": "x"}))
        assert await receive(channel, 1) == [expected.rstrip()]
        await assert_alive(channel)


@pytest.mark.parametrize("status", ["202 Accepted", "200 OK", "302 Found", "429 Slow Down"])
async def test_what_is_no_answer_fails_the_request_with_a_sentence(status: str) -> None:
    async with connected(answering(b"", "text/html", status)) as (_, channel):
        await channel.send(call(1))
        (line,) = await receive(channel, 1)
        assert isinstance(line, bytes)
        assert line.startswith(b'{"jsonrpc":"2.0","id":1,"error":{"code":-32603,')
        assert f"HTTP {status}".encode() in line
        await assert_alive(channel)


async def test_a_refused_notification_is_told_to_nobody_in_particular() -> None:
    async def script(asked: Asked) -> None:
        await asked.respond("400 Bad Request", b"what?", "text/plain")

    async with connected(script) as (_, channel):
        await channel.send(b"{}\n")
        (line,) = await receive(channel, 1)
        assert isinstance(line, bytes)
        assert line.startswith(b'{"jsonrpc":"2.0","id":null,"error":')
        assert channel.is_writable()


@pytest.mark.parametrize("status", ["404 Not Found", "503 Service Unavailable"])
async def test_a_session_that_is_gone_or_a_server_that_fails_ends_the_channel(status: str) -> None:
    async def script(asked: Asked) -> None:
        if b"initialize" in asked.body:
            await asked.respond("200 OK", WELCOME, extra="Mcp-Session-Id: abc\r\n")
        else:
            await asked.respond(status, messages.error(None, Refusal(-32600, "No.")))

    async with connected(script) as (server, channel):
        await channel.send(HELLO)
        await receive(channel, 1)
        with pytest.raises(trio.BrokenResourceError):
            await channel.send(call(1))
        await assert_over(channel)
    assert [asked.method for asked in server.asked] == ["POST", "POST"]


@pytest.mark.parametrize("status", ["404 Not Found", "502 Bad Gateway"])
async def test_who_says_hello_is_told_why_not(status: str) -> None:
    async def script(asked: Asked) -> None:
        await asked.respond(status)

    async with connected(script) as (_, channel):
        with contextlib.suppress(trio.BrokenResourceError):  # after a 502
            await channel.send(HELLO)
        (line,) = await receive(channel, 1)
        assert isinstance(line, bytes)
        assert f"HTTP {status}".encode() in line


# -- bad ends


async def test_a_cut_at_any_byte_loses_no_whole_message_and_adds_no_half_one() -> None:
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n"
    )
    lines = [header(2, "s"), b'{"n":1}\n', b'{"n":2}\n', answer(1)]
    response = head + b"\r\n" + b"".join(map(chunk, lines)) + b"0\r\n\r\n"
    ends = [response.index(chunk(line)) + len(chunk(line)) - len(b"\r\n") for line in lines]
    length = 0

    async def script(asked: Asked) -> None:
        await asked.stream.send_all(response[:length])
        await asked.cut()

    with trio.fail_after(100):
        async with http_server(script) as server:
            for length in range(len(response)):
                async with httpclient.connect(server.url) as channel:
                    with contextlib.suppress(trio.BrokenResourceError):
                        await channel.send(call(1))
                    whole = sum(end <= length for end in ends)
                    await assert_over(channel, [line.rstrip() for line in lines[:whole]])


async def test_a_body_that_ends_without_the_response_ends_the_channel() -> None:
    async with connected(answering(b'{"n":1}\n')) as (_, channel):
        with contextlib.suppress(trio.BrokenResourceError):
            await channel.send(call(1))
        await assert_over(channel, [b'{"n":1}'])


@pytest.mark.parametrize("line", [messages.notification("n"), answer(1)])
async def test_a_body_for_what_needs_no_response_just_ends(line: bytes) -> None:
    async def script(asked: Asked) -> None:
        await asked.respond("200 OK", b'{"n":1}\n', NDJSON)

    async with connected(script) as (_, channel):
        await channel.send(line)
        assert await receive(channel, 1) == [b'{"n":1}']
        await assert_alive(channel)


async def test_a_run_that_the_body_does_not_finish_comes_last() -> None:
    async with connected(answering(header(3, "s") + b'{"n":1}\n')) as (_, channel):
        with contextlib.suppress(trio.BrokenResourceError):
            await channel.send(call(1))
        await assert_over(channel, [header(3, "s").rstrip(), b'{"n":1}'])


@pytest.mark.parametrize("response", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Le"])
async def test_a_server_that_does_not_answer_in_http_ends_the_channel(response: bytes) -> None:
    async def script(asked: Asked) -> None:
        await asked.stream.send_all(response)
        await asked.cut()

    async with connected(script) as (_, channel):
        with pytest.raises(trio.BrokenResourceError):
            await channel.send(b"{}\n")
        await assert_over(channel)


async def test_a_server_that_is_there_no_longer_ends_the_channel() -> None:
    async with http_server() as server:
        channel_of = httpclient.connect(server.url)
        channel = await channel_of.__aenter__()
        await channel.send(b"{}\n")
    with pytest.raises(trio.BrokenResourceError):
        await channel.send(b"{}\n")
    await assert_over(channel)
    await channel_of.__aexit__(None, None, None)


async def test_a_connection_that_the_server_closed_while_idle_is_not_used_again() -> None:
    async def script(asked: Asked) -> None:
        await asked.respond()
        await asked.cut()

    async with connected(script) as (server, channel):
        for _ in range(5):
            await channel.send(b"{}\n")
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert server.connections == 5


async def test_a_connection_that_was_idle_for_long_is_not_used_again(
    mock_clock: trio.testing.MockClock,
) -> None:
    async with connected() as (server, channel):
        await channel.send(b"{}\n")
        mock_clock.jump(httpwire.IDLE_S)
        await channel.send(b"{}\n")
        assert server.connections == 2


# -- cancelled requests


async def test_no_response_need_come_to_what_was_cancelled() -> None:
    cancelled = trio.Event()

    async def script(asked: Asked) -> None:
        if b"tools/call" in asked.body:
            await asked.start()
            await cancelled.wait()
            await asked.write(b'{"last":1}\n')
            await asked.finish()
        else:
            cancelled.set()
            await asked.respond()

    async with connected(script) as (_, channel):
        await channel.send(call("a"))
        await channel.send(cancelling("a"))
        # The cancelled call's last line is here before anything that is asked afterwards.
        assert await receive(channel, 1) == [b'{"last":1}']
        await assert_alive(channel)


async def test_a_cancelled_request_that_does_not_end_is_hung_up(
    mock_clock: trio.testing.MockClock,
) -> None:
    hung_up = trio.Event()

    async def script(asked: Asked) -> None:
        if b"tools/call" in asked.body:
            await asked.start()
            assert await asked.stream.receive_some() == b""  # type: ignore[attr-defined]
            hung_up.set()
        else:
            await asked.respond()

    async with connected(script) as (server, channel):
        await channel.send(call(1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(channel.send, cancelling(1))
            await wait_until(lambda: len(server.posted) == 2)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not hung_up.is_set()
            mock_clock.jump(CANCELLED_S)
        await hung_up.wait()
        await assert_alive(channel)


# -- connecting and closing


async def test_nobody_answers_is_an_oserror() -> None:
    async with http_server() as server:
        url = server.url
    with pytest.raises(OSError, match="attempts to connect"):
        async with httpclient.connect(url):
            pass


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_https_is_spoken_with_whom_the_context_trusts(*, is_trusted: bool) -> None:
    ca = trustme.CA()
    ours, theirs = ssl.create_default_context(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("localhost").configure_cert(theirs)
    if is_trusted:
        ca.configure_trust(ours)
    async with http_server(answering(answer(1)), theirs) as server:
        if not is_trusted:
            with pytest.raises(OSError, match="certificate verify failed"):
                async with httpclient.connect(server.url, ssl_context=ours):
                    pass
            return
        async with httpclient.connect(server.url, ssl_context=ours) as channel:
            for _ in range(3):
                await channel.send(call(1))
                assert await receive(channel, 1) == [answer(1).rstrip()]


async def test_closing_ends_everything_even_if_the_server_does_not_care(
    mock_clock: trio.testing.MockClock,
) -> None:
    async def script(asked: Asked) -> None:
        if asked.method == "DELETE":
            await trio.sleep_forever()
        elif b"initialize" in asked.body:
            await asked.respond("200 OK", WELCOME, extra="Mcp-Session-Id: abc\r\n")
        else:
            await asked.start()
            await asked.write(b'{"n":1}\n')

    async with connected(script) as (server, channel), trio.open_nursery() as nursery:
        await channel.send(HELLO + call(1))
        await receive(channel, 2)
        nursery.start_soon(assert_over, channel)
        nursery.start_soon(channel.aclose)
        await wait_until(lambda: server.asked[-1].method == "DELETE")
        await trio.testing.wait_all_tasks_blocked(0.05)
        mock_clock.jump(1)


async def test_a_cancelled_user_ends_the_session_too() -> None:
    async def script(asked: Asked) -> None:
        if b"initialize" in asked.body:
            await asked.respond("200 OK", WELCOME, extra="Mcp-Session-Id: abc\r\n")
        else:
            await asked.respond("204 No Content")

    async with http_server(script) as server:
        with trio.CancelScope() as scope:
            async with httpclient.connect(server.url) as channel:
                await channel.send(HELLO)
                scope.cancel()
                await receive(channel, 2)
        assert scope.cancelled_caught
        assert server.asked[-1].method == "DELETE"


async def test_what_a_user_raises_comes_out_as_it_is() -> None:
    async with http_server() as server:
        with pytest.raises(ZeroDivisionError):
            async with httpclient.connect(server.url):
                raise ZeroDivisionError


async def test_http_has_no_ping_and_nobody_knows_what_is_unsent() -> None:
    async with connected() as (server, channel):
        assert await channel.ping() is False
        assert channel.unsent_bytes() is None
        assert channel.principal == f"server({server.url.removeprefix('http://')})"


@pytest.mark.parametrize(
    ("path", "target"), [("", "/mcp"), ("/", "/"), ("/a/b?c=d", "/a/b?c=d"), ("?c=d", "/mcp?c=d")]
)
async def test_dial_knows_http_and_the_usual_path(path: str, target: str) -> None:
    async with http_server() as server, dial(server.url + path)() as channel:
        await channel.send(b"{}\n")
        assert server.asked[0].target == target


@pytest.mark.parametrize(
    "url", ["http://", "https:///mcp", "http://a:b@host/", "http://host/a b", "http://host:x/"]
)
def test_what_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        dial(url)
