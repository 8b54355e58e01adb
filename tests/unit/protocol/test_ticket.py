"""Tickets, and who may come back with them to where."""

import json
from typing import Any

import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server
from streams.client.client import Client
from streams.errors import (
    StreamGone,
)
from streams.messages import Message
from streams.protocol.ticket import Ticket
from tests.rigs.clients import Stepping, at_home, connected, counting, rest_of, said
from tests.rigs.scripted import CREATE, POLICY, Scripted, Stream
from tests.rigs.server import Steps


@pytest.mark.parametrize("after", [None, 0, 17])
def test_a_ticket_is_one_word_or_json(after: int | None) -> None:
    ticket = Ticket("s/t", "secret", 1, after, 0.5, None)
    word = str(ticket)
    assert Ticket.parse(f" {word}\n") == ticket
    assert all(letter.isalnum() or letter in "-_" for letter in word)
    plain = {"stream": "s/t", "token": "secret", "request_id": 1, "min_s": 0.5, "after": after}
    assert Ticket.parse(json.dumps(plain)) == ticket


def test_a_ticket_says_by_which_proposal_it_leads_back() -> None:
    ticket = Ticket("", "secret", "x-1", min_s=2, dialect="resumableRequests")
    assert Ticket.parse(str(ticket)) == ticket
    assert Ticket.parse('{"stream":"s","token":"t","request_id":1}').dialect == "streams"


def test_a_ticket_from_before_there_was_a_choice_is_one_of_streams() -> None:
    old = "eyJzdHJlYW0iOiJzIiwidG9rZW4iOiJ0IiwicmVxdWVzdF9pZCI6ImEtMSIsImFmdGVyIjozfQ"
    assert Ticket.parse(old) == Ticket("s", "t", "a-1", 3)
    assert str(Ticket("s", "t", "a-1", 3)) == old  # and can be read by who knows no other


def test_tickets_for_one_call_are_known_by_its_stream_or_its_token() -> None:
    ticket = Ticket("s", "t", 1)
    for same in (Ticket("s", "", 1, 5), Ticket("", "t", 1, dialect="resumableRequests"), ticket):
        assert ticket.leads_to_same(same)
        assert same.leads_to_same(ticket)
    for other in (Ticket("", "", 1), Ticket("", "x", 1), Ticket("x", "", 1), Ticket("x", "x", 1)):
        assert not ticket.leads_to_same(other)
        assert not other.leads_to_same(ticket)
    assert not Ticket("", "", 1).leads_to_same(Ticket("", "", 1))


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


async def test_a_call_that_has_ended_by_the_time_it_is_read_on_is_not_made_again() -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client:
        async with client.call("step") as call:
            step.say("a")
            await anext(call)
        assert call.ticket is not None
        again = client.resume(call.ticket)
        step.say("b", None)
        await wait_all_tasks_blocked()
        async with again:
            assert await rest_of(again) == ["b"]
            assert (await again.result())["done"]
    assert len(server.got("tools/call")) == 1


# Tickets of a proposal whose tokens name no stream


async def test_a_request_can_be_polled_by_its_ticket() -> None:
    server = Scripted(is_numbering=False, announces=(POLICY,))
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        assert call.ticket is not None
        standing = await client.poll(call.ticket)
        assert (standing.status, standing.pending_messages) == ("live", True)
        assert not standing.has_request
        assert not standing.has_error
        step.say(None)
        await call.result()
        standing = await client.poll(call.ticket)
        assert standing.status == "completed"
        with pytest.raises(StreamGone) as caught:
            await client.poll(Ticket("", "wrong", call.request_id, dialect="resumableRequests"))
    assert caught.value.reason == "stream_not_found"
    (stream,) = server.streams.values()
    named = {"requestId": stream.request_id, "resumeToken": stream.token}
    assert server.got("requests/getStatus")[:2] == [named, named]


