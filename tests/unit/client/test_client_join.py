"""The result of a call, wherever it was begun: `Client.join`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server
from streams.client.buffer import LEFT_LINES_MAX
from streams.client.client import Client, Joined
from streams.errors import CallFailed, CannotConnect, StreamGone, Superseded
from streams.exchange import ClientChannel
from streams.protocol.ticket import Ticket
from tests.rigs.clients import Params, Stepping, at_home, connected, counting, rest_of, said
from tests.rigs.scripted import POLICY, Scripted
from tests.rigs.server import Steps
from transports.memory import MemoryServer

BOTH = ("streams", "resumableRequests")
REQUESTS = ("resumableRequests",)
NOT_YET = Joined(is_done=False)


@pytest.fixture
def server() -> Server:
    return Server("tested", resume_min_s=0, resume_max_s=600, announce_after_s=0)


@pytest.fixture(params=[BOTH, REQUESTS], ids=["both", "requests"])
def made_with(request: pytest.FixtureRequest) -> tuple[str, ...]:
    dialects: tuple[str, ...] = request.param
    return dialects


@pytest.fixture(params=[BOTH, REQUESTS], ids=["both", "requests"])
def dialects(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The dialects of the client that joins."""
    dialects: tuple[str, ...] = request.param
    return dialects


async def begun(memory: MemoryServer, dialects: tuple[str, ...] = BOTH) -> Ticket:
    """A call to `step` whose client is closed."""
    async with Client(memory.connect, dialects=dialects) as client:
        return await left(client)


async def left(client: Client) -> Ticket:
    """A call to `step` that this client has left."""
    async with client.call("step") as call:
        while call.ticket is None:
            await client.ping()
    return Ticket.parse(str(call.ticket))


def text_of(joined: Joined) -> str:
    assert joined.is_done
    return str(joined.result["content"][0]["text"])


@asynccontextmanager
async def leaving_nothing(client: Client) -> AsyncIterator[None]:
    """Checks that the block leaves no tasks and no calls behind."""
    before = _held_by(client)
    yield
    await client.ping()  # it comes behind everything that was sent
    await wait_all_tasks_blocked()
    assert all(now <= then for now, then in zip(_held_by(client), before, strict=True))


def _held_by(client: Client) -> tuple[int, ...]:
    connection, nursery = client._reconnector.connection, client._resumer._nursery
    assert connection is not None
    assert nursery is not None
    calls = client._calls
    held = (calls.by_id, calls.by_stream, connection._replies, client._nursery.child_tasks)
    return (len(list(calls)), len(nursery.child_tasks), *map(len, held))


async def test_the_result_is_to_be_had_from_elsewhere(
    server: Server,
    steps: Steps,
    made_with: tuple[str, ...],
    dialects: tuple[str, ...],
    autojump_clock: MockClock,
) -> None:
    async with at_home(server) as memory:
        ticket = await begun(memory, made_with)
        steps.log("a", "b", "c")
        steps.finish("the end")
        await steps.is_over.wait()
        async with Client(memory.connect, dialects=dialects) as client, leaving_nothing(client):
            assert text_of(await client.join(ticket)) == "the end"


async def test_not_yet_is_an_answer_and_the_same_ticket_does_it_again(
    server: Server,
    steps: Steps,
    made_with: tuple[str, ...],
    dialects: tuple[str, ...],
    autojump_clock: MockClock,
) -> None:
    async with at_home(server) as memory:
        ticket = await begun(memory, made_with)
        async with Client(memory.connect, dialects=dialects) as client:
            for _ in range(3):
                steps.log("a", "b")
                started = trio.current_time()
                assert await client.join(ticket, timeout_s=5) == NOT_YET
                assert trio.current_time() == started + 5
            steps.log("c")
            steps.finish()
            assert text_of(await client.join(ticket, timeout_s=5)) == "done"
    assert not steps.was_cancelled


async def test_who_left_a_call_can_join_it(
    server: Server, steps: Steps, made_with: tuple[str, ...], autojump_clock: MockClock
) -> None:
    async with (
        at_home(server) as memory,
        Client(memory.connect, dialects=made_with) as client,
        leaving_nothing(client),
    ):
        ticket = await left(client)
        for _ in range(2):
            steps.log("a", "b")
            await trio.sleep(1)
            assert await client.join(ticket, timeout_s=5) == NOT_YET
        steps.log("c")
        steps.finish()
        assert text_of(await client.join(ticket)) == "done"
        assert len(memory.cables) == 1


