"""How an HTTP channel ends: connections that break, requests that are cancelled, and closing."""

import contextlib
import ssl

import pytest
import trio
import trio.testing
import trustme

from streams import messages
from tests.rigs.http_lines import (
    HELLO,
    WELCOME,
    answer,
    answering,
    assert_alive,
    assert_over,
    call,
    cancelling,
    connected,
    header,
    receive,
    receive_all,
    wait_until,
)
from tests.rigs.scripted_http import NDJSON, Asked, chunk, http_server
from transports import dial
from transports.http import client, connections
from transports.http.client import CANCELLED_S

# -- bad ends


async def test_a_cut_at_any_byte_loses_no_whole_message_and_adds_no_half_one() -> None:
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n"
    )
    lines = [header(2, "s"), b'{"n":1}\n', b'{"n":2}\n', answer(1)]
    response = head + b"\r\n" + b"".join(map(chunk, lines)) + b"0\r\n\r\n"
    ends = [response.index(chunk(line)) + len(chunk(line)) - len(b"\r\n") for line in lines]

    async def script(asked: Asked) -> None:
        await asked.stream.send_all(response[: int(asked.target.removeprefix("/"))])
        await asked.cut()

    async def cut_at(length: int) -> None:
        async with client.connect(f"{origin}/{length}") as channel:
            with contextlib.suppress(trio.BrokenResourceError):
                await channel.send(call(1))
            whole = sum(end <= length for end in ends)
            await assert_over(channel, [line.rstrip() for line in lines[:whole]])

    with trio.fail_after(100):
        async with http_server(script) as server, trio.open_nursery() as nursery:
            origin = server.url.removesuffix("/mcp")
            for length in range(len(response)):
                nursery.start_soon(cut_at, length)


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
    async with connected() as (server, channel):
        await channel.send(b"{}\n")
        server.stop()
        await trio.testing.wait_all_tasks_blocked(0.01)
        with pytest.raises(trio.BrokenResourceError, match="attempts to connect"):
            await channel.send(b"{}\n")
        await assert_over(channel)


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
        mock_clock.jump(connections.IDLE_S)
        await channel.send(b"{}\n")
        assert server.connections == 2


async def test_a_response_may_take_long_after_an_interim_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.05)

    async def script(asked: Asked) -> None:
        await asked.stream.send_all(b"HTTP/1.1 102 Processing\r\n\r\n")
        await trio.sleep(0.2)
        await asked.respond("200 OK", b'{"jsonrpc":"2.0","id":1,"result":{}}')

    async with connected(script) as (_, channel):
        await channel.send(call(1))
        assert await receive(channel, 1) == [b'{"jsonrpc":"2.0","id":1,"result":{}}']


async def test_interim_responses_without_end_end_the_channel() -> None:
    async def script(asked: Asked) -> None:
        while True:
            await asked.stream.send_all(b"HTTP/1.1 102 Processing\r\n\r\n")

    async with connected(script) as (_, channel):
        with pytest.raises(trio.BrokenResourceError, match="100 interim responses"):
            await channel.send(call(1))
        await assert_over(channel)


@pytest.mark.parametrize(
    "endless",
    [b"X-Header: x\r\n", b"x"],
    ids=["headers", "a status line"],
)
async def test_a_head_without_end_ends_the_channel(endless: bytes) -> None:
    async def script(asked: Asked) -> None:
        await asked.stream.send_all(b"HTTP/1.1 200 OK\r\n" if len(endless) > 1 else b"")
        while True:
            await asked.stream.send_all(endless * 1000)

    async with connected(script) as (_, channel):
        with pytest.raises(trio.BrokenResourceError):
            await channel.send(call(1))
        await assert_over(channel)


async def test_trailers_without_end_end_the_channel() -> None:
    async def script(asked: Asked) -> None:
        await asked.start()
        await asked.stream.send_all(b"0\r\n")
        while True:
            await asked.stream.send_all(b"X-Trailer: x\r\n" * 1000)

    async with connected(script) as (_, channel):
        with contextlib.suppress(trio.BrokenResourceError):
            await channel.send(call(1))
        await assert_over(channel)


