"""Servers that do not know streams, and servers that break the protocol."""

from collections.abc import MutableMapping, Sequence
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from streams.errors import (
    CallLost,
    ClientError,
    StreamGone,
)
from streams.logs import SAID_MAX, WARNINGS_MAX
from streams.messages import Message, notification
from tests.rigs.clients import Stepping, connected, count, counting, rest_of, said
from tests.rigs.scripted import Scripted, Stream


async def test_a_plain_server_can_be_called() -> None:
    async def work(stream: Stream) -> Any:
        params = {"progressToken": stream.progress_token, "progress": 1}
        stream.notify("notifications/progress", params)
        stream.say("hello")
        return {"content": []}

    server = Scripted(is_numbering=False)
    server.tools["work"] = work
    async with connected(server) as client, client.call("work") as call:
        methods = [message.method async for message in call]
        assert methods == ["notifications/progress", "notifications/message"]
        assert await call.result() == {"content": []}
        assert call.ticket is None


async def test_of_a_plain_server_progress_finds_its_call_and_the_rest_the_hook() -> None:
    server = Scripted(is_numbering=False)
    first, second = Stepping(server, "first"), Stepping(server, "second")
    heard: list[Message] = []
    async with (
        connected(server, on_notification=heard.append) as client,
        client.call("first") as one,
        client.call("second") as two,
    ):
        await server.until(lambda: len(server.streams) == 2)
        stream = server.streams["stream-2"]
        first.say("whose?")
        stream.notify(
            "notifications/progress", {"progressToken": stream.progress_token, "progress": 1}
        )
        await client.ping()
        first.say(None)
        second.say(None)
        assert await rest_of(one) == []
        assert [message.method async for message in two] == ["notifications/progress"]
    assert [said(message) for message in heard] == ["whose?"]


async def test_a_call_to_a_plain_server_is_lost_with_its_connection(
    autojump_clock: MockClock,
) -> None:
    server = Scripted(is_numbering=False)
    step = Stepping(server)
    async with connected(server) as client:
        async with client.call("step") as call:
            step.say("a")
            assert said(await anext(call)) == "a"
            server.cut()
            with pytest.raises(CallLost):
                await call.result()
        await client.ping()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'"result":{"content":[],"size":NaN}', {"content": [], "size": None}),
        (b'"result":{"content":[],}', "cannot be mended"),
    ],
)
async def test_an_answer_that_is_no_json_is_mended_or_an_error_and_no_endless_wait(
    body: bytes, found: Any
) -> None:
    async def work(stream: Stream) -> Any:
        line = b'{"jsonrpc":"2.0","id":"%s",%s}\n' % (stream.request_id.encode(), body)
        server.connections[0].reply(line)
        await trio.sleep_forever()

    server = Scripted(is_numbering=False)
    server.tools["work"] = work
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as other:
        async with client.call("work") as call:
            if isinstance(found, str):
                with pytest.raises(StreamGone, match=found):
                    await call.result()
            else:
                assert await call.result() == found
        step.say(None)
        assert (await other.result())["done"]


async def test_an_answer_that_is_too_large_is_an_error_and_not_a_long_wait() -> None:
    server = Scripted(is_numbering=False)
    server.memory = type(server.memory)(message_bytes_max=10_000)
    server.tools["x" * 20_000] = count
    async with connected(server) as client:
        with pytest.raises(ClientError, match="10000 bytes"):
            await client.list_tools()
        await client.ping()


async def test_nonsense_outside_of_streams_disturbs_nothing() -> None:
    server = counting()
    async with connected(server) as client:
        for line in [b"{", b"[]", b'"x"', b"\xff", b"[" * 9_000, b'{"jsonrpc":"2.0"}']:
            server.connections[0].reply(line + b"\n")
        server.connections[0].reply(b'{"jsonrpc":"2.0","id":null,"method":"ping"}\n')
        server.connections[0].reply(b'{"jsonrpc":"2.0","id":"who?","result":{}}\n')
        server.connections[0].reply(notification("notifications/unheard-of"))
        await client.ping()
        async with client.call("count", {"n": 1}) as call:
            assert await rest_of(call) == ["1"]
    assert len(server.connections) == 1


NONSENSE = {
    "no JSON": b"{",
    "no message": b"[]",
    "no method": b'{"jsonrpc":"2.0"}',
    "no id": b'{"jsonrpc":"2.0","id":null,"method":"%s"}' % (b"x" * 1_000),
    "no error": b'{"jsonrpc":"2.0","id":null,"error":{"code":1,"message":"%s"}}' % (b"x" * 1_000),
    "no announcement": b'{"jsonrpc":"2.0","method":"notifications/stream/create","params":[]}',
    "too large": b"x" * 20_000,
}


@pytest.mark.parametrize("line", NONSENSE.values(), ids=NONSENSE)
async def test_a_flood_of_nonsense_is_not_a_flood_of_warnings(
    line: bytes, autojump_clock: MockClock
) -> None:
    server = Scripted(is_numbering=False)
    server.memory = type(server.memory)(message_bytes_max=10_000)
    with capture_logs() as logs:
        async with connected(server) as client:
            server.connections[0].reply((line + b"\n") * 1_000)
            await wait_all_tasks_blocked()
            assert len(warnings_in(logs)) == WARNINGS_MAX
            server.cut()
            await client.ping()  # another connection to the same server has the rest of the budget
            server.connections[1].reply((line + b"\n") * 1_000)
            await trio.sleep(60)
            server.connections[1].reply(line + b"\n")
            await wait_all_tasks_blocked()
    warnings = warnings_in(logs)
    assert WARNINGS_MAX < len(warnings) < 2 * WARNINGS_MAX
    assert sum(each.get("times", 1) for each in warnings) == 2_001
    assert max(len(str(value)) for each in warnings for value in each.values()) <= SAID_MAX


def warnings_in(logs: Sequence[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    return [each for each in logs if each["log_level"] == "warning"]