async def test_a_join_for_less_than_no_time_is_refused_and_holds_nothing(
    server: Server, steps: Steps
) -> None:
    async with at_home(server) as memory, Client(memory.connect) as client:
        ticket = await left(client)
        with pytest.raises(ValueError, match="must be non-negative"):
            await client.join(ticket, timeout_s=-1)
        steps.finish()
        assert (await client.join(ticket)).is_done


async def test_who_left_a_call_that_has_ended_since_can_join_it(
    server: Server, steps: Steps, made_with: tuple[str, ...], autojump_clock: MockClock
) -> None:
    async with (
        at_home(server) as memory,
        Client(memory.connect, dialects=made_with) as client,
        leaving_nothing(client),
    ):
        ticket = await left(client)
        steps.log("a", "b")
        steps.finish()
        await trio.sleep(1)
        assert text_of(await client.join(ticket)) == "done"


async def test_more_messages_than_are_kept_are_in_nobodys_way(
    made_with: tuple[str, ...], autojump_clock: MockClock
) -> None:
    server = Scripted(announces=None if made_with == BOTH else (POLICY,))
    step = Stepping(server)
    async with connected(server, dialects=made_with) as client:
        ticket = await left(client)
        for text in ("a", "b"):
            step.say(*[text] * 900)
            await trio.sleep(1)
            step.say(*[text] * 900)
            await trio.sleep(1)
        assert len(server.streams["stream-1"].entries) > LEFT_LINES_MAX
        async with leaving_nothing(client):
            assert await client.join(ticket, timeout_s=5) == NOT_YET
        step.say("c", None)
        assert (await client.join(ticket)).result["done"]
        await client.ping()
        assert server.streams["stream-1"].acked == (3602 if made_with == BOTH else 0)


async def test_what_the_tool_asks_meanwhile_is_answered(
    server: Server,
    steps: Steps,
    made_with: tuple[str, ...],
    dialects: tuple[str, ...],
    autojump_clock: MockClock,
) -> None:
    asked: list[str] = []

    async def answer(params: Params) -> Params:
        asked.append(params["message"])
        return {"action": "accept"}

    async with at_home(server) as memory:
        ticket = await begun(memory, made_with)
        steps.ask()
        await wait_all_tasks_blocked()
        answers = {"elicitation/create": answer}
        async with Client(memory.connect, dialects=dialects, answers=answers) as client:
            steps.finish()
            assert text_of(await client.join(ticket)) == "done"
    assert asked == ["?"]
    assert steps.answers == [{"action": "accept"}]


