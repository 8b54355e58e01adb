"""Streamable HTTP from the client's side: lines as POSTs, responses as lines, and refusals."""

import contextlib
import itertools

import pytest
import trio
import trio.testing

from streams import messages
from streams.errors import INTERNAL_ERROR, Refusal
from streams.messages import TooLarge
from tests.rigs.http_lines import (
    HELLO,
    LIMIT,
    WELCOME,
    answer,
    answering,
    assert_alive,
    assert_over,
    call,
    connected,
    header,
    receive,
    wait_until,
)
from tests.rigs.scripted_http import EVENTS, JSON, NDJSON, Asked
from transports.http import client as httpclient
from transports.http.client import ORDER_S

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
        assert await receive(channel, 1) == [TooLarge(LIMIT, None if kind == NDJSON else 1)]
        await assert_alive(channel)


@pytest.mark.parametrize("length", ["", "Content-Length: 9999999999999999999\r\n"])
@pytest.mark.parametrize("unit", [b"[", b" "])
async def test_a_json_answer_without_an_end_is_too_large_and_its_connection_closed(
    length: str, unit: bytes
) -> None:
    was_closed = trio.Event()

    async def script(asked: Asked) -> None:
        if b"tools/call" not in asked.body:
            await asked.respond()
            return
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {JSON}\r\n{length}\r\n"
        await asked.stream.send_all(head.encode())
        try:
            while True:
                await asked.stream.send_all(unit * 10_000)
        except trio.BrokenResourceError:
            was_closed.set()

    async with connected(script) as (_, channel):
        await channel.send(call(1))
        assert await receive(channel, 1) == [TooLarge(LIMIT, 1)]
        await was_closed.wait()
        await assert_alive(channel)


async def test_runs_of_two_bodies_that_come_byte_by_byte_are_never_mixed() -> None:
    runs = {1: header(3, "1") + b'{"of":1}\n' * 3, 2: header(5, "2") + b'{"of":2}\n' * 5}
    bodies = {n: runs[n] * 20 + answer(n) for n in runs}
    first: list[Asked] = []

    async def script(asked: Asked) -> None:
        await asked.start()
        if not first:
            first.append(asked)
            return
        for one, other in itertools.zip_longest(bodies[1], bodies[2]):
            if one is not None:
                await first[0].write(bytes([one]))
            if other is not None:
                await asked.write(bytes([other]))
        await first[0].finish()
        await asked.finish()

    async with connected(script) as (_, channel):
        await channel.send(call(1) + call(2))
        received = await receive(channel, 20 * 4 + 20 * 6 + 2)
    wholes = [whole.splitlines() for whole in (*runs.values(), answer(1), answer(2))]
    found: list[list[bytes]] = []
    while received:
        whole = next(whole for whole in wholes if whole[0] == received[0])
        assert received[: len(whole)] == whole
        found.append(whole)
        del received[: len(whole)]
    assert [found.count(whole) for whole in wholes] == [20, 20, 1, 1]
    assert found[:40] != sorted(found[:40])  # they did come in turns


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
    inbox = httpclient.ReceiveBuffer()
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(inbox.put, [b"x"], httpclient.RECEIVE_BYTES_MAX // 2)
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


@pytest.mark.parametrize("status", [408, 425, 429])
async def test_a_line_without_an_answer_that_was_not_processed_is_not_taken_for_sent(
    status: int,
) -> None:
    async def script(asked: Asked) -> None:
        await asked.respond(f"{status} Not Now", b"what?", "text/plain")

    async with connected(script) as (_, channel):
        with pytest.raises(trio.BrokenResourceError, match=f"HTTP {status}"):
            await channel.send(messages.notification("notifications/cancelled", {}))


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
        why = f"The server has refused the session: HTTP {status}."
        untaken = messages.error(1, Refusal(INTERNAL_ERROR, why, {"reason": "untaken"}))
        await assert_over(channel, [untaken.rstrip()] if status.startswith("404") else [])
    assert [asked.method for asked in server.asked] == ["POST", "POST"]


async def test_a_notification_that_a_server_of_ours_puts_off_is_sent_again_and_calls_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store of its journal is away. A new session would find no more of it than this one."""
    monkeypatch.setattr(httpclient, "RETRY_S", 0.0)
    acks = 0
    is_acked = trio.Event()

    async def script(asked: Asked) -> None:
        nonlocal acks
        if b"initialize" in asked.body:
            await asked.respond("200 OK", WELCOME, NDJSON)
            return
        if asked.body == call(1).rstrip():
            await asked.start()
            await asked.write(messages.notification("begun"))
            await is_acked.wait()
            await asked.write(answer(1))
            await asked.finish()
            return
        acks += 1
        await asked.respond("503 Service Unavailable" if acks < 3 else "202 Accepted")
        if acks == 3:
            is_acked.set()

    async with connected(script) as (server, channel):
        await channel.send(HELLO)
        await receive(channel, 1)
        await channel.send(call(1))
        await receive(channel, 1)
        await channel.send(messages.notification("notifications/stream/ack", {"seq": 1}))
        assert await receive(channel, 1) == [answer(1).rstrip()]
        await assert_alive(channel)
    assert len(server.posted) == 6


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