async def test_a_head_that_drips_is_given_a_time(mock_clock: trio.testing.MockClock) -> None:
    async def script(asked: Asked) -> None:
        await asked.stream.send_all(b"HTTP/1.1 200")

    async with connected(script) as (server, channel), trio.open_nursery() as nursery:
        nursery.start_soon(channel.send, call(1))
        await wait_until(lambda: bool(server.asked))
        await trio.testing.wait_all_tasks_blocked(0.05)
        mock_clock.jump(client.ORDER_S + 0.1)  # the send itself waits no longer
        await trio.testing.wait_all_tasks_blocked(0.05)
        mock_clock.jump(connections.HEAD_S)
        with pytest.raises(trio.EndOfChannel, match="took above 30 s for a head"):
            await channel.receive()


async def test_a_refusal_that_drips_is_given_a_time(mock_clock: trio.testing.MockClock) -> None:
    async def script(asked: Asked) -> None:
        await asked.stream.send_all(
            b"HTTP/1.1 400 No\r\nContent-Type: text/plain\r\nContent-Length: 99\r\n\r\nbecause"
        )

    async with connected(script) as (server, channel), trio.open_nursery() as nursery:
        nursery.start_soon(channel.send, call(1))
        await wait_until(lambda: bool(server.asked))
        await trio.testing.wait_all_tasks_blocked(0.05)
        mock_clock.jump(client.REFUSAL_S)
        (line,) = await receive(channel, 1)
        assert isinstance(line, bytes)
        assert b"HTTP 400 No: because" in line


async def test_a_body_in_chunks_of_a_byte_lets_others_run() -> None:
    line = messages.notification("x", "y" * 5_000)

    async def script(asked: Asked) -> None:
        await asked.start()
        body = b"".join(chunk(bytes([byte])) for byte in line + answer(1))
        await asked.stream.send_all(body + b"0\r\n\r\n")

    async with connected(script) as (_, channel):
        await channel.send(call(1))
        assert await receive(channel, 2) == [line.rstrip(), answer(1).rstrip()]


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
            assert await asked.stream.receive_some() == b""
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


async def test_a_channel_that_ends_while_a_cancellation_waits_says_so() -> None:
    is_restarted = trio.Event()

    async def script(asked: Asked) -> None:
        if b"initialize" in asked.body:
            await asked.respond("200 OK", WELCOME, extra="Mcp-Session-Id: abc\r\n")
        elif asked.body.rstrip() == call(1).rstrip():
            await trio.sleep_forever()
        else:
            await is_restarted.wait()
            await asked.respond("404 Not Found")

    async with (
        http_server(script) as server,
        client.connect(server.url, outlast_s=60) as channel,
        trio.open_nursery() as nursery,
    ):
        await channel.send(HELLO + call(1) + call(2))
        nursery.start_soon(receive_all, channel)
        is_restarted.set()
        with pytest.raises(trio.BrokenResourceError):
            await channel.send(cancelling(1))


# -- connecting and closing


async def test_nobody_answers_is_an_oserror() -> None:
    async with http_server() as server:
        url = server.url
    with pytest.raises(OSError, match="attempts to connect"):
        async with client.connect(url):
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
                async with client.connect(server.url, ssl_context=ours):
                    pass
            return
        async with client.connect(server.url, ssl_context=ours) as channel:
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
            async with client.connect(server.url) as channel:
                await channel.send(HELLO)
                scope.cancel()
                await receive(channel, 2)
        assert scope.cancelled_caught
        assert server.asked[-1].method == "DELETE"


async def test_what_a_user_raises_comes_out_as_it_is() -> None:
    async with http_server() as server:
        with pytest.raises(ZeroDivisionError):
            async with client.connect(server.url):
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
