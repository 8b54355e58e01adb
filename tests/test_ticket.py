"""Tickets, and who may come back with them to where."""

import json

import pytest
from trio.testing import wait_all_tasks_blocked

from streams.client import Client
from streams.errors import (
    StreamGone,
)
from streams.ticket import Ticket
from tests.clients import Stepping, connected, counting, rest_of, said
from tests.scripted import Scripted


@pytest.mark.parametrize("after", [None, 0, 17])
def test_a_ticket_is_one_word_or_json(after: int | None) -> None:
    ticket = Ticket("s/t", "secret", 1, after, 0.5, None)
    word = str(ticket)
    assert Ticket.parse(f" {word}\n") == ticket
    assert all(letter.isalnum() or letter in "-_" for letter in word)
    plain = {"stream": "s/t", "token": "secret", "request_id": 1, "min_s": 0.5, "after": after}
    assert Ticket.parse(json.dumps(plain)) == ticket


@pytest.mark.parametrize("text", ["", "x", "{}", "[1]", "ö", "e30", '{"stream": 1}', "a b"])
def test_what_is_no_ticket_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ticket"):
        Ticket.parse(text)


def test_a_ticket_shows_its_token_only_when_asked_for() -> None:
    assert "secret" not in repr(Ticket("s", "secret", 1))


async def test_a_ticket_says_what_was_handed_out() -> None:
    server = Scripted(min_s=2.5)
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a", "b", "c", None)
        before = call.ticket
        assert said(await anext(call)) == "a"
        assert said(await anext(call)) == "b"
        ticket = call.ticket
        assert ticket is not None
        (stream,) = server.streams.values()
        assert ticket == Ticket(stream.id, stream.token, stream.request_id, 2, 2.5, 3600)
        await rest_of(call)
        assert call.ticket is not None
        assert call.ticket.after == 3
        await call.result()
        assert call.ticket.after == 4
    assert before is None  # nothing had come yet


async def test_another_client_goes_on_where_the_ticket_stands() -> None:
    server = Scripted()
    step = Stepping(server)
    async with server.serving():
        async with Client(server.memory.connect) as client:
            async with client.call("step") as call:
                step.say("a", "b", "c")
                assert [said(await anext(call)) for _ in range(2)] == ["a", "b"]
            text = str(call.ticket)
        async with Client(server.memory.connect) as other:
            async with other.resume(Ticket.parse(text)) as resumed:
                step.say("d", None)
                assert await rest_of(resumed) == ["c", "d"]
                assert (await resumed.result())["done"]
            with pytest.raises(StreamGone) as caught:
                async with other.resume(Ticket.parse(text)) as again:
                    await again.result()
    assert caught.value.reason == "messages_gone"


async def test_a_ticket_without_a_cursor_gets_what_was_not_confirmed() -> None:
    server = Scripted()
    step = Stepping(server)
    async with server.serving():
        async with Client(server.memory.connect) as client, client.call("step") as call:
            step.say("a", "b", "c")
            assert said(await anext(call)) == "a"
            ticket = call.ticket
        assert ticket is not None
        async with Client(server.memory.connect) as other:
            timeless = Ticket(ticket.stream, ticket.token, ticket.request_id)
            async with other.resume(timeless) as resumed:
                step.say(None)
                assert await rest_of(resumed) == ["b", "c"]
                assert (await resumed.result())["done"]


async def test_a_call_that_was_left_can_be_read_on_by_the_same_client() -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client:
        async with client.call("step") as call:
            step.say("a", "b")
            assert said(await anext(call)) == "a"
        assert call.ticket is not None
        step.say("c")
        await wait_all_tasks_blocked()
        async with client.resume(call.ticket) as again:
            step.say(None)
            assert await rest_of(again) == ["b", "c"]
            assert (await again.result())["done"]
    assert len(server.connections) == 1


async def test_a_resumed_call_can_be_left_and_resumed_over_and_over() -> None:
    server = Scripted()
    step = Stepping(server)
    async with server.serving():
        async with Client(server.memory.connect) as client, client.call("step") as call:
            step.say("0")
            await anext(call)
        ticket, found = call.ticket, []
        async with Client(server.memory.connect) as client:
            for n in range(1, 6):
                assert ticket is not None
                async with client.resume(ticket) as call:
                    step.say(str(n), "later")
                    found.append(said(await anext(call)))
                    assert said(await anext(call)) == "later"
                    ticket = call.ticket
    assert found == ["1", "2", "3", "4", "5"]


async def test_a_call_that_is_being_read_is_not_read_twice_by_one_client() -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a", "b")
        await anext(call)
        assert call.ticket is not None
        with pytest.raises(StreamGone):
            await client.resume(call.ticket).__aenter__()
        step.say(None)
        assert await rest_of(call) == ["b"]


async def test_reading_a_call_that_was_left_is_a_mistake() -> None:
    server = Scripted()
    Stepping(server)
    async with connected(server) as client:
        async with client.call("step") as call:
            pass
        with pytest.raises(RuntimeError, match="left"):
            await call.result()


async def test_a_call_that_was_left_goes_on_and_disturbs_nobody() -> None:
    server = counting()
    step = Stepping(server)
    async with connected(server) as client:
        async with client.call("step") as call:
            step.say("a")
            await anext(call)
        step.say(*["x" * 1000] * 900, None)
        async with client.call("count", {"n": 3}) as other:
            assert await rest_of(other) == ["1", "2", "3"]
        (stream, _) = server.streams.values()
        await server.until(lambda: stream.is_ended)
        assert stream.acked == 1
        assert call.ticket is not None
        await client.ping()
        async with client.resume(call.ticket) as again:
            assert len(await rest_of(again)) == 900