async def test_an_error_of_the_tool_is_a_result(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with at_home(server) as memory:
        ticket = await begun(memory)
        steps.fail()
        async with Client(memory.connect) as client:
            joined = await client.join(ticket)
    assert joined.is_done
    assert joined.result["isError"]


async def test_a_call_that_failed_says_why(
    server: Server,
    steps: Steps,
    made_with: tuple[str, ...],
    dialects: tuple[str, ...],
    autojump_clock: MockClock,
) -> None:
    async with at_home(server) as memory:
        ticket = await begun(memory, made_with)
        steps.finish("x" * server.limits.message_bytes_max)
        async with Client(memory.connect, dialects=dialects) as client, leaving_nothing(client):
            with pytest.raises(CallFailed) as caught:
                await client.join(ticket)
    assert caught.value.data["reason"] == "too_large"


async def test_a_call_that_is_gone_says_so(
    server: Server,
    steps: Steps,
    made_with: tuple[str, ...],
    dialects: tuple[str, ...],
    autojump_clock: MockClock,
) -> None:
    async with at_home(server) as memory:
        ticket = await begun(memory, made_with)
        unknown = Ticket("", "x" * 43, 1, dialect="resumableRequests")
        async with Client(memory.connect, dialects=dialects) as client:
            for gone, reason in [(ticket, "abandoned"), (unknown, "stream_not_found")]:
                await trio.sleep(601)
                async with leaving_nothing(client):
                    with pytest.raises(StreamGone) as caught:
                        await client.join(gone, timeout_s=5)
                assert caught.value.reason == reason
    assert steps.was_cancelled


async def test_a_result_that_was_had_is_not_there_twice(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with at_home(server) as memory:
        ticket = await begun(memory)
        steps.finish()
        async with Client(memory.connect) as client:
            assert text_of(await client.join(ticket)) == "done"
            with pytest.raises(StreamGone) as caught:
                await client.join(ticket)
    assert caught.value.reason == "delivered"


# How long it takes


async def test_without_a_timeout_it_takes_as_long_as_it_takes(
    server: Server,
    steps: Steps,
    made_with: tuple[str, ...],
    dialects: tuple[str, ...],
    autojump_clock: MockClock,
) -> None:
    async with at_home(server) as memory, trio.open_nursery() as nursery:
        ticket = await begun(memory, made_with)

        async def finish_and_cut() -> None:
            for n in range(5):
                await trio.sleep(3_000)
                steps.log(str(n))
                memory.cables[-1].cut()
            steps.finish()

        nursery.start_soon(finish_and_cut)
        async with Client(memory.connect, dialects=dialects) as client:
            started = trio.current_time()
            assert text_of(await client.join(ticket)) == "done"
            assert trio.current_time() >= started + 15_000


async def test_what_cannot_be_reached_is_not_done_yet(autojump_clock: MockClock) -> None:
    server = Scripted()
    step = Stepping(server)
    can_connect = trio.Event()
    can_connect.set()

    @asynccontextmanager
    async def dial() -> AsyncIterator[ClientChannel]:
        await can_connect.wait()
        async with server.memory.connect() as channel:
            yield channel

    async with server.serving(), Client(dial) as client:
        ticket = await left(client)
        can_connect = trio.Event()
        server.cut()
        step.say("a", None)
        started = trio.current_time()
        assert await client.join(ticket, timeout_s=7) == NOT_YET
        assert trio.current_time() == started + 7
        with pytest.raises(CannotConnect):
            await client.join(ticket)
        can_connect.set()
        assert (await client.join(ticket, timeout_s=60)).result["done"]


async def test_no_time_at_all_changes_nothing(autojump_clock: MockClock) -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client:
        ticket = await left(client)
        for _ in range(3):
            assert await client.join(ticket, timeout_s=0) == NOT_YET
        step.say("a", None)
        async with client.resume(ticket) as call:
            assert await rest_of(call) == ["a"]
            assert (await call.result())["done"]


# More than one


async def test_of_two_clients_that_join_the_newest_wins(
    server: Server,
    steps: Steps,
    made_with: tuple[str, ...],
    dialects: tuple[str, ...],
    autojump_clock: MockClock,
) -> None:
    async with at_home(server) as memory, trio.open_nursery() as nursery:
        ticket = await begun(memory, made_with)

        async def join_first(client: Client) -> None:
            with pytest.raises(Superseded):
                await client.join(ticket)

        async with (
            Client(memory.connect, dialects=dialects) as first,
            Client(memory.connect, dialects=dialects) as second,
            leaving_nothing(first),
            leaving_nothing(second),
        ):
            nursery.start_soon(join_first, first)
            await wait_all_tasks_blocked()
            assert await second.join(ticket, timeout_s=5) == NOT_YET
            steps.finish()
            assert text_of(await second.join(ticket)) == "done"


async def test_of_two_joins_of_one_client_the_first_goes_on(
    server: Server, steps: Steps, dialects: tuple[str, ...], autojump_clock: MockClock
) -> None:
    joined: list[Joined] = []

    async def join_first(client: Client, ticket: Ticket) -> None:
        joined.append(await client.join(ticket))

    async with (
        at_home(server) as memory,
        Client(memory.connect, dialects=dialects) as client,
        trio.open_nursery() as nursery,
    ):
        for is_its_own in (False, True):
            ticket = await left(client) if is_its_own else await begun(memory)
            async with leaving_nothing(client):
                nursery.start_soon(join_first, client, ticket)
                await wait_all_tasks_blocked()
                with pytest.raises(StreamGone) as caught:
                    await client.join(ticket)
                assert caught.value.reason == "id_in_use"
                steps.finish()
                await wait_all_tasks_blocked()
    assert [text_of(each) for each in joined] == ["done", "done"]


async def test_a_call_that_is_being_read_is_not_joined_by_its_client(
    autojump_clock: MockClock,
) -> None:
    server = counting()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        assert said(await anext(call)) == "a"
        assert call.ticket is not None
        with pytest.raises(StreamGone) as caught:
            await client.join(call.ticket)
        assert caught.value.reason == "id_in_use"
        step.say("b", None)
        assert await rest_of(call) == ["b"]
