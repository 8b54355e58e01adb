"""Pings over a WebSocket: what they prove, and that nobody waits for one for ever."""

import contextlib

import pytest
import trio
import trio.testing
from wsproto.events import (
    Ping,
    Pong,
)

from streams.exchange import Channel
from streams.messages import Incoming
from tests.rigs.bare_websocket import (
    bare,
    close_code,
    events_to_the_end,
    listening,
    server,
)
from transports import websocket
from transports.websocket import server as wsserver


async def test_a_pong_means_that_all_that_was_sent_before_was_read() -> None:
    read: list[Incoming] = []

    async def collect(channel: Channel) -> None:
        with contextlib.suppress(trio.EndOfChannel):
            while True:
                read.extend(await channel.receive())

    async with (
        server(collect) as port,
        websocket.connect(f"ws://127.0.0.1:{port}") as channel,
        listening(channel),
    ):
        await channel.send(b"1\n" * 1000)
        assert await channel.ping()
        assert read == [b"1"] * 1000
        await channel.send(b"2\n" * 1000)
        assert await channel.ping()
        assert read[1000:] == [b"2"] * 1000


async def test_each_of_many_pings_is_answered() -> None:
    answers: list[bool] = []

    async def ping(channel: Channel) -> None:
        answers.append(await channel.ping())

    async with (
        server() as port,
        websocket.connect(f"ws://127.0.0.1:{port}") as channel,
        listening(channel),
        trio.open_nursery() as nursery,
    ):
        for _ in range(100):
            nursery.start_soon(ping, channel)
    assert answers == [True] * 100


async def test_pongs_that_were_asked_for_have_no_rate() -> None:
    """A response is held until such a pong, so a busy client sends one for each of its calls."""

    async def handler(channel: Channel) -> None:
        async with listening(channel):
            for _ in range(wsserver.EMPTY_FRAMES_MAX + 50):
                assert await channel.ping()
            await channel.send(b"done\n")

    async with server(handler) as port, websocket.connect(f"ws://127.0.0.1:{port}") as channel:
        assert await channel.receive() == [b"done"]


async def test_a_pong_answers_the_pings_before_it_and_a_strange_one_nothing() -> None:
    """ "If an endpoint receives a Ping frame and has not yet sent Pong frame(s) in response to
    previous Ping frame(s), the endpoint MAY elect to send a Pong frame for only the most recently
    processed Ping frame." (RFC 6455, 5.5.3)
    """
    answered: list[str] = []

    async def handler(channel: Channel) -> None:
        async def ping(name: str) -> None:
            assert await channel.ping()
            answered.append(name)

        async with listening(channel), trio.open_nursery() as nursery:
            nursery.start_soon(ping, "first")
            nursery.start_soon(ping, "second")

    async with bare(handler) as (stream, connection):
        pings: list[bytes] = []
        while len(pings) < 2:
            connection.receive_data(bytes(await stream.receive_some()))
            pings += [
                bytes(event.payload) for event in connection.events() if isinstance(event, Ping)
            ]
        assert len(set(pings)) == 2
        await stream.send_all(connection.send(Pong(payload=b"strange")))
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert answered == []
        await stream.send_all(connection.send(Pong(payload=pings[-1])))
        assert close_code(await events_to_the_end(stream, connection)) == 1000
    assert sorted(answered) == ["first", "second"]


async def test_a_ping_that_nobody_answers_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wsserver, "PING_S", 0.05)
    answers: list[bool] = []

    async def handler(channel: Channel) -> None:
        async with listening(channel):
            answers.append(await channel.ping())

    async with bare(handler) as (stream, connection):
        connection.receive_data(bytes(await stream.receive_some()))
        events = list(connection.events())  # and no pong
        assert isinstance(events[0], Ping)
        await events_to_the_end(stream, connection)
    assert answers == [False]


async def test_a_ping_ends_with_the_connection() -> None:
    ended = trio.Event()

    async def handler(channel: Channel) -> None:
        async with listening(channel):
            for _ in range(2):
                with pytest.raises(trio.BrokenResourceError):
                    await channel.ping()
        ended.set()

    async with bare(handler) as (stream, _):
        await stream.receive_some()
        await stream.aclose()
        await ended.wait()


async def test_of_many_pings_at_once_the_last_is_answered() -> None:
    """RFC 6455, 5.5.3. How many there may be is in `test_websocket_frames`."""
    async with bare() as (stream, connection):
        pings = [Ping(payload=b"%d" % number) for number in range(wsserver.EMPTY_FRAMES_MAX)]
        await stream.send_all(b"".join(map(connection.send, pings)))  # and nothing is read
        last = b""
        while last != b"%d" % (wsserver.EMPTY_FRAMES_MAX - 1):
            connection.receive_data(bytes(await stream.receive_some()))
            pongs = [event for event in connection.events() if isinstance(event, Pong)]
            last = bytes(pongs[-1].payload) if pongs else b""
