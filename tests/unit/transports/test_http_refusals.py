"""The refusals of the HTTP listener."""

import pytest
import trio
import trio.testing

from streams.exchange import Request, Responder
from tests.rigs.bare_http import (
    CHUNKED,
    CLOSE,
    LIMIT,
    PATIENT_S,
    answers,
    asking,
    refused,
    serving,
    tell,
    to_the_end,
)
from transports.http.requests import EVENTS_MAX, HEAD_BYTES_MAX, HEADERS_MAX, Phase, Requests
from transports.http.waits import PATIENCE_S
from transports.net.origins import Origins


@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (b"GET /\r\n\r\n", 400),  # HTTP/0.9
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS
        (b"\x00\xff garbage\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (asking(host=""), 400),
        (asking(host="", start="GET / HTTP/1.0"), 403),
        (asking("Host: localhost"), 400),
        (asking(host="evil.example"), 403),
        (asking("Origin: https://evil.example"), 403),
        (asking("Origin: http://localhost", "Origin: https://evil.example"), 403),
        (asking(start="GET http://evil.example/ HTTP/1.1"), 403),
        (asking(start="CONNECT localhost:1 HTTP/1.1"), 400),
        (asking(start="GET nowhere HTTP/1.1"), 400),
        (asking("Content-Length: -1"), 400),
        (asking("Content-Length: 1, 2"), 400),
        (asking("Content-Length: 1", "Content-Length: 2"), 400),
        (asking("Content-Length: 0x10"), 400),
        (asking("Content-Length: " + "9" * 30), 400),
        (asking("Content-Length: 5", CHUNKED), 400),
        (asking(CHUNKED, start="POST / HTTP/1.0"), 400),
        (asking(CHUNKED, CHUNKED), 501),
        (asking("Transfer-Encoding: gzip, chunked"), 501),
        (asking(CHUNKED, body=b"zz\r\n"), 400),
        (asking(CHUNKED, body=b"2\r\nhello\r\n"), 400),
        (asking("X: " + "x" * HEAD_BYTES_MAX), 431),
        (asking("X: " + "x" * 1_000_000), 431),
        (asking(*["X: y"] * HEADERS_MAX), 431),
        (asking(CHUNKED, body=b"0\r\nX: " + b"x" * 1_000_000), 431),
        (asking(CHUNKED, body=b"1\r\nx\r\n" * LIMIT), 400),
    ],
)
async def test_a_refusal_is_a_json_rpc_error_and_the_end_of_the_connection(
    wire: bytes, status: int
) -> None:
    async with serving() as port:
        found, error = refused(await tell(port, wire))
    assert found == status
    assert error["code"] == -32600


@pytest.mark.parametrize(
    "wire",
    [
        asking("Content-Length: " + "9" * 20),
        asking(f"Content-Length: {LIMIT + 3}"),
        asking(f"Content-Length: {LIMIT * 10}", body=b"x" * LIMIT * 10),
        asking(f"Content-Length: {LIMIT + 1}", body=b"x" * (LIMIT + 1)),
        asking("Expect: 100-continue", f"Content-Length: {LIMIT * 10}"),
        asking(CHUNKED, body=b"10000\r\n" + b"x" * 0x10000 + b"\r\n10000\r\n" + b"x" * 0x10000),
    ],
)
async def test_an_oversize_body_is_refused_with_the_limit(wire: bytes) -> None:
    async with serving() as port:
        status, error = refused(await tell(port, wire))
    assert status == 413
    assert error["data"] == {"reason": "too_large", "limit": LIMIT}


async def test_a_message_of_exactly_the_limit_gets_through_with_its_newline() -> None:
    body = b"x" * LIMIT + b"\r\n"
    async with serving() as port:
        answer = await tell(port, asking(f"Content-Length: {len(body)}", CLOSE, body=body))
    assert answers(answer, "POST")[0][0] == 200


async def test_what_was_answered_before_a_refusal_stands() -> None:
    async with serving() as port:
        answer = await tell(port, asking() + b"nonsense\r\n\r\n")
    second = answer.index(b"HTTP/1.1 400 ")
    assert answers(answer[:second], "POST")[0][0] == 200
    assert refused(answer[second:])[0] == 400