@pytest.mark.parametrize("announces", [(POLICY,), (CREATE, POLICY)])
@pytest.mark.parametrize("confirmed", [0, 2])
async def test_a_token_alone_leads_to_a_server_that_numbers(
    announces: tuple[str, ...], confirmed: int, autojump_clock: MockClock
) -> None:
    """The numbers name a stream that the ticket does not."""
    server = Scripted(announces=announces)
    step = Stepping(server)
    async with server.serving():
        async with Client(server.memory.connect) as client, client.call("step"):
            step.say("a", "b", "c")
            (stream,) = [await _started(server)]
            stream.acked = confirmed
        ticket = Ticket("", stream.token, stream.request_id, dialect="resumableRequests")
        async with Client(server.memory.connect) as other, other.resume(ticket) as call:
            assert said(await anext(call)) == "abc"[confirmed]
            server.cut()
            step.say("d", None)
            assert await rest_of(call) == [*"abcd"[confirmed + 1 :]]
            assert (await call.result())["done"]
        assert stream.acked == 5


async def test_what_is_of_a_page_is_not_taken_for_the_stream_of_a_token(
    autojump_clock: MockClock,
) -> None:
    server = counting()
    step = Stepping(server)
    heard: list[Message] = []
    async with server.serving():
        async with Client(server.memory.connect) as client, client.call("step") as call:
            step.say("a")
            await anext(call)
        (stream,) = server.streams.values()
        ticket = Ticket("", stream.token, stream.request_id, dialect="resumableRequests")
        async with (
            Client(server.memory.connect, on_notification=heard.append) as other,
            other.resume(ticket) as resumed,
        ):
            await other.ping()
            pages = other.pages("count", {"n": 0}, token="of a page")
            with pytest.raises(StopAsyncIteration):
                await anext(pages)
            step.say("b", None)
            assert (await resumed.result())["done"]
    assert [said(message) for message in heard] == ["b"]  # it may be anybody's


async def _started(server: Scripted) -> Stream:
    await server.until(lambda: server.streams)
    (stream,) = server.streams.values()
    await server.until(lambda: len(stream.entries) == 3)
    return stream


async def test_a_ticket_that_was_kept_early_can_be_polled_all_the_same(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested", resume_min_s=0)
    steps = Steps(server)
    steps.log("a", "b", "c")
    async with at_home(server) as memory, Client(memory.connect) as client:
        async with client.call("step") as call:
            await anext(call)
            early = call.ticket
            await anext(call)
            await anext(call)
        assert early is not None
        await client.ping()
        assert (await client.poll(early)).status == "live"
        with pytest.raises(StreamGone) as caught:
            async with Client(memory.connect) as other, other.resume(early) as again:
                await again.result()
        assert caught.value.reason == "messages_gone"  # there it would be a gap
        steps.finish()
        assert (await client.join(early)).is_done


async def test_a_ticket_that_is_still_a_word_is_polled_and_else_refused() -> None:
    async with connected(counting()) as client:
        async with client.call("count", {"n": 1}) as call:
            await call.result()
        assert call.ticket is not None
        word: Any = str(call.ticket)
        assert (await client.poll(word)).status == "completed"
        assert (await client.poll(call.ticket.stream)).status == "completed"
        with pytest.raises(TypeError, match=r"expected a Ticket, got a str: Ticket\.parse"):
            client.resume(word)
        with pytest.raises(TypeError, match=r"expected a Ticket, got a str: Ticket\.parse"):
            await client.join(word)


async def test_a_ticket_of_an_unknown_dialect_is_a_mistake() -> None:
    ticket = Ticket("s", "t", 1, dialect="esperanto")
    async with connected(counting()) as client:
        with pytest.raises(ValueError, match="esperanto"):
            client.resume(ticket)
        with pytest.raises(ValueError, match="esperanto"):
            await client.poll(ticket)
        with pytest.raises(ValueError, match="esperanto"):
            await client.join(ticket)