@pytest.mark.parametrize(
    "wire", [b"POST /mcp HT", asking("Content-Length: 9", body=b"half"), asking(CHUNKED, body=b"9")]
)
async def test_half_a_request_is_told_so(wire: bytes) -> None:
    async with serving() as port, await trio.open_tcp_stream("127.0.0.1", port) as stream:
        with trio.fail_after(PATIENT_S):
            await stream.send_all(wire)
            await stream.send_eof()
            assert refused(await to_the_end(stream))[0] == 408


@pytest.mark.parametrize(
    ("wire", "phase", "answer"),
    [
        (b"", Phase.HEAD, b""),
        (b"POST /mcp HT", Phase.HEAD, b"HTTP/1.1 408 "),
        (asking("Content-Length: 9", body=b"half"), Phase.BODY, b"HTTP/1.1 408 "),
        (asking(), Phase.NOTHING, b"HTTP/1.1 200 "),
    ],
)
async def test_nothing_is_waited_for_for_ever(
    wire: bytes, phase: Phase, answer: bytes, mock_clock: trio.testing.MockClock
) -> None:
    async with serving() as port, await trio.open_tcp_stream("127.0.0.1", port) as stream:
        if wire:
            await stream.send_all(wire)
        await trio.testing.wait_all_tasks_blocked(0.05)
        mock_clock.jump(PATIENCE_S[phase] - 0.5)
        await trio.testing.wait_all_tasks_blocked(0.05)
        if phase is Phase.NOTHING:
            assert (await stream.receive_some()).startswith(answer)
            answer = b""
        early = None
        with trio.move_on_after(0):
            early = await stream.receive_some()
        assert early is None
        mock_clock.jump(1)
        found = await to_the_end(stream)
    assert found.startswith(answer)
    assert bool(found) == bool(answer)


async def test_one_connection_too_many_is_told_so() -> None:
    limited = serving(connections_max=1)
    async with limited as port, await trio.open_tcp_stream("127.0.0.1", port) as first:
        await first.send_all(asking())
        assert (await first.receive_some()).startswith(b"HTTP/1.1 200 ")
        assert refused(await tell(port))[0] == 503
        await first.send_all(asking())
        assert (await first.receive_some()).startswith(b"HTTP/1.1 200 ")


async def test_idle_connections_can_give_way_to_new_ones() -> None:
    limited = serving(connections_max=2, gives_way=True)
    async with (
        limited as port,
        await trio.open_tcp_stream("127.0.0.1", port) as longest,
        await trio.open_tcp_stream("127.0.0.1", port) as second,
    ):
        for _ in range(2):
            await second.send_all(asking())
            assert (await second.receive_some()).startswith(b"HTTP/1.1 200 ")
            assert b" 200 " in await tell(port, asking(CLOSE))
        assert await to_the_end(longest) == b""


async def test_a_peer_that_reads_nothing_gives_way_to_new_ones() -> None:
    async def long(request: Request, responder: Responder) -> None:
        await responder.respond(200, (), b"x" * (8 * 1024 * 1024))

    limited = serving(long, connections_max=1, gives_way=True)
    async with limited as port, await trio.open_tcp_stream("127.0.0.1", port) as first:
        await first.send_all(asking())
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert (await tell(port, asking(CLOSE))).startswith(b"HTTP/1.1 200 ")


async def test_a_request_that_is_answered_does_not_give_way() -> None:
    async def stuck(request: Request, responder: Responder) -> None:
        await trio.sleep_forever()

    limited = serving(stuck, connections_max=1, gives_way=True)
    async with limited as port, await trio.open_tcp_stream("127.0.0.1", port) as first:
        await first.send_all(asking())
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert refused(await tell(port))[0] == 503


async def test_allowed_names_are_let_in() -> None:
    fields = ["Origin: https://App.example", CLOSE]
    async with serving(allowed_hosts=["A.example"], allowed_origins=["https://app.example"]) as at:
        assert b" 200 " in await tell(at, asking(*fields, host="a.example:80"))


def test_chunks_of_a_byte_are_looked_at_some_at_a_time() -> None:
    """Others have their turn in between: 20 µs each, and 64 KiB of them come with one read."""
    requests = Requests(Origins(is_loopback=True), 1_000_000)
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    requests.feed(head + b"1\r\nx\r\n" * 5_000)
    pauses = 0
    while requests.next_request(EVENTS_MAX) is None and requests.has_more:
        pauses += 1
    assert pauses >= 5_000 // EVENTS_MAX
    requests.feed(b"0\r\n\r\n")
    request = requests.next_request()
    assert request is not None
    assert request.body == b"x" * 5_000
